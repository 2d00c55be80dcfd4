"""Data sets that grow and samplers of other lengths: each epoch has the batches that there are."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

import stratagem as sg
from stratagem.errors import ConfigError

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu",
    "num_sanity_val_steps": 0,
}  # fmt: skip


class Growing(Dataset):
    """The numbers from 0 on."""

    def __init__(self, size=8):
        self.numbers = list(range(size))

    def grow(self):
        self.numbers += range(len(self.numbers), len(self.numbers) + 4)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return torch.tensor([float(self.numbers[index])])


class GrowingStream(Growing, IterableDataset):
    def __iter__(self):
        return (torch.tensor([float(number)]) for number in self.numbers)


class ByEpoch(Sampler):
    """Selects more samples in each epoch, which it is told."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8 + 4 * self.epoch

    def __iter__(self):
        return iter(range(len(self)))


class Model(sg.Module):
    """Notes the samples of each epoch, and has the data sets grow in `hook`."""

    def __init__(self, *sets, hook="on_train_epoch_end", folder=None):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Linear(1, 1)
        self.sets, self.seen, self.validated, self.told, self.folder = sets, {}, {}, [], folder
        if hook:
            setattr(self, hook, self.grow)

    def grow(self):
        for each in self.sets:
            each.grow()

    def training_step(self, batch):
        batch = batch["one"] if isinstance(batch, dict) else batch
        self.seen.setdefault(self.current_epoch, []).extend(batch.flatten().int().tolist())
        if not self.told or self.told[-1][0] != self.current_epoch:
            self.told.append((self.current_epoch, self.trainer.num_training_batches))
        if self.folder is not None:
            with open(self.folder / f"{self.trainer.global_rank}.{self.current_epoch}", "a") as file:
                file.write(" ".join(map(str, batch.flatten().int().tolist())) + " ")
        return self.net(batch / 100).square().mean()

    def validation_step(self, batch):
        self.validated.setdefault(self.current_epoch, []).extend(batch.flatten().int().tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


LOADERS = {
    "in order": lambda data: DataLoader(data, 2),
    "shuffled": lambda data: DataLoader(data, 2, shuffle=True),
    "batch sampler": lambda data: DataLoader(data, batch_sampler=BatchSampler(torch.utils.data.RandomSampler(data), 2, True)),
    "stream": lambda data: DataLoader(data, 2),
    "persistent": lambda data: DataLoader(data, 2, num_workers=1, persistent_workers=True),
    "distributed": lambda data: DataLoader(data, 2, sampler=DistributedSampler(data, 1, 0)),
    "several": lambda data: {"one": DataLoader(data, 2), "other": DataLoader(data, 2)},
}  # fmt: skip


def sizes(seen):
    return [len(set(numbers)) for _, numbers in sorted(seen.items())]


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start", "on_validation_end"])
@pytest.mark.parametrize("name", LOADERS)
def test_every_epoch_has_all_samples(name, hook, tmp_path):
    data = GrowingStream() if name == "stream" else Growing()
    loader = LOADERS[name](data)
    model = Model(data, hook=hook)
    trainer = sg.Trainer(max_epochs=3, default_root_dir=tmp_path, **QUIET)
    trainer.fit(model, loader, DataLoader(data, 2))

    first = 12 if hook == "on_train_epoch_start" else 8
    assert sizes(model.seen) == [first, first + 4, first + 8]
    assert model.told == [(epoch, first // 2 + 2 * epoch) for epoch in range(3)]
    assert sizes(model.validated) == [first, first + 4, first + 8]


def test_a_sampler_of_another_length_in_each_epoch(tmp_path):
    model = Model(hook=None)
    sg.Trainer(max_epochs=3, default_root_dir=tmp_path, **QUIET).fit(
        model, DataLoader(Growing(99), 2, sampler=ByEpoch())
    )

    assert sizes(model.seen) == [8, 12, 16]


def test_limits_are_shares_of_the_length_now(tmp_path):
    data = Growing()
    model = Model(data)
    trainer = sg.Trainer(
        max_epochs=3, limit_train_batches=0.5, limit_val_batches=3, val_check_interval=0.5, default_root_dir=tmp_path,
        **QUIET,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, 2), DataLoader(data, 2))

    assert sizes(model.seen) == [4, 6, 8]
    assert [len(numbers) for numbers in model.validated.values()] == [12, 18, 12]  # two, three and two times


def test_a_data_set_that_is_empty_now_is_refused(tmp_path):
    data = Growing()
    data.grow = data.numbers.clear
    with pytest.raises(ConfigError, match="the training loader has no batches"):
        sg.Trainer(max_epochs=3, default_root_dir=tmp_path, **QUIET).fit(Model(data), DataLoader(data, 2))


class Sized(sg.Callback):
    """Keeps the size of a data set that grows."""

    def __init__(self, data):
        self.data = data

    def state_dict(self):
        return {"numbers": self.data.numbers}

    def load_state_dict(self, state):
        self.data.numbers = list(state["numbers"])


def test_a_run_that_resumes_in_a_later_epoch_has_its_samples(tmp_path):
    def fit(**options):
        data = Growing()
        model = Model(data, hook="on_train_epoch_start")
        made = sg.Trainer(default_root_dir=tmp_path, callbacks=Sized(data), **QUIET, **{"max_epochs": 3} | options)
        return data, model, made

    data, whole, trainer = fit()
    trainer.fit(whole, DataLoader(data, 2))
    data, model, trainer = fit(max_steps=9)
    trainer.fit(model, DataLoader(data, 2))  # the second epoch has 8 batches
    trainer.save_checkpoint(tmp_path / "within.ckpt")
    data, rest, trainer = fit()
    trainer.fit(rest, DataLoader(data, 2), ckpt_path=tmp_path / "within.ckpt")

    assert model.seen[1] + rest.seen[1] == whole.seen[1]
    assert rest.seen[2] == whole.seen[2]
    assert torch.equal(rest.net.weight, whole.net.weight)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own sampler"])
def test_on_two_ranks(tmp_path, own):
    data = Growing()
    model = Model(data, folder=tmp_path)
    trainer = sg.Trainer(
        strategy="ddp", launcher="fork", devices=2, max_epochs=3, default_root_dir=tmp_path / "root", **QUIET
    )
    trainer.fit(model, DataLoader(data, 2, sampler=Shuffling(data)) if own else DataLoader(data, 2, shuffle=True))

    for epoch in range(3):
        ranks = [(tmp_path / f"{rank}.{epoch}").read_text().split() for rank in (0, 1)]
        assert sorted(map(int, ranks[0] + ranks[1])) == list(range(8 + 4 * epoch))
        assert len(ranks[0]) == len(ranks[1])


class Shuffling(Sampler):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return iter(torch.randperm(len(self.data)).tolist())


def test_two_ranks_whose_data_differ_use_what_both_have(tmp_path):
    class Uneven(Growing):
        def grow(self):
            super().grow()
            if torch.distributed.get_rank():
                super().grow()

    data = Uneven()
    model = Model(data, folder=tmp_path)
    trainer = sg.Trainer(
        strategy="ddp", launcher="fork", devices=2, max_epochs=2, default_root_dir=tmp_path / "root", **QUIET
    )
    trainer.fit(model, DataLoader(data, 2))

    assert [len((tmp_path / f"{rank}.1").read_text().split()) for rank in (0, 1)] == [6, 6]
