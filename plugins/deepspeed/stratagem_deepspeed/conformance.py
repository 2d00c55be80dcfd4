"""What the conformance kit needs to know of this format: ``stratagem plugins check NAME`` reads it."""

from __future__ import annotations

from typing import ClassVar

from stratagem_testing import Conformance


class DeepSpeedFormatConformance(Conformance):
    """What holds for plugins of all kinds: DeepSpeed's engine writes the files, and reads them on as many ranks."""

    kind = "checkpoint"
    arguments: ClassVar = {"strategy": "deepspeed_stage_1"}
