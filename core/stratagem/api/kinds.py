"""The base class of each kind of plugin.

A plugin is one attrs class decorated with ``@define(eq=False, kw_only=True)``: its fields are the options that a user
sets, its ``@hookimpl`` methods implement hooks (`stratagem.api.hooks`), its ``capabilities`` state what it provides and
requires. A package declares it in the entry-point group of its kind.

The resolver calls the plain methods of the bases below *before any process starts*: they may read only options.
"""

from __future__ import annotations

import argparse
import enum
import inspect
from abc import ABCMeta
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from attrs import define, field, fields, frozen

from stratagem.api.capabilities import Capabilities
from stratagem.api.paths import modified_at
from stratagem.api.world import Mesh, World
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from stratagem.api.world import Collectives

# --- What all plugins have in common -----------------------------------------------------------------------------


def _state(plugin: Any) -> dict[str, Any]:
    names = [each.name for each in fields(type(plugin)) if hasattr(plugin, each.name)]
    return {name: getattr(plugin, name) for name in names} | getattr(plugin, "__dict__", {})


def _set_state(plugin: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        object.__setattr__(plugin, name, value)  # attrs would validate it


def _attrs_makes(cls: type) -> bool:
    """Whether attrs has written the constructor of `cls`, rather than its author."""
    owner = next(each for each in cls.__mro__ if "__init__" in vars(each))
    return "__attrs_attrs__" in vars(owner)


class PluginType(ABCMeta):
    """Makes the constructor of every plugin raise the same errors for wrong options as a mapping of options.

    It derives from ABCMeta so that a plugin can inherit an abstract class too.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        """Make copies and pickles include attributes that are not attrs fields, as a subclass with `__init__` has."""
        namespace.setdefault("__getstate__", _state)
        namespace.setdefault("__setstate__", _set_state)
        return super().__new__(mcs, name, bases, namespace, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What notebooks and `help` show: the options, those of `positional` first."""
        first = getattr(cls, "positional", ()) if _attrs_makes(cls) else ()
        init = inspect.signature(cls.__init__)  # type: ignore[misc]
        parameters = {each.name: each for each in [*init.parameters.values()][1:]}
        ordered = [parameters[name].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in first]
        return inspect.Signature([*ordered, *(each for name, each in parameters.items() if name not in first)])

    def __call__(cls, *values: Any, **options: Any) -> Any:
        names = getattr(cls, "positional", ())
        if 0 < len(values) <= len(names) and not options.keys() & set(names[: len(values)]) and _attrs_makes(cls):
            values, options = (), dict(zip(names, values, strict=False)) | options
        try:
            return super().__call__(*values, **options)
        except TypeError as error:
            from stratagem.api.options import explain_call

            if explained := explain_call(cls, values, options):
                raise explained from None
            raise error


# --- One base for each kind --------------------------------------------------------------------------------------


@define(eq=False, repr=False, kw_only=True)
class Plugin(metaclass=PluginType):
    """Base of every kind.

    A plugin with state for checkpoints defines ``state_dict()`` and ``load_state_dict(state)``: rank 0's is stored. One
    whose state differs between ranks defines ``rank_state(run)``, and ``load_rank_states(states, run)``, which gets the
    states of all ranks that saved, in rank order, in as many processes as there are now. Either is saved under
    `state_key`.
    """

    #: The kind's name; set by the bases below.
    kind: ClassVar[str] = "plugin"
    #: What it provides and requires; a property if that depends on options.
    capabilities: ClassVar[Capabilities] = Capabilities()
    #: Options that may be given without their names, in this order.
    positional: ClassVar[tuple[str, ...]] = ()
    #: It replaces layers of the module: a run has one such plugin at most, and what it prepared is not trained without
    #: it.
    replaces_layers: ClassVar[bool] = False
    #: A run may have several of one class: `state_key` then contains the options that are not at their defaults.
    identified_by_options: ClassVar[bool] = False

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints store; nothing unless overridden."""
        return {}

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        """(state): restore what `state_dict` returned."""

    @property
    def state_key(self) -> str | None:
        """The name under which its state is saved; the same for every name, preset and instance of it.

        None is the class that defines the state, as ``module:Class``. Override it to read what another class saved.
        """
        return None

    def written_files(self) -> dict[str, str]:
        """Return the paths of what it has written in this run, by a title such as "metrics"; asked on rank 0.

        The last lines of a fit show those that exist.
        """
        return {}

    def preload(self, device_type: str) -> None:
        """Import modules that a run on such devices ("cpu", "cuda") imports lazily; called before a launcher forks.

        It must not initialize a device: a forked process could not use it.
        """


def keeps_state(plugin: Any, method: str = "state_dict") -> bool:
    """Whether `plugin` defines `method`, rather than inheriting that of `Plugin`, which does nothing."""
    own = getattr(plugin, method, None)
    return callable(own) and getattr(type(plugin), method, None) is not getattr(Plugin, method, None)


@define(eq=False, repr=False, kw_only=True)
class Strategy(Plugin):
    """Distributes the model over processes, and runs its optimizer steps. Must answer `wrap_model`."""

    kind: ClassVar[str] = "strategy"
    #: One process per device of a node. False: one process uses all of them (``run.devices``).
    process_per_device: ClassVar[bool] = True
    #: It wraps another strategy, which comes after it: ``strategy=["mine", "another"]``.
    outer: ClassVar[bool] = False

    def default_launcher(self) -> str | None:
        """Return the launcher to use if the user sets none; None leaves it to the catalog."""
        return None

    def default_checkpoint(self) -> str | None:
        """Return the checkpoint format that this strategy requires; None accepts any."""
        return None

    def default_plugins(self, kind: str) -> list[Any]:
        """Return the plugins of `kind` that options of this strategy choose, as a user would pass them.

        Asked for each kind that another package than the engine adds, such as "comm_hook".
        """
        return []

    def how_to_provide(self, word: str) -> str:
        """Return what to set for this strategy to provide `word`, as the end of a message; "" if nothing does."""
        return ""

    def how_to_avoid(self, word: str) -> str:
        """Return what to do where another plugin provides `word`, which this strategy conflicts with, for a message."""
        return ""

    def makes_optimizer(self) -> bool:
        """Whether its options define the optimizer, so that the module need not."""
        return False

    def hook_context(self) -> AbstractContextManager[Any] | None:
        """Return what hooks of modules and callbacks run within, but not steps; None for nothing. Asked once a hook."""
        return None

    def absorbs(self, policy: PrecisionPolicy) -> bool:
        """Whether this strategy applies `policy` itself; the precision's own hooks are then not called."""
        return False

    def timeouts(self) -> tuple[timedelta | None, timedelta | None]:
        """Return how long a rank waits for the others to connect, and in a collective; None: as the backend says."""
        return None, None

    def may_share_device(self) -> bool:
        """Whether several ranks may use one device; otherwise that is refused as a mistake."""
        return False

    def mesh(self, world: World) -> Mesh:
        """Return how this strategy arranges the processes; by default every process reads its own data."""
        return Mesh(axes={"data": world.world_size}, rank=world.rank)

    def torch_mesh(self) -> Any:
        """Return torch's DeviceMesh of the connected processes, for modules that cut themselves; None without one."""
        return None

    def layout(self, world: World, module: nn.Module | None) -> Any:
        """Return which rank of `world` holds what, as a `stratagem_layout.Layout`; None if all hold the whole model.

        ``stratagem explain`` prints it before any process starts; the report calls it on rank 0 after training.

        Args:
            module: the user's, if it is known.
        """
        return None

    def rank_classes(self, run: Any) -> Sequence[Sequence[int]]:
        """Return all ranks, in groups that compute, hold and send the same. A plan runs the first one of each.

        Called in a plan, once the model is wrapped. `run` is a `stratagem.api.context.RunContext`.
        """
        return [range(run.world_size)]

    def data_mesh(self, mesh: Mesh, stage: str) -> Mesh:
        """Return by which mesh a loader of `stage` is shared out, for an outer strategy over runs of their own.

        `mesh` is that of this run. Each of several runs that train together may read a part of the data.
        """
        return mesh

    def processes_per_team(self, world: World, inner: Strategy) -> int:
        """Return, for an outer strategy, over how many processes `inner` distributes the model (``run.peers``)."""
        return world.world_size


@frozen(kw_only=True)
class PrecisionPolicy:
    """Which dtype where; None leaves it as it is. A strategy with mixed precision of its own absorbs the policy."""

    #: Of parameters.
    param_dtype: torch.dtype | None = None
    #: Of forward and backward.
    compute_dtype: torch.dtype | None = None
    #: Of gradients while they are averaged.
    reduce_dtype: torch.dtype | None = None
    #: Of the module's buffers.
    buffer_dtype: torch.dtype | None = None
    #: Whether the loss is scaled so that small gradients do not vanish.
    loss_scaling: bool = False


@define(eq=False, repr=False, kw_only=True)
class Precision(Plugin):
    """Sets dtypes: a policy, and hooks that are called unless the strategy applies the policy itself.

    The hooks of one with `replaces_layers` are always called, since no strategy does that for it.
    """

    kind: ClassVar[str] = "precision"

    def policy(self) -> PrecisionPolicy:
        """Return which dtype is used where; called before any process starts."""
        return PrecisionPolicy()


class Confidence(enum.IntEnum):
    """How certain an environment is that it is the one to ask. The highest wins under ``environment="auto"``."""

    #: Nothing says that it is absent: chosen if no other environment is found.
    FALLBACK = 1
    #: This process runs in a job of it, and was not started as one of several (the script of a batch job, a shell).
    IN_JOB = 2
    #: Some of the variables that it sets are missing: if no environment is certain, it is chosen and names them.
    PARTIAL = 3
    #: It started this process as one of a set, and its variables tell the rank.
    CERTAIN = 4

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@frozen
class Evidence:
    """Why an environment is present, with variables and their values ("SLURM_STEP_ID is '0'").

    `rank` and `world_size` are what its variables say of this process, where they do. Two certain environments of equal
    precedence that differ in them are an error: one of them was inherited from somewhere else.

    `starters` is how many processes together started those of this world, such as torchrun's agents; None if unknown.
    In an environment that started more processes than that, the others would train models of their own.
    """

    reason: str
    confidence: Confidence = Confidence.CERTAIN
    rank: int | None = None
    world_size: int | None = None
    starters: int | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.confidence})"


