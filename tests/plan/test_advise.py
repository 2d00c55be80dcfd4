"""`stratagem advise`, and what it is made of: other settings and batches of a script, and the search among them."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from pathlib import Path

import pytest

from plan.fresh import plans
from programs import scripts
from stratagem_plan.advise import Advise
from stratagem_plan.candidates import Candidate, layouts, pipelines
from stratagem_plan.cost import Interval
from stratagem_plan.devices import find
from stratagem_plan.micro_batches import largest
from stratagem_plan.script import PlannedScript
from stratagem_plan.search import Planned, front, with_syncs
from stratagem_plan.variants import Variant, peak_of

PAGE = (Path(__file__).parents[2] / "docs" / "advise.md").read_text()
WHERE_IT_CHANGED = pytest.mark.when_changed(
    "plugins/plan/", guard="tests/plan/test_plan.py::test_scripts_of_many_kinds_are_planned"
)
SCRIPTS = Path(__file__).with_name("advice")
SCRIPT = """
import collections, torch, stratagem as sg
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(%(width)d, 4 * %(width)d), nn.Linear(4 * %(width)d, %(width)d)
    def forward(self, x):
        return x + self.down(self.up(x).relu())
class M(sg.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(%(width)d, 8))
    def training_step(self, batch):
        return self.net(batch["x"]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
class Batch(collections.UserDict):  # as tokenizers return
    def to(self, device, **_):
        return {key: value.to(device) for key, value in self.items()}
def collate(samples):
    return Batch(x=torch.stack(samples))
loader = torch.utils.data.DataLoader(torch.zeros(640, 64, %(width)d), batch_size=%(batch)d, collate_fn=collate)
def train(**options):
    sg.Trainer(max_steps=9, logger=False, enable_checkpointing=False, enable_progress_bar=False, **options).fit(M(), loader)
%(then)s
"""
#: Bytes of a device that holds a model of width 1024 if it is divided. torch's allocator takes memory in pieces of 20 MiB:
#: beside them smaller models would not tell one strategy from another.
MEMORY = 640e6
DEVICE = 'source = "a test"\nread_on = 2026-11-27\nvendor = false\nmemory_bytes_per_s = 1e12\nmemory_bytes = {memory}\n'
DEVICE += "[flops]\nbf16_dense = 1e14\nfp32_dense = 1e13\n"
DEVICE += "".join(f"[{link}]\nbytes_per_s_per_direction = 1e10\nlatency_s = 1e-5\n" for link in ("intra", "inter"))


def write(folder, batch=4, then="train()", memory=128e6, width=256):
    (folder / "small.toml").write_text(DEVICE.format(memory=memory))
    path = folder / "train.py"
    path.write_text(SCRIPT % {"batch": batch, "then": then, "width": width})
    return path


def command(name, folder, *words):
    """Return the exit code, the JSON and what was printed."""
    device = ["--device", "small", "--device-file", "small.toml", "--json", "out.json"]
    done = scripts.run(
        [sys.executable, "-m", "stratagem", name, *device, *words], capture_output=True, text=True, cwd=folder
    )
    path = folder / "out.json"
    return done.returncode, json.loads(path.read_text()) if path.exists() else None, done.stdout + done.stderr


def planned(script, **changes):
    (tree,) = plans(Variant(script=PlannedScript(script, devices=2, **changes), device="h100-sxm-80gb"))
    return tree


# --- Other settings and batches -----------------------------------------------------------------------------------------


@WHERE_IT_CHANGED
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param("fsdp", marks=pytest.mark.sweep(guard="tests/plan/test_plan.py::test_scripts_of_many_kinds_are_planned")),
    ],
)  # fmt: skip
def test_a_step_of_many_batches_is_planned_from_three(tmp_path, strategy):
    whole = planned(write(tmp_path, batch=2, then=f"train(strategy='{strategy}', accumulate_grad_batches=6)"))
    parts = planned(write(tmp_path, then=f"train(strategy='{strategy}')"), micro_batch=2, accumulate=6)

    for key in ("inputs", "accumulate", "classes"):
        assert parts[key] == whole[key]


@WHERE_IT_CHANGED
@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_the_next_does_not(tmp_path):
    fsdp = "train(strategy={'name': 'fsdp', 'auto_wrap_policy': 'blocks'})"
    script = write(tmp_path, batch=24, then=fsdp, memory=MEMORY, width=1024)
    code, tree, said = command("plan", tmp_path, "--devices", "2", "--largest-micro-batch", str(script))
    assert code == 0, said
    size = tree["largest_micro_batch"]["size"]
    peaks = [peak_of(planned(script, micro_batch=each, memory=MEMORY)) for each in (size, size + 1)]

    assert peaks[0] <= MEMORY < peaks[1]
    assert peaks == [tree["largest_micro_batch"][name] for name in ("peak", "peak_of_next")]
    assert f"largest micro-batch that fits: {size} samples" in said


@pytest.mark.parametrize(
    ("sizes", "first", "peak", "found", "most"),
    [
        (range(1, 2**20), 7, lambda size: 10 + 3 * size, 30, 3),
        (range(1, 2**20), 7, lambda size: max(60, 10 + 3 * size), 30, 5),
        (range(1, 2**20), 7, lambda size: 101, None, 3),
        ([1, 2, 4, 8], 3, lambda size: 10 + size, 8, 1),
        ([1, 2, 4, 8], 3, lambda size: 60 + 11 * size, 2, 3),
        ([1, 2, 4, 8], 0, lambda size: 101 + size, None, 1),
    ],
)
def test_the_search_for_the_largest_batch_plans_few(sizes, first, peak, found, most):
    search, asked = largest(sizes, 100, first, 10), []
    try:
        asked.append(next(search))
        while True:
            asked.append(search.send(peak(asked[-1])))
    except StopIteration as end:
        assert end.value == found
    assert len(asked) <= most
    assert len(set(asked)) == len(asked)


@pytest.mark.slow
def test_variants_are_planned_side_by_side_and_an_error_is_a_sentence(tmp_path):
    script = write(tmp_path, then="train(strategy={'name': 'fsdp', 'auto_wrap_policy': 'blocks'})")
    precisions = ("32-true", "16-mixd", "bf16-true")
    settings = [{"strategy": "ddp", "precision": each} for each in precisions]  # its options are replaced with it
    scripts = [PlannedScript(script, devices=2, settings=each) for each in settings]
    found = plans(*(Variant(script=each, device="h100-sxm-80gb") for each in scripts))

    assert [found[number]["stack"]["precision"] for number in (0, 2)] == ["32-true", "bf16-true"]
    assert found[0]["stack"]["strategy"] == "ddp"
    assert "16-mixd" in found[1]


# --- Averages between steps ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_average_of_replicas_counts_with_its_part_of_a_step(tmp_path):
    script = PlannedScript(write(tmp_path), devices=1, nodes=4)
    (outer,) = [each for each in layouts(1, 4) if each.name == "local_sgd"]
    settings = [{"strategy": each.strategy} for each in (outer, outer.syncing)]
    scripts = [PlannedScript(script.path, nodes=4, settings=each) for each in settings]
    one, other = plans(*(Variant(script=each, device="small") for each in scripts))
    (ranks,) = with_syncs(one, other, outer.period)["classes"]
    parameters = 4 * (4 * (2 * 256 * 1024 + 1024 + 256) + 256 * 8 + 8)

    sent = {each["axis"]: each["calls"] * each["payload"] for each in ranks["collectives"]}
    assert sent == {"team": parameters / 8}
    assert outer.period == 8
    assert ranks["peak"] == max(peak_of(one), peak_of(other))


# --- Advice -------------------------------------------------------------------------------------------------------------


#: Shares the fixture `advice`.
ADVISED = pytest.mark.xdist_group("advice")


@pytest.fixture(scope="module")
def advice(tmp_path_factory):
    """Return what `advise` wrote and said about devices on which a whole replica does not fit, and its folder."""
    folder = tmp_path_factory.mktemp("advice")
    words = ["--devices", "2", "--search", "strategy,micro_batch", "--html", "advice.html", "--svg", "pictures"]
    words.append(str(write(folder, batch=64, memory=MEMORY, width=1024)))
    code, tree, said = command("advise", folder, *words)
    assert code == 0, said
    return tree, said, folder


@WHERE_IT_CHANGED
@pytest.mark.slow
@ADVISED
def test_advice_is_what_fits_and_the_rest_is_told_by_how_much(advice):
    tree, said, folder = advice
    (best,) = tree["advice"]
    names = {True: set(), False: set()}
    for each in tree["planned"]:
        names[each["fits"]].add(each["candidate"].split(",")[0])

    assert "fsdp" in names[True]
    assert names[False] >= {"the script as it is", "ddp"}
    assert best["settings"]["accumulate_grad_batches"] * best["micro_batch"] == 64
    assert re.search(r"  ddp, batches of 1: does not fit, by 0\.\d+ GB", said)
    assert "ddp for 33,583,112 parameters: does not fit here" in said


@WHERE_IT_CHANGED
@pytest.mark.slow
@ADVISED
def test_advice_has_a_page_and_pictures(advice):
    tree, said, folder = advice
    page = (folder / "advice.html").read_text()

    assert tree["advice"][0]["code"] in page
    assert {path.name for path in (folder / "pictures").iterdir()} == {"compared.svg", "memory-1.svg"}
    lost = re.findall(r"^  (.*does not fit, by.*)$", said, re.MULTILINE)
    assert len(lost) >= 2
    assert all(line in page for line in lost)


@WHERE_IT_CHANGED
@pytest.mark.slow
@ADVISED
def test_the_advised_batch_fits_and_the_next_does_not(advice):
    tree, _, folder = advice
    (best,) = tree["advice"]
    size = best["micro_batch"]
    peaks = [
        peak_of(
            planned(
                folder / "train.py", micro_batch=each, accumulate=64 // each, memory=MEMORY,
                settings={"strategy": best["settings"]["strategy"]},
            )
        )
        for each in (size, 2 * size)
    ]  # fmt: skip

    assert peaks[0] == best["peak"]
    assert peaks[0] <= MEMORY < peaks[1]


@WHERE_IT_CHANGED
@pytest.mark.slow
@ADVISED
def test_the_code_to_paste_trains(advice):
    tree, _, folder = advice
    given = ast.parse(tree["advice"][0]["code"], mode="eval").body
    options = {each.arg: ast.literal_eval(each.value) for each in given.keywords}
    other = folder / "trained"
    other.mkdir()
    write(
        other,
        batch=tree["advice"][0]["micro_batch"],
        width=32,
        then=f"train(accelerator='cpu', devices=2, **{options})",
    )
    done = scripts.run([sys.executable, "train.py"], cwd=other, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.sweep(guard="tests/plan/test_plan.py::test_scripts_of_many_kinds_are_planned")
def test_a_loop_of_ones_own_keeps_its_batches(tmp_path):
    loop = """
def main(run):
    module = M()
    model, optimizer = run.setup(module.net, torch.optim.Adam(module.parameters()))
    for batch in run.dataloader(loader):
        run.backward(model(batch["x"]).square().mean())
        run.optimizer_step(optimizer)
        optimizer.zero_grad()
sg.Run(strategy="ddp").launch(main)
"""
    code, tree, said = command("advise", tmp_path, "--search", "precision,micro_batch", str(write(tmp_path, then=loop)))
    assert code == 0, said

    assert {each["code"] for each in tree["planned"]} >= {'Run(precision="bf16-mixed")', 'Run(precision="bf16-true")'}
    assert {each["micro_batch"] for each in tree["planned"]} == {4}


@pytest.mark.parametrize("line", re.findall(r"^    (stratagem advise .*)", PAGE, re.MULTILINE))
def test_the_commands_of_the_page_are_right(line):
    parser = argparse.ArgumentParser()
    Advise().add_arguments(parser)
    arguments = parser.parse_args(line.split()[2:])
    device = arguments.device_file and SCRIPTS / arguments.device_file

    assert (SCRIPTS / arguments.script).exists() or arguments.script.name == "train.py"
    assert find(arguments.device, device).need("memory_bytes")


def test_the_device_of_the_page_is_the_one_of_its_command():
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

    assert text == (SCRIPTS / "laptop.toml").read_text()


@pytest.mark.slow
@pytest.mark.sweep(guard="tests/plan/test_advise.py::test_the_commands_of_the_page_are_right")
@pytest.mark.parametrize(
    ("name", "words", "numbers"), [("resnet.py", (), 25_557_032), ("gpt.py", ("2", "256", "1"), 17_963_520)]
)
def test_the_scripts_of_the_page_are_planned(name, words, numbers):
    script = PlannedScript(SCRIPTS / name, words, micro_batch=1, accumulate=1)
    (tree,) = plans(Variant(script=script, device="t4"))

    assert tree["model"]["parameters"] == numbers


def of(seconds, peak, precision="32-true", candidate=None):
    tree = {"classes": [{"peak": peak, "needs": peak}], "stack": {"precision": precision}}
    return Planned(candidate=candidate or Candidate(), tree=tree, step_s=Interval(seconds, seconds, 2 * seconds))


def test_the_front_has_what_is_smaller_or_more_exact_than_all_that_is_faster():
    fastest, like_it, smaller, exact = (
        of(1, 100, "bf16-true"),
        of(1.1, 95, "bf16-true"),
        of(2, 50, "bf16-true"),
        of(3, 200),
    )
    slow = of(4, 190)

    assert front([slow, exact, smaller, like_it, fastest]) == [fastest, smaller, exact]
    assert front([of(0.99, 120, "bf16-true"), fastest, smaller]) == [fastest, smaller]


# --- Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "then", "code", "said"),
    [
        (["--search", "strategy,shards"], "train()", 1, ("--search has 'shards'", "did you mean 'shard'")),
        (["--search", "precision"], "print('done')", 3, ("has ended after 0 optimizer steps",)),
    ],
)
def test_what_cannot_be_advised_is_one_sentence(tmp_path, words, then, code, said):
    status, tree, text = command("advise", tmp_path, *words, str(write(tmp_path, then=then)))

    assert (status, tree) == (code, None), text
    assert all(word in text for word in said), text


@pytest.mark.parametrize(
    ("cluster", "samples", "least", "parts", "found"),
    [
        ((8, 512), 4096, 412, 4, (64, 8, 256, 8)),  # stages, devices of a layer, micro-batches, replicas
        ((8, 512), 4096, 412, 1, (64, 8, 64, 8)),
        ((8, 512), 4096, 25.8, 4, (4, 8, 16, 128)),
        ((8, 1), 24, 3, 4, (4, 1, 12, 2)),
        ((1, 8), 24, 0.5, 4, (2, 1, 6, 4)),
        ((8, 2), 24, 17, 4, None),
    ],
)
def test_a_pipeline_has_the_fewest_stages_that_one_replica_takes(cluster, samples, least, parts, found):
    ways = [
        (*(each.strategy.get(axis, 1) for axis in ("pipeline", "tensor", "microbatches")), each.data_ranks)
        for each in pipelines(*cluster, samples, least, parts)
    ]

    assert ways == ([found] if found else [])


@pytest.mark.slow
@pytest.mark.sweep(guard="tests/plan/test_advise.py::test_layers_are_cut_if_nothing_else_fits")
def test_a_pipeline_is_tried_if_layers_are_cut(tmp_path):
    """The last of two stages has a layer more, so it needs most."""
    script = write(tmp_path, memory=420e6)
    text = script.read_text().replace(
        "*(Block() for _ in range(4)), nn.Linear(256, 8)", "Block(), Block(), nn.Linear(256, 8_000)"
    )
    script.write_text(text.replace("4 * 256", "40_000").replace("torch.zeros(640, 64, 256)", "torch.zeros(640, 256)"))
    code, tree, said = command("advise", tmp_path, "--search", "strategy", "--devices", "2", "--nodes", "2", "train.py")
    assert code == 0, said
    (best,) = [each for each in tree["planned"] if "pipeline" in each["candidate"]]
    settings = {"strategy": best["settings"]["strategy"]}
    own = PlannedScript(script, devices=2, nodes=2, settings=settings, micro_batch=best["micro_batch"], accumulate=1)
    first, last = plans(*(Variant(script=own, device="small", rank=rank) for rank in (0, 2)))

    assert settings["strategy"].items() >= {"pipeline": 2, "tensor": 2, "microbatches": 8}.items()
    assert best["settings"]["accumulate_grad_batches"] * best["micro_batch"] == 16
    assert peak_of(last) > peak_of(first)
    assert best["peak"] == peak_of(last)


@pytest.mark.slow
def test_layers_are_cut_if_nothing_else_fits(tmp_path):
    """The model is one layer: gathered whole, it does not fit beside what a rank keeps."""
    script = write(tmp_path, memory=320e6)
    text = script.read_text().replace("nn.Sequential(*(Block() for _ in range(4)), nn.Linear(256, 8))", "Block()")
    script.write_text(text.replace("4 * 256", "40_000").replace("torch.zeros(640, 64, 256)", "torch.zeros(640, 256)"))
    code, tree, said = command("advise", tmp_path, "--search", "strategy", "--devices", "2", "train.py")
    assert code == 0, said

    assert [each["settings"]["strategy"] for each in tree["advice"]] == [
        {"name": "parallel", "tensor": 2, "plan": "auto"}
    ]
    assert re.search(r"fsdp, batches of 4: does not fit, by", said)
