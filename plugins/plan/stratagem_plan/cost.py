"""Predict the time of a training step from a plan and a device: docs/planner-time.md has the source of each formula."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable

from attrs import frozen

from stratagem_pictures.scales import number
from stratagem_plan.devices import MEASURED, Device, Link, Rates, find
from stratagem_plan.plan_file import Collective, Plan, RankClass, Work

#: Keys of `Device.flops` by torch's names of dtypes.
FORMATS = {
    "bfloat16": "bf16_dense",
    "float16": "fp16_dense",
    "float32": "fp32_dense",
    "tf32": "tf32_dense",
    "float8_e4m3fn": "fp8_dense",
    "float8_e5m2": "fp8_dense",
}
#: Formats in which attention has kernels of its own; in others it runs as large multiplications do.
_ATTENTION = ("bf16_dense", "fp16_dense", "fp8_dense")
#: Axes of ranks with different samples: their messages are sent while gradients or activations are computed.
DATA_AXES = ("replicate", "shard", "data")
#: Share of a link's bandwidth that large messages reach, within a node and between nodes.
INTRA_SHARE, INTER_SHARE = 0.65, 0.9
#: Published and measured step times, divided by the prediction: the 5 % and 95 % quantiles of 50 runs.
LOW, HIGH = 0.95, 1.59


@frozen
class Interval:
    """What is expected, and bounds; see LOW and HIGH."""

    low: float
    expected: float
    high: float

    def times(self, factor: float) -> Interval:
        """Return it with another unit."""
        return Interval(self.low * factor, self.expected * factor, self.high * factor)

    def under(self, numerator: float) -> Interval:
        """Return `numerator` divided by it: a rate, if it is a time."""
        return Interval(numerator / self.high, numerator / self.expected, numerator / self.low)

    def words(self, unit: str = "") -> str:
        """Return the expected value with the bounds: "11.2 ms (10.6 to 17.8)"."""
        return f"{number(self.expected)}{unit} ({number(self.low)} to {number(self.high)})"

    def time(self) -> str:
        """Return `words` of seconds, as milliseconds if they are fewer than 1."""
        return self.times(1e3).words(" ms") if self.expected < 1 else self.words(" s")


@frozen(kw_only=True)
class Step:
    """Seconds of a step of the slowest class of ranks: `total` is the sum of the parts below it."""

    total: float
    forward: float
    backward: float
    optimizer: float
    #: Communication that computation does not hide.
    exposed: float
    bubble: float
    #: Time that the device waits for the host.
    host: float
    #: All communication, hidden or not: no part of the sum.
    communication: float
    rank_class: RankClass


@frozen
class Machine:
    """A device, with the curves to use for it."""

    device: Device
    measured: Device
    #: Devices of a node.
    per_node: int
    #: Whether the ranks of a group that are on one node send to other nodes over a link each, or all over one.
    all_links: bool = True

    @property
    def hides(self) -> bool:
        """Whether messages are sent while the device computes: the host sends them."""
        assert self.measured.curve
        return self.measured.curve.host_forward_s > 0

    # --- Computation -----------------------------------------------------------------------------------------------

    def seconds(self, work: Work) -> float:
        """Return the time that the device computes for all calls of `work`."""
        assert self.measured.curve
        one = self._bytes(work.bytes_of_one)
        if work.kind != "vector":
            one = max(one, self._flops(work))
        return work.count * max(one, self.measured.curve.kernel_s)

    def _bytes(self, num_bytes: float) -> float:
        assert self.measured.curve
        share = _at(self.measured.curve.vector, num_bytes) / self.measured.need("memory_bytes_per_s")
        return float(num_bytes / share / self.device.need("memory_bytes_per_s"))

    def _flops(self, work: Work) -> float:
        key = number_format(work.dtype)
        curve = self.measured.curve
        assert curve
        flops = work.flops_of_one
        if work.kind == "attention" and key in _ATTENTION:
            rates, known, size = (
                curve.attention["backward" if work.phase == "backward" else "forward"],
                "bf16_dense",
                flops,
            )
        else:
            known = key if key in curve.matmul else "bf16_dense"
            rates, size = curve.matmul[known], _size(work)
        share = _at(rates, size) / self.measured.need(f"flops.{known}")
        return float(flops / share / self.device.need(f"flops.{key}"))

    def host_seconds(self, work: Work) -> float:
        """Return the time that the host needs to start all calls of `work`."""
        assert self.measured.curve
        curve = self.measured.curve
        return work.count * (curve.host_backward_s if work.phase == "backward" else curve.host_forward_s)

    # --- Communication ---------------------------------------------------------------------------------------------

    def collective(self, message: Collective, in_node: int) -> float:
        """Return the time of all calls of `message`, whose group has `in_node` ranks on each node."""
        n = 2 if message.op == "send" else message.ranks
        if n == 1:
            return 0.0
        if message.within_node and self.device.intra and self.device.intra.measured:
            return message.calls * self._measured(message, self.device.intra)
        nodes = 1 if message.within_node else max(2, math.ceil(n / in_node))
        rate, hops, tree = self._links(nodes, n / nodes)
        bandwidth = message.payload / rate
        ring = (n - 1) / n * bandwidth + hops
        one = {
            "all_reduce": 2 * min(ring, bandwidth + tree),
            "broadcast": bandwidth + tree,
            "send": bandwidth + tree,
        }.get(message.op, ring)
        return message.calls * one

    def _measured(self, message: Collective, link: Link) -> float:
        rates = link.measured.get(message.op) or link.measured["broadcast"]
        return max(link.latency_s or 0.0, message.payload / _at(rates, message.payload))

    def _links(self, nodes: int, in_node: float) -> tuple[float, float, float]:
        """Return bytes/s of a rank's messages, and the latencies of a ring and of a tree, for a group of ranks.

        Each rank of a node drives a link of its own to other nodes, and a ring for each link runs through all ranks:
        with 8 ranks on a node, a rank sends as fast as 8 links do, or the links within the node if they are slower.
        """
        rates, ring, tree = [], 0.0, 0.0
        for link_of, share, count, hops, depth in (
            ("intra", INTRA_SHARE, 1.0, nodes * (in_node - 1), in_node),
            ("inter", INTER_SHARE, in_node if self.all_links else 1.0, nodes, nodes),
        ):
            if depth > 1:
                link: Link = self.device.need(link_of)
                rates.append(link.bytes_per_s_per_direction * share * count)
                ring += hops * (link.latency_s or 0.0)
                tree += math.ceil(math.log2(depth)) * (link.latency_s or 0.0)
        return min(rates), ring, tree


def _size(work: Work) -> float:
    """Return the harmonic mean of a multiplication's sizes: FLOPs by bytes, but for a factor; attention is large."""
    return statistics.harmonic_mean(work.sizes) if work.kind == "matmul" else math.inf


