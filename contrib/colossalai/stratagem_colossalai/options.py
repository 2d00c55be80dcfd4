"""Options of the strategy `colossalai`: which plugin of Colossal-AI's Booster trains, and that plugin's arguments."""

from __future__ import annotations

from typing import Any, Literal

from attrs import define, field, fields_dict

from stratagem.api.validators import at_least
from stratagem.errors import ConfigError, shown
from stratagem_process_group import ProcessGroupStrategy, group_options_after

PATH = "strategy.colossalai"

_DDP = ("bucket_cap_mb", "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers")
#: Arguments of the engine's loss scaler.
_SCALING = (
    "initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "max_scale",
)  # fmt: skip
_ZERO = (
    "stage", "reduce_bucket_size_in_m", "communication_dtype", "overlap_communication", "overlap_allgather",
    "cpu_offload", "cast_inputs", "master_weights", "verbose", *_SCALING,
)  # fmt: skip
_GEMINI = (
    "placement_policy", "shard_param_frac", "offload_optim_frac", "offload_param_frac", "warmup_non_model_data_ratio",
    "steady_cuda_cap_ratio", "gpu_margin_mem_ratio", "search_range_m", "hidden_dim", "min_chunk_size_m",
    "enable_gradient_accumulation", "enable_async_reduce", "max_prefetch", "pin_memory", "force_outputs_fp32",
    "master_weights", "verbose", *_SCALING,
)  # fmt: skip
#: Options of Lightning's `ColossalAIStrategy` that GeminiPlugin has under another name, or no longer has.
_LIGHTNING = (
    "use_chunk", "chunk_size", "enable_distributed_storage", "chunk_search_range", "chunk_search_n_grids",
    "min_chunk_size",
)  # fmt: skip
OPTIONS_OF = {"ddp": _DDP, "low_level_zero": _ZERO, "gemini": (*_GEMINI, *_LIGHTNING)}
#: Values of placement_policy that older versions had, as arguments of today's static policy.
_OLD_PLACEMENTS: dict[str, dict[str, float]] = {
    "cuda": {},
    "cpu": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0},
}
_MEGA = 2**20


