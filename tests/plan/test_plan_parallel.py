"""`stratagem plan` of the strategy `parallel`: each of its axes, against runs of the same script with values."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from plan.test_plan import SCRIPT, plan
from stratagem_plan.result import LIBRARY_BYTES

BYTES = pytest.mark.sweep(
    guard="tests/plan/test_plan_parallel.py::test_a_plan_sends_and_holds_what_each_rank_of_a_run_does",
)
BY_HEADS = {
    "blocks.*.qkv": "colwise", "blocks.*.out": "rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise",
    "blocks.*.norm_*": "sequence", "tokens": "vocab", "head": "vocab",
}  # fmt: skip
#: By name: options of the strategy, and ranks.
AXES = {
    "tensor": ({"tensor": 2, "plan": "auto"}, 2),
    "tensor, a plan of the user's": ({"tensor": 2, "plan": BY_HEADS}, 2),
    "tensor, shard": ({"tensor": 2, "plan": "auto", "shard": 2, "auto_wrap_policy": True}, 4),
    "tensor, replicate": ({"tensor": 2, "plan": "auto", "replicate": 2}, 4),
}
QUICK = ("tensor, a plan of the user's",)


def run(folder, devices, **given):
    """Train with values on the CPU; return what each rank sent in its second step, and what it held and computed.

    Sent is, by collective, what activations, gradients and parameters need: not what ranks decide.
    """
    given |= {"devices": devices, "count_to": str(folder), "peak_to": str(folder)}
    given["options"] = {"accelerator": "cpu"}
    done = subprocess.run([sys.executable, SCRIPT, json.dumps(given)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    sent = []
    for rank in range(devices):
        first, second = (json.loads((folder / f"{rank}-{step}.json").read_text()) for step in (0, 1))
        found = {}
        for name, (_, payload) in second.items():
            operation, _, sender = name.partition(" ")
            if sender in ("activations", "gradients", "parameters"):
                found[operation] = found.get(operation, 0) + payload - first.get(name, [0, 0])[1]
        sent.append({operation: payload for operation, payload in found.items() if payload})
    return sent, [json.loads((folder / f"counted-{rank}.json").read_text()) for rank in range(devices)]


def sent_by(ranks):
    """Return what a class of ranks sends, as a run counts it: of an all-gather this rank's part."""
    found = {}
    for each in ranks["collectives"]:
        size = each["payload"] / (each["ranks"] if each["op"] == "all_gather" else 1)
        operation = {"all_to_all": "exchange"}.get(each["op"], each["op"])
        found[operation] = found.get(operation, 0) + size * each["calls"]
    return found


#: How much a run's peak on the CPU may be above the plan's: it has the generator's state and the optimizer's numbers of
#: steps there, which are tensors of the CPU in a plan, too.
ON_THE_CPU = 0.005


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(pytest.param(name, "32-true", marks=() if name in QUICK else BYTES) for name in AXES),
        *(pytest.param(name, "bf16-mixed", marks=BYTES) for name in AXES),
    ],
)
def test_a_plan_sends_and_holds_what_each_rank_of_a_run_does(tmp_path, name, precision):
    options, devices = AXES[name]
    given = {"strategy": {"name": "parallel"} | options, "precision": precision, "layers": 4, "micro": 8}
    code, tree, said = plan(tmp_path, "--devices", devices, **given)
    assert code == 0, said
    sent, counted = run(tmp_path, devices, **given)

    assert sum(each["ranks"] for each in tree["classes"]) == devices
    for each in tree["classes"]:
        assert sent_by(each) == sent[each["rank"]]
        # With `shard` the CPU keeps memory of messages for the next ones; it has other kernels of attention in bf16.
        if "shard" not in options and precision == "32-true":
            found = counted[each["rank"]]
            assert found["peak"] == pytest.approx(each["peak"] - LIBRARY_BYTES, rel=ON_THE_CPU)
            assert found["phase"] == each["peak_phase"]
