"""`stratagem simulate`: what it prints and writes for a plan, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
from attrs import evolve

from plan.transformer import megatron, torchtitan
from stratagem.cli import main
from stratagem_plan.devices import find
from stratagem_plan.plan_file import structure
from stratagem_plan.scaling import scaled
from stratagem_plan.simulate import simulate

GPT_3 = {
    "model": "GPT-3 175B", "layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 51200, "seq": 2048, "tp": 8,
    "pp": 16, "dp": 8, "interleave": 1, "micro_batch": 1, "global_batch": 1536, "recompute": "full",
    "sequence_parallel": False, "device": "a100-sxm-80gb", "devices": 1024,
}  # fmt: skip
LLAMA = {
    "model": "Llama 8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq": 8192,
    "tp": 1, "pp": 1, "dp": 128, "shard": 128, "interleave": 1, "micro_batch": 1, "global_batch": 1024, "note": None,
    "recompute": None, "sequence_parallel": False, "compile": True, "precision": "bf16-mixed", "device": "h100-sxm-80gb",
    "devices": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def gpt_3():
    return structure(megatron(GPT_3), "GPT-3")


@pytest.fixture(scope="module")
def llama():
    return structure(torchtitan(LLAMA), "Llama")


#: With every key that a plan file has.
WHOLE = {
    "schema": 1, "versions": {"torch": "2.13"}, "script": "train.py --x", "device": "h100-sxm-80gb",
    "world": {"devices_per_node": 8, "nodes": 2, "world_size": 16}, "stack": {"strategy": "fsdp"},
    "inputs": {"samples": 4, "tokens": 8192}, "data_ranks": 16, "accumulate": 1, "assumptions": ["a value is equal"],
    "classes": [{
        "rank": 0, "ranks": 16, "peak": 7e10, "at_peak": {"parameters": 1e9}, "peak_phase": "backward", "end": {},
        "work": [
            {"phase": "forward", "kind": "matmul", "dtype": "bfloat16", "m": 8192, "n": 4096, "k": 1024, "batch": 1, "count": 24},
            {"phase": "backward", "kind": "attention", "dtype": "bfloat16", "flops": 1e11, "count": 24},
            {"phase": "optimizer", "kind": "vector", "op": "aten.mul", "dtype": "float32", "bytes": 0, "count": 24},
        ],
        "collectives": [
            {"phase": "forward", "op": "all_gather", "axis": "shard", "ranks": 16, "within_node": False, "payload": 1e8, "calls": 48},
        ],
        "bubble": None,
    }],
}  # fmt: skip


def test_a_plan_with_every_key_is_read(tmp_path, capsys):
    (tmp_path / "plan.json").write_text(json.dumps(WHOLE))

    assert main(["simulate", str(tmp_path / "plan.json"), "--device", "h200-sxm-141gb", "--tokens", "1e9"]) == 0
    assert "a value is equal" in capsys.readouterr().out


def test_figures_of_a_file_replace_those_of_the_device(tmp_path, capsys):
    (tmp_path / "plan.json").write_text(json.dumps(WHOLE))
    (tmp_path / "slow.toml").write_text("[inter]\nbytes_per_s_per_direction = 1e9\nlatency_s = 1e-5\n")
    plan = structure(WHOLE, "whole")
    slow = find(plan.device, tmp_path / "slow.toml")

    assert main(["simulate", str(tmp_path / "plan.json"), "--device-file", str(tmp_path / "slow.toml")]) == 0
    assert simulate(plan, slow).step_s.expected > 2 * simulate(plan, find(plan.device)).step_s.expected


def test_the_program_prints_and_writes_the_prediction(tmp_path, capsys):
    (tmp_path / "plan.json").write_text(json.dumps(megatron(GPT_3)))
    arguments = ["--tokens", "3e11", "--price", "2.5", "--mtbf", "50000h", "--json", str(tmp_path / "out.json")]

    assert main(["simulate", str(tmp_path / "plan.json"), *arguments]) == 0
    text, result = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    for words in (
        "GPT-3 175B",
        "weak scaling",
        "strong scaling",
        "MFU",
        "HFU",
        "checkpoint",
        "days",
        "cost",
        "assumptions",
    ):
        assert words in text
    for interval in (result["step_s"], result["days"], result["device_hours"], result["cost"], result["inputs_per_s"]):
        assert interval["low"] < interval["expected"] < interval["high"]
    assert sum(result["parts_s"].values()) == pytest.approx(result["step_s"]["expected"])
    assert any("a100-sxm-80gb reaches the same share" in each for each in result["assumptions"])


def test_days_hours_and_cost_follow_from_the_step(gpt_3):
    result = simulate(gpt_3, find(gpt_3.device), tokens=3e11, price=2.5)
    steps = 3e11 / (1536 * 2048)

    assert result.days.expected == pytest.approx(steps * result.step_s.expected / 86400)
    assert result.device_hours.expected == pytest.approx(result.days.expected * 24 * 1024)
    assert result.cost.expected == pytest.approx(2.5 * result.device_hours.expected)


def test_utilization_counts_recomputation_or_not(gpt_3):
    result = simulate(gpt_3, find(gpt_3.device))
    layers = 96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
    expected = layers / result.step_s.expected / 1024 / 312e12

    assert result.hardware_flops_utilization.expected == pytest.approx(expected, rel=0.01)
    assert 0.7 < result.model_flops_utilization.expected / expected < 0.8
    assert result.cost is result.days is result.saves is None


def test_the_interval_between_checkpoints_loses_the_least_time(llama):
    """Young's interval, but for the length of a save; longer and shorter ones lose more."""
    result = simulate(llama, find(llama.device), tokens=1e12, mtbf_s=50000 * 3600, save_s=30)
    saves = result.saves

    def lost(every):
        return 30 / every + (every + 30) / 2 / saves.mtbf_s

    assert saves.mtbf_s == pytest.approx(50000 * 3600 / 128)
    assert saves.every_s == pytest.approx(math.sqrt(2 * 30 * saves.mtbf_s), rel=0.02)
    assert lost(saves.every_s) < min(lost(saves.every_s / 1.3), lost(saves.every_s * 1.3))
    without = simulate(llama, find(llama.device), tokens=1e12)
    assert result.days.expected / without.days.expected == pytest.approx(1 + saves.overhead)


