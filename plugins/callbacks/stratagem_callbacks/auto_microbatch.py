"""Compute a batch in micro-batches, twice as many whenever a device runs out of memory.

[Note: micro-batches]
A part with n of the N samples of a batch is differentiated with its loss times n / N, so the sum of the gradients of
all parts is that of the batch, whatever the number of parts. Ranks may therefore compute their batches in different
numbers of parts, and a rank that runs out of memory recovers alone: it drops the gradients of the accumulation
window, puts buffers back, and computes the batches of the window again, each from the random state that it began
with, in twice as many parts. Nothing that was logged or returned in the failed attempt is published.

For this no part sends a message. With several ranks all parts run as those of a batch that is only accumulated; what
the strategy sends in a forward (DDP: buffers) is sent before the first part of a window, in a forward without a
computation, and gradients are averaged after the last one, in a backward that adds zero to them: it goes through the
same buckets and comm hooks as any other. Each rank tells the others its number at the end of a window, without waiting
for the answer: in the next window all have the largest one.
"""

from __future__ import annotations

import gc
import math
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from stratagem.api import NO_SYNC, SHARDED_PARAMETERS, STEPPED_COPIES, Capabilities, hookimpl
from stratagem.api.batches import map_batch
from stratagem.api.capabilities import ACCUMULATION, STEPS_IN_BACKWARD
from stratagem.api.seeding import random_state, restore_random_state
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_callbacks.memory_errors import is_out_of_memory
from stratagem_microbatches import batch_size, combined, mean, merge, split
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView


@frozen
class _Batch:
    """A batch of the window, with what is needed to compute it again."""

    batch: Any
    batch_idx: int
    divisor: float
    random_state: dict[str, Any]


class _CountsTargets(Exception):
    """`training_step` returned a sum and a count, and the parts were weighted as means."""


@define(eq=False, kw_only=True)
class AutoMicrobatch(Callback):
    """Compute each batch in micro-batches, and double their number when training runs out of memory.

    The optimizer steps on the same batches with the same gradients as without it, if the loss is a mean over samples
    (or over targets, with ``loss_normalization="tokens"``). Checkpoints hold the number. With several ranks the
    strategy replicates the model. See [Note: micro-batches].
    """

    #: Number of micro-batches to begin with.
    microbatches: int = field(default=1, validator=at_least(1))
    #: Samples of the smallest micro-batch: where half as many would be needed, the error ends the run.
    smallest: int = field(default=1, validator=at_least(1))

    #: Number of micro-batches now.
    count: int = field(init=False, default=0)
    _steps: Any = field(init=False, default=None)
    _trainer: Any = field(init=False, default=None)
    _window: list[_Batch] = field(init=False, factory=list)
    _buffers: Any = field(init=False, default=None)
    #: Samples of the batch that is computed.
    _size: int = field(init=False, default=0)
    #: Losses are sums, returned with their counts: parts are not weighted.
    _counts: bool = field(init=False, default=False)
    #: Carries the numbers of all ranks; the answer for the last window.
    _among: Any = field(init=False, default=None)
    _told: Any = field(init=False, default=None)

    capabilities = Capabilities(
        requires={ACCUMULATION}, conflicts={SHARDED_PARAMETERS, STEPPED_COPIES, STEPS_IN_BACKWARD}
    )

    @hookimpl
    def on_train_start(self, trainer: TrainerView, module: torch.nn.Module, run: RunContext) -> None:
        _check(run, module)
        self.count = max(self.count, self.microbatches)
        self._trainer, self._buffers, self._told, self._counts = trainer, _Buffers(module), None, False
        self._among = run.peers.duplicate("auto_microbatch").unchecked if run.peers.world_size > 1 else None
        self._window.clear()
        self._steps = trainer.train_in_parts(self._train)

    @hookimpl
    def on_train_epoch_start(self) -> None:
        self._window.clear()  # the module may have skipped the rest of an epoch

    @hookimpl
    def on_train_end(self) -> None:
        self._release()

    @hookimpl
    def on_exception(self) -> None:
        self._release()

    def _release(self) -> None:
        self._window.clear()
        self._steps = self._trainer = self._buffers = self._among = self._told = None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of micro-batches."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of micro-batches."""
        self.count = state["count"]

    # --- A batch ---------------------------------------------------------------------------------------------------

    def _train(self, batch: Any, batch_idx: int, divisor: float, sync: bool) -> Any:
        if not self._window:
            self._begin_window()
        self._window.append(_Batch(batch, batch_idx, divisor, random_state(self._trainer.run.devices)))
        result = self._attempt(self._window[-1:], sync)
        while result is None:
            self._recover()
            result = self._attempt(self._window, sync, again=True)
        output, entries = result
        self._steps.publish(entries)
        if sync:
            self._end_window()
        return output

    def _begin_window(self) -> None:
        if self._among is not None:
            if self._told is not None:
                self.count = int(self._told.wait().max())
            self._steps.send_buffers()
        self._buffers.keep()

    def _end_window(self) -> None:
        self._window.clear()
        if self._among is not None:
            self._told = self._among.all_gather_async(torch.tensor([self.count]))
            self._steps.average_gradients()

    def _attempt(self, batches: Sequence[_Batch], sync: bool, again: bool = False) -> tuple[Any, list[Any]] | None:
        """Return the output of the last one of `batches` and what it logged; None to try again in other parts."""
        try:
            for each in batches:
                if again:
                    restore_random_state(each.random_state, self._trainer.run.devices)
                result = self._in_parts(each, sync and each is self._window[-1])
        except _CountsTargets:
            self._counts = True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or math.ceil(self._size / self.count) < 2 * self.smallest:
                raise
            self._double()
        else:
            return result
        return None

    def _in_parts(self, kept: _Batch, sync: bool) -> tuple[Any, list[Any]]:
        parts, weights = self._divided(kept.batch)
        total, outputs, logs = sum(weights), [], []
        for part, weight in zip(parts, weights, strict=True):
            divisor = kept.divisor if self._counts else kept.divisor * (total / weight)
            with self._steps.recorded() as entries:
                is_last = part is parts[-1] and self._among is None
                output = self._steps.train(part, kept.batch_idx, divisor, sync and is_last)
            if isinstance(output, dict) and "count" in output and not self._counts and len(parts) > 1:
                raise _CountsTargets
            outputs.append(map_batch(output, _detached))
            logs.append(entries)
        entries = combined(logs, weights) if len(logs) > 1 else logs[0]
        return _merged(outputs, weights, self._counts), entries

    def _divided(self, batch: Any) -> tuple[list[Any], list[float]]:
        """Return the parts of `batch` and how much each counts; the larger ones come first."""
        self._size = size = batch_size(batch)
        count = min(self.count, size)
        if count == 1:
            return [batch], [1.0]
        sizes = [size // count + (number < size % count) for number in range(count)]
        parts = split(batch, sizes)
        weights = [self._steps.weight(part, samples) for part, samples in zip(parts, sizes, strict=True)]
        weighty = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]  # some have no target
        return ([part for part, _ in weighty], [weight for _, weight in weighty]) if weighty else ([batch], [1.0])

    # --- Out of memory ---------------------------------------------------------------------------------------------

    def _double(self) -> None:
        trainer = self._trainer
        where = f"rank {trainer.global_rank} ran out of memory" if trainer.world_size > 1 else "out of memory"
        samples, self.count = self._size, 2 * self.count
        print(
            f"auto_microbatch: {where} at batch {trainer.position.batches_done} with {samples} samples; {self.count} "
            f"micro-batches of {math.ceil(samples / self.count)} from now on",
            flush=True,
        )

    def _recover(self) -> None:
        """Put back what the window has changed so far; called when no frame of the attempt holds tensors."""
        for parameter in self._trainer.module.parameters():
            parameter.grad = None
        self._buffers.put_back()
        gc.collect()
        if self._trainer.run.device.type != "cpu":
            torch.accelerator.empty_cache()


