"""Precision `transformer-engine`: linear layers and layer norms of NVIDIA's Transformer Engine, in fp8 on CUDA."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from attrs import define, field
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from stratagem.api import SIXTEEN_BIT_GRADIENTS, Capabilities, Precision, PrecisionPolicy, hookimpl
from stratagem.api.batches import map_batch
from stratagem.errors import ConfigError, nearest, shown

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stratagem.api import RunContext

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_DO = (
    'use precision="bf16-mixed", or {"name": "fp8", "emulate": True} (pip install stratagem-torchao), which runs '
    "without CUDA"
)


def _dtype_name(value: Any) -> Any:
    """Return the name of a torch dtype; anything else is validated as it is."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


@define(eq=False, kw_only=True)
class TransformerEnginePrecision(Precision):
    """Replace linear layers and layer norms by those of Transformer Engine, and run steps in its fp8 autocast.

    Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """

    replaces_layers: ClassVar[bool] = True

    #: Dtype of the weights and of what is not in fp8: `float16` has more digits, and gradients that may overflow, since
    #: the loss is not scaled. A torch dtype is accepted too.
    weights_dtype: Literal["bfloat16", "float16"] | torch.dtype = field(default="bfloat16", converter=_dtype_name)
    #: Arguments of the engine's `DelayedScaling`, such as `{"fp8_format": "HYBRID", "amax_history_len": 16}`, or a
    #: recipe of the engine; None is its default. A longer history is steadier and slower to adapt.
    recipe: Any = None
    #: Replace layers; False expects a module that uses layers of the engine. None replaces them unless there are some.
    replace_layers: bool | None = None
    #: Dtype of operations outside of the engine's layers; None is `weights_dtype`. A torch dtype is accepted too.
    fallback_compute_dtype: Literal["bfloat16", "float16"] | torch.dtype | None = field(
        default=None, converter=_dtype_name
    )

    #: Holds the engine's context until backward.
    _fp8: Any = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        for name in ("weights_dtype", "fallback_compute_dtype"):
            value = getattr(self, name)
            if value not in (*_DTYPES, None) or (value is None and name == "weights_dtype"):
                raise ConfigError(
                    f"precision.transformer-engine.{name} is {shown(value)}",
                    expected="'bfloat16' or 'float16'",
                    do=nearest(str(value), _DTYPES),
                )
        if self.recipe is not None and isinstance(self.recipe, str | int | float | list | tuple):
            raise ConfigError(
                f"precision.transformer-engine.recipe is {shown(self.recipe)}",
                expected="a mapping of DelayedScaling's arguments, or a recipe of the engine",
            )

    capabilities = Capabilities(provides={SIXTEEN_BIT_GRADIENTS})

    @property
    def _dtype(self) -> torch.dtype:
        return _DTYPES[str(self.weights_dtype)]

    def policy(self) -> PrecisionPolicy:
        dtype = self._dtype
        return PrecisionPolicy(param_dtype=dtype, compute_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)

    # --- The module --------------------------------------------------------------------------------------------------

    @hookimpl
    def on_connect(self, run: RunContext) -> None:
        _check_device(run.device)
        _engine()
        _read_recipe(self.recipe)

    @hookimpl
    def init_context(self) -> AbstractContextManager[Any]:
        return _default_dtype(self._dtype)

    @hookimpl
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        engine = _engine()
        name = type(module).__name__
        own = [part for part in module.modules() if type(part).__module__.startswith("transformer_engine.")]
        if self.replace_layers and own:
            raise ConfigError(
                f"precision.transformer-engine.replace_layers is True, and {name} has layers of the engine",
                expected="a module without them, or replace_layers=False",
                do="drop it: layers are replaced where there are none",
            )
        if self.replace_layers is not False and not own:
            self._replace(module, run)
        elif not own and not any(isinstance(part, engine.Linear) for part in module.modules()):
            raise ConfigError(
                f"precision.transformer-engine.replace_layers is False, and {name} has no layers of the engine",
                expected="layers of transformer_engine.pytorch: nothing else is computed in fp8",
                do="drop it",
            )
        module.to(self._dtype)

    def _replace(self, module: nn.Module, run: RunContext) -> None:
        from stratagem_transformer_engine.layers import Linear, replace_layers

        replaced, kept = replace_layers(module, self._dtype, run.device)
        if not any(isinstance(part, Linear) for part in module.modules()):
            raise ConfigError(
                f"precision is 'transformer-engine', and {type(module).__name__} has {', '.join(kept) or 'no layers'}",
                expected="an nn.Linear whose sizes are multiples of 16",
                do='change the sizes, or use precision="bf16-mixed"',
            )
        if replaced:
            note = f"; kept: {', '.join(kept[:5])}" + (f" and {len(kept) - 5} more" if len(kept) > 5 else "")
            run.print(f"precision 'transformer-engine' replaced {replaced} layers{note if kept else ''}")

    # --- The step ----------------------------------------------------------------------------------------------------

    @hookimpl
    def step_context(self, run: RunContext) -> AbstractContextManager[Any]:
        return self._contexts(run.device)

    @contextlib.contextmanager
    def _contexts(self, device: torch.device) -> Iterator[None]:
        fallback = _DTYPES[str(self.fallback_compute_dtype or self.weights_dtype)]
        fp8 = _engine().fp8_autocast(enabled=True, fp8_recipe=_read_recipe(self.recipe))
        with _default_dtype(self._dtype), torch.autocast(device.type, fallback), contextlib.ExitStack() as self._fp8:
            self._fp8.enter_context(fp8)
            yield

    @hookimpl(wrapper=True)
    def backward(self, run: RunContext) -> Generator[None, bool, bool]:
        is_last_forward = not run.manual and run.settings.activation_checkpointing is None
        if is_last_forward:
            self._fp8.close()  # as the engine's manual asks: at its end it reduces the maxima of the forward
        with torch.autocast(run.device.type, enabled=False):
            return (yield)

    @hookimpl(wrapper=True)
    def transfer_batch(self) -> Generator[None, Any, Any]:
        return map_batch((yield), self._converted)

    def _converted(self, leaf: Any) -> Any:
        data = leaf.data if isinstance(leaf, PackedSequence) else leaf
        return leaf.to(self._dtype) if isinstance(data, torch.Tensor) and data.is_floating_point() else leaf


