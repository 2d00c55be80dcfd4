"""Protocols for the argument `run` of hooks: the attributes that a plugin may use.

`stratagem.Run` has more attributes, which are private and may change at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from stratagem.api.kinds import Accelerator, CheckpointFormat, Environment, Strategy
    from stratagem.api.values import PrecisionPolicy
    from stratagem.api.world import Collectives, Mesh, Timeouts, World


class Materializer(Protocol):
    """Initializes parameters that were built on the meta device, with the same values on every rank."""

    #: Where the values are allocated.
    device: torch.device

    def fill(self, part: nn.Module) -> None:
        """Allocate and initialize the parameters of `part` that have no values yet."""


class Position(Protocol):
    """Progress of training: the epoch, optimizer steps and batches so far."""

    @property
    def epoch(self) -> int: ...

    @property
    def global_step(self) -> int:
        """Optimizer steps so far, including those that a loss scale skipped."""

    @property
    def batches_done(self) -> int:
        """Finished batches of the current epoch."""

    @property
    def epoch_done(self) -> bool:
        """Whether the current epoch ran all its batches."""

    @property
    def epoch_ended(self) -> bool:
        """Whether `on_train_epoch_end` was called after all batches of the current epoch."""

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that a loss scale skipped."""


class RunContext(Protocol):
    """The run of this process: its plugins, ranks, devices and model. Most values are known once it is connected."""

    # --- World and devices ---------------------------------------------------------------------------------------

    @property
    def world(self) -> World | None:
        """The ranks of this process and the world size; None before `setup_environment` has answered."""

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of processes; 1 before they connect."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has rank 0."""

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank 0 only."""

    def join(self, world: World, backend: str) -> Collectives:
        """Return the collectives of the ranks of `world`, for an answer to `connect`. Collective.

        Args:
            backend: of torch.distributed, unless the environment connects the ranks itself.

        Raises:
            ConfigError: a process group exists with another backend or size.
            LaunchError: the others did not come in time, or `backend` could not connect them.
        """

    @property
    def mesh(self) -> Mesh:
        """How the strategy arranges the processes."""

    @property
    def device(self) -> torch.device:
        """The first of `devices`."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of this process."""

    @property
    def num_processes(self) -> int:
        """Number of processes on this node. Known before the processes connect."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes: what the environment found, else ``num_nodes=``. Known before the processes connect."""

    @property
    def devices_given(self) -> bool:
        """Whether the user set `devices`, rather than leaving it to "auto". Known before the processes connect."""

    # --- Communication -------------------------------------------------------------------------------------------

    @property
    def collectives(self) -> Collectives:
        """Collective operations over all ranks."""

    @property
    def peers(self) -> Collectives:
        """Collective operations over the ranks of the strategy: all ranks, or one team of an outer strategy."""

    @property
    def peers_world(self) -> World:
        """The rank of this process among `peers`, and their number."""

    @property
    def readers(self) -> Collectives:
        """Collective operations over ranks with different samples, or parts of samples: those that metrics average.

        Ranks that differ only in their positions on the mesh's axes ``pipeline`` and ``tensor`` have the same metrics.
        """

    @property
    def backend(self) -> str:
        """The accelerator's torch.distributed backend."""

    @property
    def timeouts(self) -> Timeouts:
        """How long a rank waits for the other ranks."""

    # --- Settings and plugins------------------------------------------------------------------------------------

    @property
    def settings(self) -> Any:
        """The arguments of the run, as attributes: `RunSettings`, or the `TrainerSettings` of a Trainer."""

    @property
    def strategy(self) -> Strategy:
        """The strategy that answers hooks: the innermost one."""

    def plugins_of(self, kind: str) -> list[Any]:
        """Return the plugins of `kind`, such as "comm_hook", in the order in which they act."""

    @property
    def accelerator(self) -> Accelerator:
        """The plugin of the type of device."""

    @property
    def environment(self) -> Environment:
        """The plugin that found the rank of this process."""

    @property
    def checkpoint_format(self) -> CheckpointFormat:
        """The plugin that writes and reads checkpoints."""

    @property
    def policy(self) -> PrecisionPolicy:
        """The precision's policy."""

    @property
    def precision_absorbed(self) -> bool:
        """Whether the strategy applies the policy itself, and the precision's own hooks are not called."""

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded over the ranks, so that every forward needs all ranks."""

    def provides(self, word: str) -> bool:
        """Whether a plugin of the run provides the capability `word`.

        With ``"compilation"`` a plugin compiles the model: what wraps a forward is compiled with it, and hooks are not.
        """

    def name_of(self, plugin: Any) -> str:
        """Return the name by which `plugin` was chosen."""

    def title_of(self, plugin: Any) -> str:
        """Return the kind and the name of `plugin`, for a message: ``strategy 'ddp'``."""

    def describe(self) -> dict[str, Any]:
        """Return the plugins of this run, their options and where these came from, as plain data."""

    def num_implementations(self, hook: str) -> int:
        """Return how many plugins of this run implement `hook`."""

    def preload(self) -> None:
        """Import the modules that plugins import lazily, before this process is forked."""

    # --- The model -----------------------------------------------------------------------------------------------

    #: The user's module.
    module: nn.Module | None
    #: What `wrap_model` returned for it.
    model: Any
    #: The optimizers to step.
    optimizers: list[Optimizer]
    #: Learning rate schedulers and when they step; empty if the user's own loop drives this run.
    lr_scheduler_configs: list[Any]
    #: "train", "validate", "test" or "predict".
    stage: str
    #: The module calls backward and steps its optimizers itself.
    manual: bool
    #: False while gradients are only accumulated.
    sync_gradients: bool
    #: What the gradients that are averaged now are multiplied by, beside the loss scale. It differs between steps where
    #: losses are sums of targets: a comm hook that keeps gradients for the next step divides by it.
    gradient_scale: float

    #: What this process is doing: four numbers, see `stratagem.api.activity`. A plugin may put a buffer of doubles in
    #: their place that other processes read; it puts a list back before the buffer is released.
    activity: list[float] | memoryview[float]

    #: True in a worker whose results are sent back to the launching process.
    is_worker: bool

    @property
    def hands_over(self) -> bool:
        """Whether the state goes to another process rather than to a file, so that nothing may be left out of it."""
        ...

    @property
    def owns_loop(self) -> bool:
        """Whether a `Trainer` drives this run; False for the user's own loop."""

    def units(self, module: nn.Module) -> list[nn.Module]:
        """Return the parts of the user's `module` that the strategy gathers or calls one by one."""

    def wrap_backend(self, backend: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return what the strategy has compile graphs, given the `backend` of ``torch.compile``."""

    def materializer(self, module: nn.Module) -> Materializer:
        """Return a `Materializer` for a `module` that was built on the meta device. Collective."""

    def transfer(self, batch: Any) -> Any:
        """Return `batch` on the device, in the precision's dtype."""

    def backward(self, loss: Tensor) -> None:
        """Scale `loss` and differentiate it: what ``forward_backward`` calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Call ``training_step`` of `model`, with the arguments that it takes: what ``forward_backward`` calls."""

    def forward_backward(self, batch: Any, batch_idx: int, divisor: float) -> Any:
        """Run forward and backward of one batch as the loop does where no plugin answers ``forward_backward``."""

    def differentiate(self, loss: Tensor) -> None:
        """Call ``loss.backward()``, or the module's own `backward`: what the strategy's `backward` hook calls."""

    def clip_gradients(
        self, optimizer: Optimizer, max_norm: float | None = None, max_value: float | None = None
    ) -> Any:
        """Clip by norm or by value; return the norm before clipping, or 0.0 by value."""

    def step_one(self, optimizer: Optimizer, closure: Callable[[], Tensor] | None = None) -> bool:
        """Update the parameters of one `optimizer`; return whether they changed: what ``step_optimizers`` calls."""
        ...

    def count_skipped_step(self) -> None:
        """Report that an optimizer step which returned True turned out to have been skipped."""

    # --- State and files -----------------------------------------------------------------------------------------

    @property
    def whole_state(self) -> bool:
        """Whether `model_state` and `optimizer_state` are to return whole tensors rather than each rank's shards."""

    @property
    def needs_values(self) -> bool:
        """Whether whole tensors of the state are used on this rank; elsewhere they may be on the meta device."""

    def ask(self, hook: str, **arguments: Any) -> Any:
        """Call an answer hook, such as ``model_state``, and return the answer."""

    def format_of(self, path: Path) -> CheckpointFormat:
        """Return the installed checkpoint format that reads `path`: this run's, if it does."""

    def save_in_background(self, write: Callable[[Collectives], None], *, background: bool) -> None:
        """Call `write` with a separate `Collectives`, in a thread if `background`. Collective.

        Raises:
            Exception: an error of `write`, unless it runs in a thread; an error of the previous save.
        """

    def wait_for_saves(self) -> None:
        """Wait until no save is running; raise its error if it failed."""

    @property
    def is_saving(self) -> bool:
        """Whether a save is running, on any rank. All ranks get the same answer."""

    @property
    def is_writing(self) -> bool:
        """Whether a thread of this process writes a save now; a rank may have finished its part before others."""

    @property
    def batches_copied(self) -> int:
        """Number of batches that were copied to the device while it computed; 0 without such copies."""

    def written_files(self) -> dict[str, str]:
        """Return the paths of what plugins have written in this run, by title such as "metrics"; on rank 0."""

    def after_save(self, action: Callable[[], None]) -> None:
        """Call `action` after the running save has succeeded, or now if none is running; never if the save fails."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Send `metrics` to all loggers. Called on rank 0."""
