"""What users write: the recipes that guides to distributed training hand out, each run, each with an effect to look at.

Examples of the same guides that are not here:

==========================================================  ==========================================================
example                                                     why
==========================================================  ==========================================================
DeepSpeed (stages, offload, NVMe, config files, its own     in plugins/test_deepspeed_*.py and parity/test_deepspeed.py
optimizers and activation checkpointing)
one layer to each GPU (sequential, pipeline parallel)       in parity/test_parallel_pipeline.py
Horovod, FairScale, Hivemind and other engines              what they answer without the engine in test_engines_page.py;
                                                            in contrib/, with the engine
SLURM, Kubernetes, torchrun, MPI, several nodes             in cluster/test_guides.py, with real launchers
TPU, ``precision="transformer-engine"`` (FP8)               the same
``gpus=[1, 3]``, ``"2,"``, ``-1``, ``auto_select_gpus``     need GPUs; the grammar is tested in core/test_devices.py
NCCL sockets and timeouts by ``export NCCL_...``            NCCL reads them itself; options for them in plugins/test_process_group.py
``torch.cuda.memory_summary()``, ``nvidia-smi``             need GPUs
a strategy chosen by ``if model_params < 1e9``              plain Python around a name
``etcd`` beside torchelastic                                torchrun meets without it
``setup.py`` for the user's own project                     not about training
==========================================================  ==========================================================

GPUs became CPU processes, four of them two, and billions of parameters a few hundred.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_localSGD
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy, wrap
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import stratagem as sg
from ports import free_port
from programs import scripts
from standing_ranks import StandingRanks
from stratagem.callbacks import ModelCheckpoint
from stratagem.cli import main
from stratagem.errors import ConfigError
from stratagem.strategies import DDPStrategy, FSDPStrategy
from stratagem_testing import run_in_processes

pytestmark = pytest.mark.xdist_group("ranks of guides")

QUIET = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False}
KEEPS_NOTHING = QUIET | {"enable_checkpointing": False}


@pytest.fixture(scope="module")
def ranks():
    standing = StandingRanks()
    yield standing
    standing.close()


class Numbers(Dataset):
    """Sixteen rows; the first column of each is its number."""

    def __init__(self, size=16):
        self.rows = torch.randn(size, 32, generator=torch.Generator().manual_seed(1))
        self.rows[:, 0] = torch.arange(size)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class MyModel(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return self(batch / 16).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch / 16).square().mean(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self(batch / 16).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(Numbers(), batch_size=4)


#: How often each block has computed.
CALLS = Counter()


class Block(nn.Module):
    """Counts how often it computes."""

    def __init__(self, width=32):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        CALLS[id(self)] += 1  # an attribute would have its value back after it is computed again
        return x + self.linear(x).tanh()


class Deep(MyModel):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.layer(self.blocks(x))


class DeepAdam(Deep):
    """Its optimizer keeps two tensors for each parameter."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Transformer(sg.Module):
    """A language model with an encoder and a decoder."""

    def __init__(self, vocab_size=20):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, 16)
        self.model = nn.Transformer(16, 2, 1, 1, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, vocab_size)

    def training_step(self, batch):
        input, target = batch  # noqa: A001 - as users call it
        output = self.head(self.model(self.tokens(input), self.tokens(input)))
        loss = F.nll_loss(output.log_softmax(-1).flatten(0, 1), target.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        text = torch.arange(16 * 9).view(16, 9) % 20
        return DataLoader(list(zip(text[:, :-1], text[:, 1:], strict=True)), batch_size=4)


def fit(model, strategy, **arguments):
    """Train `model` in this process, one of two; return the trainer."""
    trainer = sg.Trainer(devices=2, strategy=strategy, **KEEPS_NOTHING | arguments)
    trainer.fit(model)
    return trainer


def held(model):
    """Return how many numbers of the model's parameters this process keeps."""
    return sum(local(parameter).numel() for parameter in model.parameters())


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def whole(model):
    """Return the model's parameters, gathered. Collective."""
    parameters = dict(model.named_parameters()).items()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in parameters}


def units(trainer):
    return [name for name, part in trainer.run.model.named_modules() if type(part).__name__.startswith("FSDP")]


# --- DDP ---------------------------------------------------------------------------------------------------------


class Looks(MyModel):
    """Remembers its gradients and where they lie, before each step."""

    def on_fit_start(self):
        self.gradients, self.memories = [], []

    def on_before_optimizer_step(self, optimizer):
        gradients = [parameter.grad for parameter in self.parameters()]
        self.memories.append({gradient.untyped_storage().data_ptr() for gradient in gradients})
        self.gradients += [gradient.clone() for gradient in gradients]


def _memories(rank, world_size, strategy):
    model = Looks()
    fit(model, strategy)
    return {len(memories) for memories in model.memories}


@pytest.mark.every_push("view of a static graph")
@pytest.mark.parametrize(
    ("strategy", "memories"),
    [
        (DDPStrategy(gradient_as_bucket_view=True), 1),
        (DDPStrategy(find_unused_parameters=False, gradient_as_bucket_view=True, static_graph=False), 1),
        (DDPStrategy(gradient_as_bucket_view=True, static_graph=True), 1),
        (DDPStrategy(), 2),
    ],
    ids=["view", "three options", "view of a static graph", "copy"],
)
def test_gradients_lie_in_the_buckets_that_are_sent(strategy, memories, ranks):
    assert ranks(_memories, strategy) == [{memories}, {memories}]


