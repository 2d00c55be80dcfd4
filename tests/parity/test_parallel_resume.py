"""A model that is cut resumes within an epoch: bit for bit in its layout, and as exactly as rounding allows in others."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.api.seeding import seeded
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data, relative_difference
from stratagem_testing.training import outcome, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
CUT = {"net.0": "colwise", "net.2": "rowwise"}
LAYOUTS = {
    "single": (1, "single_device"),
    "tensor": (2, {"name": "parallel", "tensor": 2, "plan": CUT}),
    "pipeline": (2, {"name": "parallel", "pipeline": 2, "balance": [3, 4]}),
    "tensor x replicate": (4, {"name": "parallel", "tensor": 2, "plan": CUT}),
    "pipeline x replicate": (4, {"name": "parallel", "pipeline": 2, "balance": [3, 4]}),
    "pipeline x tensor": (4, {"name": "parallel", "pipeline": 2, "tensor": 2, "plan": CUT, "balance": [3, 4]}),
}


class Model(Net):
    """Adam has two tensors for each parameter, the norm has running statistics, dropout draws in every step."""

    def __init__(self, dropout=0.2, norm=True, seed=0):
        super().__init__()
        with seeded(seed):
            self.net = nn.Sequential(
                nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Dropout(dropout),
                nn.BatchNorm1d(32) if norm else nn.Identity(), nn.Tanh(), nn.Linear(32, 1),
            )  # fmt: skip

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def loader():
    return DataLoader(TensorDataset(*data(48)), 8, shuffle=True)


class SaveAt(sg.Callback):
    """Saves once, within the second epoch."""

    def __init__(self, path, batch):
        self.path, self.batch = path, batch

    @sg.hookimpl
    def on_train_batch_end(self, trainer, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, self.batch):
            trainer.save_checkpoint(self.path)


def trained(make, layout, seed, save_at=None, resume=None, **arguments):
    """Return the weights of a run, and the metrics of its last epoch."""
    size, strategy = LAYOUTS[layout]
    torch.manual_seed(seed)
    torch.randn(seed)
    callbacks = [] if save_at is None else [SaveAt(*save_at)]
    trainer = sg.Trainer(max_epochs=3, strategy=strategy, devices=size, callbacks=callbacks, **QUIET | arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(make(), loader(), ckpt_path=resume)
    weights = weights_of(trainer)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.close()
    return weights, metrics


def _both(rank, world_size, layouts, path, batch, arguments):
    """Return, for each of `layouts`, what an uninterrupted run and a resumed one end with."""
    found = []
    for layout in layouts:
        file = f"{path}.{layout.replace(' ', '_')}"
        whole = trained(Model, layout, 11, (file, batch), **arguments)
        resumed = trained(lambda: Model(seed=5), layout, 99, resume=file, **arguments)
        found.append((whole, resumed))
    return found


@pytest.mark.when_changed("plugins/parallel/", "plugins/parallel_unchanged/", cases=("2-in the background",))
@pytest.mark.every_push("2-within a window", "2-in the background")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "arguments"),
    [
        (2, {}),
        (1, {"accumulate_grad_batches": 3}),
        (2, {"checkpoint": {"name": "sharded", "async_save": True}}),
    ],
    ids=["within an epoch", "within a window", "in the background"],
)
@pytest.mark.parametrize(("size", "layouts"), [(2, ["tensor", "pipeline"]), (4, list(LAYOUTS)[3:])], ids=[2, 4])
def test_in_the_same_layout_bit_for_bit(tmp_path, batch, arguments, size, layouts):
    results = run_in_processes(_both, size, layouts, str(tmp_path / "a.ckpt"), batch, arguments, limit_s=600)
    for found in results:
        for layout, ((whole, metrics), (resumed, again)) in zip(layouts, found, strict=True):
            differing = [name for name in whole if not torch.equal(whole[name], resumed[name])]
            assert differing == [], layout
            assert metrics == again, layout


def _without_dropout():
    return Model(dropout=0.0, norm=False)


def _write(rank, world_size, layout, path, arguments):
    return trained(_without_dropout, layout, 11, (f"{path}.{layout}", 1), **arguments)


def _read(rank, world_size, layouts, path, writers, arguments):
    return {
        (writer, layout): trained(_without_dropout, layout, 99, resume=f"{path}.{writer}", **arguments)
        for layout in layouts
        for writer in writers
    }


@pytest.mark.sweep(guard="tests/parity/test_parallel_resume.py::test_in_the_same_layout_bit_for_bit")
@pytest.mark.slow
def test_in_another_layout_as_exactly_as_rounding_allows(tmp_path):
    """One process and all cut models that read the same batches, in the middle of a window of three."""
    path, arguments, writers = str(tmp_path / "a"), {"accumulate_grad_batches": 3}, ["single", "tensor", "pipeline"]
    written = {w: run_in_processes(_write, LAYOUTS[w][0], w, path, arguments)[0] for w in writers}
    reference, metrics = written["single"]
    for weights, others in written.values():
        assert relative_difference(weights, reference) < 1e-6
        assert others == pytest.approx(metrics, rel=1e-5)
    for size, layouts in ((1, ["single"]), (2, ["tensor", "pipeline"]), (4, ["pipeline x tensor"])):
        for rank in run_in_processes(_read, size, layouts, path, writers, arguments, limit_s=600):
            for which, (weights, others) in rank.items():
                assert relative_difference(weights, reference) < 1e-6, which
                assert others == pytest.approx(metrics, rel=1e-5), which


# --- Samples ---------------------------------------------------------------------------------------------------------


class Seeing(Model):
    """Writes down which samples the ranks with different ones have trained on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean() * 1e-6

    def on_train_batch_start(self, batch, batch_idx):
        self.seen += [int(number) for number in batch[0][:, 0]]


