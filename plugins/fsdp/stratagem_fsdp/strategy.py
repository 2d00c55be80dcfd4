"""The strategy: what FSDP2 does at each hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp.wrap import enable_wrap
from torch.distributed.tensor import DTensor

from stratagem.api import hookimpl
from stratagem.api.named_state import logical_optimizer_state
from stratagem.distributed.default_group import backends_of
from stratagem.errors import ConfigError
from stratagem_buckets.reducer import bucket_reducer
from stratagem_fsdp.options import FSDPOptions
from stratagem_process_group import group_options_after
from stratagem_sharding.hooks import ShardingHooks, wrapped_earlier
from stratagem_sharding.initial_values import filling_from_rank_0
from stratagem_sharding.memory import return_large_blocks
from stratagem_sharding.mesh import check_backend, device_mesh
from stratagem_sharding.param_groups import reshard, send_through_hooks
from stratagem_sharding.part_writes import PartWrites
from stratagem_sharding.shards import gathered, local
from stratagem_sharding.steps import ShardedSteps
from stratagem_sharding.units import mark_unit, shard_units, units_of
from stratagem_sharding.whole_matrices import whole_matrices
from stratagem_transforms.activation_checkpointing import recompute, use_caches
from stratagem_transforms.normalization import match_inputs

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from contextlib import AbstractContextManager

    from stratagem.api import Collectives, RunContext, World

#: Where a sharded module remembers how it was wrapped, for the next call of the trainer.
_WRAPPED = "_stratagem_fsdp"
_POLICY = "strategy.fsdp.auto_wrap_policy"


@define(eq=False, kw_only=True, field_transformer=group_options_after("mixed_precision"))
class FSDPStrategy(ShardingHooks, FSDPOptions):
    """Each process keeps a shard; a unit is gathered only while it computes.

    Zhao et al., "PyTorch FSDP", VLDB 2023; torch's second implementation of it.
    """

    _device_mesh: Any = field(init=False, default=None)
    #: Parameters without dimensions, which FSDP cannot divide, and their names.
    _scalars: list[tuple[str, nn.Parameter]] = field(init=False, factory=list)
    _steps: ShardedSteps = field(init=False, factory=lambda: ShardedSteps(_POLICY))
    _without_cache: list[Any] = field(init=False, factory=list)

    # --- The model -----------------------------------------------------------------------------------------------

    @hookimpl
    def connect(self, world: World, run: RunContext) -> Collectives:
        collectives = super().connect(world, run)
        if run.device.type == "cpu" or self.cpu_offload:
            return_large_blocks()
        if self.cpu_offload and run.environment.simulated:
            raise ConfigError(
                "strategy.fsdp.cpu_offload is True, and a plan counts one device's memory", do="plan without it"
            )
        if self.cpu_offload and "cpu" not in backends_of(None):
            backend = self.process_group_backend or run.accelerator.backend
            raise ConfigError(
                f"strategy.fsdp.cpu_offload is True and the process group's backend is {dist.get_backend()!r}",
                expected="one that also sends the CPU's tensors",
                do=f'call init_process_group("cpu:gloo,{run.device.type}:{backend}"), or leave that to the trainer',
            )
        if not self.cpu_offload:
            check_backend(run.device)
        self._steps.close()
        self._device_mesh = self._make_mesh(run, collectives)
        return collectives

    def _make_mesh(self, run: RunContext, collectives: Collectives) -> Any:
        """Return the mesh of this rank's team: the axis to shard over, and to replicate over if no comm hook does.

        Collective.
        """
        assert run.world is not None, "it connects"
        replicas, shards = self._layout(run.peers_world)
        teams = run.world.world_size // (replicas * shards)
        sizes = {"team": teams, "replicate": replicas, "shard": shards}
        axes = [axis for axis in sizes if sizes[axis] > 1 or axis == "shard"]
        mesh = device_mesh(run.device.type, {axis: sizes[axis] for axis in axes}, collectives)
        wanted = ("shard",) if run.plugins_of("comm_hook") else tuple(axis for axis in axes if axis != "team")
        return mesh if wanted == tuple(axes) else mesh[wanted]

    def _replicas(self, run: RunContext) -> Collectives:
        """Return the collectives of the ranks that hold the same shard. Collective."""
        replicas, shards = self._layout(run.peers_world)
        return run.peers.split([[shards * row + column for row in range(replicas)] for column in range(shards)])

    @hookimpl
    def teardown(self, run: RunContext) -> None:
        self._steps.close()
        self.on_fit_end()
        super().teardown(run)

    @hookimpl(optionalhook=True)
    def on_fit_end(self) -> None:
        use_caches(self._without_cache)

    @hookimpl
    def init_context(self) -> AbstractContextManager[Any]:
        """Let ``torch.distributed.fsdp.wrap.wrap`` name units by hand; they are sharded when the model is complete."""
        return enable_wrap(wrapper_cls=mark_unit)

    def hook_context(self) -> AbstractContextManager[Any]:
        """Let hooks write into parts of what is sharded."""
        return PartWrites(lambda: self._steps.order)

    @hookimpl
    def units(self, module: nn.Module) -> list[nn.Module]:
        return units_of(module, self.auto_wrap_policy, _POLICY)

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        user = module.get_submodule("module")
        if self.activation_checkpointing_policy is not None and run.settings.activation_checkpointing is not None:
            raise ConfigError(
                "activation_checkpointing and strategy.fsdp.activation_checkpointing_policy are both set",
                expected="one of the two",
            )
        root = wrapped_earlier(user, _WRAPPED, self._device_mesh, was="sharded")
        if root is not None:
            reshard(root)  # optimizers are made of shards
            self._set_hooks(root, run)
            return root
        fill = filling_from_rank_0(module, "cpu" if self.cpu_offload else run.device, run)
        if self.activation_checkpointing_policy is not None:
            option = "strategy.fsdp.activation_checkpointing_policy"
            self._without_cache += recompute(user, self.activation_checkpointing_policy, option=option, run=run)
        options = self._options(run)
        shard_units(
            module, user, policy=self.auto_wrap_policy, option=_POLICY, options=options, fill=fill, run=run,
            keep_root=not run.manual,
        )  # fmt: skip
        self._set_hooks(module, run)
        if options["mp_policy"].param_dtype is not None and run.device.type == "cpu":
            match_inputs(user)
        user.__dict__[_WRAPPED] = (module, self._device_mesh)
        return module

    def _set_hooks(self, root: nn.Module, run: RunContext) -> None:
        """Have all units count what they send, and average over replicas through the comm hooks if there are any."""
        assert run.module is not None, "set before wrap_model is called"
        self._scalars = [(name, each) for name, each in run.module.named_parameters() if each.dim() == 0]
        units = self._steps.add(root, run, run.peers, self._layout(run.peers_world)[0])
        if run.plugins_of("comm_hook") and run.stage == "train":
            reduce = bucket_reducer(run, over=self._replicas(run))
            assert reduce is not None, "there are comm hooks"
            send_through_hooks(units, reduce)

    def _options(self, run: RunContext) -> dict[str, Any]:
        policy = self.mixed_precision
        param_dtype: torch.dtype | None
        reduce_dtype: torch.dtype | None
        if policy is None and run.stack.precision_absorbed:
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
        dtype = getattr(self.mixed_precision, "param_dtype", None) or (
            run.policy.compute_dtype if run.stack.precision_absorbed else None
        )
        return self._steps.step(run.model, stage, sync, run, dtype)

    @hookimpl
    def backward(self, loss: torch.Tensor, module: nn.Module, run: RunContext) -> bool:
        with self._steps.backward(loss, module, run):
            if run.manual or run.sync_gradients:
                self._average_scalars(run)
        return True

    @hookimpl(wrapper=True)
    def step_optimizers(self, optimizers: list[torch.optim.Optimizer], run: RunContext) -> Generator[None, bool, bool]:
        with self._steps.step_optimizers(run.model, run), whole_matrices(optimizers):
            return (yield)

    def clip_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        # Shards have to be summed over the ranks, whole gradients must not be.
        sharded = [p.grad for p in parameters if isinstance(p.grad, DTensor)]
        whole = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
        norms = [torch.nn.utils.get_total_norm(some) for some in (sharded, whole) if some]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        shards = [local(p.grad) for p in parameters if p.grad is not None]
        for device, dtype in {(shard.device, shard.dtype) for shard in shards}:
            same = [shard for shard in shards if (shard.device, shard.dtype) == (device, dtype)]
            torch._foreach_mul_(same, factor.to(device, dtype))
        return total

    def _average_scalars(self, run: RunContext) -> None:
        reached = {name: parameter for name, parameter in self._scalars if parameter.grad is not None}
        if reached:
            assert self._steps.order is not None, "it was wrapped"
            self._steps.order.next(("scalars", *reached))
        for parameter in reached.values():
            assert parameter.grad is not None, "what has none was left out"
            parameter.grad = run.peers.all_reduce(parameter.grad, "mean")

    # --- State ---------------------------------------------------------------------------------------------------

    @hookimpl
    def model_state(self, module: nn.Module, run: RunContext) -> dict[str, torch.Tensor]:
        reshard(run.model)
        state = module.state_dict()
        return {name: gathered(tensor, run) for name, tensor in state.items()} if run.whole_state else state

    @hookimpl
    def optimizer_state(self, optimizer: torch.optim.Optimizer, module: nn.Module, run: RunContext) -> dict[str, Any]:
        reshard(run.model)
        state = logical_optimizer_state(optimizer, module)
        if not run.whole_state:
            return state
        whole = {name: {key: gathered(v, run) for key, v in entry.items()} for name, entry in state["state"].items()}
        return state | {"state": whole}


def cpu_offload() -> FSDPStrategy:
    """``fsdp_cpu_offload``"""
    return FSDPStrategy(cpu_offload=True)
