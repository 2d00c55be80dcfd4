"""What FSDP alone promises: shards, units, meshes, checkpoints that other strategies read; and what it refuses."""

from __future__ import annotations

import contextlib
import functools
import types
import typing
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, wrap
from torch.distributed.tensor import DTensor

import stratagem as sg
from garbage import still_there
from stratagem.distributed.process_group import TorchCollectives
from stratagem.errors import ConfigError
from stratagem.strategies import FSDPStrategy
from stratagem_sharding import param_groups, units
from stratagem_sharding.mesh import check_backend
from stratagem_sharding.shards import shard_like
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import outcome, share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def fit(world_size, strategy, module, batches, **arguments):
    trainer = sg.Trainer(**({"max_epochs": 1, "strategy": strategy, "devices": world_size} | QUIET | arguments))
    trainer.fit(module, share(trainer, batches))
    return trainer


# --- What is sharded ---------------------------------------------------------------------------------------------


def _held(rank, world_size, options):
    module = Net()
    trainer = fit(world_size, {"name": "fsdp", **options}, module, joined_batches(2, 24))
    parameters = sum(_local(parameter).numel() for parameter in module.parameters())
    momentum = sum(_local(state["momentum_buffer"]).numel() for state in trainer.run.optimizers[0].state.values())
    units = [name for name, part in trainer.run.model.named_modules() if type(part).__name__.startswith("FSDP")]
    return parameters, momentum, units


def _sent_and_sharded(rank, world_size):
    """Return in order what is sent from rank 0 and what is sharded, as numbers of elements."""
    events, send, shard = [], TorchCollectives.replicate, units.fully_shard

    def sent(self, tensors, src=0):
        tensors = list(tensors)
        if self._comparing is not None:  # which then sends without a comparison
            events.append(("sent", sum(tensor.numel() for tensor in tensors)))
        return send(self, tensors, src)

    def sharded(unit, **options):
        plain = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
        events.append(("sharded", sum(parameter.numel() for parameter in plain)))
        return shard(unit, **options)

    TorchCollectives.replicate, units.fully_shard = sent, sharded
    fit(world_size, {"name": "fsdp", "auto_wrap_policy": {nn.Linear}}, Net(seed=rank), joined_batches(1, 24))
    return events


@pytest.mark.slow
def test_a_unit_gets_its_values_right_before_it_is_sharded():
    """A model that is built whole in the CPU's memory need not fit into that of a device."""
    sizes = [sum(parameter.numel() for parameter in Net().net[number].parameters()) for number in (0, 2, 4)]
    for events in run_in_processes(_sent_and_sharded, 2):
        assert events == [(what, size) for size in (*sizes, 0) for what in ("sent", "sharded")]


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.slow
@pytest.mark.every_push("defaults")
@pytest.mark.parametrize(
    ("options", "share_of_all"),
    [
        ({}, 1 / 2),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, 1 / 2),
        ({"sharding_strategy": "NO_SHARD"}, 1),
    ],
    ids=["defaults", "SHARD_GRAD_OP", "NO_SHARD"],
)
def test_a_rank_holds_its_share_of_parameters_and_optimizer_state(options, share_of_all):
    whole = sum(parameter.numel() for parameter in Net().parameters())

    held = run_in_processes(_held, 2, options)

    assert sum(parameters for parameters, _, _ in held) == 2 * whole * share_of_all
    assert all(parameters == momentum for parameters, momentum, _ in held)


def _units(rank, world_size, policies):
    return [_held(rank, world_size, {"auto_wrap_policy": policy})[2] for policy in policies]


@pytest.mark.slow
def test_every_form_of_a_policy_chooses_units():
    cases = [
        ({nn.Linear}, ["", "module.net.0", "module.net.2", "module.net.4"]),
        ([nn.Sequential], ["", "module.net"]),
        (nn.Sequential, ["", "module.net"]),
        (ModuleWrapPolicy({nn.Sequential}), ["", "module.net"]),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=1000), ["", "module.net.2"]),
        ("blocks", [""]),  # it has no repeated layers, and is small
        (None, [""]),
    ]
    for found in run_in_processes(_units, 2, [policy for policy, _ in cases]):
        assert found == [names for _, names in cases]