class HalfUsed(MyModel):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(32, 2)


def _trained_steps(rank, world_size, strategy):
    try:
        return fit(HalfUsed(), strategy).global_step
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    "strategy", [DDPStrategy(static_graph=True), DDPStrategy(find_unused_parameters=True)], ids=["static", "find"]
)
def test_a_model_with_unused_parameters_trains_when_ddp_is_told(strategy, ranks):
    assert ranks(_trained_steps, strategy) == [2, 2]


def test_a_model_with_unused_parameters_is_told_what_to_say(ranks):
    for said in ranks(_trained_steps, DDPStrategy(find_unused_parameters=False)):
        assert 'choose strategy="ddp_find_unused_parameters_true"' in said


def _gradients(rank, world_size, comm_hook):
    torch.manual_seed(0)
    model = Looks()
    fit(model, "ddp", comm_hook=comm_hook)
    return model.gradients


@pytest.mark.every_push("fp16_compress")
@pytest.mark.parametrize(
    ("comm_hook", "dtype"),
    [("fp16_compress", torch.float16), ("bf16_compress", torch.bfloat16)],
    ids=["fp16_compress", "bf16_compress"],
)
def test_gradients_travel_in_16_bits(comm_hook, dtype, ranks):
    first, second = ranks(_gradients, comm_hook)
    exact, _ = ranks(_gradients, None)

    assert all(torch.equal(gradient, gradient.to(dtype).float()) for gradient in first)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], exact[0])
    torch.testing.assert_close(first[0], exact[0], rtol=0.02, atol=1e-3)


def power_state():
    return powerSGD.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)


COMPRESSED = {
    "PowerSGD": lambda: DDPStrategy(ddp_comm_state=power_state(), ddp_comm_hook=powerSGD.powerSGD_hook),
    "PowerSGD in fp16": lambda: DDPStrategy(
        ddp_comm_state=power_state(),
        ddp_comm_hook=powerSGD.powerSGD_hook,
        ddp_comm_wrapper=default.fp16_compress_wrapper,
    ),
    "post-local SGD": lambda: DDPStrategy(
        ddp_comm_state=post_localSGD.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=2),
        ddp_comm_hook=post_localSGD.post_localSGD_hook,
        model_averaging_period=4,
    ),
}


def _bytes_of_each_step(rank, world_size, recipe, nodes=1):
    os.environ.update(LOCAL_RANK=str(rank // nodes), LOCAL_WORLD_SIZE=str(world_size // nodes))
    os.environ.update(NODE_RANK=str(rank % nodes), GROUP_RANK=str(rank % nodes))
    seen = []

    class Counts(sg.Callback):
        @sg.hookimpl
        def on_train_batch_end(self, run):
            seen.append(sum(count.wire for count in run.collectives.traffic.counts.values()))

    places = {"num_nodes": nodes, "devices": world_size // nodes}
    trainer = sg.Trainer(strategy=COMPRESSED[recipe](), callbacks=[Counts()], **places, **KEEPS_NOTHING)
    trainer.fit(Deep(), DataLoader(Numbers(), batch_size=2))
    return [after - before for before, after in itertools.pairwise(seen)]


@pytest.mark.every_push("post-local SGD")
@pytest.mark.parametrize("recipe", COMPRESSED)
def test_gradients_are_sent_in_fewer_bytes_from_a_step_on(recipe, ranks):
    nodes = 2 if recipe == "post-local SGD" else 1  # a subgroup is a node
    for whole, *later in ranks(_bytes_of_each_step, recipe, nodes):
        assert min(later) < whole / 2


def test_several_devices_and_no_strategy_mean_ddp():
    assert type(sg.Trainer(devices=2, **KEEPS_NOTHING).strategy) is DDPStrategy
    assert type(sg.Trainer(devices=1, **KEEPS_NOTHING).strategy) is not DDPStrategy


def _sharded_state(rank, world_size, strategy, arguments):
    trainer = fit(DeepAdam(), strategy, **arguments)
    return sum(tensor.numel() for state in trainer.optimizers[0].state.values() for tensor in state.values())


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [("ddp_sharded", {}), ("auto", {"plugins": "ddp_sharded"})],
    ids=["strategy", "plugins"],
)
def test_sharded_ddp_divides_the_optimizer_state(strategy, arguments, ranks):
    moments = 2 * size(Deep())

    states = ranks(_sharded_state, strategy, arguments)

    assert sum(states) >= moments
    assert max(states) < 0.6 * moments


class Announcing(DDPStrategy):
    """A DDP of the user's own: another way to meet, another way to wrap."""

    @sg.hookimpl
    def connect(self, world, run):
        os.environ["MET"] = f"{world.rank} of {world.world_size}"
        return super().connect(world, run)

    @sg.hookimpl
    def wrap_model(self, module, run):
        replica = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1)
        replica.mine = True
        return replica


def _with_my_ddp(rank, world_size):
    torch.manual_seed(rank)
    model = MyModel()
    trainer = fit(model, Announcing())
    return os.environ["MET"], trainer.run.model.mine, model.layer.weight.detach()


def test_ddp_is_met_and_wrapped_in_a_way_of_my_own(ranks):
    (met, mine, weight), (_, _, other) = ranks(_with_my_ddp)

    assert (met, mine) == ("0 of 2", True)
    assert torch.equal(weight, other)


# --- FSDP --------------------------------------------------------------------------------------------------------


def _fit_sharded(rank, world_size, strategy, arguments):
    model = Deep()
    trainer = fit(model, strategy, **arguments)
    finite = all(tensor.isfinite().all() for tensor in whole(model).values())
    return held(model), units(trainer), trainer.global_step, finite


@pytest.mark.every_push("precision 16")
@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        ("fsdp", {}),
        (FSDPStrategy(), {}),
        ("fsdp", {"precision": 16}),
        (FSDPStrategy(sharding_strategy="FULL_SHARD", cpu_offload=False), {"precision": "bf16"}),
        (FSDPStrategy(limit_all_gathers=True), {}),
    ],
    ids=["name", "instance", "precision 16", "bf16", "limited"],
)
def test_fsdp_divides_the_parameters(strategy, arguments, ranks):
    for kept, found, steps, finite in ranks(_fit_sharded, strategy, arguments):
        assert (kept, found, steps, finite) == (size(Deep()) / 2, [""], 2, True)


