"""Every strategy at every world size reads what every other wrote: bit for bit, and trains on as if nothing had been.

A layout is a strategy at a number of processes. Each layout writes once, in each format; each reads what the others
wrote, all in one start of its processes.
"""

from __future__ import annotations

import fcntl
import functools
import itertools

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Scheduled, joined_batches, loss_of, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of
from stratagem_trainer.checkpoint_files import read_any

pytestmark = pytest.mark.usefixtures("deepspeed_preloaded")

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
UNITS = {"auto_wrap_policy": {nn.Linear}}
#: The first layer's rows and the second layer's columns are cut; the third is whole on every rank.
CUT = {"net.0": "colwise", "net.2": "rowwise"}
PARALLEL = {
    "shard": lambda size: {"name": "parallel", "shard": size, **UNITS},
    "tensor": lambda size: {"name": "parallel", "tensor": size, "plan": CUT},
    "tensor x shard": lambda size: (
        {"name": "parallel", "tensor": 2, "plan": CUT} | ({"shard": size // 2, **UNITS} if size > 2 else {})
    ),
    "pipeline": lambda size: {"name": "parallel", "pipeline": size, "balance": {2: [3, 2], 4: [1, 1, 1, 2]}[size]},
    "pipeline x replicate": lambda size: {"name": "parallel", "pipeline": 2, "balance": [3, 2]},
    "3-D": lambda size: {
        "name": "parallel",
        "pipeline": 2,
        "tensor": 2,
        "shard": 2,
        "plan": CUT,
        "balance": [3, 2],
        **UNITS,
    },
}
STRATEGIES = {
    "single_device": lambda size: "single_device",
    "ddp": lambda size: "ddp",
    "ddp_sharded": lambda size: "ddp_sharded",
    "FULL_SHARD": lambda size: {"name": "fsdp", **UNITS},
    "SHARD_GRAD_OP": lambda size: {"name": "fsdp", "sharding_strategy": "SHARD_GRAD_OP", **UNITS},
    "HYBRID_SHARD": lambda size: {
        "name": "fsdp", "sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, size // 2) if size % 2 == 0 else (size, 1),
        **UNITS,
    },
    "NO_SHARD": lambda size: {"name": "fsdp", "sharding_strategy": "NO_SHARD"},
    "ZeRO-1": lambda size: "deepspeed_stage_1",
    "ZeRO-2": lambda size: "deepspeed_stage_2",
    "ZeRO-3": lambda size: "deepspeed_stage_3",
    **PARALLEL,
}  # fmt: skip
#: Which strategies read each other, and at which sizes; together they are all that there are.
CIRCLES = (
    (("single_device", "ddp", "ddp_sharded", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"), (1, 2, 3, 4)),
    (("ddp", "FULL_SHARD", "ZeRO-1", "ZeRO-2", "ZeRO-3"), (1, 2, 4)),
    (("single_device", "ddp", "FULL_SHARD", "ZeRO-3", *PARALLEL), (2, 4)),
)
#: The number of processes of strategies that have only one.
FIXED = {"single_device": 1, "3-D": 8}


def formats(name):
    """Return the formats that a layout writes."""
    return ("sharded", "full", "safetensors", "dcp") if name in PARALLEL else ("sharded", "full")


def pairs(names, sizes):
    """Return layouts to write and to read, so that all pairs of strategies and all pairs of sizes occur."""
    count = len(sizes)
    for (i, writer), (j, reader) in itertools.product(enumerate(names), enumerate(names)):
        chosen = sizes[(i + j) % count], sizes[(i + 2 * j + i // count) % count]
        layouts = zip((writer, reader), chosen, strict=True)
        yield tuple((name, FIXED.get(name, size)) for name, size in layouts)


class Adam(Scheduled):
    """Its optimizer keeps three tensors for each parameter, one of them without dimensions; a group of its own."""

    def configure_optimizers(self):
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in self.named_parameters() if not name.endswith("bias")]
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 2e-3}], lr=1e-3, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _write(rank, world_size, strategy, batches, folder, checkpoints):
    for checkpoint in checkpoints:
        trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, checkpoint=checkpoint, **QUIET)
        trainer.fit(Adam(), share(trainer, batches))
        trainer.save_checkpoint(folder / f"{checkpoint}.ckpt")
        trainer.close()


class FirstLoss(sg.Callback):
    @sg.hookimpl
    def on_train_batch_end(self, outputs, batch_idx, run):
        if batch_idx == 0:
            self.loss = float(run.collectives.all_reduce(outputs.detach().clone(), "mean"))


def _read(rank, world_size, strategy, batches, files, trained_on, expected, expected_loss):
    """Read each of `files`, and train on from those in `trained_on`; return what differs."""
    wrong = []
    for file in files:
        look = FirstLoss()
        trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, callbacks=[look], **QUIET)
        trainer.fit(Adam(seed=3), share(trainer, batches), ckpt_path=file)  # its epoch is over: it only loads
        differences = list(_differences(trainer, read_any(file)))
        if file in trained_on:
            trainer.max_epochs = 2
            trainer.fit(trainer.module, share(trainer, batches))
            distance = relative_difference(weights_of(trainer), expected)
            if not distance < 1e-6:
                differences.append(f"weights after training on differ by {distance:.1e}")
            if not abs(look.loss - expected_loss) <= 1e-6 * abs(expected_loss):
                differences.append(f"the next loss is {look.loss} and not {expected_loss}")
        wrong += [f"{file.parent.name} {file.name}: {each}" for each in differences]
        trainer.close()  # a hundred of them would have a thousand threads on each rank
    return wrong


def _differences(trainer, written):
    for name, tensor in weights_of(trainer).items():
        if not torch.equal(tensor, written["state_dict"][name]):
            yield f"{name} differs"
    with trainer.run.gathered_state():
        state = trainer.run.ask("optimizer_state", optimizer=trainer.run.optimizers[0], module=trainer.module)
    saved = written["optimizers"][0]
    if list(state["state"]) != list(saved["state"]):
        yield f"the optimizer has a state for {list(state['state'])}"
    for name, entry in saved["state"].items():
        for key, value in entry.items():
            if not torch.equal(state["state"][name][key].cpu(), value):
                yield f"{key} of {name} differs"
    if state["param_groups"] != saved["param_groups"]:
        yield "the optimizer's groups differ"
    schedule = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    if schedule["_last_lr"] != written["lr_schedulers"][0]["_last_lr"]:
        yield "the schedule differs"
    if (trainer.current_epoch, trainer.global_step) != (1, 4):
        yield f"the position is {(trainer.current_epoch, trainer.global_step)}"


@functools.cache
def reference():
    batches = joined_batches(8, 24)
    model = Adam()
    weights, norms = train_module_plainly(model, batches)
    assert max(norms) > 1
    before = Adam()
    train_module_plainly(before, batches[:4])
    return weights, float(loss_of(before(batches[4][0]), batches[4][1]))


@pytest.fixture(scope="session")
def written(tmp_path_factory, worker_id):
    """Return what a layout wrote: a folder with a checkpoint in each format, which all workers share."""
    temporary = tmp_path_factory.getbasetemp()
    layouts = (temporary if worker_id == "master" else temporary.parent) / "layouts"
    layouts.mkdir(exist_ok=True)

    def write(layout):
        name, size = layout
        folder, batches = layouts / f"{name}-{size}", joined_batches(8, 24)[:4]
        with (layouts / f"{name}-{size}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                unfinished = tmp_path_factory.mktemp("layout")
                run_in_processes(_write, size, STRATEGIES[name](size), batches, unfinished, formats(name), limit_s=900)
                unfinished.rename(folder)
        return folder

    return write


def read_all(layout, writers, written):
    """Read all formats of each writer, and train on from one format of each."""
    folders = [written(writer) for writer in writers]
    files = [
        folder / f"{form}.ckpt" for folder, writer in zip(folders, writers, strict=True) for form in formats(writer[0])
    ]
    read(layout, files, [folder / f"{('full', 'sharded')[number % 2]}.ckpt" for number, folder in enumerate(folders)])


def read(layout, files, trained_on):
    name, size = layout
    weights, loss = reference()
    for wrong in run_in_processes(
        _read, size, STRATEGIES[name](size), joined_batches(8, 24)[4:], files, trained_on, weights, loss, limit_s=900
    ):
        assert wrong == []


@pytest.mark.parametrize(("names", "sizes"), CIRCLES)
def test_the_selection_has_all_pairs(names, sizes):
    cells = list(pairs(names, sizes))
    assert {(w[0], r[0]) for w, r in cells} == set(itertools.product(names, names))
    assert {(w[1], r[1]) for w, r in cells} >= set(itertools.product(sizes, sizes))


LAYOUTS = [
    (name, size)
    for name in STRATEGIES
    for size in sorted({FIXED.get(name, size) for names, sizes in CIRCLES for size in sizes if name in names})
]


def readers(circles):
    """Return which layouts each reads, by the reader."""
    moves = [pair for names, sizes in circles for pair in pairs(names, sizes)]
    return {reader: list(dict.fromkeys(w for w, r in moves if r == reader)) for _, reader in moves}


def cases(layouts):
    """Return parameters of a test, for any shard and worker; DeepSpeed's worker has what `make test` runs."""
    names = {"{}-{}".format(*layout): layout for layout in layouts}
    groups = {name: pytest.mark.xdist_group(f"moves {name}") for name in names.keys() - set(PUSHED)}
    return [pytest.param(layout, id=name, marks=groups.get(name, [])) for name, layout in names.items()]


READERS, READERS_OF_PARTS = readers(CIRCLES[:2]), readers(CIRCLES[2:])
PUSHED = ("single_device-1", "ddp_sharded-2", "FULL_SHARD-3", "ZeRO-3-2")


@pytest.mark.when_changed("plugins/checkpoints/", cases=("single_device-1",))
@pytest.mark.when_changed("plugins/deepspeed/", "plugins/checkpoints/", cases=("ZeRO-3-2",))
@pytest.mark.every_push(*PUSHED)
@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(READERS))
def test_it_moves_bit_for_bit(layout, written):
    read_all(layout, READERS[layout], written)


@pytest.mark.sweep(guard="tests/matrix/test_checkpoint_moves.py::test_it_moves_bit_for_bit")
@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(READERS_OF_PARTS))
def test_it_moves_bit_for_bit_where_models_are_cut(layout, written):
    read_all(layout, READERS_OF_PARTS[layout], written)


@pytest.mark.sweep(guard="tests/matrix/test_checkpoint_moves.py::test_it_moves_bit_for_bit")
@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_every_layout_reads_every_other(layout, written):
    """It reads the formats in turn, and trains on from some: the tests above read all formats of all pairs of strategies."""
    files = []
    for number, writer in enumerate(LAYOUTS, LAYOUTS.index(layout)):
        forms = formats(writer[0])
        files.append(written(writer) / f"{forms[number % len(forms)]}.ckpt")
    read(layout, files, files[::6])
