"""Checks of ranks that share data: those that have parts of the model, or parts of each sample."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem_testing.expectations import expect_refused
from stratagem_testing.observed import Counted, DroppedWithin
from stratagem_testing.reference import Batch, Dropped, data
from stratagem_testing.strategy.base import StrategyChecks, fit_outcome
from stratagem_testing.training import loader, share, train, weights_of


class MeshChecks(StrategyChecks):
    """Ranks that read the same samples agree, and what they read counts once."""

    def test_the_mesh_has_all_processes(self, world_size: int) -> None:
        """The sizes of the axes give the number of processes, each of which has its own position."""
        self._require_size(world_size)
        if self._is_outer:
            return
        mesh = self.mesh(world_size)
        lines = mesh.lines(*mesh.axes)
        assert lines == [list(range(world_size))], f"the mesh {mesh.axes} does not have {world_size} ranks"

    def test_sizes_that_it_cannot_arrange_are_refused(self, world_size: int) -> None:
        """A number of processes that does not fit the options is refused on every rank in the same words."""
        if self._size_refused(world_size) is None:
            pytest.skip(f"{world_size} processes are possible")
        outcomes = self.run_in(fit_outcome, world_size, self._arguments(world_size), self.maker(Dropped), [])
        assert len(set(outcomes)) == 1, f"ranks refuse {world_size} processes in different words: {outcomes}"
        expect_refused(f"{world_size} processes", outcomes[0], look="raise a ConfigError in `mesh`")

    def test_metrics_are_those_of_all_samples(self, world_size: int) -> None:
        """What ranks log together is what one process logs, also if some read the same, or parts; or it is named."""
        one = data(1, sequence=self.sequence)
        expected = {"highest": one[1].max(), "average": one[1].mean(), "exponential": one[1].mean().exp()}
        sets = {"": _repeated(one, world_size * 8), "val_": _repeated(one, world_size * 4)}

        results = self._run(world_size, _log, self.maker(Counted), *sets.values())

        for stage, (_, y) in sets.items():
            wanted = {stage + name: float(value) for name, value in (expected | {"count": y.numel()}).items()}
            for found, _ in results:
                wrong = [name for name in wanted if found[name] != pytest.approx(wanted[name], rel=1e-5)]
                look = "ranks that read the same samples must be in one data shard of `mesh`"
                assert wrong in ([], [f"{stage}exponential"]), f"{wrong}: found {found}, expected {wanted}; {look}"
                assert all(name in results[0][1] for name in wrong), f"no warning names {wrong}"

    def test_ranks_that_read_the_same_draw_the_same(self, world_size: int) -> None:
        """With dropout on what all of them hold, all ranks have the same weights, whatever their seeds were."""
        results = self._run(world_size, _train_seeded, self.maker(Dropped), self.batches(3))
        self._compare(results, None, look="ranks that read the same samples must draw the same random numbers")

    def test_parts_of_a_layer_draw_differently(self, several: int) -> None:
        """Dropout between two layers that are cut keeps other elements on each rank, and the weights still agree.

        After these layers the ranks of one data shard hold the same, and keep the same elements.
        """
        results = self._run(several, _train_dropping, self.maker(DroppedWithin), self.batches(3))

        self._compare(results, None)
        mesh = self.mesh(several)
        for line in mesh.lines("tensor"):
            within = [results[rank]["kept"][0] for rank in line if len(results[rank]["kept"]) == 2]
            after = [results[rank]["kept"][-1] for rank in line if len(results[rank]["kept"]) == 2]
            for number, kept in enumerate(within[1:]):
                if kept.shape[-1] < _WIDTH:
                    assert not torch.equal(kept, within[0]), f"ranks {line[0]} and {line[number + 1]} drop the same"
            for number, kept in enumerate(after[1:]):
                assert torch.equal(kept, after[0]), f"ranks {line[0]} and {line[number + 1]} drop different elements"


#: How many features `DroppedWithin` has between its layers.
_WIDTH = 32


# --- In each process ---------------------------------------------------------------------------------------------


def _repeated(sample: Batch, times: int) -> Batch:
    return sample[0].repeat_interleave(times, 0), sample[1].repeat_interleave(times, 0)


def _log(rank: int, size: int, choose: dict[str, Any], make: Any, training: Any, held_out: Any) -> Any:
    """Return the metrics of both stages, and the text of all warnings."""
    trainer = sg.Trainer(**choose)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(make(), loader(training, 4), loader(held_out, 4))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, "\n".join(str(each.message) for each in caught)


def _train_seeded(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> Any:
    torch.manual_seed(rank)
    return train(rank, size, make, batches, choose)


def _train_dropping(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> Any:
    """Return the weights, and which elements each dropout of this rank kept in the last forward, in order."""
    torch.manual_seed(rank)
    module, trainer = make(), sg.Trainer(**choose)
    kept: dict[str, Tensor] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Dropout):
            layer.register_forward_hook(lambda _, __, out, name=name: kept.update({name: _local(out) != 0}))
    trainer.fit(module, share(trainer, batches))
    return {"weights": weights_of(trainer), "kept": [kept[name] for name in sorted(kept)]}


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().cpu()
