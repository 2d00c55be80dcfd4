"""Keep secrets out of what is shown and written: by the name of a value, and by what it looks like."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<redacted>"

_SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(token|key|keys|apikey|secret|secrets|password|passwd|passphrase|credential|credentials|auth)(?:$|[_\-.])",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):([^/\s@]+)(?=@)")


def redact(name: str, value: Any) -> Any:
    """Return `value`, or what may be shown of it.

    A value whose name has a part such as ``token``, ``key`` or ``password`` is replaced unless it is empty or a number
    or flag; in any other text the password of a URL is. Containers are looked into.
    """
    if isinstance(value, dict):
        return {key: redact(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([redact(name, item) for item in value])
    if not isinstance(value, str):
        return value
    if value and _SECRET_NAME.search(name):
        return REDACTED
    return _URL_PASSWORD.sub(rf"\1:{REDACTED}", value)
