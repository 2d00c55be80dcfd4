"""Find the largest batch size that fits into memory."""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import define, field
from torch.utils.data import DataLoader

from stratagem.api import hookimpl
from stratagem.api.batches import replace_in_loader
from stratagem.api.validators import at_least, not_empty
from stratagem.errors import ConfigError
from stratagem_callbacks.memory_errors import is_out_of_memory
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class BatchSizeFinder(Callback):
    """Before training, try larger and larger batches until memory runs out; train with the largest that fitted.

    Only for one process: with several, a rank that runs out of memory leaves the others waiting. The trial steps have
    no effect on training. A resumed run uses the size that was found. `auto_microbatch` keeps the batch instead.
    """

    #: "power" doubles the size until it fails; "binsearch" then searches between the last two.
    mode: Literal["power", "binsearch"] = "power"
    #: Optimizer steps on each size.
    steps_per_trial: int = field(default=3, validator=at_least(1))
    #: First size to try.
    init_val: int = field(default=2, validator=at_least(1))
    #: Maximum number of sizes to try.
    max_trials: int = field(default=25, validator=at_least(1))
    #: Largest size to try; the size of the dataset if not given.
    max_val: int | None = field(default=None, validator=at_least(1))
    #: Attribute (or hyper-parameter) of the module to set to the size, if the module has it.
    attr_name: str = field(default="batch_size", validator=not_empty)

    #: The size that was found.
    optimal_batch_size: int | None = field(init=False, default=None)

    @hookimpl(tryfirst=True)  # others use the size
    def on_fit_start(self, trainer: TrainerView, module: Any) -> None:
        if trainer.fast_dev_run:
            return
        if not trainer.global_step:
            self._find(trainer)
        if self.optimal_batch_size is None:
            return
        set_found(module, self.attr_name, self.optimal_batch_size)
        # An epoch has another number of steps, which schedules may use.
        trainer.configure_again(_with_batch_size(trainer.train_dataloader, self.optimal_batch_size))

    def _find(self, trainer: TrainerView) -> None:
        if trainer.world_size > 1:
            raise ConfigError(
                f"batch_size_finder was chosen for {trainer.world_size} processes", expected="one",
                do="find the size with devices=1, then set it",
            )  # fmt: skip
        loader = trainer.train_dataloader
        with trainer.trial_steps("batch_size_finder") as step:
            _with_batch_size(loader, self.init_val)  # raises early if it cannot
            self.optimal_batch_size = self._search(trainer, loader, step)
        trainer.print(f"batch_size_finder: {self.optimal_batch_size}")

    def state_dict(self) -> dict[str, int | None]:
        """Return the size that was found."""
        return {"optimal_batch_size": self.optimal_batch_size}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Restore the size that was found."""
        self.optimal_batch_size = state["optimal_batch_size"]

    def _search(self, trainer: TrainerView, loader: Any, step: Any) -> int:
        largest = min(self.max_val or len(loader.dataset), len(loader.dataset))
        good, bad, size = 0, None, min(self.init_val, largest)
        for _ in range(self.max_trials):
            if self._fits(trainer, _with_batch_size(loader, size), step):
                good = size
            else:
                bad = size
            if bad is None:
                if size == largest:
                    break
                size = min(size * 2, largest)
            elif self.mode == "power" or bad - good <= 1:
                break
            else:
                size = (good + bad) // 2
        if good == 0:
            raise ConfigError(f"batch_size_finder ran out of memory with {bad} samples", do="set a smaller init_val")
        return good

    def _fits(self, trainer: TrainerView, loader: Any, step: Any) -> bool:
        try:
            for number, batch in enumerate(itertools.islice(loader, self.steps_per_trial)):
                step(batch, number)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            gc.collect()
            if trainer.run.device.type != "cpu":
                torch.accelerator.empty_cache()
        return True


def set_found(module: Any, name: str, value: Any) -> None:
    """Set the attribute and the hyper-parameter `name` of `module`, as far as it has them."""
    if hasattr(module, name):
        setattr(module, name, value)
    if name in module.hparams:
        module.hparams[name] = value


def _with_batch_size(loader: Any, batch_size: int) -> Any:
    """Return `loader` with batches of another size.

    Raises:
        ConfigError: it is not a DataLoader, or one that makes its batches itself.
    """
    if not isinstance(loader, DataLoader) or loader.batch_size is None or loader.batch_sampler is None:
        raise ConfigError(
            f"the training loader is a {type(loader).__name__} whose batches have no size to set",
            expected="a DataLoader with a batch_size",
        )
    kind: Any = type(loader.batch_sampler)  # one that takes what torch's own takes
    batches = kind(loader.sampler, batch_size, loader.drop_last)
    return replace_in_loader(loader, batch_sampler=batches, batch_size=batch_size)
