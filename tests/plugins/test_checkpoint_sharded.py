"""A sharded checkpoint: written in parts by all ranks, read in any layout, whole at every moment."""

from __future__ import annotations

import json
import pickle
import random

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.checkpoint.rank_rows import ranks_in
from stratagem.checkpoints import ShardedCheckpoint
from stratagem.cli import main
from stratagem.distributed.process_group import TorchCollectives
from stratagem.errors import CheckpointError, StratagemError
from stratagem.runtime.state_io import read_checkpoint
from stratagem.stack.formats import format_named
from stratagem_checkpoints import shards
from stratagem_checkpoints.shards.manifests import encoded
from stratagem_checkpoints.shards.plan import Plan, pieces
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    Net,
    Scheduled,
    joined_batches,
    net,
    relative_difference,
    train_module_plainly,
)
from stratagem_testing.training import outcome, share, weights_of
from stratagem_trainer.checkpoint_files import read_any

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def _write(rank, world_size, strategy, checkpoint, batches, path):
    trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, checkpoint=checkpoint, **QUIET)
    trainer.fit(Scheduled(), share(trainer, batches))
    trainer.save_checkpoint(path)


class Wide(Net):
    """Its weights are larger than what one rank writes alone."""

    def __init__(self, seed=0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 30_000), nn.Tanh(), nn.Linear(30_000, 16), nn.Tanh(), nn.Linear(16, 1))


def _sizes_written(rank, world_size, strategy, path):
    sizes, plain = [], shards.pieces

    def counting(plan):
        for offset, content in plain(plan):
            sizes.append(len(content))
            yield offset, content

    shards.pieces = counting
    trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, checkpoint="sharded", **QUIET)
    trainer.fit(Wide(), share(trainer, joined_batches(2, 24)))
    trainer.save_checkpoint(path)
    return sum(sizes)


