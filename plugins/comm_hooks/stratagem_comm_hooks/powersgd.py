"""PowerSGD: send the gradient of each matrix as two low-rank factors.

[Note: one step of power iteration]
A matrix M (rows, columns) is sent as P (rows, rank) and Q (columns, rank), M ~ P Q^T. All ranks start from the same Q.
Each sends P = M Q; the average of P is orthonormalized; then each sends Q = M^T P. Both averages are linear in M, so P
Q^T equals the result for the average of all M. Tensors that would not become smaller (vectors, small matrices) are sent
uncompressed, in one message with the P. The new Q is the start of the next step: over the steps it converges to the
largest singular vectors.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from stratagem.api import hookimpl
from stratagem.api.per_run import PerRun
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_buckets import Bucket
from stratagem_buckets.flat import flatten, views
from stratagem_comm_hooks.error_feedback import Layout, as_real
from stratagem_comm_hooks.feedback_hook import FeedbackHook
from stratagem_comm_hooks.lossy import is_finite

if TYPE_CHECKING:
    from stratagem.api import RunContext


@frozen
class Matrix:
    """A part of a bucket that is sent as two factors."""

    #: The key of its Q.
    key: str
    #: Where it starts in the bucket; elements are in row-major order.
    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    def within(self, values: Tensor) -> Tensor:
        """Return the view of `values` that is this matrix: (rows, columns)."""
        return values[self.start : self.end].view(self.rows, self.columns)


@define(eq=False, kw_only=True)
class _PowerIteration(FeedbackHook):
    """Compresses the matrices that a subclass finds in a bucket; see [Note: one step of power iteration]."""

    #: Columns of the factors: more approximate the gradient better, and cost bytes in proportion. 1 if not given.
    rank: int | None = field(default=None, validator=at_least(1))
    #: torch's name for `rank`.
    matrix_approximation_rank: int | None = field(default=None, validator=at_least(1))
    #: Number of first steps without compression, while gradients change fast: fewer save bytes, more start better.
    start_powerSGD_iter: int = field(default=1000, validator=at_least(0))  # noqa: N815 - torch's name
    #: Matrices that would not become this many times smaller are sent uncompressed: higher saves computation.
    min_compression_rate: float = field(default=2.0, validator=at_least(1))
    #: Add the approximation error to the next step: costs the memory of the gradients, in fp32.
    use_error_feedback: bool = True
    #: Start from the last step's Q: approximates better; without it, each step draws a random one.
    warm_start: bool = True
    #: 0 orthonormalizes P by Householder QR. A value above 0 uses the Gram-Schmidt process, faster for a few long
    #: columns on some devices, and is added to each norm: P is then only approximately orthonormal.
    orthogonalization_epsilon: float = field(default=0.0, validator=at_least(0))
    #: Seed of the first Q, the same on all ranks; the random state of the run is not used.
    random_seed: int = field(default=0, validator=at_least(0))

    #: The Q of the last step, by key.
    _starts: PerRun[dict[str, Tensor]] = field(init=False, factory=lambda: PerRun(dict), repr=False)

    def __attrs_post_init__(self) -> None:
        named = {self.rank, self.matrix_approximation_rank} - {None}
        if len(named) > 1:
            raise ConfigError(
                f"{type(self).__name__}.rank is {self.rank} and matrix_approximation_rank is "
                f"{self.matrix_approximation_rank}",
                expected="one of them, as they are the same option",
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
            self._check_same_arithmetic(run)

    def _check_same_arithmetic(self, run: RunContext) -> None:
        """Refuse ranks that may compute different bits from the same input. Collective."""
        devices = run.peers.all_gather_object(_arithmetic(run.device))
        rank = next((rank for rank, other in enumerate(devices) if other != devices[0]), None)
        if rank is not None:
            raise ConfigError(
                f"comm_hook {run.name_of(self)!r} computes on rank 0 with {devices[0]} and on rank {rank} with "
                f"{devices[rank]}",
                expected="the same device and versions on all ranks, as each orthonormalizes its own factors "
                "and all must get the same bits",
                do="train on identical machines, or choose another comm_hook",
            )

    @hookimpl
    def reduce_bucket(self, bucket: Bucket, run: RunContext) -> Generator[Any, Any, Tensor]:
        feedback = self.feedback(run)
        layout = feedback.layout(bucket, feedback.slot(bucket), run)
        compresses = self.steps(run) >= self.start_powerSGD_iter
        matrices = [each for each in self.matrices(bucket, layout) if self._shrinks(each)] if compresses else []
        if not matrices and not any(key in feedback.residuals for key, _ in layout):
            average: Tensor = yield bucket.buffer
            self.check(average, run)
            return average

        buffer = as_real(bucket.buffer)
        count, end = buffer.numel(), matrices[-1].end if matrices else 0
        values = feedback.take(bucket, layout, max(count, end))
        fits = (len(values), values.dtype) == (count, buffer.dtype)
        average = buffer if fits else torch.empty_like(values)
        before = [self._start(each, values, run) for each in matrices]
        after = yield from self._average(values, average, matrices, before, buffer.dtype)
        if not fits:
            buffer.copy_(average[:count])
        finite = self.check(bucket.buffer, run)
        if self.use_error_feedback:
            feedback.keep(values, layout, finite)
        if self.warm_start:
            self._remember(matrices, before, after, finite, run)
        return bucket.buffer

    def _average(
        self, values: Tensor, average: Tensor, matrices: list[Matrix], qs: list[Tensor], dtype: torch.dtype
    ) -> Generator[Tensor, Tensor, list[Tensor]]:
        """Write the average of `values` to `average`, leave the residual in `values`, and return the new Q."""
        whole = _outside(matrices, values.numel())
        ms = [each.within(values) for each in matrices]
        pieces = [values[part] for part in whole] + [m @ q for m, q in zip(ms, qs, strict=True)]
        reply = yield flatten(pieces).to(dtype)
        finite = is_finite(reply)
        pieces = _split(reply, pieces)
        for part, piece in zip(whole, pieces, strict=False):
            average[part], values[part] = piece, 0.0
        if matrices:
            ps = [orthonormal(p, self.orthogonalization_epsilon) for p in pieces[len(whole) :]]
            qs = [m.T @ p for m, p in zip(ms, ps, strict=True)]
            message = flatten(qs).to(dtype)
            for each, m, p, q in zip(matrices, ms, ps, _split(message, qs), strict=True):
                m -= torch.matmul(p, q.T, out=each.within(average))
            reply = yield message
            finite &= is_finite(reply)
            qs = _split(reply, qs)
            for each, p, q in zip(matrices, ps, qs, strict=True):
                torch.matmul(p, q.T, out=each.within(average))
        # A factor with nan or inf may leave some elements of the product finite: make all of them nan.
        average.masked_fill_(~finite, float("nan"))
        return qs

    def _shrinks(self, matrix: Matrix) -> bool:
        assert self.rank is not None, "the constructor sets it"
        factors = (matrix.rows + matrix.columns) * self.rank
        return matrix.rows * matrix.columns >= self.min_compression_rate * factors

    # --- Q -------------------------------------------------------------------------------------------------------

    def _start(self, matrix: Matrix, like: Tensor, run: RunContext) -> Tensor:
        """Return the Q to start from: the last step's, or a random one, the same on all ranks."""
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
        """Start the next step from this Q, unless it has nan or is zero: power iteration would stay there."""
        for each, old, new in zip(matrices, before, after, strict=True):
            self._starts.of(run)[each.key] = torch.where(finite & new.any(), new, old)

    def rank_state(self, run: RunContext) -> dict[str, Any]:
        starts = {key: start.to("cpu", copy=True) for key, start in self._starts.of(run).items()}
        return super().rank_state(run) | {"starts": starts}

    def load_rank_states(self, states: list[dict[str, Any]], run: RunContext) -> None:
        super().load_rank_states(states, run)
        # All ranks that average together have the same Q.
        starts = states[run.rank if len(states) == run.world_size else 0]["starts"]
        self._starts.of(run).update({key: start.to(run.device) for key, start in starts.items()})


