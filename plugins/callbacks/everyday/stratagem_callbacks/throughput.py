"""Log how fast training goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from attrs import define, field

from stratagem import Callback, hookimpl
from stratagem.errors import ConfigError
from stratagem.metrics import infer_batch_size
from stratagem.options import at_least, more_than

#: Dense 16-bit matrix products a second, from the makers' data sheets.
_PEAK_FLOPS = {
    "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12,
    "V100": 125e12, "T4": 65e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


@define(eq=False, kw_only=True)
class Throughput(Callback):
    """Logs batches, samples and (if told how many) tokens a second over the last `window` batches, over all ranks.

    With `flops_per_batch`, or `measure_flops`, also the FLOPs a second of a device, and their share of the most that it
    can do (MFU).
    """

    #: Batches to average over: more are steadier, fewer follow changes.
    window: int = field(default=100, validator=at_least(2))
    #: Return the number of samples in a batch; found from its first tensor otherwise.
    batch_size_fn: Callable[[Any], int] | None = None
    #: Return the number of tokens in a batch.
    length_fn: Callable[[Any], int] | None = None
    #: FLOPs of forward and backward of one batch on one device.
    flops_per_batch: float | None = field(default=None, validator=more_than(0))
    #: Count the FLOPs of the first batch with torch's counter; costs that batch some time.
    measure_flops: bool = False
    #: FLOPs a second that the device can do at best; known for common GPUs in 16 bits.
    available_flops: float | None = field(default=None, validator=more_than(0))

    _times: Any = field(init=False, default=None)
    _counter: Any = field(init=False, default=None)
    _peak: float | None = field(init=False, default=None)
    _last_step: int = field(init=False, default=-1)
    _totals: list[int] = field(init=False, factory=lambda: [0, 0, 0])

    def __attrs_post_init__(self) -> None:
        if self.flops_per_batch is not None and self.measure_flops:
            raise ConfigError("throughput has flops_per_batch and measure_flops", expected="one of the two")
        if self.available_flops is not None and self.flops_per_batch is None and not self.measure_flops:
            raise ConfigError(
                "throughput.available_flops is set without the FLOPs of a batch",
                expected="flops_per_batch, or measure_flops=True",
            )

    @hookimpl
    def on_train_start(self, trainer):
        if not (trainer.loggers or trainer.fast_dev_run):
            raise ConfigError("throughput has no logger to log to", expected="a logger", do="drop logger=False, or it")
        self._times = deque(maxlen=self.window)
        self._totals = [0, 0, 0]
        self._peak = self.available_flops or _peak_of(trainer.run.device)
        self._mark()

    def _mark(self) -> None:
        self._times.append((time.perf_counter(), *self._totals))

    @hookimpl
    def step_context(self, stage):
        if not (self.measure_flops and stage == "train" and self.flops_per_batch is None):
            return None
        from torch.utils.flop_counter import FlopCounterMode

        self._counter = FlopCounterMode(display=False)
        return self._counter

    @hookimpl
    def on_validation_start(self):
        if self._times is not None:
            self._times.clear()  # its time is not training's, nor that of saving after it

    @hookimpl
    def on_train_batch_start(self):
        if not self._times:
            self._mark()

    @hookimpl
    def on_train_batch_end(self, trainer, batch):
        if self._counter is not None:
            self.flops_per_batch, self._counter = float(self._counter.get_total_flops()), None
        self._totals[0] += 1
        self._totals[1] += self.batch_size_fn(batch) if self.batch_size_fn is not None else infer_batch_size(batch)
        self._totals[2] += self.length_fn(batch) if self.length_fn is not None else 0
        self._mark()
        step = trainer.global_step
        if step == self._last_step or step % trainer.settings.log_every_n_steps or not step:
            return
        self._last_step = step
        rates = self.rates(trainer.run.mesh.num_data_shards)
        trainer.callback_metrics.update(rates)
        if trainer.is_global_zero and rates:
            trainer.run.hook.log_metrics(metrics=rates, step=step, run=trainer.run)

    def rates(self, num_shards: int) -> dict[str, float]:
        """Return what is logged: of all ranks together, but FLOPs of one device."""
        (first, *before), (last, *after) = self._times[0], self._times[-1]
        if last <= first:
            return {}
        batches, samples, tokens = ((b - a) / (last - first) for a, b in zip(before, after, strict=True))
        rates = {"throughput/batches_per_s": batches, "throughput/samples_per_s": samples * num_shards}
        if self.length_fn is not None:
            rates["throughput/tokens_per_s"] = tokens * num_shards
        if self.flops_per_batch is not None:
            rates["throughput/device_flops_per_s"] = batches * self.flops_per_batch
            if self._peak is not None:
                rates["throughput/mfu"] = batches * self.flops_per_batch / self._peak
        return rates


def _peak_of(device: Any) -> float | None:
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((flops for known, flops in _PEAK_FLOPS.items() if known in name), None)
