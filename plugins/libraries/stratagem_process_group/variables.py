"""Set the environment variables of NCCL and gloo that a strategy's options ask for, and unset them after the run.

[Note: read once]
A communication library reads most of its variables once in the life of a process, when it first needs them, and keeps
what it read. So a value that comes after the first process group has no effect, whatever the environment says: it is
refused. The exceptions are a library's `reread` options.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import frozen

from stratagem.distributed.default_group import with_gloo
from stratagem.errors import ConfigError
from stratagem_process_group.gloo import GLOO
from stratagem_process_group.libraries import LIBRARIES
from stratagem_process_group.nccl import NCCL
from stratagem_process_group.rules import Library

if TYPE_CHECKING:
    from stratagem.api import RunContext, Strategy


@frozen(kw_only=True)
class _Setting:
    """A variable that an option of a strategy sets."""

    path: str
    option: str
    value: Any
    library: Library

    @property
    def variable(self) -> str:
        return self.library.variable(self.option)

    @property
    def origin(self) -> str:
        return f"{self.path}.{self.option}"

    def __str__(self) -> str:
        return f"{self.origin} is {self.value!r}"

    @property
    def text(self) -> str:
        return str(int(self.value)) if isinstance(self.value, bool) else str(self.value)


#: The variables that each connected run has set: those that were not set before.
_set: weakref.WeakKeyDictionary[RunContext, list[str]] = weakref.WeakKeyDictionary()
#: The option that each variable comes from, of those that are set.
_origins: dict[str, str] = {}
#: The values that a library found when it first read them in this process; see [Note: read once].
_first: dict[str, dict[str, str | None]] = {}


@contextlib.contextmanager
def variables_set(strategy: Strategy, run: RunContext, backend: str) -> Iterator[None]:
    """Set the variables that the options `nccl` and `gloo` of `strategy` ask for; connect over `backend` within.

    The variables stay until `unset_variables`; if connecting fails, they are unset at once.

    Raises:
        ConfigError: a value would have no effect, or contradicts the environment.
    """
    backend = with_gloo(backend, run.device)
    settings = _settings(strategy, run)
    for setting in settings:
        _check_effect(setting, backend)
    new = {setting.variable: setting for setting in settings if setting.variable not in os.environ}
    _set[run] = list(new)
    for name, setting in new.items():
        os.environ[name], _origins[name] = setting.text, setting.origin
    try:
        yield
    except BaseException:
        unset_variables(run)
        raise
    _record_first_values(backend)


def unset_variables(run: RunContext) -> None:
    """Unset the variables that `run` set. May be called twice."""
    for name in _set.pop(run, []):
        os.environ.pop(name, None)
        _origins.pop(name, None)


def _settings(strategy: Strategy, run: RunContext) -> list[_Setting]:
    name = run.name_of(strategy)
    return [
        _Setting(path=f"strategy.{name}.{library.name}", option=option, value=value, library=library)
        for library in LIBRARIES
        for option, value in (getattr(strategy, library.name) or {}).items()
    ]


def _check_effect(setting: _Setting, backend: str) -> None:
    """Refuse a value that no library would read, or that another one contradicts."""
    # gloo's have an effect beside other backends, too: objects and decisions are sent over it.
    if setting.library is NCCL and NCCL.name not in backend:
        raise ConfigError(
            f"{setting.path} is set and the process group's backend is {backend!r}", expected="NCCL",
            do="drop it, or train on CUDA devices",
        )  # fmt: skip
    if (releases := setting.library.too_old_for(setting.option)) is not None:
        raise ConfigError(
            f"{setting} and {setting.library.title} is of release {releases[0]}, which does not read it",
            expected=f"{releases[1]} or later", do="drop it, or install a torch that comes with a later release",
        )  # fmt: skip
    _check_environment(setting)
    _check_first_value(setting)
    if setting.option == "socket_ifname":
        _check_interfaces(setting)


def _check_environment(setting: _Setting) -> None:
    import torch.distributed as dist

    name, found = setting.variable, os.environ.get(setting.variable)
    if found is None and dist.is_available() and dist.is_initialized():
        raise ConfigError(
            f"{setting} and this process already belongs to a process group", expected="none yet",
            do="close the earlier run first (trainer.close())",
        )  # fmt: skip
    if found is not None and found != setting.text:
        where = f"by {_origins[name]} of a run that is still open" if name in _origins else "in the environment"
        raise ConfigError(
            f"{setting} and {name} was set to {found!r} {where}", expected="one value", do="drop one of the two"
        )


def _check_first_value(setting: _Setting) -> None:
    first = _first.get(setting.library.name)
    if first is None or setting.option in setting.library.reread or first.get(setting.variable) == setting.text:
        return
    read = first.get(setting.variable)
    then = "there was none" if read is None else f"it was {read!r}"
    raise ConfigError(
        f"{setting} and {then} when this process first connected, which "
        f"{setting.library.title} goes by",
        expected="the same value", do="give it from the first run on, or start a new process",
    )  # fmt: skip


def _check_interfaces(setting: _Setting) -> None:
    """Refuse names of network interfaces that this machine does not have: the library would fail, or wait."""
    here = [name for _, name in socket.if_nameindex()]
    excludes = setting.library is NCCL and setting.text.startswith("^")
    wanted = [name.strip() for name in setting.text.removeprefix("=").split(",")]
    fits = str.startswith if setting.library is NCCL and not setting.text.startswith("=") else str.__eq__
    missing = [name for name in wanted if not any(fits(each, name) for each in here)]
    # NCCL's are patterns, of which one has to fit; gloo's are names.
    if not excludes and missing and (setting.library is GLOO or len(missing) == len(wanted)):
        raise ConfigError(
            f"{setting} and {socket.gethostname()} has the network interfaces {', '.join(here)}",
            expected="one of those",
        )


def _record_first_values(backend: str) -> None:
    """Record what the libraries of `backend` have read, if they had not read it before."""
    for library in LIBRARIES:
        if library.name in backend and library.name not in _first:
            variables = map(library.variable, library.rules)
            asked = (name for name in _origins if name.startswith(library.prefix))
            _first[library.name] = {name: os.environ.get(name) for name in (*variables, *asked)}
