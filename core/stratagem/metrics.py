"""What a module logs: values of the last step, and means (or sums, extremes) over an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import asdict, define

from stratagem.errors import ConfigError
from stratagem.world import Collectives

if TYPE_CHECKING:
    from torch import Tensor

ReduceFx = Literal["mean", "sum", "max", "min"] | Callable[["Tensor"], "Tensor"]
_REDUCTIONS = ("mean", "sum", "max", "min")


@define(eq=False)
class Metric:
    """One name that a stage logs, and what has been seen of it."""

    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    sync_dist: bool
    rank_zero_only: bool
    reduce_fx: Any
    #: The last value, detached.
    last: Any = None
    #: Weighted sum, sum or extreme over the epoch; a list for a callable reduce_fx.
    total: Any = None
    weight: float = 0.0
    #: An object that computes its own value over the epoch and over all ranks, as torchmetrics' do.
    source: Any = None

    def update(self, value: Any, weight: float) -> None:
        if self.source is not None:
            self.last = getattr(value, "_forward_cache", None) if self.on_step else None
            if self.on_step and self.last is None:
                raise ConfigError(
                    f"a {type(value).__name__} that was only updated is logged on each step", expected="its value",
                    do="call it rather than its update(), or log it with on_step=False, on_epoch=True",
                )  # fmt: skip
            self.total = True
            return
        self.last = value
        if not self.on_epoch:
            return
        if self.reduce_fx == "mean":
            value = value * weight
            self.total = value if self.total is None else self.total + value
            self.weight += weight
        elif callable(self.reduce_fx):
            self.total = [*(self.total or []), _tensor(value)]
        elif self.total is None:
            self.total = value
        elif self.reduce_fx == "sum":
            self.total = self.total + value
        else:
            better = value > self.total if self.reduce_fx == "max" else value < self.total
            self.total = value if better else self.total

    def reset(self) -> None:
        self.last, self.total, self.weight = None, None, 0.0
        if self.source is not None:
            self.source.reset()


class MetricBook:
    """The metrics of one stage ("train", "validate", "test"), and where each of them is to be shown."""

    def __init__(self, default_on_step: bool, collectives: Collectives) -> None:
        self.default_on_step, self.collectives = default_on_step, collectives
        self.metrics: dict[str, Metric] = {}
        #: The batch that is being worked on; its size weighs means.
        self.batch: Any = None

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: ReduceFx = "mean",
        sync_dist: bool = False,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """See `stratagem.Module.log`."""
        metric = self.metrics.get(name)
        if metric is None:
            metric = self._new(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only)
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                value = value.detach()
            if value.numel() != 1:
                raise ConfigError(f"log({name!r}) got a tensor of shape {tuple(value.shape)}", expected="one number")
            if value.dim():
                value = value.reshape(())
            if value.dtype in (torch.float16, torch.bfloat16):
                value = value.float()  # a sum of many would lose them
        weight = 1.0
        if metric.on_epoch and metric.reduce_fx == "mean":
            weight = float(batch_size if batch_size is not None else infer_batch_size(self.batch))
        metric.update(value, weight)
        if metric.on_step and metric.sync_dist and self.collectives.world_size > 1:
            metric.last = self.collectives.all_reduce(_tensor(value), _op(metric))

    def _new(
        self, name: str, value: Any, prog_bar: bool, logger: bool, on_step: bool | None, on_epoch: bool | None,
        reduce_fx: Any, sync_dist: bool, rank_zero_only: bool,
    ) -> Metric:  # fmt: skip
        computes = _computes(value)
        if not (computes or isinstance(value, torch.Tensor | int | float)):
            raise ConfigError(
                f"log({name!r}) got {value!r}",
                expected="a number, a tensor with one element, or an object with update, compute and reset",
            )
        if not (callable(reduce_fx) or reduce_fx in _REDUCTIONS):
            raise ConfigError(
                f"log({name!r}, reduce_fx={reduce_fx!r})", expected=f"one of {', '.join(_REDUCTIONS)} or a callable"
            )
        if rank_zero_only and sync_dist:
            raise ConfigError(
                f"log({name!r}) sets rank_zero_only and sync_dist", expected="one of the two",
                do="drop sync_dist: the other ranks would wait for ever",
            )  # fmt: skip
        step = self.default_on_step if on_step is None else on_step
        epoch = (not self.default_on_step) if on_epoch is None else on_epoch
        metric = Metric(step, epoch, prog_bar, logger, sync_dist, rank_zero_only, reduce_fx)
        if computes:
            if rank_zero_only:
                raise ConfigError(
                    f"log({name!r}) sets rank_zero_only for a {type(value).__name__}, which asks all ranks",
                    do="drop it",
                )
            metric.source, metric.sync_dist = value, False  # it asks the other ranks by itself
        self.metrics[name] = metric
        return metric

    def step_values(self) -> dict[str, Any]:
        """Return the last value of every metric logged on steps, by display name."""
        return {
            f"{name}_step" if metric.on_epoch else name: metric.last
            for name, metric in self.metrics.items()
            if metric.on_step and metric.last is not None
        }

    def epoch_values(self) -> dict[str, Tensor]:
        """Return the reduction of every metric logged on epochs, by display name. Collective."""
        reduced = {name: m for name, m in self.metrics.items() if m.on_epoch and m.total is not None}
        if self.collectives.world_size > 1:
            self._check_same_names([name for name, m in reduced.items() if m.sync_dist])
        values = {}
        for name, metric in reduced.items():
            value = _epoch_value(metric, self.collectives if metric.sync_dist else None)
            values[f"{name}_epoch" if metric.on_step else name] = value
        return values

    def shown(self, display_name: str, where: str) -> bool:
        """Whether the metric behind `display_name` goes to `where`: "prog_bar" or "logger"."""
        metric = self.metrics.get(display_name) or self.metrics.get(display_name.rpartition("_")[0])
        return metric is not None and getattr(metric, where)

    def _check_same_names(self, synced: list[str]) -> None:
        """Different names on different ranks would mix up their sums, or hang."""
        per_rank = self.collectives.all_gather_object(synced)
        for rank, names in enumerate(per_rank):
            if names != per_rank[0]:
                odd = sorted(set(names) ^ set(per_rank[0])) or names
                raise ConfigError(
                    f"rank {rank} and rank 0 logged different metrics with sync_dist=True ({', '.join(odd)})",
                    expected="the same names in the same order on all ranks",
                    do="log them on every rank, or without sync_dist",
                )

    def state_dict(self) -> dict[str, Any]:
        """Return what the epoch has seen so far; metrics with a reduction of the user's own are left out."""
        kept = {
            name: m
            for name, m in self.metrics.items()
            if m.total is not None and not callable(m.reduce_fx) and m.source is None
        }
        return {name: asdict(metric) for name, metric in kept.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an epoch that another process began."""
        self.metrics = {name: Metric(**fields) for name, fields in state.items()}

    def reset(self) -> None:
        """Begin a new epoch; what was declared by `log` stays."""
        for metric in self.metrics.values():
            metric.reset()


def _computes(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


def _op(metric: Metric) -> Any:
    return metric.reduce_fx if metric.reduce_fx in _REDUCTIONS else "mean"


def _epoch_value(metric: Metric, collectives: Collectives | None) -> Tensor:
    if metric.source is not None:
        value = metric.source.compute()
        if not isinstance(value, torch.Tensor | int | float) or (
            isinstance(value, torch.Tensor) and value.numel() != 1
        ):
            raise ConfigError(
                f"{type(metric.source).__name__}.compute() returned {value!r}", expected="one number",
                do="log its parts one by one",
            )  # fmt: skip
        return _tensor(value)
    if callable(metric.reduce_fx):
        value = metric.reduce_fx(torch.stack(metric.total))
        return collectives.all_reduce(value, "mean") if collectives else value
    total = _tensor(metric.total)
    if metric.reduce_fx == "mean":
        sums = torch.stack([total.double(), torch.tensor(metric.weight, dtype=torch.float64, device=total.device)])
        if collectives:
            sums = collectives.all_reduce(sums, "sum")
        return (sums[0] / sums[1]).to(total.dtype if total.is_floating_point() else torch.float32)
    return collectives.all_reduce(total, metric.reduce_fx) if collectives else total


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def infer_batch_size(batch: Any) -> int:
    """Return the first dimension of the first tensor found in `batch`; 1 if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    for item in items:
        if isinstance(item, torch.Tensor | list | tuple | dict):
            return infer_batch_size(item)
    return 1