class Normalized(Net):
    """Each rank has statistics of its own."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))


def _statistics(rank, world_size, checkpoint, path):
    trainer = sg.Trainer(max_epochs=1, strategy="fsdp", devices=world_size, checkpoint=checkpoint, **QUIET)
    trainer.fit(Normalized(), share(trainer, joined_batches(2, 24)))
    trainer.save_checkpoint(path)
    return {name: value.clone() for name, value in trainer.module.named_buffers()}


@pytest.mark.slow
@pytest.mark.every_push("sharded")
@pytest.mark.parametrize("checkpoint", ["sharded", "full", "dcp"])
def test_what_differs_between_ranks_is_rank_0s(checkpoint, tmp_path):
    first, second = run_in_processes(_statistics, 2, checkpoint, tmp_path / "x.ckpt")
    saved = read_any(tmp_path / "x.ckpt")["state_dict"]
    assert not torch.equal(first["net.1.running_mean"], second["net.1.running_mean"])
    assert all(torch.equal(saved[name], value) for name, value in first.items())


@pytest.mark.slow
@pytest.mark.every_push("ddp_sharded")
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded", "fsdp"])
def test_each_rank_writes_its_part_and_all_of_it_once(strategy, tmp_path):
    first, second = run_in_processes(_sizes_written, 2, strategy, tmp_path / "x.ckpt")
    pieces = json.loads((tmp_path / "x.ckpt" / "manifest.json").read_text().splitlines()[0])["pieces"]

    assert first + second == sum(piece["bytes"] for piece in pieces)
    assert 0.4 < first / (first + second) < 0.6


class Marked(sg.Callback):
    """Has a state that differs between ranks, as a plugin has that keeps what each rank has left out."""

    def __init__(self, of_rank=lambda rank: rank):
        self.of_rank = of_rank

    def rank_state(self, run):
        return {"rank": self.of_rank(run.rank), "sizes": (run.rank, torch.float32)}

    def load_rank_states(self, states, run):
        self.loaded = states


def _save_marked(rank, world_size, checkpoint, path):
    """Save; return the random state of this rank, and the sizes of the objects that it sends meanwhile."""
    mark = Marked()
    trainer = sg.Trainer(
        max_epochs=1, strategy="ddp", devices=world_size, checkpoint=checkpoint, callbacks=[mark], **QUIET
    )
    trainer.fit(Scheduled(), share(trainer, joined_batches(2, 24)))
    sizes, plain = [], TorchCollectives.all_gather_object

    def measured(self, value):
        sizes.append(len(pickle.dumps(value)))
        return plain(self, value)

    torch.manual_seed(rank)
    TorchCollectives.all_gather_object = measured
    try:
        trainer.save_checkpoint(path)
    finally:
        TorchCollectives.all_gather_object = plain
    trainer.fit(Scheduled(), share(trainer, joined_batches(2, 24)), ckpt_path=path)
    return torch.get_rng_state(), max(sizes), mark.loaded


@pytest.mark.slow
@pytest.mark.every_push("sharded")
@pytest.mark.parametrize("checkpoint", ["sharded", "dcp"])
def test_a_rank_writes_its_own_state_and_sends_it_to_no_other(checkpoint, tmp_path):
    results = run_in_processes(_save_marked, 3, checkpoint, tmp_path / "x.ckpt")
    ranks = ranks_in(read_any(tmp_path / "x.ckpt"), tmp_path)
    assert len(ranks) == 3
    for number, (state, largest, loaded) in enumerate(results):
        assert torch.equal(ranks[number]["random"]["torch"], state)
        assert largest < 1000 < state.numel()
        assert loaded == [{"rank": rank, "sizes": (rank, torch.float32)} for rank in range(3)]


def _fitted(world_size, of_rank):
    options = QUIET | {"max_epochs": 1, "callbacks": [Marked(of_rank)], "checkpoint": "sharded"}
    trainer = sg.Trainer(strategy="ddp", devices=world_size, **options)
    trainer.fit(Scheduled(), share(trainer, joined_batches(2, 24)))
    return trainer


def _failing(rank):
    raise ArithmeticError("not today")


#: What rank 1 has, and what all are told.
UNSAVABLE = {
    r"ranks\[1\]\.plugins.*is a object; expected tensors, numbers": lambda rank: object() if rank else None,
    r"ranks\[1\] cannot be saved \(NotImplementedError": lambda rank: torch.empty(2, device="meta" if rank else "cpu"),
    r"ranks\[1\] cannot be saved \(ValueError": lambda rank: 10 ** (5000 * rank),
    r"not today": lambda rank: rank and _failing(rank),
}


def _refused(rank, world_size, path):
    for told, of_rank in UNSAVABLE.items():
        trainer = _fitted(world_size, of_rank)
        with pytest.raises((StratagemError, ArithmeticError), match=told):
            trainer.save_checkpoint(path)
        trainer.close()


@pytest.mark.slow
def test_what_one_rank_cannot_save_fails_on_all(tmp_path):
    run_in_processes(_refused, 2, tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


class OfAUser(torch.Tensor):
    pass


def _save_unequal(rank, world_size, path):
    large = {0: torch.arange(800_000.0), 1: torch.ones(2).as_subclass(OfAUser)}
    trainer = _fitted(world_size, lambda rank: large.get(rank))
    trainer.save_checkpoint(path)
    (mark,) = trainer.callbacks
    trainer.fit(Scheduled(), share(trainer, joined_batches(2, 24)), ckpt_path=path)
    return [state["rank"] for state in mark.loaded]


@pytest.mark.slow
def test_a_rank_with_much_more_than_the_others_does_not_pad_their_rows(tmp_path):
    for first, second, *others in run_in_processes(_save_unequal, 4, tmp_path / "x.ckpt"):
        assert torch.equal(first, torch.arange(800_000.0))
        assert torch.equal(second, torch.ones(2))
        assert others == [None, None]
    assert (tmp_path / "x.ckpt" / "tensors.bin").stat().st_size < 5e6


def _divided(sizes, ranks, generator):
    """Return plans of `ranks` ranks that each have some of the bytes of tensors of these sizes, and the whole."""
    state = {
        str(n): torch.randint(1, 256, (size,), generator=generator, dtype=torch.uint8) for n, size in enumerate(sizes)
    }
    plans = [Plan(state, rank, ranks) for rank in range(ranks)]
    for entry, tensor in zip(plans[0].tensors, state.values(), strict=True):
        cuts = sorted(torch.randint(0, len(tensor) + 1, (ranks - 1,), generator=generator).tolist())
        order = torch.randperm(ranks, generator=generator).tolist()
        for rank, begin, end in zip(order, [0, *cuts], [*cuts, len(tensor)], strict=True):
            if begin < end:
                plans[rank].parts.append((entry["offset"] + begin, tensor[begin:end]))
    whole = bytearray(plans[0].size)
    for entry, tensor in zip(plans[0].tensors, state.values(), strict=True):
        whole[entry["offset"] : entry["offset"] + len(tensor)] = bytes(tensor.tolist())
    return plans, bytes(whole)


@pytest.mark.parametrize("seed", range(40))
def test_no_rank_writes_where_another_does(seed):
    """However small the shards: whoever writes last, the file is the same."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 150, (12,), generator=generator).tolist()
    plans, whole = _divided(sizes, 1 + seed % 4, generator)
    written = [(offset, bytes(content)) for plan in plans for offset, content in pieces(plan)]
    for order in (written, written[::-1]):
        file = bytearray(len(whole))
        for offset, content in order:
            file[offset : offset + len(content)] = content
        assert bytes(file) == whole
    entries = [{"offset": offset, "bytes": len(content)} for offset, content in written]
    encoded(plans[0], entries)
    if entries and max(entry["bytes"] for entry in entries) > 1:
        large = max(entries, key=lambda entry: entry["bytes"])
        with pytest.raises(CheckpointError, match="were written by two ranks"):
            encoded(plans[0], [*entries, {"offset": large["offset"] + 1, "bytes": 1}])


