"""The options of the strategy, and what follows from them before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field, fields
from attrs.validators import optional

from stratagem.api import (
    CLOSURE_OPTIMIZERS,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    GRADIENT_BUCKETS,
    MANUAL_OPTIMIZATION,
    SHARDED_PARAMETERS,
    Capabilities,
)
from stratagem.api.validators import at_least, more_than
from stratagem.errors import ConfigError, nearest, shown
from stratagem_parallel import on_demand
from stratagem_parallel.expert.axis import STYLE as EXPERT
from stratagem_parallel.layout import SIZES, make_mesh
from stratagem_parallel.pipeline.balance import check_balance, check_split_points
from stratagem_parallel.pipeline.schedules import schedule_named
from stratagem_process_group import USUAL, ProcessGroupStrategy, group_options_after
from stratagem_transforms.wrap_policy import check_policy

if TYPE_CHECKING:
    from attrs import Attribute

    from stratagem.api import Mesh, World

Size = int | Literal["auto"]
METHODS = ("auto", "ulysses", "all_gather")
#: Options, and the axes of which one must have more than one rank for the option to have an effect.
_NEEDED = {
    "plan": ("tensor", "expert"), "tensor_across_nodes": ("tensor",), "context_dim": ("context",),
    "context_tensors": ("context",), "context_method": ("context",), "check_parts": ("context", "pipeline"),
    "auto_wrap_policy": ("shard",), "reshard_after_forward": ("shard",),
}  # fmt: skip


def _is_size(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is None or value == "auto" or (type(value) is int and value >= 1):
        return
    raise ConfigError(f"strategy.parallel.{attribute.name} is {shown(value)}", expected="a number from 1, or 'auto'")


def _as_names(value: Any) -> tuple[str, ...] | None:
    return value if value is None else tuple(map(str, [value] if isinstance(value, str | int) else value))


def _is_method(_: Any, __: Attribute[Any], value: Any) -> None:
    if value == "ring":
        raise ConfigError(
            "strategy.parallel.context_method is 'ring'", expected="'auto', 'ulysses' or 'all_gather'",
            do="choose 'all_gather', which serves any number of heads; torch's ring attention has no rule for CPUs",
        )  # fmt: skip
    if value not in METHODS:
        raise ConfigError(
            f"strategy.parallel.context_method is {shown(value)}", expected=f"one of {', '.join(map(repr, METHODS))}",
            do=nearest(str(value), METHODS),
        )  # fmt: skip


def _is_mode(_: Any, __: Any, value: Any) -> None:
    modes = ("always", "except_last", "never")
    if value not in modes:
        raise ConfigError(
            f"strategy.parallel.checkpoint is {shown(value)}", expected=f"one of {', '.join(modes)}",
            do=nearest(str(value), list(modes)),
        )  # fmt: skip


@define(eq=False, kw_only=True, field_transformer=group_options_after("bucket_cap_mb"))
class ParallelOptions(ProcessGroupStrategy):
    """The options, checked when they are set, and the answers that depend on them alone."""

    #: Over how many processes each layer of the plan is cut.
    tensor: Size = field(default=1, validator=_is_size)
    #: Over how many processes each sequence is cut.
    context: Size = field(default=1, validator=_is_size)
    #: Into how many stages of consecutive layers the model is cut.
    pipeline: Size = field(default=1, validator=_is_size)
    #: Over how many processes the experts of a layer are divided; each process reads its own samples.
    expert: Size = field(default=1, validator=_is_size)
    #: Over how many processes parameters, gradients and optimizer state are sharded (FSDP2).
    shard: Size = field(default=1, validator=_is_size)
    #: How many replicas of all that are trained; by default all processes that the other sizes leave.
    replicate: Size | None = field(default=None, validator=_is_size)
    #: Whether the processes of one `tensor` axis may be on different nodes.
    tensor_across_nodes: bool = False
    #: How layers are cut: names of modules, or patterns of them, and styles. By default, and with "auto", what the
    #: module's `parallel_plan()` returns; without such a method it is derived.
    plan: Any = None
    #: The dimension of a batch's tensors that `context` cuts.
    context_dim: int = field(default=1, validator=at_least(0))
    #: Names (keys or numbers, joined by dots) of the batch's tensors that `context` cuts; by default all that have the
    #: dimension.
    context_tensors: tuple[str, ...] | None = field(
        default=None, converter=_as_names, metadata={"example": ["input_ids"]}
    )
    #: How attention over the parts is computed: each rank with some of the heads ("ulysses"), or with all keys and
    #: values ("all_gather"); "auto" is "ulysses" where the heads divide.
    context_method: str = field(default="auto", validator=_is_method, metadata={"example": "ulysses"})
    #: Whether what parts of sequences (`context`) and micro-batches (`pipeline`) give is compared in steps 1, 2, 4, 8
    #: and so on with what the whole gives, and operations that need whole sequences are refused.
    check_parts: bool = True
    #: With `shard`, what becomes a unit that is gathered as one: as `auto_wrap_policy` of `fsdp`.
    auto_wrap_policy: Any = None
    #: With `shard`, whether units are sharded again between forward and backward: less memory, more messages. A
    #: pipeline whose schedule divides backward keeps them until the step ends.
    reshard_after_forward: bool = True
    #: Larger buckets mean fewer messages, smaller ones overlap better with backward; megabytes, fractions allowed.
    bucket_cap_mb: float = field(default=25.0, validator=more_than(0))

    #: The number of micro-batches into which `pipeline` divides a batch; by default one for each stage.
    microbatches: int | None = field(default=None, validator=optional(at_least(1)))
    #: How many of the pipelined layers each stage has: a list, "balance_by_size", or "balance_by_time", which measures
    #: those of an nn.Sequential with the module's `example_input_array`.
    balance: Any = field(
        default="balance_by_size", validator=lambda _, __, value: check_balance(value), metadata={"example": [4, 4]}
    )
    #: Names of the modules that begin a new stage, in the order in which the model defines them; instead of `balance`.
    split_points: list[str] | None = field(
        default=None, validator=lambda _, __, value: check_split_points(value), metadata={"example": ["layers.4"]}
    )
    #: In which order stages compute micro-batches: gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble,
    #: zero_bubble_v or dualpipe_v. The last five have several stages on each process: less waiting, more messages.
    schedule: str = field(
        default="1f1b", validator=lambda _, __, value: schedule_named(value) and None, metadata={"example": "gpipe"}
    )
    #: Which micro-batches keep no activations and compute them again in backward: "always", "except_last" or "never".
    checkpoint: Literal["always", "except_last", "never"] = field(default="never", validator=_is_mode)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.auto_wrap_policy is not None:
            check_policy(self.auto_wrap_policy, "strategy.parallel.auto_wrap_policy")
        self._check_pipeline()
        self._check_effects()
        for name in ("tensor", "context"):
            if getattr(self, name) != 1:
                on_demand.check(name)

    def _check_pipeline(self) -> None:
        """Refuse options of a pipeline that would have no effect."""
        names = ("microbatches", "balance", "split_points", "schedule", "checkpoint")
        defaults = {each.name: each.default for each in fields(type(self)) if each.name in names}
        given = [name for name in names if getattr(self, name) != defaults[name]]
        if given and self.pipeline == 1:
            raise ConfigError(
                f"strategy.parallel.{given[0]} is {shown(getattr(self, given[0]))}, and pipeline is 1",
                expected="more than one stage", do=f"set pipeline, or drop {given[0]}",
            )  # fmt: skip
        if self.split_points is not None and self.balance != defaults["balance"]:
            raise ConfigError(
                f"strategy.parallel has balance={shown(self.balance)} and split_points", expected="one of the two"
            )

    def _check_effects(self) -> None:
        """Refuse options of the other axes that would have no effect."""
        defaults = {each.name: each.default for each in fields(type(self))}
        for name, axes in _NEEDED.items():
            if getattr(self, name) != defaults[name] and all(getattr(self, axis) == 1 for axis in axes):
                raise ConfigError(
                    f"strategy.parallel.{name} is {shown(getattr(self, name))}, and "
                    + " and ".join(f"{axis} is 1" for axis in axes),
                    expected=" or ".join(f"{axis} above 1" for axis in axes), do=f"set {axes[0]}, or drop {name}",
                )  # fmt: skip
        if self.plan is not None and self.tensor == 1:
            styles = list(self.plan.values()) if isinstance(self.plan, Mapping) else [self.plan]
            other = [style for style in styles if style != EXPERT]
            if other:
                raise ConfigError(
                    f"strategy.parallel.plan has the style {shown(other[0])}, and tensor is 1",
                    expected=f"the style {EXPERT!r} only: no layer is cut", do="set tensor, or drop the other styles",
                )  # fmt: skip

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # options decide
        provides = set(USUAL)
        if self.pipeline != 1:
            provides -= {CUSTOM_STEP, MANUAL_OPTIMIZATION}
        else:
            if self.tensor == self.expert == 1:  # else some gradients are DTensors, and others are not
                provides.add(CUSTOM_CLIPPING)
            if self.tensor == self.expert == self.shard == 1:  # an optimizer that calls closures joins gradients
                provides.add(CLOSURE_OPTIMIZERS)
        if self.replicates:
            provides.add(GRADIENT_BUCKETS)
        if any(size != 1 for size in (self.tensor, self.pipeline, self.expert, self.shard)):
            provides.add(SHARDED_PARAMETERS)
        return Capabilities(provides=provides)

    @property
    def replicates(self) -> bool:
        """Whether there may be replicas, whose gradients are averaged in buckets."""
        automatic = any(getattr(self, size) == "auto" for size in SIZES if size != "replicate")
        return self.replicate not in (None, 1) or (self.replicate is None and not automatic)

    def how_to_provide(self, word: str) -> str:
        if word == GRADIENT_BUCKETS:
            return "set strategy.parallel.replicate: averages over replicas pass comm hooks"
        return ""

    def mesh(self, world: World) -> Mesh:
        sizes = {size: getattr(self, size) for size in SIZES}
        return make_mesh(sizes, world, across_nodes=self.tensor_across_nodes, name="parallel")