def float16() -> TransformerEnginePrecision:
    """Return the precision ``transformer-engine-float16``."""
    return TransformerEnginePrecision(weights_dtype="float16")


# --- The engine ------------------------------------------------------------------------------------------------------


def _check_device(device: torch.device) -> None:
    """Raise ConfigError if `device` cannot multiply fp8 matrices with the engine."""
    if device.type != "cuda":
        raise ConfigError(
            f"precision is 'transformer-engine', and the device is {device.type}",
            expected="a CUDA GPU with fp8 matrix products (compute capability 8.9 or higher)",
            do=_DO,
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise ConfigError(
            f"precision is 'transformer-engine', and {torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}",
            expected="8.9 or higher: it has no fp8 matrix products",
            do=_DO,
        )


def _engine() -> Any:
    """Import and return ``transformer_engine.pytorch``."""
    try:
        import transformer_engine.pytorch as engine
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"precision 'transformer-engine' needs transformer_engine.pytorch, which cannot be imported ({error})",
            expected="NVIDIA's Transformer Engine",
            do=f'pip install --no-build-isolation "transformer_engine[pytorch]", or {_DO}',
        ) from None
    return engine


def _read_recipe(recipe: Any) -> Any:
    """Return `recipe` as an object of the engine, given a mapping of DelayedScaling's arguments.

    Raises:
        ConfigError: DelayedScaling has no such argument, or there is no such format.
    """
    if not isinstance(recipe, Mapping):
        return recipe
    from transformer_engine.common.recipe import DelayedScaling, Format

    known = list(inspect.signature(DelayedScaling).parameters)
    arguments = dict(recipe)
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"precision.transformer-engine.recipe has {shown(name)}",
                expected=f"arguments of DelayedScaling: {', '.join(known)}",
                do=nearest(name, known),
            )
    if isinstance(arguments.get("fp8_format"), str):
        name = arguments["fp8_format"]
        formats = [each for each in dir(Format) if each.isupper() or each[:1] == "E"]
        if name not in formats:
            raise ConfigError(
                f"precision.transformer-engine.recipe.fp8_format is {shown(name)}",
                expected=f"one of {', '.join(formats)}",
                do=nearest(name, formats),
            )
        arguments["fp8_format"] = getattr(Format, name)
    return DelayedScaling(**arguments)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
