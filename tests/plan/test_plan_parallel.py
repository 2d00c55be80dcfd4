"""`stratagem plan` of the strategy `parallel`: each of its axes, against runs of the same script with values."""

from __future__ import annotations

import json
import sys

import pytest

from plan.test_plan import SCRIPT, plan
from programs import scripts
from stratagem_plan.allocator import LIBRARY_BYTES

BYTES = pytest.mark.sweep(
    guard="tests/plan/test_plan.py::test_a_plan_sends_the_bytes_that_a_run_sends",
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
    "pipeline": ({"pipeline": 2}, 2),
    "pipeline, interleaved": ({"pipeline": 2, "schedule": "interleaved_1f1b", "checkpoint": "except_last"}, 2),
    "pipeline, split points": ({"pipeline": 2, "split_points": ["blocks.1"]}, 2),
    "pipeline, shard": ({"pipeline": 2, "shard": 2, "auto_wrap_policy": True}, 4),
    "pipeline, replicate": ({"pipeline": 2, "replicate": 2}, 4),
    "pipeline, tensor": ({"pipeline": 2, "tensor": 2, "plan": "auto"}, 4),
    "context": ({"context": 2}, 2),
    "context, gathered": ({"context": 2, "context_method": "all_gather"}, 2),
    "context, shard": ({"context": 2, "shard": 2, "auto_wrap_policy": True}, 4),
    "context, replicate": ({"context": 2, "replicate": 2}, 4),
    "context, tensor": ({"context": 2, "tensor": 2, "plan": "auto"}, 4),
    "expert": ({"expert": 2}, 2),
    "expert, shard": ({"expert": 2, "shard": 2, "auto_wrap_policy": True}, 4),
    "expert, replicate": ({"expert": 2, "replicate": 2}, 4),
}
QUICK = {("tensor, a plan of the user's", "32-true"), ("pipeline", "bf16-mixed")}
#: Parameters outside of the pipelined module: embeddings, norm and head.
OUTSIDE = 5


def run(folder, devices, **given):
    """Train with values on the CPU; return what each rank sent in its second step, and what it held and computed.

    Sent is, by collective, what activations, gradients and parameters need: not what ranks decide.
    """
    given |= {"devices": devices, "count_to": str(folder), "counted": str(folder)}
    given["options"] = {"accelerator": "cpu"}
    done = scripts.run([sys.executable, SCRIPT, json.dumps(given)], capture_output=True, text=True, cwd=folder)
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
#: What is on the device between two steps, but for the optimizer's.
STAY = ("parameters", "gradients")


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    "plugins/plan/",
    guard="tests/plan/test_plan.py::test_a_plan_sends_the_bytes_that_a_run_sends",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=() if (name, precision) in QUICK else BYTES)
        for name in AXES
        for precision in ("32-true", "bf16-mixed")
    ],
)
def test_a_plan_sends_and_holds_what_each_rank_of_a_run_does(tmp_path, name, precision):
    options, devices = AXES[name]
    compares = {"check_parts": False} if {"pipeline", "context"} & options.keys() else {}  # a run does, in some steps
    given = {"strategy": {"name": "parallel"} | options | compares, "precision": precision, "layers": 4, "micro": 8}
    given["experts"] = 4 * options.get("expert", 0)
    code, tree, said = plan(tmp_path, "--devices", devices, **given)
    assert code == 0, said
    sent, counted = run(tmp_path, devices, **given)

    assert sum(each["ranks"] for each in tree["classes"]) == devices
    for each in tree["classes"]:
        found = sent_by(each)
        if "pipeline" in options:
            assert found.pop("broadcast") == 8  # the loss, which the last stage tells
            found["all_reduce"] += 4 * OUTSIDE  # on the CPU the message has a number for each shared gradient, too
        if "context" in options:
            found["all_reduce"] -= 8  # the number of targets of all parts
        assert found == sent[each["rank"]]
        held = counted[each["rank"]]
        assert [held["end"][name] for name in STAY] == [each["end"][name] for name in STAY]
        # With `shard` the CPU keeps memory of messages for the next ones; it has other kernels of attention in bf16.
        if "shard" not in options and precision == "32-true":
            assert held["peak"] == pytest.approx(each["peak"] - LIBRARY_BYTES, rel=ON_THE_CPU)
            assert held["phase"] == each["peak_phase"]


