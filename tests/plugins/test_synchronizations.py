"""A training step only queues work: nothing in it makes the host wait for a GPU. Counted on a stand-in device.

``benchmarks/synchronizations.py`` prints the table of all of them.
"""

from __future__ import annotations

import itertools
import types
import warnings

import pytest
import torch
from on_device import Fused
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import stratagem_ddp
from stratagem.distributed.process_group import TorchCollectives
from stratagem_testing import run_in_processes, synchronizations_per_step
from stratagem_testing.reference import Net, joined_batches, part

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
BATCHES = joined_batches(8, 16)
#: From step 2 on they send what they are for.
HOOKS = {
    "allreduce": {}, "noop": {}, "fp16_compress": {}, "bf16_compress": {}, "int8": {}, "topk": {},
    "one_bit": {"start_iter": 2}, "powersgd": {"start_powerSGD_iter": 2, "min_compression_rate": 1},
    "batched_powersgd": {"start_powerSGD_iter": 2}, "post_localsgd": {"model_averaging_period": 2},
}  # fmt: skip
UNITS = {"name": "fsdp", "auto_wrap_policy": {nn.Linear}}
REPLICAS = {"name": "fsdp", "sharding_strategy": "NO_SHARD"}


class Logs(Net):
    """Logs on steps and over the epoch: a loss that each rank has for itself, and numbers of the host's."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        for reduce_fx in ("max", "min", "sum"):
            self.log(reduce_fx, loss, on_step=False, on_epoch=True, reduce_fx=reduce_fx)
        self.log("number", 1.0 * batch_idx, sync_dist=True)
        return loss


class Tied(Net):
    """Two stages of a pipeline hold its first weight."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.net[2].weight = self.net[0].weight


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*(tensor.flatten(0, 1) for tensor in map(torch.stack, zip(*BATCHES, strict=True))), strict=True)


