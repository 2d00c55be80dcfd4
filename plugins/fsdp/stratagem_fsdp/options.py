"""The options of FSDP, and what follows from them before any process starts."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from stratagem.api import CUSTOM_CLIPPING, GRADIENT_BUCKETS, SHARDED_PARAMETERS, Capabilities, Mesh
from stratagem.api.validators import check_equal_nodes
from stratagem.errors import ConfigError, shown
from stratagem_process_group import USUAL, ProcessGroupStrategy, group_options_after
from stratagem_transforms.wrap_policy import check_policy

if TYPE_CHECKING:
    from stratagem.api import PrecisionPolicy, World


def _name_of(value: Any) -> Any:
    """Return the name of one of torch's enumeration; anything else as it is."""
    return value.name if isinstance(value, enum.Enum) else value


def _offloads(value: Any) -> Any:
    """Return whether torch's CPUOffload, or one of its policies of FSDP2, offloads; anything else as it is."""
    if hasattr(value, "offload_params"):
        return bool(value.offload_params)
    policies = {"OffloadPolicy": False, "CPUOffloadPolicy": True}
    return policies.get(type(value).__name__, value)


@define(eq=False, kw_only=True, field_transformer=group_options_after("mixed_precision"))
class FSDPOptions(ProcessGroupStrategy):
    """The options, checked when they are set, and the answers that depend on them alone."""

    #: What becomes a unit of its own: "blocks" (the repeated layers), a set of classes, a torch policy, or a callable.
    #: Units are gathered one by one, on GPUs beside the computation of another one: smaller ones need less memory and
    #: more messages. Without any, the model is one unit and whole in every step.
    auto_wrap_policy: Any = None
    #: What is computed again in backward instead of being kept: a set of classes or a torch policy. Memory for time.
    activation_checkpointing_policy: Any = None
    #: FULL_SHARD shards everything. SHARD_GRAD_OP keeps units whole between forward and backward: fewer messages, more
    #: memory. HYBRID_SHARD shards within a group of processes and replicates over groups. NO_SHARD replicates.
    #: _HYBRID_SHARD_ZERO2 is HYBRID_SHARD that keeps units whole. A torch ShardingStrategy may be given, too.
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"] = (
        field(default="FULL_SHARD", converter=_name_of)
    )
    #: For HYBRID_SHARD: (replicas, processes that share one). By default a replica for each node, so that one node is
    #: as with FULL_SHARD.
    device_mesh: tuple[int, int] | None = field(default=None, metadata={"example": (2, 4)})
    #: Keep shards, gradients and optimizer on the CPU, and step there: very little device memory, very slow.
    cpu_offload: bool = field(default=False, converter=_offloads)
    #: "sharded" saves with the checkpoint format of that name, each rank its part; "full" makes one file. By default
    #: what ``Trainer(checkpoint=)`` chooses.
    state_dict_type: Literal["full", "sharded"] | None = None
    #: Dtypes to compute and to reduce in: a torch MixedPrecisionPolicy (or MixedPrecision); else the precision decides.
    mixed_precision: Any = None
    #: Of the first FSDP; its second implementation always limits them.
    limit_all_gathers: bool = field(default=True)
    #: Of the first FSDP; its second implementation always keeps the original parameters.
    use_orig_params: bool = field(default=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        for name in ("limit_all_gathers", "use_orig_params"):
            if getattr(self, name) is False:
                raise ConfigError(
                    f"strategy.fsdp.{name} is False",
                    expected="True: torch's second FSDP cannot do without", do="drop it",
                )  # fmt: skip
        for name in ("auto_wrap_policy", "activation_checkpointing_policy"):
            if getattr(self, name) is not None:
                check_policy(getattr(self, name), f"strategy.fsdp.{name}")
        if self.mixed_precision is not None and not hasattr(self.mixed_precision, "param_dtype"):
            raise ConfigError(
                f"strategy.fsdp.mixed_precision is {shown(self.mixed_precision)}",
                expected="a torch.distributed.fsdp.MixedPrecisionPolicy",
                do="drop it: Trainer(precision=...) decides otherwise",
            )
        if self.device_mesh is not None and not self.is_hybrid:
            raise ConfigError(
                f"strategy.fsdp.device_mesh is {self.device_mesh} with sharding_strategy={self.sharding_strategy!r}",
                expected="HYBRID_SHARD, which alone has replicas of shards",
            )

    @property
    def is_hybrid(self) -> bool:
        """Whether groups of processes share a replica each."""
        return self.sharding_strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # an option decides
        """Averages over replicas are sent through comm hooks; FSDP's reduce-scatter over shards is not."""
        provides = USUAL | {CUSTOM_CLIPPING, SHARDED_PARAMETERS}
        replicates = self.is_hybrid or self.sharding_strategy == "NO_SHARD"
        return Capabilities(provides=provides | {GRADIENT_BUCKETS} if replicates else provides)

    def how_to_provide(self, word: str) -> str:
        if word == GRADIENT_BUCKETS:
            return 'set strategy.fsdp.sharding_strategy to "HYBRID_SHARD": averages over replicas pass comm hooks'
        return ""

    def default_checkpoint(self) -> str | None:
        return self.state_dict_type

    def absorbs(self, policy: PrecisionPolicy) -> bool:
        """FSDP applies mixed precision without loss scaling itself: it also gathers in fewer bits."""
        return self.mixed_precision is not None or (policy.compute_dtype is not None and policy.param_dtype is None
                                                    and not policy.loss_scaling)  # fmt: skip

    def mesh(self, world: World) -> Mesh:
        replicas, shards = self._layout(world)
        return Mesh(axes={"data": replicas, "shard": shards}, rank=world.rank)

    def _layout(self, world: World) -> tuple[int, int]:
        """Return how many replicas there are, and how many processes share each."""
        if self.sharding_strategy == "NO_SHARD":
            return world.world_size, 1
        if not self.is_hybrid:
            return 1, world.world_size
        if self.device_mesh is None:
            hybrid = "strategy.fsdp.sharding_strategy is HYBRID_SHARD, so a node shares a replica"
            check_equal_nodes(world, hybrid, "set strategy.fsdp.device_mesh, or use FULL_SHARD")
        replicas, shards = self.device_mesh or (world.num_nodes, world.local_world_size)
        if replicas * shards != world.world_size:
            raise ConfigError(
                f"strategy.fsdp.device_mesh is {(replicas, shards)} and the run has {world.world_size} processes",
                expected="a product equal to the number of processes",
            )
        return replicas, shards
