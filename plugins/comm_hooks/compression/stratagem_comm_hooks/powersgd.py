"""Send the gradient of each matrix as two narrow factors.

[Note: one step of power iteration]
A matrix M (rows, columns) is sent as P (rows, rank) and Q (columns, rank), M ~ P Q^T. Every rank begins with the same
Q. Each sends P = M Q; the average is made orthonormal; with it each sends Q = M^T P. Both averages are linear in M, so
P Q^T is what the average of all M would have given. What does not shrink that way (vectors, small matrices) travels
whole, in one message with the P. The new Q is where the next step begins: over the steps it turns to the largest
singular directions.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stratagem.api import Bucket, hookimpl
from stratagem.api.per_run import PerRun
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_comm_hooks.feedback import Feedback
from stratagem_comm_hooks.lossy import is_finite
from stratagem_comm_hooks.owed import Layout, as_real

if TYPE_CHECKING:
    from stratagem.api import RunContext


@frozen
class Matrix:
    """A part of a bucket that is sent as two factors."""

    #: What its Q is remembered by.
    key: str
    #: Where it lies among the bucket's numbers, row by row.
    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    def within(self, numbers: Tensor) -> Tensor:
        """Return the view of `numbers` that is this matrix: (rows, columns)."""
        return numbers[self.start : self.end].view(self.rows, self.columns)


@define(eq=False, kw_only=True)
class _PowerIteration(Feedback):
    """Sends the matrices that a subclass finds in a bucket; see [Note: one step of power iteration]."""

    #: Columns of the factors: more follow the gradient closer, and cost as many times the bytes. 1 if not given.
    rank: int | None = field(default=None, validator=at_least(1))
    #: Another name for `rank`, the one that torch gives it.
    matrix_approximation_rank: int | None = field(default=None, validator=at_least(1))
    #: Optimizer steps before that send whole gradients, while they change fast: fewer save bytes, more start better.
    start_powerSGD_iter: int = field(default=1000, validator=at_least(0))  # noqa: N815 - torch's spelling
    #: What would shrink less than so many times travels whole: higher spares work that saves little.
    min_compression_rate: float = field(default=2.0, validator=at_least(1))
    #: Return with the next step what the factors did not hold: costs the memory of the gradients, in fp32.
    use_error_feedback: bool = True
    #: Begin with the last step's Q: follows the gradient closer; without, each step draws a new one.
    warm_start: bool = True
    #: 0 makes P orthonormal by Householder reflections. More uses the Gram-Schmidt process, faster for a few long
    #: columns on some devices, with this added to each norm: P is then orthonormal only about.
    orthogonalization_epsilon: float = field(default=0.0, validator=at_least(0))
    #: What the first Q are drawn from, the same on all ranks; the run's own random numbers are left alone.
    random_seed: int = field(default=0, validator=at_least(0))

    #: The Q to begin the next step with.
    _starts: PerRun[dict[str, Tensor]] = field(init=False, factory=lambda: PerRun(dict), repr=False)

    def __attrs_post_init__(self) -> None:
        named = {self.rank, self.matrix_approximation_rank} - {None}
        if len(named) > 1:
            raise ConfigError(
                f"{type(self).__name__}.rank is {self.rank} and matrix_approximation_rank is "
                f"{self.matrix_approximation_rank}",
                expected="one of them, as they mean the same",
            )
        self.rank = named.pop() if named else 1
        if self.start_powerSGD_iter < 2 and (self.use_error_feedback or self.warm_start):
            raise ConfigError(
                f"{type(self).__name__}.start_powerSGD_iter is {self.start_powerSGD_iter} with use_error_feedback or "
                "warm_start",
                expected="at least 2: an engine may lay out its buckets again after the first step",
                do="raise it, or set both to false",
            )

    def matrices(self, bucket: Bucket, layout: Layout) -> list[Matrix]:
        """Return the matrices in `bucket`, in their order."""
        raise NotImplementedError

    @hookimpl
    def prepare_module(self, run: RunContext) -> None:
        super().prepare_module(run)
        if run.stage == "train":
            self._check_alike(run)

    def _check_alike(self, run: RunContext) -> None:
        """Refuse ranks that may compute other bits from the same numbers. Collective."""
        everybody = run.peers.all_gather_object(_computed_by(run.device))
        rank = next((rank for rank, other in enumerate(everybody) if other != everybody[0]), None)
        if rank is not None:
            raise ConfigError(
                f"comm_hook {run.name_of(self)!r} computes on rank 0 with {everybody[0]} and on rank {rank} with "
                f"{everybody[rank]}",
                expected="the same device and versions on all ranks, as each makes its factors orthonormal for itself "
                "and all must get the same bits",
                do="train on equal machines, or choose another comm_hook",
            )

    @hookimpl
    def reduce_bucket(self, bucket: Bucket, run: RunContext) -> Generator[Any, Any, Tensor]:
        owed = self.owed(run)
        layout = owed.layout(bucket, owed.place(bucket), run)
        compresses = self.steps(run) >= self.start_powerSGD_iter
        matrices = [each for each in self.matrices(bucket, layout) if self._shrinks(each)] if compresses else []
        if not matrices and not any(key in owed.rests for key, _ in layout):
            average: Tensor = yield bucket.buffer
            self.see(average, run)
            return average

        buffer, numbers = as_real(bucket.buffer), owed.plus(bucket, layout)
        count, end = numbers.numel(), matrices[-1].end if matrices else 0
        numbers = F.pad(numbers, (0, max(0, end - count)))
        before = [self._start(each, numbers, run) for each in matrices]
        average, after = yield from self._average(numbers, matrices, before, buffer.dtype)
        buffer.copy_(average[:count])
        finite = self.see(bucket.buffer, run)
        if self.use_error_feedback:
            owed.keep(numbers[:count], layout, finite)
        if self.warm_start:
            self._remember(matrices, before, after, finite, run)
        return bucket.buffer

    def _average(
        self, numbers: Tensor, matrices: list[Matrix], qs: list[Tensor], dtype: torch.dtype
    ) -> Generator[Tensor, Tensor, tuple[Tensor, list[Tensor]]]:
        """Return the average of `numbers` and the new Q; leave in `numbers` what of them was not sent."""
        average = torch.empty_like(numbers)
        whole = _outside(matrices, numbers.numel())
        ms = [each.within(numbers) for each in matrices]
        pieces = [numbers[part] for part in whole] + [m @ q for m, q in zip(ms, qs, strict=True)]
        answer = yield _joined(pieces, dtype)
        finite = is_finite(answer)
        pieces = _parted(answer, pieces)
        for part, piece in zip(whole, pieces, strict=False):
            average[part], numbers[part] = piece, 0.0
        if matrices:
            ps = [orthonormal(p, self.orthogonalization_epsilon) for p in pieces[len(whole) :]]
            qs = [m.T @ p for m, p in zip(ms, ps, strict=True)]
            message = _joined(qs, dtype)
            for m, p, q in zip(ms, ps, _parted(message, qs), strict=True):
                m -= p @ q.T
            answer = yield message
            finite &= is_finite(answer)
            qs = _parted(answer, qs)
            for each, p, q in zip(matrices, ps, qs, strict=True):
                torch.matmul(p, q.T, out=each.within(average))
        # What is not finite in one factor may leave some of the products so.
        return average.masked_fill_(~finite, float("nan")), qs

    def _shrinks(self, matrix: Matrix) -> bool:
        assert self.rank is not None, "the constructor sets it"
        factors = (matrix.rows + matrix.columns) * self.rank
        return matrix.rows * matrix.columns >= self.min_compression_rate * factors

    # --- Q -------------------------------------------------------------------------------------------------------

    def _start(self, matrix: Matrix, like: Tensor, run: RunContext) -> Tensor:
        """Return the Q to begin with: the last step's, or one drawn alike on all ranks."""
        assert self.rank is not None, "the constructor sets it"
        kept = self._starts.of(run).get(matrix.key)
        if kept is not None and kept.shape == (matrix.columns, self.rank):
            return kept.to(like.dtype)
        seed = zlib.crc32(f"{self.random_seed} {self.steps(run)} {matrix.key}".encode())
        generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers whatever the device
        drawn = torch.randn(matrix.columns, self.rank, generator=generator)
        return drawn.to(like.device, like.dtype, non_blocking=True)

    def _remember(
        self, matrices: list[Matrix], before: list[Tensor], after: list[Tensor], finite: Tensor, run: RunContext
    ) -> None:
        """Begin the next step with the Q of this one; but from nan, and from zeros, no step would find a way back."""
        for each, old, new in zip(matrices, before, after, strict=True):
            self._starts.of(run)[each.key] = torch.where(finite & new.any(), new, old)

    def rank_state(self, run: RunContext) -> dict[str, Any]:
        starts = {key: start.to("cpu", copy=True) for key, start in self._starts.of(run).items()}
        return super().rank_state(run) | {"starts": starts}

    def load_rank_states(self, states: list[dict[str, Any]], run: RunContext) -> None:
        super().load_rank_states(states, run)
        # All that average together began with the same.
        starts = states[run.rank if len(states) == run.world_size else 0]["starts"]
        self._starts.of(run).update({key: start.to(run.device) for key, start in starts.items()})