@define(eq=False, repr=False, kw_only=True)
class Environment(Plugin):
    """Reads this process's rank and world. Must answer `setup_environment`. Its module must not import torch."""

    kind: ClassVar[str] = "environment"
    #: Of several that are equally certain the highest wins. It is higher for one that is started within others:
    #: torchrun has 100, MPI 80, a scheduler of a cluster 50.
    precedence: ClassVar[int] = 50
    #: Its processes do not exist: a plan counts what a step would send, and tensors have shapes and no values.
    simulated: ClassVar[bool] = False

    def detect(self) -> Evidence | None:
        """Return why this environment is present and how certain that is, or None if it is not. Must not raise."""
        return None

    def processes_exist(self) -> bool:
        """Whether all processes were started from outside, so that the run must start none."""
        return True

    def local_processes(self) -> int | None:
        """Return how many processes were started on this node, or are to be: the meaning of ``devices="auto"``.

        None: it is not known.
        """
        return None

    def num_nodes(self) -> int | None:
        """Return on how many nodes the run has processes, if known: the user need not set ``num_nodes``."""
        return None

    def default_callbacks(self) -> list[Any]:
        """Return callbacks for each `Trainer` under this environment, as a user would pass them for ``callbacks=``."""
        return []

    def job(self) -> str | None:
        """Return a name of the scheduler's job, the same after the scheduler has started it again; None without one.

        Such an environment sets `World.generation` to the number of times that the job was started again.
        """
        return None

    def join(self, world: World, device: torch.device, timeout: timedelta) -> Collectives | None:
        """Return the collectives of the processes of `world`; None lets torch.distributed connect them."""
        return None

    def requeue_command(self) -> list[str] | None:
        """Return the command that has the scheduler start this job again; None if it cannot."""
        return None


