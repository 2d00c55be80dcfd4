"""The state of models whose tensors are on other stages, cut over ranks, or both: by hand, without training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import stratagem as sg
from stratagem.api.named_state import logical_optimizer_state
from stratagem.errors import CheckpointError
from stratagem_sharding.shards import shard_like
from stratagem_testing import run_in_processes
from stratagem_trainer.checkpoint_files import read_any

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
FORMATS = {"full": "a.ckpt", "sharded": "b.ckpt", "safetensors": "c.safetensors", "dcp": "d.dcp"}
#: Sizes of a run, by the number of its processes.
SIZES = {
    2: [{"pipeline": 2}, {"tensor": 2}, {"replicate": 2}],
    4: [
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "replicate": 2},
        {"replicate": 2, "tensor": 2},
        {"pipeline": 4},
        {"shard": 2, "tensor": 2},
        {"pipeline": 2, "shard": 2},
    ],
}


class Model(nn.Module):
    """The last layer has the weight of the first, and rows do not divide."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(5, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 5)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            for tensor in (*self.parameters(), self.norm.running_mean, self.norm.running_var):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))


#: The stage of each part, of two and of four; the first and the last hold the tied weight.
STAGES = {
    2: {"layers.0": [0], "layers.1": [0], "layers.2": [1], "norm": [1], "head": [1], "embedding": [0, 1]},
    4: {"layers.0": [0], "layers.1": [1], "layers.2": [2], "norm": [3], "head": [3], "embedding": [0, 3]},
}
CUTS = {"layers.0.weight": Shard(0), "layers.0.bias": Shard(0), "layers.1.weight": Shard(1), "embedding.weight": Shard(0),
        "head.bias": Shard(0), "layers.2.weight": Shard(0), "layers.2.bias": Replicate()}  # fmt: skip


def optimizer_of(model, kind):
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": weights}, {"params": biases, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-3) if kind == "adam" else torch.optim.SGD(groups, lr=1e-3, momentum=0.9)


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if not parameter.is_meta:
            parameter.grad = shard_as(gradient, parameter)
    optimizer.step()


def shard_as(value, like):
    return shard_like(value, like)


def cut(model, run):
    """Leave this rank what it holds, as a strategy would."""
    mesh, devices = run.mesh, run.strategy._device_mesh
    size, stage = mesh.size("pipeline"), mesh.position("pipeline")
    known = {}
    for prefix, part in model.named_modules():
        stages = STAGES[size][prefix.removesuffix(".")] if size > 1 and prefix in STAGES[size] else None
        for owned in (part._parameters, part._buffers):
            for name, tensor in owned.items():
                if tensor is None:
                    continue
                if stages is not None and prefix == "head" and name == "weight":
                    stages = STAGES[size]["embedding"]
                if id(tensor) not in known:
                    known[id(tensor)] = placed(
                        tensor, f"{prefix}.{name}", stages is None or stage in stages, mesh, devices
                    )
                owned[name] = known[id(tensor)]
    if mesh.size("shard") > 1:
        absent = {parameter for parameter in model.parameters() if parameter.is_meta}
        fully_shard(model, mesh=devices["shard"], ignored_params=absent)
    run.model = model
    return model


def placed(tensor, name, is_here, mesh, devices):
    value = tensor.detach()
    if not is_here:
        value = value.to("meta")
    elif mesh.size("tensor") > 1 and name in CUTS:
        value = distribute_tensor(value, devices["tensor"], [CUTS[name]], src_data_rank=None)
    return nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value


def plain(kind):
    model = Model(seed=1)
    optimizer = optimizer_of(model, kind)
    step(model, optimizer, seed=2)
    return model, optimizer


def _connected(sizes, checkpoint, world_size):
    strategy = {"name": "parallel", **sizes}
    run = sg.Trainer(strategy=strategy, checkpoint=checkpoint, devices=world_size, **QUIET).run
    run.connect()
    return run


