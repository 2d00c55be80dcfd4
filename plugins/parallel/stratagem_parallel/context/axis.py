"""The axis `context`: cuts batches, and makes steps compute on parts of sequences."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.errors import ConfigError, StratagemError
from stratagem_parallel import on_demand
from stratagem_parallel.context.batch import part_of, tensors_of, tensors_to_cut
from stratagem_parallel.context.functions import Replacements
from stratagem_parallel.context.losses import mean_per_rank
from stratagem_parallel.context.part import Part, running
from stratagem_parallel.exchange import gather
from stratagem_parallel.same_batches import is_due
from stratagem_parallel.target_numbers import divisor

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem.api import Collectives, RunContext

#: What is called in each stage of which batches are compared.
_METHODS = {"train": "training_step", "validate": "validation_step", "test": "test_step"}


class ContextAxis(Part):
    """Sequences that are cut over the ranks of `over`.

    Args:
        dim: the dimension of a batch's tensors that is cut.
        names: of the tensors that are cut; None is all that have the dimension.
        method: how attention is computed.
        checks: whether steps 1, 2, 4, 8 ... of each stage are checked for what would be wrong on a part of a sequence.
    """

    def __init__(self, over: Collectives, dim: int, names: tuple[str, ...] | None, method: str, checks: bool) -> None:
        super().__init__(over, dim, method)
        self.names, self.checks = names, checks
        #: Batches of each stage that were cut, and steps.
        self._batches, self._steps = Counter[str](), Counter[str]()
        self._replacements = Replacements(
            [(self.attention.attend, self.attention), *((loss.loss, loss) for loss in self.losses)]
        )
        self._models: Any = None
        self._handles: list[Any] = []
        #: Some positions of a batch of each stage, whole and this rank's part, which are to be compared.
        self._short: dict[str, tuple[Any, Any, int]] = {}
        #: What differs and was named: metrics; and the methods that cannot be compared.
        self._named: set[str] = set()
        #: The error of that comparison: raised after the step, whose checks may know the operation.
        self._difference: ConfigError | None = None

    # --- The model -----------------------------------------------------------------------------------------------

    def prepare(self, step_module: nn.Module, run: RunContext) -> None:
        """Have predictions gathered and models of Hugging Face called as parts of sequences need it."""
        self.close()
        self._batches, self._steps, self._short, self._named = Counter(), Counter(), {}, set()
        self.module, self._models = step_module, on_demand.sequences().HuggingFaceModels(step_module, self)
        self._handles = [step_module.register_forward_hook(self._gather_predictions)]

    def close(self) -> None:
        """Leave the model alone from now on."""
        if self._models is not None:
            self._models.close()
            self._models = None
        while self._handles:
            self._handles.pop().remove()

    def _gather_predictions(self, _: nn.Module, arguments: Any, output: Any) -> Any:
        """Gather the tensors that ``predict_step`` returns with the length of a part. Collective.

        Raises:
            ConfigError: it cannot be told whether a dimension is one of positions.
        """
        if arguments[:1] != ("predict_step",):
            return output
        from stratagem.api.batches import map_batch

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() <= self.dim or leaf.shape[self.dim] != self.length:
                return leaf
            if leaf.dim() == self.dim + 1 and leaf.is_floating_point():
                shape = tuple(leaf.shape)
                raise ConfigError(
                    f"predict_step returned numbers of shape {shape}, and each rank of strategy.parallel.context has "
                    f"{self.length} positions: dimension {self.dim} may be of positions or of something else",
                    expected="tensors that tell whether they are parts of sequences",
                    do=f"return x[..., None] if it is of positions, or x.unsqueeze({self.dim}) if it is not",
                )
            return gather(leaf, self.dim, self.over)

        return map_batch(output, whole)

    # --- Batches -------------------------------------------------------------------------------------------------

    def cut(self, batch: Any, run: RunContext) -> Any:
        """Return this rank's part of `batch`."""
        cut = tensors_to_cut(batch, self.dim, self.names, self.over.world_size)
        self._batches[run.stage] += 1
        number = self._batches[run.stage]
        if self._batches.total() == 1:
            self._announce(batch, cut, run)
        shape = next(iter(cut.values())).shape
        self.length, self.samples = shape[self.dim] // self.over.world_size, math.prod(shape[: self.dim])
        compares = self.checks and not run.environment.simulated  # values
        if compares and run.stage in _METHODS and is_due(number):
            self._short[run.stage] = self._some(batch, cut, last=number.bit_length() % 2 == 0)
        return part_of(batch, cut, self.dim, self.over.rank, self.over.world_size)

    def _some(self, batch: Any, cut: dict[str, Tensor], *, last: bool) -> tuple[Any, Any, int]:
        """Return the first or the `last` positions of `batch`, this rank's part of them, and the length of a part."""
        length, size = min(self.length, on_demand.sequences().POSITIONS), self.over.world_size
        start = (self.length - length) * size if last else 0
        some = {name: tensor.narrow(self.dim, start, length * size) for name, tensor in cut.items()}
        return part_of(batch, some, self.dim, 0, 1), part_of(batch, some, self.dim, self.over.rank, size), length

    def compare(self, user: nn.Module, stage: str, batch_idx: int, run: RunContext) -> None:
        """Compare parts and whole sequences before some steps of a stage: [Note: the comparison]. Collective."""
        short = self._short.pop(stage, None)
        method, before = _METHODS.get(stage, ""), (self.length, self.is_local)
        if short is None or method in self._named:
            return
        whole, part, length = short

        def step(batch: Any) -> Any:
            if stage == "train":
                return run.step.training_step(batch, batch_idx)
            takes = len(inspect.signature(getattr(user, method)).parameters)
            return run.model(method, batch, *(batch_idx, 0)[: takes - 1])

        try:
            self.length, self.is_local = length, False
            self._difference = on_demand.sequences().difference(
                user, self.over, lambda: step(whole), lambda: step(part), run, method, self._named,
                wanted=lambda: not self.is_local, away=self._away(),
            )  # fmt: skip
        finally:
            self.length, self.is_local = before

    @contextlib.contextmanager
    def _away(self) -> Iterator[None]:
        """Within a step: sequences are whole."""
        place = running.index(self)
        del running[place]
        try:
            yield
        finally:
            running.insert(place, self)

    def _announce(self, batch: Any, cut: dict[str, Tensor], run: RunContext) -> None:
        def shown(tensors: dict[str, Tensor]) -> str:
            return ", ".join(f"{name or 'the batch'} {tuple(tensor.shape)}" for name, tensor in tensors.items())

        whole = {name: leaf for name, leaf in tensors_of(batch) if isinstance(leaf, torch.Tensor) and name not in cut}
        run.print(
            f"strategy.parallel.context: {self.over.world_size} parts along dimension {self.dim} of {shown(cut)}"
            + (f"; not cut: {shown(whole)}" if whole else "")
        )

    # --- The step ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, stage: str, run: RunContext) -> Iterator[None]:
        """Within: attention is over whole sequences, and losses are means over all of their targets."""
        self.knows_offset = self.knows_sums = False
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.computing())
            if stage == "train":
                stack.enter_context(own_random_numbers(self.over.rank, run.device))
            self._steps[stage] += 1
            if self.checks and is_due(self._steps[stage]) and self.length:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(on_demand.sequences().PositionChecks(self).checking())
            if stage != "train" and run.module is not None:
                self.compare(run.module, stage, 0, run)
            try:
                yield
                self._named.discard(on_demand.sequences().FAILS)  # some positions are not the whole batch
            except Exception as raised:
                if isinstance(raised, StratagemError) or on_demand.sequences().FAILS not in self._named:
                    raise
                raise ConfigError(
                    f"{_METHODS.get(stage, stage)} fails where strategy.parallel.context cuts dimension {self.dim} of "
                    f"the batch, and not on whole batches: {raised}",
                    expected="batches of sequences",
                    do="set strategy.parallel.context_dim or context_tensors, or use another axis",
                ) from raised
        if self._difference is not None:
            error, self._difference = self._difference, None
            raise error

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Within: a step computes, or a backward after its context, which computes again what the step did."""
        if self.is_running:
            yield
            return
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it does not call scaled_dot_product_attention
        running.append(self)
        try:
            with self._replacements.used():
                yield
        finally:
            running.pop()
            torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def own_random_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Within: torch's generators draw other numbers on each rank; afterwards they are as equal as before."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    seed = int(torch.randint(2**48, (), generator=torch.default_generator)) + rank
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


# --- For the user's modules ------------------------------------------------------------------------------------------


@torch._disable_dynamo
def context_offset(length: int) -> int:
    """Return how many positions of each sequence are before this rank's, which has `length` of them.

    ``torch.arange(t) + context_offset(t)`` are positions in whole sequences. It is 0 in a run without `context`.
    """
    if not running:
        return 0
    running[-1].knows_offset = True
    return length * running[-1].over.rank


@torch._disable_dynamo
def context_mean(total: Tensor, count: Tensor) -> Tensor:
    """Return ``total / count`` such that the mean over parts of a batch is the mean over the whole. Collective.

    For a loss that leaves out some positions or samples: `total` is the sum over those of this part that count, `count`
    their number. Parts are those of `context`, and the micro-batches of `pipeline`. Otherwise it is ``total / count``.
    """
    count = torch.as_tensor(count, device=total.device)
    if running:
        running[-1].knows_sums = True
        count = mean_per_rank(count, running[-1].over)
    mean = total / divisor(count)
    return mean.to(total.dtype) if total.is_floating_point() else mean


@torch._disable_dynamo
def context_sum(total: Tensor) -> Tensor:
    """Return `total` such that the mean over ranks is the sum over whole sequences.

    For a loss that is a sum: `total` is the sum over the positions of this rank. Without `context` it is `total`.
    """
    if not running:
        return total
    running[-1].knows_sums = True
    return total * running[-1].over.world_size


@contextlib.contextmanager
def local_attention() -> Iterator[None]:
    """Within: ``scaled_dot_product_attention`` attends to the keys of this rank alone.

    For attention that stays within a part of a sequence, or to keys that all ranks have whole.
    """
    if not running:
        yield
        return
    running[-1].is_local = True
    with running[-1].attention.local():
        yield
