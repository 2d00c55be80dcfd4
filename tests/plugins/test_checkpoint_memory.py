"""Loading and saving take no second copy of the state, and nothing refers to the files once a load has returned."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

import stratagem as sg
from stratagem.api.state_fit import taken_out
from stratagem.checkpoint.background_save import SingleProcessRun
from stratagem.checkpoint.tensor_memory import as_gathered, collecting
from stratagem.checkpoints import FullCheckpoint, SafetensorsCheckpoint
from stratagem.errors import CheckpointError
from stratagem_checkpoints.cpu_copies import CPUCopies
from stratagem_checkpoints.mapped_file import SEGMENT, mapped_tensors
from stratagem_testing import run_in_processes
from stratagem_trainer.checkpoint_files import read_any

ALONE = SingleProcessRun()
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
FORMATS = ("full", "safetensors", "sharded", "dcp")
#: A weight of this width takes more than 1 MB, so that it is mapped.
WIDTH = 600


class Wide(sg.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Keeps(sg.Callback):
    """Has a large tensor in its state, and keeps what it is given."""

    kept = None

    def state_dict(self):
        return {"large": torch.arange(400_000.0)}

    def load_state_dict(self, state):
        self.kept = state["large"]


def batches():
    return [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def trainer_of(checkpoint, strategy, ranks, epochs):
    return sg.Trainer(
        max_epochs=epochs, checkpoint=checkpoint, strategy=strategy, devices=ranks, callbacks=[Keeps()], **QUIET
    )


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value.to_local() if hasattr(value, "to_local") else value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


def _load_then_overwrite(rank, ranks, checkpoint, strategy, folder):
    """Save, resume, overwrite the files in place: return whether they were mapped, and whether a tensor has changed."""
    path = Path(folder) / "a.ckpt"
    first = trainer_of(checkpoint, strategy, ranks, 1)
    first.fit(Wide(), batches())
    first.save_checkpoint(path)
    seen = {}

    class Overwrites(sg.Callback):
        @sg.hookimpl(tryfirst=True)
        def on_train_start(self, trainer):
            seen["mapped"] = str(folder) in Path("/proc/self/maps").read_text()
            parts = [dict(trainer.module.state_dict()), trainer.callbacks[0].kept]
            parts += [dict(entry) for optimizer in trainer.optimizers for entry in optimizer.state.values()]
            held = [tensor for part in parts for tensor in tensors_in(part)]
            before = [tensor.clone() for tensor in held]
            trainer.run.collectives.barrier()
            if rank == 0:
                for file in [path, *path.glob("*")] if path.is_dir() else [path]:
                    if file.is_file():
                        with file.open("r+b") as opened:
                            opened.write(bytes(file.stat().st_size))
            trainer.run.collectives.barrier()
            seen["changed"] = sum(not torch.equal(*pair) for pair in zip(held, before, strict=True))
            seen["tensors"] = len(held)

    second = sg.Trainer(
        max_epochs=2, checkpoint=checkpoint, strategy=strategy, devices=ranks, callbacks=[Keeps(), Overwrites()],
        **QUIET,
    )  # fmt: skip
    second.fit(Wide(), batches(), ckpt_path=path)
    return seen


@pytest.mark.every_push("single_device-1-dcp")
@pytest.mark.parametrize("checkpoint", FORMATS)
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("single_device", 1), ("ddp", 2), ("ddp_sharded", 2), ("fsdp", 2), ("tensor", 2)]
)
def test_nothing_refers_to_the_files_after_a_load(checkpoint, strategy, ranks, tmp_path):
    if strategy == "tensor":
        strategy = {"name": "parallel", "tensor": 2, "plan": "auto"}
    for seen in run_in_processes(_load_then_overwrite, ranks, checkpoint, strategy, str(tmp_path)):
        assert seen["tensors"] >= 5
        assert not seen["mapped"]
        assert not seen["changed"]


def _peak_of_load(rank, ranks, checkpoint, folder, layers, width):
    """Return the peak above what the loaded state takes, and the size of the weights, in MB."""
    path = Path(folder) / "a.ckpt"
    for stepped in (True, False):
        run = sg.Run(accelerator="cpu", checkpoint=checkpoint)
        run.connect()
        module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        model, optimizer = run.setup(module, torch.optim.AdamW(module.parameters()))
        if stepped:
            run.backward(model(torch.randn(2, width)).sum())
            run.optimizer_step(optimizer)
            optimizer.zero_grad()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        (run.save if stepped else run.load)(path, model=model, optimizer=optimizer)
        if stepped:
            of_save = resident("VmHWM") - before
            del run, module, model, optimizer
    weights = sum(parameter.numel() * 4 for parameter in module.parameters()) / 1e6
    return of_save, resident("VmHWM") - before - 2 * weights, weights


def resident(name):
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) / 1000


@pytest.mark.every_push("dcp")
@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", FORMATS)
def test_memory_of_saving_and_loading(checkpoint, tmp_path):
    [(of_save, of_load, weights)] = run_in_processes(_peak_of_load, 1, checkpoint, str(tmp_path), 20, 1500)
    assert weights > 170
    assert of_save < 0.2 * weights
    # Of torch.load and load_state_dict: the weights once more. Tensors in torch's DCP files cannot always be mapped.
    assert of_load < (1.1 if checkpoint == "dcp" else 0.6) * weights


def _peak_of_gathering(rank, ranks, checkpoint, strategy, folder):
    """Return the peak of a save of a state that is divided over the ranks, above what a rank has of it, in MB."""
    run = sg.Run(
        accelerator="cpu", checkpoint={"name": checkpoint, "async_save": True}, strategy=strategy, devices=ranks
    )
    run.connect()
    module = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(20)))
    model, optimizer = run.setup(module, torch.optim.AdamW(module.parameters()))
    run.backward(model(torch.randn(2, 1500)).sum())
    run.optimizer_step(optimizer)
    optimizer.zero_grad()
    run.collectives.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run.save(Path(folder) / "a.ckpt", model=model, optimizer=optimizer)
    peak = resident("VmHWM") - before
    run.saver.wait()
    run.collectives.barrier()
    return peak


@pytest.mark.sweep(guard="tests/plugins/test_checkpoint_memory.py::test_memory_of_saving_and_loading")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
@pytest.mark.parametrize("checkpoint", ["full", "safetensors"])
def test_a_background_save_does_not_copy_what_was_gathered_for_it(checkpoint, strategy, tmp_path):
    if strategy == "tensor":
        strategy = {"name": "parallel", "tensor": 2, "plan": "auto"}
    writes, other = run_in_processes(_peak_of_gathering, 2, checkpoint, strategy, str(tmp_path))
    state = 20 * (1500 * 1500 + 1500) * 4 * 3 / 1e6
    assert 0.9 * state < writes < 1.3 * state
    assert other < 0.2 * state


def _gathered_twice(rank, ranks, checkpoint, folder):
    """Save in the background what was gathered before, and change it while that is written."""
    run = sg.Run(accelerator="cpu", checkpoint={"name": checkpoint, "async_save": True}, strategy="fsdp", devices=ranks)
    run.connect()
    model, optimizer = run.setup(module := nn.Linear(WIDTH, WIDTH), torch.optim.SGD(module.parameters()))
    own = run.ask("model_state", module=model.module)
    wanted = {name: tensor.clone() for name, tensor in own.items() if not tensor.is_meta}
    go_on = threading.Event()
    from stratagem_checkpoints import engine as written_with

    plain = written_with.publish_file
    written_with.publish_file = lambda *arguments: go_on.wait(60) and plain(*arguments)
    run.save(Path(folder) / "a.ckpt", model=model, optimizer=optimizer, own=own)
    for tensor in own.values():
        tensor.zero_()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.zero_()
    go_on.set()
    run.saver.wait()
    run.collectives.barrier()
    return wanted


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["full", "safetensors"])
def test_what_others_gathered_is_copied_before_a_background_save(checkpoint, tmp_path):
    wanted, _ = run_in_processes(_gathered_twice, 2, checkpoint, str(tmp_path))
    saved = read_any(tmp_path / "a.ckpt")
    assert set(wanted) == {"weight", "bias"}
    for name, tensor in wanted.items():
        assert torch.equal(saved["values"]["own"][name], tensor)
        assert torch.equal(saved["state_dict"][name], tensor)


def test_a_callback_may_keep_the_checkpoint_that_it_is_given(tmp_path):
    class KeepsAll(sg.Callback):
        @sg.hookimpl
        def on_load_checkpoint(self, checkpoint):
            self.checkpoint = checkpoint

    keeps = KeepsAll()
    first = trainer_of("full", "single_device", 1, 1)
    first.fit(Wide(), batches())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = sg.Trainer(max_epochs=2, callbacks=[Keeps(), keeps], **QUIET)
    second.fit(Wide(), batches(), ckpt_path=tmp_path / "a.ckpt")

    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert torch.equal(keeps.checkpoint["state_dict"]["layers.0.weight"], saved["state_dict"]["layers.0.weight"])
    [entry] = keeps.checkpoint["optimizers"]
    assert torch.equal(
        entry["state"]["layers.0.weight"]["exp_avg"], saved["optimizers"][0]["state"]["layers.0.weight"]["exp_avg"]
    )


# --- Files of torch.save -----------------------------------------------------------------------------------------


def full(path):
    return FullCheckpoint().load_checkpoint(path, ALONE)


def large(value):
    return torch.full((WIDTH, WIDTH), float(value))


def test_files_that_cannot_be_mapped_are_read(tmp_path):
    old, packed = tmp_path / "old.pt", tmp_path / "packed.pt"
    torch.save({"state_dict": {"a": large(1)}}, old, _use_new_zipfile_serialization=False)
    assert torch.equal(full(old)["state_dict"]["a"], large(1))
    torch.save({"state_dict": {"a": large(2), "b": torch.ones(3)}}, packed)
    with_other_numbers(packed)
    assert torch.equal(full(packed)["state_dict"]["a"], large(2))
    assert torch.equal(full(packed)["state_dict"]["b"], torch.ones(3))


def with_other_numbers(path):
    """Write the file at `path` again with the numbers of two storages exchanged, as another program might."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(records)).split("/")[0]
    pickled = records[f"{root}/data.pkl"]
    one, other = b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001"
    assert pickled.count(one) == pickled.count(other) == 1
    records[f"{root}/data.pkl"] = pickled.replace(one, b"?").replace(other, one).replace(b"?", other)
    zero, first = f"{root}/data/0", f"{root}/data/1"
    records[zero], records[first] = records[first], records[zero]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def test_tensors_that_share_memory_still_share_it(tmp_path):
    whole = torch.arange(WIDTH * WIDTH * 1.0)
    torch.save({"state_dict": {"a": whole, "b": whole[7:], "c": whole.view(WIDTH, WIDTH).T}}, tmp_path / "a.pt")
    state = full(tmp_path / "a.pt")["state_dict"]

    assert torch.equal(state["c"], whole.view(WIDTH, WIDTH).T)
    state["a"][10] = -1
    assert state["b"][3] == -1
    assert torch.load(tmp_path / "a.pt")["state_dict"]["a"][10] == 10