@pytest.mark.every_push("size")
@pytest.mark.parametrize(
    ("policy", "layer"),
    [
        ({Block}, "module.blocks.{}"),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=1000), "module.blocks.{}.linear"),
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), "module.blocks.{}"),
    ],
    ids=["classes", "size", "transformer"],
)
def test_fsdp_gathers_large_layers_one_by_one(policy, layer, ranks):
    for _, found, _, _ in ranks(_fit_sharded, FSDPStrategy(auto_wrap_policy=policy), {}):
        assert found == ["", layer.format(0), layer.format(1)]


def _fit_transformer(rank, world_size):
    sg.seed_everything(42)
    model = Transformer()
    layers = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
    strategy = FSDPStrategy(auto_wrap_policy=layers, activation_checkpointing_policy=layers)
    trainer = fit(model, strategy, max_epochs=15, log_every_n_steps=1)
    trainer.print("trained by", trainer.world_size)
    return float(trainer.callback_metrics["train_loss"]), units(trainer), held(model)


@pytest.mark.slow
def test_a_language_model_trains_under_fsdp(capfd):
    for loss, found, kept in run_in_processes(_fit_transformer, 2):
        assert loss < 1.5  # from log 20 = 3.0
        assert found == ["", "module.model.encoder.layers.0", "module.model.decoder.layers.0"]
        assert kept < 0.6 * size(Transformer())

    assert capfd.readouterr().out.count("trained by 2") == 1


class Watches(Deep):
    """Looks, after its forward, whether a block is whole or in shards."""

    def on_fit_start(self):
        self.seen = set()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        weight = self.blocks[0].linear.weight
        self.seen.add("shard" if isinstance(weight, DTensor) and local(weight).shape != weight.shape else "whole")
        return loss


def _between_forward_and_backward(rank, world_size, sharding_strategy):
    model = Watches()
    fit(model, FSDPStrategy(sharding_strategy=sharding_strategy, auto_wrap_policy={Block}))
    return held(model) / size(model), model.seen


@pytest.mark.every_push("SHARD_GRAD_OP-0.5-whole")
@pytest.mark.parametrize(
    ("sharding_strategy", "share", "between"),
    [("FULL_SHARD", 1 / 2, "shard"), ("SHARD_GRAD_OP", 1 / 2, "whole"), ("NO_SHARD", 1, "whole")],
)
def test_a_sharding_strategy_chooses_what_is_whole_and_when(sharding_strategy, share, between, ranks):
    for kept, seen in ranks(_between_forward_and_backward, sharding_strategy):
        assert (kept, seen) == (share, {between})


def _on_two_machines_of_two(rank, world_size):
    os.environ.update(NODE_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    torch.manual_seed(rank)
    model = Deep()
    fit(model, FSDPStrategy(sharding_strategy="HYBRID_SHARD"), num_nodes=2)
    mine = local(model.layer.weight).clone()
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    return held(model) / size(model), [[torch.equal(one, other) for other in everyone] for one in everyone]


@pytest.mark.slow
def test_hybrid_shard_shards_within_a_machine_and_replicates_across_machines():
    for kept, equal in run_in_processes(_on_two_machines_of_two, 4):
        assert kept == 1 / 2
        assert equal == [[(one - other) % 2 == 0 for other in range(4)] for one in range(4)]


def _offloaded(rank, world_size, strategy):
    trainer = fit(Deep(), strategy)
    group = trainer.run.model._get_fsdp_state()._fsdp_param_group
    return isinstance(group.offload_policy, CPUOffloadPolicy)


@pytest.mark.every_push("name", "not")
@pytest.mark.parametrize(
    ("strategy", "offloaded"),
    [
        (FSDPStrategy(cpu_offload=True), True),
        (FSDPStrategy(sharding_strategy="FULL_SHARD", cpu_offload=True), True),
        ("fsdp_cpu_offload", True),
        ("fsdp", False),
    ],
    ids=["option", "with sharding", "name", "not"],
)
def test_shards_are_kept_on_the_cpu(strategy, offloaded, ranks):
    assert ranks(_offloaded, strategy) == [offloaded, offloaded]


def test_an_option_that_the_second_fsdp_cannot_do_without_is_refused():
    with pytest.raises(ConfigError, match="limit_all_gathers is False; expected True"):
        FSDPStrategy(limit_all_gathers=False)


class Unfused(Deep):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)


