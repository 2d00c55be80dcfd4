"""Parts of a run that few plugins use: `run.step`, `run.saver`, `run.stack`, `run.activity`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from stratagem.api.world import Collectives


#: torch's own defaults for collectives on gloo, and on NCCL: GPUs that wait are expensive.
DEFAULT_TIMEOUT = timedelta(minutes=30)

NCCL_TIMEOUT = timedelta(minutes=10)
#: The least time to connect: a cold file system is slow.
LEAST_START = timedelta(minutes=5)


class Timeouts(NamedTuple):
    """How long a rank waits for the others."""

    #: To connect.
    start: timedelta = DEFAULT_TIMEOUT
    #: In a collective.
    collective: timedelta = DEFAULT_TIMEOUT


class RunStep(Protocol):
    """The steps of a run: what hooks of the step call to have the default, and counters."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Call ``training_step`` of ``run.model``, with the arguments that it takes."""

    def forward_backward(self, batch: Any, batch_idx: int, divisor: float) -> Any:
        """Run forward and backward of one batch as the loop does where no plugin answers ``forward_backward``."""

    def step_one(self, optimizer: Optimizer, closure: Callable[[], Tensor] | None = None) -> bool:
        """Update the parameters of one `optimizer`; return whether they changed: what ``step_optimizers`` calls."""

    def count_skipped(self) -> None:
        """Report that an optimizer step which returned True turned out to have been skipped."""

    def num_implementations(self, hook: str) -> int:
        """Return how many plugins of this run implement `hook`."""

    @property
    def batches_copied(self) -> int:
        """Number of batches that were copied to the device while it computed; 0 without such copies."""


class RunSaver(Protocol):
    """The saves of a run, of which one at a time runs in the background."""

    def submit(self, write: Callable[[Collectives], None], background: bool) -> None:
        """Call `write` with a separate `Collectives`, in a thread if `background`. Collective.

        Raises:
            Exception: an error of `write`, unless it runs in a thread; an error of the previous save.
        """

    def wait(self) -> None:
        """Wait until no save is running; raise its error if it failed."""

    def afterwards(self, action: Callable[[], None]) -> None:
        """Call `action` after the running save has succeeded, or now if none is running; never if the save fails."""

    @property
    def busy(self) -> bool:
        """Whether a save is running, on any rank. All ranks get the same answer."""

    @property
    def is_running(self) -> bool:
        """Whether a thread of this process writes a save now; a rank may have finished its part before others."""


class RunStack(Protocol):
    """The plugins of a run together."""

    @property
    def precision_absorbed(self) -> bool:
        """Whether the strategy applies the policy itself, and the precision's own hooks are not called."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes: what the environment found, else ``num_nodes=``. Known before the processes connect."""

    @property
    def devices_given(self) -> bool:
        """Whether the user set `devices`, rather than leaving it to "auto"."""

    def timeouts(self) -> Timeouts:
        """How long a rank waits for the other ranks."""

    def preload(self) -> None:
        """Import the modules that plugins import lazily, before this process is forked."""

    def written_files(self) -> dict[str, str]:
        """Return the paths of what plugins have written in this run, by title such as "metrics"; on rank 0."""


class Materializer(Protocol):
    """Initializes parameters that were built on the meta device, with the same values on every rank."""

    #: Where the values are allocated.
    device: torch.device

    def fill(self, part: nn.Module) -> None:
        """Allocate and initialize the parameters of `part` that have no values yet."""


# --- What a process is doing, in four numbers that the training loop stores and other processes may read ---------

#: Where `RunContext.activity` has optimizer steps, the batch, the phase and the phase's beginning (UNIX time).
STEP, BATCH, PHASE, SINCE = range(4)
PHASES = (
    "setup", "next batch", "training_step", "backward", "optimizer step", "validation", "test", "predict",
    "save_checkpoint", "code after training",
)  # fmt: skip
#: Numbers of `PHASES`; 0 is none of them.
SETUP, NEXT_BATCH, TRAINING_STEP, BACKWARD, OPTIMIZER_STEP, VALIDATION, TEST, PREDICT, SAVE, AFTER = range(1, 11)
