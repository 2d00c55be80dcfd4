"""What a checkpoint format must do: load exactly what was saved, detect damage, and never execute code of a file."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import stratagem as sg
from stratagem.api.kinds import CheckpointFormat
from stratagem.discovery import catalog
from stratagem.errors import CheckpointError
from stratagem_testing.conformance import Conformance
from stratagem_testing.expectations import expect_equal, expect_refused, expect_weights
from stratagem_testing.reference import Scheduled, joined_batches, train_module_plainly
from stratagem_testing.training import outcome, share, weights_of

_BATCH = 24


class CheckpointConformance(Conformance):
    """Saves, damages and loads checkpoints.

    class TestMyFormat(CheckpointConformance):
        plugin = "my_format"
    """

    kind = "checkpoint"
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2)
    shares_processes = False

    # --- Content -------------------------------------------------------------------------------------------------

    def test_what_was_saved_comes_back(self) -> None:
        """Tensors of all dtypes and shapes, shared and strided ones, numbers, text, None, nested containers."""
        with self._folder() as folder:
            state = example()
            self._save(state, folder / self._name())

            back = self._load(folder / self._name())

        assert_same(back, state)

    def test_a_run_continues_at_another_world_size(self, world_size: int) -> None:
        """Saved by `world_size` ranks and resumed by one and by two, the weights equal those without interruption."""
        batches = joined_batches(4, _BATCH)
        whole, _ = train_module_plainly(Scheduled(), batches)
        with self._folder() as folder:
            path = folder / self._name()
            self.run_in(_save_half, world_size, self._arguments(world_size), batches[:2], path)
            for other in (1, 2):
                for weights in self.run_in(_continue, other, self._arguments(other), batches[2:], path):
                    look = f"compare what {world_size} ranks saved and {other} got from `load_checkpoint`"
                    expect_weights(weights, whole, "a run without interruption", 1e-6, look)

    def test_overwriting_replaces(self) -> None:
        with self._folder() as folder:
            path = folder / self._name()
            for value in (1.0, 2.0):
                self._save({"state_dict": {"w": torch.full((1000,), value)}}, path)

            found = self._load(path)["state_dict"]["w"].unique().tolist()
            expect_equal("what `save_checkpoint` wrote over a checkpoint with 1.0", found, [2.0])
            self._expect_whole(path)

    # --- Complete, or an error -----------------------------------------------------------------------------------

    def test_what_cannot_be_saved_leaves_the_old_one_intact(self) -> None:
        with self._folder() as folder:
            path = folder / self._name()
            self._save(example(), path)
            before = _files(folder)
            with pytest.raises(CheckpointError):
                self._save({"state_dict": {"w": torch.ones(9)}, "values": {"deep": [lambda: None]}}, path)

            assert _files(folder) == before, (
                "a failed `save_checkpoint` changed files; write under another name, and rename"
            )
            assert_same(self._load(path), example())

    def test_damage_is_noticed(self) -> None:
        """A flipped bit, a truncated file, a missing file: `load_checkpoint` fails, and `is_whole` is False."""
        for damage in (_flip, _cut, Path.unlink):
            with self._folder() as folder:
                self._save(example(), folder / self._name())
                largest = max(_paths(folder), key=lambda path: path.stat().st_size)
                damage(largest)

                assert not self.format.is_whole(folder / self._name()), f"`is_whole` is True after {damage.__name__}"
                with pytest.raises(CheckpointError):
                    self._load(folder / self._name())

    def test_a_missing_one_is_named(self) -> None:
        with self._folder() as folder, pytest.raises(CheckpointError, match="nowhere"):
            self._load(folder / "nowhere.ckpt")

    def test_nothing_in_it_is_executed(self) -> None:
        """Replace each file by a pickle that writes to the disk if it is loaded without weights_only."""
        with self._folder() as folder:
            path, proof = folder / self._name(), folder / "executed"
            self._save({"state_dict": {"w": torch.ones(2)}}, path)
            for file in _paths(folder):
                original = file.read_bytes()
                for poison in (pickle.dumps(_WritesFile(proof)), _torch_pickle(_WritesFile(proof))):
                    file.write_bytes(poison)
                    said = outcome(lambda: self._load(path))
                    assert not proof.exists(), f"{file.name} was executed; load it with weights_only=True"
                    expect_refused(f"{file.name} that is another pickle", said, look="raise a CheckpointError")
                file.write_bytes(original)

    def test_a_folder_that_cannot_be_written_fails_on_all_ranks(self, world_size: int) -> None:
        with self._folder() as folder:
            (folder / "file").write_text("")
            for said in self.run_in(_save_to, world_size, self._arguments(world_size), folder / "file" / "x.ckpt"):
                expect_refused("a path below a file", said, look="raise it in `save_checkpoint` on all ranks")

    # --- Files ---------------------------------------------------------------------------------------------------

    def test_recognises_its_own_and_nothing_else(self) -> None:
        with self._folder() as folder:
            self._save(example(), folder / self._name())
            (folder / "notes.txt").write_text("not a checkpoint")
            (folder / "empty").mkdir()

            for name in (self._name(), "notes.txt", "empty", "nowhere"):
                expect_equal(f"`recognises` of {name}", self.format.recognises(folder / name), name == self._name())

    def test_removes_its_own_and_nothing_else(self) -> None:
        with self._folder() as folder:
            (folder / "notes.txt").write_text("mine")
            self._save(example(), folder / f"a{self.format.suffix}")
            before = _files(folder)
            self._save(example(), folder / self._name())
            self.format.remove(folder / self._name())

            expect_equal("files after `remove`", sorted(_files(folder)), sorted(before))
            self._expect_whole(folder / f"a{self.format.suffix}")

    def test_makes_the_folders_it_needs(self) -> None:
        with self._folder() as folder:
            path = folder / "a" / "b" / self._name()
            self._save(example(), path)

            self._expect_whole(path)

    # --- Helpers -------------------------------------------------------------------------------------------------

    def _expect_whole(self, path: Path) -> None:
        __tracebackhide__ = True
        assert self.format.is_whole(path), f"`is_whole` is False for {path.name}, which `save_checkpoint` has completed"

    @property
    def format(self) -> CheckpointFormat:
        plugin: CheckpointFormat = self.choice().plugin
        return plugin

    def _name(self) -> str:
        return f"model{self.format.suffix}"

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="stratagem-test-") as name:
            yield Path(name)

    def _save(self, state: dict[str, Any], path: Path) -> None:
        with sg.Run(**self.choose(strategy=catalog.default("strategy"))) as run:
            run.ask("save_checkpoint", state=state, path=path)

    def _load(self, path: Path) -> dict[str, Any]:
        with sg.Run(**self.choose(strategy=catalog.default("strategy"))) as run:
            state: dict[str, Any] = run.ask("load_checkpoint", path=path)
            return state


def example() -> dict[str, Any]:
    """Return a state with all kinds of values that a checkpoint may have."""
    generator = torch.Generator().manual_seed(0)
    big = torch.randn(64, 65, generator=generator)
    optimizer = {"state": {"weight": {"step": 3, "momentum": big * 2}}, "groups": [{"lr": 1e-3, "names": ["weight"]}]}
    dtypes = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
    return {
        "state_dict": {
            "weight": big,
            "transposed": big.T,
            "row": big[3],
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            **{str(dtype): big[:3].to(dtype) for dtype in dtypes},
        },
        "optimizers": [optimizer],
        "values": {"text": "a", "none": None, "yes": True, "number": 1.5, "whole": 2**40, "list": [1, [2, {"x": 3}]],
                   "bytes": b"\x00\xff", "dtype": torch.bfloat16, "nan": float("nan"), "keys": {1: "a"}},
    }  # fmt: skip


def assert_same(got: Any, wanted: Any, path: str = "state") -> None:
    """Assert that two nested states are equal, including dtypes."""
    if isinstance(wanted, Tensor):
        assert isinstance(got, Tensor), f"{path} is {got!r}, expected a tensor"
        expect_equal(f"dtype and shape of {path}", (got.dtype, got.shape), (wanted.dtype, wanted.shape))
        assert torch.equal(got, wanted), f"{path} has other values"
    elif isinstance(wanted, dict):
        assert set(got) >= set(wanted), f"{path} lacks {sorted(set(wanted) - set(got))}"
        for key, value in wanted.items():
            assert_same(got[key], value, f"{path}.{key}")
    elif isinstance(wanted, list):
        assert len(got) == len(wanted), f"{path} has {len(got)} items, expected {len(wanted)}"
        for index, value in enumerate(wanted):
            assert_same(got[index], value, f"{path}[{index}]")
    else:
        assert type(got) is type(wanted), f"{path} is a {type(got).__name__}, expected {wanted!r}"
        assert got == wanted or got != got, f"{path} is {got!r}, expected {wanted!r}"  # NaN is itself


class _WritesFile:
    """Writes a file when unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.proof, "executed"))


def _torch_pickle(value: Any) -> bytes:
    import io

    file = io.BytesIO()
    torch.save({"state_dict": {"w": value}}, file)
    return file.getvalue()


def _paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in _paths(folder)}


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


# --- In each process ---------------------------------------------------------------------------------------------


def _save_half(rank: int, size: int, choose: dict[str, Any], batches: Any, path: Path) -> None:
    trainer = sg.Trainer(**choose)
    trainer.fit(Scheduled(), share(trainer, batches))
    trainer.save_checkpoint(path)
    trainer.close()  # waits for a save in the background


def _continue(rank: int, size: int, choose: dict[str, Any], batches: Any, path: Path) -> Any:
    trainer = sg.Trainer(**(choose | {"max_epochs": 2}))
    trainer.fit(Scheduled(seed=3), share(trainer, batches), ckpt_path=path)
    return weights_of(trainer)


def _save_to(rank: int, size: int, choose: dict[str, Any], path: Path) -> str:
    trainer = sg.Trainer(**choose)
    trainer.fit(Scheduled(), share(trainer, joined_batches(1, _BATCH)))

    def save() -> None:
        trainer.save_checkpoint(path)
        trainer.close()

    return outcome(save)
