"""`stratagem plan`: what it counts, against runs of the same script with values, and against a GPU's own counter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plan.evaluation import measured_rows
from programs import scripts
from stratagem_plan.allocator import LIBRARY_BYTES
from stratagem_plan.operators import chunks
from stratagem_plan.result import CATEGORIES, verdict

SCRIPT = Path(__file__).with_name("train_gpt.py")
MEMORY = json.loads(SCRIPT.with_name("memory.json").read_text())["rows"]


def plan(folder, *options, script=SCRIPT, run=scripts.run, **given):
    """Return the exit code, the plan file (None if there is none) and what was printed."""
    path = folder / "plan.json"
    words = [*map(str, options), "--json", str(path), str(script), json.dumps(given)]
    done = run(
        [sys.executable, "-m", "stratagem", "plan", *words], capture_output=True, text=True, cwd=folder
    )  # fmt: skip
    tree = json.loads(path.read_text()) if path.exists() else None
    path.unlink(missing_ok=True)
    return done.returncode, tree, done.stdout + done.stderr


def write(folder, text):
    path = folder / "train.py"
    path.write_text("import torch, stratagem as sg\nfrom torch import nn\n" + text)
    return path


# --- Against runs with values -------------------------------------------------------------------------------------------

#: Larger comparisons; the rows and strategies that stay run for every change.
BYTES = pytest.mark.sweep(guard="tests/plan/test_plan.py::test_a_plan_sends_the_bytes_that_a_run_sends")
PEAKS = pytest.mark.sweep(guard="tests/plan/test_plan.py::test_the_peak_is_the_one_that_a_gpu_counted")
UNITS = {"auto_wrap_policy": True}
STRATEGIES = {
    "ddp": "ddp",
    "ddp_sharded": "ddp_sharded",
    "fsdp": "fsdp",
    "fsdp with units": {"name": "fsdp"} | UNITS,
    "fsdp HYBRID_SHARD": {"name": "fsdp", "sharding_strategy": "HYBRID_SHARD"} | UNITS,
    "ddp, fp16 hook": "ddp",
}


def sent_for_real(folder, strategy, devices, **given):
    """Return the payloads of a second step on rank 0, by collective, of what is sent for gradients and parameters."""
    given |= {"strategy": strategy, "devices": devices, "count_to": str(folder)}
    given["options"] = given.get("options", {}) | {"accelerator": "cpu"}
    scripts.run([sys.executable, SCRIPT, json.dumps(given)], check=True, capture_output=True, cwd=folder)
    first, second = (json.loads((folder / f"0-{step}.json").read_text()) for step in (0, 1))
    found = {}
    for name, (_, payload) in second.items():
        operation, _, sender = name.partition(" ")
        if sender not in ("", "buffers", "comparison of ranks"):
            found[operation] = found.get(operation, 0) + payload - first.get(name, [0, 0])[1]
    return found


@pytest.mark.when_changed(
    "plugins/plan/",
    cases=(
        "ddp_sharded-2-32-true",
        "ddp, fp16 hook-2-32-true",
        "fsdp HYBRID_SHARD-4-bf16-mixed",
    ),
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "precision"),
    [
        *((name, 2, "32-true") for name in STRATEGIES if name not in ("fsdp", "fsdp HYBRID_SHARD")),
        ("fsdp HYBRID_SHARD", 4, "bf16-mixed"),
        *(pytest.param(name, 2, "32-true", marks=BYTES) for name in ("fsdp", "fsdp HYBRID_SHARD")),
        *(pytest.param(name, 2, "bf16-mixed", marks=BYTES) for name in STRATEGIES),
        *(pytest.param(name, 4, "32-true", marks=BYTES) for name in ("ddp", "fsdp with units")),
    ],
)  # fmt: skip
def test_a_plan_sends_the_bytes_that_a_run_sends(tmp_path, name, devices, precision):
    options = {"comm_hook": "fp16_compress"} if "hook" in name else {}
    given = {"precision": precision, "options": options}
    code, tree, said = plan(tmp_path, "--devices", devices, strategy=STRATEGIES[name], **given)
    assert code == 0, said
    found = {}
    for each in tree["classes"][0]["collectives"]:
        # Of an all-gather the run counts this rank's part, the plan the whole result.
        size = each["payload"] / (each["ranks"] if each["op"] == "all_gather" else 1)
        found[each["op"]] = found.get(each["op"], 0) + size * each["calls"]
    found.pop("broadcast", None) if name.startswith("ddp,") or name == "ddp" else None

    assert found == sent_for_real(tmp_path, STRATEGIES[name], devices, **given)


# --- Against a GPU's own counter -----------------------------------------------------------------------------------------


#: Rows that take a plan seconds: fp32, autocast, recomputing, ddp.
QUICK = (0, 1, 2, 7)


@pytest.mark.when_changed(
    "plugins/plan/",
    cases=(
        "2",
        "7",
    ),
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(each, marks=() if each in QUICK else PEAKS) for each in range(len(measured_rows()))],
)
def test_the_peak_is_the_one_that_a_gpu_counted(tmp_path, number):
    row = measured_rows()[number]
    layers, width, heads = row["shape"]
    code, tree, said = plan(
        tmp_path, "--device", "h200-sxm-141gb", layers=layers, width=width, heads=heads, micro=row["micro"], vocab=50304,
        length=1024, precision=row["precision"], strategy=row["strategy"], recompute=row["ck"],
        copies=row["precision"] == "bf16-mixed",
    )  # fmt: skip
    assert code == 0, said

    assert tree["classes"][0]["peak"] - LIBRARY_BYTES == pytest.approx(row["peak"], rel=0.0025)


@pytest.mark.slow
@PEAKS
@pytest.mark.parametrize(("nodes", "gib"), [(1, 82.4), (16, 67.0)])
def test_what_is_reserved_is_what_torchtitan_reads(tmp_path, nodes, gib):
    """Llama 3 8B, docs of torchtitan, December 2024: the rows that neither compile nor use float8."""
    options = ("--devices", 8, "--nodes", nodes, "--device", "h200-sxm-141gb")
    code, tree, said = plan(tmp_path, *options, script=SCRIPT.with_name("train_llama.py"))
    assert code == 0, said

    # Its scripts set expandable_segments.
    assert tree["classes"][0]["reserved_expandable"] == pytest.approx(gib * 2**30, rel=0.04)


# --- What it says ---------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_is_where(tmp_path):
    """The command as its users start it, with which the forks of the other tests are compared."""
    asked = {"strategy": {"name": "fsdp"} | UNITS}
    code, tree, said = plan(tmp_path, "--devices", 4, "--nodes", 2, run=subprocess.run, **asked)
    assert code == 0, said
    assert "Warning" not in said
    assert plan(tmp_path, "--devices", 4, "--nodes", 2, **asked)[:2] == (code, tree)
    numbers = 2 * 12 * 128**2 + 2 * 13 * 128 + 500 * 128 * 2 + 64 * 128 + 2 * 128
    (ranks,) = tree["classes"]

    assert ranks["ranks"] == 8
    assert tree["mesh"] == {"data": 1, "shard": 8}
    assert tree["inputs"] == {"samples": 2, "tokens": 128}
    # Shards of a rank, each rounded up to the allocator's 512 bytes.
    assert ranks["end"]["parameters"] == pytest.approx(numbers * 4 / 8 + 64 * 8, rel=0.05)
    assert ranks["end"]["optimizer"] == pytest.approx(2 * ranks["end"]["parameters"], rel=0.03)
    assert sum(ranks["at_peak"].values()) == ranks["peak"] < ranks["reserved_expandable"]
    assert {each["axis"] for each in ranks["collectives"]} == {"shard"}
    assert not any(each["within_node"] for each in ranks["collectives"])
    matrices = [each for each in ranks["work"] if each["kind"] == "matmul" and each["phase"] == "forward"]
    products = sum(2 * each["m"] * each["n"] * each["k"] * each["count"] for each in matrices)
    assert products == 2 * 128 * (2 * 12 * 128**2 + 500 * 128)
    assert "fits" in said


@pytest.mark.parametrize("recompute", [False, True])
def test_a_plan_names_the_module_of_the_peak(tmp_path, recompute):
    text = f"""