# --- Safetensors -------------------------------------------------------------------------------------------------


def example():
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn)
    return {
        **{f"of.{dtype}": (torch.randn(3, 5, generator=generator) * 3).to(dtype) for dtype in dtypes},
        "across": torch.randn(4, 6, generator=generator).T, "number": torch.tensor(2.5), "none": torch.empty(0, 3),
        "half bytes": torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "é": torch.ones(1),
    }  # fmt: skip


def test_the_safetensors_library_reads_the_file(tmp_path):
    path, tensors = tmp_path / "a.safetensors", example()
    SafetensorsCheckpoint().save_checkpoint({"state_dict": tensors}, path, ALONE)
    theirs = save({name: tensor.contiguous() for name, tensor in tensors.items()})

    back = load_file(path)
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(back[name]) == bytes_of(tensor)
    header = header_of(path.read_bytes())
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {
        name: (entry["dtype"], entry["shape"]) for name, entry in header_of(theirs).items()
    }
    # Any reader may view a tensor in place: offsets are multiples of the size of an element.
    assert all(entry["data_offsets"][0] % tensors[name].dtype.itemsize == 0 for name, entry in header.items())
    assert len(path.read_bytes()[8:]) % 8 == len(theirs[8:]) % 8


def bytes_of(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def header_of(content):
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header.pop("__metadata__", None)
    return header


def test_a_dtype_that_the_format_lacks_is_refused_before_a_file_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"dtype torch.complex128; expected a dtype of the safetensors format"):
        SafetensorsCheckpoint().save_checkpoint(
            {"state_dict": {"w": torch.ones(2, dtype=torch.complex128)}}, tmp_path / "a", ALONE
        )
    assert os.listdir(tmp_path) == []


