"""AdamW with few bits of state: close to AdamW, exact in checkpoints of every format, in one process and in two."""

import copy

import pytest
import stratagem_torchao
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import CheckpointError, ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference
from stratagem_testing.training import QUIET, share, train, weights_of

NAMES = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
CPU = {"accelerator": "cpu"}


class Wide(Net):
    """Two layers with quantized state (at least 4096 elements), and small tensors without."""

    kind = "AdamW8bit"

    def __init__(self, kind=None, seed=0):
        super().__init__(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 1, bias=False)
            )
        self.kind = kind or self.kind

    def configure_optimizers(self):
        package = torch.optim if self.kind == "AdamW" else stratagem_torchao
        optimizer = getattr(package, self.kind)(self.parameters(), lr=2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Wide4(Wide):
    kind = "AdamW4bit"


class WideFp8(Wide):
    kind = "AdamWFp8"


class WidePlain(Wide):
    kind = "AdamW"


MODULES = {"AdamW8bit": Wide, "AdamW4bit": Wide4, "AdamWFp8": WideFp8}


def fit(make=Wide, *, num=8, epochs=1, resume=None, world_size=1, **arguments):
    trainer = sg.Trainer(**(QUIET | CPU | {"devices": world_size, "max_epochs": epochs} | arguments))
    module = make()
    trainer.fit(module, share(trainer, joined_batches(num, 32)), ckpt_path=resume)
    return trainer, module


def states_of(trainer):
    return trainer.optimizers[0].state_dict()["state"]


def equal(first, second):
    return first.keys() == second.keys() and all(
        entry.keys() == second[number].keys() and all(torch.equal(v, second[number][k]) for k, v in entry.items())
        for number, entry in first.items()
    )


# --- Training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_like_adamw_with_fewer_bytes(name):
    _, plain = fit(WidePlain, num=30)
    trainer, module = fit(MODULES[name], num=30)
    difference = relative_difference(module.state_dict(), plain.state_dict())
    entry = trainer.optimizers[0].state[module.net[2].weight]["exp_avg"]
    nbytes = sum(getattr(entry, part).nbytes for part in ("codes", "scale"))

    assert 1e-6 < difference < {"AdamW8bit": 0.02, "AdamW4bit": 0.1, "AdamWFp8": 0.05}[name]
    assert nbytes / (4 * module.net[2].weight.numel()) < (0.15 if name == "AdamW4bit" else 0.26)


def _train(rank, size, name, arguments):
    chosen = QUIET | CPU | {"devices": size, "strategy": "ddp" if size > 1 else "single_device"} | arguments
    return train(rank, size, MODULES[name], joined_batches(9, 32), chosen)["weights"]


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}])
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_as_one_does(name, arguments):
    alone = _train(0, 1, name, arguments)
    first, second = run_in_processes(_train, 2, name, arguments)

    assert relative_difference(first, second) == 0
    assert relative_difference(first, alone) < 1e-3  # a gradient that differs in its last bit may get another code


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", {"name": "fp8", "emulate": True}])
def test_under_other_precisions(precision):
    _, plain = fit(WidePlain)
    _, module = fit(precision=precision)

    assert relative_difference({n: t.float() for n, t in module.state_dict().items()}, plain.state_dict()) < 0.02


def test_a_schedule_sets_the_learning_rate():
    trainer, _ = fit(num=3)

    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(2e-3 * (0.2 + 0.8 * 3 / 4))


def test_a_learning_rate_may_be_set_to_a_number():
    layer = nn.Linear(64, 64)
    optimizer = stratagem_torchao.AdamW8bit(layer.parameters(), lr=1e-3)
    optimizer.param_groups[0]["lr"] = 0.0
    before = layer.weight.clone()
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()

    assert torch.equal(layer.weight, before)


