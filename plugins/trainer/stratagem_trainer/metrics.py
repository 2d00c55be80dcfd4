"""What a module logs: values of the last step, and means (or sums, extremes) over an epoch.

[Note: exact numbers]
Integers and booleans are added up as 64-bit integers, everything else in double precision; a sum that 64 bits cannot
hold becomes a double. Over ranks a value is sent as 64 bits with a flag that tells integers from doubles, so that one
rank may log ``0`` and another ``0.5``. A NaN is never lost: mean, sum, max and min of it are NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from attrs import asdict, define

from stratagem.api.readback import as_numbers
from stratagem.api.world import Collectives
from stratagem.distributed.comparison import fingerprint
from stratagem.errors import ConfigError
from stratagem_trainer.api.metric_values import as_tensor, combine, infer_batch_size, number

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem_trainer.api.metric_values import ReduceFx

_REDUCTIONS = ("mean", "sum", "max", "min")

#: Functions that mean one of those.
_SYNONYMS: tuple[tuple[Any, str], ...] = (
    (torch.mean, "mean"), (torch.sum, "sum"), (sum, "sum"), (torch.max, "max"), (torch.amax, "max"), (max, "max"),
    (torch.min, "min"), (torch.amin, "min"), (min, "min"),
)  # fmt: skip


class LogOptions(NamedTuple):
    """The options that all calls of `Module.log` for one name have in common."""

    on_step: bool | None = None
    on_epoch: bool | None = None
    prog_bar: bool = False
    logger: bool = True
    reduce_fx: ReduceFx = "mean"
    sync_dist: bool = False
    rank_zero_only: bool = False


#: Metrics in the message that reduces those of a step; the rest follows once the names are compared.
_FIRST = 16


@define(eq=False, repr=False)
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
    #: Sum of the weights of a mean; for a sum of integer tensors that sum in doubles, which tells an overflow.
    weight: Any = 0.0
    #: An object that computes its own value over the epoch and over all ranks, as torchmetrics' do.
    source: Any = None
    #: The options as the last call gave them, and whether a step's value was to be logged by default.
    given: Any = None
    #: The loader it was logged for ("/dataloader_idx_0"), if there are several.
    loader: str = ""
    #: Names under which the two values are shown, and the name of both in `Trainer.callback_metrics`.
    name: str = ""
    step_name: str = ""
    epoch_name: str = ""

    def take_names(self, name: str, suffix: str = "") -> None:
        """Set the names that are shown: `name`, with "_step" and "_epoch" if both are logged, then `suffix`."""
        both = self.on_step and self.on_epoch
        self.name = name + suffix
        self.step_name, self.epoch_name = (f"{name}{part if both else ''}{suffix}" for part in ("_step", "_epoch"))

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
            self.total = _plus_weighted(self.total, value, weight)
            self.weight += weight
        elif callable(self.reduce_fx):
            self.total = [*(self.total or []), as_tensor(value)]
        else:
            self.total = combine(self.total, value, self.reduce_fx)
            if self.reduce_fx == "sum" and isinstance(value, torch.Tensor) and not value.is_floating_point():
                self.weight = self.weight + value.double()

    def reset(self) -> None:
        self.last, self.total, self.weight = None, None, 0.0
        if self.source is not None:
            self.source.reset()


class StageMetrics:
    """The metrics of one stage ("train", "validate", "test"), and where each of them is to be shown."""

    def __init__(self, default_on_step: bool, collectives: Collectives) -> None:
        self.default_on_step, self.collectives = default_on_step, collectives
        self.metrics: dict[str, Metric] = {}
        #: The present batch; its size is the weight in means.
        self.batch: Any = None
        #: What was logged on this step with ``sync_dist=True``.
        self._to_reduce: dict[str, Metric] = {}
        #: Appended to names while one of several loaders is evaluated.
        self.loader = ""
        #: When nothing may be logged: why; an event in which there is no step to log.
        self.closed, self.without_steps = "", ""
        #: A value of each step goes to the loggers.
        self.logs_steps = False
        self._shown: dict[str, tuple[str, Metric]] = {}

    def log(
        self, name: str, value: Any, options: LogOptions, batch_size: int | None = None, add_dataloader_idx: bool = True
    ) -> None:
        """See `stratagem.Module.log`."""
        key = name if not (self.loader and add_dataloader_idx) else name + self.loader
        metric = self.metrics.get(key)
        given = (options, self.default_on_step)
        if metric is None:
            metric = self._new(name, value, given, add_dataloader_idx)
        elif metric.given != given:
            self._check_same_options(name, metric, given)
        if metric.loader != self.loader:
            first, second = (loader.rpartition("_")[2] or "none" for loader in (metric.loader, self.loader))
            raise ConfigError(
                f"log({name!r}, add_dataloader_idx=False) was called for loader {first} and for {second}",
                expected="a name for each loader, as their values would be mixed",
                do="drop add_dataloader_idx=False, or put dataloader_idx into the name",
            )
        if metric.source is None:
            value = number(name, value)
        elif value is not metric.source:
            found = "another" if type(value) is type(metric.source) else "a"
            raise ConfigError(
                f"log({name!r}) got {found} {type(value).__name__}",
                expected=f"the {type(metric.source).__name__} that was logged under this name before",
                do="log it under a name of its own",
            )
        weight = 1.0
        if metric.on_epoch and metric.reduce_fx == "mean":
            weight = float(batch_size if batch_size is not None else infer_batch_size(self.batch))
        metric.update(value, weight)
        if metric.on_step and metric.sync_dist and self.collectives.world_size > 1:
            self._to_reduce[key] = metric

    def reduce_step(self, moment: str | int) -> None:
        """Reduce over all ranks what was logged with ``sync_dist=True`` on this step, all of it at once. Collective.

        Args:
            moment: the same on all ranks, such as the number of the batch.

        Raises:
            ConfigError: on all ranks, if they logged different names, or at different moments.
        """
        if not self._to_reduce:
            return
        metrics, self._to_reduce = dict(sorted(self._to_reduce.items())), {}
        waiting_in = f"log({', '.join(map(repr, metrics))}, sync_dist=True)"  # noqa: F841 - `world.where` reads it
        collectives = self.collectives.duplicate("log")
        ops = {name: getattr(metric.reduce_fx, "__name__", str(metric.reduce_fx)) for name, metric in metrics.items()}
        header = torch.tensor([fingerprint(f"{ops} {moment}")])
        values = _coded_on_cpu([metric.last for metric in metrics.values()])
        # Of the same size on all ranks, whatever each logged: collectives on different sizes abort.
        padding = header.new_zeros(2 * max(0, _FIRST - len(values)))
        message = torch.cat([header, *values[:_FIRST], padding])
        of_all_ranks = torch.stack(collectives.all_gather(message)).cpu()  # (ranks, numbers)
        if collectives.values((of_all_ranks[:, : len(header)] != of_all_ranks[0, : len(header)]).any(), planned=False):
            self._check_same_names(list(metrics), collectives)
            _raise_difference(collectives.all_gather_object((ops, moment)))
        coded = of_all_ranks[:, len(header) : len(message) - len(padding)]
        if more := values[_FIRST:]:
            coded = torch.cat([coded, torch.stack(collectives.all_gather(torch.cat(more))).cpu()], 1)
        for (name, metric), pair in zip(metrics.items(), coded.split(2, 1), strict=True):
            metric.last = _reduced(name, _decoded(pair, collectives), metric.reduce_fx)

    def _new(self, name: str, value: Any, given: tuple[Any, ...], with_loader: bool) -> Metric:
        options = self._effective(given)
        reduce_fx = options["reduce_fx"]
        if not (callable(reduce_fx) or reduce_fx in _REDUCTIONS):
            raise ConfigError(
                f"log({name!r}, reduce_fx={reduce_fx!r})", expected=f"one of {', '.join(_REDUCTIONS)} or a callable"
            )
        if options["rank_zero_only"] and options["sync_dist"]:
            raise ConfigError(
                f"log({name!r}) sets rank_zero_only and sync_dist", expected="one of the two",
                do="drop sync_dist: the other ranks would wait forever",
            )  # fmt: skip
        if options["on_step"] and self.without_steps:
            raise ConfigError(
                f"log({name!r}, on_step=True) was called in {self.without_steps}, where there is no step",
                expected="on_epoch=True alone", do="drop on_step",
            )  # fmt: skip
        metric = Metric(**options, given=given, loader=self.loader)
        metric.take_names(name, self.loader if with_loader else "")
        if computes(value):
            if metric.rank_zero_only:
                raise ConfigError(
                    f"log({name!r}) sets rank_zero_only for a {type(value).__name__}, which asks all ranks",
                    do="drop it",
                )
            metric.source, metric.sync_dist = value, False  # it communicates in its own compute()
        self._register(metric)
        return metric

    def _register(self, metric: Metric) -> None:
        for shown in {metric.step_name, metric.epoch_name}:
            if shown in self._shown:
                raise ConfigError(
                    f"log({metric.name!r}) takes the name {shown!r} of log({self._shown[shown][0]!r})",
                    expected="different names", do="log it under another name",
                )  # fmt: skip
            self._shown[shown] = metric.name, metric
        self.metrics[metric.name] = metric
        self.logs_steps = self.logs_steps or (metric.on_step and metric.logger)

    def _effective(self, given: tuple[Any, ...]) -> dict[str, Any]:
        """Return the options with defaults for those that are not in `given`."""
        options: dict[str, Any] = given[0]._asdict()
        if options["on_step"] is None:
            options["on_step"] = self.default_on_step
        if options["on_epoch"] is None:
            options["on_epoch"] = not self.default_on_step
        reduce_fx = options["reduce_fx"]
        if isinstance(reduce_fx, str):
            reduce_fx = {"avg": "mean"}.get(reduce_fx.lower(), reduce_fx.lower())
        options["reduce_fx"] = next((n for f, n in _SYNONYMS if f is reduce_fx), reduce_fx)
        return options

    def _check_same_options(self, name: str, metric: Metric, given: tuple[Any, ...]) -> None:
        now, before = self._effective(given), {option: getattr(metric, option) for option in LogOptions._fields}
        if metric.source is not None:
            now["sync_dist"] = False
        different = [option for option in LogOptions._fields if not _same(now[option], before[option])]
        if different:
            raise ConfigError(
                f"log({name!r}) was called with other options before, and now with {_shown(now, different)}",
                expected=f"{_shown(before, different)}, as in the first call",
                do="log it under another name",
            )
        metric.given = given

    def step_values(self, loader: str | None = None) -> dict[str, Any]:
        """Return the last value of every metric logged on steps (for `loader`), by display name."""
        return {
            metric.step_name: metric.last
            for metric in self.metrics.values()
            if metric.on_step and metric.last is not None and (loader is None or metric.loader == loader)
        }

    def callback_values(self) -> dict[str, Any]:
        """Return what `step_values` does, and by the names without "_step", too."""
        return {
            name: metric.last
            for metric in self.metrics.values()
            if metric.on_step and metric.last is not None
            for name in (metric.name, metric.step_name)
        }

    def epoch_values(self) -> dict[str, Tensor]:
        """Return the reduction of every metric logged on epochs, by display name. Collective."""
        self.reduce_step("the end")
        reduced = {name: m for name, m in self.metrics.items() if m.on_epoch and m.total is not None}
        if self.collectives.world_size > 1:
            self._check_same_names([name for name, m in reduced.items() if m.sync_dist], self.collectives)
        values = {}
        for name, metric in reduced.items():
            value = _epoch_value(name, metric, self.collectives if metric.sync_dist else None)
            values[metric.epoch_name] = value
        return values

    def by_loader(self, values: dict[str, Tensor], count: int) -> list[dict[str, float]]:
        """Return what `epoch_values` returned as numbers for each of `count` loaders, under both names."""
        found: list[dict[str, float]] = [{} for _ in range(count)]
        for shown, value in as_numbers(values).items():
            name, metric = self._shown[shown]
            index = metric.loader.rpartition("_")[2]
            for result in found if not index else [found[int(index)]]:
                result[shown] = result[name] = value
        return found

    def name(self, display_name: str) -> str:
        """Return the name without "_step" or "_epoch" of the metric behind `display_name`."""
        return self._shown[display_name][0]

    def shown(self, display_name: str, where: str) -> bool:
        """Whether the metric behind `display_name` goes to `where`: "prog_bar" or "logger"."""
        return display_name in self._shown and bool(getattr(self._shown[display_name][1], where))

    def _check_same_names(self, synced: list[str], collectives: Collectives) -> None:
        """Refuse names that differ between ranks: their sums would be mixed up, or the ranks hang."""
        per_rank = collectives.all_gather_object(synced)
        for rank, names in enumerate(per_rank):
            if names != per_rank[0]:
                odd = sorted(set(names) ^ set(per_rank[0])) or names
                raise ConfigError(
                    f"rank {rank} and rank 0 logged different metrics with sync_dist=True ({', '.join(odd)})",
                    expected="the same names in the same order on all ranks",
                    do="log them on every rank, or without sync_dist",
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the epoch so far, without metrics that have a reduction of the user's own."""
        kept = {
            name: m
            for name, m in self.metrics.items()
            if m.total is not None and not callable(m.reduce_fx) and m.source is None
        }
        return {name: asdict(metric, filter=lambda field, _: field.name != "given") for name, metric in kept.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an epoch that another process began."""
        self.metrics, self._shown, self.logs_steps = {}, {}, False
        for name, fields in state.items():
            metric = Metric(**fields)
            metric.take_names(name)
            self._register(metric)

    def reset(self) -> None:
        """Begin a new epoch; the options of `log` are kept."""
        for metric in self.metrics.values():
            metric.reset()


def _raise_difference(ranks: list[tuple[dict[str, Any], str | int]]) -> NoReturn:
    ops, moment = ranks[0]
    rank, (other_ops, other_moment) = next((rank, each) for rank, each in enumerate(ranks) if each != ranks[0])
    name = next((name for name in ops if ops[name] != other_ops[name]), next(iter(ops)))
    if ops[name] != other_ops[name]:
        found, expected = f"reduce_fx={other_ops[name]!r} on rank {rank} and {ops[name]!r} on rank 0", "the same"
    else:
        found = f"sync_dist=True in batch {other_moment} on rank {rank} and {moment} on rank 0"
        expected = "all ranks to log it in the same batches"
    raise ConfigError(
        f"log({name!r}) was called with {found}", expected=expected, do="log it in the same way on every rank"
    )


def computes(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


def _same(one: Any, other: Any) -> bool:
    """Whether two values of an option are the same; a function may be defined again for each call."""
    return bool(one == other) or (callable(one) and getattr(one, "__code__", one) == getattr(other, "__code__", other))


def _shown(options: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name}={getattr(options[name], '__name__', repr(options[name]))}" for name in names)


def _plus_weighted(total: Any, value: Any, weight: float) -> Any:
    if isinstance(total, torch.Tensor):
        return torch.add(total, as_tensor(value), alpha=weight)
    if isinstance(value, torch.Tensor):
        return value.double() * weight + (total or 0.0)
    return value * weight + (total or 0.0)


def _coded(value: Any) -> Tensor:
    """Return 64 bits that hold `value` after a flag that tells integers from doubles: (2,) int64."""
    mine = as_tensor(value).reshape(1)
    whole = not mine.is_floating_point()
    bits = mine if whole else mine.double().view(torch.int64)
    return torch.cat([torch.full_like(bits, whole), bits])


def _coded_on_cpu(values: list[Any]) -> list[Tensor]:
    """Return `_coded` of each of `values`, on the CPU: in one copy from a device, however many there are."""
    coded = [_coded(value) for value in values]
    for device in {each.device for each in coded} - {torch.device("cpu")}:
        indices = [index for index, each in enumerate(coded) if each.device == device]
        for index, copy in zip(indices, torch.stack([coded[index] for index in indices]).cpu(), strict=True):
            coded[index] = copy
    return coded


def _decoded(coded: Tensor, collectives: Collectives) -> Tensor:
    """Return the values in `coded`, (n, 2): (n,) in int64 if all of them are integers, else in float64."""
    flags, bits = coded.unbind(1)
    if collectives.values(flags.all(), planned=False):
        return bits
    return torch.where(flags.bool(), bits.double(), bits.contiguous().view(torch.float64))


def _of_all_ranks(value: Any, collectives: Collectives) -> Tensor:
    """Return the values of all ranks, (ranks,). Collective."""
    # From the CPU: on another rank the value may be a number without a device.
    return _decoded(torch.stack(collectives.all_gather(_coded(value).cpu())), collectives).to(as_tensor(value).device)


def _reduced(name: str, values: Tensor, reduce_fx: Any) -> Tensor:
    """Return the reduction of `values`, (n,)."""
    if reduce_fx == "sum":
        return values.sum() if values.is_floating_point() else as_tensor(sum(values.tolist())).to(values.device)
    if reduce_fx == "mean":
        return values.double().mean()
    if reduce_fx in _REDUCTIONS:
        return values.amax() if reduce_fx == "max" else values.amin()
    return _one_number(f"the reduce_fx of log({name!r})", reduce_fx(values.double()), "reduce to one")


def _epoch_value(name: str, metric: Metric, collectives: Collectives | None) -> Tensor:
    if metric.source is not None:
        who = f"{type(metric.source).__name__}.compute()"
        return _one_number(who, metric.source.compute(), "log its parts one by one")
    if callable(metric.reduce_fx):
        device = metric.total[-1].device
        values = torch.stack([value.double().to(device) for value in metric.total])
        if collectives:
            gathered = collectives.all_gather_object(values.tolist())
            values = torch.tensor([value for of_rank in gathered for value in of_rank], device=device).double()
        return _reduced(name, values, metric.reduce_fx)
    total = as_tensor(metric.total)
    if metric.reduce_fx == "mean":
        sums = torch.stack([total.double(), torch.full((), metric.weight, dtype=torch.float64, device=total.device)])
        if collectives:
            sums = collectives.all_reduce(sums.cpu(), "sum").to(total.device)
        return sums[0] / sums[1]
    if isinstance(metric.weight, torch.Tensor) and total.dtype is torch.int64 and abs(float(metric.weight)) >= 2**63:
        total = metric.weight.to(total.device)
    return _reduced(name, _of_all_ranks(total, collectives), metric.reduce_fx) if collectives else total


def _one_number(who: str, value: Any, do: str) -> Tensor:
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
    if not (is_one or isinstance(value, int | float)):
        is_tensor = isinstance(value, torch.Tensor)
        found = f"a tensor of shape {tuple(value.shape)}" if is_tensor else " ".join(repr(value).split())
        raise ConfigError(f"{who} returned {found}", expected="one number", do=do)
    return as_tensor(value)
