"""The pipeline of a run: cut the model, train micro-batches, sum the gradients of tied parameters, evaluate."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.errors import ConfigError
from stratagem_buckets.flat import flatten, views
from stratagem_microbatches import batch_size, combined, merge, split
from stratagem_parallel import on_demand
from stratagem_parallel.gradients import settle
from stratagem_parallel.layout import Groups
from stratagem_parallel.pipeline import ownership
from stratagem_parallel.pipeline.ghosts import Cut, Given, is_of_meta
from stratagem_parallel.pipeline.interception import Interception
from stratagem_parallel.pipeline.logs import MicrobatchLog, StepResults, send_both
from stratagem_parallel.pipeline.neighbours import Neighbours
from stratagem_parallel.pipeline.outline import Outline
from stratagem_parallel.pipeline.random_numbers import STEP, generators_of, seed_of
from stratagem_parallel.pipeline.runner import StageRunner, signature
from stratagem_parallel.pipeline.schedules import check_counts, number_of_stages, rank_of_stage, schedule_named
from stratagem_parallel.pipeline.stages import cut
from stratagem_parallel.pipeline.targets import TargetCounts
from stratagem_parallel.same_batches import is_due
from stratagem_process_group.comparison import are_equal
from stratagem_sharding.param_groups import computed_parameters
from stratagem_sharding.shards import local

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stratagem.api import RunContext

#: Where a module that was cut remembers how, for the next call of the trainer.
_CUT = "_stratagem_pipeline"


class Pipeline:
    """The pipeline of one run.

    Args:
        options: of the strategy.
        groups: of its mesh.
        run: whose model is cut.
    """

    def __init__(self, options: Any, groups: Groups, run: RunContext) -> None:
        self.options, self.groups, self.run = options, groups, run
        self.among = groups.over("pipeline")
        self.rank, self.ranks = groups.mesh.position("pipeline"), groups.mesh.size("pipeline")
        self.schedule = schedule_named(options.schedule)
        self._results, self.targets = StepResults(), TargetCounts(self.among)
        #: What was warned of: logged values that micro-batches do not give.
        self.named: set[str] = set()
        self._shared: list[tuple[Any, list[nn.Parameter]]] = []
        self._interception: Interception | None = None
        self.runner: StageRunner
        self.cut: Cut
        #: Tells what other ranks would, in a plan.
        self.outline: Outline | None = None
        self.used: dict[str, frozenset[int]] = {}
        self._batches = 0
        self.held: dict[str, frozenset[int]] = {}

    # --- The model -----------------------------------------------------------------------------------------------

    def open(self, user: nn.Module) -> None:
        """Cut `user` into stages, unless an earlier run did. Collective.

        Parameters of other stages keep their values until `forget_others`.
        """
        known: Any = user.__dict__.get(_CUT)
        if known is None:
            found = self._cut(user)
            used = ownership.uses(user, found, self._rank_of)
            outline = Outline(user, self._cut, self.run.device) if self.run.environment.simulated else None
            known = user.__dict__[_CUT] = found, used, ownership.holders(user, used), self._ranks_of(found), outline
        self.user = user
        self.cut, self.used, self.held, ranks, self.outline = known
        if ranks != self._ranks_of(self.cut):
            raise ConfigError(
                f"the model was cut by an earlier run whose stages are on other processes than with schedule "
                f"{self.schedule.name!r}",
                expected="a schedule with the same stages on each process",
                do="save a checkpoint and load it into a new model",
            )
        self.runner = StageRunner(
            self.cut, self.among, self.run.device, self.schedule.name, self.microbatches, self.options.checkpoint,
            whole=on_demand.tensor().all_whole if self.groups.mesh.size("tensor") > 1 else lambda value: value,
            outline=self.outline,
        )  # fmt: skip
        self._interception = Interception(user.get_submodule(self.cut.where), self.cut.where, self._called)

    @property
    def microbatches(self) -> int:
        """Micro-batches in a batch: by default one for each stage."""
        return self.options.microbatches or len(self.cut.stages)

    def _rank_of(self, stage: int) -> int:
        return rank_of_stage(self.schedule, stage, self.ranks)

    def _ranks_of(self, cut: Cut) -> list[int]:
        return [self._rank_of(stage) for stage in range(len(cut.stages))]

    def _cut(self, user: nn.Module) -> Cut:
        options, stages = self.options, number_of_stages(self.options, self.ranks)
        if options.balance == "balance_by_time" and self.run.environment.simulated:
            raise ConfigError(
                "strategy.parallel.balance is 'balance_by_time', and a plan has no times",
                expected="a list of numbers, or 'balance_by_size'", do="plan with the numbers that the run prints",
            )  # fmt: skip
        check_counts(self.schedule, self.ranks, stages, options.microbatches or stages)
        return cut(user, options, stages, self.among, self.run.device)

    def filling_own(self, fill: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        """Return `fill` for parts that this rank computes with: it leaves the others without values."""
        own = {name.rpartition(".")[0] for name, ranks in self.used.items() if self.rank in ranks}
        modules = {module for name, module in self.user.named_modules(remove_duplicate=False) if name in own}

        def fill_own(part: nn.Module) -> None:
            if any(module in modules for module in part.modules()):
                fill(part)

        return fill_own

    @property
    def divides_backward(self) -> bool:
        """Whether the schedule computes the gradients of parameters apart from those of inputs."""
        return any(action.kind == "W" for action in self.runner.order)

    def called_parts(self, rank: int) -> list[nn.Module]:
        """Return the modules that a step calls: those of the stages of `rank`, and those outside of all stages."""
        stages = zip(self.cut.stages, self.runner.ranks, strict=True)
        names = [name for stage, of in stages if of == rank for name in stage.modules]
        found = [self.user.get_submodule(name) for name in names]
        around: nn.Module = self.user
        for key in self.cut.where.split(".") if self.cut.where else ():
            found += [child for name, child in around.named_children() if name != key]
            around = around.get_submodule(key)
        while lists := [part for part in found if isinstance(part, nn.ModuleList | nn.ModuleDict)]:
            found = [part for part in found if part not in lists] + [each for part in lists for each in part.children()]
        return found

    def on_any_rank(self, choose: Callable[[list[nn.Module]], set[nn.Parameter]]) -> set[nn.Parameter]:
        """Return the parameters that `choose` returns for the modules that some rank calls, with those that it uses."""
        chosen: set[nn.Parameter] = set()
        for rank in range(self.ranks):
            with ownership.only_used(self.user, self.used, rank):
                chosen |= choose(self.called_parts(rank))
        return chosen

    @contextmanager
    def own_part(self) -> Iterator[None]:
        """Within, the user's module has only parameters that this rank computes with; then the others are forgotten."""
        with ownership.only_used(self.user, self.used, self.rank):
            yield
        ownership.forget_others(self.user, self.held, self.rank)

    def share_gradients(self, user: nn.Module) -> None:
        """Prepare to sum gradients of parameters that several ranks hold. Collective."""
        by_holders: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name, parameter in user.named_parameters():
            ranks = tuple(sorted(self.held[name]))
            if parameter.dtype.is_floating_point and len(ranks) > 1:
                by_holders.setdefault(ranks, []).append(parameter)
        lines = self.groups.mesh.lines("pipeline")
        self._shared = []
        for ranks, parameters in sorted(by_holders.items()):
            rest = [rank for rank in range(self.ranks) if rank not in ranks]
            groups = [[line[rank] for rank in part] for line in lines for part in (ranks, rest) if part]
            among = self.among if len(ranks) == self.ranks else self.groups.peers.split(groups)
            if self.rank in ranks:
                self._shared.append((among, parameters))

    def copies(self) -> dict[nn.Parameter, int]:
        """Return how many ranks of the pipeline hold a parameter, where more than one does."""
        return {parameter: among.world_size for among, parameters in self._shared for parameter in parameters}

    def rank_classes(self) -> list[list[int]]:
        """Return the positions on the axis in groups that compute the same in a plan.

        Those of the first and of the last stage are alone. In a group the first position holds most: a schedule keeps
        activations of fewer micro-batches in later ones.
        """
        assert self.outline is not None, "it is a plan"
        same, ends = self.outline.same_stages, {self.runner.first_rank, self.runner.last_rank}
        stages = [[each for each, rank in enumerate(self.runner.ranks) if rank == at] for at in range(self.ranks)]
        between: list[list[int]] = []
        for at in sorted({*range(self.ranks)} - ends):
            alike = next((each for each in between if all(map(same, stages[each[0]], stages[at]))), None)
            if alike is None:
                between.append([at])
            else:
                alike.append(at)
        return sorted([*([at] for at in ends), *between])

    def close(self) -> None:
        """Let the pipelined module have its own forward again."""
        if self._interception is not None:
            self._interception.close()
            self._interception = None

    # --- Training ------------------------------------------------------------------------------------------------

    @property
    def has_loss(self) -> bool:
        """Whether this rank's stage computes the loss."""
        return self.rank == self.runner.last_rank

    def train(self, batch: Any, batch_idx: int, divisor: float) -> Any:
        """Run forward and backward of `batch`; return what `training_step` returns. Collective."""
        run, runner = self.run, self.runner
        parts = split(batch, equal_sizes(batch_size(batch), self.microbatches))
        runner.seed = seed_of(getattr(self.user, "current_epoch", 0), batch_idx)
        step = _TrainingStep(self, parts, batch_idx, divisor)
        key = "train", signature(parts[0])
        self._batches += 1
        if is_due(self._batches):
            self._check_hooks()
        if is_due(self._batches) or self.targets.is_uneven:
            step.compare(batch, self._batches)
        self._check_same_shapes(key)
        forms = runner.learn_forms(key, lambda: step.capture(0))
        if self.has_loss:
            step.count_targets()
        with step.of_another_stage():
            runner.step(forms, step.capture, step.loss_of, self._weights)
        loss, entries, extras = self._results.exchange(*step.results(), self.among, runner.last_rank, run.device)
        for name, value, options in entries:
            self.user.log(name, value, **options)  # type: ignore[operator]
        run.backward(loss)
        return loss if extras is None else extras | {"loss": loss}

    def _check_hooks(self) -> None:
        """Refuse hooks that would be called with a part of the batch's gradient, once for each micro-batch."""
        for name, parameter in self.user.named_parameters():
            hooks = (parameter._post_accumulate_grad_hooks or {}).values()
            of_others = [each for each in hooks if not str(each.__module__).startswith("stratagem_parallel.")]
            if of_others and self.microbatches > 1:
                raise ConfigError(
                    f"{name} has a hook that is called after its gradient is accumulated, and "
                    f"strategy.parallel.pipeline accumulates {self.microbatches} micro-batches in each batch",
                    expected="a hook that is called once for each batch", do="use on_before_optimizer_step",
                )  # fmt: skip

    def _check_same_shapes(self, key: Any) -> None:
        """Refuse batches of other shapes on the ranks of a pipeline: messages depend on them. Collective."""
        number = zlib.crc32(str((key, self.runner.knows(key))).encode())
        if not are_equal(torch.tensor(number), self.among):
            raise ConfigError(
                "the stages of the pipeline got batches of different shapes", expected="the same samples on all",
                do="make samples of the index and the epoch alone: random transforms must not depend on the rank",
            )  # fmt: skip

    def _weights(self, stage: int) -> list[nn.Parameter]:
        """Return the trained parameters that `stage` computes with, and all where it calls the user's step."""
        part = self.cut.stages[stage]
        found = [each for name in part.modules for each in self.user.get_submodule(name).parameters()]
        found += [each for name in part.tensors if isinstance(each := _named(self.user, name), nn.Parameter)]
        found += self.user.parameters()
        computed = dict(zip(self.user.parameters(), computed_parameters(self.user), strict=True))
        mine = dict.fromkeys(computed.get(each, each) for each in found)
        return [each for each in mine if each.requires_grad and not each.is_meta]

    def sum_shared_gradients(self) -> None:
        """Sum the gradients of parameters that several ranks hold over these. Collective."""
        for among, parameters in self._shared:
            _sum_gradients(among, [each for each in parameters if each.requires_grad])

    # --- Evaluation ----------------------------------------------------------------------------------------------

    def _called(self, *arguments: Any, **options: Any) -> Any:
        """Return the output of the pipelined module, on all ranks: for calls outside of training. Collective."""
        if torch.is_grad_enabled():
            assert self._interception is not None, "it was called"
            raise ConfigError(
                f"{self._interception.name} is a pipeline, and was called with gradients outside of training_step",
                expected="a call in training_step, or without gradients", do="call it under torch.no_grad()",
            )  # fmt: skip
        return self.runner.evaluate(Given(arguments, options), ("evaluate", signature((arguments, options))))