class M(sg.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large, self.last = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 4000), nn.Tanh()), nn.Linear(4000, 1)
    def training_step(self, batch):
        return self.last(self.large(self.small(batch))).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.zeros(20000, 4), batch_size=1000)
sg.Trainer(max_steps=5, activation_checkpointing=[nn.Sequential] if {recompute} else None).fit(M(), loader)
"""
    code, tree, said = plan(tmp_path, script=write(tmp_path, text))
    assert code == 0, said

    # The gradient of what Tanh returns is there when Tanh's gradient is made.
    assert (tree["classes"][0]["peak_phase"], tree["classes"][0]["peak_module"]) == ("backward", "large.1")
    assert "peak in backward of large.1" in said


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"peak": 100, "needs": 100}, "fits"),
        ({"peak": 100, "needs": 100, "returns": 2}, "fits, and torch gives back what it keeps"),
        (
            {"peak": 100, "needs": 147},
            "does not fit: rank 0 needs 7 bytes more than the device has, since what torch keeps",
        ),
        ({"peak": 150, "needs": 150}, "does not fit: rank 0 needs 10 bytes more"),
    ],
)
def test_whether_a_plan_fits_is_told(told, words):
    ranks = {"rank": 0, "returns": 0, "at_peak": dict.fromkeys(CATEGORIES, 1)} | told
    tree = {"world": {"world_size": 2}, "classes": [ranks]}

    assert verdict(tree, 140)[0].startswith(words)


@pytest.mark.when_changed("plugins/plan/", guard="tests/plan/test_plan.py::test_the_peak_is_the_one_that_a_gpu_counted")
@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(each, marks=() if each == 2 else PEAKS) for each in range(len(MEMORY))]
)
def test_what_is_reserved_and_where_it_fits_is_what_a_gpu_said(tmp_path, number):
    row, found = MEMORY[number], {}
    for memory in (10**12, *(memory for memory, _ in row["limits"])):
        (tmp_path / "device.toml").write_text(f"memory_bytes = {memory}\n")
        options = ("--device", "h200-sxm-141gb", "--device-file", "device.toml")
        code, tree, said = plan(tmp_path, *options, vocab=50304, length=1024, **row["given"])
        assert code in (0, 2), said
        found[memory] = code == 0, tree["classes"][0]
    fitting = [[memory, found[memory][0]] for memory, _ in row["limits"]]
    if number == 9:  # messages of ddp_sharded wait for the device before torch uses their memory again
        fitting[0][1] = False
    ranks = found[10**12][1]

    assert fitting == row["limits"]
    if row["given"]["strategy"] != "ddp":  # which makes its buckets again in the second step
        assert ranks["peak"] == pytest.approx(row["allocated"], rel=0.004)
        assert ranks["reserved"] == pytest.approx(row["reserved"], rel=0.007)


def test_a_plan_that_does_not_fit_says_by_how_much_and_three_ways_out(tmp_path):
    (tmp_path / "small.toml").write_text(
        'source = "a test"\nread_on = 2026-11-27\nvendor = false\nmemory_bytes = 70e6\n[flops]\nbf16_dense = 1e12\n'
    )
    code, _, said = plan(tmp_path, "--device", "small", "--device-file", "small.toml", strategy="single_device")

    assert code == 2
    assert "does not fit: rank 0 needs" in said
    assert "more devices, with strategy=" in said
    assert len([line for line in said.split("does not fit")[1].splitlines() if line.startswith("  ")]) == 3


@pytest.mark.parametrize(("length", "count"), [(8, 4), (10, 4), (9, 4), (3, 4), (0, 2), (5, 1)])
def test_parts_for_ranks_have_the_shapes_that_torch_gives_them(length, count):
    tensor = torch.zeros(2, length)
    whole = list(torch.chunk(tensor, count, dim=1))
    shapes = [tuple(part.shape) for part in whole if part.numel()]

    assert [tuple(part.shape) for part in chunks(tensor, count, 1)] == shapes + [(2, 0)] * (count - len(shapes))


# --- What cannot be planned -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "code", "words"),
    [
        ("print('done')", (), 3, ("has ended after 0 optimizer steps", "plan the command that trains")),
        (
            """
