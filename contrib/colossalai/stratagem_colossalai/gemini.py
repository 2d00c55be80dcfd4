"""Run GeminiPlugin's engine: backward, clipping, steps, and its chunks as logical state. Imports Colossal-AI.

[Note: chunks]
Gemini copies parameters into chunks of 16-bit numbers, and fp32 masters into chunks that are paired with them. Each
rank has a shard of a chunk, or all of it if the model is small. While a chunk's parameters are used it is gathered.
Unless gradients are accumulated, backward writes them over the 16-bit parameters, which a step fills again from the
masters: between backward and the step the model cannot be called.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from colossalai.booster.plugin import GeminiPlugin
from colossalai.tensor.param_op_hook import ColoParamOpHookManager
from colossalai.zero.gemini import gemini_optimizer
from torch import nn

from stratagem.api.named_state import parameter_names
from stratagem.api.state_fit import check_optimizer_state, check_weights
from stratagem.errors import CheckpointError, ConfigError
from stratagem_colossalai.options import PATH
from stratagem_colossalai.weights import Originals, group_names
from stratagem_colossalai.zero import check_thawed, named_groups

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Attribute of a parameter whose weights were freed with its chunk.
RELEASED = "_gemini_released"
#: State that Gemini's optimizers have.
_STATE = {"step", "exp_avg", "exp_avg_sq"}


class GeminiEngine:
    """GeminiPlugin's model and optimizer."""

    #: Parameters are gathered when they are used.
    num_bytes_of_step = 0

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, arguments: dict[str, Any],
        originals: Originals, run: RunContext,
    ) -> None:  # fmt: skip
        self.user: nn.Module = module.get_submodule("module")
        self.groups = group_names(optimizer, self.user)
        self.originals = originals
        self._frozen = {name for name, each in self.user.named_parameters() if not each.requires_grad}
        self._accumulates: bool = arguments["enable_gradient_accumulation"]
        self.pending = False
        clips = not run.owns_loop or getattr(run.settings, "gradient_clip_val", None) is not None
        exact = {name: value.detach() for name, value in self.user.named_parameters()}
        self._given = optimizer
        self._plugin = GeminiPlugin(**arguments, max_norm=math.inf if clips else 0.0)
        hybrid = hybrid_adam(optimizer)
        for group in hybrid.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        names = parameter_names(self.user)
        #: Names of the parameters by the engine's numbers.
        self._numbered = [names[id(each)] for group in hybrid.param_groups for each in group["params"]]
        self.model, self.optimizer, *_ = self._plugin.configure(module, hybrid)
        _average_accumulated_once(self.model.chunk_manager)
        self._put(exact)  # the engine made the masters from 16 bits

    @property
    def mixin(self) -> Any:
        return self.optimizer.mix_precision_mixin

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        manager = self.model.gemini_manager
        if not torch.is_grad_enabled() and manager.need_warmup and manager.is_warmup():
            raise ConfigError(
                f"the model is evaluated before its first training step, and {PATH}.placement_policy is 'auto'",
                expected="a training step first, in which Gemini measures memory",
                do="set num_sanity_val_steps=0, or placement_policy='static'",
            )
        if self.pending and not self._accumulates:
            raise ConfigError(
                "the model is called between backward and the optimizer step, where Gemini keeps gradients in place of "
                "parameters",
                expected=f"{PATH}.enable_gradient_accumulation=True",
                do="set it, or step after each backward",
            )
        return self.model(*inputs, **options)

    # --- The step ------------------------------------------------------------------------------------------------

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: Gemini reduces the gradients of each batch."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, run: RunContext) -> None:
        """Differentiate `loss` and reduce the gradients, as the engine's own `backward` does."""
        model = self.model
        loss = self.mixin.pre_backward(loss.float())
        model._pre_backward()
        with model.param_op_hook.switch_to_backward(), ColoParamOpHookManager.use_hooks(*model.hooks):
            run.differentiate(loss)
        self._check_reached()
        model._post_backward()
        self.pending = True
        self._count(run)

    def _count(self, run: RunContext) -> None:
        """Count what forward and backward of a batch sent."""
        for chunk in self.optimizer.chunk16_set:
            size, traffic = chunk.chunk_mem, run.collectives.traffic
            if chunk.keep_gathered:
                traffic.add("all_reduce", size, run.world_size, sender="gradients")
            else:
                traffic.add("reduce_scatter", size, run.world_size, sender="gradients")
                traffic.add("all_gather", 2 * size, run.world_size, 2, sender="parameters")

    def _check_reached(self) -> None:
        """Refuse a parameter without a gradient: the engine would step it with its own values as the gradient."""
        parameters = self.model.param2name.items()
        names = [
            name.removeprefix("module.") for each, name in parameters if not getattr(each, "_gemini_reduced", True)
        ]
        if names:
            raise ConfigError(
                f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''} got no gradient, and Gemini waits for it",
                expected="a loss that every trainable parameter takes part in",
                do="freeze what is not trained",
            )

    def clip(self, max_norm: float) -> float:
        """Clip in the next step; return the norm before clipping."""
        if not self.optimizer.clipping_flag:
            raise ConfigError(
                "gradients are clipped and gradient_clip_val is not set: Gemini measures them in backward if it is",
                expected="gradient_clip_val",
                do="set it in place of a call of clip_gradients",
            )
        chunks = [self._gradients(chunk) for chunk in self.optimizer.chunk16_set]
        squares = [chunk.l2_norm for chunk in chunks]
        norm: float = self.optimizer._calc_global_norm()
        for chunk, square in zip(chunks, squares, strict=True):
            chunk.l2_norm = square  # the engine measured it in backward, and reads it again in its step
        self.optimizer.max_norm = max_norm
        return norm / getattr(self.mixin, "loss_scale", 1.0)

    def _gradients(self, chunk: Any) -> Any:
        return chunk if self.model.chunk_manager.reuse_fp16_chunk else chunk.grad_chunk

    def step(self) -> bool:
        """Step; return False if gradients overflowed."""
        self.optimizer.step()
        self.pending = False
        vars(self._given)["_opt_called"] = True  # schedulers warn if they see no step of theirs
        if self.optimizer.clipping_flag:
            self.optimizer.max_norm = math.inf
        self.model.chunk_manager.accumulating_grads = False
        overflow = getattr(self.mixin, "found_overflow", None)
        return overflow is None or overflow.item() == 0

    def drop_gradients(self) -> None:
        """Forget gradients that were not stepped, and fill the parameters that they replaced."""
        optimizer = self.optimizer
        if not self.pending:
            optimizer.zero_grad()
            return
        self.pending = False
        optimizer._set_grad_ptr()
        optimizer._clear_global_norm()
        optimizer.zero_grad()
        self.model.chunk_manager.overflow_counter.zero_()
        if self.model.master_weights:
            optimizer._update_fp16_params()
        self.model.chunk_manager.accumulating_grads = False

    def check_thawed(self) -> None:
        """Refuse a parameter that was frozen when the engine was made and is not now: it would not be trained."""
        check_thawed(self.user, self._frozen)

    # --- State ---------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module, run: RunContext) -> dict[str, Any]:
        """Return the tensors of `module`, of trained parameters the masters. Collective."""
        model, everywhere = self.model, run.collectives.any(run.needs_values and run.rank != 0)
        kept = model.fp32_params if model.master_weights else model.fp16_params
        with self._masters_as_they_are():
            found = model._get_param_to_save_data(kept, not everywhere)
        whole = {id(parameter): found[copy] for parameter, copy in zip(model.fp16_params, kept, strict=True)}
        state: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) not in whole:
                state[name] = self.originals.widened(name, value)
            elif run.needs_values:
                state[name] = self.originals.widened(name, whole[id(value)].view(value.shape))
            else:
                state[name] = self.originals.widened(name, torch.empty(value.shape, device="meta"))
        return state

    @contextlib.contextmanager
    def _masters_as_they_are(self) -> Iterator[None]:
        """Let the engine read and write masters in fp32; it would convert them to 16 bits."""
        model, manager = self.model, self.model.chunk_manager
        before = model.mixed_precision, manager.reuse_fp16_chunk
        if model.master_weights:
            model.mixed_precision, manager.reuse_fp16_chunk = torch.float32, True
        try:
            yield
        finally:
            model.mixed_precision, manager.reuse_fp16_chunk = before

    def load_model_state(self, state: dict[str, Any], module: nn.Module, strict: bool, run: RunContext) -> None:
        """Put `state` into the chunks and the buffers. Collective."""
        own = module.state_dict(keep_vars=True)
        check_weights({name: getattr(value, "shape", None) for name, value in own.items()}, state, strict)
        self._put({name: value for name, value in state.items() if name in own and isinstance(value, torch.Tensor)})
        for name in own.keys() & state.keys():
            self.originals.remember(name, state[name])

    def _put(self, state: dict[str, torch.Tensor]) -> None:
        with self._masters_as_they_are():
            self.model.load_state_dict({f"module.{name}": value for name, value in state.items()}, strict=False)

    def optimizer_state(self, run: RunContext) -> dict[str, Any]:
        """Return the optimizer's state by names of parameters, in whole tensors. Collective."""
        everywhere = run.collectives.any(run.needs_values and run.rank != 0)
        found = self.optimizer.state_dict(only_rank_0=not everywhere)["state"]
        state = {self._numbered[number]: entry for number, entry in found.items() if entry}
        if not everywhere:
            outline = {name: {key: tuple(value.shape) for key, value in entry.items()} for name, entry in state.items()}
            outline = run.collectives.broadcast_object(outline if run.rank == 0 else None)
            if run.rank != 0:
                state = {
                    name: {key: torch.empty(shape, device="meta" if shape else "cpu") for key, shape in entry.items()}
                    for name, entry in outline.items()
                }
        return {"state": state, "param_groups": named_groups(self.optimizer.param_groups, self.groups)}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load what `optimizer_state` or another strategy returned."""
        check_optimizer_state(state, [name for group in self.groups for name in group], [len(g) for g in self.groups])
        numbers = {name: number for number, name in enumerate(self._numbered)}
        for name, entry in state["state"].items():
            if entry and set(entry) != _STATE:
                raise CheckpointError(
                    f"optimizer state of {name!r} has {', '.join(sorted(entry))}",
                    expected=f"{', '.join(sorted(_STATE))}, which Gemini's optimizers have",
                    do="resume with the optimizer that wrote it, or load only the weights",
                )
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.optimizer.load_param_states(
            {
                numbers[name]: {key: torch.as_tensor(value) for key, value in entry.items()}
                for name, entry in state["state"].items()
                if name in numbers and entry
            }
        )

    def release(self) -> None:
        """Free the chunks. Parameters that are sharded are empty afterwards, the others have their weights."""
        model = self.model
        model.remove_hooks()
        vars(model)["remove_hooks"] = _nothing  # its finalizer calls it again
        kept = model.fp32_params if model.master_weights else model.fp16_params
        for parameter, copy in zip(model.fp16_params, kept, strict=True):
            chunk = model.chunk_manager.get_chunk(copy)
            place = chunk.tensors_info[copy]
            parameter.__class__ = nn.Parameter
            if chunk.is_gathered:
                whole = chunk.cuda_global_chunk[place.offset : place.end]
                parameter.data = whole.view(parameter.shape).clone()
            else:
                parameter.data = torch.empty(0, dtype=parameter.dtype)
                vars(parameter)[RELEASED] = True
        for parameter in self.user.parameters():
            parameter.__class__ = nn.Parameter
            vars(parameter).pop("_ddp_to_ignore", None)
        self.originals.restore(self.user)


def check_not_released(module: nn.Module) -> None:
    """Refuse a module whose weights were sharded by a run that has ended.

    Raises:
        ConfigError: it is one.
    """
    for name, parameter in module.named_parameters():
        if RELEASED in vars(parameter) and parameter.numel() == 0:
            raise ConfigError(
                f"{name!r} has no elements: Gemini sharded {type(module).__name__} in a run that has ended",
                expected="a model with weights",
                do="make the model again, and load a checkpoint of that run",
            )


def _nothing() -> None:
    pass


def hybrid_adam(optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer that Gemini can step: `optimizer`, or HybridAdam in place of torch's Adam and AdamW.

    It has the same group objects as `optimizer`, which schedulers change.
    """
    if type(optimizer) in gemini_optimizer._AVAIL_OPTIM_LIST:
        return optimizer
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigError(
            f"configure_optimizers returned {type(optimizer).__name__}, and {PATH}.plugin is 'gemini'",
            expected="HybridAdam, FusedAdam or CPUAdam of colossalai.nn.optimizer, or Adam or AdamW of torch.optim",
            do='use one of them, or choose strategy="fsdp"',
        )
    for name in ("amsgrad", "maximize", "differentiable"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise ConfigError(
                f"{type(optimizer).__name__} has {name}=True, and {PATH}.plugin is 'gemini'",
                expected=f"{name}=False: Gemini steps with HybridAdam, which does not have it",
                do='drop it, or choose strategy="fsdp"',
            )
    from colossalai.nn.optimizer import HybridAdam

    decoupled = isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults.get("decoupled_weight_decay", False)
    groups = optimizer.param_groups
    for group in groups:
        group.setdefault("bias_correction", True)
    parameters = [parameter for group in groups for parameter in group["params"]]
    hybrid = HybridAdam(parameters, lr=float(groups[0]["lr"]), adamw_mode=decoupled)
    hybrid.param_groups = groups
    return hybrid


def _average_accumulated_once(manager: Any) -> None:
    """Correct how the engine accumulates gradients of chunks that every rank has whole.

    Before it reduces a batch's gradients it adds the accumulated ones, multiplied by the number of ranks: right for a
    shard, which one rank adds. If a chunk is whole, all ranks add it, and it would be multiplied once too often.
    """
    rearrange = manager.rearrange_accumulated_grad_chunk

    def corrected(chunk: Any) -> Any:
        if chunk.grad_chunk.is_gathered:
            chunk.grad_chunk.cuda_global_chunk.div_(chunk.pg_size)
        return rearrange(chunk)

    manager.rearrange_accumulated_grad_chunk = corrected