class _TrainingStep:
    """One batch: `training_step` of each micro-batch, see [Note: the step of a micro-batch]."""

    def __init__(self, pipeline: Pipeline, parts: list[Any], batch_idx: int, divisor: float) -> None:
        assert pipeline._interception is not None, "the pipeline is open"
        self.interception = pipeline._interception
        self.pipeline, self.parts, self.batch_idx = pipeline, parts, batch_idx
        self.factor = 1 / (len(parts) * divisor)
        self.logs: list[MicrobatchLog] = []
        self.losses: list[torch.Tensor] = []
        self.extras: list[dict[str, Any]] = []
        self._neighbours: Neighbours | None = None

    def _training_step(self, part: Any) -> Any:
        with self.of_another_stage():
            return self.pipeline.run.step.training_step(part, self.batch_idx)

    @contextmanager
    def of_another_stage(self) -> Iterator[None]:
        """Within: say so where something is computed with a layer that has no values on this process."""
        try:
            yield
        except RuntimeError as error:
            if not is_of_meta(error) and "not have been used in the graph" not in str(error):  # of autograd.grad
                raise
            raise self._of_another_stage() from error

    def _of_another_stage(self) -> ConfigError:
        where = self.pipeline.cut.where
        return ConfigError(
            f"training_step computes with a layer of {where} that is on another process of the pipeline",
            expected=f"one call of {where}", do=f"move what training_step does with its layers into {where}",
        )  # fmt: skip

    def _generators(self, microbatch: int) -> AbstractContextManager[None]:
        runner = self.pipeline.runner
        return generators_of(runner.seed, STEP, microbatch, runner.device)

    def capture(self, microbatch: int) -> Given:
        """Return the call of the model in `training_step`."""
        with MicrobatchLog().of(self.pipeline.user), self._generators(microbatch):
            called = self.interception.captured(lambda: self._training_step(self.parts[microbatch]))
        return Given(called.arguments, called.options)

    def count_targets(self) -> None:
        """Have the targets of each micro-batch counted."""

        blank: Any = lambda *a, **o: self.pipeline.cut.blank_output(Given(a, o))  # noqa: E731

        def step(microbatch: int) -> None:
            with MicrobatchLog().of(self.pipeline.user), self._generators(microbatch):
                self.interception.answered(lambda: self._training_step(self.parts[microbatch]), blank)
            torch.clear_autocast_cache()  # of weights without gradients

        self.pipeline.targets.begin(step, len(self.parts), self.pipeline.user)

    def compare(self, batch: Any, number: int) -> None:
        """Compare micro-batches with both as one at the end of the step: those of comparison `number`, from 1."""
        pipeline, count = self.pipeline, len(self.parts)
        if pipeline.options.check_parts and count > 1 and not pipeline.run.environment.simulated:
            size, cut = batch_size(batch) // count, pipeline.cut
            self._neighbours = Neighbours(batch, size, count, number % (count - 1), cut)

    def loss_of(self, microbatch: int, passed: Any, compute: Callable[[Given], Any]) -> torch.Tensor:
        """Return the loss to differentiate for what the last stage makes of what was `passed` to it."""

        def answer(*arguments: Any, **options: Any) -> Any:
            output = compute(Given(arguments, options, passed))
            if self._neighbours is not None:
                self._neighbours.keep(microbatch, passed, output)
            return output

        log = MicrobatchLog()
        targets = self.pipeline.targets.weighing(microbatch)
        with log.of(self.pipeline.user), self._generators(microbatch), targets:
            result = self.interception.answered(lambda: self._training_step(self.parts[microbatch]), answer)
        self.logs.append(log)
        loss = result.get("loss") if isinstance(result, dict) else result
        if not (isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1 and not loss.is_complex()):
            raise ConfigError(
                f"training_step returned {_shown(loss)} for a micro-batch", expected="a loss, computed from the output",
                do="return the loss of each micro-batch; to skip one, the usual loss multiplied by zero",
            )  # fmt: skip
        if loss.is_meta:
            raise self._of_another_stage()
        self.losses.append(loss.detach().clone())
        if isinstance(result, dict) and len(result) > 1:
            self.extras.append({key: _detached(value) for key, value in result.items() if key != "loss"})
        run = self.pipeline.run
        scaled: torch.Tensor = run.ask("scale_loss", loss=loss.reshape(()) * self.factor)
        return scaled

    def results(self) -> tuple[torch.Tensor | None, list[Any], Any]:
        """Return the mean loss, what was logged, and the rest of the outputs, on the rank of the last stage."""
        if not self.losses:
            return None, [], None
        self.pipeline.targets.check()
        self._compare()
        loss = torch.stack([each.reshape(()) for each in self.losses]).mean()
        entries = combined([log.entries for log in self.logs], [1.0] * len(self.logs))
        return loss, entries, merge(self.extras, [1.0] * len(self.extras)) if self.extras else None

    def _compare(self) -> None:
        pipeline = self.pipeline

        def step(batch: Any, answer: Callable[..., Any]) -> Any:
            return self.interception.answered(lambda: self._training_step(batch), answer)

        if self._neighbours is not None:
            counts = TargetCounts(pipeline.among, pipeline.targets.is_needed)
            gathers = pipeline.groups.mesh.size("shard") > 1  # a unit would take it for the backward of its step
            self._neighbours.compare(
                step, counts, pipeline.user, pipeline.run, pipeline.named, differentiates=not gathers
            )