def number_format(dtype: str) -> str:
    """Return the key of `Device.flops` for a dtype's name."""
    return FORMATS.get(dtype, dtype)


def _at(rates: Rates, size: float) -> float:
    """Interpolate in logarithms; beyond what was measured the rate is that of the nearest size."""
    i = bisect_left(rates.size, size)
    if i in (0, len(rates.size)):
        return rates.per_s[min(i, len(rates.size) - 1)]
    part = math.log(size / rates.size[i - 1]) / math.log(rates.size[i] / rates.size[i - 1])
    return float(rates.per_s[i - 1] ** (1 - part) * rates.per_s[i] ** part)


# --- A step ----------------------------------------------------------------------------------------------------------


def predict(plan: Plan, device: Device) -> tuple[Step, Interval]:
    """Return the step of the class of ranks that needs longest, and the interval of its time."""
    step, slow = (_slowest(plan, device, all_links) for all_links in (True, False))
    # Published runs do not agree on how many links a group uses: the longest time is that of one link for each node.
    return step, Interval(LOW * step.total, step.total, HIGH * step.total + slow.total - step.total)


def _slowest(plan: Plan, device: Device, all_links: bool) -> Step:
    measured = device if device.curve else find(MEASURED)
    machine = Machine(device, measured, plan.world.devices_per_node, all_links)
    return max((_step_of(each, machine, plan.accumulate) for each in plan.classes), key=lambda step: step.total)