def _count(rank, world_size, cases):
    """Return for each case how often the host waits in each step, and where."""
    counts = {}
    for name, (make, arguments) in cases.items():
        loader = BATCHES if "pipeline" in arguments.get("strategy", "") else part(BATCHES, rank, world_size)
        if name == "batches of unknown number":
            loader = DataLoader(Stream(), batch_size=8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of noop, which is here to be counted
            steps = synchronizations_per_step(make(), loader, devices=world_size, **(QUIET | arguments))
        counts[name] = [len(found) for found in steps], "; ".join(map(str, itertools.chain(*steps[-1:])))
    return counts


def _check(cases, world_size, limit):
    for counts in run_in_processes(_count, world_size, cases, limit_s=900):
        for name, (steps, where) in counts.items():
            assert len(steps) >= 4, name
            assert max(steps) <= limit, f"{name}: {steps} {where}"


@pytest.mark.slow
def test_a_step_of_one_process_waits_for_nothing():
    plain = {"strategy": "single_device"}
    cases = {
        "single_device": (Net, plain),
        "bf16-mixed": (Net, plain | {"precision": "bf16-mixed"}),
        "16-true": (Net, plain | {"precision": "16-true"}),
        "clipping": (Net, plain | {"gradient_clip_val": 0.5}),
        "clipping by value": (Net, plain | {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
        "accumulation": (Net, plain | {"accumulate_grad_batches": 2}),
        "batches of unknown number": (Net, plain),
        "logging": (Logs, plain | {"logger": "csv"}),
        "ema": (Net, plain | {"callbacks": ["ema"]}),
        "fsdp": (Net, {"strategy": "fsdp"}),
    }
    _check(cases, 1, 0)


@pytest.mark.when_changed(
    "plugins/ddp/",
    "plugins/fsdp/",
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    "plugins/trainer/",
    guard="tests/plugins/test_synchronizations.py::test_a_step_with_a_loss_scale_waits_for_one_number",
)
@pytest.mark.slow
def test_a_step_of_several_processes_waits_for_nothing():
    cases = {
        str(strategy): (Net, {"strategy": strategy})
        for strategy in (
            "ddp", "ddp_find_unused_parameters_true", "fsdp", UNITS, REPLICAS, "ddp_sharded",
            {"name": "ddp_sharded", "bucket_cap_mb": 0.001}, {"name": "local_sgd", "period": 2},
            {"name": "diloco", "period": 2}, {"name": "decentralized", "period": 2},
            {"name": "async_averaging", "interval_steps": 2, "delay_steps": 1},
        )
    }  # fmt: skip
    cases |= {
        f"{strategy}, {name}": (Net, {"strategy": strategy} | arguments)
        for strategy in ("ddp", "fsdp", "ddp_sharded")
        for name, arguments in {
            "bf16-mixed": {"precision": "bf16-mixed"},
            "clipping": {"gradient_clip_val": 0.5},
            "accumulation": {"accumulate_grad_batches": 2},
            "max_time": {"max_time": 3600.0},
        }.items()
    }
    cases |= {
        "logging": (Logs, {"strategy": "ddp", "logger": "csv"}),
        "batches of unknown number": (Net, {"strategy": "ddp"}),
    }
    _check(cases, 2, 0)


@pytest.mark.slow
def test_a_step_of_a_pipeline_waits_for_nothing_where_it_compares_nothing():
    """Steps 1, 2, 4, 8 ... compare the samples of the stages."""
    pipeline = {"strategy": {"name": "parallel", "pipeline": 2, "microbatches": 2, "balance": [2, 3]}}
    cases = {"plain": (Net, pipeline), "logging": (Logs, pipeline), "tied": (Tied, pipeline)}
    for counts in run_in_processes(_count, 2, cases, limit_s=900):
        assert {name: max(steps[1:-1]) for name, (steps, _) in counts.items()} == dict.fromkeys(cases, 0), counts


@pytest.mark.sweep(guard="tests/plugins/test_synchronizations.py::test_a_step_with_a_loss_scale_waits_for_one_number")
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_with_a_comm_hook_waits_for_nothing(precision):
    """Where the optimizer can skip on the device; else for one number, in the hooks that may lose something."""
    hooks = {name: {"name": name, **options} for name, options in HOOKS.items()}
    stack = [hooks["powersgd"] | {"min_compression_rate": 2}, "fp16_compress"]
    chosen = {"strategy": "ddp", "precision": precision}
    cases = {name: (Fused, chosen | {"comm_hook": hook}) for name, hook in (hooks | {"a stack": stack}).items()}
    _check(cases | {"ddp_sharded": (Fused, {"strategy": "ddp_sharded", "comm_hook": "int8"})}, 2, 0)
    _check({"replicas": (Fused, {"strategy": REPLICAS, "precision": precision, "comm_hook": "int8"})}, 2, 0)
    if precision == "32-true":
        cases = {name: (Net, chosen | {"comm_hook": hook}) for name, hook in hooks.items()}
        _check(cases | {"replicas": (Net, {"strategy": REPLICAS, "comm_hook": "int8"})}, 2, 1)


@pytest.mark.slow
def test_a_step_with_a_loss_scale_waits_for_one_number():
    scaled = {"precision": {"name": "16-mixed", "init_scale": 16.0}}
    cases = {
        name: (make, scaled | {"strategy": name.partition(",")[0]} | arguments)
        for name, make, arguments in (
            ("ddp", Net, {}), ("ddp, fused", Fused, {}), ("ddp, clipping", Net, {"gradient_clip_val": 0.5}),
            ("ddp, int8", Net, {"comm_hook": "int8"}), ("ddp, topk", Fused, {"comm_hook": "topk"}),
            ("fsdp", Net, {}), ("ddp_sharded", Net, {}),
        )
    }  # fmt: skip
    _check({"single_device": (Net, scaled | {"strategy": "single_device"})}, 1, 1)
    _check(cases, 2, 1)


def test_ddp_leaves_batches_to_the_run_on_a_gpu(monkeypatch):
    """With device_ids torch walks and rebuilds each batch, which is on the device already."""
    options = {}

    class Replica(nn.Module):
        def __init__(self, module, _run, **given):
            super().__init__()
            self.bucket_reducer = None
            options.update(given)

    monkeypatch.setattr(stratagem_ddp.strategy, "_Replica", Replica)
    module = nn.Linear(1, 1)
    module.to = lambda device: module
    run = types.SimpleNamespace(
        device=torch.device("cuda", 0), stage="train", manual=False, plugins_of=lambda kind: [],
        peers=types.SimpleNamespace(group=None), collectives=types.SimpleNamespace(traffic=None),
        environment=types.SimpleNamespace(simulated=False),
    )  # fmt: skip
    stratagem_ddp.DDPStrategy().wrap_model(module=module, run=run)

    assert options.get("device_ids") is None
    assert options["bucket_cap_mb"] == 25.0


class _OnCUDA(torch.Tensor):
    device = torch.device("cuda", 0)


@pytest.mark.parametrize(("backend", "waits"), [("gloo", True), ("nccl", False)])
def test_a_future_of_gloo_is_done_when_the_copy_back_to_the_gpu_is(backend, waits, monkeypatch):
    """gloo only queues that copy, on a stream that its future does not tell: NCCL's future tells."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    collectives = object.__new__(TorchCollectives)
    collectives._backends = {"cpu": "gloo", "cuda": backend}
    done = torch.futures.Future()
    done.set_result(None)
    received = torch.ones(2).as_subclass(_OnCUDA)

    assert collectives._settled(done, received) is received
    assert waited == ([torch.device("cuda", 0)] if waits else [])
    collectives._settled(done, torch.ones(2))
    assert len(waited) == waits