class _Buffers:
    """Copies of the buffers of a module, such as running statistics, as they were when a window began."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self) -> None:
        """Copy the buffers as they are now."""
        # all of them: a write through `.data` leaves no trace on a buffer
        self._kept = {name: (buffer, buffer.detach().clone()) for name, buffer in self._module.named_buffers()}

    def put_back(self) -> None:
        """Give the buffers the values that were copied."""
        for name, (buffer, copied) in self._kept.items():
            where, _, last = name.rpartition(".")
            self._module.get_submodule(where)._buffers[last] = buffer
            with torch.no_grad():
                buffer.copy_(copied)


def _check(run: RunContext, module: torch.nn.Module) -> None:
    """Refuse what cannot be computed in parts, or what sends messages within a part.

    Raises:
        ConfigError: names it.
    """
    if run.manual:
        raise ConfigError(
            f"auto_microbatch was chosen with {type(module).__name__}.automatic_optimization = False",
            expected="a module that the trainer steps", do="divide batches in training_step",
        )  # fmt: skip
    if run.peers.world_size == 1:
        return
    found = ""
    if not run.provides(NO_SYNC) or run.mesh.num_data_shards < run.world_size:
        found = f"{run.title_of(run.strategy)} sends messages for each part of a batch"
    elif getattr(run.model, "static_graph", False):
        found = "static_graph is set, so that DDP sends messages in its first backward"
    elif run.settings.sync_batchnorm or any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()):
        found = "synchronized batch normalization sends messages in its forward"
    if found:
        raise ConfigError(
            f"auto_microbatch was chosen for {run.world_size} ranks, and {found}",
            expected="parts that send nothing: a rank that runs out of memory would leave the others waiting",
            do='use strategy "ddp", or find the size of a batch with batch_size_finder',
        )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _merged(outputs: list[Any], weights: list[float], counts: bool) -> Any:
    """Return what `training_step` would return for the batch; None if it skipped all parts."""
    found = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if output is not None]
    if len(outputs) == 1 or not found:
        return outputs[0]
    outputs, weights = [output for output, _ in found], [weight for _, weight in found]
    if not isinstance(outputs[0], dict):
        return mean(outputs, weights)
    rest = [{key: value for key, value in output.items() if key not in ("loss", "count")} for output in outputs]
    losses = [output["loss"] for output in outputs]
    if not counts:
        return merge(rest, weights) | {"loss": mean(losses, weights)}
    return merge(rest, weights) | {"loss": sum(losses), "count": sum(output["count"] for output in outputs)}
