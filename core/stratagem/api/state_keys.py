"""The part of a plugin's state key that distinguishes plugins of the same class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stratagem.api.options import options
from stratagem.api.redaction import redact


def options_key(plugin: Any) -> str:
    """Return the options of `plugin` that differ from their defaults, as " " and JSON; "" if there are none."""
    changed = {}
    for name, option in options(type(plugin)).items():
        value = getattr(plugin, option.name, None)
        if isinstance(value, Path):
            value = str(value)
        if (value is None or isinstance(value, bool | int | float | str)) and value != option.default:
            changed[name] = redact(name, value)
    return f" {json.dumps(changed, sort_keys=True)}" if changed else ""