def test_size_decides_where_blocks_finds_no_repeated_layers():
    with torch.device("meta"):
        table, large = nn.Embedding(1000, 10), nn.Sequential(nn.Linear(10**4, 10**4), nn.Tanh(), nn.Linear(10**4, 1))
        model = nn.ModuleDict({"table": table, "large": large})

    assert units.units_of(model, "blocks", "auto_wrap_policy") == [large[0]]


# --- Precision ---------------------------------------------------------------------------------------------------


class WrapsByHand(Net):
    """Names its units itself, in configure_model."""

    def __init__(self, **overrides):
        super().__init__()
        self.net, self.overrides = None, overrides

    def configure_model(self):
        if self.net is None:
            layers = [wrap(nn.Linear(16, 32), **self.overrides), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()]
            self.net = nn.Sequential(*layers, wrap(nn.Linear(32, 1)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=5e-3, momentum=0.9)


def _wrapped_by_hand(rank, world_size, strategy, batches, path):
    trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, **QUIET)
    trainer.fit(WrapsByHand(), share(trainer, batches), ckpt_path=path)
    units = [name for name, part in trainer.run.model.named_modules() if type(part).__name__.startswith("FSDP")]
    return units, weights_of(trainer)


@pytest.mark.slow
@pytest.mark.every_push("policy")
@pytest.mark.parametrize(
    ("policy", "units"),
    [(None, ["", "module.net.0", "module.net.4"]), ({nn.Linear}, ["", *(f"module.net.{i}" for i in (0, 2, 4))])],
    ids=["by hand alone", "policy"],
)
def test_units_may_be_wrapped_by_hand(policy, units, tmp_path):
    """The same call does nothing under another strategy, and the training is the same."""
    batches = joined_batches(4, 24)
    plain = WrapsByHand()
    plain.configure_model()
    torch.save({"state_dict": plain.state_dict()}, tmp_path / "x.ckpt")
    strategy = {"name": "fsdp", "auto_wrap_policy": policy}
    results = run_in_processes(_wrapped_by_hand, 2, strategy, batches, tmp_path / "x.ckpt")
    expected = run_in_processes(_wrapped_by_hand, 2, "ddp", batches, tmp_path / "x.ckpt")
    for (found, weights), (none, reference) in zip(results, expected, strict=True):
        assert (found, none) == (units, [])
        assert relative_difference(weights, reference) < 1e-6


def _overridden(rank, world_size):
    return outcome(lambda: fit(world_size, "fsdp", WrapsByHand(cpu_offload=True), joined_batches(2, 24)))


def test_options_of_one_unit_are_refused():
    for said in run_in_processes(_overridden, 2):
        assert said.startswith("refused: wrap got cpu_offload=True; expected the module alone; set options on"), said


@pytest.mark.parametrize(("device", "pins"), [("cpu", False), ("cuda", True)])
def test_offloaded_shards_are_pinned_for_a_gpu_that_the_run_uses(monkeypatch, device, pins):
    """Pinning memory starts CUDA: a run on the CPU must not, whatever the machine has."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device == "cpu")
    strategy = FSDPStrategy(cpu_offload=True)
    strategy._device_mesh = None
    options = strategy._options(
        types.SimpleNamespace(stack=types.SimpleNamespace(precision_absorbed=False), device=torch.device(device))
    )

    assert options["offload_policy"].pin_memory is pins


# --- Tied parameters ---------------------------------------------------------------------------------------------


class Tied(Net):
    """Its first and its last layer share a weight, as embeddings and heads do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.net[4].weight = self.net[0].weight
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.net(x))


def _tied_refused(rank, world_size, options):
    return outcome(lambda: fit(world_size, {"name": "fsdp", **options}, Tied(), joined_batches(2, 24)))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"auto_wrap_policy": {nn.Sequential}}])
