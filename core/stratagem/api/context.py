"""Protocol for the argument `run` of hooks: the attributes that a plugin may use.

`stratagem.Run` has more attributes, which are private and may change at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from stratagem.api.kinds import Accelerator, CheckpointFormat, Environment, PrecisionPolicy, Strategy
    from stratagem.api.run_parts import Materializer, RunSaver, RunStack, RunStep
    from stratagem.api.world import Collectives, Mesh, World


class RunContext(Protocol):
    """The run of this process: its plugins, ranks, devices and model. Most values are known once it is connected.

    Plugins set none of these, unless a description says so.
    """

    # --- World and devices ---------------------------------------------------------------------------------------

    #: The ranks of this process and the world size; None before `setup_environment` has answered.
    world: World | None
    #: How the strategy arranges the processes.
    mesh: Mesh
    #: The first of `devices`.
    device: torch.device
    #: All devices of this process.
    devices: tuple[torch.device, ...]
    #: Number of processes on this node. Known before the processes connect.
    num_processes: int
    #: True in a worker whose results are sent back to the launching process.
    is_worker: bool

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

    # --- Communication -------------------------------------------------------------------------------------------

    #: Collective operations over all ranks.
    collectives: Collectives
    #: The same over the ranks of the strategy: all ranks, or one team of an outer strategy.
    peers: Collectives
    #: The same over ranks with different samples, or parts of samples: those that metrics average. Ranks that differ
    #: only in their positions on the mesh's axes ``pipeline`` and ``tensor`` have the same metrics.
    readers: Collectives

    @property
    def peers_world(self) -> World:
        """The rank of this process among `peers`, and their number."""

    # --- Settings and plugins ------------------------------------------------------------------------------------

    #: The arguments of the run, as attributes: `RunSettings`, or the `TrainerSettings` of a Trainer.
    settings: Any
    #: The strategy that answers hooks: the innermost one.
    strategy: Strategy
    #: The plugin of the type of device.
    accelerator: Accelerator
    #: The plugin that found the rank of this process.
    environment: Environment
    #: The plugin that writes and reads checkpoints.
    checkpoint_format: CheckpointFormat
    #: The precision's policy.
    policy: PrecisionPolicy

    @property
    def stack(self) -> RunStack:
        """All plugins together."""

    @property
    def owns_loop(self) -> bool:
        """Whether a `Trainer` drives this run; False for the user's own loop."""

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded over the ranks, so that every forward needs all ranks."""

    def plugins_of(self, kind: str) -> list[Any]:
        """Return the plugins of `kind`, such as "comm_hook", in the order in which they act."""

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

    def ask(self, hook: str, **arguments: Any) -> Any:
        """Call an answer hook, such as ``model_state``, and return the answer."""

    # --- The model and its step ----------------------------------------------------------------------------------

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
    #: What this process is doing: four numbers, see `stratagem.api.run_parts`. A plugin may put a buffer of doubles in
    #: their place that other processes read; it puts a list back before the buffer is released.
    activity: list[float] | memoryview[float]

    @property
    def step(self) -> RunStep:
        """The defaults of the step's hooks, and counters."""

    def materializer(self, module: nn.Module) -> Materializer:
        """Return a `Materializer` for a `module` that was built on the meta device. Collective."""

    def transfer(self, batch: Any) -> Any:
        """Return `batch` on the device, in the precision's dtype."""

    def backward(self, loss: Tensor) -> None:
        """Scale `loss` and differentiate it: what ``forward_backward`` calls."""

    def differentiate(self, loss: Tensor) -> None:
        """Call ``loss.backward()``, or the module's own `backward`: what the strategy's `backward` hook calls."""

    def clip_gradients(
        self, optimizer: Optimizer, max_norm: float | None = None, max_value: float | None = None
    ) -> Any:
        """Clip by norm or by value; return the norm before clipping, or 0.0 by value."""

    # --- State and files -----------------------------------------------------------------------------------------

    #: Whether `model_state` and `optimizer_state` are to return whole tensors rather than each rank's shards.
    whole_state: bool
    #: Whether the state goes to another process rather than to a file, so that nothing may be left out of it.
    hands_over: bool

    @property
    def needs_values(self) -> bool:
        """Whether whole tensors of the state are used on this rank; elsewhere they may be on the meta device."""

    @property
    def saver(self) -> RunSaver:
        """The saves, which may run in the background."""

    def format_of(self, path: Path) -> CheckpointFormat:
        """Return the installed checkpoint format that reads `path`: this run's, if it does."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Send `metrics` to all loggers. Called on rank 0."""
