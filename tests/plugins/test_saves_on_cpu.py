"""A save keeps no copies on the device, and a file holds tensors of the CPU.

There is no device here: what `cpu()` and `to("cpu")` return, or another rank sent as an object, stands for memory of the CPU, all other memory for that of
the device.
"""

from __future__ import annotations

import operator
import pickle

import pytest
import torch

import stratagem as sg
from stratagem.api import Collectives
from stratagem.checkpoints import FullCheckpoint, SafetensorsCheckpoint
from stratagem.runtime.state_io import read_checkpoint
from stratagem_checkpoints import cpu_copies
from stratagem_checkpoints.one_file import _loadable
from stratagem_checkpoints.shards.plan import Plan
from stratagem_testing import run_in_processes

STRATEGIES = {
    "ddp": "ddp",
    "ddp_sharded": "ddp_sharded",
    "local_sgd": {"name": "local_sgd", "period": 5},
    "fsdp": "fsdp",
    "fsdp, one file": {"name": "fsdp", "state_dict_type": "full"},
}


class _Recorder:
    """Gives what arrives on the CPU memory of its own, and remembers it."""

    def __init__(self):
        self.arrived = set()
        self._cpu, self._to, self._loads = torch.Tensor.cpu, torch.Tensor.to, pickle.loads

    def __enter__(self):
        def cpu(tensor, *_, **__):
            return self._note(self._to(tensor, "cpu", copy=True))

        def to(tensor, *arguments, **options):
            made = self._to(tensor, *arguments, **options)
            return self._note(made) if arguments[:1] == ("cpu",) and options.get("copy") else made

        def loads(text):
            value = self._loads(text)
            for _, tensor in _tensors(value):
                self._note(tensor)
            return value

        torch.Tensor.cpu, torch.Tensor.to, pickle.loads = cpu, to, loads
        return self

    def __exit__(self, *_):
        torch.Tensor.cpu, torch.Tensor.to, pickle.loads = self._cpu, self._to, self._loads

    def _note(self, tensor):
        self.arrived.add(_memory(tensor))
        return tensor


def _memory(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage().data_ptr()


def _tensors(value, path=""):
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(each, f"{path}.{key}")


def _on_the_device(rank, world_size, folder):
    """Return for each strategy which tensors of a save are on the device beside what training has there."""
    found = {}
    for name, strategy in STRATEGIES.items():
        run = sg.Run(strategy=strategy, devices=world_size, accelerator="cpu")

        def main(run, name=name):
            torch.manual_seed(rank)
            module = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 1))
            model, optimizer = run.setup(module, torch.optim.Adam(module.parameters()))
            for _ in range(2):
                run.backward(model(torch.randn(4, 9)).square().sum())
                run.optimizer_step(optimizer)
                optimizer.zero_grad()
            lives = {_memory(tensor) for tensor in (*module.parameters(), *module.buffers())}
            lives |= {_memory(tensor) for entry in optimizer.state.values() for _, tensor in _tensors(entry)}
            ask = run.ask

            def listen(hook, **arguments):
                if hook == "save_checkpoint":
                    kept = [getattr(each.plugin, "_own", None) or {} for each in run.stack.strategies]
                    beside = (arguments["state"], kept)
                    found[name] = [
                        path for path, tensor in _tensors(beside)
                        if not tensor.is_meta and _memory(tensor) not in lives | recorder.arrived
                    ]  # fmt: skip
                return ask(hook, **arguments)

            run.hooks.ask = listen
            with _Recorder() as recorder:
                run.save(f"{folder}/{name}.ckpt", model=model, optimizer=optimizer)
            del run.hooks.ask

        run.launch(main)
        run.close()
    return found


@pytest.mark.slow
def test_a_save_keeps_no_copies_on_the_device(tmp_path):
    for found in run_in_processes(_on_the_device, 2, str(tmp_path), limit_s=360):
        assert found == {name: [] for name in STRATEGIES}


class _OnADevice(torch.Tensor):
    @property
    def device(self):
        return torch.device("cuda", 3)

    def detach(self):
        return self

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_one_file_holds_tensors_of_the_cpu():
    state = {"state_dict": {"weight": _OnADevice(torch.ones(2))}}

    assert str(_loadable(state, operator.methodcaller("cpu"))["state_dict"]["weight"].device) == "cpu"