def assumptions(plan: Plan, device: Device) -> list[str]:
    """Return what the prediction assumes, a sentence each."""
    found = [*plan.assumptions]
    if not device.curve:
        found.append(f"{device.name} reaches the same share of its peaks as {MEASURED}, which was measured")
    measured = (device.curve or find(MEASURED).need("curve")).matmul
    formats = {number_format(work.dtype) for each in plan.classes for work in each.work if work.kind != "vector"}
    if unknown := sorted(formats - measured.keys()):
        found.append(f"multiplications in {', '.join(unknown)} reach the same share of the peak as in bf16_dense")
    links = {"intra" if each.within_node else "inter" for ranks in plan.classes for each in ranks.collectives}
    found += [
        f"messages have no latency: no source tells that of {name} of {device.name}"
        for name in sorted(links)
        if (link := getattr(device, name)) and link.latency_s is None
    ]
    if not device.inter:
        found.append(f"one node alone: no source tells the link of {device.name} to other nodes")
    if "inter" in links:
        found.append(
            "ranks of one node send to other nodes over a link each; the upper bound counts one link for each node"
        )
    return found + [f"{device.name}: {device.warning}"] * bool(device.warning)


def _step_of(ranks: RankClass, machine: Machine, accumulate: int) -> Step:
    compute = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    for work in ranks.work:
        compute[work.phase] += machine.seconds(work)
    exposed, bubble, communication = dict.fromkeys(compute, 0.0), 0.0, 0.0
    hidden: dict[str, list[tuple[Collective, float]]] = {phase: [] for phase in compute}
    for message in ranks.collectives:
        seconds = machine.collective(message, _ranks_in_node(message, ranks.collectives, machine.per_node))
        communication += seconds
        if machine.hides and _overlapped(message):
            hidden[message.phase].append((message, seconds))
        else:
            exposed[message.phase] += seconds
    for phase, messages in hidden.items():
        exposed[phase] += _not_hidden(messages, compute[phase], accumulate)
    if ranks.bubble:
        passes = sum(compute[phase] + exposed[phase] for phase in ("forward", "backward"))
        bubble = passes * (ranks.bubble.stages - 1) / (ranks.bubble.microbatches * ranks.bubble.interleave)
    busy = sum(compute.values()) + sum(exposed.values()) + bubble
    host = max(0.0, sum(map(machine.host_seconds, ranks.work)) - busy)
    return Step(
        **compute, exposed=sum(exposed.values()), bubble=bubble, host=host, total=busy + host,
        communication=communication, rank_class=ranks,
    )  # fmt: skip


def _overlapped(message: Collective) -> bool:
    return message.axis in DATA_AXES and message.phase != "optimizer"


def _not_hidden(messages: list[tuple[Collective, float]], compute: float, accumulate: int) -> float:
    """Return what remains of messages sent while the device computes: what is longer than that, and one call.

    Gradients that are all-reduced are sent during the last of the micro-batches that are accumulated.
    """
    if not messages:
        return 0.0
    total, calls = sum(seconds for _, seconds in messages), sum(message.calls for message, _ in messages)
    reduced = sum(seconds for message, seconds in messages if message.op == "all_reduce")
    return max(total - compute, reduced - compute / accumulate, total / calls)


def _ranks_in_node(message: Collective, others: Iterable[Collective], per_node: int) -> int:
    """Return how many ranks of the group are on one node: axes that stay within nodes come first."""
    inner = {other.axis: other.ranks for other in others if other.within_node and other.axis != message.axis}
    return max(1, min(message.ranks, per_node // math.prod(inner.values())))