def test_weak_scaling_keeps_the_work_of_a_rank_and_strong_scaling_that_of_a_step(llama):
    weak, strong = (scaled(llama, 32, strong=strong) for strong in (False, True))

    assert (weak.data_ranks, weak.inputs.samples, weak.world.world_size) == (256, 8, 256)
    assert (strong.data_ranks, strong.inputs.samples) == (256, 4)
    (before,), (after,), (half,) = llama.classes, weak.classes, strong.classes
    assert after.work == before.work
    assert {each.ranks for each in after.collectives} == {256}
    assert all(
        b.count == a.count / (1 if a.phase == "optimizer" else 2) for a, b in zip(before.work, half.work, strict=True)
    )


def test_scaling_keeps_the_axes_that_cut_the_model(gpt_3):
    ranks = {(each.axis, each.ranks) for each in scaled(gpt_3, 256, strong=True).classes[0].collectives}

    assert ranks == {("tensor", 8), ("pipeline", 2), ("data", 16)}
    assert scaled(gpt_3, 128 * 512, strong=True) is None


def test_a_plan_without_messages_between_data_ranks_is_not_scaled(llama, capsys):
    (ranks,) = llama.classes
    alone = evolve(llama, classes=[evolve(ranks, collectives=[])])
    result = simulate(alone, find(alone.device))

    assert result.weak_scaling == result.strong_scaling == []


def test_a_device_without_a_link_to_other_nodes_is_not_scaled_over_nodes(llama):
    (ranks,) = llama.classes
    near = evolve(ranks, collectives=[evolve(each, within_node=True) for each in ranks.collectives])
    alone = evolve(llama, classes=[near], world=evolve(llama.world, nodes=1))
    result = simulate(alone, evolve(find(llama.device), inter=None))

    assert [each.nodes for each in result.weak_scaling] == [1]
    assert "one node alone" in " ".join(result.assumptions)


def test_efficiency_falls_when_the_same_samples_are_spread(gpt_3):
    scales = simulate(gpt_3, find(gpt_3.device)).strong_scaling
    efficiencies = [each.efficiency for each in scales]

    assert efficiencies == sorted(efficiencies, reverse=True)
    assert [each.nodes for each in scales] == [16, 32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan file '.*' cannot be read: .*; expected JSON; write it again with"),
        ("[]", "has schema None; expected 1; write it again"),
        ('{"schema": 7}', "has schema 7; expected 1; write it again"),
        ('{"schema": 1}', "plan file '.*' is broken: .*required field missing"),
    ],
)
def test_a_plan_file_that_cannot_be_used_is_one_sentence(tmp_path, capsys, text, message):
    (tmp_path / "plan.json").write_text(text)

    assert main(["simulate", str(tmp_path / "plan.json")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    from stratagem.errors import ConfigError
    from stratagem_plan.plan_file import read_plan

    with pytest.raises(ConfigError, match=message):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "guess"}, "guess"),
        ({"m": 0}, "work of kind matmul has no m, n or k"),
        ({"kind": "vector"}, "work of kind vector has no bytes"),
        ({"count": 0}, "count"),
        ({"phase": "sideways"}, "sideways"),
    ],
)
def test_a_wrong_work_item_is_named(change, message):
    from stratagem.errors import ConfigError

    tree = torchtitan(LLAMA)
    tree["classes"][0]["work"][0] |= change

    with pytest.raises(ConfigError, match=message):
        structure(tree, "plan.json")


def test_a_wrong_time_between_failures_is_one_sentence(tmp_path, capsys):
    (tmp_path / "plan.json").write_text(json.dumps(torchtitan(LLAMA)))

    assert main(["simulate", str(tmp_path / "plan.json"), "--mtbf", "often"]) == 1
    assert "--mtbf is 'often'; expected a number with s, m, h or d" in capsys.readouterr().err