@define(eq=False, kw_only=True)
class PowerSGD(_PowerIteration):
    """The gradient of each matrix travels as two narrow factors.

    Vogels et al., "PowerSGD", NeurIPS 2019. A convolution's kernel is a matrix of output channels by all the rest.
    Sends through the hook below: ["powersgd", "fp16_compress"] halves the factors once more.
    """

    outermost = True

    def matrices(self, bucket: Bucket, layout: Layout) -> list[Matrix]:
        if not bucket.gradients:
            return _as_square(layout)
        found, start = [], 0
        for gradient, (key, size) in zip(bucket.gradients, layout, strict=True):
            if gradient.dim() > 1 and size:
                _, rows = max(zip(gradient.stride(), gradient.shape, strict=True))  # of numbers as they lie in memory
                found.append(Matrix(key, start, rows, size // rows))
            start += size
        return found


@define(eq=False, kw_only=True)
class BatchedPowerSGD(_PowerIteration):
    """Each bucket travels as two narrow factors of one square matrix, whatever parameters it holds.

    Vogels et al., "PowerSGD", NeurIPS 2019, in torch's variant: fewer and larger products than `powersgd`, and a matrix
    that means less, so that the same rank holds less of the gradient. Works under other hooks.
    """

    def matrices(self, bucket: Bucket, layout: Layout) -> list[Matrix]:
        return _as_square(layout)


def orthonormal(matrix: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return an orthonormal base of the columns of `matrix`, continuous in it: no column flips its sign.

    The same bits give the same bits: all ranks compute it for themselves.
    """
    if epsilon == 0:
        base: Tensor
        base, triangle = torch.linalg.qr(matrix)
        return base * torch.where(triangle.diagonal() < 0, -1.0, 1.0)
    base = matrix.clone()
    for index in range(base.shape[1]):
        column, others = base[:, index], base[:, :index]
        column -= others @ (others.T @ column)
        column /= torch.linalg.vector_norm(column) + epsilon
    return base


def _computed_by(device: torch.device) -> str:
    """Return what the last bits of a computation on `device` depend on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"  # which names its CUDA
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def _as_square(layout: Layout) -> list[Matrix]:
    """Return all of a bucket as one matrix, nearly square; it may reach beyond the bucket's end."""
    count = sum(size for _, size in layout)
    rows = math.isqrt(max(0, count - 1)) + 1
    return [Matrix(layout[0][0], 0, rows, -(-count // rows))] if count else []


def _outside(matrices: list[Matrix], count: int) -> list[slice]:
    """Return the parts of a bucket of `count` numbers that lie in no matrix."""
    starts, ends = [each.start for each in matrices], [each.end for each in matrices]
    bounds = zip([0, *ends], [*starts, count], strict=True)
    return [slice(low, high) for low, high in bounds if low < high]


def _joined(pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces]).to(dtype)


def _parted(message: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return what `_joined` made one message of, in the shapes and the dtype of the pieces in `like`."""
    pieces = message.to(like[0].dtype, copy=True).split([piece.numel() for piece in like])
    return [piece.view(each.shape) for piece, each in zip(pieces, like, strict=True)]
