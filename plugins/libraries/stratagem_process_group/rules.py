"""What a communication library reads from the environment, as data: its options and the values that they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import field, frozen


@frozen
class Rule:
    """The values that an option takes."""

    #: For people.
    expected: str
    holds: Callable[[Any], bool]


@frozen(kw_only=True)
class Library:
    """A communication library, and what it reads from the environment."""

    #: Of the option of a strategy that holds its variables, and of torch.distributed's backend.
    name: str
    #: As people write it.
    title: str
    prefix: str
    #: The values that each option takes; an option is its variable in lower case, without the prefix.
    rules: Mapping[str, Rule]
    #: Variables whose names do not follow the pattern, by option.
    named: Mapping[str, str] = field(factory=dict)
    #: Options that are read for every process group; see [Note: read once] in `variables`.
    reread: frozenset[str] = frozenset()
    #: What to do instead of setting an option that sounds right and does not exist.
    instead: Mapping[str, str] = field(factory=dict)
    #: The first release that reads an option, of those that are younger than the oldest one in use.
    since: Mapping[str, tuple[int, ...]] = field(factory=dict)
    #: Return the release that this process uses; None if it has none.
    installed: Callable[[], tuple[int, ...] | None] = lambda: None

    def variable(self, option: str) -> str:
        """Return the name of the variable that `option` sets."""
        return self.named.get(option, self.prefix + option.upper())

    def reads(self, option: str) -> bool:
        """Whether some release of the library reads `option`."""
        return option in self.rules or option in self.since

    def too_old_for(self, option: str) -> tuple[str, str] | None:
        """Return the release that is installed and the first that reads `option`; None if the installed one may."""
        since, installed = self.since.get(option), self.installed() if option in self.since else None
        if since is None or installed is None or installed >= since:
            return None
        return ".".join(map(str, installed)), ".".join(map(str, since))


# --- Rules -------------------------------------------------------------------------------------------------------


def one_of(*values: Any) -> Rule:
    return Rule(" or ".join(map(repr, values)), lambda value: type(value) in (str, int) and value in values)


def integer(low: int, high: int) -> Rule:
    return Rule(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def same_rule(names: str, rule: Rule) -> dict[str, Rule]:
    """Return `rule` for each of `names`, which spaces separate."""
    return dict.fromkeys(words(names), rule)


ANY_INTEGER: Final = Rule("a whole number", lambda value: type(value) is int)
TEXT: Final = Rule("text", lambda value: isinstance(value, str) and value.strip() != "")
SWITCH: Final = Rule("true or false", lambda value: isinstance(value, bool) or (type(value) is int and value in (0, 1)))
ANYTHING: Final = Rule(
    "text, a number, or true or false", lambda value: isinstance(value, bool | int) or TEXT.holds(value)
)

#: What to do instead of setting a timeout of the library's.
TIMEOUT_HINT: Final = "how long ranks wait for each other is the strategy's option `timeout`"
