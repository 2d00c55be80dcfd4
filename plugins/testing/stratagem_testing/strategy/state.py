"""Checks of checkpoints: training that is saved and resumed elsewhere equals training that was never interrupted."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.discovery import catalog
from stratagem_testing.reference import Batch, Indexed, Net, Scheduled, data, train_module_plainly
from stratagem_testing.strategy.base import StrategyChecks, train_and_save
from stratagem_testing.training import QUIET, outcome, share, weights_of

_RESUMED = (
    "they were right before the checkpoint: compare what `model_state` and `optimizer_state` (such as momentum) return "
    "with what `load_model_state` and `load_optimizer_state` apply"
)


class StateChecks(StrategyChecks):
    """Checkpoints, resumed with other numbers of processes and on a single device."""

    #: By number of processes: the folder of a checkpoint, and what the processes that saved it returned.
    _checkpoints: ClassVar[dict[int, tuple[tempfile.TemporaryDirectory[str], list[dict[str, Any]]]]]

    @classmethod
    def parameters(cls) -> dict[str, Sequence[Any]]:
        return super().parameters() | {"other_size": (*cls.world_sizes, "single")}

    def test_save_load_and_continue(self, world_size: int, other_size: int | str) -> None:
        """Train half, save, resume with another number of processes: the weights equal those without interruption."""
        self._require_saving(world_size)
        batches = self.batches(8)
        half, _ = train_module_plainly(self.maker(Scheduled)(), batches[:4])
        whole, _ = train_module_plainly(self.maker(Scheduled)(), batches)
        path, results = self._saved(world_size, batches[:4])
        self._compare(results, half)
        self._compare(self._continue(other_size, path, batches), whole, look=_RESUMED)

    def test_continues_what_one_device_saved(self, world_size: int) -> None:
        self._require_saving(world_size)
        batches = self.batches(8)
        with tempfile.TemporaryDirectory(prefix="stratagem-test-") as folder:
            path = Path(folder) / "half.ckpt"
            self.run_in(train_and_save, 1, _single_device(self.accelerator), self.maker(Scheduled), batches[:4], path)
            self._compare(
                self._run(world_size, _continue, self.maker(_Other), path, batches),
                train_module_plainly(self.maker(Scheduled)(), batches)[0],
                look=_RESUMED,
            )

    def test_resuming_within_an_epoch_under_another_seed(self, world_size: int) -> None:
        """Save within a shuffled epoch, resume in processes with another seed: each sample is read exactly once.

        A `wrap_dataloader` that shuffles itself has to save what its order depends on.
        """
        self._require_saving(world_size)
        count = world_size * 12
        with tempfile.TemporaryDirectory(prefix="stratagem-test-") as folder:
            path = Path(folder) / "within.ckpt"
            samples = data(count, sequence=self.sequence)
            parts = [
                self._run(world_size, _read_shuffled, self.maker(Indexed), samples, path, resumes)
                for resumes in (False, True)
            ]
        by_shard = [dict(seen) for seen in parts]  # ranks of one data shard read the same
        first, rest = ([index for indices in part.values() for index in indices] for part in by_shard)

        assert first, "the first part read nothing"
        assert rest, "the epoch ended before the checkpoint"
        twice = sorted({index for index in first + rest if (first + rest).count(index) > 1})
        missing = sorted(set(range(count)) - set(first + rest))
        look = "the sampler of `wrap_dataloader` must be a DistributedSampler, or draw from its attribute `generator`"
        assert (twice, missing) == ([], []), f"read twice: {twice}; not at all: {missing}; {look}"

    def test_weights_of_another_model_are_refused_on_all_ranks(self, world_size: int) -> None:
        self._require_saving(world_size)
        for error in self._run(world_size, _load_renamed_weights, self.maker(Net), self.batches(1)):
            assert error != "nothing", "weights with other names were loaded; `load_model_state` must pass `strict` on"

    def _saved(self, world_size: int, batches: list[Batch]) -> tuple[Path, list[dict[str, Any]]]:
        """Return a checkpoint of `world_size` processes and what they returned; saved once a class."""
        cls = type(self)
        if "_checkpoints" not in vars(cls):
            cls._checkpoints = {}
        if world_size not in cls._checkpoints:
            folder = tempfile.TemporaryDirectory(prefix="stratagem-test-")
            path = Path(folder.name) / "half.ckpt"
            results = self._run(world_size, train_and_save, self.maker(Scheduled), batches, path)
            cls._checkpoints[world_size] = folder, results
        folder, results = cls._checkpoints[world_size]
        return Path(folder.name) / "half.ckpt", results

    def _continue(self, size: int | str, path: Path, batches: list[Batch]) -> list[dict[str, Any]]:
        if size == "single":
            return self.run_in(_continue, 1, _single_device(self.accelerator), self.maker(_Other), path, batches)
        return self._run(int(size), _continue, self.maker(_Other), path, batches)


class _Other(Scheduled):
    """Begins with other weights, which the checkpoint's must replace."""

    def __init__(self) -> None:
        super().__init__(seed=3)


# --- In each process ---------------------------------------------------------------------------------------------


def _single_device(accelerator: str) -> dict[str, Any]:
    return QUIET | {"strategy": catalog.default("strategy"), "accelerator": accelerator, "devices": 1}


def _continue(rank: int, size: int, choose: dict[str, Any], make: Any, path: Path, batches: Any) -> Any:
    half = len(batches) // 2
    trainer = sg.Trainer(**(choose | {"max_epochs": 2}))
    trainer.fit(make(), share(trainer, batches[half:]), ckpt_path=path)
    return {"weights": weights_of(trainer)}


def _read_shuffled(
    rank: int, size: int, choose: dict[str, Any], make: Any, samples: Batch, path: Path, resumes: bool
) -> tuple[int, list[int]]:
    """Read one step's batch of an epoch and save, or resume and read the others; return the data shard and samples."""
    sg.seed_everything(2 if resumes else 1)
    trainer, module = sg.Trainer(**(choose | {"max_steps": -1 if resumes else 1})), make()
    numbered = TensorDataset(*samples, torch.arange(len(samples[0])))
    trainer.fit(module, DataLoader(numbered, 4, shuffle=True), ckpt_path=path if resumes else None)
    if not resumes:
        trainer.save_checkpoint(path)
    return trainer.run.mesh.data_shard, module.indices


def _load_renamed_weights(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> str:
    trainer = sg.Trainer(**choose)
    module = make()
    trainer.fit(module, share(trainer, batches))
    state = {name.replace("net", "web"): tensor for name, tensor in weights_of(trainer).items()}
    return outcome(lambda: trainer.run.ask("load_model_state", state=state, module=module, strict=True))
