"""Activation checkpointing: free the activations of chosen modules, and recompute them in backward.

    Trainer(activation_checkpointing={Block})
    Trainer(activation_checkpointing={"policy": {Block}, "mode": "selective"})

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. Applied by hooks, so that parameters keep their
names, with any strategy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import define, field
from torch import nn

from stratagem.api import COMPILATION, hookimpl
from stratagem.errors import ConfigError, nearest, shown
from stratagem_trainer.api import Callback
from stratagem_transforms.forward_state import RecomputedState, nothing
from stratagem_transforms.wrap_policy import check_policy, select

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem.stack.plugins import Stack

OPTION: Final = "activation_checkpointing"
#: ``full`` keeps a module's inputs and recomputes the rest; ``selective`` also keeps the results of matrix products,
#: which cost most to recompute; ``offload`` recomputes nothing, and keeps activations in CPU memory.
MODES: Final = ("full", "selective", "offload")

#: The operations whose results ``selective`` keeps: matrix products and fused attention, if this torch has them.
_PRODUCTS: Final = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm",
    "_scaled_grouped_mm_v2", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps",
    "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
)  # fmt: skip

#: Attribute of a module that is recomputed already: its mode.
RECOMPUTED = "_stratagem_recomputed"


@define(eq=False, kw_only=True)
class ActivationCheckpointing(Callback):
    """Recomputes the activations of chosen modules in backward, which saves memory and costs time."""

    #: Which modules: a set of classes or of their names, a torch policy or a callable. Also what the Trainer's argument
    #: takes. More of them save more memory and cost more time.
    policy: Any
    #: `full` keeps a module's inputs, `selective` also results of matrix products, `offload` all activations, in CPU
    #: memory.
    mode: str = "full"

    #: Configurations of transformers whose `use_cache` is false during the run.
    _without_cache: list[Any] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        wanted = self.policy if self.mode == "full" else {"policy": self.policy, "mode": self.mode}
        self.policy, self.mode = read(wanted)

    @staticmethod
    def from_argument(value: Any, _: Stack) -> dict[str, Any]:
        """Return the options for ``activation_checkpointing=value``."""
        return {"policy": value}

    @hookimpl
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        if run.stage == "train":
            self._without_cache += recompute(module, self.policy, self.mode, run=run)

    @hookimpl
    def on_fit_end(self) -> None:
        use_caches(self._without_cache)

    teardown = on_fit_end

    @hookimpl(wrapper=True)
    def backward(self) -> Generator[None, bool, bool]:
        from torch.utils.checkpoint import CheckpointError

        try:
            return (yield)
        except CheckpointError as error:
            raise ConfigError(
                f"a part under {OPTION} computed something else in backward than in forward",
                expected="a forward that computes the same again from the same arguments, which it does not change",
                do="pass it no cache of keys and values (use_cache=False for transformers), or checkpoint other parts",
            ) from error


def read(wanted: Any) -> tuple[Any, str]:
    """Return the policy and the mode in the user's value `wanted`.

    Raises:
        ConfigError: neither a policy nor a mapping with a policy and a mode.
    """
    if isinstance(wanted, str) and wanted != "blocks":
        wanted = {name.strip() for name in wanted.split(",")}
    policy, mode = wanted, "full"
    if isinstance(wanted, Mapping):
        unknown = sorted(set(wanted) - {"policy", "mode"})
        if unknown or "policy" not in wanted:
            given = f"the keys {', '.join(map(repr, wanted))}" if wanted else "no keys"
            raise ConfigError(
                f"{OPTION} has {given}", expected="'policy', and optionally 'mode'",
                do=nearest(unknown[0], ("policy", "mode")) if unknown else "",
            )  # fmt: skip
        policy, mode = wanted["policy"], wanted.get("mode", "full")
    if mode not in MODES:
        raise ConfigError(f"{OPTION}.mode is {shown(mode)}", expected=" or ".join(map(repr, MODES)))
    check_policy(policy, OPTION)
    return policy, mode


def recompute(
    module: nn.Module, policy: Any, mode: str = "full", option: str = OPTION, *, run: RunContext
) -> list[Any]:
    """Recompute the modules of `module` that `policy` selects in backward; calling it again changes nothing.

    Returns:
        Configurations of transformers whose `use_cache` was true, and is false now: see `use_caches`.
    """
    parts = select(module, policy, option)
    for part in parts:
        if part.__dict__.get(RECOMPUTED) is None:
            _apply(part, mode, run.provides(COMPILATION))
        elif part.__dict__[RECOMPUTED] != mode:
            raise ConfigError(
                f"{option} is {mode!r} for {type(part).__name__}, which is under {part.__dict__[RECOMPUTED]!r} already",
                expected="one of the two",
            )
    return [] if mode == "offload" else _use_no_cache(module, set(parts), run)


def _use_no_cache(module: nn.Module, parts: set[nn.Module], run: RunContext) -> list[Any]:
    """Set `use_cache` of the models around `parts` to false: a part would append its keys and values again."""
    changed = []
    for owner in module.modules():
        config: Any = getattr(owner, "config", None)
        if getattr(config, "use_cache", False) is True and owner not in parts and parts & {*owner.modules()}:
            config.use_cache = False
            changed.append(config)
    if changed:
        name = type(changed[0]).__name__
        run.print(f"{OPTION}: {name}.use_cache is false during this run; blocks would fill the cache in backward again")
    return changed


def use_caches(configs: list[Any]) -> None:
    """Set `use_cache` of `configs` to true again, and forget them."""
    while configs:
        configs.pop().use_cache = True


def _apply(part: nn.Module, mode: str, compiles: bool) -> None:
    from torch.distributed._composable import checkpoint

    if mode == "offload":
        _keep_on_cpu(part)
    elif mode == "selective" and compiles:
        part.__dict__["forward"] = Selective(part.forward)
    else:
        inner = _keeping_products if mode == "selective" else nothing
        checkpoint(part, context_fn=functools.partial(RecomputedState(part).contexts, inner))
    part.__dict__[RECOMPUTED] = mode


class Selective:
    """A forward that backward calls again, but for matrix products: torch compiles this, and not the same in hooks."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward

    def __call__(self, *values: Any, **options: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return self._forward(*values, **options)
        return checkpoint(self._forward, *values, use_reentrant=False, context_fn=_keeping_products, **options)


def _keeping_products() -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = {getattr(aten, name).default for name in _PRODUCTS if hasattr(aten, name)}

    def decide(_context: Any, operation: Any, *_: Any, **__: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def _keep_on_cpu(part: nn.Module) -> None:
    """Make `part` keep in CPU memory what it saves for backward, but not its weights, which stay where they are."""
    entered: list[contextlib.AbstractContextManager[Any]] = []

    def enter(*_: Any) -> None:
        to_cpu = torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_initialized())

        def pack(tensor: torch.Tensor) -> Any:
            memory = _memory(tensor)
            # Asked each time: units inside of this part are gathered one after the other.
            is_weight = any(_memory(parameter) == memory for parameter in part.parameters())
            return (tensor, tensor._version) if is_weight else to_cpu.pack_hook(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            weight, version = packed
            if not isinstance(weight, torch.Tensor):
                return to_cpu.unpack_hook(packed)
            if weight._version != version:  # torch does not look where hooks keep what is saved
                raise ConfigError(
                    f"a weight of shape {list(weight.shape)} changed between forward and backward, in a part that "
                    "activation_checkpointing keeps with mode 'offload'",
                    expected="weights that stay as they are until backward",
                    do="call backward before the optimizer's step",
                )
            return weight

        context = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        context.__enter__()
        entered.append(context)

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    part.register_forward_pre_hook(enter, prepend=True)
    part.register_forward_hook(leave, always_call=True)


def _memory(tensor: Any) -> int:
    """Return what tensors have in common that share memory; that of a sharded one is its part's. 0 for a sparse one."""
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage()._cdata) if local.layout is torch.strided else 0
