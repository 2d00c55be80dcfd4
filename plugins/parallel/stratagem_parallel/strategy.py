"""The strategy: what each hook does for the axes that have more than one rank."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field
from torch import nn

from stratagem.api import COMPILATION, hookimpl
from stratagem.api.seeding import random_state, restore_random_state
from stratagem.errors import ConfigError
from stratagem_buckets.reducer import bucket_reducer, check_dense
from stratagem_parallel import on_demand, planned
from stratagem_parallel.context.axis import ContextAxis
from stratagem_parallel.description import Record
from stratagem_parallel.expert.axis import ExpertAxis
from stratagem_parallel.gradients import GradientAverager, settle
from stratagem_parallel.layout import SIZES, Groups, axis_of
from stratagem_parallel.optimizers import stepped_by_kind
from stratagem_parallel.options import ParallelOptions
from stratagem_parallel.pipeline.pipeline import Pipeline
from stratagem_parallel.placement import MODEL_AXES, copies, cut_axes
from stratagem_parallel.same_batches import SameBatches
from stratagem_parallel.sharded import POLICY, Sharding
from stratagem_parallel.state import model_state, optimizer_state
from stratagem_process_group import group_options_after
from stratagem_process_group.losses import check_reached
from stratagem_sharding.clipping import clip_norm
from stratagem_sharding.hooks import ShardingHooks, wrapped_earlier
from stratagem_sharding.initial_values import replicate_from_rank_0
from stratagem_sharding.memory import return_large_blocks
from stratagem_sharding.mesh import check_backend
from stratagem_sharding.param_groups import reshard
from stratagem_sharding.part_writes import PartWrites, without_lost_writes
from stratagem_sharding.shards import local
from stratagem_sharding.units import units_of
from stratagem_sharding.whole_matrices import whole_matrices
from stratagem_transforms.wrap_policy import repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from contextlib import AbstractContextManager

    from stratagem.api import Collectives, Mesh, RunContext, World
    from stratagem_layout import Layout

#: Where a module remembers how it was wrapped, for the next call of the trainer.
_WRAPPED = "_stratagem_parallel"
#: Whether a parameter is whole on `shard`, and on `expert`: those of one kind are averaged over the same ranks.
_KINDS = ((False, False), (False, True), (True, False), (True, True))


@define(eq=False, kw_only=True, field_transformer=group_options_after("bucket_cap_mb"))
class ParallelStrategy(ShardingHooks, ParallelOptions):
    """Cut layers over `tensor`, sequences over `context`, the list of layers over `pipeline`, experts over `expert`.

    One mesh has all axes; ``run.mesh`` tells which ranks read the same samples.
    """

    _groups: Any = field(init=False, default=None)
    _device_mesh: Any = field(init=False, default=None)
    #: The layers that are cut over `tensor`, and their styles.
    _layers: dict[str, Any] = field(init=False, factory=dict)
    _sharding: Sharding | None = field(init=False, default=None)
    #: Compares the batches of ranks that share samples.
    _same_batches: SameBatches | None = field(init=False, default=None)
    _pipeline: Pipeline | None = field(init=False, default=None)
    #: Average gradients after backward: those of all parameters, and those of experts over fewer ranks.
    _averagers: list[GradientAverager] = field(init=False, factory=list)
    #: All parameters of the model that is trained.
    _parameters: list[nn.Parameter] = field(init=False, factory=list)
    #: What the ranks of the last run hold and send, for people.
    _record: Record | None = field(init=False, default=None)

    #: Cuts sequences, with `context` above 1; divides layers of experts, with `expert` above 1.
    _context: ContextAxis | None = field(init=False, default=None)
    _expert: ExpertAxis | None = field(init=False, default=None)

    @hookimpl
    def on_connect(self, run: RunContext) -> None:
        self._groups = Groups(self.mesh(run.peers_world), run.peers)
        if any(self._mesh.size(axis) > 1 for axis in ("shard", "tensor", "expert")):
            check_backend(run.device)
        self._device_mesh = self._groups.device_mesh(run.device.type)
        for kind in _KINDS:  # which of them a rank's parameters have differs between stages
            self._averaged_over(kind)
        if run.device.type == "cpu" and any(self._mesh.size(axis) > 1 for axis in MODEL_AXES):
            return_large_blocks()
        if self._mesh.size("shard") > 1:
            self._sharding = Sharding(
                self._device_mesh["shard"], self.auto_wrap_policy, reshard_after_forward=self.reshard_after_forward
            )
        if self._mesh.size("expert") > 1:
            self._expert = ExpertAxis(self._groups.over("expert"), self._device_mesh["expert"])
        if self._mesh.size("context") > 1:
            over, method = self._groups.over("context"), self.context_method
            self._context = ContextAxis(over, self.context_dim, self.context_tensors, method, self.check_parts)

        sharing = self._groups.over("pipeline", "context", "tensor")
        self._same_batches = SameBatches(sharing) if sharing.world_size > 1 else None

    @property
    def _mesh(self) -> Mesh:
        mesh: Mesh = self._groups.mesh
        return mesh

    def torch_mesh(self) -> Any:
        return self._device_mesh

    # --- The model -----------------------------------------------------------------------------------------------

    @hookimpl
    def units(self, module: nn.Module) -> list[nn.Module]:
        if self._mesh.size("pipeline") > 1:
            return repeated(module)  # a stage calls some of them
        return [] if self._sharding is None else units_of(module, self.auto_wrap_policy, POLICY)

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        user = module.get_submodule("module")
        self._stop_averaging()
        root = wrapped_earlier(user, _WRAPPED, self._device_mesh, was="cut") or module
        self._connect_layers(user, run)
        over = self._groups.over("pipeline", "context", "tensor")
        if over.world_size > 1:  # ranks that read the same samples draw the same numbers
            restore_random_state(over.broadcast_object(random_state(run.devices)), run.devices)
        self._open_pipeline(user, run)
        if self._expert is not None:
            self._expert.find(user, self.plan)
        if self._context is not None:
            self._context.prepare(root, run)
        if root is module:
            self._cut(module, user, run)
            user.__dict__[_WRAPPED] = (module, self._device_mesh)
            self._connect_layers(user, run)
        if self._sharding is not None:
            self._sharding.watch(root, self._groups.over("data", *SIZES[2:]), run)
        if run.stage == "train":
            if self._pipeline is not None:
                self._pipeline.share_gradients(user)
            self._average(user, run)
            self._record = Record(self._mesh, self._groups.ranks)
            self._record.note(user, run.peers)
        return root

    @hookimpl
    def wrap_backend(self, backend: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return on_demand.tensor().PartsBackend(backend) if self._mesh.size("tensor") > 1 else backend

    def _cut(self, module: nn.Module, user: nn.Module, run: RunContext) -> None:
        """Give `user`, which is in `module`, its values, and cut it over all axes. Collective."""
        fill = replicate_from_rank_0(module, run.device, run)
        fill_own = fill if self._pipeline is None else self._pipeline.filling_own(fill)
        if self._mesh.size("tensor") > 1:
            self._cut_layers(module, fill_own, run)
        if self._expert is not None:
            self._expert.divide(fill_own, run)
        whole: set[nn.Parameter] = set()
        if (sharding := self._sharding) is not None and self._pipeline is not None:
            # A copy of a parameter on another stage has to have the same layout.
            whole = self._pipeline.on_any_rank(lambda parts: sharding.whole(parts, user))
        with contextlib.nullcontext() if self._pipeline is None else self._pipeline.own_part():
            if sharding is None:
                fill(user)
            elif self._pipeline is not None:
                parts, divided = self._pipeline.called_parts(self._pipeline.rank), self._pipeline.divides_backward
                sharding.shard_parts(parts, user, fill, run, divided=divided, whole=whole)
            else:
                sharding.shard(module, user, fill, run)

    def _open_pipeline(self, user: nn.Module, run: RunContext) -> None:
        """Cut the layers of `user` into stages, if there are several. Collective."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        if self._mesh.size("pipeline") > 1:
            self._pipeline = Pipeline(self, self._groups, run)
            self._pipeline.open(user)

    def _cut_layers(self, module: nn.Module, fill: Callable[[nn.Module], None], run: RunContext) -> None:
        """Cut the layers of the plan over the axis `tensor`. Collective."""
        over, mesh, tensor = self._groups.over("tensor"), self._device_mesh["tensor"], on_demand.tensor()
        user: Any = module.get_submodule("module")
        if module.compiles_steps and not run.provides(COMPILATION):
            raise ConfigError(
                "strategy.parallel.tensor cuts layers, and the model was given as torch.compile(model)",
                expected="a model that the run compiles", do="give the model with Trainer(compile=True)",
            )  # fmt: skip
        tensor.share_parts(user, self._groups.over(*(axis_of(size) for size in SIZES if size != "tensor")))
        self._layers = tensor.cut_layers(user, self.plan, over, mesh, fill, with_experts=self._expert is None)
        if self._layers and self.plan in (None, "auto"):
            run.print(tensor.described(self._layers, user, over.world_size))
        module.register_forward_hook(tensor.whole_outputs)

    def _connect_layers(self, user: nn.Module, run: RunContext) -> None:
        if self._mesh.size("tensor") > 1:
            on_demand.tensor().connect(user, self._groups.over("tensor"), traced=run.provides(COMPILATION))

    def _average(self, user: nn.Module, run: RunContext) -> None:
        """Have gradients averaged over the ranks that read other samples, or other parts of them. Collective.

        Those of what is sharded are averaged over `shard` already, those of experts over `expert`.
        """
        if self._averaged_over((True, True)).world_size > 1:
            check_dense(user, "strategy parallel sends", "sparse=False there", 'set it, or choose strategy="ddp"')
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        self._parameters = list(user.parameters())
        for parameter in self._parameters:
            if not parameter.is_meta:
                cut = cut_axes(parameter)
                groups.setdefault(("shard" not in cut, "expert" not in cut), []).append(parameter)
        kinds = self._groups.over("pipeline").all_gather_object(list(groups))
        every = {kind for found in kinds for kind in found} or {(True, True)}
        for kind in sorted(every):  # in one order on all ranks, also where a stage has none of a kind
            over, parameters = self._averaged_over(kind), groups.get(kind, [])
            reduce = bucket_reducer(run, over=over)
            if parameters and (over.world_size > 1 or reduce is not None):
                self._averagers.append(GradientAverager(parameters, over, reduce, cap_mb=self.bucket_cap_mb))

    def _averaged_over(self, kind: tuple[bool, bool]) -> Collectives:
        """Return the ranks over which gradients of parameters of one of `_KINDS` are averaged."""
        axes = [axis for axis, is_whole in zip(("shard", "expert"), kind, strict=True) if is_whole]
        over: Collectives = self._groups.over("data", *axes, "context")
        return over

    def _stop_averaging(self) -> None:
        while self._averagers:
            self._averagers.pop().close()

    @hookimpl
    def teardown(self, run: RunContext) -> None:
        self._stop_averaging()
        if self._context is not None:
            self._context.close()
        if self._sharding is not None:
            self._sharding.close()
        if self._pipeline is not None:
            self._pipeline.close()
        self._groups = self._device_mesh = self._sharding = self._context = self._expert = self._pipeline = None
        super().teardown(run)

    # --- The step ------------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def transfer_batch(self, run: RunContext) -> Generator[None, Any, Any]:
        batch = yield
        if self._same_batches is not None:
            self._same_batches.check(batch, run)
        return batch if self._context is None else self._context.cut(batch, run)

    def hook_context(self) -> AbstractContextManager[Any]:
        """Let hooks write into parts of what is sharded."""
        return PartWrites(lambda: None if self._sharding is None else self._sharding.order)

    @hookimpl
    def step_context(self, stage: str, sync: bool, run: RunContext) -> AbstractContextManager[Any] | None:
        steps: list[AbstractContextManager[Any] | None] = [
            None if self._context is None else self._context.step(stage, run),
            None if self._expert is None else self._expert.step(),
        ]
        if self._sharding is not None:
            steps.insert(0, self._sharding.step(run.model, stage, sync and self._pipeline is None, run))
        if self._mesh.size("tensor") > 1 and run.module is not None:
            steps += [on_demand.tensor().named_use(run.module), without_lost_writes()]
        if stage == "train" and self._record is not None:
            steps.append(self._record.messages.counted(last=sync))
        return _joined([step for step in steps if step is not None])

    @hookimpl
    def forward_backward(self, module: nn.Module, batch: Any, batch_idx: int, divisor: float, run: RunContext) -> Any:
        if self._pipeline is None:
            if self._context is not None and run.module is not None:
                self._context.compare(run.module, "train", batch_idx, run)
            return run.step.forward_backward(batch, batch_idx, divisor)
        with contextlib.nullcontext() if self._sharding is None else self._sharding.several_backwards():
            return self._pipeline.train(batch, batch_idx, divisor)

    @hookimpl
    def backward(self, loss: torch.Tensor, module: nn.Module, run: RunContext) -> bool:
        syncs = run.sync_gradients or run.manual
        if self._pipeline is not None:  # the schedule has differentiated the loss of each micro-batch
            if syncs:
                if self._sharding is not None:
                    self._sharding.reduce(module)
                self._pipeline.sum_shared_gradients()
                self._complete_gradients(run)
            return True
        if syncs:
            for averager in self._averagers:
                averager.begin()
        with self._recomputing(), self._differentiated(loss, module, run):
            if syncs:
                self._complete_gradients(run)
        return True

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Within: what backward computes again is computed as in the step, which a user's own loop has left."""
        with contextlib.ExitStack() as stack:
            if self._context is not None:
                stack.enter_context(self._context.computing())
            if self._expert is not None:
                stack.enter_context(self._expert.step())
            yield

    @contextlib.contextmanager
    def _differentiated(self, loss: torch.Tensor, module: nn.Module, run: RunContext) -> Iterator[None]:
        """Differentiate `loss`; within, gradients are complete but for their averages over replicas."""
        if self._sharding is None:
            run.differentiate(loss)
            yield
            return
        with self._sharding.backward(loss, module, run):
            yield

    @hookimpl(wrapper=True)
    def step_optimizers(
        self, optimizers: list[torch.optim.Optimizer], closure: Any, run: RunContext
    ) -> Generator[None, bool, bool]:
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers if closure is None else ():  # it may look at the groups
                stack.enter_context(stepped_by_kind(optimizer))
            if self._sharding is not None:
                stack.enter_context(self._sharding.step_optimizers(run.model, run))
            stack.enter_context(whole_matrices(optimizers))
            return (yield)

    def buffer_peers(self, run: RunContext) -> Collectives:
        return self._averaged_over((True, True))

    def _complete_gradients(self, run: RunContext) -> None:
        """Wait for the averages, and complete the gradients of parameters that are cut. Collective.

        Raises:
            ConfigError: this rank has no gradient at all. That of some parameters may be missing, and counts as zero.
        """
        if self._expert is None and (self._pipeline is None or self._pipeline.has_loss):
            # Under `expert` other ranks may have all gradients of a rank's loss.
            trained = (p for p in reversed(self._parameters) if p.requires_grad and not p.is_meta)
            first = next(trained, None)
            some = first is None or first.grad is not None or any(p.grad is not None for p in trained)
            check_reached(some, run)
        for averager in self._averagers:
            averager.finish()
        if not self._averagers:
            for parameter in self._parameters:
                settle(parameter)

    def clip_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        over = self._groups.over(*MODEL_AXES)
        stages = {} if self._pipeline is None else self._pipeline.copies()
        return clip_norm(parameters, max_norm, over, lambda p: copies(p, self._mesh, stages.get(p, 1)), local)

    # --- For people ----------------------------------------------------------------------------------------------

    def rank_classes(self, run: RunContext) -> Sequence[Sequence[int]]:
        if self._pipeline is None or not run.environment.simulated:
            return super().rank_classes(run)
        classes = self._pipeline.rank_classes()
        class_of = {at: number for number, positions in enumerate(classes) for at in positions}
        found: list[list[int]] = [[] for _ in classes]
        for rank in range(run.world_size):
            found[class_of[evolve(self._mesh, rank=rank).position("pipeline")]].append(rank)
        return found

    def layout(self, world: World, module: nn.Module | None) -> Layout | None:
        timeline = planned.timeline_of(self, self.mesh(world))
        known = self._record.layout(module, timeline) if self._record is not None else None
        return known or planned.layout(self, self.mesh(world), module, timeline)

    # --- State ---------------------------------------------------------------------------------------------------

    @hookimpl
    def model_state(self, module: nn.Module, run: RunContext) -> dict[str, torch.Tensor]:
        reshard(run.model)
        return model_state(module, run, self._groups.over("pipeline"))

    @hookimpl
    def optimizer_state(self, optimizer: torch.optim.Optimizer, module: nn.Module, run: RunContext) -> dict[str, Any]:
        reshard(run.model)
        return optimizer_state(optimizer, module, run, self._groups.over("pipeline"))


def _joined(steps: list[AbstractContextManager[Any]]) -> AbstractContextManager[Any] | None:
    """Return one context of `steps`, the first outermost; None without any."""
    if len(steps) < 2:
        return steps[0] if steps else None
    return _in_order(steps)


@contextlib.contextmanager
def _in_order(steps: list[AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for step in steps:
            stack.enter_context(step)
        yield
