"""What `stratagem advise` tries: how training is divided over ranks, precisions, what is recomputed, sizes of batches.

A strategy, or an axis, that is to be tried as well is one more `Layout` in `layouts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve, frozen

from stratagem_plan.devices import Device

#: The words of ``--search``.
SEARCH = ("strategy", "precision", "shard", "micro_batch", "checkpointing")
_UNITS = {"auto_wrap_policy": "blocks"}
#: What is recomputed, in the order of what it costs: values of ``activation_checkpointing=``.
CHECKPOINTING: dict[str, Any] = {
    "none": None,
    "selective": {"policy": "blocks", "mode": "selective"},
    "full": {"policy": "blocks"},
}
#: How far the numerics of a precision are from fp32; those that are not listed are as far as the last ones.
_EXACT, _MIXED, _LOW, _OTHER_TRAINING = range(4)
_NUMERICS = {"64-true": _EXACT, "32-true": _EXACT, "16-mixed": _MIXED, "bf16-mixed": _MIXED}
WORDS = ("fp32", "16 bits beside fp32 weights", "weights of 16 bits", "replicas that differ between two averages")
#: Closed formulas miss the memory of published runs by 81 % at worst: what they put above twice the limit is left out.
MARGIN = 2.0


@frozen(kw_only=True)
class Layout:
    """A way to divide training over ranks: a value of ``strategy=``."""

    strategy: Any
    #: Ranks that read different samples.
    data_ranks: int
    #: Ranks that share the parameters, the gradients and the optimizer's state of one replica.
    shares: tuple[int, int, int] = (1, 1, 1)
    #: Optimizer steps between two averages of replicas; 0 if gradients are averaged in every step.
    period: int = 0
    #: Of a batch, in a pipeline.
    microbatches: int = 1

    @property
    def name(self) -> str:
        """Return the name of the strategy: of the outer one, if there are two."""
        first = self.strategy[0] if isinstance(self.strategy, list) else self.strategy
        return str(first["name"] if isinstance(first, dict) else first)

    @property
    def words(self) -> str:
        """Return it in a few words: ``fsdp HYBRID_SHARD``, ``diloco around ddp``."""
        if isinstance(self.strategy, list):
            return f"{self.name} around {self.strategy[1]}"
        options = self.strategy if isinstance(self.strategy, dict) else {}
        given = {key: value for key, value in options.items() if key not in ("name", *_UNITS)}
        told = [value if isinstance(value, str) else f"{key} {value}" for key, value in given.items()]
        return " ".join([self.name, ", ".join(told)]).strip()

    @property
    def in_one_unit(self) -> Layout:
        """Return it for a model without repeated layers."""
        units = {key: value for key, value in self.strategy.items() if key not in _UNITS}
        return evolve(self, strategy=units["name"] if len(units) == 1 else units)

    @property
    def syncing(self) -> Layout:
        """Return it with an average after every step."""
        outer, inner = self.strategy
        return evolve(self, strategy=[outer | {"period": 1}, inner])

    def bytes_of_states(self, numbers: int, precision: str, per_parameter: float) -> float:
        """Return the bytes of parameters, gradients and the optimizer's state that a rank holds, by a closed formula.

        Args:
            numbers: In the parameters of the model.
            per_parameter: Numbers that the optimizer keeps for each.
        """
        size = 2 if _NUMERICS.get(precision, _LOW) == _LOW else 4
        parameters, gradients, optimizer = self.shares
        return numbers * size * (1 / parameters + 1 / gradients + per_parameter / optimizer)


def layouts(devices: int, nodes: int) -> Iterator[Layout]:
    """Yield the ways to divide training over `nodes` of this number of `devices`, the ones that send least first."""
    ranks = devices * nodes
    if ranks == 1:
        yield Layout(strategy="single_device", data_ranks=1)
        return
    yield Layout(strategy="ddp", data_ranks=ranks)
    yield Layout(strategy="ddp_sharded", data_ranks=ranks, shares=(1, ranks, ranks))
    whole = {"name": "fsdp"} | _UNITS
    yield Layout(strategy=whole, data_ranks=ranks, shares=(ranks,) * 3)
    gathered = whole | {"sharding_strategy": "SHARD_GRAD_OP"}
    yield Layout(strategy=gathered, data_ranks=ranks, shares=(ranks,) * 3)
    if min(devices, nodes) > 1:
        hybrid = whole | {"sharding_strategy": "HYBRID_SHARD"}
        yield Layout(strategy=hybrid, data_ranks=ranks, shares=(devices,) * 3)
    for shard in _between(devices, nodes):
        axes = {"name": "parallel", "replicate": ranks // shard, "shard": shard}
        yield Layout(strategy=axes | _UNITS, data_ranks=ranks, shares=(shard,) * 3)
    if nodes > 1:
        for name, period in (("local_sgd", 8), ("diloco", 500)):
            outer = [{"name": name, "period": period}, "ddp" if devices > 1 else "single_device"]
            yield Layout(strategy=outer, data_ranks=ranks, period=period)


def cutting_layers(devices: int, nodes: int) -> Iterator[Layout]:
    """Yield the ways to divide layers themselves: a last resort, since activations are sent for each of them."""
    if devices > 1:
        axes = {"name": "parallel", "tensor": devices, "plan": "auto"} | ({"shard": nodes} if nodes > 1 else {})
        yield Layout(strategy=axes | _UNITS if nodes > 1 else axes, data_ranks=nodes, shares=(devices * nodes,) * 3)


def pipelines(devices: int, nodes: int, samples: int, least: float, parts: int) -> Iterator[Layout]:
    """Yield the pipeline with the fewest stages; of several nodes with several devices, each cuts its layers.

    Args:
        samples: Of a step of all ranks.
        least: Devices that one replica takes.
        parts: Micro-batches for each stage, at most.
    """
    tensor = devices if min(devices, nodes) > 1 else 1
    ranks = devices * nodes // tensor
    for stages in [each for each in range(2, ranks + 1) if ranks % each == 0 and each * tensor >= least][:1]:
        replicas = ranks // stages
        most = max(each for each in range(1, parts * stages + 1) if samples // replicas % each == 0)
        axes = {"name": "parallel", "pipeline": stages, "microbatches": most}
        axes |= {"tensor": tensor, "plan": "auto"} if tensor > 1 else {}
        shares = (stages * tensor,) * 3
        yield Layout(strategy=axes, data_ranks=replicas, shares=shares, microbatches=most)


def _between(devices: int, nodes: int) -> list[int]:
    """Return numbers of ranks that share one replica, beside those of a node and of all."""
    return [devices * count for count in (2, 4, 8) if devices > 1 and nodes % count == 0 and nodes > count]


def precisions(device: Device) -> tuple[str, ...]:
    """Return the precisions to try on `device`, the one to try with every layout first."""
    if "bf16_dense" in device.flops:
        return "bf16-mixed", "32-true", "bf16-true"
    return ("16-mixed", "32-true") if "fp16_dense" in device.flops else ("32-true",)


@frozen(kw_only=True)
class Candidate:
    """One way to train: what it sets of the script. None leaves what the script has."""

    layout: Layout | None = None
    precision: str | None = None
    #: A key of `CHECKPOINTING`.
    checkpointing: str | None = None
    micro_batch: int | None = None
    accumulate: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments of the Trainer that it sets, without the accumulation of batches."""
        given: dict[str, Any] = {}
        if self.layout:
            given["strategy"] = self.layout.strategy
        if self.precision:
            given["precision"] = self.precision
        if self.checkpointing:
            given["activation_checkpointing"] = CHECKPOINTING[self.checkpointing]
        return given

    def code(self, name: str) -> str:
        """Return it as Python: the arguments of a Trainer, or what `name` says."""
        given = dict(self.settings)
        if self.accumulate:
            given["accumulate_grad_batches"] = self.accumulate
        return f"{name}({', '.join(f'{name}={_python(value)}' for name, value in given.items())})"

    @property
    def words(self) -> str:
        """Return it in a line."""
        if not (self.settings or self.micro_batch):
            return "the script as it is"
        return ", ".join(
            filter(None, [self.without_batches, f"batches of {self.micro_batch}" * bool(self.micro_batch)])
        )

    @property
    def without_batches(self) -> str:
        """Return it in a line, whatever the size of batches."""
        parts = [self.layout.words] if self.layout else []
        parts += [self.precision] if self.precision else []
        parts += [f"checkpointing {self.checkpointing}"] if self.checkpointing not in (None, "none") else []
        return ", ".join(parts)

    def numerics(self, precision: str) -> int:
        """Return how far its numerics are from fp32, given the precision of its plan; see `WORDS`."""
        return _OTHER_TRAINING if self.layout and self.layout.period else _NUMERICS.get(precision, _LOW)


def _python(value: Any) -> str:
    return repr(value).replace("'", '"')
