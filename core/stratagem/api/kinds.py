"""The base class of each kind of plugin.

A plugin is one attrs class decorated with ``@define(eq=False, kw_only=True)``: its fields are the options a user may
set, its ``@hookimpl`` methods are its behaviour, its ``capabilities`` say what it offers and needs. A package makes it
available by naming it in the entry-point group of its kind; see `stratagem.api.hooks` for the hooks.

Plain methods of the bases below are questions the resolver asks *before any process starts*; they must answer from the
options alone.
"""

from __future__ import annotations

import argparse
from abc import ABCMeta
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import define, frozen

from stratagem.api.capabilities import GRADIENT_BUCKETS, Capabilities
from stratagem.api.paths import modified_at
from stratagem.api.values import PrecisionPolicy
from stratagem.api.world import Mesh, World
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    import torch


# --- One base for each kind --------------------------------------------------------------------------------------


class PluginType(ABCMeta):
    """Makes the constructor of every plugin refuse wrong options in a sentence, as a mapping of options is refused.

    It derives from ABCMeta so that a plugin can inherit an abstract class too.
    """

    def __call__(cls, *values: Any, **options: Any) -> Any:
        try:
            return super().__call__(*values, **options)
        except TypeError as error:
            from stratagem.api.options import explain_call

            if explained := explain_call(cls, values, options):
                raise explained from None
            raise error


@define(eq=False, kw_only=True)
class Plugin(metaclass=PluginType):
    """Base of every kind.

    A plugin with state to survive a restart defines ``state_dict()`` and ``load_state_dict(state)``: rank 0's is kept.
    One whose state differs from rank to rank defines ``rank_state(run)``, and ``load_rank_states(states, run)``, which
    gets those of all ranks that saved, in rank order, in as many processes as there are now. Either is saved under
    `state_key`.
    """

    #: The kind's name; set by the bases below.
    kind: ClassVar[str] = "plugin"
    #: What it offers and needs; a property in a plugin whose options decide.
    capabilities: ClassVar[Capabilities] = Capabilities()

    #: A run may have several of one class, which the options that are not at their defaults tell apart in `state_key`.
    told_apart_by_options: ClassVar[bool] = False

    @property
    def state_key(self) -> str | None:
        """The name under which this plugin's state is saved; the same for every name, preset and instance of it.

        None is the class that defines the state, as ``module:Class``, with the options where `told_apart_by_options`.
        Override it to read what a class of another name saved.
        """
        return None

    def preload(self, device_type: str) -> None:
        """Import what a run on such devices ("cpu", "cuda") imports late; a process that is about to be copied asks.

        It must not touch a device: a copy could not use it.
        """


@define(eq=False, kw_only=True)
class Strategy(Plugin):
    """How the model is spread over processes, and stepped. Must answer `wrap_model`."""

    kind: ClassVar[str] = "strategy"
    #: A process for each device of a node. False: one process uses them all (``run.devices``).
    process_per_device: ClassVar[bool] = True
    #: It works around another strategy, which is named after it: ``strategy=["mine", "another"]``.
    outer: ClassVar[bool] = False

    def default_launcher(self) -> str | None:
        """The launcher to use when the user names none; None leaves it to the catalog."""
        return None

    def default_checkpoint(self) -> str | None:
        """Name of the checkpoint format this strategy insists on; None leaves it open."""
        return None

    def default_comm_hooks(self) -> list[Any]:
        """The comm hooks that this strategy's own options ask for, as a user would write them for ``comm_hook=``."""
        return []

    def how_to_provide(self, word: str) -> str:
        """What to set for this strategy to provide capability `word`, to end a sentence with; "" if nothing helps."""
        return ""

    def makes_optimizer(self) -> bool:
        """Whether its options say which optimizer to make, so that a module need not."""
        return False

    def absorbs(self, policy: PrecisionPolicy) -> bool:
        """Whether this strategy applies `policy` by itself, so that the precision's own hooks stand down."""
        return False

    def join_timeout(self) -> timedelta | None:
        """How long a rank waits for the others to appear; None leaves it to the backend."""
        return None

    def mesh(self, world: World) -> Mesh:
        """How this strategy arranges the processes; every process reads its own data unless overridden."""
        return Mesh(axes={"data": world.world_size}, rank=world.rank)

    def processes_per_team(self, world: World, inner: Strategy) -> int:
        """For an outer strategy: how many processes `inner`, inside it, spreads the model over (``run.peers``)."""
        return world.world_size


@define(eq=False, kw_only=True)
class Precision(Plugin):
    """Which dtypes, where: first a policy, and only where no strategy absorbs it, hooks."""

    kind: ClassVar[str] = "precision"

    def policy(self) -> PrecisionPolicy:
        return PrecisionPolicy()


@define(eq=False, kw_only=True)
class CommHook(Plugin):
    """How gradients travel. Must implement `reduce_bucket`; several stack, the first is outermost."""

    kind: ClassVar[str] = "comm_hook"
    told_apart_by_options: ClassVar[bool] = True
    #: It needs the gradients' shapes, which only the first hook of a stack sees.
    outermost: ClassVar[bool] = False
    #: It sends by collectives of its own rather than through the hook under it: it must be the last of a stack.
    innermost: ClassVar[bool] = False
    capabilities: ClassVar[Capabilities] = Capabilities(requires={GRADIENT_BUCKETS})

    def statistics(self, run: Any) -> dict[str, float]:
        """Return numbers worth logging, of this rank alone; called between two steps, without collectives.

        `run` is a `stratagem.api.context.RunContext`.
        """
        return {}