# --- DCP ---------------------------------------------------------------------------------------------------------


def shards():
    """Return tensors of more than 1 MB, as two ranks hold them: by rows, by columns, whole, strided, of unequal rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    numbers = torch.arange(700.0 * 701).view(700, 701)
    cuts = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}
    state = {name: distribute_tensor(numbers + at, mesh, [cut]) for at, (name, cut) in enumerate(cuts.items())}
    state["unequal rows"] = distribute_tensor(numbers.T.contiguous().to(torch.float64), mesh, [Shard(0)])
    return state | {"whole": numbers * 2, "strided": numbers.T, "view": torch.cat([numbers, numbers])[3:703]}


def _save_and_read_shards(rank, ranks, path):
    import tempfile

    from stratagem.runtime.state_io import read_checkpoint

    folder = Path(path).parent
    tempfile.tempdir = str(folder)

    run = sg.Run(accelerator="cpu", strategy="ddp", devices=ranks, checkpoint="dcp")
    run.connect()
    wanted = shards()
    run.ask("save_checkpoint", state={"state_dict": wanted}, path=Path(path))
    state = read_checkpoint(run, Path(path))["state_dict"]
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in wanted.items()}
    run.collectives.barrier()
    left = list(folder.glob("stratagem-*.bin"))
    return [name for name in whole if not torch.equal(whole[name], state[name])], left, list(state), whole


@pytest.mark.slow
def test_shards_are_read_by_two_processes_and_by_one(tmp_path):
    from stratagem_trainer.checkpoint_files import read_any

    results = run_in_processes(_save_and_read_shards, 2, str(tmp_path / "a.dcp"))
    for differing, left, names, _ in results:
        assert not differing
        assert not left
        assert len(names) == 7
    whole = results[0][3]
    alone = read_any(tmp_path / "a.dcp")["state_dict"]
    assert [name for name in whole if not torch.equal(whole[name], alone[name])] == []


# --- Mapped files ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parts_of_a_file_are_mapped_and_released(tmp_path):
    path, size = tmp_path / "numbers", 3 * SEGMENT
    numbers = torch.arange(size // 4, dtype=torch.int32)
    path.write_bytes(numbers.numpy().tobytes())
    count = (40 << 20) // 4
    entries = [(4 * count * number, torch.int32, (count,)) for number in (3, 0, 2, 1)]
    entries += [
        (12, torch.int32, (2, 3)),
        (13, torch.uint8, ()),
        (0, torch.int64, (0, 4)),
        (4, torch.int64, (1 << 18,)),
    ]
    tensors = mapped_tensors(path, entries)

    for tensor, (offset, dtype, shape) in zip(tensors, entries, strict=True):
        wanted = numbers.view(torch.uint8)[offset : offset + tensor.numel() * dtype.itemsize].clone()
        assert tuple(tensor.shape) == tuple(shape)
        assert torch.equal(tensor.contiguous().view(-1).view(torch.uint8), wanted) or not tensor.numel()
    tensors[0].fill_(-1)
    assert torch.equal(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int32), numbers)
    before = resident("VmRSS")
    for _, tensor in taken_out(dict(enumerate(tensors))):
        tensor.sum()
    del tensors, tensor
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert resident("VmRSS") < before + 50


@pytest.mark.parametrize("entry", [(-4, torch.int32, (1,)), (4, torch.int32, (4,)), (400, torch.int32, (1,))])
def test_a_part_outside_the_file_is_refused(entry, tmp_path):
    (tmp_path / "file").write_bytes(bytes(16))
    with pytest.raises(ValueError, match="are not within"):
        mapped_tensors(tmp_path / "file", [entry])


# --- Copies ------------------------------------------------------------------------------------------------------


def test_what_a_rank_trains_is_copied_even_if_it_was_returned_as_gathered():
    trained, gathered, copies = torch.ones(3, 2), torch.ones(3, 2), CPUCopies()
    with collecting():
        as_gathered(trained, trained[1:])
        as_gathered(gathered, trained)

    assert copies.take(trained).data_ptr() != trained.data_ptr()
    assert copies.take(gathered.detach().view(6)).data_ptr() == gathered.data_ptr()
    later = as_gathered(torch.ones(3))
    assert copies.take(later).data_ptr() != later.data_ptr()