def test_tied_parameters_stay_one_within_a_unit(options):
    torch.manual_seed(0)
    batches = joined_batches(4, 24)
    model = Tied()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    results = run_in_processes(_tied_from, 2, options, state, batches)
    model.load_state_dict(state)
    reference, _ = train_module_plainly(model, batches)
    for weights in results:
        assert torch.equal(weights["net.0.weight"], weights["net.4.weight"])
        assert relative_difference(weights, reference) < 1e-6


def _tied_from(rank, world_size, options, state, batches):
    model = Tied()
    model.load_state_dict(state)
    return weights_of(fit(world_size, {"name": "fsdp", **options}, model, batches))


def test_tied_parameters_in_two_units_are_refused_by_name():
    for said in run_in_processes(_tied_refused, 2, {"auto_wrap_policy": {nn.Linear}}):
        assert said.startswith(
            "refused: 'net.0.weight' and 'net.4.weight' are one parameter in two units, 'net.0' and 'net.4'; "
            "expected tied parameters within one unit"
        ), said


# --- State -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.every_push("sharded-True")
@pytest.mark.parametrize(("kind", "folder"), [("full", False), ("sharded", True), (None, False)])
def test_state_dict_type_chooses_the_form_of_checkpoints(tmp_path, kind, folder):
    strategy = {"name": "fsdp", "state_dict_type": kind}
    run_in_processes(_write, 2, strategy, joined_batches(2, 24), tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").is_dir() is folder


def test_state_dict_type_and_another_format_contradict_each_other():
    with pytest.raises(
        ConfigError, match="checkpoint 'full' was chosen and strategy 'fsdp' needs the checkpoint 'sharded'"
    ):
        sg.Trainer(strategy={"name": "fsdp", "state_dict_type": "sharded"}, checkpoint="full", **QUIET)


def _ranks_that_hold_the_whole(rank, world_size, strategy, checkpoint):
    """Return for each tensor handed to the checkpoint format whether it has values on this rank."""
    given = {}

    class Looks(sg.Callback):
        @sg.hookimpl
        def on_save_checkpoint(self, checkpoint):
            given["model"] = [value.is_meta for value in checkpoint["state_dict"].values()]
            entries = checkpoint["optimizers"][0]["state"].values()
            given["optimizer"] = [v.is_meta for entry in entries for v in entry.values() if v.numel() > 64]

    trainer = fit(world_size, strategy, Net(), joined_batches(2, 24), callbacks=[Looks()], checkpoint=checkpoint)
    trainer.save_checkpoint(f"{checkpoint}.ckpt")
    return given


@pytest.mark.slow
@pytest.mark.every_push("ddp_sharded")
@pytest.mark.parametrize("strategy", ["fsdp", "ddp_sharded"])
def test_only_the_rank_that_writes_holds_the_whole_state(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = run_in_processes(_ranks_that_hold_the_whole, 2, strategy, "full")
    assert not any(first["model"] + first["optimizer"])
    assert all(second["optimizer"])
    first, second = run_in_processes(_ranks_that_hold_the_whole, 2, strategy, "sharded")
    owned = [one != other for one, other in zip(first["optimizer"], second["optimizer"], strict=True)]
    assert all(owned) if strategy == "ddp_sharded" else not any(first["optimizer"] + second["optimizer"])


# --- What it computes in -----------------------------------------------------------------------------------------


class Looks(Net):
    def __init__(self):
        super().__init__()
        self.seen = set()
        self.net[2].register_forward_pre_hook(lambda module, _: self.seen.add(module.weight.dtype))


def _dtype_gathered(rank, world_size, options, precision):
    module = Looks()
    fit(world_size, {"name": "fsdp", **options}, module, joined_batches(2, 24), precision=precision)
    return module.seen, {parameter.dtype for parameter in module.parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "precision"),
    [({}, "bf16-mixed"), ({"mixed_precision": torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16)}, None)],
)
def test_mixed_precision_gathers_in_bf16_and_keeps_fp32_shards(options, precision):
    for gathered, kept in run_in_processes(_dtype_gathered, 2, options, precision):
        assert gathered == {torch.bfloat16}
        assert kept == {torch.float32}


