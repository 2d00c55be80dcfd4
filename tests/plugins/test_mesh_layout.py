"""What `stratagem explain` and the report tell about the mesh of a strategy."""

from __future__ import annotations

import json
import re
import sys
from xml.etree import ElementTree

import pytest
from attrs import define

import stratagem as sg
from programs import scripts
from stratagem.api import Mesh, hookimpl
from stratagem_devtools.mesh_text import mesh_lines
from stratagem_layout import AxisMessages, Layout, RankLayout, Slot, Timeline
from stratagem_report.pictures import MeshPicture, TimelinePicture
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data, joined_batches
from stratagem_testing.training import QUIET, loader, share

TIMELINE = Timeline(
    schedule="gpipe", stages=2, microbatches=2, num_slots=9, idle_share=1 / 3,
    rows=[
        [Slot(start=0, length=1, kind="forward", microbatch=0, stage=0), Slot(start=5, length=2, kind="backward", microbatch=0, stage=0)],
        [Slot(start=1, length=1, kind="forward", microbatch=0, stage=1), Slot(start=3, length=2, kind="backward", microbatch=0, stage=1)],
    ],
)  # fmt: skip
LAYOUT = Layout(
    axes={"pipeline": 2, "tensor": 2},
    ranks=[
        RankLayout(
            rank=rank, position={"pipeline": rank // 2, "tensor": rank % 2}, layers=[f"layers.{rank // 2}"],
            slices=[f"tensor: part {rank % 2 + 1} of 2 of layers.*.up"], num_bytes=4096,
        )
        for rank in range(4)
    ],
    messages=[
        AxisMessages(axis="pipeline", size=2, what="activations", num_bytes=2048, counted=True),
        AxisMessages(axis="tensor", size=2, what="activations", num_bytes=None),
    ],
    timeline=TIMELINE,
)  # fmt: skip


def test_the_mesh_as_text():
    lines = mesh_lines(LAYOUT)

    assert lines[0] == "mesh: pipeline 2 x tensor 2, 4 ranks"
    assert "  rank 3 (pipeline 1, tensor 1): layers.1; 4.0 KiB of parameters" in lines
    assert "  pipeline (2 ranks): activations: 2.0 KiB (counted)" in lines
    assert "  tensor (2 ranks): activations: depends on the batch" in lines
    assert lines[-3:] == [
        "schedule gpipe: 2 stages, 2 micro-batches, 33.3% idle",
        "  0: F0 .  .  .  .  B0 B0 .  .",
        "  1: .  F0 .  B0 B0 .  .  .  .",
    ]
    assert json.loads(json.dumps(LAYOUT.as_dict()))["timeline"]["rows"][1][0]["stage"] == 1


def test_the_mesh_as_pictures():
    mesh, timeline = MeshPicture(LAYOUT), TimelinePicture(TIMELINE)

    cards = list(mesh.cards())
    assert [colour for colour, _ in cards] == [1, 1, 2, 2]
    assert cards[3] == (2, ["rank 3 · 4.0 KiB", "pipeline 1, tensor 1", "layers.1"])
    assert mesh.columns == 2
    computed = list(timeline.boxes())
    assert len(computed) == 4
    assert all(x + width <= timeline.width and y < timeline.height for x, y, width, *_ in computed)
    assert "33.3% of the time idle" in timeline.title


@define(eq=False, kw_only=True)
class Drawn(sg.Strategy):
    """Trains in one process, and tells of four ranks."""

    @hookimpl
    def wrap_model(self, module):
        return module

    def layout(self, world, module):
        return LAYOUT


def test_the_report_draws_them(tmp_path):
    trainer = sg.Trainer(**(QUIET | {"strategy": Drawn(), "callbacks": ["report"], "default_root_dir": tmp_path}))
    trainer.fit(Net(), loader(data(8), 4))

    text = (tmp_path / "report.html").read_text()
    (picture,) = [each for each in re.findall(r"<svg.*?</svg>", text, re.DOTALL) if "micro-batch 0" in each]
    ElementTree.fromstring(picture)
    assert "<p>rank 3 · 4.0 KiB</p><p>pipeline 1, tensor 1</p><p>layers.1</p>" in text
    assert "counted in one step" in text


def _counted(rank, size, options):
    arguments = QUIET | {"devices": size, "accelerator": "cpu", "accumulate_grad_batches": 2}
    trainer = sg.Trainer(**(arguments | {"strategy": {"name": "parallel", **options}}))
    module = Net()
    trainer.fit(module, share(trainer, joined_batches(6, 24)))
    return trainer.run.strategy.layout(trainer.run.peers_world, module)


@pytest.mark.slow
def test_what_replicas_send_is_counted_once_a_step():
    found = run_in_processes(_counted, 2, {"replicate": 2})

    gradients = sum(parameter.nbytes for parameter in Net().parameters())
    for layout in found:
        assert layout.axes == {"data": 2}
        assert [each.num_bytes for each in layout.ranks] == [gradients] * 2
        (messages,) = layout.messages
        assert messages.counted
        assert gradients <= messages.num_bytes < 1.1 * gradients  # an all-reduce sends its size over two ranks


@pytest.mark.slow
def test_shards_are_held_by_the_ranks_that_the_layout_names():
    layout = run_in_processes(_counted, 4, {"replicate": 2, "shard": 2})[0]

    whole = sum(parameter.nbytes for parameter in Net().parameters())
    assert layout.axes == {"data": 2, "shard": 2}
    assert layout.ranks[0].num_bytes + layout.ranks[1].num_bytes == whole
    assert layout.ranks[1].slices == ["shard: part 2 of 2 of all layers"]
    assert {"data", "shard"} <= {each.axis for each in layout.messages}


SCRIPT = """
import stratagem as sg
from stratagem_testing.reference import Net, data
from stratagem_testing.training import loader

trainer = sg.Trainer(strategy={options}, devices=4, accelerator="cpu", max_epochs=1)
trainer.fit(Net(), loader(data(64), 4))
"""


def explained(tmp_path, options, *arguments):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(options={"name": "parallel", **options}))
    command = [sys.executable, "-m", "stratagem", "explain", *arguments, str(path)]
    return scripts.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.sweep(guard="tests/plugins/test_mesh_layout.py::test_explain_as_json_has_the_mesh")
@pytest.mark.slow
def test_explain_prints_the_mesh_before_a_process_starts(tmp_path):
    text = explained(tmp_path, {"shard": 2})

    assert "mesh: data 2 x shard 2, 4 ranks" in text
    assert "rank 3 (data 1, shard 1): all layers" in text
    assert "data (2 ranks): gradients, averaged over replicas: 3.2 KiB (computed)" in text


@pytest.mark.slow
def test_explain_as_json_has_the_mesh(tmp_path):
    found = json.loads(explained(tmp_path, {"shard": 2}, "--json"))

    assert found["layout"]["axes"] == {"data": 2, "shard": 2}
    assert (
        Mesh(axes=found["layout"]["axes"], rank=3).position("shard") == found["layout"]["ranks"][3]["position"]["shard"]
    )
