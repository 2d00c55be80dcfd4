"""What a communication hook must do: average over the ranks, equally on all of them, without blocking."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import stratagem as sg
from stratagem.api.capabilities import GRADIENT_BUCKETS
from stratagem.api.world import Collectives
from stratagem.discovery import catalog
from stratagem_buckets import Bucket
from stratagem_buckets.reducer import bucket_reducer
from stratagem_testing.conformance import Conformance
from stratagem_testing.expectations import expect_equal, expect_refused, expect_weights
from stratagem_testing.reference import Net, joined_batches, train_module_plainly
from stratagem_testing.sharing import in_turn
from stratagem_testing.training import outcome, share, train, weights_of, weights_on_all_ranks

_BATCH = 24
_MEAN = (
    "`reduce_bucket` must return the mean, not the sum, the same on all ranks; where ranks agree, look at what "
    "rounding loses: it must be fed back, or the tolerance is too small for this compression"
)


class CommHookConformance(Conformance):
    """Sends buckets through the hook on real ranks, and trains with it.

    class TestMyHook(CommHookConformance):
        plugin = "my_hook"
        tolerance = 1e-2
    """

    kind = "comm_hook"
    world_sizes: ClassVar[Sequence[int]] = (2,)
    #: Largest error of an averaged bucket, relative to its norm. None compares training only, for hooks with error
    #: feedback, whose single steps have larger errors.
    tolerance: ClassVar[float | None] = 1e-2
    #: Largest relative difference of any weight after ten steps, from training with exact averages.
    training_tolerance: ClassVar[float] = 1e-2

    @classmethod
    def parameters(cls) -> dict[str, Sequence[Any]]:
        return super().parameters() | {"dtype": (torch.float32, torch.float64, torch.bfloat16, torch.float16)}

    # --- Buckets -------------------------------------------------------------------------------------------------

    def test_averages_over_the_ranks(self, several: int, dtype: torch.dtype) -> None:
        """Buckets of many sizes in several steps: bit-equal on all ranks, with the buffer's dtype and shape."""
        results = self.run_in(_average_buckets, several, self.choose(), dtype)
        coarse = torch.finfo(dtype).eps * 8
        for step, _ in enumerate(results[0]):
            for rank, result in enumerate(results):
                same = torch.equal(result[step]["got"], results[0][step]["got"])
                assert same, f"`reduce_bucket` returned another average on rank {rank} than on rank 0"
                assert result[step]["like_buffer"], (
                    f"`reduce_bucket` must return dtype and shape of its buffer, {dtype}"
                )
                if self.tolerance is not None:
                    got, true = result[step]["got"].double(), result[step]["true"].double()
                    error = float((got - true).norm() / true.norm())
                    said = f"the average of {got.numel()} gradients is off by {error:.1e} (see `tolerance`); {_MEAN}"
                    assert error < max(self.tolerance, coarse), said

    def test_does_not_wait(self) -> None:
        """It leaves backward alone: several buckets may be on their way, and their answers come in any order."""
        run, paper = sg.Run(**self.choose()), _SimulatedRanks()
        reduce = bucket_reducer(run, over=paper)
        assert reduce is not None
        futures = [reduce(_of_one_parameter(index)) for index in range(2)]

        assert paper.sent, "`reduce_bucket` sent nothing; yield what is to be averaged"
        early = any(future.done() for future in futures)
        assert not early, "`reduce_bucket` ended before an answer arrived; yield what is to be averaged"
        arrived = 0
        while arrived < len(paper.sent):  # a hook may send again when something arrives
            waiting = paper.sent[arrived:]
            arrived = len(paper.sent)
            for answer, future in reversed(waiting):
                future.set_result(answer)
        if self.tolerance is not None:
            for index, future in enumerate(futures):
                found, look = future.wait().flatten().tolist(), "`reduce_bucket` must keep nothing in attributes"
                expected = pytest.approx([float(2 + index)] * 64, rel=self.tolerance)
                expect_equal(
                    f"the average of bucket {index} of two, answered in the other order", found, expected, look
                )

    def test_what_is_not_finite_stays_so(self, several: int) -> None:
        """A value that is not finite must not be hidden: loss scaling detects overflows in the averaged gradients."""
        for finite in self.run_in(_send_infinity, several, self.choose()):
            assert not finite, "`reduce_bucket` made an infinite gradient finite; it must not clamp or replace it"

    def test_zeros_stay_zeros(self, several: int) -> None:
        for largest in self.run_in(_send_zeros, several, self.choose()):
            expect_equal("largest average of zeros from `reduce_bucket`", largest, 0.0, "do not divide by a norm")

    # --- Training ------------------------------------------------------------------------------------------------

    def test_trains(self, several: int) -> None:
        batches = joined_batches(10, _BATCH)
        self._compare(self._train(several, batches), train_module_plainly(Net(), batches)[0])

    def test_trains_with_accumulation_and_clipping(self, several: int) -> None:
        batches = joined_batches(10, _BATCH)
        limits: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        reference, _ = train_module_plainly(Net(), batches, accumulate=2, max_norm=0.5)

        self._compare(self._train(several, batches, **limits), reference)

    def test_stacks_over_and_under_another_hook(self, several: int) -> None:
        """An outer hook may send any part of a bucket, and an inner hook may return rounded values."""
        batches = joined_batches(6, _BATCH)
        reference, _ = train_module_plainly(Net(), batches)
        plugin = self.choice().plugin
        legal = []
        for stack, is_legal in (
            ([self.plugin, Halves()], not plugin.innermost),
            ([Halves(), self.plugin], not plugin.outermost),
        ):
            if is_legal:
                legal.append((Net, batches, self._arguments(several, comm_hook=stack)))
            else:
                refused = outcome(lambda stack=stack: sg.Run(**self.choose(comm_hook=stack)))  # type: ignore[misc]
                expect_refused("a hook beside it in this order", refused, look="see `innermost` and `outermost`")
        for results in zip(*self.run_in(in_turn, several, train, legal), strict=True):
            self._compare(results, reference)

    def test_a_second_run_is_like_the_first(self, several: int) -> None:
        """The same instance works twice in one process, and the first run does not affect the second."""
        for first, second in self.run_in(_twice, several, self._arguments(several), joined_batches(4, _BATCH)):
            differing = [name for name in first if not torch.equal(first[name], second[name])]
            assert not differing, f"{differing} differ in an instance's second run; it must keep nothing of a run"

    def test_resumes_as_if_never_stopped(self, several: int) -> None:
        """What it keeps between steps, such as residuals of error feedback, is in checkpoints, for each rank."""
        # DDP would lay out the buckets once more after the first step of a process.
        strategy = {"name": catalog.default("strategy_distributed"), "find_unused_parameters": True}
        arguments = self._arguments(several, strategy=strategy)
        look = "`rank_state` must return what the hook keeps between steps, and `load_rank_states` take it back"
        with tempfile.TemporaryDirectory(prefix="stratagem-test-") as folder:
            both = self.run_in(_in_one_and_two_parts, several, arguments, joined_batches(8, _BATCH), Path(folder))
        for whole, resumed in both:
            expect_weights(resumed, whole, "training that was not stopped", 1e-6, look)

    def test_strategies_without_buckets_are_refused(self) -> None:
        """The hook would have no effect with them."""
        assert GRADIENT_BUCKETS in self.capabilities.requires, f"`capabilities` must require {GRADIENT_BUCKETS!r}"
        single = catalog.default("strategy")

        expect_refused("a strategy without buckets", outcome(lambda: sg.Run(**self.choose(strategy=single))))

    # --- Helpers -------------------------------------------------------------------------------------------------

    def choose(self, **arguments: Any) -> dict[str, Any]:
        return super().choose(**({"strategy": catalog.default("strategy_distributed")} | arguments))

    def _train(self, world_size: int, batches: Any, **arguments: Any) -> Any:
        return self.run_in(train, world_size, Net, batches, self._arguments(world_size, **arguments))

    def _compare(self, results: Any, reference: dict[str, Tensor]) -> None:
        __tracebackhide__ = True
        weights, limit = weights_on_all_ranks(results, _MEAN), self.training_tolerance
        expect_weights(weights, reference, "training with exact averages", limit, _MEAN, "training_tolerance")


