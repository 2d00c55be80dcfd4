"""What all checks of a strategy share: training with it, and what happens where it does not claim a capability."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

import stratagem as sg
from stratagem.api import Mesh, World
from stratagem.api.capabilities import FULL_STATE, MULTI_PROCESS
from stratagem.errors import StratagemError
from stratagem_testing.conformance import Conformance, refusal
from stratagem_testing.expectations import expect_refused, expect_weights
from stratagem_testing.reference import Batch, Net, Scheduled, joined_batches
from stratagem_testing.sharing import run_alone
from stratagem_testing.training import outcome, share, train, weights_of, weights_on_all_ranks

#: Can be split into equal parts for up to four ranks.
BATCH = 24
#: The length of sequences in samples for strategies that cut them; can be cut in two and in four.
SEQUENCE = 4
#: The axes of a mesh whose ranks read the same samples: these ranks have parts of the model, or of the samples.
CUT_AXES = ("pipeline", "context", "tensor")
#: What a strategy does for the weights of all ranks to be those of one process.
_LOOK = (
    "`wrap_model` must begin with rank 0's weights on all ranks, and `backward` average (not sum) every gradient over "
    "the ranks, once before each step (a strategy whose replicas may differ between steps derives from OuterStrategy)"
)
_UNCLAIMED = "{!r} must be in `capabilities.provides`, or be refused with an error that names it"
#: Why a check of an outer strategy is skipped.
_OUTER = "not for an outer strategy, which one process does not train alike: `meet` compares it with copies"


class StrategyChecks(Conformance):
    """Trains with the strategy under test in real processes, and compares with plain PyTorch on one process."""

    kind = "strategy"
    #: Largest relative difference of any weight from plain PyTorch, in fp32.
    tolerance: ClassVar[float] = 1e-6

    def mesh(self, world_size: int) -> Mesh:
        """Return the mesh of `world_size` processes of one node. Raises the strategy's errors."""
        mesh: Mesh = self.choice().plugin.mesh(World(world_size=world_size, local_world_size=world_size))
        return mesh

    @property
    def sequence(self) -> int | None:
        """The length of the sequences that samples are; None if the strategy cuts none, and samples are vectors."""
        sizes = [size for size in self.world_sizes if self._size_refused(size) is None]
        return SEQUENCE if any(self.mesh(size).size("context") > 1 for size in sizes) else None

    def batches(self, num_batches: int) -> list[Batch]:
        """Return joined batches of samples as the strategy needs them."""
        return joined_batches(num_batches, BATCH, sequence=self.sequence)

    def run_in(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        self.choice().plugin.preload(self.accelerator)
        return super().run_in(function, world_size, *arguments)

    @property
    def _is_outer(self) -> bool:
        outer: bool = self.choice().plugin.outer
        return outer

    def _run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(rank, world_size, choose, *arguments)`` in processes; skip if the strategy has only one."""
        self._require_size(world_size)
        return self.run_in(function, world_size, self._arguments(world_size), *arguments)

    def _require_size(self, world_size: int) -> None:
        """Return if the strategy can arrange `world_size` processes; otherwise skip the check with its reason."""
        if world_size > 1:
            self._require(MULTI_PROCESS, world_size)
        elif self._is_outer:
            pytest.skip(_OUTER)
        if reason := self._size_refused(world_size):
            possible = [size for size in self.world_sizes if not self._size_refused(size)]
            assert possible, f"`world_sizes` are {self.world_sizes}, all of which the strategy refuses: {reason}"
            pytest.skip(reason)

    def _size_refused(self, world_size: int) -> str | None:
        if self._is_outer or (world_size > 1 and not self.claims(MULTI_PROCESS)):
            return None
        return refusal(lambda: self.mesh(world_size))

    def _averages(self, world_size: int) -> bool:
        """Whether some ranks have different samples, or parts of them, so that gradients are averaged."""
        mesh = self.mesh(world_size)
        return mesh.num_data_shards * mesh.size("context") > 1

    def _is_cut(self, world_size: int) -> bool:
        """Whether ranks have parts of the model, or of samples, so that a module that cannot be cut may be refused."""
        return any(self.mesh(world_size).size(axis) > 1 for axis in CUT_AXES)

    def _train(
        self, world_size: int, make: Callable[[], sg.Module], batches: list[Batch], **arguments: Any
    ) -> list[dict[str, Any]]:
        return self._run(world_size, _train, self.maker(make), batches, arguments)

    def _compare(
        self, results: list[dict[str, Any]], reference: dict[str, Tensor] | None, tolerance: float | None = None,
        look: str = _LOOK,
    ) -> None:  # fmt: skip
        """Assert that all ranks have the same weights, and that these equal the reference; `look` ends the error."""
        __tracebackhide__ = True
        if self._is_outer:
            pytest.skip(_OUTER)
        first = weights_on_all_ranks(results, look)
        if reference is not None:
            limit, knob = (self.tolerance, "tolerance") if tolerance is None else (tolerance, "")
            expect_weights(first, reference, "one process with the joined batches", limit, look, knob)

    def _require(self, word: str, world_size: int, make: Callable[[], sg.Module] = Net, **arguments: Any) -> None:
        """Return if the strategy claims `word`; otherwise assert that `arguments` or the module fail, and skip."""
        __tracebackhide__ = True
        if word != MULTI_PROCESS:
            self._require_size(world_size)
        if self.claims(word):
            return
        if self._is_outer:
            pytest.skip(_OUTER)
        reason = refusal(lambda: sg.Trainer(**self._arguments(world_size, **arguments)))
        if reason is None:
            chosen = self._arguments(world_size, **arguments)
            outcomes = self.run_in(fit_outcome, world_size, chosen, self.maker(make), self.batches(2))
            assert len(set(outcomes)) == 1, f"{_UNCLAIMED.format(word)} on all ranks: found {outcomes}"
            reason = outcomes[0]
            expect_refused(repr(word), reason, look="or be in `capabilities.provides`")
        assert repr(word) in reason, f"{_UNCLAIMED.format(word)}: found {reason!r}"
        pytest.skip(reason)

    def _trained_or_refused(self, world_size: int, make: Any, batches: list[Any]) -> list[dict[str, Any]]:
        """Return what each rank trained; if all ranks refused the module, skip with the error message."""
        results = self._run(world_size, _train_or_refuse, self.maker(make), batches)
        refused = [result for result in results if isinstance(result, str)]
        assert len(refused) in (0, world_size), f"all ranks must refuse the module, or none; these refused: {refused}"
        if refused:
            pytest.skip(refused[0])
        return results

    def _require_saving(self, world_size: int) -> None:
        """Return if the strategy can save at `world_size`; otherwise assert that saving is refused, and skip."""
        self._require_size(world_size)
        if not self.claims(FULL_STATE) and not self._is_outer:
            outcomes = self.run_in(
                _save_outcome, world_size, self._arguments(world_size), self.maker(Scheduled), self.batches(1)
            )
            named = all(repr(FULL_STATE) in text for text in outcomes)
            assert named, f"{_UNCLAIMED.format(FULL_STATE)}: found {outcomes}"
            pytest.skip(outcomes[0])


# --- In each process ---------------------------------------------------------------------------------------------


def _train(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any, arguments: Any) -> Any:
    return train(rank, size, make, batches, choose | arguments)


@run_alone
def _train_or_refuse(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> Any:
    try:
        return train(rank, size, make, batches, choose)
    except StratagemError as error:
        return f"refused: {error}"


@run_alone
def fit_outcome(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> str:
    """Return what training ``make()`` raises, as `stratagem_testing.training.outcome` does."""
    return outcome(lambda: train(rank, size, make, batches, choose))


def train_and_save(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any, path: Path) -> Any:
    """Train ``make()`` on this rank's share of `batches`, save a checkpoint to `path`, return the weights."""
    trainer = sg.Trainer(**choose)
    trainer.fit(make(), share(trainer, batches))
    trainer.save_checkpoint(path)
    return {"weights": weights_of(trainer)}


@run_alone
def _save_outcome(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> str:
    with tempfile.TemporaryDirectory(prefix="stratagem-test-") as folder:
        return outcome(lambda: train_and_save(rank, size, choose, make, batches, Path(folder) / "x.ckpt"))


def run_arguments(choose: dict[str, Any]) -> dict[str, Any]:
    """Return those of a Trainer's arguments that a Run accepts."""
    return {name: choose[name] for name in ("accelerator", "devices", "num_nodes", "strategy") if name in choose}