def _weights_after(rank, world_size, kind):
    torch.manual_seed(0)
    model = kind()
    fit(model, "fsdp")
    return whole(model)


@pytest.mark.slow
def test_an_optimizer_without_foreach_steps_shards_alike(ranks):
    slow, fast = (ranks(_weights_after, kind)[0] for kind in (Unfused, DeepAdam))

    for name, tensor in slow.items():
        torch.testing.assert_close(tensor, fast[name])


class WrappedByHand(MyModel):
    """As the guides have it, with what they leave out; each of its layers is wrapped."""

    def __init__(self, recompute=False):
        super().__init__()
        self.layer, self.recompute = None, recompute

    def configure_model(self):
        self.linear_layer = nn.Linear(32, 32)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

        linear_layer = wrap(self.linear_layer)

        for i, layer in enumerate(self.block):
            self.block[i] = wrap(layer)

        self.model = nn.Sequential(linear_layer, nn.ReLU(), self.block)
        if self.recompute:
            apply_activation_checkpointing(self.model)
        self.linear_layer.register_forward_pre_hook(self.count)
        self.calls = 0

    def count(self, *_):
        self.calls += 1

    def forward(self, x):
        return self.model(x)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters())


def _wrapped_by_hand(rank, world_size, strategy, arguments):
    sg.seed_everything(3)
    model = WrappedByHand()
    trainer = fit(model, strategy, **arguments)
    return len(units(trainer)), held(model) / size(model), whole(model)


@pytest.mark.every_push("16")
@pytest.mark.slow
@pytest.mark.parametrize("precision", [16, None])
def test_layers_are_wrapped_by_hand_under_fsdp_and_left_alone_under_ddp(precision, ranks):
    (count, share, sharded), _ = ranks(_wrapped_by_hand, "fsdp", {"precision": precision})
    (none, everything, replicated), _ = ranks(_wrapped_by_hand, "ddp", {"precision": precision})

    assert (count, share) == (1 + 3, 1 / 2)
    assert (none, everything) == (0, 1)
    assert sharded.keys() == replicated.keys()


# --- Activations -------------------------------------------------------------------------------------------------


def _computations(rank, world_size, strategy, arguments):
    CALLS.clear()
    model = Deep()
    fit(model, strategy, **arguments)
    return [CALLS[id(block)] for block in model.blocks]


@pytest.mark.every_push("under ddp")
@pytest.mark.parametrize(
    ("strategy", "arguments", "calls"),
    [
        (FSDPStrategy(activation_checkpointing_policy={Block}), {}, 4),
        (FSDPStrategy(activation_checkpointing_policy={Block}, auto_wrap_policy={Block}), {}, 4),
        ("fsdp", {"activation_checkpointing": {Block}}, 4),
        ("ddp", {"activation_checkpointing": {Block}}, 4),
        ("fsdp", {"activation_checkpointing": None}, 2),
    ],
    ids=["policy", "policy and units", "argument", "under ddp", "none"],
)
def test_activations_of_chosen_layers_are_computed_again(strategy, arguments, calls, ranks):
    assert ranks(_computations, strategy, arguments) == [[calls, calls], [calls, calls]]


def _recomputed_by_hand(rank, world_size):
    counts = []
    for recompute in (True, False):
        model = WrappedByHand(recompute)
        fit(model, "fsdp")
        counts.append(model.calls)
    return counts


@pytest.mark.slow
def test_activation_checkpointing_is_applied_by_hand(ranks):
    assert ranks(_recomputed_by_hand) == [[4, 2], [4, 2]]


# --- Building models ---------------------------------------------------------------------------------------------


def test_a_model_is_built_in_half_precision_at_once():
    trainer = sg.Trainer(precision="16-true", **KEEPS_NOTHING)
    with trainer.init_module():
        model = MyModel()
        assert model.layer.weight.dtype == torch.float16
    before = model.layer.weight.clone()
    trainer.fit(model)

    assert model.layer.weight.dtype == torch.float16
    assert not torch.equal(model.layer.weight, before)


def test_a_model_is_loaded_without_initializing_it_first():
    first = sg.Trainer(**KEEPS_NOTHING)
    first.fit(MyModel())
    first.save_checkpoint("path.ckpt")

    trainer = sg.Trainer(**KEEPS_NOTHING | {"max_epochs": 0})
    with trainer.init_module(empty_init=True):
        model = MyModel.load_from_checkpoint("path.ckpt")
        assert model.layer.weight.is_meta
    trainer.fit(model)

    assert torch.equal(model.layer.weight, first.module.layer.weight)