class M(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def training_step(self, batch):
        loss = self.layer(batch).mean()
        return loss * (2 if loss.item() > 0 else 1)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
sg.Trainer(max_steps=5, enable_progress_bar=False).fit(M(), torch.utils.data.DataLoader(torch.zeros(20, 4)))
""",
            (), 3, ("asks for the value of a tensor", "train.py:10", "loss.item()"),
        ),
        ("sg.Trainer(strategy='fsdp', precision='16-mixd')", (), 3, ("16-mixd",)),
        ("raise ValueError('mine')", (), 3, ("train.py:3", "ended the script with ValueError: mine")),
        ("raise SystemExit(2)", (), 3, ("ended the script with SystemExit: 2",)),
        ("", ("--device", "h100-sxm-80"), 1, ("h100-sxm-80gb",)),
        ("", ("--devices", "0"), 1, ("--devices is 0",)),
        ("", ("--rank", "7"), 1, ("--rank is 7", "0 to 0")),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_sentence(tmp_path, text, options, code, words):
    status, tree, said = plan(tmp_path, *options, script=write(tmp_path, text))

    assert (status, tree) == (code, None), said
    assert all(word in said for word in words), said


def test_a_script_that_does_not_exist_is_said(tmp_path):
    code, _, said = plan(tmp_path, script=tmp_path / "none.py")

    assert code == 1
    assert "none.py' does not exist" in said


def test_a_plan_leaves_nothing_in_the_folder(tmp_path):
    plan(tmp_path)

    assert list(tmp_path.iterdir()) == []


# --- Scripts of all kinds -------------------------------------------------------------------------------------------------

MODEL = """
class M(sg.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential({layers})
    def training_step(self, batch):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.zeros({shape}), batch_size=4{loader})
def train(**options):
    sg.Trainer(max_steps=5, enable_progress_bar=False, **options).fit(M(), loader)
"""


def script_of(layers="nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)", shape="64, 4", loader="", then="train()"):
    return MODEL.replace("{layers}", layers).replace("{shape}", shape).replace("{loader}", loader) + then + "\n"


SCRIPTS = {
    "convolutions, batch norm": script_of("nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()", "64, 3, 8, 8"),
    "pinned memory, workers": script_of(loader=", pin_memory=True, num_workers=1"),
    "checkpoints of its own": script_of(then="train(callbacks=[{'name': 'model_checkpoint', 'dirpath': 'kept'}])"),
    "accumulation, clipping": script_of(then="train(accumulate_grad_batches=4, gradient_clip_val=1.0)"),
    "a fit of one step before": script_of(then="sg.Trainer(max_steps=1).fit(M(), loader)\ntrain()"),
    "rates that grow with depth": script_of(
        "nn.Linear(4, 8), *(nn.Dropout(each.item()) for each in torch.linspace(0, 0.1, 3)), nn.Linear(8, 1)"
    ),
    "what ends it is caught": script_of(then="try: train()\nexcept BaseException: pass"),
}


@pytest.mark.parametrize("devices", [1, 2])
def test_a_plan_of_a_scaled_loss_steps(tmp_path, devices):
    script = script_of(then="train(precision='16-mixed', gradient_clip_val=1.0)")
    code, tree, said = plan(tmp_path, "--devices", devices, script=write(tmp_path, script))
    assert code == 0, said

    # Beside the gradients ranks send whether any has overflowed.
    sent = [each["payload"] for each in tree["classes"][0]["collectives"]]
    assert sorted(sent) == ([4, 4 * (4 * 8 + 8 + 8 + 1)] if devices == 2 else [])


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_of_many_kinds_are_planned(tmp_path, name):
    code, tree, said = plan(tmp_path, "--devices", 2, script=write(tmp_path, SCRIPTS[name]))
    assert code == 0, said
    (ranks,) = tree["classes"]
    (sent,) = [each for each in ranks["collectives"] if each["op"] == "all_reduce"]

    assert tree["stack"]["strategy"] == "ddp"
    assert tree["accumulate"] == (4 if name.startswith("accumulation") else 1)
    assert sent["calls"] == 1
    assert ranks["end"]["parameters"] > 0
    assert {each["phase"] for each in ranks["work"]} >= {"forward", "backward", "optimizer"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_ranks_that_own_more_are_a_class(tmp_path):
    text = script_of("nn.Linear(4, 2000), nn.Linear(2000, 8), nn.Linear(8, 4)", then="train(strategy='ddp_sharded')")
    text = text.replace("SGD(self.parameters(), lr=0.1)", "Adam(self.parameters())")
    code, tree, said = plan(tmp_path, "--devices", 4, script=write(tmp_path, text))
    assert code == 0, said

    # Owned: 16,008 numbers by one rank, 8,000 by another, 2,000 and a few by the rest.
    assert [each["ranks"] for each in tree["classes"]] == [3, 1]
    assert tree["classes"][1]["end"]["optimizer"] == pytest.approx(2 * 4 * 16_008, rel=0.1)
    assert tree["classes"][0]["end"]["optimizer"] < tree["classes"][1]["end"]["optimizer"]


def test_one_device_needs_no_messages(tmp_path):
    code, tree, said = plan(tmp_path, script=write(tmp_path, script_of()))

    assert (code, tree["stack"]["strategy"], tree["classes"][0]["collectives"]) == (0, "single_device", []), said


def test_a_loop_of_ones_own_is_counted_from_forward_to_step(tmp_path):
    text = """
def main(run):
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model, optimizer = run.setup(module, torch.optim.Adam(module.parameters()))
    for batch in run.dataloader(torch.utils.data.DataLoader(torch.zeros(64, 4), batch_size=4)):
        loss = model(batch).square().mean()  # outside of the model
        run.backward(loss)
        run.optimizer_step(optimizer)
        optimizer.zero_grad()
sg.Run(strategy="ddp").launch(main)
"""
    code, tree, said = plan(tmp_path, "--devices", 2, script=write(tmp_path, text))
    assert code == 0, said
    (ranks,) = tree["classes"]

    assert {each["op"] for each in ranks["work"] if each["phase"] == "backward" and each["kind"] == "vector"}
    assert [each["payload"] for each in ranks["collectives"] if each["op"] == "all_reduce"] == [4 * (5 * 8 + 9)]


def test_with_manual_optimization_a_batch_is_a_step(tmp_path):
    text = """
class Pair(sg.Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(4, 1), nn.Linear(4, 2)
    def training_step(self, batch):
        for part, optimizer in zip((self.one, self.other), self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(part(batch).mean())
            optimizer.step()
    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.one, self.other)]
loader = torch.utils.data.DataLoader(torch.zeros(64, 4), batch_size=4)
sg.Trainer(max_steps=9, enable_progress_bar=False).fit(Pair(), loader)
"""
    code, tree, said = plan(tmp_path, script=write(tmp_path, text))
    assert code == 0, said
    products = [each for each in tree["classes"][0]["work"] if each["kind"] == "matmul" and each["phase"] == "forward"]

    assert tree["inputs"]["samples"] == 4
    assert sorted(each["n"] for each in products) == [1, 2]


def test_a_module_that_is_loaded_is_planned_as_one_that_is_built(tmp_path):
    """With a layer that is used twice, in a strategy that divides parameters."""
    layers = "nn.Linear(400, 400), nn.ReLU()"
    build = f"nn.Sequential({layers})"
    (tmp_path / "save.py").write_text(
        f"import torch\nfrom torch import nn\nnet = {build}\ntorch.save(nn.Sequential(net, net), 'net.pt')\n"
    )
    scripts.run([sys.executable, "save.py"], cwd=tmp_path, check=True)
    classes = []
    for made in (f"net = {build}\nwhole = nn.Sequential(net, net)", "whole = torch.load('net.pt', weights_only=False)"):
        text = script_of("", "64, 400", then="train(strategy='fsdp')").replace("nn.Sequential()", "whole")
        code, tree, said = plan(
            tmp_path, "--devices", 2, script=write(tmp_path, text.replace("class M", f"{made}\nclass M"))
        )
        assert code == 0, said
        classes.append(tree["classes"])

    assert classes[0] == classes[1]


@pytest.mark.when_changed("plugins/plan/", guard="tests/plan/test_plan.py::test_scripts_of_many_kinds_are_planned")
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_models_of_transformers_are_planned(tmp_path, kind):
    pytest.importorskip("transformers")
    sizes = {
        "GPT2": "n_layer=2, n_embd=64, n_head=2",
        "Llama": "hidden_size=64, num_hidden_layers=2, num_attention_heads=2",
    }
    text = f"""
from transformers import AutoModelForCausalLM, {kind}Config
class M(sg.Module):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_config({kind}Config({sizes[kind]}, vocab_size=100))
    def training_step(self, batch):
        return self.model(input_ids=batch, labels=batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
loader = torch.utils.data.DataLoader(torch.zeros(64, 16, dtype=torch.long), batch_size=4)
sg.Trainer(max_steps=9, strategy="fsdp", enable_progress_bar=False).fit(M(), loader)
"""
    code, tree, said = plan(tmp_path, "--devices", 2, script=write(tmp_path, text))

    assert code == 0, said
    assert tree["inputs"] == {"samples": 4, "tokens": 64}


# --- Batches ----------------------------------------------------------------------------------------------------------------


def test_a_smaller_last_batch_is_planned_like_the_others(tmp_path):
    """The data set has one batch and a half."""
    trees = []
    for samples in (6, 8):
        code, tree, said = plan(tmp_path, script=write(tmp_path, script_of(shape=f"{samples}, 4")))
        assert code == 0, said
        trees.append(tree)

    assert trees[0]["inputs"]["samples"] == 4
    assert trees[0]["classes"] == trees[1]["classes"]


def test_ddp_sends_parameters_that_are_not_used_or_refuses_them(tmp_path):
    text = script_of("nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)", then="train(strategy='{}')")
    text = text.replace("self.net = nn", "self.unused = nn.Linear(7, 1)\n        self.net = nn")
    strict = write(tmp_path, text.replace("{}", "ddp_find_unused_parameters_false"))
    code, _, said = plan(tmp_path, "--devices", 2, script=strict)
    assert code == 3
    assert "unused.bias" in said
    assert "got no gradient on rank 0, and DDP waits for all of them" in said

    script = write(tmp_path, text.replace("{}", "ddp"))
    code, tree, said = plan(tmp_path, "--devices", 2, script=script)
    assert code == 0, said
    (sent,) = [each for each in tree["classes"][0]["collectives"] if each["op"] == "all_reduce"]
    assert sent["payload"] == 4 * (5 * 8 + 9 + 8)


def test_fits_before_the_planned_one_are_not_mixed_with_it(tmp_path):
    """The first one ends after a step: its second step would be the first of the other, which makes Adam's state."""
    text = script_of(then="train()").replace("max_steps=5, enable", "enable")
    text = text.replace("SGD(self.parameters(), lr=0.1)", "Adam(self.parameters())")
    work = []
    for calls in ("train(max_steps=5)", "train(max_steps=1)\ntrain(max_steps=5)"):
        code, tree, said = plan(tmp_path, script=write(tmp_path, text.replace("train()\n", f"{calls}\n")))
        assert code == 0, said
        work.append(tree["classes"][0]["work"])

    assert work[0] == work[1]


def test_lines_of_ordinary_scripts_are_planned(tmp_path):
    """Two optimizers by hand under fsdp, whose units are gathered without a use; a draw until it fits; sync_dist."""
    script = write(tmp_path, """
from torch.utils.data import DataLoader, TensorDataset

class GAN(sg.Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.d = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        nn.init.trunc_normal_(self.g[0].weight, std=0.02)
        nn.init.trunc_normal_(self.d[0].weight, std=1.0, a=-0.01, b=0.01)

    def training_step(self, batch):
        of_g, of_d = self.optimizers()
        noise = torch.randn(batch[0].shape[0], 8, device=self.device)
        loss = nn.functional.softplus(-self.d(batch[0])).mean() + nn.functional.softplus(self.d(self.g(noise).detach())).mean()
        self.manual_backward(loss)
        of_d.step(); of_d.zero_grad()
        self.manual_backward(nn.functional.softplus(-self.d(self.g(noise))).mean())
        of_g.step(); of_g.zero_grad(); of_d.zero_grad()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("size", len(noise), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self):
        return [torch.optim.Adam(self.g.parameters(), 1e-4), torch.optim.Adam(self.d.parameters(), 1e-4)]

sg.Trainer(strategy="fsdp", max_steps=6, logger=False, enable_checkpointing=False).fit(
    GAN(), DataLoader(TensorDataset(torch.randn(64, 4)), 8))
""")  # fmt: skip
    code, tree, said = plan(tmp_path, "--devices", 2, script=script)

    assert code == 0, said
    assert {each["op"] for each in tree["classes"][0]["collectives"]} >= {"all_gather", "reduce_scatter"}