# --- Checkpoints between strategies ------------------------------------------------------------------------------


class Scaled(Net):
    """A parameter that is sharded, and one without dimensions, which is not."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return super().forward(x) * self.gain


class PreciseHead(Net):
    """A layer in double precision, which autocast leaves alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(1, 1).double()

    def forward(self, x):
        return self.head(super().forward(x).double()).float()


def _mixed(rank, world_size, model, options, precision):
    return weights_of(fit(world_size, {"name": "fsdp", **options}, model(), joined_batches(4, 24), precision=precision))


@pytest.mark.every_push("Scaled 16-mixed-1")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("model", "options", "precision"),
    [
        (Scaled, {}, {"name": "16-mixed", "init_scale": 4.0}),
        (PreciseHead, {"auto_wrap_policy": {nn.Linear}}, "bf16-mixed"),
        (PreciseHead, {"auto_wrap_policy": {nn.Linear}}, {"name": "16-mixed", "init_scale": 4.0}),
    ],
    ids=["Scaled 16-mixed", "PreciseHead bf16-mixed", "PreciseHead 16-mixed"],
)
def test_mixed_precision_takes_parameters_of_two_kinds(model, options, precision, world_size):
    results = run_in_processes(_mixed, world_size, model, options, precision)

    expected, norms = train_module_plainly(model(), joined_batches(4, 24))
    assert max(norms) > 1
    for weights in results:
        assert relative_difference(weights, expected) < 0.05


def _write(rank, world_size, strategy, batches, path):
    fit(world_size, strategy, Net(), batches).save_checkpoint(path)


def _read(rank, world_size, strategy, batches, path):
    trainer = sg.Trainer(max_epochs=2, strategy=strategy, devices=world_size, **QUIET)
    trainer.fit(Net(seed=3), share(trainer, batches), ckpt_path=path)
    return weights_of(trainer)


@pytest.mark.every_push("from 2 to 3-fsdp-ddp")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader"), [("fsdp", "ddp"), ("ddp", "fsdp"), ("fsdp_cpu_offload", "fsdp"), ("fsdp", "fsdp_cpu_offload")]
)
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)], ids=["from 2 to 3", "from 3 to 2"])
def test_checkpoints_move_between_strategies_and_world_sizes(tmp_path, writer, reader, sizes):
    batches = joined_batches(8, 24)
    whole, _ = train_module_plainly(Net(), batches)
    run_in_processes(_write, sizes[0], writer, batches[:4], tmp_path / "x.ckpt")

    for weights in run_in_processes(_read, sizes[1], reader, batches[4:], tmp_path / "x.ckpt"):
        assert relative_difference(weights, whole) < 1e-6


@pytest.mark.slow
def test_its_file_is_read_by_plain_torch(tmp_path):
    batches = joined_batches(4, 24)
    run_in_processes(_write, 2, "fsdp", batches, tmp_path / "x.ckpt")
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]

    assert relative_difference(state, train_module_plainly(Net(), batches)[0]) < 1e-6


# --- What it refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_all_gathers": False}, "limit_all_gathers is False; expected True"),
        ({"use_orig_params": False}, "use_orig_params is False; expected True"),
        (
            {"device_mesh": (1, 2)},
            "device_mesh is \\(1, 2\\) with sharding_strategy='FULL_SHARD'; expected HYBRID_SHARD",
        ),
        ({"sharding_strategy": "FULL"}, "strategy.fsdp.sharding_strategy is 'FULL'; expected 'FULL_SHARD' or"),
    ],
)
def test_options_without_a_meaning_are_refused_before_anything_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        sg.Trainer(strategy={"name": "fsdp", **options}, **QUIET)


def _refused(rank, world_size, options, make):
    return outcome(lambda: fit(world_size, {"name": "fsdp", **options}, make(), joined_batches(2, 24)))


class Absent(nn.Module):
    pass


