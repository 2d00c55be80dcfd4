"""A run over several loaders that resumes within an epoch trains bit for bit as one that was not stopped."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
MODES = {"max_size_cycle": None, "min_size": None, "max_size": None, "sequential": None, "weighted": [2.0, 5.0, 1.0]}
RESUMES = 6


class Augmented(Dataset):
    """Random numbers of all kinds change a sample each time; its last column tells which one it is."""

    def __init__(self, size, first):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = 0.1 * torch.randn(16) + random.random()
        x[-1] = self.first + index
        return x


class Stream(IterableDataset):
    def __init__(self, size, first):
        self.inner = Augmented(size, first)

    def __iter__(self):
        return (self.inner[index] for index in torch.randperm(self.inner.size).tolist())


def generator():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "main process": lambda: {
        "long": DataLoader(Augmented(72, 0), 4, shuffle=True),
        "generator": DataLoader(Augmented(32, 100), 4, shuffle=True, generator=generator()),
        "stateful": StatefulDataLoader(Augmented(40, 200), 4, shuffle=True),
    },
    "workers": lambda: {
        "long": DataLoader(Augmented(72, 0), 4, shuffle=True, num_workers=1),
        "generator": DataLoader(Augmented(32, 100), 4, shuffle=True, generator=generator(), num_workers=1),
        "main process": DataLoader(Augmented(40, 200), 4, shuffle=True),
    },
    "streams": lambda: [
        DataLoader(Stream(72, 0), 4),
        DataLoader(Augmented(32, 100), 4, shuffle=True),
        StatefulDataLoader(Augmented(40, 200), 4, shuffle=True),
    ],
}


class Counted(Augmented):
    """Counts how many samples were read."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("kind", "reads"), [(StatefulDataLoader, 36), (DataLoader, 72)])
@pytest.mark.parametrize("short", [True, False], ids=["several", "one"])
def test_a_stateful_loader_reads_nothing_again(tmp_path, kind, reads, short):
    long, data = Counted(72, 0), Counted(24, 100)
    loaders = [kind(long, 4, shuffle=True), *([kind(data, 4, shuffle=True)] if short else [])]
    sg.Trainer(max_steps=9, **QUIET).fit(model := Joint(), loaders)
    model.trainer.save_checkpoint(tmp_path / "a.ckpt")
    long.reads = data.reads = 0
    sg.Trainer(max_epochs=1, **QUIET).fit(Joint(), loaders, ckpt_path=tmp_path / "a.ckpt")

    assert long.reads == reads
    if short:  # in its second pass it is at batch 3; 9 more follow, and the first pass is not read again
        assert data.reads == 36 + (0 if kind is StatefulDataLoader else 12)


class Joint(Net):
    """Remembers which samples it has trained on; dropout draws between the batches."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        parts = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
        self.seen.append([None if part is None else part[:, -1].tolist() for part in parts])
        x = torch.cat([part for part in parts if part is not None])
        return self.net(torch.nn.functional.dropout(x / 100, 0.2)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SaveWithin(sg.Callback):
    """Saves after RESUMES batches that lie far from each other, one of them the last one of an epoch."""

    def __init__(self, folder, epochs):
        self.folder, self.epochs, self.saved = folder, epochs, []

    @sg.hookimpl
    def on_train_batch_end(self, trainer, batch_idx):
        size = 7 if math.isinf(trainer.num_training_batches) else int(trainer.num_training_batches)
        batches = [(epoch, number) for epoch in range(self.epochs) for number in range(size - 1)]
        points = {batches[round(n * (len(batches) - 1) / (RESUMES - 2))] for n in range(RESUMES - 1)}
        points.add((0, size - 1))
        if (trainer.current_epoch, batch_idx) in points:
            self.saved.append(f"{self.folder}/{len(self.saved)}.ckpt")
            trainer.save_checkpoint(self.saved[-1])


def differences(rank, world_size, folder, kind, mode, options, epochs=2):
    """Return how many resumed runs were tried, and those that were not the uninterrupted one."""

    def fit(ckpt_path, callbacks):
        sg.seed_everything(3 if ckpt_path is None else 4)
        model = Joint()
        loaders = sg.CombinedLoader(LOADERS[kind](), mode, MODES[mode])
        trainer = sg.Trainer(**QUIET | {"devices": world_size, "max_epochs": epochs, "callbacks": callbacks} | options)
        trainer.fit(model, loaders, ckpt_path=ckpt_path)
        with trainer.run.gathered_state():
            return model.seen, {k: v.clone() for k, v in trainer.run.ask("model_state", module=model).items()}

    saver = SaveWithin(folder, epochs)
    seen, weights = fit(None, [saver])
    assert len({str(batch) for batch in seen}) > 0.9 * len(seen)  # passes and epochs have orders of their own
    different = []
    for path in saver.saved:
        seen_again, weights_again = fit(path, [])
        same = all(torch.equal(weights[name], weights_again[name]) for name in weights)
        if not (same and 0 < len(seen_again) <= len(seen) and seen[-len(seen_again) :] == seen_again):
            different.append((path, seen, seen_again))
    return len(saver.saved), different


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_in_every_mode(tmp_path, mode):
    assert differences(0, 1, tmp_path, "main process", mode, {}) == (RESUMES, [])


@pytest.mark.every_push("max_size_cycle")
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_with_streams_of_unknown_length(tmp_path, mode):
    assert differences(0, 1, tmp_path, "streams", mode, {}) == (RESUMES, [])


@pytest.mark.every_push("weighted")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["max_size_cycle", "weighted"])
def test_within_an_accumulation_window(tmp_path, mode):
    assert differences(0, 1, tmp_path, "main process", mode, {"accumulate_grad_batches": 4}) == (RESUMES, [])


@pytest.mark.slow
def test_with_workers(tmp_path):
    assert differences(0, 1, tmp_path, "workers", "max_size_cycle", {}) == (RESUMES, [])


@pytest.mark.every_push("weighted", "max_size_cycle")
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_on_two_ranks(tmp_path, mode):
    options = {"strategy": "ddp"}
    found = run_in_processes(differences, 2, str(tmp_path), "main process", mode, options, limit_s=240)

    assert found == [(RESUMES, [])] * 2
