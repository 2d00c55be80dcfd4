"""Plans of DeepSpeed's stages, against runs of its engine on the CPU that the same counter counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from plan.test_plan import plan
from programs import scripts
from stratagem.errors import ConfigError

HERE = Path(__file__).parent
GUARD = "tests/plan/test_plan.py::test_a_plan_sends_the_bytes_that_a_run_sends"
SWEEP = pytest.mark.sweep(guard=GUARD)
#: Small ones: buckets are sent several times in a step, and stage 3 keeps few parameters.
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
STAGE_3 = {
    "stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 60_000,
    "stage3_max_live_parameters": 200_000, "stage3_max_reuse_distance": 100_000,
}  # fmt: skip


def zero(**options):
    return {"zero_optimization": options}


def strategy(stage, precision="32-true", **options):
    options = {"stage": stage, "overlap_comm": False} | BUCKETS | (STAGE_3 if stage == 3 else {}) | options
    scale = {"loss_scale": 1.0} if precision == "16-mixed" else {}  # a run skips steps until it has found one
    return {"name": "deepspeed", "config": zero(**options)} | scale


def planned(folder, script, devices=2, **given):
    """Return the bytes of a plan's peak, and calls of each of its collectives by phase, ranks and bytes."""
    code, tree, said = plan(folder, "--devices", devices, script=HERE / script, **given)
    assert code == 0, said
    (ranks,) = tree["classes"]
    sent = {}
    for each in ranks["collectives"]:
        key = each["phase"], each["op"], each["ranks"], each["payload"]
        sent[key] = sent.get(key, 0) + each["calls"]
    return sum(ranks["at_peak"].values()) - ranks["at_peak"]["libraries"], sent


def counted(folder, script, devices=2, **given):
    """Return the same of the second step of real processes, of rank 0."""
    file = folder / "counted-0.json"
    given |= {"devices": devices, "counted": str(folder)}
    given["options"] = given.get("options", {}) | {"accelerator": "cpu"}
    done = scripts.run(
        [sys.executable, HERE / script, json.dumps(given)], capture_output=True, text=True, cwd=folder
    )  # fmt: skip
    assert file.exists(), done.stderr
    tree = json.loads(file.read_text())
    # Ranks send each other points at which they compare what they compute; a plan has one rank.
    sent = {(phase, op, len(ranks), size): calls for phase, op, ranks, size, calls in tree["sent"] if op != "send"}
    return tree["peak"], sent


def large(name, stage, **given):
    return pytest.param(name, stage, given, marks=SWEEP)


@pytest.mark.when_changed(
    "plugins/deepspeed/", "plugins/plan/", guard="tests/plan/test_plan.py::test_a_plan_sends_the_bytes_that_a_run_sends"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "given"),
    [
        ("mlp", 3, {"precision": "bf16-mixed", "recompute": True}),
        large("mlp", 1, precision="bf16-mixed"),
        large("mlp", 1, recompute=True),
        large("mlp", 2, precision="bf16-mixed", recompute=True),
        large("mlp", 2),
        large("mlp", 2, precision="bf16-true"),
        large("mlp", 3),
        large("mlp", 3, precision="bf16-true"),
        large("mlp", 1, precision="16-mixed"),
        large("mlp", 2, precision="16-mixed"),
        large("mlp", 3, precision="16-mixed"),
        large("mlp", 2, options={"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
        large("mlp", 3, options={"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
        large("mlp", 2, zero={"overlap_comm": True}),
        large("mlp", 3, zero={"overlap_comm": True}),
        large("mlp", 3, devices=4, zero={"zero_hpz_partition_size": 2}),
        large("mlp", 2, zero={"contiguous_gradients": False}),
        large("mlp", 2, zero={"reduce_scatter": False}),
        large("gpt", 1),
        large("gpt", 1, recompute=True),
        large("gpt", 2),
        large("gpt", 2, recompute=True),
        large("gpt", 3),
        large("gpt", 3, recompute=True),
    ],
)
def test_a_plan_sends_and_holds_what_a_run_does(tmp_path, name, stage, given):
    given = dict(given)
    given["strategy"] = strategy(stage, given.get("precision"), **given.pop("zero", {}))
    peak, sent = planned(tmp_path, f"train_{name}.py", **given)
    real_peak, real_sent = counted(tmp_path, f"train_{name}.py", **given)

    assert sent == real_sent
    assert peak == pytest.approx(real_peak, rel=0.002)


@pytest.mark.slow
@SWEEP
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_in_16_bits_normalizes_in_32_as_a_gpu_does(tmp_path, stage, recompute):
    given = {"strategy": strategy(stage), "precision": "bf16-mixed", "recompute": recompute}
    peak, sent = planned(tmp_path, "train_gpt.py", **given)
    real_peak, real_sent = counted(tmp_path, "train_gpt.py", **given)

    # On the CPU inputs of norms are cast, where stage 3 counts their weights as parameters of the block, too.
    assert {key: calls for key, calls in sent.items() if key[1] != "broadcast"} == {
        key: calls for key, calls in real_sent.items() if key[1] != "broadcast"
    }
    assert peak == pytest.approx(real_peak, rel=0.05)


@pytest.mark.slow
@SWEEP
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_offloaded_is_not_on_the_device(tmp_path, stage, precision):
    offload = {"offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        offload["offload_param"] = {"device": "cpu"}
    given = {"strategy": strategy(stage, precision, **offload), "precision": precision}
    _, sent = planned(tmp_path, "train_mlp.py", **given)
    _, real_sent = counted(tmp_path, "train_mlp.py", **given)
    _, tree, _ = plan(tmp_path, "--devices", 2, script=HERE / "train_mlp.py", **given)
    numbers = 3 * (2 * 256 * 512 + 256 + 512) + 257 * 7
    size = 4 if precision == "32-true" else 2

    assert sent == real_sent
    assert tree["classes"][0]["end"]["optimizer"] == 0
    if stage == 3:
        assert tree["classes"][0]["end"]["parameters"] == 0
    else:
        assert tree["classes"][0]["end"]["parameters"] == pytest.approx(numbers * size, rel=0.001)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": zero(stage=2, zenflow={"topk_ratio": 0.1})}, ("zero_optimization.zenflow", "cannot be planned")),
        (
            {"config": zero(stage=3, zero_quantized_weights=True)},
            ("zero_optimization.zero_quantized_weights", "is True"),
        ),
        (
            {"stage": 3, "offload_parameters": True, "offload_params_device": "nvme"},
            ("strategy.deepspeed.offload_params_device is 'nvme'", "'cpu'"),
        ),
        ({"partition_activations": True}, ("strategy.deepspeed.partition_activations is True",)),
        (
            {"config": {"activation_checkpointing": {"partition_activations": True}}},
            ("activation_checkpointing.partition_activations of", "is True"),
        ),
    ],
)
def test_what_cannot_be_planned_names_the_option(deepspeed_preloaded, options, words):
    from stratagem_deepspeed import DeepSpeedStrategy
    from stratagem_deepspeed.planned import check

    with pytest.raises(ConfigError) as caught:
        check(DeepSpeedStrategy(**options))

    assert all(word in str(caught.value) for word in words), str(caught.value)