def _save(rank, world_size, folder, kind, checkpoints):
    for number, sizes in enumerate(SIZES[world_size]):
        for checkpoint in checkpoints:
            run = _connected(sizes, checkpoint, world_size)
            model = cut(Model(seed=1), run)
            optimizer = optimizer_of(model, kind)
            step(model, optimizer, seed=2)
            state = {
                "state_dict": run.ask("model_state", module=model),
                "optimizers": [run.ask("optimizer_state", optimizer=optimizer, module=model)],
            }
            run.ask("save_checkpoint", state=state, path=folder / f"{world_size}-{number}-{FORMATS[checkpoint]}")
            run.close()


def _same(found, expected):
    """Return whether tensors are equal but for the rounding of parts: the last numbers of one may be computed apart."""
    return (
        found.shape == expected.shape and found.dtype == expected.dtype and torch.allclose(found, expected, 1e-6, 1e-7)
    )


def differences(found, expected):
    weights, state = found["state_dict"], found["optimizers"][0]
    model, optimizer = expected
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if list(weights) != list(model.state_dict()):
        yield f"names: {list(weights)}"
    for name, tensor in model.state_dict().items():
        if not _same(weights[name], tensor):
            yield f"{name}: {weights[name]}"
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    if list(state["state"]) != order:
        yield f"optimizer has {list(state['state'])}"
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            if not _same(state["state"][names[id(parameter)]][key], value):
                yield f"{names[id(parameter)]}: {key} is {state['state'][names[id(parameter)]][key]} and not {value}"


@pytest.mark.every_push("sgd-2")
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_every_format_has_the_whole_model(kind, world_size, tmp_path):
    run_in_processes(_save, world_size, tmp_path, kind, list(FORMATS), limit_s=360)
    paths = sorted(tmp_path.iterdir())
    saved = [path for path in paths if path.name.endswith(tuple(FORMATS.values()))]
    assert len(saved) == len(SIZES[world_size]) * len(FORMATS)
    for path in saved:
        assert list(differences(read_any(path), plain(kind))) == [], path.name


def _load(rank, world_size, path, kind):
    """Load `path` under all layouts, and return what each rank then has of the whole."""
    wrong = []
    for sizes in SIZES[world_size]:
        run = _connected(sizes, "full", world_size)
        model = cut(Model(seed=3), run)
        optimizer = optimizer_of(model, kind)
        state = run.ask("load_checkpoint", path=path)
        run.ask("load_model_state", state=state["state_dict"], module=model, strict=True)
        run.ask("load_optimizer_state", state=state["optimizers"][0], optimizer=optimizer, module=model)
        for name, entry in optimizer.state.items():
            assert not name.is_meta
            assert entry
        step(model, optimizer, seed=5)
        with run.gathered_state():
            state = {
                "state_dict": run.ask("model_state", module=model),
                "optimizers": [run.ask("optimizer_state", optimizer=optimizer, module=model)],
            }
        expected = plain(kind)
        step(*expected, seed=5)
        wrong += [f"{sizes}: {each}" for each in differences(state, expected)]
        run.close()
    return wrong


@pytest.mark.every_push("sgd-2")
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_every_rank_takes_its_part_and_trains_on(kind, world_size, tmp_path):
    model, optimizer = plain(kind)
    torch.save(
        {"state_dict": model.state_dict(), "optimizers": [logical_optimizer_state(optimizer, model)]},
        tmp_path / "a.ckpt",
    )
    for wrong in run_in_processes(_load, world_size, tmp_path / "a.ckpt", kind, limit_s=360):
        assert wrong == []


def _refuse(rank, world_size, change):
    run = _connected({"pipeline": 2}, "full", world_size)
    model = cut(Model(seed=3), run)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = Model(seed=1).state_dict()
    change(state)
    try:
        run.ask("load_model_state", state=state, module=model, strict=True)
    except CheckpointError as error:
        same = all(torch.equal(t, before[n]) for n, t in model.state_dict().items() if not t.is_meta)
        return str(error), same
    return None


def _lack_one(state):
    del state["layers.2.weight"]


def _other_shape(state):
    state["layers.2.weight"] = torch.zeros(5, 6)


@pytest.mark.parametrize("change", [_lack_one, _other_shape])
def test_what_does_not_fit_is_refused_on_all_stages_alike(change):
    first, second = run_in_processes(_refuse, 2, change)
    assert first == second
    assert "layers.2.weight" in first[0]
    assert first[1]