@define(eq=False, repr=False, kw_only=True)
class Launcher(Plugin):
    """Starts the other processes. Must answer `launch`."""

    kind: ClassVar[str] = "launcher"
    #: True: the calling process is local rank 0, and its objects are trained. False: it only waits, and workers send
    #: results back.
    parent_trains: ClassVar[bool] = True
    #: True: one call starts the processes of all nodes and sets their ranks, so the environment of the calling process
    #: is not asked; ``run.world`` follows from the settings. False: each node calls the launcher for its own processes.
    starts_all_nodes: ClassVar[bool] = False

    def enter_process(self) -> None:
        """Prepare this process, one of the run, whoever started it; called before it connects.

        One that starts processes with `stratagem_launchers_local` calls `report_to_launcher()` of that package here, or
        the launcher learns no more than the exit code of a process that fails.
        """


class CopyStream(Protocol):
    """Copies batches to a device while it computes."""

    #: Batches copied so far.
    batches: int

    def __call__(self, batch: Any) -> Any:
        """Return `batch` on the device."""


@define(eq=False, repr=False, kw_only=True)
class Accelerator(Plugin):
    """A type of device. Its module must not import torch at the top."""

    kind: ClassVar[str] = "accelerator"
    #: Under "auto" the highest of those that are available wins.
    precedence: ClassVar[int] = 0
    #: Devices have indices and their count is a limit; otherwise `devices` is only a number of processes.
    indexed: ClassVar[bool] = True
    #: torch.distributed backend for tensors on this device.
    backend: ClassVar[str] = "gloo"

    def count(self) -> int:
        """Return how many devices this machine has; 0 means unavailable. Must not initialize the driver."""
        return 0

    def device(self, index: int) -> torch.device:
        """Return the torch device with this index."""
        raise NotImplementedError

    def default_strategy(self, num_devices: int) -> str | None:
        """Return the strategy for `num_devices` devices of this node if the user sets none; None is the catalog's."""
        return None

    def number_of(self, identifier: str) -> int:
        """Return the number of the visible device that has this identifier, such as a UUID.

        Raises:
            ConfigError: there is no such device, or devices of this kind have no identifiers.
        """
        raise ConfigError(f"devices names {identifier!r}", expected="numbers: its devices have no identifiers")

    def identity(self, device: torch.device) -> tuple[str, str] | None:
        """Return what tells `device` from all others, such as a UUID, and its model; None if ranks may share it.

        Called once, after `activate`.
        """
        return None

    def activate(self, device: torch.device) -> None:
        """Make `device` this process's current one; called once, before the processes connect."""

    def copy_stream(self, device: torch.device, hints: bool) -> CopyStream | None:
        """Return what copies batches to `device` while it computes; None: they are copied in between.

        Args:
            hints: warn if the memory of the batches makes the copies slow.
        """
        return None


