"""A rank whose loss reaches no parameter ends the run under every strategy that would count zeros for it."""

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigError


class Skips(sg.Module):
    """The last rank's fourth loss depends on `reached`: nothing, or another branch than the other ranks use."""

    def __init__(self, reached):
        super().__init__()
        self.net, self.other, self.reached = nn.Linear(2, 1), nn.Linear(2, 1), reached

    def training_step(self, batch, batch_idx):
        if batch_idx != 3 or self.trainer.global_rank + 1 < self.trainer.world_size:
            return self.net(batch).square().mean()
        return {"leaf": leaf, "graph": graph, "branch": lambda x: self.other(x).square().mean()}[self.reached](batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stages(Skips):
    """A sequence of layers, for stages."""

    def __init__(self, reached):
        super().__init__(reached)
        del self.other
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def training_step(self, batch, batch_idx):
        output = self.net(batch)
        skips = batch_idx == 3 and self.trainer.global_rank in (1, 3)  # the second replica
        return graph(output.detach()) if skips else output.square().mean()


def leaf(x):
    return (x.sum() * 0).requires_grad_()


def graph(x):
    return (x.clone().requires_grad_() * 0).sum()


def fit(tmp_path, module, strategy, devices=2, **options):
    batches = [torch.ones(4, 2)] * 5
    trainer = sg.Trainer(
        max_epochs=1, accelerator="cpu", devices=devices, strategy=strategy, launcher="fork", logger=False,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_checkpointing=False,
        use_distributed_sampler=False, **options,
    )  # fmt: skip
    trainer.fit(module, batches)
    return trainer.global_step


UNUSED = "ddp_find_unused_parameters_true"
CASES = [
    (UNUSED, {}), ("parallel", {}), ("ddp_sharded", {}), ("ddp_sharded", {"comm_hook": "fp16_compress"}),
    ("local_sgd", {}), ("diloco", {}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "options"), CASES, ids=str)
def test_a_loss_that_reaches_nothing_is_refused(tmp_path, strategy, options):
    with pytest.raises(ConfigError, match="the loss of rank 1 reaches no trainable parameter, and .* multiplied by"):
        fit(tmp_path, Skips("graph"), strategy, **options)


@pytest.mark.parametrize("strategy", ["parallel", "ddp_sharded"])
def test_another_branch_on_one_rank_trains(tmp_path, strategy):
    assert fit(tmp_path, Skips("branch"), strategy) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "reached"), [(0, "graph"), (2, "leaf")])
def test_deepspeed_refuses_it(tmp_path, stage, reached):
    pytest.importorskip("deepspeed")
    with pytest.raises(ConfigError, match="the loss of rank 1 reaches no trainable parameter"):
        fit(tmp_path, Skips(reached), {"name": "deepspeed", "stage": stage})


@pytest.mark.slow
def test_the_last_stage_of_a_pipeline_refuses_it(tmp_path):
    strategy = {"name": "parallel", "pipeline": 2, "replicate": 2}
    with pytest.raises(ConfigError, match="the loss of rank [13] reaches no trainable parameter"):
        fit(tmp_path, Stages("graph"), strategy, devices=4)