def _in_one_and_two_parts(
    rank: int, world_size: int, arguments: dict[str, Any], batches: list[Any], folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    def fit(path: Path | None = None, **limits: Any) -> sg.Trainer:
        trainer = sg.Trainer(**arguments | {"devices": world_size} | limits)
        trainer.fit(Net(), share(trainer, batches), ckpt_path=path)
        return trainer

    whole = weights_of(fit())
    fit(max_steps=len(batches) // 2).save_checkpoint(folder / "half.ckpt")
    return whole, weights_of(fit(folder / "half.ckpt"))


class Halves(sg.CommHook):
    """Sends each buffer in two halves, which hooks inside and outside of it must support."""

    @sg.hookimpl
    def reduce_bucket(self, bucket: Bucket) -> Any:
        cut = bucket.buffer.numel() // 2
        first = yield bucket.buffer[:cut].clone()
        second = yield bucket.buffer[cut:].clone()
        return torch.cat([first, second], out=bucket.buffer)


class _SimulatedRanks(Collectives):
    """Simulates two ranks that send the same; a check completes the messages."""

    world_size = 2

    def __init__(self) -> None:
        #: The future and the result of each message.
        self.sent: list[tuple[Tensor, Any]] = []

    def average_async(self, tensor: Tensor) -> Any:
        self.sent.append((tensor, torch.futures.Future()))
        return self.sent[-1][1]

    def all_gather_async(self, tensor: Tensor) -> Any:
        return self.average_async(torch.cat([tensor, tensor]))

    def all_to_all_async(self, tensor: Tensor) -> Any:
        mine = tensor[: tensor.numel() // 2]
        return self.average_async(torch.cat([mine, mine]))


def _of_one_parameter(index: int) -> Bucket:
    """Return one of two buckets, each with the gradient of one square parameter."""
    parameter, buffer = torch.nn.Parameter(torch.zeros(8, 8)), torch.full((64,), float(2 + index))
    return Bucket(
        buffer=buffer, index=index, is_last=index == 1, parameters=(parameter,), gradients=(buffer.view(8, 8),)
    )


# --- In each process ---------------------------------------------------------------------------------------------


def _connected(size: int, choose: dict[str, Any]) -> tuple[sg.Run, Any]:
    run = sg.Run(**(choose | {"devices": size}))
    run.connect()
    return run, bucket_reducer(run)


def _average_buckets(rank: int, size: int, choose: dict[str, Any], dtype: torch.dtype) -> list[dict[str, Any]]:
    run, reduce = _connected(size, choose)
    results = []
    for step in range(3):
        waiting = []
        for index, count in enumerate((1, 7, 64, 1000)):
            generator = torch.Generator().manual_seed(1000 * step + 10 * index)
            every = [torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]
            buffer = every[rank].clone()
            future = reduce(Bucket(buffer=buffer, index=index, is_last=index == 3))
            waiting.append((future, torch.stack(every).double().mean(0)))
        for future, true in waiting:
            got = future.wait()
            like_buffer = (got.dtype, got.shape) == (dtype, true.shape)
            results.append({"got": got.clone(), "true": true, "like_buffer": like_buffer})
    run.close()
    return results


def _send_infinity(rank: int, size: int, choose: dict[str, Any]) -> bool:
    _, reduce = _connected(size, choose)
    buffer = torch.ones(64)
    buffer[5] = float("inf") if rank == 0 else 1.0
    result = reduce(Bucket(buffer=buffer)).wait()
    return bool(torch.isfinite(result).all())


def _send_zeros(rank: int, size: int, choose: dict[str, Any]) -> float:
    _, reduce = _connected(size, choose)
    return float(reduce(Bucket(buffer=torch.zeros(64))).wait().abs().max())


def _twice(rank: int, size: int, choose: dict[str, Any], batches: Any) -> Any:
    hook = sg.Run(**{name: choose[name] for name in ("accelerator", "devices", "strategy", "comm_hook")})
    instance = hook.stack.of("comm_hook")[0].plugin
    return [train(rank, size, Net, batches, choose | {"comm_hook": [instance]})["weights"] for _ in range(2)]
