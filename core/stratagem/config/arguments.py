"""Constructors with every argument in their signature, which know the arguments that were given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stratagem.config.moved_names import moved_argument
from stratagem.distributed.torchrun_errors import end_with_sentence
from stratagem.errors import ConfigError, nearest

if TYPE_CHECKING:
    from typing import TypeAlias

    from stratagem.config.sources import Source

    T = TypeVar("T")
    #: A plugin: its name, a mapping with its ``name`` and options, or an instance.
    NameOr: TypeAlias = str | Mapping[str, Any] | T

C = TypeVar("C", bound=Callable[..., None])


def remember_arguments(init: C) -> C:
    """Let ``__init__`` tell an argument that was given from one that has its default value.

    While it runs, the arguments that were given are in ``self._given``. Besides its own arguments it takes ``sources``,
    which are in ``self._sources``: editors do not show it.

    Raises:
        ConfigError: on a call, an argument that ``__init__`` does not have.
    """
    known = [name for name in inspect.signature(init).parameters if name != "self"]
    owner = init.__qualname__.partition(".")[0]

    @functools.wraps(init)
    def wrapper(self: Any, *values: Any, sources: Sequence[Source] = (), **arguments: Any) -> None:
        end_with_sentence()
        for name in arguments:
            if name not in known:
                raise ConfigError(
                    f"{owner} has no argument {name!r}", expected="one of its arguments",
                    do=moved_argument(name) or nearest(name, known) or f"see help(stratagem.{owner})",
                )  # fmt: skip
        self._given, self._sources = arguments, sources
        init(self, *values, **arguments)
        del self._given, self._sources

    return cast(C, wrapper)
