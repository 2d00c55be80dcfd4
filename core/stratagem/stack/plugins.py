"""The resolved plugins of a run: `Choice` is one of them, `Stack` is all. The hooks that exist, and a plugin's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field, frozen

from stratagem.api import hooks, other_hooks
from stratagem.api.kinds import Plugin, PrecisionPolicy, Strategy
from stratagem.api.run_parts import DEFAULT_TIMEOUT, LEAST_START, NCCL_TIMEOUT, Timeouts
from stratagem.discovery import registry
from stratagem.errors import ConfigError


@frozen(eq=False, kw_only=True)
class Choice:
    """One plugin of the stack, and why it was chosen."""

    kind: str
    #: The name that users type; the class name for an instance that no entry point names.
    name: str
    plugin: Any
    #: Why it was chosen: "asked for", "the default for one process", "RANK is set" ...
    reason: str
    entry: registry.Entry | None = None
    #: The options that were set, each with its origin ("code", "file run.yaml", ...).
    origins: Mapping[str, str] = field(factory=dict)

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


@define(eq=False, repr=False, kw_only=True)
class Stack:
    """The resolved plugins of a run, in the order in which they act."""

    strategies: list[Choice]
    precision: Choice
    environment: Choice
    launcher: Choice
    accelerator: Choice
    checkpoint: Choice
    callbacks: list[Choice]
    loggers: list[Choice]
    others: list[Choice]
    #: Callbacks of every run, where they are installed.
    automatic: list[Choice]
    #: Device numbers of this node's processes: one for each process, or all of them for the only process.
    devices: tuple[int, ...]
    #: Whether the user set `devices` to anything but "auto".
    devices_given: bool
    #: How many nodes have processes: what the environment found, else ``num_nodes=``.
    num_nodes: int
    policy: PrecisionPolicy
    #: Whether the strategy applies the precision itself: the hooks of the precision are then not called.
    precision_absorbed: bool
    #: All but callbacks and loggers, in the order of their kinds.
    _in_order: list[Choice] = field(init=False)

    @_in_order.default
    def _by_place(self) -> list[Choice]:
        single = (self.precision, self.environment, self.launcher, self.accelerator, self.checkpoint)
        places = {kind.name: kind.place for kind in registry.kinds().values()}
        # An object of no kind acts after those of the engine's kinds.
        return sorted([*self.strategies, *single, *self.others], key=lambda choice: places.get(choice.kind, 75))

    @property
    def strategy(self) -> Strategy:
        """The innermost strategy, which answers the hooks."""
        strategy: Strategy = self.strategies[-1].plugin
        return strategy

    def timeouts(self) -> Timeouts:
        """How long a rank waits for the others: as the outermost strategy with a timeout says, else the backend's."""
        starts, collectives = zip(*(choice.plugin.timeouts() for choice in self.strategies), strict=True)
        default = NCCL_TIMEOUT if "nccl" in self.accelerator.plugin.backend else DEFAULT_TIMEOUT
        collective = next(filter(None, collectives), default)
        return Timeouts(next(filter(None, starts), max(collective, LEAST_START)), collective)

    @property
    def num_processes(self) -> int:
        """The number of processes on this node."""
        return len(self.devices) if self.strategy.process_per_device else 1

    def devices_of(self, local_rank: int) -> tuple[int, ...]:
        """The device numbers of one process of this node.

        Raises:
            ConfigError: there are fewer devices than processes.
        """
        if not self.strategy.process_per_device:
            return self.devices
        if local_rank >= len(self.devices):
            raise ConfigError(
                f"{self.environment} gave this process the local rank {local_rank}, and the run has "
                f"{len(self.devices)} devices on this node",
                expected="one device for each process", do="start as many processes on each node as devices",
            )  # fmt: skip
        return self.devices[local_rank : local_rank + 1]

    def choices(self) -> list[Choice]:
        """All plugins, in order."""
        return [*self._in_order, *self.callbacks, *self.loggers, *self.automatic]

    def of(self, kind: str) -> list[Choice]:
        """The plugins of `kind`, in order."""
        return [choice for choice in self.choices() if choice.kind == kind]

    def preload(self) -> None:
        """Call `preload` of all plugins, so that forks of this process need not import the same modules again."""
        device_type = self.accelerator.plugin.device(0).type
        for choice in self.choices():
            if isinstance(choice.plugin, Plugin):
                choice.plugin.preload(device_type)

    def written_files(self) -> dict[str, str]:
        """Return the paths of what plugins have written in this run, by title, as `Plugin.written_files` tells."""
        plugins = [choice.plugin for choice in self.active() if isinstance(choice.plugin, Plugin)]
        return {title: path for plugin in plugins for title, path in plugin.written_files().items()}

    def active(self) -> list[Choice]:
        """The plugins whose hooks are registered."""
        return [choice for choice in self.choices() if not (self.precision_absorbed and choice is self.precision)]


# --- Hooks -------------------------------------------------------------------------------------------------------


def hook_implementations(plugin: Any, *, of_class: bool = False) -> dict[str, dict[str, Any]]:
    """Return the methods of `plugin` (or, with `of_class`, of a class) with ``@hookimpl``: its options by hook name."""
    if isinstance(plugin, type) and not of_class:
        return {}
    cls = plugin if of_class else type(plugin)
    found = {}
    for name in dir(cls):
        marker = getattr(getattr(cls, name, None), "stratagem_impl", None)
        if isinstance(marker, dict):
            found[name] = marker
    return found


def hook_modules() -> list[Any]:
    """Return the modules with specifications: those of `stratagem.api`, and those of installed kinds."""
    return [other_hooks, hooks, *(kind.hooks for kind in registry.kinds().values() if kind.hooks is not None)]


def hook_functions() -> Mapping[str, Callable[..., Any]]:
    """Return the function that specifies each hook, by name."""
    return _functions_in(*hook_modules())


@functools.cache
def _functions_in(*modules: Any) -> Mapping[str, Callable[..., Any]]:
    return {name: function for module in modules for name, function in registry.hooks_in(module).items()}


def hook_specifications() -> dict[str, dict[str, Any]]:
    """Return every hook by name, with its options."""
    return {name: value.stratagem_spec for name, value in hook_functions().items()}  # type: ignore[attr-defined]
