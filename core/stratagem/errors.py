"""Every error a user can meet: one sentence that says what was found, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StratagemError(Exception):
    """Base of all errors raised on purpose by stratagem or a plugin.

    ``found`` states the fact, ``expected`` completes "expected ...", ``do`` is the next move. The three are kept as
    attributes for programs; ``str(error)`` is the sentence for people.
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
    """A plugin that is missing, broken, clashing, or that breaks the hook contract."""


class LaunchError(StratagemError, RuntimeError):
    """Processes that could not be started, or that died."""


class PeerError(LaunchError):
    """What another rank died of, where this rank only noticed a broken connection."""


class CheckpointError(StratagemError):
    """A checkpoint that cannot be written, found, verified or applied."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'"`` for the known name closest to `name`, or an empty string."""
    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f"did you mean {lowered[close[0]]!r}" if close else ""


def _rebuild(cls: type[StratagemError], found: str, expected: str, do: str) -> StratagemError:
    return cls(found, expected=expected, do=do)
