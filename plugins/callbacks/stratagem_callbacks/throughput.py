"""Log training throughput."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.validators import at_least, more_than
from stratagem.errors import ConfigError
from stratagem_callbacks.logged_metrics import check_has_logger, is_due, log
from stratagem_trainer.api import Callback
from stratagem_trainer.api.metric_values import infer_batch_size

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stratagem_trainer.api import TrainerView

#: Dense 16-bit matrix FLOPs per second from the vendors' data sheets, by the full device name without vendor and
#: memory: "L4" must not match "L40", nor a GPU its MIG slices ("A100-SXM4-40GB MIG 1g.5gb").
_PEAK_FLOPS = {
    r"GB200": 2500e12, r"B200": 2250e12, r"(GH200|H200)": 989e12, r"H200 NVL": 835e12,
    r"H100([- ]SXM5)?": 989e12, r"H100[- ]PCIe": 756e12, r"H100 NVL": 835e12,
    r"A100([- ](SXM4|PCIe))?": 312e12, r"A40": 150e12, r"A30": 165e12, r"A10": 125e12, r"A10G": 70e12,
    r"L40S": 362e12, r"L40": 181e12, r"L4": 121e12,
    r"V100([- ]SXM[23])?": 125e12, r"V100[- ]PCIe": 112e12, r"V100S[- ]PCIe": 130e12, r"T4": 65e12,
    r"RTX 6000 Ada Generation": 364e12, r"RTX A6000": 155e12, r"RTX 4090": 165e12, r"RTX 3090": 71e12,
    r"Instinct MI300X": 1307e12,
}  # fmt: skip
_VENDORS = re.compile(r"(NVIDIA|AMD|Tesla|GeForce)\s+")
#: Sizes and types of memory in device names.
_MEMORY = re.compile(r"[- ](\d+\s?GB|HBM3e?)\b", re.IGNORECASE)


@define(eq=False, kw_only=True)
class Throughput(Callback):
    """Log batches, samples and (with `length_fn`) tokens per second over the last `window` batches, for all ranks.

    With `flops_per_batch` or `measure_flops`, log the FLOPs per second of a device, too, and their fraction of the peak
    (MFU).
    """

    #: Batches to average over: more are steadier, fewer follow changes.
    window: int = field(default=100, validator=at_least(2))
    #: Returns the number of samples in a batch; by default the size of its first tensor.
    batch_size_fn: Callable[[Any], int] | None = None
    #: Returns the number of tokens in a batch.
    length_fn: Callable[[Any], int] | None = None
    #: FLOPs of forward and backward of one batch on one device.
    flops_per_batch: float | None = field(default=None, validator=more_than(0))
    #: Count the FLOPs of the first batch with torch's FlopCounterMode, which slows that batch down.
    measure_flops: bool = False
    #: Peak FLOPs per second of the device; known for common GPUs in 16 bits.
    available_flops: float | None = field(default=None, validator=more_than(0))

    _times: Any = field(init=False, default=None)
    #: A counter for each part of the batch whose FLOPs are counted.
    _counters: list[Any] = field(init=False, factory=list)
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
    def on_train_start(self, trainer: TrainerView) -> None:
        check_has_logger(trainer, "throughput")
        self._times = deque(maxlen=self.window)
        self._totals, self._last_step = [0, 0, 0], -1
        self._peak = self.available_flops or _peak_of(trainer.run.device)
        self._record()

    def _record(self) -> None:
        self._times.append((time.perf_counter(), *self._totals))

    @hookimpl
    def step_context(self, stage: str) -> AbstractContextManager[Any] | None:
        if not (self.measure_flops and stage == "train" and self.flops_per_batch is None):
            return None
        from torch.utils.flop_counter import FlopCounterMode

        counter = FlopCounterMode(display=False)
        self._counters.append(counter)
        return counter

    @hookimpl
    def on_validation_start(self) -> None:
        if self._times is not None:
            self._times.clear()  # do not count the time of validation, and of saving after it

    @hookimpl
    def on_train_batch_start(self) -> None:
        if not self._times:
            self._record()

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView, batch: Any) -> None:
        if self._counters:
            self.flops_per_batch = float(sum(counter.get_total_flops() for counter in self._counters))
            self._counters.clear()
        self._totals[0] += 1
        self._totals[1] += self.batch_size_fn(batch) if self.batch_size_fn is not None else infer_batch_size(batch)
        self._totals[2] += self.length_fn(batch) if self.length_fn is not None else 0
        self._record()
        if is_due(trainer, self._last_step):
            self._log(trainer)

    @hookimpl
    def on_train_end(self, trainer: TrainerView) -> None:
        if trainer.global_step > self._last_step:
            self._log(trainer)

    def _log(self, trainer: TrainerView) -> None:
        self._last_step = trainer.global_step
        if self._times and (rates := self.rates(trainer.run.mesh.num_data_shards)):
            log(trainer, rates, self._last_step)

    def rates(self, num_shards: int) -> dict[str, float]:
        """Return the metrics: totals of all ranks, but FLOPs of one device."""
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

    return peak_flops(torch.cuda.get_device_name(device))


def peak_flops(name: str) -> float | None:
    """Return the dense 16-bit matrix FLOPs per second of the device `name`; None if unknown."""
    model = _MEMORY.sub("", _VENDORS.sub("", name)).strip()
    return next((flops for known, flops in _PEAK_FLOPS.items() if re.fullmatch(known, model, re.IGNORECASE)), None)
