"""What the argument `compile` means: options of the callback that compiles."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from stratagem.errors import ConfigError, shown


def compile_options(value: Any) -> dict[str, Any] | None:
    """Return the options of the callback that ``compile=value`` adds; None if it adds none.

    Raises:
        ConfigError: it is neither a switch, a mode nor a mapping of options.
    """
    switches = {"true": True, "false": False, "none": None}
    if isinstance(value, str) and value.strip().startswith("{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, str):
        value = switches.get(value.strip().lower(), value)  # from a command line or the environment
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if isinstance(value, str):
        return {"mode": value}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return dict(value)
    raise ConfigError(
        f"compile is {shown(value)}", expected="true or false, a mode, or a mapping of options",
        do='write compile=True, compile="max-autotune" or compile={"dynamic": True}',
    )  # fmt: skip