@define(eq=False, repr=False, kw_only=True)
class CheckpointFormat(Plugin):
    """Saves and loads checkpoints. Must answer `save_checkpoint` and `load_checkpoint`."""

    kind: ClassVar[str] = "checkpoint"
    #: Appended to file names that callbacks generate.
    suffix: ClassVar[str] = ".ckpt"
    #: `save_checkpoint` takes sharded tensors, also rows of bytes of each rank, under "ranks"; else all is gathered.
    takes_shards: ClassVar[bool] = False
    #: Its files are pickles, which can execute code when they are read: only `consolidate` reads them, and it is called
    #: only for files that the user trusts.
    reads_pickles: ClassVar[bool] = False

    @property
    def saves_in_background(self) -> bool:
        """Whether it calls ``run.saver.submit``, for which process groups are made at connect."""
        return bool(getattr(self, "async_save", False))

    def recognises(self, path: Path) -> bool:
        """Whether `path` looks like a checkpoint of this format (cheap; no verification)."""
        return False

    def is_whole(self, path: Path) -> bool:
        """Whether `path` was written completely and is unchanged since."""
        return self.recognises(path)

    def consolidate(self, path: Path) -> dict[str, Any]:
        """Return the state at `path` with whole tensors, in this process only, for a format that `reads_pickles`."""
        raise NotImplementedError

    def saved_at(self, path: Path) -> float:
        """Return when `path` was saved, in seconds since 1970; the newest checkpoint is found by it.

        Override it for folders, and never return more than the modification time for a file: files are looked at from
        the newest on.
        """
        return modified_at(path)

    def remove(self, path: Path) -> None:
        """Delete what this format wrote at `path`, and nothing else."""
        raise NotImplementedError


