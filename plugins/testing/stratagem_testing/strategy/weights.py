"""Checks of the weights: training gives those of one process that reads the joined batches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import stratagem as sg
from stratagem.api.capabilities import CLIP_BY_NORM, SHARDED_PARAMETERS
from stratagem_testing.attachments import WAYS, train_each
from stratagem_testing.expectations import expect_equal
from stratagem_testing.reference import (
    Branching,
    BranchingInSize,
    BranchingLater,
    Buffered,
    Double,
    Dropped,
    Frozen,
    Net,
    Scalar,
    Scheduled,
    Shifted,
    Tied,
    Unused,
    branching_batches,
    data,
    loss_of,
    part,
    train_branching_plainly,
    train_module_plainly,
)
from stratagem_testing.sharing import run_alone
from stratagem_testing.strategy.base import BATCH, StrategyChecks, run_arguments
from stratagem_testing.training import loader, outcome, train, weights_of


class WeightChecks(StrategyChecks):
    """Training in several processes gives the weights of plain PyTorch on one."""

    @classmethod
    def parameters(cls) -> dict[str, Sequence[Any]]:
        return super().parameters() | {
            "model": (Frozen, Tied, Scalar, Buffered, Scheduled),
            "branching": (Branching, BranchingLater, BranchingInSize),
        }

    def test_weights_equal_one_process(self, world_size: int) -> None:
        """SGD with momentum, since Adam would hide a gradient that is scaled wrongly."""
        batches = self.batches(12)
        reference, norms = train_module_plainly(self.maker(Net)(), batches)
        assert max(norms) > 1, "the reference has small gradients, with which errors would not be seen"

        results = self._train(world_size, Net, batches)

        steps = [result["steps"] for result in results]
        expect_equal("optimizer steps on each rank", steps, [12] * world_size, "take one step for each batch")
        self._compare(results, reference)

    def test_what_is_attached_to_parameters_holds(self, world_size: int) -> None:
        """Optimizers and lists made before, hooks on gradients, attributes: all as in plain PyTorch, or refused."""
        batches = self.batches(4)

        results = self._run(world_size, train_each, self.prepare, batches, WAYS)

        for way, *outcomes in zip(WAYS, *results, strict=True):
            found = [each for each, _ in outcomes]
            if all(isinstance(each, str) for each in found):
                continue
            assert not any(isinstance(each, str) for each in found), f"{way.__name__}: some ranks refused: {found}"
            reference, _ = train_module_plainly(self.maker(way)(), batches)
            look = f"keep what users attach to parameters ({way.__name__}), or refuse the module in `wrap_model`"
            self._compare([{"weights": each} for each in found], reference, look=look)

    def test_a_loop_of_your_own(self, world_size: int) -> None:
        """`Run.setup`, `backward`, `clip_gradients` (which returns the norm before clipping) and `optimizer_step`.

        Gradients that `zero_grad` drops before a step have no effect.
        """
        batches = self.batches(6)
        clip = 0.5 if self.claims(CLIP_BY_NORM) else None
        reference, norms = train_module_plainly(self.maker(Net)(), batches, max_norm=clip)

        self._require_size(world_size)
        if self._is_cut(world_size):
            refused = self._run(world_size, _own_loop_outcome, self.maker(Net), batches, clip)
            if all(text.startswith("refused: ") for text in refused):
                pytest.skip(refused[0])

        results = self._run(world_size, _train_in_own_loop, self.maker(Net), batches, clip)

        self._compare(results, reference)
        for result in results:
            if clip is not None:
                look = "`clip_gradients` must return the norm of the averaged gradients before it clips them"
                expect_equal("norms of `run.clip_gradients`", result["norms"], pytest.approx(norms, rel=1e-5), look)

    def test_unusual_models(self, world_size: int, model: type[Net]) -> None:
        """Frozen, tied and scalar parameters, buffers, and a schedule of the learning rate."""
        self._require_size(world_size)
        if model is Buffered and self.mesh(world_size).size("pipeline") > 1:
            pytest.skip("a pipeline calls the module for each micro-batch")
        batches = self.batches(6)
        reference, _ = train_module_plainly(self.maker(model)(), batches)

        train = self._trained_or_refused if self._is_cut(world_size) else self._train
        self._compare(train(world_size, model, batches), reference)

    def test_double_precision_is_kept(self, world_size: int) -> None:
        """Nothing is rounded to fp32, or the module is refused on every rank."""
        batches = [tuple(tensor.double() for tensor in batch) for batch in self.batches(4)]

        self._compare(
            self._trained_or_refused(world_size, Double, batches),
            train_module_plainly(self.maker(Double)(), batches)[0],
            1e-12,
            "keep float64 where parameters have it: nothing may be rounded to float32 in `wrap_model` or on its way",
        )

    def test_unused_parameters(self, world_size: int) -> None:
        """The module trains as in one process, or is refused on every rank; it never hangs or gives other weights."""
        batches = self.batches(4)
        reference, _ = train_module_plainly(self.maker(Unused)(), batches)

        look = "a parameter that no loss reaches has no gradient: leave it as it is, or refuse the module"
        self._compare(self._trained_or_refused(world_size, Unused, batches), reference, look=look)

    def test_branching_models(self, several: int, branching: type[Branching]) -> None:
        """Ranks whose batches use different layers train as in one process, or the module is refused on every rank.

        It never hangs, and never adds the gradient of one layer to another's.
        """
        self._require_size(several)
        shards = 1 if self._is_outer else self.mesh(several).num_data_shards
        batches = branching_batches(5, BATCH, shards, self.sequence)
        reference, norms = train_branching_plainly(self.maker(branching)(), batches, shards)
        assert max(norms) > 1, "the reference has small gradients, with which errors would not be seen"

        look = "all-reduce a flag for each parameter that has a gradient first; others count as zero"
        self._compare(self._trained_or_refused(several, branching, batches), reference, look=look)

    def test_an_uneven_last_batch(self, world_size: int) -> None:
        """The last batch of the loader is smaller than the others, by the same number on every rank."""
        self._require_size(world_size)
        shards = 1 if self._is_outer else self.mesh(world_size).num_data_shards
        x, y = samples = data(shards * 12, seed=7, sequence=self.sequence)
        joined: list[tuple[Tensor, ...]] = list(zip(x.split(8 * shards), y.split(8 * shards), strict=True))

        self._compare(
            self._run(world_size, _train_from_loader, self.maker(Net), samples, 8),
            train_module_plainly(self.maker(Net)(), joined)[0],
        )

    def test_training_starts_from_the_weights_of_rank_0(self, several: int) -> None:
        """Ranks that begin with different weights and buffers, as without a seed, all train from those of rank 0."""
        batches = self.batches(4)

        results = self._train(several, _DiffersByRank, batches)

        if self.claims(SHARDED_PARAMETERS):  # the shards of different ranks may come from different models
            self._compare(results, None)
        else:
            self._compare(results, train_module_plainly(self.maker(Shifted)(), batches)[0])

    def test_random_numbers_are_left_alone(self, alone: int) -> None:
        """One process draws exactly the random numbers that plain PyTorch draws from the same seed."""
        batches = self.batches(6)
        torch.manual_seed(11)
        reference, _ = train_module_plainly(self.maker(Dropped)(), batches)

        self._compare(self._run(alone, _train_seeded, self.maker(Dropped), batches), reference)


# --- In each process ---------------------------------------------------------------------------------------------


def _train_in_own_loop(
    rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any, clip: float | None
) -> Any:
    with sg.Run(**run_arguments(choose)) as run:
        module = make()
        model, optimizer = run.setup(module, module.configure_optimizers())
        norms = []
        mine = part(batches, run.mesh.data_shard, run.mesh.num_data_shards)
        for number, (x, y) in enumerate(run.dataloader(mine)):
            if number == 2:  # gradients that are dropped before the step
                run.backward(loss_of(model(-x), y))
                optimizer.zero_grad()
            run.backward(loss_of(model(x), y))
            if clip is not None:
                norms.append(float(run.clip_gradients(optimizer, max_norm=clip)))
            run.optimizer_step(optimizer)
            optimizer.zero_grad()
        with run.gathered_state():
            state = run.ask("model_state", module=module)
        return {"weights": {name: tensor.detach().cpu().clone() for name, tensor in state.items()}, "norms": norms}


@run_alone
def _own_loop_outcome(*arguments: Any) -> str:
    return outcome(lambda: _train_in_own_loop(*arguments))


def _train_from_loader(rank: int, size: int, choose: dict[str, Any], make: Any, samples: Any, batch_size: int) -> Any:
    trainer = sg.Trainer(**choose)
    trainer.fit(make(), loader(samples, batch_size))
    return {"weights": weights_of(trainer)}


class _DiffersByRank(Shifted):
    """Begins with weights that depend on the rank."""

    def __init__(self) -> None:
        super().__init__(seed=int(os.environ["RANK"]))


def _train_seeded(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> Any:
    torch.manual_seed(11)
    return train(rank, size, make, batches, choose)