@define(eq=False, kw_only=True)
class PowerSGD(_PowerIteration):
    """Send the gradient of each matrix as two low-rank factors.

    Vogels et al., "PowerSGD", NeurIPS 2019. A convolution kernel is a matrix of output channels by all other
    dimensions. Sends through the next hook of the list: ["powersgd", "fp16_compress"] halves the bytes of the factors.
    """

    outermost = True

    def matrices(self, bucket: Bucket, layout: Layout) -> list[Matrix]:
        if not bucket.gradients:
            return _as_square(layout)
        found, start = [], 0
        for gradient, (key, size) in zip(bucket.gradients, layout, strict=True):
            if gradient.dim() > 1 and size:
                _, rows = max(zip(gradient.stride(), gradient.shape, strict=True))  # by the order in memory
                found.append(Matrix(key, start, rows, size // rows))
            start += size
        return found


@define(eq=False, kw_only=True)
class BatchedPowerSGD(_PowerIteration):
    """Send each bucket as two low-rank factors of one square matrix, whatever parameters it has.

    Vogels et al., "PowerSGD", NeurIPS 2019, in torch's batched variant: fewer and larger products than `powersgd`, but
    the matrix has no structure, so that the same rank approximates it worse. Works after other hooks of the list.
    """

    def matrices(self, bucket: Bucket, layout: Layout) -> list[Matrix]:
        return _as_square(layout)


def orthonormal(matrix: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return an orthonormal basis of the columns of `matrix`, continuous in it: no column flips its sign.

    Deterministic: all ranks compute the same bits from the same input.
    """
    if epsilon == 0:
        basis: Tensor
        basis, triangle = torch.linalg.qr(matrix)
        return basis * torch.where(triangle.diagonal() < 0, -1.0, 1.0)
    basis = matrix.clone()
    for index in range(basis.shape[1]):
        column, others = basis[:, index], basis[:, :index]
        column -= others @ (others.T @ column)
        column /= torch.linalg.vector_norm(column) + epsilon
    return basis


def _arithmetic(device: torch.device) -> str:
    """Return a description of everything that the bits of a result on `device` depend on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"  # the version names its CUDA
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def _as_square(layout: Layout) -> list[Matrix]:
    """Return the whole bucket as one nearly square matrix; it may extend beyond the end of the bucket."""
    count = sum(size for _, size in layout)
    rows = math.isqrt(max(0, count - 1)) + 1
    return [Matrix(layout[0][0], 0, rows, -(-count // rows))] if count else []


def _outside(matrices: list[Matrix], count: int) -> list[slice]:
    """Return the parts of a bucket of `count` elements that belong to no matrix."""
    starts, ends = [each.start for each in matrices], [each.end for each in matrices]
    bounds = zip([0, *ends], [*starts, count], strict=True)
    return [slice(low, high) for low, high in bounds if low < high]


def _split(message: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Split a `message` into tensors with the shapes and the dtype of those in `like`."""
    return views(message.to(like[0].dtype, copy=True), like)