@pytest.mark.every_push("policy that chooses nothing", "mesh")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_wrap_policy": {Absent}}, "auto_wrap_policy names Absent, and Net has none; .*Linear"),
        ({"activation_checkpointing_policy": {Absent}}, "activation_checkpointing_policy names Absent"),
        (
            {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=10**9)},
            "chooses no part of Net",
        ),
        ({"auto_wrap_policy": 5}, "auto_wrap_policy is 5; expected 'blocks', a set of classes"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}, "device_mesh is \\(2, 2\\) and the run has 2"),
    ],
    ids=["absent unit", "absent checkpoint", "policy that chooses nothing", "policy of another type", "mesh"],
)
def test_what_cannot_work_is_refused_on_all_ranks(options, message):
    import re

    for said in run_in_processes(_refused, 2, options, Net, limit_s=60):
        assert said.startswith("refused: "), said
        assert re.search(message, said)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])


@pytest.mark.parametrize("strategy", ["fsdp", "parallel"])
def test_blocks_may_be_named_as_such(strategy):
    options = {"name": strategy, "auto_wrap_policy": "blocks"} | ({"shard": 2} if strategy == "parallel" else {})
    run, model = sg.Run(strategy=options, devices=2, accelerator="cpu"), Blocks()

    assert units.units_of(model, run.strategy.auto_wrap_policy, "policy") == list(model.layers)


@pytest.mark.parametrize(("device", "policy"), [("cuda", None), ("cuda", "blocks"), ("cpu", None)])
def test_a_gpu_that_gathers_a_model_of_blocks_as_a_whole_is_told_of(device, policy):
    run = types.SimpleNamespace(device=torch.device(device), manual=False)
    wrap = functools.partial(units.shard_units, None, Blocks(), policy=policy, option="policy", options=None, run=run)
    told = pytest.warns(UserWarning, match="'blocks' would gather its 3 repeated layers \\(Sequential\\) one by one")

    with told if (device, policy) == ("cuda", None) else contextlib.nullcontext(), pytest.raises(TypeError):
        wrap(fill=None)  # there is no GPU: it gets no further


def test_an_instance_with_classes_travels():
    import pickle

    strategy = pickle.loads(pickle.dumps(FSDPStrategy(auto_wrap_policy={nn.Linear})))

    assert strategy.auto_wrap_policy == {nn.Linear}


def _trained_three_times(rank, world_size, batches):
    module = Net()
    fit(world_size, "fsdp", module, batches[:2])
    second = fit(world_size, "fsdp", module, batches[2:4])
    second.close()
    return weights_of(fit(world_size, "fsdp", module, batches[4:]))


@pytest.mark.slow
def test_a_module_that_an_earlier_trainer_sharded_trains_on():
    batches, plain = joined_batches(6, 24), Net()
    for part in (batches[:2], batches[2:4], batches[4:]):  # each fit begins with a new optimizer
        train_module_plainly(plain, part)

    for weights in run_in_processes(_trained_three_times, 2, batches, limit_s=90):
        assert relative_difference(weights, plain.state_dict()) < 1e-6


@pytest.mark.slow
@pytest.mark.every_push("parallel")
@pytest.mark.parametrize("strategy", ["fsdp", {"name": "parallel", "shard": 2}], ids=["fsdp", "parallel"])
def test_a_closed_run_leaves_no_process_group(strategy):
    """A process that is forked later would free it and hang: the group's threads do not exist there."""
    assert run_in_processes(_groups_that_remain, 2, strategy, limit_s=90) == [(True, 0)] * 2


def _groups_that_remain(rank, world_size, strategy):
    def train():
        trainer = fit(world_size, strategy, Net(), joined_batches(2, 24))
        trainer.fit(trainer.module, share(trainer, joined_batches(2, 24)))
        made = list(map(weakref.ref, torch.distributed.distributed_c10d._world.pg_map))
        weights_of(trainer)
        trainer.close()
        return made

    groups = train()
    return len(groups) > 1, still_there(groups)


# --- Groups and offloaded shards ---------------------------------------------------------------------------------


