"""Parameters, gradients and optimizer state sharded over the processes, with torch's FSDP2 (`fully_shard`)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import linecache
import math
import re
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from attrs import define, field
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp.wrap import enable_wrap
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stratagem.api import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    FULL_STATE,
    GRADIENT_BUCKETS,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    SHARDED_PARAMETERS,
    WITHIN_TEAM,
    Bucket,
    Capabilities,
    Mesh,
    Strategy,
    hookimpl,
)
from stratagem.api.named_state import load_weights, logical_optimizer_state, physical_optimizer_state
from stratagem.api.validators import duration, not_empty
from stratagem.distributed.backends import backends_of
from stratagem.distributed.process_group import TorchCollectives
from stratagem.distributed.tuning import gloo_options, in_force, nccl_options, take_back
from stratagem.errors import ConfigError, shown
from stratagem.transforms.activation_checkpointing import recompute
from stratagem.transforms.normalization import match_inputs
from stratagem.transforms.wrap_policy import check_policy, children_first, select

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

    from stratagem.api import Collectives, PrecisionPolicy, RunContext, World

_M_MMAP_THRESHOLD = -3
#: Where a sharded module remembers how it was wrapped, for the next call of the trainer.
_WRAPPED = "_stratagem_fsdp"
#: On a module that was made a unit by hand.
_MARK = "_stratagem_unit"


@define(eq=False, kw_only=True)
class FSDPStrategy(Strategy):
    """Each process keeps a shard; a unit is gathered whole only while it computes. Zhao et al., "PyTorch FSDP", VLDB
    2023; torch's second implementation of it.
    """

    #: What becomes a unit of its own: a set of classes, a torch policy, or a callable. Units are gathered one by one:
    #: smaller ones need less memory and more messages. Without any, the model is one unit and whole in every step.
    auto_wrap_policy: Any = None
    #: What is computed again in backward instead of being kept: a set of classes or a torch policy. Memory for time.
    activation_checkpointing_policy: Any = None
    #: FULL_SHARD shards everything. SHARD_GRAD_OP keeps units whole between forward and backward: fewer messages, more
    #: memory. HYBRID_SHARD shards within a group of processes and replicates over groups. NO_SHARD replicates.
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = "FULL_SHARD"
    #: For HYBRID_SHARD: (replicas, processes that share one). By default a replica for each node.
    device_mesh: tuple[int, int] | None = None
    #: Keep shards, gradients and optimizer on the CPU, and step there: very little device memory, very slow.
    cpu_offload: bool = False
    #: "sharded" saves with the checkpoint format of that name, each rank its part; "full" makes one file. By default
    #: what ``Trainer(checkpoint=)`` says.
    state_dict_type: Literal["full", "sharded"] | None = None
    #: Dtypes to compute and to reduce in: a torch MixedPrecisionPolicy (or MixedPrecision); else the precision decides.
    mixed_precision: Any = None
    #: How long a rank waits for the others before it gives up, in seconds or as a timedelta; by default
    #: 10 minutes over NCCL and 30 otherwise.
    timeout: timedelta | None = field(default=None, validator=duration)
    #: torch.distributed backend; by default the one that fits the device.
    process_group_backend: str | None = field(default=None, validator=not_empty)
    #: NCCL's variables, in lower case and without the prefix: {"socket_ifname": "eth0"}. What speeds up one network
    #: slows down another; by default NCCL finds out by itself.
    nccl: dict[str, Any] | None = field(default=None, validator=nccl_options)
    #: gloo's variables, given in the same way. Beside NCCL, gloo sends objects and decisions.
    gloo: dict[str, Any] | None = field(default=None, validator=gloo_options)
    #: Of the first FSDP; its second implementation always limits them.
    limit_all_gathers: bool = field(default=True)
    #: Of the first FSDP; its second implementation always keeps the original parameters.
    use_orig_params: bool = field(default=True)

    _device_mesh: Any = field(init=False, default=None)
    _syncs: bool | None = field(init=False, default=None)
    _order: Any = field(init=False, default=None)
    _whole: Any = field(init=False, factory=lambda: _KeptWhole())

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # an option decides
        """What is averaged over replicas passes comm hooks; what is only cut into shards does not."""
        provides = {
            CLIP_BY_NORM, CLIP_BY_VALUE, CUSTOM_CLIPPING, CUSTOM_STEP, FULL_STATE, MANUAL_OPTIMIZATION, MULTI_PROCESS,
            MULTIPLE_OPTIMIZERS, NO_SYNC, SHARDED_PARAMETERS, WITHIN_TEAM,
        }  # fmt: skip
        replicates = self.sharding_strategy in ("HYBRID_SHARD", "NO_SHARD")
        return Capabilities(provides=provides | {GRADIENT_BUCKETS} if replicates else provides)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.timeout, timedelta) and isinstance(self.timeout, int | float):
            self.timeout = timedelta(seconds=self.timeout)
        for name in ("limit_all_gathers", "use_orig_params"):
            if getattr(self, name) is False:
                raise ConfigError(
                    f"strategy.fsdp.{name} is False",
                    expected="True: torch's second FSDP cannot do without",
                    do="drop it",
                )
        for name in ("auto_wrap_policy", "activation_checkpointing_policy"):
            if getattr(self, name) is not None:
                check_policy(getattr(self, name), f"strategy.fsdp.{name}")
        if self.mixed_precision is not None and not hasattr(self.mixed_precision, "param_dtype"):
            raise ConfigError(
                f"strategy.fsdp.mixed_precision is {shown(self.mixed_precision)}",
                expected="a torch.distributed.fsdp.MixedPrecisionPolicy",
                do="drop it: Trainer(precision=...) decides otherwise",
            )
        if self.device_mesh is not None and self.sharding_strategy != "HYBRID_SHARD":
            raise ConfigError(
                f"strategy.fsdp.device_mesh is {self.device_mesh} with sharding_strategy={self.sharding_strategy!r}",
                expected="HYBRID_SHARD, which alone has replicas of shards",
            )

    # --- Before any process starts -------------------------------------------------------------------------------

    def how_to_provide(self, word: str) -> str:
        if word == GRADIENT_BUCKETS:
            return 'set strategy.fsdp.sharding_strategy to "HYBRID_SHARD": averages over replicas pass comm hooks'
        return ""

    def join_timeout(self) -> timedelta | None:
        return self.timeout

    def default_checkpoint(self) -> str | None:
        return self.state_dict_type

    def absorbs(self, policy: PrecisionPolicy) -> bool:
        """Mixed precision without loss scaling is FSDP's own business: it gathers in fewer bits, too."""
        return self.mixed_precision is not None or (policy.compute_dtype is not None and policy.param_dtype is None
                                                    and not policy.loss_scaling)  # fmt: skip

    def mesh(self, world: World) -> Mesh:
        replicas, shards = self._layout(world)
        return Mesh(axes={"data": replicas, "shard": shards}, rank=world.rank)

    def _layout(self, world: World) -> tuple[int, int]:
        """Return how many replicas there are, and how many processes share each."""
        if self.sharding_strategy == "NO_SHARD":
            return world.world_size, 1
        if self.sharding_strategy != "HYBRID_SHARD":
            return 1, world.world_size
        replicas, shards = self.device_mesh or (world.num_nodes, world.local_world_size)
        if replicas * shards != world.world_size:
            raise ConfigError(
                f"strategy.fsdp.device_mesh is {(replicas, shards)} and the run has {world.world_size} processes",
                expected="a product equal to the number of processes",
            )
        if self.device_mesh is None and replicas == 1:
            raise ConfigError(
                "strategy.fsdp.sharding_strategy is HYBRID_SHARD on one node",
                expected="device_mesh=(replicas, processes that share one)",
                do="give one, or use FULL_SHARD",
            )
        return replicas, shards

    # --- The model -----------------------------------------------------------------------------------------------

    @hookimpl
    def connect(self, world: World, run: RunContext) -> Collectives:
        backend = self.process_group_backend or run.backend
        with in_force(self, run, backend):
            collectives = TorchCollectives.connect(world, run.device, backend=backend, timeout=run.join_timeout)
        if run.device.type == "cpu" or self.cpu_offload:
            _return_large_blocks()
        if self.cpu_offload and "cpu" not in backends_of(None):
            raise ConfigError(
                f"strategy.fsdp.cpu_offload is True and the process group's backend is {dist.get_backend()!r}",
                expected="one that also sends the CPU's tensors",
                do=f'call init_process_group("cpu:gloo,{run.device.type}:{backend}"), or leave that to the trainer',
            )
        self._device_mesh, self._order = self._arranged(run, collectives), None
        return collectives

    def _arranged(self, run: RunContext, collectives: Collectives) -> Any:
        """Return the mesh of this rank's team: the axes that FSDP shards over, and replicates over unless hooks do."""
        assert run.world is not None, "it connects"
        replicas, shards = self._layout(run.peers_world)
        teams = run.world.world_size // (replicas * shards)
        sizes = {"team": teams, "replicate": replicas, "shard": shards}
        axes = [axis for axis in sizes if sizes[axis] > 1 or axis == "shard"]
        mesh = _mesh(run.device.type, {axis: sizes[axis] for axis in axes}, collectives)
        wanted = ("shard",) if run.comm_hooks else tuple(axis for axis in axes if axis != "team")
        return mesh if wanted == tuple(axes) else mesh[wanted]

    def _replicas(self, run: RunContext) -> Collectives:
        """Return the conversation of the ranks that hold the same shard. Collective."""
        replicas, shards = self._layout(run.peers_world)
        return run.peers.split([[shards * row + column for row in range(replicas)] for column in range(shards)])

    @hookimpl
    def teardown(self, run: RunContext) -> None:
        if self._order is not None:
            self._order.close()
            self._order = None
        take_back(run)

    @hookimpl
    def init_context(self) -> AbstractContextManager[Any]:
        """Let ``torch.distributed.fsdp.wrap.wrap`` name units by hand; they are sharded when the model is complete."""
        return enable_wrap(wrapper_cls=_mark)

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        user, self._syncs = module.get_submodule("module"), None
        if self.activation_checkpointing_policy is not None and run.settings.activation_checkpointing is not None:
            raise ConfigError(
                "activation_checkpointing and strategy.fsdp.activation_checkpointing_policy are both set",
                expected="one of the two",
            )
        earlier = user.__dict__.get(_WRAPPED)
        if earlier is not None:
            _check_same(earlier, self._device_mesh)
            root: nn.Module = earlier[0]
            _reshard(root)  # optimizers are made of shards
            self._listen(root, run)
            return root
        fill = _from_rank_0(module, "cpu" if self.cpu_offload else run.device, run)
        if self.activation_checkpointing_policy is not None:
            option = "strategy.fsdp.activation_checkpointing_policy"
            recompute(user, self.activation_checkpointing_policy, option=option)
        units = self._units(user)
        if run.manual:  # a root's own parameters would be sharded again by the first backward within its forward
            units += [
                child for child in user.children() if child not in units and any(True for _ in child.parameters())
            ]
        options = self._options(run)
        exact = options | {"mp_policy": MixedPrecisionPolicy()}
        normalizing = _running_norms(user, units) if options["mp_policy"].param_dtype is not None else []
        units = children_first(user, {*units, *normalizing})
        _check_tied(user, units)
        _check_dtypes(user, units)
        for unit in units:
            fill(unit)
            precise = unit in normalizing or _is_double(unit)
            fully_shard(unit, **(exact if precise else options), ignored_params=_not_cut(user))
        fill(user)
        fully_shard(module, **(exact if _is_double(user) else options), ignored_params=_not_cut(user))
        self._listen(module, run)
        if options["mp_policy"].param_dtype is not None and run.device.type == "cpu":
            match_inputs(user)
        user.__dict__[_WRAPPED] = (module, self._device_mesh)
        return module

    def _listen(self, root: nn.Module, run: RunContext) -> None:
        """Have all units count what they send, and send through the comm hooks what they average over replicas."""
        units: list[nn.Module] = [part for part in root.modules() if isinstance(part, FSDPModule)]
        if self._order is None:
            self._order = _Order(run)
        self._order.add(root)
        for unit in units:
            assert isinstance(unit, FSDPModule), "it was sharded"
            self._whole.watch(unit._get_fsdp_state())
        _count_bytes(units, self._layout(run.peers_world)[0], run.collectives.traffic, self._order)
        if run.comm_hooks and run.stage == "train":
            reduce = run.bucket_reducer(over=self._replicas(run))
            assert reduce is not None, "there are comm hooks"
            _send_through_hooks(units, reduce)

    def _units(self, user: nn.Module) -> list[nn.Module]:
        """Return what the policy chooses and what was wrapped by hand, children before parents."""
        chosen: set[nn.Module] = set()
        if self.auto_wrap_policy is not None:
            chosen.update(select(user, self.auto_wrap_policy, "strategy.fsdp.auto_wrap_policy"))
            # Attention computes with this layer's parameters and never calls it.
            attentions = [part for part in user.modules() if isinstance(part, nn.MultiheadAttention)]
            chosen.difference_update(part.out_proj for part in attentions)
        chosen.update(part for part in user.modules() if _MARK in part.__dict__ and part is not user)
        return children_first(user, chosen)

    def _options(self, run: RunContext) -> dict[str, Any]:
        policy = self.mixed_precision
        param_dtype: torch.dtype | None
        reduce_dtype: torch.dtype | None
        if policy is None and run.precision_absorbed:
            policy = run.policy
            param_dtype, reduce_dtype = policy.compute_dtype, policy.reduce_dtype or torch.float32
        else:
            param_dtype, reduce_dtype = getattr(policy, "param_dtype", None), getattr(policy, "reduce_dtype", None)
        offload = CPUOffloadPolicy(pin_memory=run.device.type != "cpu") if self.cpu_offload else OffloadPolicy()
        return {
            "mesh": self._device_mesh,
            "reshard_after_forward": self.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD"),
            # Inputs are cast by autocast, operation by operation (see step_context): targets stay as they are.
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
            ),
            "offload_policy": offload,
        }

    # --- The step ------------------------------------------------------------------------------------------------

    @hookimpl
    def step_context(self, stage: str, sync: bool, run: RunContext) -> AbstractContextManager[Any]:
        wanted = sync or run.manual
        if stage == "train" and self._syncs is not wanted:
            run.model.set_requires_gradient_sync(wanted)
            self._syncs = wanted
        dtype = getattr(self.mixed_precision, "param_dtype", None) or (
            run.policy.compute_dtype if run.precision_absorbed else None
        )
        compared = self._order.compared((stage, sync, self._order.number(run.model)))
        if dtype is None:
            return self._within(compared, run)
        return self._within(_both(compared, torch.autocast(run.device.type, dtype, cache_enabled=not run.manual)), run)

    @contextlib.contextmanager
    def _within(self, step: AbstractContextManager[Any], run: RunContext) -> Iterator[None]:
        try:
            with step, self._whole.computing(run.model if run.manual else None):
                yield
        except RuntimeError as error:
            if _MIXED in str(error):
                raise _used_elsewhere(error, run.model) from error
            raise
        finally:
            self._whole.release()

    @hookimpl
    def backward(self, loss: torch.Tensor, module: nn.Module, run: RunContext) -> bool:
        with self._order.compared(("backward", run.sync_gradients)):  # in a loop without a Trainer
            self._differentiate(loss, module, run)
        return True

    def _differentiate(self, loss: torch.Tensor, module: nn.Module, run: RunContext) -> None:
        root: Any = module  # it was sharded
        if run.manual:
            # The root's forward has not returned, so nothing has told FSDP that a backward begins.
            state = root._get_fsdp_state()
            loss.register_hook(lambda _: state._register_root_post_backward_final_callback())
        with torch.autocast(run.device.type, enabled=False), self._whole.last_backward():
            run.differentiate(loss)
        if not run.manual:
            self._whole.release()
        if run.manual or run.sync_gradients:
            self._average_scalars(run)
        if run.manual:
            root.unshard()

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: RunContext) -> Generator[None, bool, bool]:
        self._whole.release()  # a unit that stayed whole would compute with what was before this step
        stepped = yield
        if run.manual:  # what the rest of this forward computes with must be what was stepped
            run.model.reshard()
            run.model.unshard()
        return stepped

    @hookimpl
    def clip_gradients(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, max_value: float | None
    ) -> torch.Tensor | float:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        shards = [_local(gradient) for gradient in gradients]
        if max_value is not None:
            if shards:
                torch._foreach_clamp_min_(shards, -max_value)
                torch._foreach_clamp_max_(shards, max_value)
            return 0.0
        assert max_norm is not None, "one of the two limits is set"
        # Shards have to be summed over the ranks, whole gradients must not be.
        sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        norms = [torch.nn.utils.get_total_norm(some) for some in (sharded, whole) if some]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for device, dtype in {(shard.device, shard.dtype) for shard in shards}:
            alike = [shard for shard in shards if (shard.device, shard.dtype) == (device, dtype)]
            torch._foreach_mul_(alike, factor.to(device, dtype))
        return total

    def _average_scalars(self, run: RunContext) -> None:
        assert run.module is not None, "it was wrapped"
        reached = {
            name: parameter
            for name, parameter in run.module.named_parameters()
            if parameter.dim() == 0 and parameter.grad is not None
        }
        if reached:
            self._order.next(("scalars", *reached))
        for parameter in reached.values():
            assert parameter.grad is not None, "what has none was left out"
            parameter.grad = run.peers.all_reduce(parameter.grad, "mean")

    @hookimpl
    def on_validation_end(self, run: RunContext) -> None:
        _reshard(run.model)

    @hookimpl
    def on_test_end(self, run: RunContext) -> None:
        _reshard(run.model)

    @hookimpl
    def on_predict_end(self, run: RunContext) -> None:
        _reshard(run.model)

    # --- State ---------------------------------------------------------------------------------------------------

    @hookimpl
    def model_state(self, module: nn.Module, run: RunContext) -> dict[str, torch.Tensor]:
        _reshard(run.model)
        state = module.state_dict()
        return {name: _whole(tensor, run) for name, tensor in state.items()} if run.whole_state else state

    @hookimpl
    def load_model_state(
        self, state: dict[str, torch.Tensor], module: nn.Module, strict: bool, run: RunContext
    ) -> bool:
        _reshard(run.model)
        own = module.state_dict()
        load_weights(module, {name: _like(tensor, own.get(name)) for name, tensor in state.items()}, strict)
        return True

    @hookimpl
    def optimizer_state(self, optimizer: torch.optim.Optimizer, module: nn.Module, run: RunContext) -> dict[str, Any]:
        _reshard(run.model)
        state = logical_optimizer_state(optimizer, module)
        if not run.whole_state:
            return state
        whole = {name: {key: _whole(v, run) for key, v in entry.items()} for name, entry in state["state"].items()}
        return state | {"state": whole}

    @hookimpl
    def load_optimizer_state(
        self, state: dict[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module, run: RunContext
    ) -> bool:
        _reshard(run.model)
        own = dict(module.named_parameters())
        cut = {
            name: {key: _copied(_like(value, own.get(name))) for key, value in entry.items()}
            for name, entry in state["state"].items()
        }
        optimizer.load_state_dict(physical_optimizer_state(state | {"state": cut}, optimizer, module))
        return True


def cpu_offload() -> FSDPStrategy:
    """``fsdp_cpu_offload``"""
    return FSDPStrategy(cpu_offload=True)


def _mesh(device_type: str, axes: dict[str, int], collectives: Any) -> DeviceMesh:
    """Return a mesh of all ranks whose groups have the run's timeout. Collective.

    torch splits the groups of several axes from a communicator that is connected already, gloo's with NCCL's options,
    which gloo does not take; and with its own timeout.
    """
    names, sizes = tuple(axes), tuple(axes.values())
    if len(sizes) == 1:
        return init_device_mesh(device_type, sizes, mesh_dim_names=names)
    ranks = torch.arange(math.prod(sizes), dtype=torch.int).view(sizes)
    lines = [ranks.movedim(axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(sizes)]
    groups = [collectives.split(each).group for each in lines]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def _mark(module: nn.Module, **overrides: Any) -> nn.Module:
    if overrides:
        raise ConfigError(
            f"wrap got {', '.join(f'{name}={value!r}' for name, value in overrides.items())}",
            expected="the module alone", do="set options on the strategy: they hold for all units",
        )  # fmt: skip
    module.__dict__[_MARK] = True
    return module


def _groups(state: Any) -> list[Any]:
    """Return the groups in which a unit with this `state` sends its parameters; torch before 2.13 has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _count_bytes(units: list[nn.Module], num_replicas: int, traffic: Any, order: _Order) -> None:
    """Have `units` count in `traffic` what they send, and tell `order` before they do."""
    for unit in units:
        assert isinstance(unit, FSDPModule), "it was sharded"
        unit.set_custom_all_gather(_CountingAllGather(traffic, order, order.number(unit)))
        unit.set_custom_reduce_scatter(_CountingReduceScatter(traffic))
        for group in _groups(unit._get_fsdp_state()):
            order.watch_gradients(unit, group)
        if num_replicas > 1:  # FSDP calls it when it has averaged over replicas itself
            unit.set_all_reduce_hook(
                lambda reduced: traffic.add("all_reduce", reduced.nbytes, num_replicas, sender="gradients")
            )


class _CountingAllGather(DefaultAllGather):
    def __init__(self, traffic: Any, order: _Order, number: int) -> None:
        super().__init__()
        self._traffic, self._order, self._event = traffic, order, ("unit", number)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._order.next(self._event)
        self._traffic.add("all_gather", input_tensor.nbytes, group.size(), sender="parameters")
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _CountingReduceScatter(DefaultReduceScatter):
    def __init__(self, traffic: Any) -> None:
        super().__init__()
        self._traffic = traffic

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        self._traffic.add("reduce_scatter", input_tensor.nbytes, group.size(), sender="gradients")
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


# --- A backward within a step ------------------------------------------------------------------------------------


class _KeptWhole:
    """Keep units whole that a backward within the step (`torch.autograd.grad`) would leave without values.

    FSDP frees a unit after each backward through it. Two kinds are needed for longer:

    * With ``create_graph=True`` the graph of the backward refers to the unit's parameters, and the last backward of
      the step reaches them without any hook of the unit's: these units stay whole until the step ends.
    * A unit whose forward has not returned, the root among them, computes with its parameters afterwards.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._root_groups: list[Any] = []
        self._is_last = False

    def watch(self, state: Any) -> None:
        """Have the unit with this `state` tell of each backward."""
        for group in _groups(state):
            group.pre_backward = functools.partial(self._begin, group, type(group).pre_backward)
        finish = type(state)._root_post_backward_final_callback
        state._root_post_backward_final_callback = functools.partial(self._finish, state, finish)

    def _begin(self, group: Any, begin: Any, *arguments: Any) -> None:
        if torch.is_grad_enabled() and group.reshard is not _nothing:
            group.reshard = _nothing
            self._kept.append(group)
        begin(group, *arguments)

    def _finish(self, state: Any, finish: Any) -> None:
        groups = [group for each in state._state_ctx.all_states for group in _groups(each)]
        if self._is_last:
            for group in self._kept:  # gradients may have arrived since the unit's own backward was over
                group._training_state = TrainingState.IDLE
            finish(state)
            return
        root = state._state_ctx.iter_forward_root
        forward = TrainingState.FORWARD
        before = {group: group._training_state for group in groups if group._training_state is forward}
        before |= {group: group._training_state for group in self._root_groups}
        for group in before:
            group._training_state = TrainingState.POST_BACKWARD  # then nothing is done with it
        finish(state)
        for group, training_state in before.items():
            group._training_state = training_state
        state._state_ctx.iter_forward_root = root

    @contextlib.contextmanager
    def computing(self, root: Any) -> Iterator[None]:
        """Within, `root` computes even where a backward of the step's has ended its forward for FSDP."""
        self._root_groups = [] if root is None else _groups(root._get_fsdp_state())
        try:
            yield
        finally:
            self._root_groups = []

    @contextlib.contextmanager
    def last_backward(self) -> Iterator[None]:
        """The backward within is that of the step: it reduces gradients and frees what computes."""
        self._is_last = True
        try:
            yield
        finally:
            self._is_last = False

    def release(self) -> None:
        """Free what was kept."""
        while self._kept:
            group = self._kept.pop()
            del group.reshard
            group.reshard()


def _nothing() -> None:
    pass


# --- Parameters outside of their unit's forward ------------------------------------------------------------------

#: What torch says of an operation between a gathered or ordinary tensor and a shard.
_MIXED = "mixed torch.Tensor and DTensor"


def _used_elsewhere(error: BaseException, root: nn.Module) -> ConfigError:
    """Return the error for an operation on parameters whose unit is not gathered, with their names where found."""
    names, units = _shards_of(root)
    found = {names[id(tensor)] for tensor in _tensors_in_use(error) if id(tensor) in names}
    some = sorted(found) or sorted(units)
    inside = sorted({units[name] for name in some} - {""})
    which = f" of the unit{'s' * (len(inside) > 1)} {_few([repr(name) for name in inside])}" if inside else ""
    verb = "was" if len(some) == 1 else "were"
    among = "" if found else "some of "
    return ConfigError(
        f"{among}{_few([repr(name) for name in some])}{which} {verb} used while sharded, outside of the unit's forward",
        expected="parameters that are used within the forward of their own unit, which gathers them",
        do="leave that layer out of strategy.fsdp.auto_wrap_policy, or make the module that uses its parameters a unit",
    )


def _shards_of(root: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """Return the names of the parameters that are sharded now, by their ids; and the unit of each name."""
    names: dict[int, str] = {}
    units: dict[str, str] = {}
    for prefix, part in root.named_modules():
        for group in _groups(part._get_fsdp_state()) if isinstance(part, FSDPModule) else ():
            for each in group.fsdp_params if not group.is_unsharded else ():
                name = names[id(each.sharded_param)] = each._param_fqn.removeprefix("module.")
                units[name] = prefix.removeprefix("module").removeprefix(".")
    return names, units


def _tensors_in_use(error: BaseException) -> Iterator[Any]:
    """Yield the variables of the function that failed, and the attributes that its failed line names."""
    for trace in reversed(list(_traces(error.__traceback__))):
        frame = trace.tb_frame
        found = [value for value in frame.f_locals.values() if isinstance(value, DTensor)]
        first, last, *_ = list(frame.f_code.co_positions())[trace.tb_lasti // 2]
        for number in range(first or trace.tb_lineno, (last or trace.tb_lineno) + 1):
            line = linecache.getline(frame.f_code.co_filename, number)
            found += [_looked_up(frame.f_locals, path) for path in re.findall(r"[^\W\d]\w*(?:\.\w+|\[\d+\])+", line)]
        if any(isinstance(value, DTensor) for value in found):
            yield from found
            return


def _traces(trace: Any) -> Iterator[Any]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _looked_up(variables: Mapping[str, Any], path: str) -> Any:
    """Return what a `path` such as ``self.layers[0].weight`` is, as far as modules have it; None if they have not."""
    first, *rest = re.findall(r"\w+", path)
    value = variables.get(first)
    for name in rest:
        known = isinstance(value, nn.Module) and any(name in those for those in (value._modules, value._parameters))
        value = getattr(value, name) if known else None
    return value


# --- Ranks that differ -------------------------------------------------------------------------------------------

#: How long a rank that leaves the order of the steps before waits for the others: as long as a collective, nearly.
_SHARE_OF_TIMEOUT = 0.9
#: How often a rank whose process stands still looks whether another one has left the order.
_LOOK_S = 0.5
#: So many orders are remembered for a kind of step.
_ORDERS = 16
_END: tuple[Any, ...] = ("end",)
_orders = itertools.count()

_Event = tuple[Any, ...]


class _Order:
    """Which units a step gathers and which gradients it reduces, in order: the same on all ranks.

    [Note: the order of units]
    FSDP's collectives carry no names. If one rank gathers or reduces another unit than the others do, or gradients of
    other parameters of a unit, one layer's numbers are added to another's; where sizes differ, gloo aborts the process.
    So each collective is an *event*, and no rank may begin one that the others do not begin.

    The ranks compare the events of the first step of a kind, one by one, before each collective. That step's *order*
    is then known to all of them, and a rank follows it without asking anybody: as long as its events are the expected
    ones it only compares two tuples. A rank whose event is another one *leaves* the order. It tells the others through
    the store, before it begins a collective, and waits until they have left at the same place with the same event,
    which is how a model may change from step to step. If they have not, it raises. The others may be stuck by then in a
    collective that it does not join: a thread answers for them, which looks at the store when nothing has happened for
    a while.
    """

    def __init__(self, run: RunContext) -> None:
        self._peers, self._collectives, self._first = run.peers, run.collectives, run.rank - run.peers.rank
        self._limit_s = _SHARE_OF_TIMEOUT * run.join_timeout.total_seconds()
        self._key, self._round = f"fsdp/{next(_orders)}/{self._first}", 0
        #: The same on all ranks, as they wrap the same models in the same order.
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._names: list[str] = []
        #: By unit: the names of the parameters that its gradients are numbered by.
        self._parameters: dict[int, list[str]] = {}
        self._known: dict[Hashable, list[tuple[_Event, ...]]] = {}
        self._open, self._steps = False, 0
        self._board: Any = None
        self._telling, self._closing = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        #: The orders of the steps of this kind, the latest last.
        self._kind: list[tuple[_Event, ...]] = []
        self._seen: list[_Event] = []
        #: None: the ranks compare each event.
        self._expected: tuple[_Event, ...] | None = None

    def add(self, root: nn.Module) -> None:
        """Number the units of `root`."""
        parts: Iterator[tuple[str, nn.Module]] = root.named_modules()
        for name, part in parts:
            if isinstance(part, FSDPModule) and part not in self._numbers:
                self._numbers[part] = len(self._names)
                self._names.append(name.removeprefix("module").removeprefix("."))

    def number(self, unit: nn.Module) -> int:
        return self._numbers[unit]

    def watch_gradients(self, unit: nn.Module, group: Any) -> None:
        """Have `group` tell which parameters have gradients before it reduces them."""
        number = self._numbers[unit]
        names = {id(parameter): name for name, parameter in unit.named_parameters(self._names[number])}
        own = [names[id(each.sharded_param)].removeprefix("module.") for each in group.fsdp_params]
        self._parameters[number] = own
        reduce = type(group).post_backward

        def compare_and_reduce(*arguments: Any) -> None:
            if group.reduce_grads and (reached := _with_gradients(group.fsdp_params)):
                self.next(("gradients", number, reached))
            reduce(group, *arguments)

        group.post_backward = compare_and_reduce

    @contextlib.contextmanager
    def compared(self, kind: Hashable) -> Iterator[None]:
        """Compare the events within, which are a step of this `kind`; within another step they are part of that."""
        if self._open or self._peers.world_size == 1:
            yield
            return
        known = self._kind = self._known.setdefault(kind, [])
        self._open, self._seen, self._expected = True, [], known[-1] if known else None
        self._steps += 1
        if known and self._thread is None:
            arguments = (weakref.ref(self), self._closing)
            self._thread = threading.Thread(target=_answer, args=arguments, name="stratagem-fsdp-order", daemon=True)
            self._thread.start()
        try:
            yield
            self.next(_END)
        finally:
            self._open = False
        if not known or self._expected is not known[-1]:
            order = tuple(self._seen)
            known[:] = [*[each for each in known if each != order][1 - _ORDERS :], order]

    def next(self, event: _Event) -> None:
        """Go on with `event` if all ranks do.

        Raises:
            ConfigError: others do not.
        """
        if not self._open:
            return
        place, expected = len(self._seen), self._expected
        self._seen.append(event)
        if expected is not None and place < len(expected) and expected[place] == event:
            return
        self._compare(event, together=expected is None)
        same = (each for each in reversed(self._kind) if list(each[: place + 1]) == self._seen)
        self._expected = next(same, None)

    def close(self) -> None:
        """End the thread that answers for this rank."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = self._board = None

    def _compare(self, event: _Event, *, together: bool) -> None:
        mine = (self._steps, len(self._seen) - 1, *event)
        if together:
            sign = torch.tensor([zlib.crc32(repr(mine).encode())])
            with self._peers.traffic.sent_by("comparison of ranks"):
                signs = self._peers.all_gather(sign)
            if len({int(each) for each in signs}) == 1:
                return
            found = dict(enumerate(self._peers.all_gather_object(mine)))
        else:
            with self._telling:
                found = self._tell(mine)
        if len(found) < self._peers.world_size or len(set(found.values())) > 1:
            raise self._error(found)

    def _tell(self, mine: _Event) -> dict[int, _Event]:
        """Tell the other ranks where this one is, and return where those are that tell it within the limit, by rank."""
        key, rank, size = f"{self._key}/{self._round}", self._peers.rank, self._peers.world_size
        self._board = self._board or self._collectives.board()
        self._round += 1
        self._board.put(f"{key}/{rank}", json.dumps(mine))
        self._board.put(f"{key}/left", json.dumps(mine[:2]))
        deadline = time.monotonic() + self._limit_s
        if rank == 0:  # one rank reads what all have written
            told = {each: self._read(f"{key}/{each}", deadline) for each in range(1, size)}
            self._board.put(f"{key}/all", json.dumps([mine, *told.values()]))
        else:
            told = dict(enumerate(self._read(f"{key}/all", deadline + 1) or []))
        told[rank] = mine
        return {each: _tuples(where) for each, where in told.items() if where is not None}

    def _read(self, key: str, deadline: float) -> Any:
        """Return what is put under `key` until the `deadline`; None if nothing is."""
        pause_s = 0.0005
        while (text := self._board.get(key)) is None:
            if time.monotonic() > deadline or self._closing.is_set():
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        return json.loads(text)

    def look(self, before: tuple[int, int]) -> tuple[int, int]:
        """Tell where this rank is, if it was there `before` and another one has left the order at that place or sooner.

        Return where it is.
        """
        step, place = where = self._steps, len(self._seen) - 1
        if where != before or place < 0:
            return where
        with contextlib.suppress(Exception), self._telling:  # the store may be gone with the rank that hosts it
            self._board = self._board or self._collectives.board()
            left = self._board.get(f"{self._key}/{self._round}/left")
            if left is not None and tuple(json.loads(left)) <= where:
                if json.loads(left)[0] == step:  # say what it did there, and not where it got since
                    place = json.loads(left)[1]
                self._tell((step, place, *self._seen[place]))
        return where

    def _error(self, found: Mapping[int, tuple[Any, ...]]) -> ConfigError:
        reached = [set(self._reached(event)) for _, _, *event in found.values() if event[0] in ("gradients", "scalars")]
        some: set[str] = set().union(*reached)
        apart = some - some.intersection(*reached) if len(reached) > 1 else some
        said: dict[str, list[int]] = {}
        for rank in range(self._peers.world_size):
            event = found[rank][2:] if rank in found else None
            said.setdefault(self._said(event, apart), []).append(self._first + rank)
        ranks = "; ".join(f"rank{'s' * (len(who) > 1)} {_few(who)} {text}" for text, who in said.items())
        return ConfigError(
            f"ranks use different layers in one step: {ranks}",
            expected="the same ones on every rank, in the same order: FSDP adds up what comes at the same place",
            do='add the others to the loss with a factor of zero, or choose strategy="ddp_find_unused_parameters_true"',
        )

    def _reached(self, event: Any) -> list[str]:
        if event[0] == "gradients":
            return [name for index, name in enumerate(self._parameters[event[1]]) if event[2] >> index & 1]
        return list(event[1:]) if event[0] == "scalars" else []

    def _said(self, event: Any, apart: set[str]) -> str:
        if event is None:
            return f"did not say within {self._limit_s:g} s what comes next"
        if event[0] == "end":
            return "came to the end of the step"
        if event[0] == "unit":
            name = self._names[event[1]]
            return f"came to {name!r}" if name else "came to the parameters outside of all units"
        names = [repr(name) for name in self._reached(event) if name in apart]
        return f"has gradients for {_few(names)}" if names else f"has none for {_few(sorted(map(repr, apart)))}"


def _answer(order: weakref.ref[_Order], closing: threading.Event) -> None:
    """Answer for a rank whose process stands still, until it is closed or forgotten."""
    where = (0, 0)
    while not closing.wait(_LOOK_S):
        held = order()
        if held is None:
            return
        where = held.look(where)
        del held


def _with_gradients(parameters: list[Any]) -> int:
    """Return which of a unit's `parameters` have gradients to reduce, a bit for each."""
    reached = 0
    for index, each in enumerate(parameters):
        whole = getattr(each, "_unsharded_param", None)
        if each.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
            reached |= 1 << index
    return reached


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _few(items: list[Any], shown: int = 4) -> str:
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return f"{', '.join(map(str, items[:shown]))}{more}"


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


def _send_through_hooks(units: list[nn.Module], reduce: Callable[[Bucket], Any]) -> None:
    """Average over the replicas what `units` have reduced over their shards, a bucket for each unit."""

    def average(index: int, unit: FSDPModule, reduced: torch.Tensor) -> None:
        parameters, gradients = _shards_in(unit, reduced)
        # Each bucket is the last of its kind: FSDP goes on with the result at once.
        bucket = Bucket(buffer=reduced, index=index, parameters=parameters, gradients=gradients)
        reduced.copy_(reduce(bucket).wait())
        _keep_for_this_stream(reduced)

    for index, unit in enumerate(units):
        assert isinstance(unit, FSDPModule), "it was sharded"
        unit.set_all_reduce_hook(functools.partial(average, index, unit))


def _keep_for_this_stream(reduced: torch.Tensor) -> None:
    """Have the allocator keep the memory of `reduced` until what the present stream does with it is done.

    FSDP calls hooks on the stream of its all-reduce, and made `reduced` on that of its reduce-scatter. For its own
    all-reduce it holds on to the tensor; after a hook the next unit's reduce-scatter might get the memory too soon.
    """
    if reduced.device.type != "cpu":
        reduced.record_stream(torch.accelerator.current_stream(reduced.device))


def _shards_in(unit: FSDPModule, reduced: torch.Tensor) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """Return the parameters whose gradients' shards lie in `reduced`, and these; nothing if some were not reached."""
    groups = _groups(unit._get_fsdp_state())
    trained = [each for group in groups for each in group.fsdp_params if each.sharded_param.requires_grad]
    shapes = [each.padded_sharded_param_size for each in trained]
    sizes = [shape.numel() for shape in shapes]
    if sum(sizes) != reduced.numel():
        return (), ()
    views = [part.view(shape) for part, shape in zip(reduced.split(sizes), shapes, strict=True)]
    return tuple(each.sharded_param for each in trained), tuple(views)


def _check_tied(root: nn.Module, units: list[nn.Module]) -> None:
    """Refuse a parameter that belongs to two units: sharded with one, it would be another parameter in the other."""
    names = {id(part): name for name, part in root.named_modules()}
    chosen = {id(unit) for unit in units}
    homes: dict[int, tuple[str, int]] = {}
    for name, parameter, home in _by_unit(root, units):
        first, where = homes.setdefault(id(parameter), (name, home))
        if where != home:
            both = " and ".join(repr(names[unit]) if unit in chosen else "the rest" for unit in (where, home))
            raise ConfigError(
                f"{first!r} and {name!r} are one parameter in two units, {both}",
                expected="tied parameters within one unit",
                do="make a module that holds both a unit, or leave theirs out of auto_wrap_policy",
            )


def _by_unit(root: nn.Module, units: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield each parameter, under all of its names, with the id of the unit that it belongs to, or of `root`."""
    chosen = {id(unit) for unit in units}

    def visit(part: nn.Module, prefix: str, home: int) -> Iterator[tuple[str, nn.Parameter, int]]:
        home = id(part) if id(part) in chosen else home
        for name, parameter in part.named_parameters(prefix, recurse=False):
            yield name, parameter, home
        for name, child in part.named_children():
            yield from visit(child, f"{prefix}.{name}" if prefix else name, home)

    yield from visit(root, "", id(root))


def _check_dtypes(root: nn.Module, units: list[nn.Module]) -> None:
    """Refuse trained parameters that FSDP cannot reduce in one message: complex ones, and two dtypes in a unit."""
    names = {id(part): name for name, part in root.named_modules()}
    first: dict[int, tuple[str, torch.dtype]] = {}
    for name, parameter, home in _by_unit(root, units):
        if not parameter.requires_grad or not _is_cut(parameter):
            continue
        if parameter.is_complex():
            raise ConfigError(
                f"{name!r} is complex and trained, and FSDP sends gradients as real numbers",
                expected="real parameters",
                do='keep torch.view_as_real of it as the parameter, freeze it, or choose strategy="ddp"',
            )
        other, dtype = first.setdefault(home, (name, parameter.dtype))
        if dtype != parameter.dtype:
            unit = f"in the unit {names[home]!r}" if names[home] else "outside of all units"
            raise ConfigError(
                f"{other!r} is {_said(dtype)} and {name!r} is {_said(parameter.dtype)}, {unit}",
                expected="trained parameters of one dtype in a unit, which FSDP sends in one message",
                do="make units of the layers with the other dtype (strategy.fsdp.auto_wrap_policy), or convert them",
            )


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_cut(parameter: nn.Parameter) -> bool:
    """Whether FSDP shards `parameter`: not without dimensions (see `_average_scalars`), nor without elements."""
    return parameter.dim() > 0 and parameter.numel() > 0


def _not_cut(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in module.parameters() if not _is_cut(parameter)}


def _from_rank_0(module: nn.Module, device: Any, run: RunContext) -> Callable[[nn.Module], None]:
    """Give `module` rank 0's values on `device`; return what gives values to a part that was built without."""
    with torch.no_grad():
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not tensor.is_meta and not isinstance(tensor, DTensor):
                        moved = tensor.data.to(device).contiguous()
                        run.collectives.broadcast(moved)
                        if name in part._buffers:
                            part._buffers[name] = moved
                        else:
                            tensor.data = moved
    filler = run.materializer(module.get_submodule("module"))
    filler.device = torch.device(device)
    return filler.fill


def _return_large_blocks() -> None:
    """Have the C library return blocks of a megabyte to the system as soon as they are free.

    glibc learns from the first large block that is freed to keep blocks of that size, and a heap of gathered units,
    freed in between shards that stay, is never given back: four times the memory of the shards, measured.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


# --- Tensors and their shards ------------------------------------------------------------------------------------


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(value: Any, run: RunContext) -> Any:
    """Return a sharded tensor whole, on the CPU, where it is needed; anything else as it is. Collective."""
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    return whole.cpu() if run.needs_values else whole.to("meta")


def _like(value: Any, model: Any) -> Any:
    """Return this rank's shard of `value`, in its memory, where `model` is sharded and has its shape; else `value`."""
    if not (isinstance(value, torch.Tensor) and isinstance(model, DTensor) and value.shape == model.shape):
        return value
    sizes, offsets = compute_local_shape_and_global_offset(model.shape, model.device_mesh, model.placements)
    part = value
    for dimension, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        if size != value.shape[dimension]:
            part = part.narrow(dimension, min(offset, value.shape[dimension] - size), size)
    # Not by `from_local`, which moves shards that are offloaded to the mesh's device.
    spec = DTensorSpec(model.device_mesh, model.placements, TensorMeta(model.shape, model.stride(), part.dtype))
    return DTensor(part.to(model.to_local().device), spec, requires_grad=False)


def _copied(value: Any) -> Any:
    """Return a tensor with memory of its own: an optimizer keeps what it is given."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _running_norms(user: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Return the layers with running statistics: those are fp32, and so must their weights be."""
    norms = [part for part in user.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    return [part for part in norms if part.weight is not None and part not in units]


def _is_double(unit: nn.Module) -> bool:
    """Whether what is left of `unit` to shard is in double precision: autocast leaves that alone, too."""
    own = [each for each in unit.parameters() if not isinstance(each, DTensor) and _is_cut(each)]
    return any(each.dtype is torch.float64 for each in own)


def _reshard(root: nn.Module) -> None:
    """Leave every unit sharded: an evaluation, or a backward within a forward, may have left some whole."""
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _check_same(earlier: tuple[nn.Module, Any], mesh: Any) -> None:
    if earlier[1] != mesh:
        raise ConfigError(
            "the model was sharded by an earlier run over other processes",
            expected="a model that is whole, or the same processes",
            do="save a checkpoint and load it into a new model",
        )