# --- In the background -------------------------------------------------------------------------------------------


@pytest.fixture
def queued(monkeypatch):
    """What is done on a machine that can pin memory: "pin", "copy" and "wait", in order."""
    done = []
    empty, empty_like, copy = torch.empty, torch.empty_like, torch.Tensor.copy_

    def pinned(make):
        def made(*arguments, pin_memory=False, **options):
            done.extend(["pin"] * pin_memory)
            return make(*arguments, **options)

        return made

    def copied(tensor, source, non_blocking=False):
        done.append("copy" if non_blocking else "a copy that waits")
        return copy(tensor, source)

    monkeypatch.setattr(cpu_copies, "is_pinnable", lambda tensor: True)
    monkeypatch.setattr("stratagem_checkpoints.shards.plan.is_pinnable", lambda tensor: True)
    monkeypatch.setattr(torch, "empty", pinned(empty))
    monkeypatch.setattr(torch, "empty_like", pinned(empty_like))
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    stream = type("Stream", (), {"synchronize": lambda self: done.append("wait")})()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: stream)
    return done


def _three():
    return {"state_dict": {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(4), "c": torch.arange(3)}}


@pytest.mark.parametrize("kind", [FullCheckpoint, SafetensorsCheckpoint])
def test_copies_for_a_save_in_the_background_are_queued_and_awaited_once(kind, queued, tmp_path):
    run = sg.Run(checkpoint=kind(async_save=True), accelerator="cpu")
    with run:
        for expected in (["pin", "copy"] * 3, ["copy"] * 3):  # the memory is kept
            state = _three()
            queued.clear()
            run.ask("save_checkpoint", state=state, path=tmp_path / "a")
            assert queued[: len(expected) + 1] == [*expected, "wait"]
            for tensor in state["state_dict"].values():
                tensor.zero_()
            run.saver.wait()

    saved = read_checkpoint(sg.Run(checkpoint=kind(), accelerator="cpu"), tmp_path / "a")["state_dict"]
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {
        name: tensor.tolist() for name, tensor in _three()["state_dict"].items()
    }


def test_pinned_memory_is_kept_for_the_next_save(queued):
    copies = cpu_copies.CPUCopies()
    first = [copies.take(tensor) for tensor in (torch.ones(2), torch.ones(3))]
    copies.wait()
    second = [copies.take(tensor) for tensor in (torch.zeros(2), torch.zeros(5))]
    copies.wait()

    assert second[0] is first[0]
    assert [copy.tolist() for copy in second] == [[0.0] * 2, [0.0] * 5]
    assert queued == ["pin", "copy", "pin", "copy", "wait", "copy", "pin", "copy", "wait"]


def test_a_rank_s_part_is_copied_into_pinned_memory_with_one_wait(queued):
    plan = Plan(_three(), 0, 1)
    plan.divide(Collectives())
    before = [bytes(part.tolist()) for _, part in plan.parts]
    queued.clear()
    memory = plan.copy([])

    assert queued == ["pin", "copy", "copy", "copy", "wait"]
    assert [bytes(part.tolist()) for _, part in plan.parts] == before
    again = plan.copy(memory)
    assert [block.data_ptr() for block in again] == [block.data_ptr() for block in memory]
    assert queued[5:] == ["copy", "copy", "copy", "wait"]


def test_blocks_of_memory_hold_what_a_rank_writes_wherever_they_end(monkeypatch):
    monkeypatch.setattr("stratagem_checkpoints.shards.plan.BLOCK", 10)
    plan = Plan(_three(), 0, 1)
    plan.divide(Collectives())
    before = _bytes_at(plan)
    sizes = [block.numel() for block in plan.copy([])]

    assert sizes == [10] * 6 + [4]
    assert _bytes_at(plan) == before
    plan.copy([torch.zeros(3, dtype=torch.uint8), torch.zeros(70, dtype=torch.uint8)])
    assert _bytes_at(plan) == before


def _bytes_at(plan):
    return {offset + at: byte for offset, part in plan.parts for at, byte in enumerate(part.tolist())}