# --- Checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", ["full", "sharded", "safetensors", "dcp"])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_resuming_is_exact_in_every_format(tmp_path, name, checkpoint):
    whole, module = fit(MODULES[name], epochs=2)
    first, _ = fit(MODULES[name], checkpoint=checkpoint)
    first.save_checkpoint(tmp_path / "half")
    second, resumed = fit(MODULES[name], epochs=2, resume=tmp_path / "half", checkpoint=checkpoint)

    assert equal(states_of(second), states_of(whole))
    assert relative_difference(resumed.state_dict(), module.state_dict()) == 0


def test_resuming_fp8_state_is_exact(tmp_path):
    whole, _ = fit(WideFp8, epochs=2)
    first, _ = fit(WideFp8)
    first.save_checkpoint(tmp_path / "half.ckpt")
    second, _ = fit(WideFp8, epochs=2, resume=tmp_path / "half.ckpt")

    for number, entry in states_of(whole).items():
        for key, value in entry.items():
            assert torch.equal(value.float(), states_of(second)[number][key].float())


def _loaded(rank, size, name, path, saved_again):
    trainer, _ = fit(MODULES[name], epochs=1, resume=path, world_size=size, strategy="ddp")
    trainer.save_checkpoint(saved_again)


@pytest.mark.parametrize("name", NAMES)
def test_state_moves_to_ddp_and_back(tmp_path, name):
    first, _ = fit(MODULES[name])
    first.save_checkpoint(tmp_path / "a.ckpt")
    run_in_processes(_loaded, 2, name, tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    saved = [torch.load(tmp_path / f"{each}.ckpt", weights_only=True)["optimizers"][0]["state"] for each in "ab"]

    for parameter, entry in saved[0].items():
        assert {key: value.dtype for key, value in entry.items()} == {
            key: value.dtype for key, value in saved[1][parameter].items()
        }
        for key, value in entry.items():
            assert torch.equal(value.float(), saved[1][parameter][key].float()), (parameter, key)
    assert {"exp_avg.codes", "exp_avg.scale"} < saved[0]["net.2.weight"].keys()


def test_the_state_of_adamw_is_quantized(tmp_path):
    first, _ = fit(WidePlain)
    first.save_checkpoint(tmp_path / "plain.ckpt")
    second, module = fit(epochs=2, resume=tmp_path / "plain.ckpt")
    _, expected = fit(WidePlain, epochs=2)

    assert "exp_avg.codes" in states_of(second)[2]
    assert relative_difference(module.state_dict(), expected.state_dict()) < 0.02


def test_the_state_of_other_bits_is_refused(tmp_path):
    first, _ = fit(Wide4)
    first.save_checkpoint(tmp_path / "four.ckpt")
    with pytest.raises(CheckpointError, match=r"exp_avg.codes has uint8 of shape \(2048,\); expected uint8 of shape"):
        fit(resume=tmp_path / "four.ckpt", epochs=2)


def test_loading_does_not_share_memory_with_the_checkpoint():
    trainer, module = fit()
    saved = copy.deepcopy(trainer.optimizers[0].state_dict())
    kept = copy.deepcopy(saved)
    other = stratagem_torchao.AdamW8bit(module.parameters(), lr=1e-3)
    other.load_state_dict(saved)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.step()

    assert all(
        torch.equal(value, kept["state"][number][key])
        for number, entry in saved["state"].items()
        for key, value in entry.items()
        if key != "step"
    )


# --- What it refuses -------------------------------------------------------------------------------------------------


def _under_fsdp(rank, size):
    with pytest.raises(ConfigError) as refused:
        fit(world_size=size, strategy="fsdp")
    return str(refused.value)


def test_under_fsdp_it_is_refused_on_all_ranks():
    words = run_in_processes(_under_fsdp, 2)

    expected = (
        "AdamW8bit got parameters that are sharded over processes; expected whole parameters: blocks of its state "
        'would cross the borders of shards; use strategy="ddp", or torch.optim.AdamW, whose state is sharded.'
    )
    assert words == [expected, expected]


def test_weights_move_to_a_new_model(tmp_path):
    trainer, _ = fit()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]

    assert relative_difference(state, weights_of(trainer)) == 0
    assert list(state) == list(Wide(seed=3).state_dict())