def equal_sizes(size: int, count: int) -> list[int]:
    """Return the sizes of `count` micro-batches of a batch of `size` samples.

    Raises:
        ConfigError: `size` is not a multiple of `count`.
    """
    if size % count:
        raise ConfigError(
            f"a batch of {size} samples is divided into {count} micro-batches", expected=f"a multiple of {count}",
            do="change the batch size or strategy.parallel.microbatches, or set drop_last=True in the loader",
        )  # fmt: skip
    return [size // count] * count


def _named(module: nn.Module, name: str) -> Any:
    where, _, last = name.rpartition(".")
    return getattr(module.get_submodule(where), last)


def _detached(value: Any) -> Any:
    from stratagem.api.batches import map_batch

    return map_batch(
        value, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf,
        is_leaf=lambda part: isinstance(part, torch.Tensor),
    )  # fmt: skip


def _shown(loss: Any) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}"
    return f"a tensor of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without gradients")


def _sum_gradients(among: Any, parameters: list[nn.Parameter]) -> None:
    """Sum gradients over `among`, all of a dtype at once; a parameter without one on all ranks keeps none."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for group in by_dtype.values():
        gradients = [settle(parameter) for parameter in group]
        parts = [
            torch.zeros_like(local(parameter.detach())) if gradient is None else local(gradient)
            for parameter, gradient in zip(group, gradients, strict=True)
        ]
        flags = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.float64)
        with among.traffic.sent_by("gradients"):
            reached, flat = send_both(flags, flatten(parts), lambda message: among.unchecked.all_reduce(message, "sum"))
        # Each of them is computed with on some rank, which has its gradient.
        reached_somewhere = among.values(reached, [1.0] * len(group))
        for parameter, is_reached, total in zip(group, reached_somewhere, views(flat, parts), strict=True):
            if not is_reached:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(total)
