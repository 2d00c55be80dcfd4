"""`hookspec` and `hookimpl`: what marks a function as a hook's specification or implementation."""

from __future__ import annotations

from typing import Final

import pluggy

hookspec: Final = pluggy.HookspecMarker("stratagem")

hookimpl: Final = pluggy.HookimplMarker("stratagem")