class LaysOutLater(Deep):
    def __init__(self):
        sg.Module.__init__(self)
        self.layer = self.blocks = None
        self.was_meta = None

    def configure_model(self):
        if self.layer is not None:
            return
        self.layer, self.blocks = nn.Linear(32, 2), nn.Sequential(Block(), Block())
        self.was_meta = all(parameter.is_meta for parameter in self.parameters())


def _fitted_then_tested(rank, world_size):
    model = LaysOutLater()
    trainer = fit(model, FSDPStrategy(auto_wrap_policy={Block}))
    layer = model.layer
    trainer.test(model, DataLoader(Numbers(), 4))
    predictions = trainer.predict(model, DataLoader(Numbers(), 4))
    return model.was_meta, model.layer is layer, held(model) / size(model), len(torch.cat(predictions))


@pytest.mark.slow
def test_a_model_larger_than_a_process_is_laid_out_in_configure_model(ranks):
    for was_meta, same, share, predictions in ranks(_fitted_then_tested):
        assert (was_meta, same, share, predictions) == (True, True, 1 / 2, 8)


# --- Checkpoints -------------------------------------------------------------------------------------------------


def _save_sharded(rank, world_size, kind, path):
    trainer = fit(DeepAdam(), FSDPStrategy(state_dict_type=kind))
    trainer.save_checkpoint(path)
    return whole(trainer.module)


def _resume(rank, world_size, strategy, path):
    class Notes(DeepAdam):
        def on_train_start(self):
            self.start = (self.trainer.current_epoch, self.global_step, whole(self))

    model = Notes()
    trainer = sg.Trainer(devices=2, strategy=strategy, **KEEPS_NOTHING | {"max_epochs": 2})
    trainer.fit(model, ckpt_path=path)
    return *model.start, trainer.global_step


@pytest.mark.every_push("ddp-sharded-True")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_folder"), [("full", False), ("sharded", True)])
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_checkpoint_of_fsdp_is_resumed_whichever_form_it_has(kind, is_folder, strategy, ranks):
    saved, _ = ranks(_save_sharded, kind, "saved.ckpt")
    for epoch, step, weights, last in run_in_processes(_resume, 2, strategy, "saved.ckpt"):
        assert (epoch, step, last) == (1, 2, 4)
        assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())

    assert Path("saved.ckpt").is_dir() is is_folder


@pytest.mark.slow
def test_a_sharded_checkpoint_becomes_a_regular_file(ranks):
    saved, _ = ranks(_save_sharded, "sharded", "saved.ckpt")
    main(["checkpoint", "consolidate", "saved.ckpt", "regular.ckpt"])
    state = torch.load("regular.ckpt", weights_only=True)["state_dict"]

    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())


def test_a_checkpoint_is_kept_every_epoch_without_asking():
    trainer = sg.Trainer(**QUIET | {"max_epochs": 2})
    trainer.fit(MyModel())

    assert [path.name for path in Path("checkpoints").glob("*.ckpt")] == ["epoch=1-step=8.ckpt"]