class Small(Net):
    """Shards of a few bytes, which lie closer together than tensors do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 5), nn.LayerNorm(5), nn.Linear(5, 3), nn.Linear(3, 1))


def _write_small(rank, world_size, precision, path):
    trainer = sg.Trainer(
        max_epochs=1, strategy="fsdp", devices=world_size, precision=precision, checkpoint="sharded", **QUIET
    )
    trainer.fit(Small(), share(trainer, joined_batches(2, 24)))
    for _ in range(5):
        trainer.save_checkpoint(path)
    return weights_of(trainer)


@pytest.mark.every_push("bf16-true-2")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_shards_of_a_few_bytes(precision, world_size, tmp_path):
    weights = run_in_processes(_write_small, world_size, precision, tmp_path / "x.ckpt")[0]
    saved = read_any(tmp_path / "x.ckpt")["state_dict"]
    assert all(torch.equal(saved[name], weights[name]) for name in weights)


@pytest.mark.slow
def test_a_form_that_was_not_chosen_is_recognised(tmp_path):
    batches = joined_batches(8, 24)
    run_in_processes(_write, 2, "fsdp", "sharded", batches[:4], tmp_path / "x.ckpt")

    trainer = sg.Trainer(max_epochs=2, strategy="single_device", **QUIET)  # writes one file
    trainer.fit(Scheduled(seed=3), batches[4:], ckpt_path=tmp_path / "x.ckpt")

    assert relative_difference(weights_of(trainer), train_module_plainly(Scheduled(), batches)[0]) < 1e-6
    assert main(["checkpoint", "verify", str(tmp_path / "x.ckpt")]) == 0


# --- Damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_flipped_bit_is_found(tmp_path):
    path = tmp_path / "x.ckpt"
    with sg.Run(accelerator="cpu", checkpoint="sharded") as run:
        run.ask("save_checkpoint", state={"state_dict": {"w": torch.arange(3000.0)}}, path=path)
    generator = random.Random(0)
    files = sorted(path.iterdir())
    assert len(files) == 2
    found = 0
    for _ in range(1000):
        file = generator.choice(files)
        content = bytearray(file.read_bytes())
        position = generator.randrange(len(content))
        content[position] ^= 1 << generator.randrange(8)
        original = file.read_bytes()
        file.write_bytes(content)
        found += not ShardedCheckpoint().is_whole(path)
        file.write_bytes(original)

    assert found == 1000
    assert ShardedCheckpoint().is_whole(path)


# --- Bad input ---------------------------------------------------------------------------------------------------


def rewritten(path, change):
    import xxhash

    manifest = json.loads((path / "manifest.json").read_text().splitlines()[0])
    change(manifest)
    text = json.dumps(manifest)
    (path / "manifest.json").write_text(f"{text}\n{xxhash.xxh3_128_hexdigest(text.encode())}\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=99), "has version 99; expected at most 1; read it with a newer"),
        (lambda m: m.update(bytes=5), "tensors.bin has another size"),
        (lambda m: m["tensors"][0].update(dtype="system"), "has a tensor of dtype 'system'"),
        (lambda m: m["tensors"][0].update(offset=10**9), "has a tensor outside tensors.bin"),
        (lambda m: m["tensors"][0].update(offset=-64), "has a tensor outside tensors.bin"),
        (lambda m: m.update(format="another"), "not in an installed checkpoint format|another format|is not in"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path, change, message):
    path = tmp_path / "x.ckpt"
    with sg.Run(accelerator="cpu", checkpoint="sharded") as run:
        run.ask("save_checkpoint", state={"state_dict": {"w": torch.arange(3000.0)}}, path=path)
        rewritten(path, change)
        with pytest.raises(CheckpointError, match=message):
            run.ask("load_checkpoint", path=path)


def test_a_folder_of_checkpoints_is_not_a_checkpoint(tmp_path):
    with sg.Run(accelerator="cpu", checkpoint="sharded") as run:
        run.ask("save_checkpoint", state={"state_dict": {"w": torch.ones(3)}}, path=tmp_path / "x.ckpt")
        (tmp_path / "notes.txt").write_text("")
        with pytest.raises(
            CheckpointError, match="is a folder and not a checkpoint; .* pass one of those in it: x.ckpt"
        ):
            read_checkpoint(run, tmp_path)
    with pytest.raises(CheckpointError, match="pass one of those in it: x.ckpt"):
        read_any(tmp_path)


def test_a_file_or_a_strangers_folder_in_its_place_is_left_alone(tmp_path):
    (tmp_path / "file.ckpt").write_text("mine")
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "folder.ckpt" / "thesis.txt").write_text("mine")
    with sg.Run(accelerator="cpu", checkpoint="sharded") as run:
        for name in ("file.ckpt", "folder.ckpt"):
            with pytest.raises(CheckpointError, match="exists and is not a checkpoint of this format"):
                run.ask("save_checkpoint", state={"state_dict": {}}, path=tmp_path / name)
    with pytest.raises(CheckpointError, match="nothing was deleted"):
        ShardedCheckpoint().remove(tmp_path / "folder.ckpt")

    assert (tmp_path / "folder.ckpt" / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "file.ckpt").read_text() == "mine"


@pytest.mark.parametrize("form", ["sharded", "dcp"])
def test_a_users_files_in_a_checkpoint_are_kept(tmp_path, form):
    path = tmp_path / "x.ckpt"
    with sg.Run(accelerator="cpu", checkpoint=form) as run:
        for value in range(3):
            run.ask("save_checkpoint", state={"state_dict": {"w": torch.full((3,), float(value))}}, path=path)
            assert read_checkpoint(run, path)["state_dict"]["w"].tolist() == [value] * 3
            if value == 0:
                (path / "notes.txt").write_text("mine")
                (path / "figures" / "best").mkdir(parents=True)
                (path / "figures" / "best" / "loss.txt").write_text("mine, too")
                (path / "data").symlink_to(tmp_path, target_is_directory=True)
                (path / "gone").symlink_to(tmp_path / "nothing")

            assert (path / "notes.txt").read_text() == "mine"
            assert (path / "figures" / "best" / "loss.txt").read_text() == "mine, too"
            assert (path / "data").readlink() == tmp_path
            assert (path / "gone").is_symlink()
            assert format_named(form).is_whole(path)
        assert [each.name for each in tmp_path.iterdir()] == ["x.ckpt"]

    with pytest.raises(CheckpointError, match="nothing was deleted"):
        format_named(form).remove(path)
    assert format_named(form).is_whole(path)
    for name in ("notes.txt", "data", "gone"):
        (path / name).unlink()
    with pytest.raises(CheckpointError, match=r"figures.best.loss\.txt"):
        format_named(form).remove(path)
    (path / "figures" / "best" / "loss.txt").unlink()
    format_named(form).remove(path)
    assert not path.exists()


def test_a_users_files_in_a_damaged_checkpoint_are_kept(tmp_path):
    path = tmp_path / "x.ckpt"
    with sg.Run(accelerator="cpu", checkpoint="sharded") as run:
        run.ask("save_checkpoint", state={"state_dict": {"w": torch.ones(3)}}, path=path)
        (path / "notes.txt").write_text("mine")
        (path / "tensors.bin").write_bytes(b"")
        run.ask("save_checkpoint", state={"state_dict": {"w": torch.zeros(3)}}, path=path)

        assert read_checkpoint(run, path)["state_dict"]["w"].tolist() == [0.0] * 3
    assert (path / "notes.txt").read_text() == "mine"


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    path = tmp_path / "x.ckpt"
    with sg.Run(accelerator="cpu", checkpoint="sharded") as run:
        run.ask("save_checkpoint", state={"state_dict": {"w": torch.arange(3000.0)}}, path=path)
        (path / "tensors.bin").rename(tmp_path / "elsewhere.bin")
        (path / "tensors.bin").symlink_to(tmp_path / "elsewhere.bin")
        with pytest.raises(CheckpointError, match="tensors.bin is a link out of the folder"):
            run.ask("load_checkpoint", path=path)


def _resumed_by_the_callback(rank, world_size, folder, epochs):
    arguments = QUIET | {"enable_checkpointing": True, "checkpoint": "sharded", "default_root_dir": folder}
    trainer = sg.Trainer(max_epochs=epochs, strategy="fsdp", devices=world_size, **arguments)
    trainer.fit(Scheduled(), share(trainer, joined_batches(4, 24)), ckpt_path="last" if epochs > 2 else None)
    return trainer.global_step


@pytest.mark.slow
def test_the_checkpoint_callback_keeps_one_and_last_finds_it(tmp_path):
    assert run_in_processes(_resumed_by_the_callback, 2, tmp_path, 2) == [8, 8]
    kept = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert kept == ["epoch=1-step=8.ckpt"]
    assert run_in_processes(_resumed_by_the_callback, 2, tmp_path, 3) == [12, 12]


class Other(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*net()[:4], nn.Linear(32, 7))


def _load_into_another(rank, world_size, path):
    trainer = sg.Trainer(max_epochs=2, strategy="fsdp", devices=world_size, **QUIET)
    return outcome(lambda: trainer.fit(Other(), share(trainer, joined_batches(2, 24)), ckpt_path=path))


@pytest.mark.slow
def test_another_architecture_is_told_by_name_and_shape(tmp_path):
    run_in_processes(_write, 2, "fsdp", "sharded", joined_batches(2, 24), tmp_path / "x.ckpt")

    for said in run_in_processes(_load_into_another, 2, tmp_path / "x.ckpt"):
        assert said.startswith("refused: model state 'net.4.weight' has shape (1, 32); expected (7, 32)"), said