# --- Pipelines --------------------------------------------------------------------------------------------------------


#: Shares the fixture `pipelined`.
PIPELINED = pytest.mark.xdist_group("plan of a pipeline")


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory):
    """Return the plan of four stages with equal layers, and what was printed."""
    strategy = {"name": "parallel", "pipeline": 4, "shard": 2, "schedule": "gpipe", "microbatches": 8}
    folder = tmp_path_factory.mktemp("pipelined")
    code, tree, said = plan(folder, "--devices", 8, strategy=strategy, layers=4, micro=8)
    assert code == 0, said
    return tree, said


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    "plugins/plan/",
    guard="tests/plan/test_plan.py::test_a_plan_sends_the_bytes_that_a_run_sends",
)
@pytest.mark.slow
@PIPELINED
def test_one_rank_of_each_kind_of_stage_is_planned(pipelined):
    tree, said = pipelined
    first, middle, last = tree["classes"]

    assert [(each["rank"], each["ranks"]) for each in tree["classes"]] == [(0, 2), (2, 4), (6, 2)]
    assert all(each["bubble"] == {"stages": 4, "microbatches": 8, "interleave": 1} for each in tree["classes"])
    sends = [
        sorted((sent["phase"], sent["calls"], sent["axis"], sent["ranks"]) for sent in each["collectives"]
               if sent["op"] == "send")
        for each in (first, middle, last)
    ]  # fmt: skip
    forward, backward = ("forward", 8, "pipeline", 2), ("backward", 8, "pipeline", 2)
    assert sends == [[forward], [backward, forward], [backward]]
    # Both ends compute with all the rest of the model, of which the middle has a copy; the head is in the last.
    assert first["end"]["parameters"] == middle["end"]["parameters"] == last["end"]["parameters"]
    assert middle["flops"] < last["flops"]
    assert "rank 2; 3 more are taken to do the same" in said


@pytest.mark.sweep(guard="tests/plan/test_plan.py::test_a_plan_sends_the_bytes_that_a_run_sends")
def test_stages_with_other_layers_are_planned_each(tmp_path):
    strategy = {"name": "parallel", "pipeline": 4, "balance": [1, 2, 1, 1]}
    code, tree, said = plan(tmp_path, "--devices", 4, strategy=strategy, layers=5, micro=4)
    assert code == 0, said

    assert [(each["rank"], each["ranks"]) for each in tree["classes"]] == [(0, 1), (1, 1), (2, 1), (3, 1)]


@pytest.mark.sweep(guard="tests/plan/test_plan.py::test_a_plan_sends_the_bytes_that_a_run_sends")
def test_a_stage_does_not_keep_converted_parameters_of_others(tmp_path):
    strategy = {"name": "parallel", "pipeline": 2}
    code, tree, said = plan(tmp_path, "--devices", 2, strategy=strategy, layers=4, micro=4, precision="bf16-true")
    assert code == 0, said

    assert all(each["end"]["messages"] == 0 for each in tree["classes"])


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    "plugins/plan/",
    guard="tests/plan/test_simulate.py::test_the_program_prints_and_writes_the_prediction",
)
@pytest.mark.slow
@PIPELINED
def test_a_bubble_is_part_of_the_predicted_time(tmp_path, pipelined):
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(pipelined[0]))
    done = scripts.run(
        [sys.executable, "-m", "stratagem", "simulate", str(path), "--json", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

    parts = json.loads(path.read_text())["parts_s"]
    # (stages - 1) / micro-batches of forward, of backward and of their messages that are not hidden.
    least = 3 / 8 * (parts["forward"] + parts["backward"])
    assert least < parts["bubble"] <= least + 3 / 8 * parts["exposed"]


def test_stages_of_equal_times_cannot_be_planned(tmp_path):
    strategy = {"name": "parallel", "pipeline": 2, "balance": "balance_by_time"}
    code, _, said = plan(tmp_path, "--devices", 2, strategy=strategy)

    assert code == 3
    assert "strategy.parallel.balance is 'balance_by_time', and a plan has no times" in said