class UpAndDown(MyModel):
    """Best in epochs 1, 3 and 4, and remembers what it was in the first of them."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", [5.0, 1.0, 4.0, 2.0, 3.0, 6.0][self.current_epoch], sync_dist=True)
        if self.current_epoch == 1:
            self.at_its_best = whole(self)


def _keep_three(rank, world_size):
    checkpoint = ModelCheckpoint(
        dirpath="kept/", filename="model-{epoch:02d}", save_top_k=3, monitor="val_loss", save_last=True
    )
    trainer = sg.Trainer(devices=2, callbacks=[checkpoint], strategy="ddp", **QUIET | {"max_epochs": 5})
    trainer.fit(UpAndDown(), DataLoader(Numbers(), 4), DataLoader(Numbers(), 4))
    return checkpoint.best_model_path, trainer.module.at_its_best


@pytest.mark.slow
def test_the_three_best_are_kept_and_loaded_for_inference(ranks):
    (best, weights), _ = ranks(_keep_three)
    model = MyModel.load_from_checkpoint(best)
    model.eval()

    names = {f"model-epoch={epoch:02d}.ckpt" for epoch in (1, 3, 4)}
    assert {path.name for path in Path("kept").glob("*.ckpt")} == names | {"last.ckpt"}
    assert Path(best).name == "model-epoch=01.ckpt"
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert model(torch.zeros(1, 32)).shape == (1, 2)


@pytest.mark.slow
def test_resuming_a_ddp_run_from_its_last_checkpoint_goes_on(ranks):
    ranks(_keep_three)
    trainer = sg.Trainer(callbacks=[ModelCheckpoint(dirpath="kept/", save_last=True)], **QUIET | {"max_epochs": 6})
    trainer.fit(MyModel(), DataLoader(Numbers(), 4), ckpt_path="kept/last.ckpt")

    assert (trainer.current_epoch, trainer.global_step) == (6, 5 * 2 + 4)


def test_keeping_three_without_a_metric_to_compare_by_is_refused():
    with pytest.raises(ConfigError, match="save_top_k is 3 without a monitor"):
        ModelCheckpoint(dirpath="kept/", filename="model-{epoch:02d}", save_top_k=3)


class SavesItself(MyModel):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2 == 1:  # on all ranks: they save together
            self.trainer.save_checkpoint(f"checkpoint_step_{batch_idx}.ckpt")
        return loss


class SavesOnOneRank(MyModel):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 1000 == 0 and self.trainer.is_global_zero:
            self.trainer.save_checkpoint(f"checkpoint_step_{batch_idx}.ckpt")
        return loss


def _save_within(rank, world_size, kind):
    try:
        return fit(kind(), "ddp").global_step
    except sg.StratagemError as error:
        return str(error)


def test_a_module_saves_every_so_many_batches(ranks):
    assert ranks(_save_within, SavesItself) == [2, 2]

    assert torch.load("checkpoint_step_1.ckpt", weights_only=True)["state_dict"].keys() == MyModel().state_dict().keys()


@pytest.mark.slow
def test_saving_where_a_rank_is_zero_works_alone_and_is_refused_among_others(monkeypatch):
    sg.Trainer(**KEEPS_NOTHING).fit(SavesOnOneRank())
    assert Path("checkpoint_step_0.ckpt").exists()
    monkeypatch.setattr("stratagem_trainer.fit_state.BARRIER_TIMEOUT_S", 0.5)

    for said in run_in_processes(_save_within, 2, SavesOnOneRank):
        assert "save_checkpoint was called on rank 0 and on 1 of 2 ranks" in said


# --- Precision and accumulation ----------------------------------------------------------------------------------


class NotesDtype(MyModel):
    def forward(self, x):
        out = super().forward(x)
        self.dtype = out.dtype
        return out.float()


def _dtype(rank, world_size, strategy, precision):
    model = NotesDtype()
    fit(model, strategy, precision=precision)
    return model.dtype, model.layer.weight.dtype


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("bf16-mixed", torch.bfloat16),
        ("16-mixed", torch.float16),
        ("16", torch.float16),
        (16, torch.float16),
        (32, torch.float32),
    ],
)
def test_a_precision_chooses_what_is_computed_in(precision, dtype):
    model = NotesDtype()
    sg.Trainer(precision=precision, **KEEPS_NOTHING).fit(model)

    assert (model.dtype, model.layer.weight.dtype) == (dtype, torch.float32)


def test_16_bit_and_ddp_go_together(ranks):
    assert ranks(_dtype, "ddp", 16) == [(torch.float16, torch.float32)] * 2


class CountsBatches(MyModel):
    """Writes down in which epoch, after how many batches, it stepped."""

    def on_fit_start(self):
        self.batches, self.steps = 0, {}

    def on_train_epoch_start(self):
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.steps.setdefault(self.current_epoch, []).append(self.batches)

    def train_dataloader(self):
        return DataLoader(Numbers(), batch_size=2)  # 8 batches


def test_four_batches_are_accumulated():
    trainer = sg.Trainer(accumulate_grad_batches=4, precision="bf16", **KEEPS_NOTHING)
    trainer.fit(model := CountsBatches())

    assert model.steps == {0: [4, 8]}
    assert trainer.effective_batch_size == 2 * 4 * 1


def test_accumulation_changes_from_epoch_to_epoch():
    trainer = sg.Trainer(accumulate_grad_batches={0: 8, 5: 4, 10: 2}, **KEEPS_NOTHING | {"max_epochs": 11})
    trainer.fit(model := CountsBatches())

    assert [len(model.steps[epoch]) for epoch in range(11)] == [1] * 5 + [2] * 5 + [4]


def _effective(rank, world_size):
    return fit(CountsBatches(), "ddp", accumulate_grad_batches=4).effective_batch_size


def test_the_batch_behind_a_step_grows_with_the_processes(ranks):
    assert ranks(_effective) == [2 * 4 * 2] * 2


# --- Data --------------------------------------------------------------------------------------------------------


class NotesNumbers(MyModel):
    """Keeps the numbers of the rows it is given; its loader is `make`'s."""

    def __init__(self, make):
        super().__init__()
        self.make, self.numbers = make, []

    def training_step(self, batch, batch_idx):
        self.numbers += batch[:, 0].int().tolist()
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return self.make()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Numbers())


def plain():
    return DataLoader(Numbers(), batch_size=4)


def shuffled():
    return DataLoader(Numbers(), batch_size=4, shuffle=True)


def with_workers():
    return DataLoader(Numbers(), batch_size=4, num_workers=2, pin_memory=True, persistent_workers=True)


def with_a_sampler():
    sampler = DistributedSampler(Numbers(), shuffle=False) if dist.is_initialized() else None
    return DataLoader(Numbers(), batch_size=4, sampler=sampler)


def stream():
    return DataLoader(Stream(), batch_size=4)


def _numbers(rank, world_size, make, arguments):
    model = NotesNumbers(make)
    fit(model, "ddp", **arguments)
    return model.numbers