@define(eq=False, kw_only=True, field_transformer=group_options_after("min_chunk_size"))
class ColossalAIOptions(ProcessGroupStrategy):
    """Options of all plugins; one that the chosen plugin does not have is refused. None is the engine's default."""

    #: The plugin of Colossal-AI's Booster: "ddp" replicates the model, "low_level_zero" shards optimizer state and
    #: gradients, "gemini" shards parameters too, in chunks that it can move to host memory. "gemini" needs CUDA.
    plugin: Literal["ddp", "low_level_zero", "gemini"] = "ddp"

    #: ddp: size of the buckets in which gradients are sent: larger means fewer messages, smaller more overlap.
    bucket_cap_mb: int = field(default=25, validator=at_least(1))
    #: ddp: find parameters that the loss does not depend on: needed if there are any, costs a graph traversal each
    #: step. None does so only with manual optimization, where a loss may train a part of the model.
    find_unused_parameters: bool | None = None
    #: ddp: every step uses the same parameters in the same order: more overlap, wrong gradients if steps differ.
    static_graph: bool = False
    #: ddp: gradients are views into the buckets: saves a copy of all gradients; `detach_()` on them fails.
    gradient_as_bucket_view: bool = False
    #: ddp: broadcast buffers before each training forward. False sends less; buffers of ranks then differ.
    broadcast_buffers: bool = True

    #: low_level_zero: 1 shards optimizer state; 2 gradients too, and sends them for each accumulated batch.
    stage: Literal[1, 2] | None = None
    #: low_level_zero: millions of elements that are reduced in a message; larger means fewer messages.
    reduce_bucket_size_in_m: int | None = None
    #: low_level_zero: send gradients in this dtype; "float16" and "bfloat16" send less and round.
    communication_dtype: Literal["float16", "bfloat16", "float32"] | None = None
    #: low_level_zero: send gradients while backward runs, on CUDA only. All ranks must then use the same parameters in
    #: each batch. By default they are sent after backward, and ranks may use different parameters.
    overlap_communication: bool | None = None
    #: low_level_zero: gather weights while the next forward runs.
    overlap_allgather: bool | None = None
    #: low_level_zero: keep masters and optimizer state in host memory: saves device memory, and steps there.
    cpu_offload: bool | None = None
    #: low_level_zero: convert floating-point inputs to the precision's dtype.
    cast_inputs: bool | None = None

    #: gemini: "static" places chunks by the three fractions below, "auto" by the memory that is free. "cuda" and "cpu"
    #: are older names: all on the device, and all in host memory.
    placement_policy: Literal["static", "auto", "cuda", "cpu"] | None = None
    #: gemini, static: part of the parameters that is sharded; 1 is ZeRO stage 3 and saves most, 0 is stage 2.
    shard_param_frac: float | None = None
    #: gemini, static: part of the optimizer state that is kept in host memory: saves device memory, slower.
    offload_optim_frac: float | None = None
    #: gemini, static: part of the parameters that is kept in host memory; needs the two above at 1.
    offload_param_frac: float | None = None
    #: gemini, auto: part of the device's memory that is left to activations in the first step.
    warmup_non_model_data_ratio: float | None = None
    #: gemini, auto: part of the device's memory that may be used after the first step.
    steady_cuda_cap_ratio: float | None = None
    #: gemini, auto: part of the memory left free to which masters are moved from host memory.
    gpu_margin_mem_ratio: float | None = None
    #: gemini: range of chunk sizes to search, in units of 2**20 elements; larger wastes less memory, searches longer.
    search_range_m: float | None = None
    #: gemini: steps of that search, in elements; the model's hidden size is a good one.
    hidden_dim: int | None = None
    #: gemini: the smallest chunk, in units of 2**20 elements. A model that is smaller is not sharded.
    min_chunk_size_m: float | None = None
    #: gemini: keep gradients apart from parameters, so that several batches can be summed: costs as much memory as
    #: 16-bit parameters. None: if `accumulate_grad_batches` asks for it.
    enable_gradient_accumulation: bool | None = None
    #: gemini: reduce gradients on a stream of their own; pins host memory.
    enable_async_reduce: bool | None = None
    #: gemini: number of chunks to gather ahead of use: faster, needs their memory.
    max_prefetch: int | None = None
    #: gemini: pin chunks in host memory: faster copies, memory that cannot be swapped.
    pin_memory: bool | None = None
    #: gemini: convert what a step returns to fp32.
    force_outputs_fp32: bool | None = None

    #: low_level_zero and gemini: keep fp32 masters of 16-bit weights. False saves memory, and rounds each step.
    master_weights: bool | None = None
    #: low_level_zero and gemini: print overflows, and gemini's search for a chunk size.
    verbose: bool | None = None
    #: low_level_zero and gemini, 16-mixed: the first loss scale. None is 2**16.
    initial_scale: float | None = None
    #: 16-mixed: the smallest loss scale.
    min_scale: float | None = None
    #: 16-mixed: what the scale is multiplied with after `growth_interval` steps without overflow.
    growth_factor: float | None = None
    #: 16-mixed: what the scale is multiplied with after overflows.
    backoff_factor: float | None = None
    #: 16-mixed: steps without overflow before the scale grows: fewer skip more steps.
    growth_interval: int | None = None
    #: 16-mixed: overflows before the scale shrinks.
    hysteresis: int | None = None
    #: 16-mixed: the largest loss scale.
    max_scale: float | None = None

    #: gemini, of Lightning: Gemini always uses chunks; false is refused.
    use_chunk: bool | None = None
    #: gemini, of Lightning: elements of a chunk, in place of a search for the best size.
    chunk_size: int | None = None
    #: gemini, of Lightning: false is `shard_param_frac: 0`, and is refused with that advice.
    enable_distributed_storage: bool | None = None
    #: gemini, of Lightning: `search_range_m` in elements.
    chunk_search_range: int | None = None
    #: gemini, of Lightning: replaced by `hidden_dim`, and refused.
    chunk_search_n_grids: int | None = None
    #: gemini, of Lightning: `min_chunk_size_m` in elements.
    min_chunk_size: int | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        own = OPTIONS_OF[self.plugin]
        for plugin, names in OPTIONS_OF.items():
            for name in names:
                if name not in own and self._is_set(name):
                    raise ConfigError(
                        f"{PATH}.{name} is {shown(getattr(self, name))}, and {PATH}.plugin is {self.plugin!r}",
                        expected=f"options of that plugin: {', '.join(own)}",
                        do=f"set plugin={plugin!r}, which has {name}, or drop it",
                    )
        if self.static_graph and self.find_unused_parameters:
            raise ConfigError(
                f"{PATH}.static_graph and {PATH}.find_unused_parameters are both true",
                expected="one of them",
                do="drop find_unused_parameters: with a static graph the first step finds them",
            )
        if self.plugin == "gemini":
            self._check_gemini()

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != fields_dict(ColossalAIOptions)[name].default)

    def _check_gemini(self) -> None:
        """Refuse options that Gemini no longer has, or that would have no effect."""
        gone = {
            "use_chunk": (False, "true: Gemini of Colossal-AI 0.5 always uses chunks", "drop it"),
            "enable_distributed_storage": (False, "true", "set shard_param_frac to 0 to keep parameters on each rank"),
        }
        for name, (refused, expected, do) in gone.items():
            if getattr(self, name) is refused:
                raise ConfigError(f"{PATH}.{name} is {refused}", expected=expected, do=do)
        if self.chunk_search_n_grids is not None:
            raise ConfigError(
                f"{PATH}.chunk_search_n_grids is {self.chunk_search_n_grids}, which Colossal-AI 0.5 does not have",
                expected="hidden_dim: the step of the search for a chunk size, in elements",
                do="set hidden_dim to the hidden size of the model, or leave it out",
            )
        for old, new in (("chunk_search_range", "search_range_m"), ("min_chunk_size", "min_chunk_size_m")):
            if getattr(self, old) is not None and getattr(self, new) is not None:
                raise ConfigError(f"{PATH}.{old} and {PATH}.{new} are both set", expected="one of them")
        self._check_placement()

    def _check_placement(self) -> None:
        static = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
        auto = ("warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "gpu_margin_mem_ratio")
        policy = self.placement_policy or "static"
        without_effect = {"static": auto, "auto": static, "cuda": (*static, *auto), "cpu": (*static, *auto)}[policy]
        for name in without_effect:
            if getattr(self, name) is not None:
                other = "static" if name in static else "auto"
                raise ConfigError(
                    f"{PATH}.{name} is {getattr(self, name)}, and {PATH}.placement_policy is {policy!r}, under which "
                    "it has no effect",
                    expected=f"placement_policy={other!r} with it",
                    do="change one of the two",
                )
        if self.offload_param_frac and (self.offload_optim_frac != 1 or self.shard_param_frac not in (None, 1)):
            raise ConfigError(
                f"{PATH}.offload_param_frac is {self.offload_param_frac}, and not all optimizer state is offloaded",
                expected="offload_optim_frac=1 and shard_param_frac=1 with it",
                do="set them, or drop it",
            )

    # --- Arguments of the engine's plugins ---------------------------------------------------------------------------

    def zero_arguments(self) -> dict[str, Any]:
        """Return the arguments of LowLevelZeroPlugin, without precision and clipping."""
        import torch

        given = self._given(_ZERO)
        if self.communication_dtype is not None:
            given["communication_dtype"] = getattr(torch, self.communication_dtype)
        return {"initial_scale": 2.0**16, "overlap_communication": False, **given}

    def gemini_arguments(self, world_size: int) -> dict[str, Any]:
        """Return the arguments of GeminiPlugin, without precision, clipping and accumulation."""
        given = self._given(_GEMINI)
        given.pop("enable_gradient_accumulation", None)
        if (old := given.get("placement_policy")) in _OLD_PLACEMENTS:
            given |= {"placement_policy": "static", **_OLD_PLACEMENTS[old]}
        if self.chunk_search_range is not None:
            given["search_range_m"] = self.chunk_search_range / _MEGA
        if self.min_chunk_size is not None:
            given["min_chunk_size_m"] = self.min_chunk_size / _MEGA
        if self.chunk_size is not None:
            self._check_chunk_size(world_size)
            given["chunk_config_dict"] = {world_size: {"chunk_size": self.chunk_size, "keep_gathered": False}}
        return {"initial_scale": 2.0**16, **given}

    def _check_chunk_size(self, world_size: int) -> None:
        assert self.chunk_size is not None, "checked by the caller"
        if self.chunk_size < 1 or self.chunk_size % world_size:
            raise ConfigError(
                f"{PATH}.chunk_size is {self.chunk_size}",
                expected=f"a positive multiple of the number of ranks, {world_size}",
                do="change it, or leave it out",
            )

    def _given(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