@define(eq=False, kw_only=True)
class Environment(Plugin):
    """Who am I among the processes? Must answer `setup_environment`. Its module imports neither torch nor an engine."""

    kind: ClassVar[str] = "environment"
    #: Among environments that detect themselves the highest wins.
    precedence: ClassVar[int] = 0

    def detect(self) -> str | None:
        """The evidence that this environment is present ("SLURM_STEP_ID is set"), or None."""
        return None

    def processes_exist(self) -> bool:
        """Whether somebody else started all processes, so that the run must start none."""
        return True

    def local_processes(self) -> int | None:
        """How many processes somebody else started on this node, if known: what ``devices="auto"`` then means."""
        return None


@define(eq=False, kw_only=True)
class Launcher(Plugin):
    """Who starts the other processes. Must answer `launch`."""

    kind: ClassVar[str] = "launcher"
    #: The calling process is itself rank 0 of its node and keeps what training did to its objects. False: it only
    #: waits, and results are carried home.
    parent_trains: ClassVar[bool] = True


@define(eq=False, kw_only=True)
class Accelerator(Plugin):
    """Which device, how many. Its module does not import torch at the top."""

    kind: ClassVar[str] = "accelerator"
    #: Among accelerators that are available the highest wins under "auto".
    precedence: ClassVar[int] = 0
    #: Devices have numbers and their count is a limit; otherwise `devices` is just a number of processes.
    indexed: ClassVar[bool] = True
    #: torch.distributed backend for tensors on this device.
    backend: ClassVar[str] = "gloo"

    def count(self) -> int:
        """How many devices this machine has; 0 means unavailable. Must not initialise the device's driver."""
        return 0

    def device(self, index: int) -> torch.device:
        """The torch device with this number."""
        raise NotImplementedError

    def number_of(self, identifier: str) -> int:
        """Return the number of the visible device that has this identifier, such as a UUID.

        Raises:
            ConfigError: there is no such device, or devices of this kind have numbers alone.
        """
        raise ConfigError(f"devices names {identifier!r}", expected="numbers: this accelerator knows no identifiers")

    def activate(self, device: torch.device) -> None:
        """Make `device` this process's current one; called once, before the processes connect."""


@define(eq=False, kw_only=True)
class CheckpointFormat(Plugin):
    """How logical state reaches the disk. Must answer `save_checkpoint` and `load_checkpoint`."""

    kind: ClassVar[str] = "checkpoint"
    #: Appended to names that callbacks make up.
    suffix: ClassVar[str] = ".ckpt"
    #: `save_checkpoint` takes tensors of which each rank holds a shard; otherwise strategies make them whole first.
    takes_shards: ClassVar[bool] = False
    #: What it writes is whole only to a program that executes what pickles in it say: `consolidate` does, and is called
    #: for users who trust the files, with nobody else's.
    reads_pickles: ClassVar[bool] = False

    @property
    def saves_in_background(self) -> bool:
        """Whether it calls ``run.save_in_background``: the groups for that are made at connect."""
        return bool(getattr(self, "async_save", False))

    def recognises(self, path: Path) -> bool:
        """Whether `path` looks like something this format wrote (cheap; no verification)."""
        return False

    def is_whole(self, path: Path) -> bool:
        """Whether `path` was written to the end and is unchanged since."""
        return self.recognises(path)

    def consolidate(self, path: Path) -> dict[str, Any]:
        """Return the state at `path` with whole tensors, in this process alone, for a format that `reads_pickles`."""
        raise NotImplementedError

    def saved_at(self, path: Path) -> float:
        """When `path` was saved, in seconds since 1970; decides which one is the newest."""
        return modified_at(path)

    def remove(self, path: Path) -> None:
        """Delete what this format wrote at `path`, and nothing else."""
        raise NotImplementedError


@define(eq=False, kw_only=True)
class Callback(Plugin):
    """Anything that acts on events (`on_*` hooks) around the loop."""

    kind: ClassVar[str] = "callback"
    told_apart_by_options: ClassVar[bool] = True


@define(eq=False, kw_only=True)
class Logger(Plugin):
    """Where metrics go: acts on `log_metrics` (rank 0 only)."""

    kind: ClassVar[str] = "logger"
    told_apart_by_options: ClassVar[bool] = True


class Command:
    """A subcommand of the `stratagem` program; the entry point names a subclass.

    The entry point ``doctor`` is ``stratagem doctor``, and ``plugins.check`` is ``stratagem plugins check``. A list of
    commands needs the modules of all of them: import torch, and whatever else takes long, in `run`.
    """

    #: One line for `stratagem --help`.
    help: ClassVar[str] = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare options."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; return the exit code."""
        raise NotImplementedError


@frozen
class Kind:
    """A row of the table of kinds."""

    name: str
    base: type[Any]
    #: Exactly one plugin of this kind is chosen; otherwise any number.
    single: bool
    #: Which module of stratagem resolves this kind's classes lazily.
    module: str

    @property
    def group(self) -> str:
        return f"stratagem.{self.name}"


KINDS: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind("strategy", Strategy, False, "strategies"),
        Kind("precision", Precision, True, "precisions"),
        Kind("comm_hook", CommHook, False, "comm_hooks"),
        Kind("environment", Environment, True, "environments"),
        Kind("launcher", Launcher, True, "launchers"),
        Kind("accelerator", Accelerator, True, "accelerators"),
        Kind("checkpoint", CheckpointFormat, True, "checkpoints"),
        Kind("callback", Callback, False, "callbacks"),
        Kind("logger", Logger, False, "loggers"),
    )
}
