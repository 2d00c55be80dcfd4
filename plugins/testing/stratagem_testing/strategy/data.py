"""Checks of how data is divided among the ranks: in training, prediction and validation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.api.capabilities import SHARDED_PARAMETERS
from stratagem_testing.expectations import expect_equal
from stratagem_testing.reference import Indexed, Net, data, loss_of, train_module_plainly
from stratagem_testing.strategy.base import StrategyChecks
from stratagem_testing.training import loader, share, weights_of

_DIVIDED = "each sample must be read once, in order: look at `wrap_dataloader` and at the data shards of `mesh`"


class DataChecks(StrategyChecks):
    """Every sample is read by one data shard, and results cover the whole set."""

    def test_every_sample_is_read_once(self, world_size: int) -> None:
        """The shares of a training loader that the data shards read are disjoint and complete."""
        seen = self._run(world_size, _indices_read, self.maker(Indexed), data(world_size * 12, sequence=self.sequence))
        by_shard = dict(seen)  # ranks of one data shard (a tensor-parallel group) read the same samples

        for shard, indices in seen:
            expect_equal(f"samples that ranks of data shard {shard} of `mesh` read", indices, by_shard[shard])
        read = sorted(index for indices in by_shard.values() for index in indices)
        expect_equal("samples that all data shards read", read, list(range(world_size * 12)), _DIVIDED)

    def test_predictions_are_complete_and_in_order(self, world_size: int) -> None:
        """Each sample is predicted once, in order, also if ranks have unequal numbers; with the weights of rank 0."""
        samples = data(count := 5 * world_size - 1, seed=9, sequence=self.sequence)
        results = self._run(world_size, _predict, self.maker(Indexed), samples, self.claims(SHARDED_PARAMETERS))
        expected = self.maker(Indexed)()(samples[0])

        by_shard = {result["shard"]: result["indices"] for result in results}
        indices = [index for indices in by_shard.values() for index in indices]
        expect_equal("samples that were predicted", sorted(indices), list(range(count)), _DIVIDED)
        for result in results:
            of_rank = result["indices"]
            expect_equal("samples in the order of a rank's predictions", of_rank, sorted(of_rank), _DIVIDED)
            right = torch.allclose(result["outputs"], expected[of_rank], atol=1e-5)
            assert right, f"predictions {result['outputs']} differ from those of the module, {expected[of_rank]}"

    def test_validation_measures_the_whole_set(self, world_size: int) -> None:
        """The loss is the mean over all samples, before a fit and after it, and validation changes no weights."""
        samples = data(world_size * 8, seed=8, sequence=self.sequence)
        batches = self.batches(4)
        untrained, trained = self.maker(Net)(), self.maker(Net)()
        reference, _ = train_module_plainly(trained, batches)
        wanted = [loss_of(module.eval()(samples[0]), samples[1]).item() for module in (untrained, trained)]

        results = self._run(world_size, _validate, self.maker(Net), samples, batches)

        self._compare(results, reference)
        for result in results:
            expected = pytest.approx(wanted, rel=1e-5)
            expect_equal("val_loss before and after the fit", result["losses"], expected, "each sample must count once")


# --- In each process ---------------------------------------------------------------------------------------------


def _indices_read(rank: int, size: int, choose: dict[str, Any], make: Any, samples: Any) -> tuple[int, list[int]]:
    trainer, module = sg.Trainer(**choose), make()
    trainer.fit(module, loader((*samples, torch.arange(len(samples[0]))), 4))
    return trainer.run.mesh.data_shard, module.indices


def _predict(rank: int, size: int, choose: dict[str, Any], make: Any, samples: Any, equal: bool) -> Any:
    trainer, module = sg.Trainer(**choose), make()
    torch._foreach_add_(list(module.state_dict().values()), 0 if equal else rank)
    results = trainer.predict(module, loader((*samples, torch.arange(len(samples[0]))), 2))
    indices, outputs = map(torch.cat, zip(*results, strict=True))
    return {"shard": trainer.run.mesh.data_shard, "indices": indices.tolist(), "outputs": outputs.detach().cpu()}


def _validate(rank: int, size: int, choose: dict[str, Any], make: Any, samples: Any, batches: Any) -> Any:
    module, held_out = make(), loader(samples, 4)
    before = sg.Trainer(**choose).validate(module, held_out)[0]["val_loss"]
    trainer = sg.Trainer(**(choose | {"num_sanity_val_steps": 2}))
    trainer.fit(module, share(trainer, batches), held_out)
    weights = weights_of(trainer)
    after = trainer.validate(module, held_out)[0]["val_loss"]
    return {"weights": weights, "losses": [before, after]}
