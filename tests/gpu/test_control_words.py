"""Beside NCCL decisions and objects travel over gloo; a save keeps no copies on the GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import stratagem as sg
from stratagem.runtime.state_io import read_checkpoint

pytestmark = pytest.mark.gpu

#: Cycles that keep a GPU busy for about a second.
CYCLES = 2_000_000_000
STRATEGIES = {
    "ddp": "ddp",
    "ddp_sharded": {"name": "ddp_sharded"},
    "fsdp": "fsdp",
    "fsdp_cpu_offload": "fsdp_cpu_offload",
}


def _run(**options):
    return sg.Run(**({"strategy": "ddp", "accelerator": "cuda", "devices": 1} | options))


def _busy():
    """Keep the GPU busy; return an event after that."""
    torch.cuda._sleep(CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


def test_decisions_and_objects_do_not_wait_for_the_gpu():
    with _run() as run:
        assert dist.get_backend() == "cpu:gloo,cuda:nccl"
        assert float(run.collectives.all_reduce(torch.ones(1, device=run.device), "sum")) == 1.0
        torch.cuda.synchronize()
        event = _busy()
        assert run.collectives.any(True)
        run.collectives.barrier()
        assert run.collectives.all_gather_object("here") == ["here"]
        assert not event.query(), "the GPU is still busy"
        (received,) = run.collectives.all_gather_object(torch.ones(2, device=run.device))
        assert received.device.type == "cpu"
        torch.cuda.synchronize()


def _trained(run):
    torch.manual_seed(1)
    module = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    model, optimizer = run.setup(module, torch.optim.Adam(module.parameters()))
    for _ in range(2):
        run.backward(model(torch.randn(4, 512, device=run.device)).square().mean())
        run.optimizer_step(optimizer)
        optimizer.zero_grad()
    return module, model, optimizer


@pytest.mark.parametrize("checkpoint", ["full", "sharded", "safetensors", "dcp"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_needs_no_more_than_a_tensor_on_the_gpu(strategy, checkpoint, tmp_path):
    with _run(strategy=STRATEGIES[strategy], checkpoint=checkpoint) as run:
        _, model, optimizer = _trained(run)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.save(tmp_path / "a", model=model, optimizer=optimizer)

        # A megabyte is a weight of a layer.
        assert torch.cuda.max_memory_allocated() - before < 4 << 20


@pytest.mark.parametrize("checkpoint", ["full", "sharded", "safetensors"])
def test_a_save_in_the_background_holds_what_was_there_when_it_began(checkpoint, tmp_path):
    with _run(checkpoint={"name": checkpoint, "async_save": True}) as run:
        module, model, optimizer = _trained(run)
        for number in range(2):  # the second one uses the memory of the first again
            expected = {name: (value + 1).cpu() for name, value in module.state_dict().items()}
            torch.cuda._sleep(CYCLES // 4)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1)
            run.save(tmp_path / str(number), model=model, optimizer=optimizer)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.5)
            run.saver.wait()
            saved = read_checkpoint(run, tmp_path / str(number))["state_dict"]

            assert all(torch.equal(saved[name].cpu(), value) for name, value in expected.items())


@pytest.mark.parametrize("background", [False, True])
def test_one_file_holds_tensors_of_the_cpu(background, tmp_path):
    with _run(checkpoint={"name": "full", "async_save": background}) as run:
        _, model, optimizer = _trained(run)
        run.save(tmp_path / "a.ckpt", model=model, optimizer=optimizer)
        run.saver.wait()
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)

    assert {value.device.type for value in state["state_dict"].values()} == {"cpu"}
    moments = [value for entry in state["optimizers"][0]["state"].values() for value in entry.values()]
    assert {value.device.type for value in moments if isinstance(value, torch.Tensor)} == {"cpu"}
