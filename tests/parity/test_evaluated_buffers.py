"""Each stage measures the model that is saved, though ranks have statistics of their own batches after a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem_callbacks.averaging import EMA
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, loss_of, train_module_plainly
from stratagem_testing.training import share

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
BATCHES, HELD_OUT = joined_batches(3, 16), joined_batches(2, 16, seed=8)
STAGES = ("validate", "test", "predict")
STRATEGIES = {
    "ddp": "ddp", "ddp_sharded": "ddp_sharded", "fsdp": "fsdp", "shard": {"name": "parallel", "shard": 2},
    "replicate": {"name": "parallel", "replicate": 2},
    "local_sgd": [{"name": "local_sgd", "team_size": 2}, "ddp_sharded"],
    "deepspeed_stage_1": "deepspeed_stage_1", "deepspeed_stage_2": "deepspeed_stage_2",
    "deepspeed_stage_3": "deepspeed_stage_3",
}  # fmt: skip


class Normalized(Net):
    """Has running statistics, a count of batches, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(self.net[0].in_features), *self.net)
        self.register_buffer("unsaved", torch.eye(2, dtype=torch.bool), persistent=False)


def _statistics(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _measured(rank, world_size, strategy, folder, averages=False):
    """Return the error that each stage measured after training, and the buffers around each; save the models."""
    errors, around = {}, []
    for stage in STAGES:
        callbacks = EMA(decay=0.5, use_buffers=True) if averages else None
        trainer = sg.Trainer(max_epochs=2, strategy=strategy, devices=world_size, callbacks=callbacks, **QUIET)
        module, held_out = Normalized(), share(trainer, HELD_OUT)
        trainer.fit(module, share(trainer, BATCHES), held_out if stage == "validate" else None)
        before = _statistics(module)
        if stage == "validate":
            errors[stage] = trainer.callback_metrics["val_loss"].item()
        elif stage == "test":
            errors[stage] = trainer.test(module, held_out)[0]["test_loss"]
        else:
            outputs = torch.cat(trainer.predict(module, held_out))
            errors[stage] = loss_of(outputs, torch.cat([y for _, y in held_out])).item()
        around.append((before, _statistics(module)))
        trainer.save_checkpoint(folder / f"{stage}.ckpt", weights_only=True)
        trainer.close()
    return errors, around


def _error_of_saved(path):
    module = Normalized()
    module.load_state_dict(torch.load(path)["state_dict"])
    x, y = (torch.cat(parts) for parts in zip(*HELD_OUT, strict=True))
    with torch.no_grad():
        return loss_of(module.eval().net(x), y).item()


def _check(results, folder):
    for stage in STAGES:
        errors = [errors[stage] for errors, _ in results]
        found = errors if stage != "predict" else [sum(errors) / len(errors)]  # a rank predicts its own part
        assert found == pytest.approx([_error_of_saved(folder / f"{stage}.ckpt")] * len(found), rel=1e-5), stage


@pytest.mark.when_changed("plugins/outer/", cases=("local_sgd",))
@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    cases=(
        "shard",
        "replicate",
    ),
)
@pytest.mark.when_changed(
    "plugins/deepspeed/",
    cases=(
        "deepspeed_stage_1",
        "deepspeed_stage_2",
        "deepspeed_stage_3",
    ),
)
@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_stage_measures_the_saved_model(name, tmp_path, deepspeed_preloaded):
    assert min(train_module_plainly(Normalized(), BATCHES)[1]) > 1

    results = run_in_processes(_measured, 4 if name == "local_sgd" else 2, STRATEGIES[name], tmp_path)

    _check(results, tmp_path)
    for before, after in results[0][1]:
        assert all(torch.equal(before[name], after[name]) for name in before)
    own, other = (around[STAGES.index("test")][0]["net.0.running_mean"] for _, around in results[:2])
    assert not torch.equal(own, other)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded", "fsdp"])
def test_averages_of_buffers_are_those_of_rank_0(strategy, tmp_path):
    _check(run_in_processes(_measured, 2, strategy, tmp_path, True), tmp_path)
