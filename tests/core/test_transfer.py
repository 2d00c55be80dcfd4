"""Batches are copied on a stream of their own, which the current one waits for, and never before their turn.

There is no GPU: streams write down what happens to them, and tensors go to the meta device.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch
from attrs import define
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.accelerators import CPUAccelerator
from stratagem_copy_stream import CopyStream
from stratagem_testing.reference import Net, joined_batches

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


class Streams:
    """Pretend streams of one device, and what they are told, in order."""

    def __init__(self, monkeypatch):
        self.log, self.current, self.recorded, self.batches = [], "compute", [], 0
        for name, replacement in {
            "Stream": lambda device: Stream(self, "copy"), "stream": self.enter, "Event": lambda blocking: Event(self),
            "current_stream": lambda device=None: Stream(self, self.current),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, replacement)
        to = torch.Tensor.to

        def copy(tensor, *arguments, **options):
            if torch.device("meta") in arguments:
                self.log.append(f"copy on {self.current}{'' if options.get('non_blocking') else ', waiting'}")
            return to(tensor, *arguments, **options)

        monkeypatch.setattr(torch.Tensor, "to", copy)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.record(tensor, stream))

    def record(self, tensor, stream):
        self.recorded.append(tensor)
        self.log.append(f"record on {stream.name}")

    @contextmanager
    def enter(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


@define
class Stream:
    streams: Streams
    name: str

    def wait_stream(self, other):
        self.streams.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


@define
class Event:
    streams: Streams
    recorded: int | None = None

    def record(self, stream):
        self.recorded = self.streams.batches = self.streams.batches + 1

    def synchronize(self):
        if self.recorded is not None:
            self.streams.log.append(f"the process waits for batch {self.recorded}")


META = torch.device("meta")


def test_a_copy_is_waited_for_and_its_memory_recorded(streams):
    batch = {"x": torch.ones(2), "y": [torch.ones(1), "text"], "n": 3}
    moved = CopyStream(META)(batch)

    assert streams.log == ["copy on copy"] * 2 + ["compute waits for copy"] + ["record on compute"] * 2
    assert {id(tensor) for tensor in streams.recorded} == {id(moved["x"]), id(moved["y"][0])}
    assert moved["x"].device.type == "meta"
    assert (moved["y"][1], moved["n"], streams.current) == ("text", 3, "compute")


def test_all_tensors_of_a_packed_sequence_are_recorded(streams):
    (moved,) = CopyStream(META)([pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)])

    assert {id(tensor) for tensor in streams.recorded} == {
        id(moved.data), id(moved.sorted_indices), id(moved.unsorted_indices)
    }  # fmt: skip
    assert "copy on compute" not in streams.log


class Graph:
    """An object that moves itself: its tensors are not known."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Graph(self.x.to(device))


def test_what_cannot_be_recorded_is_copied_on_the_current_stream(streams):
    batch = [Graph(torch.ones(1)), torch.ones(1).to_sparse(), torch.ones(1), torch.ones(1, device="meta")]
    CopyStream(META)(batch)

    assert streams.log == [
        "copy on compute, waiting", "copy on compute", "copy on copy", "compute waits for copy", "record on compute"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "pinned", "told"), [(1 << 16, False, True), (1 << 16, True, False), (4, False, False)]
)
def test_pageable_memory_is_told_once(streams, monkeypatch, size, pinned, told):
    asked = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: asked.append(1) or pinned)
    copy = CopyStream(META, hints=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            copy([torch.ones(size)])

    assert len(asked) == (size > 4)
    assert [("pin_memory=True" in str(each.message)) for each in caught] == [True] * told


# --- In a run ----------------------------------------------------------------------------------------------------


class Reads(TensorDataset):
    """Tells of each sample that is read."""

    def __init__(self, log, *tensors):
        super().__init__(*tensors)
        self.log = log

    def __getitem__(self, index):
        self.log.append(f"read {index}")
        return super().__getitem__(index)


class Steps(Net):
    def __init__(self, log):
        super().__init__()
        self.log_ = log

    def training_step(self, batch, batch_idx):
        self.log_.append(f"step {batch_idx}")
        return super().training_step(batch, batch_idx)


class Transfers(Steps):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.log_.append("before")
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.log_.append("after")
        return batch


class Moves(Transfers):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.log_.append("own")
        return batch


class Standing(sg.Callback):
    """Puts a copy that tells in the place of the one that a GPU would have."""

    def __init__(self, log):
        self.log = log

    @sg.hookimpl
    def on_train_start(self, run):
        def copy(batch):
            self.log.append("copy")
            return batch

        run.copy_stream = copy


@pytest.mark.parametrize(
    ("module", "between"),
    [(Steps, ["copy"]), (Transfers, ["before", "copy", "after"]), (Moves, ["before", "own", "after"])],
)
def test_a_batch_is_copied_when_it_is_its_turn_and_between_the_users_methods(module, between):
    log, (batch,) = [], joined_batches(1, 4)
    trainer = sg.Trainer(max_epochs=1, accelerator="cpu", callbacks=Standing(log), **QUIET)
    trainer.fit(module(log), DataLoader(Reads(log, *batch), 1))

    assert log == [entry for i in range(4) for entry in (f"read {i}", *between, f"step {i}")]


def test_a_run_on_the_cpu_has_no_copy_stream():
    with sg.Run(accelerator=CPUAccelerator()) as run:
        assert run.copy_stream is None
