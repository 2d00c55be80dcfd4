"""Validators for the options `nccl` and `gloo` of a strategy: what is wrong is refused before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stratagem.errors import ConfigError, nearest
from stratagem_process_group.gloo import GLOO
from stratagem_process_group.nccl import NCCL
from stratagem_process_group.rules import ANYTHING, Library

#: Sockets that NCCL opens at most for one connection.
_MAX_SOCKETS: Final = 64


def nccl_options(instance: Any, attribute: Any, value: Any) -> None:
    """Accept a mapping from NCCL's options to values that they take; the validator of a field."""
    path = f"{type(instance).__name__}.{attribute.name}"
    _check_options(NCCL, path, value)
    if isinstance(value, Mapping):
        _check_limits(path, value)


def gloo_options(instance: Any, attribute: Any, value: Any) -> None:
    """Accept a mapping from gloo's options to values that they take; the validator of a field."""
    _check_options(GLOO, f"{type(instance).__name__}.{attribute.name}", value)


def hint_for(library: Library, option: str) -> str:
    """Return what to do about an option that does not exist; an empty string if that is not known."""
    if option in library.instead:
        return library.instead[option]
    if library.reads(option):
        return f"did you mean {option!r}"
    return nearest(option, library.rules)


def _check_options(library: Library, path: str, options: Any) -> None:
    if not isinstance(options, Mapping):
        return  # None, or a value that the type check refuses
    for option, value in options.items():
        if not isinstance(option, str) or not library.reads(option):
            raise _unknown(library, path, str(option))
        rule = library.rules.get(option, ANYTHING)
        if not rule.holds(value):
            raise ConfigError(f"{path}.{option} is {value!r}", expected=rule.expected)


def _unknown(library: Library, path: str, option: str) -> ConfigError:
    return ConfigError(
        f"{path}.{option} is unknown",
        expected=f"a variable of {library.title}, in lower case and without {library.prefix}",
        do=hint_for(library, option.lower().removeprefix(library.prefix.lower())) or "see docs/tuning.md",
    )


def _check_limits(path: str, options: Mapping[str, Any]) -> None:
    """Refuse NCCL options that contradict each other."""
    low, high = options.get("min_nchannels"), options.get("max_nchannels")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{path}.min_nchannels is {low}", expected=f"at most max_nchannels, which is {high}")
    threads, sockets = options.get("socket_nthreads", 1), options.get("nsocks_perthread", 1)
    if threads * sockets > _MAX_SOCKETS:
        raise ConfigError(
            f"{path} asks for {threads} socket_nthreads of {sockets} nsocks_perthread",
            expected=f"a product of at most {_MAX_SOCKETS}, NCCL's limit for a connection",
        )
