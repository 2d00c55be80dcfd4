"""What callbacks and loggers must do: observe training without changing it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest

import stratagem as sg
from stratagem.api.kinds import keeps_state
from stratagem.discovery import registry
from stratagem.stack.description import FILE_NAME
from stratagem_testing.checkpoint import assert_same
from stratagem_testing.conformance import Conformance
from stratagem_testing.expectations import expect_equal, expect_weights
from stratagem_testing.reference import Net, joined_batches, train_module_plainly
from stratagem_testing.sharing import run_first, run_last
from stratagem_testing.training import (
    in_empty_folder,
    outcome,
    quiet,
    resources_held,
    share,
    shared_loader,
    stable_resources,
    train,
    weights_of,
)

_BATCH = 24


class ObserverConformance(Conformance):
    """Trains with a plugin that observes training: a callback, a logger, or one of a kind that another package adds."""

    #: Whether the plugin changes training (early stopping, averaged weights), so that weights are not compared.
    changes_training: ClassVar[bool] = False

    def test_every_stage_runs_with_it(self, world_size: int) -> None:
        """Fit with validation, then validate, test and predict; the weights are those of plain PyTorch."""
        batches = joined_batches(6, _BATCH)
        reference, _ = train_module_plainly(self.prepare(Net()), batches)

        for weights in self.run_in(_all_stages, world_size, self._arguments(world_size), self.maker(Net), batches):
            if not self.changes_training:
                look = "the plugin must only observe training; if it changes weights on purpose, set `changes_training`"
                expect_weights(weights, reference, "training without the plugin", 1e-6, look)

    def test_an_error_in_training_is_not_hidden(self, world_size: int) -> None:
        """Nor does it hang, as with a plugin that communicates in `on_exception`."""
        *_, raiser = self.run_in(_raise, world_size, self._arguments(world_size), self.prepare)

        expect_equal("error of training, after `on_exception` and `teardown`", raiser, "ValueError: out of order")

    def test_it_serves_two_runs_in_one_process(self, world_size: int) -> None:
        """The same instance works in two trainers, and no resource stays open afterwards."""
        for first, second in self.run_in(
            _run_twice, world_size, self._arguments(world_size), self.maker(Net), self.kind
        ):
            for what in ("threads", "open files and ports", "process group"):
                counts = f"{first[what]} after one run, {second[what]} after two"
                assert second[what] <= first[what], f"{what}: {counts}; release them in `teardown`"

    def test_its_state_can_be_saved(self) -> None:
        """`state_dict` has plain values only, and `load_state_dict` accepts them."""
        if not keeps_state(self.choice().plugin):
            pytest.skip("it has no state")
        before, after = self.run_in(_resume, 1, self._arguments(1), self.maker(Net), self.kind)[0]

        assert_same(after, before)

    def _arguments(self, world_size: int, **arguments: Any) -> dict[str, Any]:
        argument = registry.argument_of(self.kind)
        chosen = {"accelerator": self.accelerator, "devices": world_size, argument: [self.plugin]}
        chosen["use_distributed_sampler"] = False  # the kit's loaders have the part of a rank
        return quiet(self.choice().plugin) | chosen | self.arguments | arguments

    def choose(self, **arguments: Any) -> dict[str, Any]:
        return {"accelerator": self.accelerator, "plugins": [self.plugin]} | arguments


class CallbackConformance(ObserverConformance):
    """Trains with the callback, in one process and on two ranks.

    class TestMyCallback(CallbackConformance):
        plugin = "my_callback"
    """

    kind = "callback"


class LoggerConformance(ObserverConformance):
    """Trains with the logger, in one process and on two ranks, and logs unusual metrics.

    class TestMyLogger(LoggerConformance):
        plugin = "my_logger"
    """

    kind = "logger"

    def test_it_writes_on_rank_0_alone(self, several: int) -> None:
        """Other ranks have metrics of their part of the data only, and would overwrite rank 0's files."""
        first, *others = self.run_in(_files_written, several, self._arguments(several))

        assert first, "rank 0 wrote no file below `trainer.default_root_dir`; write there, and flush at the end"
        expect_equal("files of other ranks", [name for files in others for name in files], [], "write on rank 0 alone")

    def test_strange_metrics_are_kept_or_refused_early(self) -> None:
        """NaN, infinity, names with slashes, spaces and other alphabets, a metric first logged in a later step."""
        [error] = self.run_in(_log_unusual_metrics, 1, self._arguments(1))
        expect_equal("error of `log_metrics` with NaN, unusual names, and a name that begins late", error, "nothing")

    def test_hyperparameters_of_all_plain_kinds(self) -> None:
        [error] = self.run_in(_log_hyperparameters, 1, self._arguments(1))
        expect_equal("error of `log_hyperparams` with None, tuples and nested containers", error, "nothing")