@pytest.mark.every_push("with_a_sampler")
@pytest.mark.parametrize("make", [plain, shuffled, with_workers, with_a_sampler])
def test_each_process_gets_its_own_share_of_a_loader(make, ranks):
    first, second = ranks(_numbers, make, {})

    assert sorted(first + second) == list(range(16))
    assert len(first) == 8
    assert (first == sorted(first)) is (make is not shuffled)


@pytest.mark.parametrize(
    ("make", "arguments"), [(plain, {"use_distributed_sampler": False}), (stream, {})], ids=["switched off", "iterable"]
)
def test_a_loader_is_left_alone_where_it_should_be(make, arguments, ranks):
    assert ranks(_numbers, make, arguments) == [list(range(16))] * 2


class AnywhereModel(MyModel):
    """Makes tensors like those it is given, and keeps one as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sigma", torch.eye(2))

    def forward(self, x):
        z = torch.ones(x.shape[0], 2, dtype=torch.float64).type_as(x)
        assert z.dtype == x.dtype
        assert self.sigma.device == x.device == self.device
        return (super().forward(x) + z) @ self.sigma


def _buffer(rank, world_size):
    model = AnywhereModel()
    model.sigma *= 1 + rank
    fit(model, "ddp")
    return model.sigma.tolist()


def test_buffers_are_where_the_model_is_and_the_same_everywhere(ranks):
    assert ranks(_buffer) == [[[1.0, 0.0], [0.0, 1.0]]] * 2


class Parts(MyModel):
    """Returns its output from a step, and computes the loss when the step has ended."""

    def training_step(self, batch, batch_idx):
        return self(batch / 16)

    def training_step_end(self, outputs):
        assert outputs.shape == (4, 2)
        return outputs.softmax(dim=1)[:, 0].mean()

    def validation_step(self, batch, batch_idx):
        return self(batch / 16)

    def validation_step_end(self, outputs):
        self.log("val_first", outputs.softmax(dim=1)[:, 0].mean(), sync_dist=True)

    test_step, test_step_end = validation_step, validation_step_end


def test_the_loss_is_computed_when_the_step_has_ended():
    trainer = sg.Trainer(**KEEPS_NOTHING | {"max_epochs": 5})
    model, loader = Parts(), plain()
    (before,) = trainer.validate(model, loader)
    trainer.fit(model)
    (after,) = trainer.test(model, loader)

    assert after["val_first"] < before["val_first"]


# --- Logging and randomness --------------------------------------------------------------------------------------


class LogsEverywhere(MyModel):
    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", batch[:, 0].mean(), on_step=True, on_epoch=True, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", batch[:, 0].mean(), on_step=True, on_epoch=True, sync_dist=True)


def _logged(rank, world_size):
    model = LogsEverywhere()
    trainer = sg.Trainer(devices=2, strategy="ddp", **KEEPS_NOTHING)
    trainer.fit(model, plain(), plain())
    fitted = float(trainer.callback_metrics["validation_loss"])
    (tested,) = trainer.test(model, plain())
    return fitted, tested["test_loss_epoch"]


def test_a_metric_is_the_mean_over_all_processes(ranks):
    mean = sum(range(16)) / 16

    assert ranks(_logged) == [(mean, mean)] * 2


class LogsOnce(MyModel):
    def training_step(self, batch, batch_idx):
        if batch_idx % 100 == 0 and self.trainer.is_global_zero:
            print("logged something")
        self.log("of_rank_zero", float(self.global_rank + 1), rank_zero_only=True)
        return super().training_step(batch, batch_idx)


def _once(rank, world_size):
    return float(fit(LogsOnce(), "ddp", log_every_n_steps=1).callback_metrics.get("of_rank_zero", -1))


def test_rank_zero_alone_logs(capfd):
    assert run_in_processes(_once, 2) == [1, -1]
    assert capfd.readouterr().out.count("logged something") == 1


class Seeded(MyModel):
    def __init__(self):
        sg.seed_everything(42, workers=True)
        super().__init__()


class Draws(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor([np.random.rand()], dtype=torch.float64)


def _seeded(rank, world_size):
    torch.manual_seed(rank)
    weight = Seeded().layer.weight.detach()
    np.random.seed(0)
    drawn = []

    class Model(MyModel):
        def training_step(self, batch, batch_idx):
            drawn.extend(batch.flatten().tolist())
            return self(torch.zeros(1, 32)).sum()

        def train_dataloader(self):
            return DataLoader(Draws(), batch_size=4, num_workers=2)

    fit(Model(), "ddp")
    return weight, drawn


def test_a_seed_in_the_module_makes_processes_alike_and_their_workers_different(ranks):
    (weight, drawn), (other, drawn_there) = ranks(_seeded)

    assert torch.equal(weight, other)
    assert len(set(drawn + drawn_there)) == 16


# --- Pickling ----------------------------------------------------------------------------------------------------


class Unpicklable(MyModel):
    def __init__(self):
        super().__init__()
        self.transform = lambda x: 2 * x

    def forward(self, x):
        return super().forward(self.transform(x))


def test_a_model_that_can_be_pickled_still_can_after_a_fit():
    model = MyModel()
    sg.Trainer(**KEEPS_NOTHING).fit(model)
    copy = pickle.loads(pickle.dumps(model))

    assert torch.equal(copy.layer.weight, model.layer.weight)


def test_spawning_says_what_cannot_be_pickled():
    with pytest.raises(sg.StratagemError, match="transform|lambda"):
        sg.Trainer(devices=2, strategy="ddp_spawn", **KEEPS_NOTHING).fit(Unpicklable())


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_notebook"])
def test_a_notebook_trains_what_cannot_be_pickled(strategy):
    model = Unpicklable()
    before = model.layer.weight.detach().clone()
    sg.Trainer(devices=2, strategy=strategy, **KEEPS_NOTHING).fit(model)

    assert not torch.equal(model.layer.weight, before)


# --- Waiting -----------------------------------------------------------------------------------------------------


def _patience(rank, world_size, strategy):
    fit(MyModel(), strategy)
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


class TestWaiting:
    def test_a_strategy_says_how_long_ranks_wait(self, ranks):
        strategy = DDPStrategy(timeout=timedelta(hours=1))

        assert ranks(_patience, strategy) == [timedelta(hours=1)] * 2

    def test_a_variable_says_how_long_ranks_wait(self, monkeypatch, ranks):
        monkeypatch.setenv("STRATAGEM_STRATEGY_TIMEOUT", "3600")

        assert ranks(_patience, "ddp") == [timedelta(hours=1)] * 2


# --- Starting ----------------------------------------------------------------------------------------------------

SCRIPT = """
import os
import sys

