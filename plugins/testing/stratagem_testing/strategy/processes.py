"""Checks of the processes: collectives, errors on one rank, and what remains after a run."""

from __future__ import annotations

import os
from typing import Any

import torch

import stratagem as sg
from stratagem.api.capabilities import MULTI_PROCESS
from stratagem_testing.expectations import expect_equal, expect_weights
from stratagem_testing.reference import Batch, Net
from stratagem_testing.sharing import run_first, run_last
from stratagem_testing.strategy.base import StrategyChecks, fit_outcome, run_arguments
from stratagem_testing.training import in_empty_folder, outcome, share, stable_resources, weights_of


class ProcessChecks(StrategyChecks):
    """Collectives, errors that end all ranks, teardown, and a second run in the same process."""

    def test_collectives(self, world_size: int) -> None:
        """All methods of `Collectives`, with tensors and with objects, give their documented results."""
        for problems in self._run(world_size, _collective_errors):
            expect_equal("wrong results of collectives", problems, [], "look at what `connect` returns")

    def test_an_error_on_one_rank_ends_all(self, several: int) -> None:
        """All ranks end within seconds, and the other ranks' errors name the cause."""
        *others, raiser = self._run(several, _raise_on_last_rank, self.maker(_Raises), self.batches(5))

        expect_equal("error of training, after `on_exception` and `teardown`", raiser, "ValueError: out of order")
        for error in others:
            named = "out of order" in error or "onnection" in error or "peer" in error
            assert named, f"another rank ended with {error!r}, expected the first error or a lost connection"

    def test_leaves_nothing_behind(self, world_size: int) -> None:
        """After three runs in one process no process group, thread, file descriptor, port or file remains."""
        for first, second, third in self._run(world_size, _run_three_times, self.maker(Net), self.batches(2)):
            assert not third["process group"], "the process group still exists after the run; destroy it in `teardown`"
            # The peer may close a connection later than after another run; a leak grows with each run.
            more = [name for name, value in third.items() if not _at_most(value, second[name])]
            grown = "; ".join(f"{name}: {first[name]}, {second[name]}, {third[name]}" for name in more)
            assert not more, f"left behind after one run, two and three: {grown}; release them in `teardown`"

    def test_a_second_run_is_like_the_first(self, world_size: int) -> None:
        """The same instance trains twice in one process, and the first run does not affect the second."""
        for first, second in self._run(world_size, _train_twice, self.maker(Net), self.batches(3)):
            look = "an instance must keep nothing of a run: look at its attributes, and at `teardown`"
            expect_weights(second, first, "the instance's first run", self.tolerance, look, "tolerance")

    def test_more_processes_than_it_can_are_refused(self, several: int) -> None:
        """A strategy for one process refuses two before it starts any."""
        if self.claims(MULTI_PROCESS):
            return
        self._require(MULTI_PROCESS, several)


# --- In each process ---------------------------------------------------------------------------------------------


class _Raises(Net):
    """Raises an error in the third batch on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.raises = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if batch_idx == 2 and self.raises:
            raise ValueError("out of order")
        return super().training_step(batch, batch_idx)


@run_last
def _raise_on_last_rank(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> str:
    return fit_outcome(rank, size, choose, make, batches)


@run_first
def _run_three_times(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> list[dict[str, Any]]:
    after_each = []
    with in_empty_folder() as folder:
        for _ in range(3):
            trainer = sg.Trainer(**(choose | {"default_root_dir": folder}))
            trainer.fit(make(), share(trainer, batches))
            trainer.run.close()
            trainer.run.close()  # safe to call twice
            del trainer
            after_each.append(stable_resources())
    return after_each


def _at_most(value: Any, other: Any) -> bool:
    return bool(value <= other) if type(value) is int and type(other) is int else bool(value == other)


def _train_twice(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> Any:
    run = sg.Run(**run_arguments(choose))
    instance = run.stack.strategies[0].plugin
    weights = []
    for _ in range(2):
        trainer = sg.Trainer(**(choose | {"strategy": instance}))
        trainer.fit(make(), share(trainer, batches))
        weights.append(weights_of(trainer))
        trainer.close()
    return weights


def _collective_errors(rank: int, size: int, choose: dict[str, Any]) -> list[str]:
    """Return a message for each collective whose result is wrong."""
    run = sg.Run(**run_arguments(choose))
    run.connect()
    collectives, problems = run.collectives, list[str]()
    mine = torch.full((3,), float(rank + 1), device=run.device)
    sums = float(sum(range(1, size + 1)))

    def expect(what: str, got: Any, wanted: Any) -> None:
        if got != wanted:
            problems.append(f"{what} returned {got}; expected {wanted}")

    for op, wanted in {"mean": sums / size, "sum": sums, "max": float(size), "min": 1.0}.items():
        expect(f"all_reduce {op}", collectives.all_reduce(mine, op).tolist(), [wanted] * 3)  # type: ignore[arg-type]
    expect("all_reduce's argument afterwards", mine.tolist(), [float(rank + 1)] * 3)
    expect("average_async", collectives.average_async(mine.clone()).wait().tolist(), [sums / size] * 3)
    expect(
        "all_gather",
        [part.tolist() for part in collectives.all_gather(mine)],
        [[float(r + 1)] * 3 for r in range(size)],
    )
    expect("broadcast", collectives.broadcast(mine.clone(), size - 1).tolist(), [float(size)] * 3)
    expect("broadcast_object", collectives.broadcast_object({"rank": rank}, size - 1), {"rank": size - 1})
    expect("all_gather_object", collectives.all_gather_object(rank), list(range(size)))
    expect("any", (collectives.any(rank == size - 1), collectives.any(False)), (True, False))
    error = outcome(lambda: collectives.fail_together(ValueError("mine") if rank == size - 1 else None))
    expect("fail_together names the error", "mine" in error, True)
    expect("world_size", (collectives.world_size, run.world_size), (size, size))
    collectives.barrier()
    run.close()
    return problems