# --- In each process ---------------------------------------------------------------------------------------------


def _all_stages(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> Any:
    with in_empty_folder() as folder:
        trainer = sg.Trainer(**(choose | {"default_root_dir": folder, "log_every_n_steps": 1}))
        mine, module = shared_loader(trainer, batches), make()
        trainer.fit(module, mine, mine)
        weights = weights_of(trainer)
        trainer.validate(module, mine)
        trainer.test(module, mine)
        trainer.predict(module, mine)
        return weights


@run_last
def _raise(rank: int, size: int, choose: dict[str, Any], prepare: Any) -> str:
    class Raises(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2 and rank == size - 1:
                raise ValueError("out of order")
            return super().training_step(batch, batch_idx)

    with in_empty_folder() as folder:
        trainer = sg.Trainer(**(choose | {"default_root_dir": folder}))
        return outcome(lambda: trainer.fit(prepare(Raises()), shared_loader(trainer, joined_batches(4, _BATCH))))


@run_first
def _run_twice(rank: int, size: int, choose: dict[str, Any], make: Any, kind: str) -> list[dict[str, Any]]:
    after_each: list[dict[str, Any]] = []
    with in_empty_folder() as folder:
        plugin, name = _first(sg.Trainer(**choose), kind), registry.argument_of(kind)
        for _ in range(3):
            trainer = sg.Trainer(**(choose | {name: [plugin], "default_root_dir": folder}))
            mine = shared_loader(trainer, joined_batches(2, _BATCH))
            trainer.fit(make(), mine, mine)
            trainer.close()
            del trainer
            held = resources_held()
            is_more = bool(after_each) and held["threads"] > after_each[-1]["threads"]
            after_each.append(stable_resources() if is_more else held)
    return after_each[1:]


def _first(trainer: sg.Trainer, kind: str) -> Any:
    """Return the first plugin of `kind` in the stack of `trainer`."""
    return next(choice.plugin for choice in trainer.run.stack.choices() if choice.kind == kind)


def _resume(rank: int, size: int, choose: dict[str, Any], make: Any, kind: str) -> list[Any]:
    with in_empty_folder() as folder:
        states, batches = list[Any](), joined_batches(4, _BATCH)
        for epochs in (1, 1):  # nothing is left to train in the second
            trainer = sg.Trainer(**(choose | {"max_epochs": epochs, "default_root_dir": folder}))
            mine = shared_loader(trainer, batches)
            trainer.fit(make(), mine, mine, ckpt_path=folder / "x.ckpt" if states else None)
            states.append(_first(trainer, kind).state_dict())
            trainer.save_checkpoint(folder / "x.ckpt")
        return states


def _files_written(rank: int, size: int, choose: dict[str, Any]) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="stratagem-test-") as name:
        trainer = sg.Trainer(**(choose | {"default_root_dir": name, "log_every_n_steps": 1}))
        trainer.fit(Net(), share(trainer, joined_batches(3, _BATCH)))
        trainer.close()
        return [path.name for path in Path(name).rglob("*") if path.is_file() and path.name != FILE_NAME]


def _log_unusual_metrics(rank: int, size: int, choose: dict[str, Any]) -> str:
    class Strange(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("a/b c", float("nan"))
            self.log("größe", float("inf"))
            if batch_idx > 1:
                self.log("late", -float("inf"))
            return loss

    with in_empty_folder() as folder:
        arguments = choose | {"default_root_dir": folder, "log_every_n_steps": 1}
        return outcome(lambda: train(rank, size, Strange, joined_batches(4, _BATCH), arguments))


def _log_hyperparameters(rank: int, size: int, choose: dict[str, Any]) -> str:
    class Described(Net):
        def __init__(
            self, rate: float = 0.1, title: str = "a", none: None = None, sizes: Any = (1, 2), deep: Any = None
        ):
            super().__init__()
            self.save_hyperparameters()

    described = functools.partial(Described, deep={"x": [True, {"y": 1}]})
    with in_empty_folder() as folder:
        arguments = choose | {"default_root_dir": folder}
        return outcome(lambda: train(rank, size, described, joined_batches(2, _BATCH), arguments))
