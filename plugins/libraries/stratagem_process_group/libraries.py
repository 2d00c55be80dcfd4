"""The communication libraries whose variables a strategy may set."""

from __future__ import annotations

from typing import Final

from stratagem_process_group.gloo import GLOO
from stratagem_process_group.nccl import NCCL

LIBRARIES: Final = (NCCL, GLOO)
