"""The exceptions of stratagem, which say what was found, what was expected and what to do; those that a peer caused."""

from __future__ import annotations

import dis
import enum
import functools
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import PurePath
from typing import Any


class StratagemError(Exception):
    """Base class of all errors that stratagem or a plugin raises on purpose.

    ``found`` states the fact, ``expected`` completes "expected ...", ``do`` says what to do, in the imperative.
    All three are attributes for programs; ``str(error)`` is the sentence for people.
    """

    def __init__(self, found: str, *, expected: str = "", do: str = "") -> None:
        self.found, self.expected, self.do = found, expected, do
        parts = [found, f"expected {expected}" if expected else "", do]
        super().__init__("; ".join(part for part in parts if part).rstrip(".") + ".")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.found, self.expected, self.do))


class ConfigError(StratagemError, ValueError):
    """An option, an argument or a combination of plugins that cannot work."""


class PluginError(StratagemError):
    """A plugin that is missing, broken or ambiguous, or that violates the specification of a hook."""


class LaunchError(StratagemError, RuntimeError):
    """Processes that could not be started, or that ended with an error."""


class PeerError(LaunchError):
    """The error of another rank, raised on a rank that only noticed a broken connection."""


class CheckpointError(StratagemError):
    """A checkpoint that cannot be written, found, verified or applied."""


#: Parts of messages of gloo, NCCL and the store about a lost peer. Whole words, so that "restore" does not match.
_ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|\bsocket|remote process exited|timed out waiting"
    r"|application timeout|operation timeout|\b(work)?nccl|recvvalue failed|\b(tcp|file|hash|prefix)?store\b"
)


def is_echo(error: BaseException) -> bool:
    """Whether `error` comes from a collective that failed because another process failed.

    gloo and the store raise a plain RuntimeError from C++. A RuntimeError that Python code outside torch.distributed
    and stratagem raised is never such an error, whatever its message. Nor is any OSError, such as a data loader's.
    """
    if isinstance(error, OSError):
        return False
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if kinds & {"PeerError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    return type(error) is RuntimeError and _ECHO.search(str(error).lower()) is not None and not _is_users(error)


def _is_users(error: BaseException) -> bool:
    """Whether a ``raise`` statement outside torch.distributed and stratagem raised `error`."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "")
    raised = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and not re.match(r"(torch\.distributed|stratagem\w*)(\.|$)", module)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'"`` for the known name closest to `name`, or an empty string.

    First those that a mistake in typing leads to, then those that contain `name` or are most of it, then the most
    similar one. Up to three that are equally close are all listed.
    """
    import difflib

    lowered = {str(candidate).lower(): str(candidate) for candidate in known}
    wanted = str(name).lower()
    close = _mistyped(wanted, lowered) or _containing(wanted, lowered)
    if not 0 < len(close) <= _MOST_HINTS:
        close = difflib.get_close_matches(wanted, lowered, n=1, cutoff=0.6)
    return f"did you mean {' or '.join(repr(lowered[each]) for each in close)}" if close else ""


def mistyped(name: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'"`` if `name` is a known name with a mistake in typing, or an empty string."""
    close = _mistyped(name, known)[:_MOST_HINTS]
    return f"did you mean {' or '.join(map(repr, close))}" if close else ""


#: How many names a hint has at most.
_MOST_HINTS = 3


def _mistyped(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names with the fewest letters changed, added, left out or swapped: one in five, at least one."""
    most = 0 if len(name) < 3 else max(1, len(name) // 5)
    distances = {other: _distance(name, other) for other in known if abs(len(other) - len(name)) <= most}
    least = min(distances.values(), default=most + 1)
    return [other for other, distance in distances.items() if distance == least <= most]


def _containing(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that begin with `name`, else that have it as words, else that are most of it."""
    candidates = list(known)
    if len(name) < 3:
        return []
    return (
        [other for other in candidates if other.startswith(name)]
        or [other for other in candidates if f"_{name}_" in f"_{other}_".replace("-", "_")]
        or [other for other in candidates if other in name and len(other) >= 0.6 * len(name)]
    )


def _distance(one: str, other: str) -> int:
    """Return about how many letters must be changed, added, left out or swapped to turn one into other."""
    import difflib

    same = difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    return max(len(one), len(other)) - sum(block.size for block in same)


def with_article(cls: type[Any]) -> str:
    """Return the name of a class with its article: "a Tensor", "an int"."""
    return f"{'an' if cls.__name__[:1] in 'aeiou' else 'a'} {cls.__name__}"


def shown(value: Any, limit: int | None = 80) -> str:
    """Return `value` as text for messages: as a user would write it, without memory addresses, at most `limit` long."""
    try:
        text = _in_words(value)
    except Exception:  # noqa: BLE001 - a class whose objects cannot be shown, an integer of too many digits
        text = f"an object of the class {type(value).__name__}"
    return text if limit is None or len(text) <= limit else text[: limit - 3] + "..."


def _in_words(value: Any) -> str:
    import inspect  # with difflib a third of the time that importing this module would take

    if isinstance(value, enum.Enum):
        return _in_words(value.value)
    if isinstance(value, PurePath):
        return repr(str(value))
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, functools.partial):
        return f"{_in_words(value.func)} with some arguments"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', 'without a name')}"
    if isinstance(value, Mapping) and type(value).__repr__ is dict.__repr__:
        return "{" + ", ".join(f"{_in_words(key)}: {_in_words(item)}" for key, item in value.items()) + "}"
    if value and type(value) in (list, tuple, set, frozenset):
        first, last = "[]" if type(value) is list else "()" if type(value) is tuple else "{}"
        comma = "," if type(value) is tuple and len(value) == 1 else ""
        return first + ", ".join(map(_in_words, value)) + comma + last
    text = " ".join(repr(value).split())
    return f"an object of the class {type(value).__name__}" if " at 0x" in text else text


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], one_name: str, other_name: str, ignored: set[str] | None = None
) -> str:
    """Return the first differences in words; an empty string if there are none."""
    missing = "(not set)"
    names = [
        name
        for name in sorted({**one, **other})
        if not _same(one.get(name, missing), other.get(name, missing))
        and name.partition(".")[0].partition("#")[0] not in (ignored or ())
    ]
    # Where two plugins differ, so do their options.
    names = [name for name in names if not any(name.startswith(f"{plugin}.") for plugin in names)]
    parts = [f"{n} is {one.get(n, missing)!r} {one_name} and {other.get(n, missing)!r} {other_name}" for n in names[:3]]
    return "; ".join(parts) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


def _same(one: Any, other: Any) -> bool:
    import json

    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # NaN is itself, a tuple is a list


def _rebuild(cls: type[StratagemError], found: str, expected: str, do: str) -> StratagemError:
    return cls(found, expected=expected, do=do)
