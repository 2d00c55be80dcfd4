"""What a user attaches to parameters before training holds under every strategy, or is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stratagem_testing import run_in_processes
from stratagem_testing.attachments import (
    WAYS,
    GroupsById,
    HookAfterAccumulation,
    HookLater,
    HookOfInit,
    KeptInForward,
    train_each,
)
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly

BATCHES = joined_batches(4, 8)
STRATEGIES = {
    "ddp": "ddp", "ddp_sharded": "ddp_sharded", "fsdp": "fsdp", "shard": {"name": "parallel", "shard": 2},
    "tensor": {"name": "parallel", "tensor": 2}, "pipeline": {"name": "parallel", "pipeline": 2, "microbatches": 2},
    "deepspeed_stage_3": "deepspeed_stage_3",
}  # fmt: skip


class Marked(nn.Parameter):
    pass


class Subclass(Net):
    def __init__(self):
        super().__init__()
        self.net[0].weight = Marked(self.net[0].weight.detach())
        self.net[0].weight.decays = True

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if hasattr(p, "decays")]
        rest = [p for p in self.parameters() if not hasattr(p, "decays")]
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], 5e-3, 0.9)


class RemovedHook(Net):
    """Removes the hook before training."""

    def __init__(self):
        super().__init__()
        self.handle = self.net[0].weight.register_hook(lambda grad: grad * 0.25)

    def configure_optimizers(self):
        self.handle.remove()
        return super().configure_optimizers()


class Foreign(Net):
    def __init__(self):
        super().__init__()
        self.other = [nn.Linear(3, 5)]

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), *self.other[0].parameters()], 5e-3, 0.9)


class Missing(Net):
    def configure_optimizers(self):
        return torch.optim.SGD([self.net[0].weight, *self.net[2].parameters()], 5e-3, 0.9)


class Begun(GroupsById):
    """Its optimizer makes its state at once."""

    def configure_optimizers(self):
        rest = [p for p in self.parameters() if id(p) not in self.ids]
        return torch.optim.Adagrad([*self.slow, *rest], 5e-3, initial_accumulator_value=0.3)


ALL = (*WAYS, Begun, RemovedHook, Subclass, Foreign, Missing)


FOREIGN = "configure_optimizers returned SGD with 2 of 8 parameters that are not of Foreign, the first of shape (5, 3)"
STALE = "linear is called with 'net.3.weight' as it was before the model was prepared"
SUBCLASS = "'net.0.weight' is a Marked, and the strategy replaces it by a part"
HOOKED = "which strategy.parallel.tensor cuts, has a hook on its gradient"
#: What is refused, by the name of the strategy and for all; all else trains as plain PyTorch does.
REFUSED = {
    "ddp": {}, "ddp_sharded": {}, "fsdp": {KeptInForward: STALE, Subclass: SUBCLASS},
    "shard": {KeptInForward: STALE, Subclass: SUBCLASS},
    "tensor": {
        KeptInForward: STALE, Subclass: SUBCLASS, HookOfInit: HOOKED, HookLater: HOOKED, HookAfterAccumulation: HOOKED,
    },
    "pipeline": {HookAfterAccumulation: "accumulates 2 micro-batches in each batch"},
    "deepspeed_stage_3": {},
}  # fmt: skip


@pytest.mark.when_changed("plugins/ddp_sharded/", cases=("ddp_sharded",))
@pytest.mark.when_changed("plugins/parallel/", "plugins/parallel_unchanged/", cases=("shard",))
@pytest.mark.when_changed("plugins/deepspeed/", cases=("deepspeed_stage_3",))
@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    cases=(
        "tensor",
        "pipeline",
    ),
)
@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_attached_to_parameters_holds_or_is_refused(name, request):
    if name.startswith("deepspeed"):
        request.getfixturevalue("deepspeed_preloaded")
    refused = REFUSED[name] | {Foreign: FOREIGN}
    choose = {"strategy": STRATEGIES[name], "accelerator": "cpu"}
    both = run_in_processes(train_each, 2, choose, lambda module: module, BATCHES, ALL)
    for way, *outcomes in zip(ALL, *both, strict=True):
        for outcome, told in outcomes:
            if way in refused:
                assert refused[way] in outcome, way
            else:
                assert relative_difference(outcome, train_module_plainly(way(), BATCHES)[0]) < 1e-6, way
                missing = [each for each in told if "no optimizer steps" in each]
                assert len(missing) <= (way is Missing), way
    told = both[0][-1][1]
    assert any("no optimizer steps 3 of 6 trainable parameters: net.0.bias, net.4.weight" in each for each in told)
