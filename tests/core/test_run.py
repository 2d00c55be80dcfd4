"""Run: a loop of one's own gets the same plugins as the Trainer's."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import CheckpointError, ConfigError, LaunchError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import data, joined_batches, loss_of, net, part, relative_difference, train_plainly


def train(run, batches, accumulate=1):
    model = net()
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9))
    for index, batch in enumerate(run.dataloader(batches)):
        last = (index + 1) % accumulate == 0
        with run.no_sync() if not last else torch.enable_grad():
            loss = loss_of(model(batch[0]), batch[1])
            run.backward(loss / accumulate)
        if last:
            run.clip_gradients(optimizer, max_norm=1.0)
            run.optimizer_step(optimizer)
            optimizer.zero_grad()
    return model, optimizer


def weights(model):
    return {f"net.{name}": tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_loop_of_ones_own_equals_plain_pytorch():
    batches = joined_batches(8, 16)
    run = sg.Run(strategy="single_device", accelerator="cpu")
    model, _ = run.launch(lambda run: train(run, batches))

    assert relative_difference(weights(model), train_plainly(batches, max_norm=1.0)[0]) < 1e-7


def _own_loop(rank, world_size, batches, accumulate):
    run = sg.Run(strategy="ddp", devices=world_size, accelerator="cpu")
    with run:
        model, _ = train(run, part(batches, rank, world_size), accumulate)
        return weights(model)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_equal_one(accumulate):
    batches = joined_batches(8, 16)
    first, second = run_in_processes(_own_loop, 2, batches, accumulate)

    assert relative_difference(first, train_plainly(batches, accumulate, max_norm=1.0)[0]) < 1e-6
    assert all(torch.equal(first[name], second[name]) for name in first)


def _begun_earlier(rank, world_size, batches):
    with sg.Run(strategy="fsdp", devices=world_size, accelerator="cpu") as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9)
        loss_of(model(batches[0][0]), batches[0][1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        model, optimizer = run.setup(model, optimizer)
        for batch in run.dataloader(part(batches[1:], rank, world_size)):
            run.backward(loss_of(model(batch[0]), batch[1]))
            run.optimizer_step(optimizer)
            optimizer.zero_grad()
        return {f"net.{name}": tensor.full_tensor() for name, tensor in model.state_dict().items()}


def test_an_optimizer_keeps_the_state_that_it_had_before_setup():
    batches = joined_batches(4, 16)
    weights, _ = run_in_processes(_begun_earlier, 2, batches)

    assert relative_difference(weights, train_plainly(batches)[0]) < 1e-6


def test_precision_applies_to_the_call_alone():
    with sg.Run(precision="bf16-mixed", accelerator="cpu") as run:
        model = run.setup(net())
        assert model(data()[0]).dtype == torch.bfloat16
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert not model.training or isinstance(model.module, torch.nn.Module)


def test_save_and_load(tmp_path):
    batches = joined_batches(4, 16)
    with sg.Run(strategy="single_device", accelerator="cpu") as run:
        model, optimizer = train(run, batches)
        run.save(tmp_path / "a.ckpt", model=model, optimizer=optimizer, epoch=3)
        expected = weights(model)

    fresh = net(seed=9)
    with sg.Run(strategy="single_device", accelerator="cpu") as run:
        model, optimizer = run.setup(fresh, torch.optim.SGD(fresh.parameters(), lr=1.0, momentum=0.9))
        values = run.load(tmp_path / "a.ckpt", model=model, optimizer=optimizer)

    assert values == {"epoch": 3}
    assert relative_difference(weights(fresh), expected) == 0
    assert optimizer.param_groups[0]["lr"] == 5e-3
    with pytest.raises(CheckpointError, match="holds 1 optimizer states; expected 2"):
        run.load(tmp_path / "a.ckpt", model=fresh, optimizer=[optimizer, optimizer])


def test_save_and_load_keep_the_loss_scale(tmp_path):
    scaled = {"name": "16-mixed", "init_scale": 64.0}
    with sg.Run(precision=scaled, accelerator="cpu") as run:
        model, optimizer = run.setup(module := net(), torch.optim.SGD(module.parameters(), lr=1e-3))
        run.backward(model(torch.ones(2, 16)).sum() * float("inf"))
        assert not run.optimizer_step(optimizer)
        run.save(tmp_path / "a.ckpt", model=model, optimizer=optimizer)

    with sg.Run(precision=scaled, accelerator="cpu") as run:
        model, optimizer = run.setup(module := net(), torch.optim.SGD(module.parameters(), lr=1e-3))
        run.load(tmp_path / "a.ckpt", model=model, optimizer=optimizer)
        assert run.stack.precision.plugin.scaler.get_scale() == 32.0


def test_loaders_are_shared_out():
    with sg.Run(accelerator="cpu") as run:
        loader = run.dataloader(DataLoader(TensorDataset(*data(8)), 4))
        assert len(loader) == 2
        assert [len(batch[0]) for batch in loader] == [4, 4]


def test_one_limit_for_clipping():
    with (
        sg.Run(accelerator="cpu") as run,
        pytest.raises(ConfigError, match="max_norm=None and max_value=None; expected one limit"),
    ):
        run.clip_gradients(torch.optim.SGD(net().parameters(), lr=1.0))


def test_complex_gradients_are_clipped_by_norm_alone():
    phase = torch.nn.Parameter(torch.tensor([3 + 4j]))
    phase.grad = torch.tensor([6 + 8j])
    run, optimizer = sg.Run(accelerator="cpu"), torch.optim.SGD([phase], lr=1.0)

    with pytest.raises(ConfigError, match="steps complex parameters.*by value.*clip by norm"):
        run.clip_gradients(optimizer, max_value=0.5)

    assert run.clip_gradients(optimizer, max_norm=1.0) == 10


def test_unknown_arguments_are_refused():
    with pytest.raises(
        ConfigError, match="Run has no argument 'strateg'; expected one of its arguments; did you mean 'strategy'"
    ):
        sg.Run(strateg="ddp")


@pytest.mark.slow
def test_a_run_starts_again_after_it_was_closed():
    run = sg.Run(strategy="ddp", accelerator="cpu")
    for _ in range(2):
        with run:
            model = net()
            run.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
            assert torch.distributed.is_initialized()
        assert not torch.distributed.is_initialized()


def test_processes_that_a_strategy_would_train_alone_are_refused(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
                        "GROUP_RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    run = sg.Run(strategy="single_device", accelerator="cpu")

    with pytest.raises(ConfigError, match="has 2 processes and strategy 'single_device' trains in one"):
        run.connect()
    assert sg.Run(accelerator="cpu").stack.strategies[0].name == "ddp"


def _joins_groups_of_the_user(rank, world_size):
    sums = []
    for number in range(2):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"mine/{number}", _store()), rank=rank, world_size=2)
        run = sg.Run(strategy="ddp", devices=2, accelerator="cpu")
        run.connect()
        sums.append(float(run.collectives.all_reduce(torch.tensor(1.0 + rank), "sum")))
        run.close()
        dist.destroy_process_group()
    return sums


def _store():
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def test_a_second_group_of_the_user_is_joined_as_the_first():
    assert run_in_processes(_joins_groups_of_the_user, 2, limit_s=90) == [[3.0, 3.0], [3.0, 3.0]]


def test_a_run_that_would_need_processes_and_starts_none_is_refused():
    with (
        pytest.raises(
            LaunchError, match=r"this process is one of 2, and nothing says where they meet; .*run.launch\(main\)"
        ),
        sg.Run(strategy="ddp", devices=2, accelerator="cpu"),
    ):
        pass