class Command:
    """A subcommand of the `stratagem` program; the entry point names a subclass.

    The entry point ``doctor`` is ``stratagem doctor``, and ``plugins.check`` is ``stratagem plugins check``. A list of
    commands reads `help` from the source if it is one string in quotation marks, and imports the module otherwise.
    The help of the command imports it too: import torch, and whatever else takes long, in `run`.
    """

    #: One line for `stratagem --help`.
    help: ClassVar[str] = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare options."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command; return the exit code."""
        raise NotImplementedError


@frozen(eq=False, repr=False)
class Kind:
    """A kind of plugins: what a package puts into the entry-point group ``stratagem.kind``, under the kind's name.

    Plugins of the kind stand in the group ``stratagem.NAME``. A run gets those that its argument chooses, checks that
    they implement their duties, and calls their hooks.
    """

    #: The name of the entry point, and the end of the name of the group in which plugins of this kind stand.
    name: str
    #: The class that plugins of this kind derive from.
    base: type[Any]
    #: At most one plugin of this kind is chosen, exactly one if it has a default; otherwise any number.
    single: bool = False
    #: The argument of `Trainer` and `Run` that chooses plugins of this kind; the kind's name unless set.
    argument: str = field()
    #: What the argument chooses, for help; of a kind that another package than the engine adds.
    doc: str = ""
    #: Hooks that each plugin of this kind must implement.
    duties: tuple[str, ...] = ()
    #: The plugin that a run has where none is chosen, unless the argument is False or []; "" for none.
    default: str = ""
    #: A module with specifications of hooks that this kind adds, called with ``run.ask`` and ``run.hook``.
    hooks: Any = None
    #: The class of the kit that checks plugins of this kind, as ``module:Class``.
    conformance: str = "stratagem_testing:ObserverConformance"
    #: Which module of stratagem resolves this kind's classes lazily; "" for none.
    module: str = ""
    #: Options can be set by a dotted name, ``--kind.option``; not where a run usually has several plugins.
    dotted: bool = True
    #: Its plugins act on events of a Trainer: a `Run` has no argument for them.
    needs_trainer: bool = False
    #: Called with each plugin of this kind and the run that has it, in each process, before any hook.
    joined: Callable[[Any, Any], None] | None = None
    #: Called with the choices of this kind, each a ``name`` and a ``plugin``, and the stack, before any process starts:
    #: it raises a ConfigError for plugins that cannot be combined.
    check: Callable[[Any, Any], None] | None = None
    #: Kinds are listed, and their plugins called, in this order: the engine's have 10 to 70, callbacks 90, loggers 100.
    #: A kind that a package adds comes before callbacks.
    place: int = 80

    @argument.default
    def _is_the_name(self) -> str:
        return self.name

    @property
    def group(self) -> str:
        """The entry-point group of plugins of this kind."""
        return f"stratagem.{self.name}"


def _ours(place: int, base: type[Plugin], module: str, **facts: Any) -> Kind:
    conformance = f"stratagem_testing:{base.kind.capitalize()}Conformance"
    return Kind(base.kind, base, conformance=conformance, module=module, place=place, **facts)


STRATEGY: Final = _ours(10, Strategy, "strategies", duties=("wrap_model",))
PRECISION: Final = _ours(20, Precision, "precisions", single=True)
ENVIRONMENT: Final = _ours(40, Environment, "environments", single=True, duties=("setup_environment",))
LAUNCHER: Final = _ours(50, Launcher, "launchers", single=True, duties=("launch",))
ACCELERATOR: Final = _ours(60, Accelerator, "accelerators", single=True)
CHECKPOINT: Final = _ours(
    70, CheckpointFormat, "checkpoints", single=True, duties=("save_checkpoint", "load_checkpoint")
)
