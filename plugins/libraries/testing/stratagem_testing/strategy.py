"""What a strategy must hold: train what one process would, keep what it claims, refuse what it does not."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.api.capabilities import (
    ACCUMULATION,
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CLOSURE_OPTIMIZERS,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    FULL_STATE,
    GRADIENT_BUCKETS,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    SHARDED_PARAMETERS,
)
from stratagem.errors import StratagemError
from stratagem.stack import catalog, registry
from stratagem_testing.conformance import Conformance, refusal
from stratagem_testing.precision import tolerance_of
from stratagem_testing.reference import (
    Batch,
    Branching,
    BranchingInSize,
    BranchingLater,
    Buffered,
    ByHand,
    CustomClipping,
    CustomStep,
    Double,
    Dropped,
    Frozen,
    Gan,
    Lbfgs,
    Net,
    Scalar,
    Scheduled,
    Shifted,
    Tied,
    Unused,
    branching_batches,
    data,
    joined_batches,
    loss_of,
    part,
    relative_difference,
    train_branching_plainly,
    train_gan_plainly,
    train_lbfgs_plainly,
    train_module_plainly,
)
from stratagem_testing.training import (
    QUIET,
    EveryBatch,
    belongings,
    bytes_sent,
    in_empty_folder,
    loader,
    outcome,
    share,
    train,
    weights_of,
    weights_on_all_ranks,
)

#: Divides into parts for up to four ranks.
_BATCH = 24
#: Why a check of an outer strategy is skipped.
_OUTER = "an outer strategy trains in several processes, as no single one does: compare it with a loop of your own"


class StrategyConformance(Conformance):
    """Trains small models in real processes and compares with plain PyTorch on the joined batches.

        class TestMyStrategy(StrategyConformance):
            plugin = "my_strategy"
            world_sizes = (1, 2)

    What the strategy claims in its `capabilities` must hold. What it does not claim must be refused, with the word in
    the sentence: such a check ends as skipped, with that sentence as the reason.

    An outer strategy trains as no single process does, and what is provided is up to the strategy inside it: checks of
    either are skipped.
    """

    kind = "strategy"
    #: Largest relative difference of any weight from plain PyTorch, in fp32.
    tolerance: ClassVar[float] = 1e-6

    @classmethod
    def parameters(cls) -> dict[str, Sequence[Any]]:
        return super().parameters() | {
            "model": (Frozen, Tied, Scalar, Buffered, Scheduled),
            "branching": (Branching, BranchingLater, BranchingInSize),
            "precision": _precisions(),
            "other_size": (*cls.world_sizes, "single"),
        }

    def run_in(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        self.choice().plugin.preload(self.accelerator)
        return super().run_in(function, world_size, *arguments)

    # --- The same training as in one process ---------------------------------------------------------------------

    def test_weights_equal_one_process(self, world_size: int) -> None:
        """SGD with momentum, so that a gradient scaled wrongly shows; Adam would hide it."""
        batches = joined_batches(12, _BATCH)
        reference, norms = train_module_plainly(Net(), batches)
        assert max(norms) > 1, "the reference is too tame to show anything"

        results = self._train(world_size, Net, batches)

        assert [result["steps"] for result in results] == [12] * world_size
        self._compare(results, reference)

    def test_accumulation(self, world_size: int) -> None:
        """Windows of three batches, the last one short."""
        batches = joined_batches(8, _BATCH)
        self._needs(ACCUMULATION, world_size, accumulate_grad_batches=2)

        results = self._train(world_size, Net, batches, accumulate_grad_batches=3)

        assert results[0]["steps"] == 3
        self._compare(results, train_module_plainly(Net(), batches, accumulate=3)[0])

    def test_inner_micro_batches_send_no_gradients(self, several: int) -> None:
        """Counted in bytes on the wire: an inner batch sends less than a closing one by the gradients, or nothing."""
        if self.claims(ACCUMULATION) and not self.claims(NO_SYNC):
            pytest.skip(f"{NO_SYNC!r} is not claimed: what inner batches send is this strategy's business")
        self._needs(ACCUMULATION, several, accumulate_grad_batches=2)
        if bytes_sent() is None:
            pytest.skip("this system does not tell how many bytes a connection sent")
        counts = self._run(several, _traffic, joined_batches(7, _BATCH))
        gradients = sum(parameter.numel() * 4 for parameter in Net().parameters())
        for by_batch in counts:
            closing = min(by_batch[2], by_batch[5])
            inner = max(by_batch[index] for index in (1, 3, 4))  # the first pays for making connections
            assert closing - inner > gradients / 4, f"bytes sent by batch: {by_batch}"
            if not self.claims(SHARDED_PARAMETERS):
                assert inner < gradients / 4, f"bytes sent by batch: {by_batch}"

    def test_clip_by_norm(self, world_size: int) -> None:
        batches = joined_batches(8, _BATCH)
        self._needs(CLIP_BY_NORM, world_size, gradient_clip_val=1.0)
        reference, norms = train_module_plainly(Net(), batches, max_norm=0.5)
        assert min(norms) > 0.5, "the reference is never clipped"

        self._compare(self._train(world_size, Net, batches, gradient_clip_val=0.5), reference)

    def test_clip_by_value(self, world_size: int) -> None:
        batches = joined_batches(8, _BATCH)
        limits: dict[str, Any] = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
        self._needs(CLIP_BY_VALUE, world_size, **limits)

        self._compare(
            self._train(world_size, Net, batches, **limits), train_module_plainly(Net(), batches, max_value=0.05)[0]
        )

    def test_clipping_with_accumulation(self, world_size: int) -> None:
        """The whole window's gradient is clipped, not each batch's."""
        batches = joined_batches(6, _BATCH)
        self._needs(CLIP_BY_NORM, world_size, gradient_clip_val=1.0)
        self._needs(ACCUMULATION, world_size, accumulate_grad_batches=2)

        results = self._train(world_size, Net, batches, gradient_clip_val=0.5, accumulate_grad_batches=2)

        self._compare(results, train_module_plainly(Net(), batches, 2, max_norm=0.5)[0])

    def test_a_loop_of_your_own(self, world_size: int) -> None:
        """`Run.setup`, `backward`, `clip_gradients` (which returns the norm before clipping) and `optimizer_step`.

        Gradients that `zero_grad` drops before a step are gone.
        """
        batches = joined_batches(6, _BATCH)
        clip = 0.5 if self.claims(CLIP_BY_NORM) else None
        reference, norms = train_module_plainly(Net(), batches, max_norm=clip)

        results = self._run(world_size, _own_loop, batches, clip)

        self._compare(results, reference)
        for result in results:
            if clip is not None:
                assert result["norms"] == pytest.approx(norms, rel=1e-5)

    def test_unusual_models(self, world_size: int, model: type[Net]) -> None:
        """Frozen, tied and scalar parameters, buffers, and a schedule of the learning rate."""
        batches = joined_batches(6, _BATCH)

        self._compare(self._train(world_size, model, batches), train_module_plainly(model(), batches)[0])

    def test_double_precision_is_kept(self, world_size: int) -> None:
        """Nothing on the way is rounded to fp32; or the module is refused on every rank."""
        batches = [tuple(tensor.double() for tensor in batch) for batch in joined_batches(4, _BATCH)]

        self._compare(
            self._trained_or_refused(world_size, Double, batches), train_module_plainly(Double(), batches)[0], 1e-12
        )

    def test_unused_parameters(self, world_size: int) -> None:
        """Trained as in one process, or refused on every rank; never a hang, never other weights."""
        batches = joined_batches(4, _BATCH)
        reference, _ = train_module_plainly(Unused(), batches)

        self._compare(self._trained_or_refused(world_size, Unused, batches), reference)

    def test_branching_models(self, several: int, branching: type[Branching]) -> None:
        """Ranks whose batches take different layers train as in one process, or are refused on every rank.

        Never a hang, and never the gradient of one layer added to another's.
        """
        batches = branching_batches(5, _BATCH, several)
        reference, norms = train_branching_plainly(branching(), batches, several)
        assert max(norms) > 1, "the reference is too tame to show anything"

        self._compare(self._trained_or_refused(several, branching, batches), reference)

    def test_an_uneven_last_batch(self, world_size: int) -> None:
        """The last batch of a real loader is smaller than the others, on every rank alike."""
        samples = data(world_size * 11, seed=7)
        x, y = samples
        joined: list[tuple[Tensor, ...]] = list(zip(x.split(4 * world_size), y.split(4 * world_size), strict=True))

        self._compare(self._run(world_size, _train_from_loader, samples, 4), train_module_plainly(Net(), joined)[0])

    def test_every_sample_is_read_once(self, world_size: int) -> None:
        """The processes' shares of a training loader are disjoint and complete."""
        seen = self._run(world_size, _samples_read, world_size * 12)
        by_shard = dict(seen)  # ranks of one data shard, such as those of a tensor-parallel group, read the same

        assert all(indices == by_shard[shard] for shard, indices in seen)
        assert sorted(index for indices in by_shard.values() for index in indices) == list(range(world_size * 12))

    def test_training_starts_from_the_weights_of_rank_0(self, several: int) -> None:
        """Where a user forgot the seed, ranks begin with different weights and buffers; they must agree."""
        batches = joined_batches(4, _BATCH)

        results = self._run(several, _train_from_different_weights, batches)

        if self.claims(SHARDED_PARAMETERS):  # each rank's own shard of its own model is a model too
            self._compare(results, None)
        else:
            self._compare(results, train_module_plainly(Shifted(seed=0), batches)[0])

    def test_random_numbers_are_left_alone(self, alone: int) -> None:
        """One process draws exactly the random numbers that plain PyTorch draws from the same seed."""
        batches = joined_batches(6, _BATCH)
        torch.manual_seed(11)
        reference, _ = train_module_plainly(Dropped(), batches)

        self._compare(self._run(alone, _train_seeded, batches), reference)

    def test_manual_optimization(self, world_size: int) -> None:
        batches = joined_batches(6, _BATCH)
        self._needs(MANUAL_OPTIMIZATION, world_size, ByHand)

        self._compare(self._train(world_size, ByHand, batches), train_module_plainly(Net(), batches)[0])

    def test_several_optimizers(self, world_size: int) -> None:
        """A GAN: two optimizers stepped by hand, each loss reaching a part of the model."""
        batches = joined_batches(6, _BATCH)
        self._needs(MANUAL_OPTIMIZATION, world_size, ByHand)
        self._needs(MULTIPLE_OPTIMIZERS, world_size, Gan)

        self._compare(self._train(world_size, Gan, batches), train_gan_plainly(batches))

    def test_closure_optimizers(self, world_size: int) -> None:
        """LBFGS evaluates the model several times a step; in double precision."""
        batches = [tuple(tensor.double() for tensor in batch) for batch in joined_batches(3, _BATCH)]
        self._needs(CLOSURE_OPTIMIZERS, world_size, Lbfgs)

        self._compare(self._train(world_size, Lbfgs, batches), train_lbfgs_plainly(batches))

    def test_custom_step(self, world_size: int) -> None:
        """A module's own `backward` and `optimizer_step` are called, once each."""
        batches = joined_batches(6, _BATCH)
        self._needs(CUSTOM_STEP, world_size, CustomStep)

        reference, _ = train_module_plainly(Net(lr=Net().lr / 2), batches)
        self._compare(self._train(world_size, CustomStep, batches), reference)

    def test_custom_clipping(self, world_size: int) -> None:
        """A module that clips gradients itself finds them complete and averaged."""
        batches = joined_batches(6, _BATCH)
        self._needs(CUSTOM_CLIPPING, world_size, CustomClipping)

        reference, _ = train_module_plainly(Net(), batches, max_norm=0.5)
        self._compare(self._train(world_size, CustomClipping, batches), reference)

    # --- With the other plugins ----------------------------------------------------------------------------------

    def test_precisions(self, world_size: int, precision: str) -> None:
        """Every installed precision trains within its rounding, or is refused with a reason."""
        if reason := refusal(lambda: sg.Trainer(**self._arguments(world_size, precision=precision))):
            pytest.skip(reason)
        batches = joined_batches(8, _BATCH)
        policy = sg.Run(precision=precision, accelerator=self.accelerator).context.policy

        results = self._train(world_size, Net, batches, precision=precision)

        used = [batches[index] for index in results[0]["used"]]
        assert len(used) >= 2, "nearly every step was skipped"
        self._compare(results, train_module_plainly(Net(), used)[0], tolerance_of(policy))

    def test_gradient_buckets(self, world_size: int) -> None:
        """Every gradient passes the comm hooks once a synchronised step, and what they return is what is applied."""
        self._needs(GRADIENT_BUCKETS, world_size, comm_hook=[_Watch()])
        batches = joined_batches(4, _BATCH)
        accumulate = 2 if self.claims(ACCUMULATION) else 1
        reference, _ = train_module_plainly(Net(), batches, accumulate)

        results = self._run(world_size, _watched, batches, accumulate)

        self._compare(results, reference)
        size = sum(parameter.numel() for parameter in Net().parameters())
        for result in results:
            if self.claims(SHARDED_PARAMETERS):  # only what is averaged over replicas passes, a shard at a time
                assert min(result["elements"]) >= size / world_size
                assert min(result["last"]) >= 1, "no bucket of a backward says it is the last"
                continue
            assert result["elements"] == [size] * (4 // accumulate)
            assert result["last"] == [1] * (4 // accumulate), "not exactly one bucket of a backward says it is the last"

    # --- State ---------------------------------------------------------------------------------------------------

    def test_save_load_and_continue(self, world_size: int, other_size: int | str) -> None:
        """Half the training, a checkpoint, the other half elsewhere: as if it had never stopped."""
        self._needs_state(world_size)
        batches = joined_batches(8, _BATCH)
        half, _ = train_module_plainly(Scheduled(), batches[:4])
        whole, _ = train_module_plainly(Scheduled(), batches)
        with tempfile.TemporaryDirectory(prefix="stratagem-test-") as folder:
            path = Path(folder) / "half.ckpt"
            self._compare(self._run(world_size, _save_half, batches[:4], path), half)
            self._compare(self._continue(other_size, path, batches), whole)

    def test_continues_what_one_device_saved(self, world_size: int) -> None:
        self._needs_state(world_size)
        batches = joined_batches(8, _BATCH)
        with tempfile.TemporaryDirectory(prefix="stratagem-test-") as folder:
            path = Path(folder) / "half.ckpt"
            self.run_in(_save_half, 1, _single(self.accelerator), batches[:4], path)
            self._compare(
                self._run(world_size, _continue, path, batches), train_module_plainly(Scheduled(), batches)[0]
            )

    def test_resuming_within_an_epoch_under_another_seed(self, world_size: int) -> None:
        """A checkpoint within a shuffled epoch, and the rest in processes with another seed: each sample is read once.

        A `wrap_dataloader` that shuffles in a way of its own has to keep what its order depends on.
        """
        self._needs_state(world_size)
        count = world_size * 12
        with tempfile.TemporaryDirectory(prefix="stratagem-test-") as folder:
            path = Path(folder) / "within.ckpt"
            parts = [self._run(world_size, _read_shuffled, count, path, resumes) for resumes in (False, True)]
        by_shard = [dict(seen) for seen in parts]  # ranks of one data shard read the same
        first, rest = ([index for indices in part.values() for index in indices] for part in by_shard)

        assert first, "the first part read nothing"
        assert rest, "the epoch was over before the checkpoint"
        twice = sorted({index for index in first + rest if (first + rest).count(index) > 1})
        missing = sorted(set(range(count)) - set(first + rest))
        assert (twice, missing) == ([], []), f"read twice: {twice}; not at all: {missing}"

    def test_weights_of_another_model_are_refused_on_all_ranks(self, world_size: int) -> None:
        self._needs_state(world_size)
        for said in self._run(world_size, _load_strangers_weights):
            assert said != "nothing", "weights with other names were loaded without an error message"

    # --- Evaluation ----------------------------------------------------------------------------------------------

    def test_predictions_are_complete_and_in_order(self, world_size: int) -> None:
        """Each sample is predicted once, and each rank's in the order of the data; also where they do not divide."""
        count = 4 * world_size + world_size - 1
        results = self._run(world_size, _predict, count)
        x, _ = data(count, seed=9)
        expected = Net().net(x)

        by_shard = {result["shard"]: result["indices"] for result in results}
        indices = [index for indices in by_shard.values() for index in indices]
        assert sorted(indices) == list(range(count))
        for result in results:
            assert result["indices"] == sorted(result["indices"])
            assert torch.allclose(result["outputs"], expected[result["indices"]], atol=1e-5)

    def test_validation_measures_the_whole_set(self, world_size: int) -> None:
        """Before any training, and again after a fit, whose weights it must leave alone."""
        samples = data(world_size * 8, seed=8)
        batches = joined_batches(4, _BATCH)
        untrained, trained = Net(), Net()
        reference, _ = train_module_plainly(trained, batches)
        wanted = [loss_of(module.eval()(samples[0]), samples[1]).item() for module in (untrained, trained)]

        results = self._run(world_size, _validate, samples, batches)

        self._compare(results, reference)
        for result in results:
            assert result["losses"] == pytest.approx(wanted, rel=1e-5)

    # --- Processes -----------------------------------------------------------------------------------------------

    def test_collectives(self, world_size: int) -> None:
        """all_reduce (mean, sum, max, min), average_async, all_gather, broadcast, objects, any, fail_together."""
        for problems in self._run(world_size, _collectives):
            assert problems == []

    def test_an_error_on_one_rank_ends_all(self, several: int) -> None:
        """Within seconds, and the others learn whose it was."""
        *others, raiser = self._run(several, _raise_on_the_last)

        assert raiser == "ValueError: out of order"
        for said in others:
            assert "out of order" in said or "onnection" in said or "peer" in said, said

    def test_leaves_nothing_behind(self, world_size: int) -> None:
        """Set up and torn down three times in a process: no process group, thread, descriptor, port or file stays."""
        for first, second, third in self._run(world_size, _three_lives):
            assert not third["process group"], "the process group is still there"
            # A connection may close later than another time; what leaks is there once more after each run.
            more = {name for name, value in third.items() if not _no_more_than(value, second[name])}
            assert not more, f"after the first run {first}, the second {second}, the third {third}"

    def test_a_second_run_is_like_the_first(self, world_size: int) -> None:
        """The same instance trains twice in one process, and nothing of the first run is in the second."""
        for first, second in self._run(world_size, _twice, joined_batches(3, _BATCH)):
            assert relative_difference(second, first) < self.tolerance

    def test_more_processes_than_it_can_are_refused(self, several: int) -> None:
        """Unclaimed: a strategy of one process refuses two, before any is started."""
        if self.claims(MULTI_PROCESS):
            return
        self._needs(MULTI_PROCESS, several)

    # --- Helpers -------------------------------------------------------------------------------------------------

    @property
    def _is_outer(self) -> bool:
        outer: bool = self.choice().plugin.outer
        return outer

    def _run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(rank, world_size, choose, *arguments)`` in processes; skip where one is all it can."""
        if world_size > 1:
            self._needs(MULTI_PROCESS, world_size)
        elif self._is_outer:
            pytest.skip(_OUTER)
        return self.run_in(function, world_size, self._arguments(world_size), *arguments)

    def _train(
        self, world_size: int, make: Callable[[], sg.Module], batches: list[Batch], **arguments: Any
    ) -> list[dict[str, Any]]:
        return self._run(world_size, _train, make, batches, arguments)

    def _compare(
        self, results: list[dict[str, Any]], reference: dict[str, Tensor] | None, tolerance: float | None = None
    ) -> None:
        """Insist that all ranks hold the same weights, and that these are the reference's."""
        if self._is_outer:
            pytest.skip(_OUTER)
        first = weights_on_all_ranks(results)
        if reference is not None:
            difference = relative_difference(first, reference)
            assert difference < (tolerance or self.tolerance), f"weights differ by {difference:.1e} from one process"

    def _needs(self, word: str, world_size: int, make: Callable[[], sg.Module] = Net, **arguments: Any) -> None:
        """Go on if the strategy claims `word`; else insist that `arguments` (or the module) are refused, and skip."""
        if word != MULTI_PROCESS and world_size > 1:
            self._needs(MULTI_PROCESS, world_size)
        if self.claims(word):
            return
        if self._is_outer:
            pytest.skip(_OUTER)
        reason = refusal(lambda: sg.Trainer(**self._arguments(world_size, **arguments)))
        if reason is None:
            said = self.run_in(_fit_outcome, world_size, self._arguments(world_size, **arguments), make)
            assert len(set(said)) == 1, f"{word!r} is not claimed, and ranks disagree about it: {said}"
            reason = said[0]
            assert reason.startswith("refused: "), f"{word!r} is not claimed, and nobody refused it: {reason}"
        assert repr(word) in reason, f"{word!r} is not claimed, and was refused for another reason: {reason}"
        pytest.skip(reason)

    def _trained_or_refused(self, world_size: int, make: Any, batches: list[Any]) -> list[dict[str, Any]]:
        """Return what each rank trained; if all ranks were refused alike, skip with the sentence."""
        results = self._run(world_size, _train_or_refuse, make, batches)
        refused = [result for result in results if isinstance(result, str)]
        assert len(refused) in (0, world_size), f"some ranks were refused: {results}"
        if refused:
            assert all(text.startswith("refused: ") for text in refused), refused[0]
            pytest.skip(refused[0])
        return results

    def _needs_state(self, world_size: int) -> None:
        """Go on if the strategy can save at `world_size`; else insist that saving is refused, and skip."""
        if world_size > 1:
            self._needs(MULTI_PROCESS, world_size)
        elif self._is_outer:
            pytest.skip(_OUTER)
        if not self.claims(FULL_STATE) and not self._is_outer:
            said = self.run_in(_save_outcome, world_size, self._arguments(world_size))
            assert all(repr(FULL_STATE) in text for text in said), f"{FULL_STATE!r} is not claimed: {said}"
            pytest.skip(said[0])

    def _continue(self, size: int | str, path: Path, batches: list[Batch]) -> list[dict[str, Any]]:
        if size == "single":
            return self.run_in(_continue, 1, _single(self.accelerator), path, batches)
        return self._run(int(size), _continue, path, batches)


def _precisions() -> tuple[str, ...]:
    """Return the installed precisions, each once whatever its aliases, the most telling name first."""
    found: dict[str, str] = {}
    for entry in sorted(registry.entries("precision"), key=lambda entry: -len(entry.name)):
        found.setdefault(entry.value, entry.name)
    return tuple(sorted(found.values()))


def _single(accelerator: str) -> dict[str, Any]:
    return QUIET | {"strategy": catalog.default("strategy"), "accelerator": accelerator, "devices": 1}


# --- In each process ---------------------------------------------------------------------------------------------


class _Watch(sg.CommHook):
    """Counts what passes."""

    def __init__(self) -> None:
        self.elements, self.last = 0, 0

    @sg.hookimpl
    def reduce_bucket(self, bucket: Any) -> Any:
        self.elements += bucket.buffer.numel()
        self.last += bool(bucket.is_last)
        return (yield bucket.buffer)


def _train(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any, arguments: Any) -> Any:
    return train(rank, size, make, batches, choose | arguments)


def _train_or_refuse(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> Any:
    try:
        return train(rank, size, make, batches, choose)
    except StratagemError as error:
        return f"refused: {error}"


def _fit_outcome(rank: int, size: int, choose: dict[str, Any], make: Any) -> str:
    return outcome(lambda: train(rank, size, make, joined_batches(2, _BATCH), choose))


def _train_seeded(rank: int, size: int, choose: dict[str, Any], batches: Any) -> Any:
    torch.manual_seed(11)
    return train(rank, size, Dropped, batches, choose)


def _train_from_different_weights(rank: int, size: int, choose: dict[str, Any], batches: Any) -> Any:
    return train(rank, size, lambda: Shifted(seed=rank), batches, choose)


def _train_from_loader(rank: int, size: int, choose: dict[str, Any], samples: Any, batch_size: int) -> Any:
    trainer = sg.Trainer(**choose)
    trainer.fit(Net(), loader(samples, batch_size))
    return {"weights": weights_of(trainer)}


class _Remembers(Net):
    """Keeps the numbers of the samples it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[int] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y, index = batch
        self.indices += [int(each) for each in index]
        return super().training_step((x, y), batch_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:  # type: ignore[override]
        return batch[2], self(batch[0])


def _samples_read(rank: int, size: int, choose: dict[str, Any], count: int) -> tuple[int, list[int]]:
    trainer, module = sg.Trainer(**choose), _Remembers()
    trainer.fit(module, loader((*data(count), torch.arange(count)), 4))
    return trainer.run.mesh.data_shard, module.indices


def _read_shuffled(
    rank: int, size: int, choose: dict[str, Any], count: int, path: Path, resumes: bool
) -> tuple[int, list[int]]:
    """Read one step's batch of an epoch and save, or resume and read the others; return the data shard and samples."""
    sg.seed_everything(2 if resumes else 1)
    trainer, module = sg.Trainer(**(choose | {"max_steps": -1 if resumes else 1})), _Remembers()
    samples = TensorDataset(*data(count), torch.arange(count))
    trainer.fit(module, DataLoader(samples, 4, shuffle=True), ckpt_path=path if resumes else None)
    if not resumes:
        trainer.save_checkpoint(path)
    return trainer.run.mesh.data_shard, module.indices


def _predict(rank: int, size: int, choose: dict[str, Any], count: int) -> Any:
    trainer = sg.Trainer(**choose)
    results = trainer.predict(_Remembers(), loader((*data(count, seed=9), torch.arange(count)), 2))
    outputs = torch.cat([out for _, out in results]).detach().cpu()
    indices = torch.cat([index for index, _ in results]).tolist()
    return {"shard": trainer.run.mesh.data_shard, "indices": indices, "outputs": outputs}


def _validate(rank: int, size: int, choose: dict[str, Any], samples: Any, batches: Any) -> Any:
    module, held_out = Net(), loader(samples, 4)
    before = sg.Trainer(**choose).validate(module, held_out)[0]["val_loss"]
    trainer = sg.Trainer(**(choose | {"num_sanity_val_steps": 2}))
    trainer.fit(module, share(trainer, batches), held_out)
    weights = weights_of(trainer)
    after = trainer.validate(module, held_out)[0]["val_loss"]
    return {"weights": weights, "losses": [before, after]}


def _of_a_run(choose: dict[str, Any]) -> dict[str, Any]:
    """Return what a Run takes of a Trainer's arguments."""
    return {name: choose[name] for name in ("accelerator", "devices", "num_nodes", "strategy") if name in choose}


def _own_loop(rank: int, size: int, choose: dict[str, Any], batches: Any, clip: float | None) -> Any:
    with sg.Run(**_of_a_run(choose)) as run:
        module = Net()
        model, optimizer = run.setup(module, module.configure_optimizers())
        norms = []
        mine = part(batches, run.context.mesh.data_shard, run.context.mesh.num_data_shards)
        for number, (x, y) in enumerate(run.dataloader(mine)):
            if number == 2:  # a batch that is thought better of
                run.backward(loss_of(model(-x), y))
                optimizer.zero_grad()
            run.backward(loss_of(model(x), y))
            if clip is not None:
                norms.append(float(run.clip_gradients(optimizer, max_norm=clip)))
            run.optimizer_step(optimizer)
            optimizer.zero_grad()
        with run.context.making_whole():
            state = run.context.ask("model_state", module=module)
        return {"weights": {name: tensor.detach().cpu().clone() for name, tensor in state.items()}, "norms": norms}


def _traffic(rank: int, size: int, choose: dict[str, Any], batches: Any) -> list[int]:
    counter = EveryBatch(lambda trainer: bytes_sent())
    trainer = sg.Trainer(**(choose | {"accumulate_grad_batches": 3, "callbacks": [counter]}))
    mine = share(trainer, batches)
    before = bytes_sent() or 0
    trainer.fit(Net(), mine)
    totals = [before, *counter.results]
    return [after - earlier for earlier, after in itertools.pairwise(totals)]


def _watched(rank: int, size: int, choose: dict[str, Any], batches: Any, accumulate: int) -> Any:
    hook = _Watch()

    def read(trainer: sg.Trainer) -> tuple[int, int]:
        seen = hook.elements, hook.last
        hook.elements = hook.last = 0
        return seen

    reader = EveryBatch(read)
    arguments = {"comm_hook": [hook], "callbacks": [reader], "accumulate_grad_batches": accumulate}
    result = train(rank, size, Net, batches, choose | arguments)
    closing = reader.results[accumulate - 1 :: accumulate]
    result["elements"], result["last"] = [seen for seen, _ in closing], [last for _, last in closing]
    return result


def _save_half(rank: int, size: int, choose: dict[str, Any], batches: Any, path: Path) -> Any:
    trainer = sg.Trainer(**choose)
    trainer.fit(Scheduled(), share(trainer, batches))
    trainer.save_checkpoint(path)
    return {"weights": weights_of(trainer)}


def _save_outcome(rank: int, size: int, choose: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory(prefix="stratagem-test-") as folder:
        return outcome(lambda: _save_half(rank, size, choose, joined_batches(1, _BATCH), Path(folder) / "x.ckpt"))


def _continue(rank: int, size: int, choose: dict[str, Any], path: Path, batches: Any) -> Any:
    half = len(batches) // 2
    trainer = sg.Trainer(**(choose | {"max_epochs": 2}))
    module = Scheduled(seed=3)  # another model's weights, to be replaced by the checkpoint's
    trainer.fit(module, share(trainer, batches[half:]), ckpt_path=path)
    return {"weights": weights_of(trainer)}


def _load_strangers_weights(rank: int, size: int, choose: dict[str, Any]) -> str:
    trainer = sg.Trainer(**choose)
    module = Net()
    trainer.fit(module, share(trainer, joined_batches(1, _BATCH)))
    state = {name.replace("net", "web"): tensor for name, tensor in weights_of(trainer).items()}
    return outcome(lambda: trainer.run.ask("load_model_state", state=state, module=module, strict=True))


def _raise_on_the_last(rank: int, size: int, choose: dict[str, Any]) -> str:
    class Raises(Net):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            if batch_idx == 2 and rank == size - 1:
                raise ValueError("out of order")
            return super().training_step(batch, batch_idx)

    return outcome(lambda: train(rank, size, Raises, joined_batches(5, _BATCH), choose))


def _three_lives(rank: int, size: int, choose: dict[str, Any]) -> list[dict[str, Any]]:
    lives = []
    with in_empty_folder() as folder:
        for _ in range(3):
            trainer = sg.Trainer(**(choose | {"default_root_dir": folder}))
            trainer.fit(Net(), share(trainer, joined_batches(2, _BATCH)))
            trainer.run.close()
            trainer.run.close()  # safe to call twice
            del trainer
            lives.append(_settled())
    return lives


def _no_more_than(value: Any, other: Any) -> bool:
    return bool(value <= other) if type(value) is int and type(other) is int else bool(value == other)


def _settled() -> dict[str, Any]:
    """Return what this process holds, once it no longer changes: the peer's end of a connection may close later."""
    held, since, deadline = belongings(), time.monotonic(), time.monotonic() + 5
    while time.monotonic() < min(since + 0.5, deadline):
        time.sleep(0.1)
        now = belongings()
        if now != held:
            held, since = now, time.monotonic()
    return held


def _twice(rank: int, size: int, choose: dict[str, Any], batches: Any) -> Any:
    run = sg.Run(**_of_a_run(choose))
    instance = run.stack.strategies[0].plugin
    weights = []
    for _ in range(2):
        trainer = sg.Trainer(**(choose | {"strategy": instance}))
        trainer.fit(Net(), share(trainer, batches))
        weights.append(weights_of(trainer))
        trainer.close()
    return weights


def _collectives(rank: int, size: int, choose: dict[str, Any]) -> list[str]:
    """Return what is wrong, in words."""
    run = sg.Run(**_of_a_run(choose))
    run.connect()
    talk, problems = run.collectives, []
    mine = torch.full((3,), float(rank + 1), device=run.device)
    sums = float(sum(range(1, size + 1)))

    def expect(what: str, got: Any, wanted: Any) -> None:
        if got != wanted:
            problems.append(f"{what} is {got} and not {wanted}")

    for op, wanted in {"mean": sums / size, "sum": sums, "max": float(size), "min": 1.0}.items():
        expect(f"all_reduce {op}", talk.all_reduce(mine, op).tolist(), [wanted] * 3)  # type: ignore[arg-type]
    expect("all_reduce's argument afterwards", mine.tolist(), [float(rank + 1)] * 3)
    expect("average_async", talk.average_async(mine.clone()).wait().tolist(), [sums / size] * 3)
    expect("all_gather", [part.tolist() for part in talk.all_gather(mine)], [[float(r + 1)] * 3 for r in range(size)])
    expect("broadcast", talk.broadcast(mine.clone(), size - 1).tolist(), [float(size)] * 3)
    expect("broadcast_object", talk.broadcast_object({"rank": rank}, size - 1), {"rank": size - 1})
    expect("all_gather_object", talk.all_gather_object(rank), list(range(size)))
    expect("any", (talk.any(rank == size - 1), talk.any(False)), (True, False))
    said = outcome(lambda: talk.fail_together(ValueError("mine") if rank == size - 1 else None))
    expect("fail_together names the error", "mine" in said, True)
    expect("world_size", (talk.world_size, run.world_size), (size, size))
    talk.barrier()
    run.close()
    return problems