import torch
from torch.utils.data import DataLoader

import stratagem as sg


class MyModel(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch).square().mean(), sync_dist=True)

    def on_train_end(self):
        trainer = self.trainer
        print(f"rank {trainer.global_rank} of {trainer.world_size}, node {trainer.node_rank}\\n", end="", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    sg.seed_everything(1)
    model = MyModel()
    before = model.layer.weight.detach().clone()
    quiet = ["--accelerator=cpu", "--max_epochs=1", "--logger=false", "--enable_progress_bar=false"]
    trainer = sg.Trainer.from_cli([*quiet, "--enable_checkpointing=false", *sys.argv[1:]])
    trainer.fit(model, DataLoader(torch.randn(16, 32), 4))
    (results,) = trainer.test(model, DataLoader(torch.randn(16, 32), 4))
    changed = not torch.equal(model.layer.weight, before)
    trainer.print(f"changed: {changed}, tested: {results['test_loss'] > 0}, saw: {os.environ.get('NCCL_SOCKET_NTHREADS')}")
"""
PYTHON = [sys.executable, "train.py"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]


def start(command, **variables):
    """Start `command` in a folder with train.py."""
    Path("train.py").write_text(SCRIPT)
    return scripts.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def output(*processes):
    """Wait for `processes`; return what they said. None of them is left, nor what they started."""
    try:
        said = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return "".join(out for out, _ in said)


@pytest.mark.every_push("ddp")
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        [*PYTHON, "--strategy", "ddp", "--devices", "2"],
        [*PYTHON, "--strategy", "ddp_spawn", "--devices", "2"],
        [*TORCHRUN, "--strategy", "ddp"],
    ],
    ids=["ddp", "spawn", "torchrun"],
)
def test_a_script_is_started_and_trains_and_tests_on_two_processes(command):
    said = output(start(command, NCCL_SOCKET_NTHREADS="2"))

    assert sorted(line for line in said.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2, node 0",
        "rank 1 of 2, node 0",
    ]
    assert said.count("changed: True, tested: True, saw: 2") == 1


@pytest.mark.slow
def test_a_script_is_started_on_two_machines_by_hand():
    command = [*PYTHON, "--strategy", "ddp", "--devices", "2", "--num_nodes", "2"]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    machines = [start(command, NODE_RANK=str(node), **meeting) for node in (0, 1)]
    said = output(*machines)

    ranks = sorted(line for line in said.splitlines() if line.startswith("rank"))
    assert ranks == [f"rank {rank} of 4, node {rank // 2}" for rank in range(4)]
    assert said.count("changed: True, tested: True") == 1


@pytest.mark.slow
def test_every_process_is_started_by_hand():
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    command = [*PYTHON, "--strategy", "ddp", "--devices", "2"]
    said = output(*(start(command, LOCAL_RANK=str(rank), **meeting) for rank in (0, 1)))

    assert sorted(line for line in said.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2, node 0",
        "rank 1 of 2, node 0",
    ]


# --- What is said otherwise here ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ({"gpus": 2}, 'use accelerator="gpu" and devices'),
        ({"replace_sampler_ddp": False}, "use use_distributed_sampler instead"),
        ({"auto_select_gpus": True}, 'use devices="auto", or list the devices'),
        ({"resume_from_checkpoint": "last.ckpt"}, r"use fit\(ckpt_path\)"),
    ],
    ids=["gpus", "sampler", "selection", "resuming"],
)
def test_an_argument_of_an_earlier_trainer_is_refused_with_what_to_say_instead(arguments, instead):
    with pytest.raises(ConfigError, match=instead):
        sg.Trainer(**arguments)