def _meshes_and_shards(rank, world_size):
    run = sg.Run(
        strategy={"name": "fsdp", "sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 1), "timeout": 47},
        devices=world_size, accelerator="cpu",
    )  # fmt: skip
    run.connect()
    mesh = run.stack.strategy._device_mesh
    timeouts = [
        mesh.get_group(axis)._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for axis in mesh.mesh_dim_names
    ]
    ranks = [torch.distributed.get_process_group_ranks(mesh.get_group(axis)) for axis in mesh.mesh_dim_names]
    model = torch.distributed.tensor.distribute_tensor(torch.zeros(3, 2), mesh["shard"])
    made = []
    from_local = DTensor.from_local
    DTensor.from_local = lambda *_, **__: made.append("moved to the mesh's device")
    like = shard_like(torch.arange(6, dtype=torch.bfloat16).view(3, 2), model)
    DTensor.from_local = from_local
    run.close()
    return timeouts, ranks, made, like.to_local().tolist(), str(like.dtype)


def test_the_groups_of_several_axes_have_the_runs_timeout_and_shards_stay_where_they_are():
    for rank, found in enumerate(run_in_processes(_meshes_and_shards, 2)):
        timeouts, ranks, made, values, dtype = found
        assert timeouts == [47.0, 47.0]
        assert ranks == [[0, 1], [rank]]
        assert made == []
        assert (values, dtype) == ([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], "torch.bfloat16")


def test_offload_over_a_group_of_the_users_without_a_cpu_backend_is_refused(monkeypatch):
    monkeypatch.setattr(TorchCollectives, "connect", lambda *_, **__: None)
    monkeypatch.setattr("stratagem_fsdp.strategy.backends_of", lambda group: {"cuda": "nccl"})
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "nccl")
    run = sg.Run(strategy="fsdp_cpu_offload", accelerator="cpu", devices=1)

    with pytest.raises(ConfigError, match="cpu_offload is True and the process group's backend is 'nccl'"):
        run.connect()


# --- Streams -----------------------------------------------------------------------------------------------------


class _Unit(FSDPModule):
    """Stands for a unit on a GPU: keeps the hook that FSDP calls on the stream of its all-reduce."""

    def __init__(self):
        self.set_all_reduce_hook = lambda hook: setattr(self, "hook", hook)
        parameter = types.SimpleNamespace(
            sharded_param=nn.Parameter(torch.ones(3)), padded_sharded_param_size=torch.Size([3])
        )
        group = types.SimpleNamespace(fsdp_params=[parameter])
        self._get_fsdp_state = lambda: types.SimpleNamespace(_fsdp_param_groups=[group])

    def __new__(cls):
        return object.__new__(cls)


class _OnCUDA(torch.Tensor):
    """Records the streams that its memory is kept for."""

    streams: typing.ClassVar = []
    device = torch.device("cuda", 0)

    def record_stream(self, stream):
        self.streams.append(stream)


def test_the_memory_that_a_comm_hook_reduces_is_kept_for_the_stream_it_runs_on(monkeypatch):
    """It was made on another stream, which would hand it to the next unit meanwhile."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: f"all-reduce stream of {device}")
    average = torch.futures.Future()
    average.set_result(torch.full((3,), 5.0))
    unit, reduced = _Unit(), torch.ones(3).as_subclass(_OnCUDA)
    param_groups.send_through_hooks([unit], lambda bucket: average)
    unit.hook(reduced)

    assert reduced.tolist() == [5.0] * 3
    assert _OnCUDA.streams == ["all-reduce stream of cuda:0"]


def test_a_tensor_on_the_cpu_needs_no_stream(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_stream", None)
    param_groups.keep_for_this_stream(torch.ones(3))


@pytest.mark.parametrize(("backends", "refused"), [("gloo", True), ("cpu:gloo,cuda:nccl", False)])
def test_gloo_does_not_gather_shards_on_a_gpu(monkeypatch, backends, refused):
    """Its gathers of DTensors end the process with a segmentation fault."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    with pytest.raises(ConfigError, match="backend there is gloo") if refused else contextlib.nullcontext():
        check_backend(torch.device("cuda", 0))
    check_backend(torch.device("cpu"))
