"""Predictions beside published and measured step times: ``python tests/plan/evaluation.py`` prints the tables of the docs."""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from plan.transformer import measured, megatron, torchtitan, zero3
from stratagem_plan.cost import HIGH, LOW, predict
from stratagem_plan.devices import find
from stratagem_plan.plan_file import structure

HERE = Path(__file__).parent
#: Fields that a row may have assumed and still be counted as told: no formula but the choice of kernels needs them.
HARMLESS = ("params_b", "precision")


@frozen
class Case:
    """A run with its real and its predicted step."""

    name: str
    source: str
    row: dict[str, Any]
    real: float
    predicted: float
    #: What one link for each node adds to the upper bound.
    slower: float

    @property
    def error(self) -> float:
        return self.predicted / self.real - 1

    @property
    def ratio(self) -> float:
        return self.real / self.predicted

    @property
    def told(self) -> bool:
        """Whether the source tells all that the prediction needs."""
        return all(each in HARMLESS or "memory size" in each for each in self.row.get("assumed", ()))


def published() -> list[Case]:
    return [_case(row) for row in json.loads((HERE / "published.json").read_text())["rows"]]


def measured_rows() -> list[dict[str, Any]]:
    """Return what was measured of each training run on the GPU."""
    return json.loads((HERE / "measured.json").read_text())["rows"]


def measured_here() -> list[Case]:
    found = []
    for row in measured_rows():
        name = f"{row['shape'][0]} layers of {row['shape'][1]}, {row['micro']} sequences, {row['precision']}, {row['strategy']}"
        name += ", checkpointing" if row["ck"] else ""
        found.append(_of(name, "measured, one H200", row, row["step"], measured(row)))
    return found


def _case(row) -> Case:
    make = zero3 if row["strategy"] == "deepspeed_stage_3" else torchtitan if row["gated"] else megatron
    return _of(row["model"], row["source"], row, real(row), make(row))


def _of(name, source, row, seconds, tree) -> Case:
    plan = structure(tree, name)
    device = find(plan.device)
    if plan.device == "h100-sxm-96gb-500w":  # its peak is not known: that of the H100 SXM, more than it has
        device = evolve(device, flops=find("h100-sxm-80gb").flops)
    step, interval = predict(plan, device)
    slower = interval.high - interval.expected * HIGH
    return Case(name, source, row, seconds, step.total, slower)


def real(row) -> float:
    """Return the seconds of a step, from what the source tells."""
    h, layers, v, s, batch = (row[key] for key in ("hidden", "layers", "vocab", "seq", "global_batch"))
    if row["step_s"]:
        return row["step_s"]
    if row["tokens_per_s_device"]:
        return batch * s / row["tokens_per_s_device"] / row["devices"]
    passes, head = (96, 16) if row["flops_with_recomputation"] else (72, 12)
    flops = passes * batch * s * layers * h * h * (1 + s / (6 * h) + v / (head * layers * h))
    return flops / row["devices"] / row["tflops_device"] / 1e12


def quantiles(cases, low=0.05, high=0.95) -> tuple[float, float]:
    """Return these quantiles of real by predicted."""
    ratios = sorted(case.ratio for case in cases)

    def at(share):
        place = share * (len(ratios) - 1)
        i = int(place)
        j = min(i + 1, len(ratios) - 1)
        return ratios[i] + (ratios[j] - ratios[i]) * (place - i)

    return at(low), at(high)


def inside(case, low, high) -> bool:
    return low * case.predicted <= case.real <= high * case.predicted + case.slower


def without_its_source(cases) -> list[tuple[Case, bool]]:
    """Return each published case, and whether it lies in an interval whose width follows from all other sources."""
    found = []
    for case in (each for each in cases if "assumed" in each.row):
        bounds = quantiles([other for other in cases if other.source != case.source])
        found.append((case, inside(case, *bounds)))
    return found


def kendall(pairs) -> float:
    """Return Kendall's tau of two rankings."""
    signs = [
        (a > 0) - (a < 0)
        for i in range(len(pairs))
        for j in range(i)
        for a in [(pairs[i][0] - pairs[j][0]) * (pairs[i][1] - pairs[j][1])]
    ]
    return sum(signs) / len(signs)


def throughputs(cases) -> list[tuple[float, float]]:
    """Return samples per second and device, real and predicted."""
    return [
        (
            case.row["global_batch"] / case.row["devices"] / seconds[0],
            case.row["global_batch"] / case.row["devices"] / seconds[1],
        )
        for case in cases
        for seconds in [(case.real, case.predicted)]
    ]


def mean_and_median(cases) -> tuple[float, float]:
    errors = [abs(case.error) for case in cases]
    return statistics.mean(errors), statistics.median(errors)


def main() -> None:
    runs, own = published(), measured_here()
    told = [case for case in runs if case.told]
    by_source = defaultdict(list)
    for case in runs:
        by_source[case.source].append(case)
    print("| source | rows | told | mean | median | worst |\n|---|---|---|---|---|---|")
    for source, cases in [*by_source.items(), ("measured, one H200", own)]:
        mean, median = mean_and_median(cases)
        worst = max((case.error for case in cases), key=abs)
        print(
            f"| {source} | {len(cases)} | {sum(case.told for case in cases)} | {mean:.1%} | {median:.1%} | {worst:+.1%} |"
        )
    for title, cases in (("told", told), ("all", runs)):
        print(title, len(cases), "mean {:.1%} median {:.1%}".format(*mean_and_median(cases)))
    print("\n| run on one H200 | measured | predicted | error |\n|---|---|---|---|")
    for case in own:
        print(f"| {case.name} | {case.real * 1e3:.1f} ms | {case.predicted * 1e3:.1f} ms | {case.error:+.1%} |")
    print("bounds", quantiles(told + own))
    shares = [ok for _, ok in without_its_source(told + own)]
    print("coverage without its source", sum(shares), len(shares))
    print("coverage of all", sum(inside(case, LOW, HIGH) for case in runs), len(runs))
    print("coverage of measured", sum(inside(case, LOW, HIGH) for case in own), len(own))
    table_2 = by_source["arXiv 2104.04473 table 2"]
    for size in ("174.6B", "529.6B"):
        print("tau, table 2,", size, kendall(throughputs([case for case in table_2 if size in case.name])))
    print("tau, table 2, without ZeRO-3", kendall(throughputs([c for c in table_2 if c.row["strategy"] == "parallel"])))
    print("tau, table 2, ZeRO-3", kendall(throughputs([c for c in table_2 if c.row["strategy"] != "parallel"])))
    print("tau of step times, told", kendall([(case.real, case.predicted) for case in told]))
    for case in runs:
        if case.row["id"] == "r91":
            print("GPT-3", case.real, case.predicted, f"{case.error:+.1%}")


if __name__ == "__main__":
    main()