def _see(rank, world_size, layout, path, resume, max_epochs=1):
    strategy = LAYOUTS[layout][1] if layout in LAYOUTS else layout
    sg.seed_everything(2 if resume else 1)
    samples = TensorDataset(torch.arange(48.0)[:, None].expand(48, 16).contiguous())
    steps = -1 if resume or max_epochs > 1 else 4
    trainer = sg.Trainer(max_epochs=max_epochs, max_steps=steps, strategy=strategy, devices=world_size, **QUIET)
    module = Seeing()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(samples, 4, shuffle=True), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    mesh = trainer.run.mesh
    first = all(mesh.position(axis) == 0 for axis in ("pipeline", "context", "tensor"))
    return mesh.data_shard, module.seen, first


@pytest.mark.every_push("pipeline")
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_ranks_that_share_samples_share_them_in_every_epoch(tmp_path, layout):
    """Dropout draws on one of the stages only, and the order of each epoch comes from the same random numbers."""
    first, second = run_in_processes(_see, 2, layout, tmp_path / "a.ckpt", False, 3)
    assert first[1] == second[1]
    assert len(first[1]) == 3 * 48
    assert first[1][:48] != first[1][48:96]


@pytest.mark.every_push("('ddp', 2)-('pipeline x replicate', 4)")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("ddp", 2), ("tensor x replicate", 4)),
        (("tensor x replicate", 4), ("ddp", 2)),
        (("pipeline x replicate", 4), ("tensor x replicate", 4)),
        (("ddp", 2), ("pipeline x replicate", 4)),
        (("tensor x replicate", 4), ("ddp", 4)),
    ],
    ids=str,
)
def test_each_sample_of_the_epoch_is_used_once(tmp_path, before, after):
    path, used = tmp_path / "within.ckpt", []
    for (layout, size), resume in ((before, False), (after, True)):
        shards = {}
        for shard, seen, first in run_in_processes(_see, size, layout, path, resume):
            assert shards.setdefault(shard, seen) == seen
            used += seen if first else []
    assert sorted(used) == list(range(48))


# --- What does not fit -------------------------------------------------------------------------------------------


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.net[4] = nn.Linear(32, 2)


def _resume_another(rank, world_size, strategies, path):
    def act(strategy):
        trainer = sg.Trainer(max_epochs=2, strategy=strategy, devices=world_size, **QUIET)
        trainer.fit(Wider(), loader(), ckpt_path=path)

    return [outcome(lambda strategy=strategy: act(strategy)) for strategy in strategies]


@pytest.mark.slow
def test_another_models_checkpoint_is_refused_on_all_ranks(tmp_path):
    path = tmp_path / "a.ckpt"
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(path)
    strategies = [{"name": "parallel", "tensor": 2, "plan": CUT}, {"name": "parallel", "pipeline": 2}]
    results = run_in_processes(_resume_another, 2, strategies, path)
    for told in results:
        assert all("'net.4.weight' has shape (1, 32); expected (2, 32) as in this model" in each for each in told), told
    assert results[0] == results[1]
