"""Constructors with every argument in their signature, which know the arguments that were given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stratagem.config.settings import RunSettings, added_arguments
from stratagem.discovery.moved_names import moved_argument
from stratagem.distributed.torchrun_errors import end_with_sentence
from stratagem.errors import ConfigError, nearest

if TYPE_CHECKING:
    from typing import TypeAlias

    from stratagem.config.sources import Source

    T = TypeVar("T")
    #: A plugin: its name, a mapping with its ``name`` and options, or an instance.
    NameOr: TypeAlias = str | Mapping[str, Any] | T

C = TypeVar("C", bound=Callable[..., None])


def remember_arguments(settings: type[RunSettings]) -> Callable[[C], C]:
    """Let ``__init__`` tell an argument that was given from one that has its default value.

    While it runs, the arguments that were given are in ``self._given``. Besides its own arguments it takes ``sources``,
    which are in ``self._sources``, and the arguments of kinds that other packages add: editors do not show these.

    Args:
        settings: the class whose fields the arguments are.

    Raises:
        ConfigError: on a call, an argument that ``__init__`` does not have.
    """

    def decorate(init: C) -> C:
        known = [name for name in inspect.signature(init).parameters if name != "self"]
        owner = init.__qualname__.partition(".")[0]

        @functools.wraps(init)
        def wrapper(self: Any, *values: Any, sources: Sequence[Source] = (), **arguments: Any) -> None:
            end_with_sentence()
            others = {name: arguments.pop(name) for name in [*arguments] if name not in known}
            added = added_arguments(settings) if others else []
            for name in others:
                if name not in added:
                    raise ConfigError(
                        f"{owner} has no argument {name!r}", expected="one of its arguments",
                        do=moved_argument(name) or nearest(name, [*known, *added]) or f"see help(stratagem.{owner})",
                    )  # fmt: skip
            self._given, self._sources = arguments | others, sources
            init(self, *values, **arguments)
            del self._given, self._sources

        return cast(C, wrapper)

    return decorate
