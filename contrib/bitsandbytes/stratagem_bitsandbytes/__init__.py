"""Linear layers with weights of 4 or 8 bits (bitsandbytes), for adapters on a frozen model and for evaluation."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from attrs import define, field
from torch import nn

from stratagem.api import (
    SHARDED_PARAMETERS,
    SIXTEEN_BIT_GRADIENTS,
    STEPPED_COPIES,
    Capabilities,
    Precision,
    PrecisionPolicy,
    hookimpl,
)
from stratagem.api.batches import map_batch
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

    from stratagem.api import RunContext

#: Attribute of a quantized layer: the options with which it was made.
_MADE_WITH = "quantized_with"
_DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


@define(eq=False, kw_only=True)
class _Quantized(Precision):
    """Replaces the weights of linear layers by quantized ones when a model is prepared."""

    #: dtype of everything that is not quantized, and of what the quantized layers compute. 16 bits are faster and
    #: smaller; small updates of trained parameters are lost unless this is 32.
    dtype: Literal["32", "bf16", "16"] = "bf16"
    #: Names or patterns of modules whose linear layers keep their weights: adapters that are trained, and an output
    #: layer, which loses the most. Each needs the full size.
    ignore_modules: list[str] = field(factory=list)
    #: "dequantized" is read by any model and any strategy, and has the size of fp32; "quantized" is small and exact,
    #: and read under the same precision only.
    checkpoint: Literal["dequantized", "quantized"] = "dequantized"

    replaces_layers: ClassVar[bool] = True
    #: Name of this precision in messages.
    _mode: ClassVar[str]
    _is_frozen: ClassVar[bool] = True

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # the option decides
        return Capabilities(
            provides=() if self.dtype == "32" else {SIXTEEN_BIT_GRADIENTS},
            conflicts={SHARDED_PARAMETERS, STEPPED_COPIES},
        )

    def policy(self) -> PrecisionPolicy:
        if self.dtype == "32":
            return PrecisionPolicy()
        dtype = _DTYPES[self.dtype]
        return PrecisionPolicy(param_dtype=dtype, compute_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)

    def preload(self, device_type: str) -> None:
        with contextlib.suppress(ImportError):  # `on_connect` explains it
            import stratagem_bitsandbytes.layers  # noqa: F401

    @hookimpl
    def on_connect(self, run: RunContext) -> None:
        error = None
        try:
            import stratagem_bitsandbytes.layers  # noqa: F401
        except (ImportError, OSError, RuntimeError) as caught:
            error = ConfigError(
                f"precision is {self._mode!r}, and bitsandbytes cannot be imported ({caught})",
                expected="bitsandbytes 0.50 or newer",
                do='install it with `pip install bitsandbytes`, or use precision="bf16-true", which quantizes nothing',
            )
        run.collectives.fail_together(error)

    @hookimpl
    def init_context(self) -> AbstractContextManager[Any]:
        return _default_dtype(_DTYPES[self.dtype])

    @hookimpl
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        from stratagem_bitsandbytes.layers import quantized_layers

        if self.checkpoint == "quantized" and run.is_worker:
            raise ConfigError(
                f"precision.{self._mode}.checkpoint is 'quantized', and the weights are sent back to the program that "
                "started this process, whose model has plain layers",
                expected="'dequantized' where the launcher sends results back",
                do='use checkpoint="dequantized", or a strategy that starts the script again, such as "ddp"',
            )
        earlier = quantized_layers(module)
        if earlier:
            self._check_earlier(earlier, module)
        else:
            self._quantize_all(module, run)
        _cast_rest(module, _DTYPES[self.dtype])
        if run.stage == "train" and not any(each.requires_grad for each in module.parameters()):
            raise ConfigError(
                f"no parameter of {type(module).__name__} is left to train under precision {self._mode!r}, which "
                "freezes the weights that it quantizes",
                expected="adapters or other layers that are trained",
                do=f"name the layers to train in precision.{self._mode}.ignore_modules",
            )

    def _quantize_all(self, module: nn.Module, run: RunContext) -> None:
        chosen = self._choose(module)
        if any(layer.weight.is_meta for layer in chosen.values()):
            run.materializer(module).fill(module)
        # Each rank quantizes the same values. Strategies copy rank 0's weights, but not what belongs to them.
        run.collectives.replicate([layer.weight for layer in chosen.values()])
        froze = [name for name, layer in chosen.items() if layer.weight.requires_grad]
        for layer in chosen.values():
            self._quantize(layer)
            layer.__dict__[_MADE_WITH] = self._made_with()
        if froze and self._is_frozen and run.stage == "train" and run.is_global_zero:
            warnings.warn(
                f"precision {self._mode!r} froze the weights of {len(froze)} linear layers, such as {froze[0]}. To "
                f"train a layer, name it in precision.{self._mode}.ignore_modules; if all are to be frozen, call "
                "requires_grad_(False) on them, and there is no warning",
                stacklevel=2,
            )

    def _quantize(self, layer: nn.Linear) -> None:
        raise NotImplementedError

    def _made_with(self) -> dict[str, Any]:
        """Return what a quantized layer cannot change any more."""
        own = {"dtype": self.dtype, "ignore_modules": sorted(self.ignore_modules)}
        return {"precision": self._mode} | own | ({"threshold": self.threshold} if isinstance(self, Int8) else {})

    def _check_earlier(self, layers: Mapping[str, nn.Module], module: nn.Module) -> None:
        """Refuse layers that an earlier run quantized in another way: they would stay as they are."""
        mine = self._made_with()
        for name, layer in layers.items():
            made = layer.__dict__.get(_MADE_WITH, mine)
            for option, value in mine.items():
                if made.get(option) != value:
                    path = option if option == "precision" else f"precision.{self._mode}.{option}"
                    raise ConfigError(
                        f"{path} is {value!r}, and {name} of this {type(module).__name__} was quantized by an earlier "
                        f"run, whose {option} was {made.get(option)!r}",
                        expected="the same options, or a model whose layers are plain",
                        do="build a new model, and load its weights from a checkpoint",
                    )

    def _choose(self, module: nn.Module) -> dict[str, nn.Linear]:
        """Return the layers to quantize by name. Subclasses of Linear may use their weight in another way: not those.

        Raises:
            ConfigError: a pattern matches no layer; there is none to quantize; a weight is also another module's.
        """
        path = f"precision.{self._mode}.ignore_modules"
        linear = {name: part for name, part in module.named_modules() if type(part) is nn.Linear}
        ignored: set[str] = set()
        for pattern in self.ignore_modules:
            matched = {name for name in linear if any(fnmatchcase(each, pattern) for each in _with_parents(name))}
            if not matched:
                known = dict.fromkeys(each for name in linear for each in _with_parents(name))
                raise ConfigError(
                    f"{path} has {pattern!r}, which matches no linear layer of {type(module).__name__}",
                    expected=f"names or patterns of modules, such as {', '.join(map(repr, list(linear)[:3]))}",
                    do=nearest(pattern, known) or "remove it",
                )
            ignored |= matched
        chosen = {name: part for name, part in linear.items() if name not in ignored}
        if not chosen:
            raise ConfigError(
                f"precision {self._mode!r} has no linear layer of {type(module).__name__} to quantize",
                expected=f"at least one torch.nn.Linear that {path} does not name",
                do='use precision="bf16-true" or "32-true"',
            )
        if self._is_frozen:
            _check_ties(module, chosen, path)
        return chosen

    @hookimpl
    def step_context(self) -> AbstractContextManager[Any]:
        return _default_dtype(_DTYPES[self.dtype])

    @hookimpl(wrapper=True)
    def transfer_batch(self) -> Generator[None, Any, Any]:
        batch, dtype = (yield), _DTYPES[self.dtype]
        if self.dtype == "32":
            return batch
        return map_batch(batch, lambda leaf: leaf.to(dtype) if _is_floating(leaf) else leaf)

    # --- State ---------------------------------------------------------------------------------------------------

    @hookimpl
    def model_state(self, module: nn.Module, run: RunContext) -> dict[str, torch.Tensor]:
        from stratagem_bitsandbytes import state

        if self.checkpoint == "quantized":
            return dict(module.state_dict())
        return state.dequantized(module, run.needs_values)

    @hookimpl
    def load_model_state(self, state: dict[str, torch.Tensor], module: nn.Module, strict: bool) -> bool:
        from stratagem_bitsandbytes import state as files

        files.load(state, module, strict)
        return True


@define(eq=False, kw_only=True)
class _FourBit(_Quantized):
    _quant_type: ClassVar[str]
    _nested: ClassVar[bool] = False

    def _quantize(self, layer: nn.Linear) -> None:
        from stratagem_bitsandbytes.layers import FourBitLinear

        FourBitLinear.take_over(layer, self._quant_type, self._nested, _DTYPES[self.dtype])


@define(eq=False, kw_only=True)
class NF4(_FourBit):
    """Freeze linear weights at 4 bits, at the quantiles of a normal distribution; train the rest, such as adapters.

    Dettmers et al., "QLoRA", NeurIPS 2023.
    """

    _mode = "nf4"
    _quant_type = "nf4"


@define(eq=False, kw_only=True)
class NF4DQ(_FourBit):
    """As `nf4`, with the scale of each block in 8 bits too: 0.37 bits less for a weight."""

    _mode = "nf4-dq"
    _quant_type, _nested = "nf4", True


@define(eq=False, kw_only=True)
class FP4(_FourBit):
    """Freeze linear weights at 4-bit floating-point numbers; train the rest, such as adapters."""

    _mode = "fp4"
    _quant_type = "fp4"


@define(eq=False, kw_only=True)
class FP4DQ(_FourBit):
    """As `fp4`, with the scale of each block in 8 bits too: 0.37 bits less for a weight."""

    _mode = "fp4-dq"
    _quant_type, _nested = "fp4", True


@define(eq=False, kw_only=True)
class Int8(_Quantized):
    """Freeze linear weights at 8 bits; train the rest, or evaluate.

    Dettmers et al., "LLM.int8()", NeurIPS 2022.
    """

    _mode = "int8"

    #: In evaluation on a GPU, features of the input with a value above this are multiplied in `dtype` and not in 8
    #: bits: a lower one is more exact and slower; 0 turns it off.
    threshold: float = field(default=6.0, validator=at_least(0))

    def _quantize(self, layer: nn.Linear) -> None:
        from stratagem_bitsandbytes.layers import EightBitLinear

        EightBitLinear.take_over(layer, self.threshold, trained=not self._is_frozen, dtype=_DTYPES[self.dtype])


@define(eq=False, kw_only=True)
class Int8Training(Int8):
    """Train linear weights in full, and round them to 8 bits in each forward: gradients pass unrounded."""

    _mode = "int8-training"
    _is_frozen = False


# --- Helpers -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_floating(leaf: Any) -> bool:
    data = getattr(leaf, "data", leaf)  # of a PackedSequence
    return isinstance(data, torch.Tensor) and data.is_floating_point()


def _with_parents(name: str) -> list[str]:
    """Return the names of a module and of those that it is in: ``a.b.c``, ``a.b``, ``a``."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _check_ties(module: nn.Module, chosen: dict[str, nn.Linear], path: str) -> None:
    """Refuse weights that another module has too, such as an embedding: a quantized one is a copy."""
    owners: dict[int, list[str]] = {}
    for name, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for name, layer in chosen.items():
        others = [other for other in owners[id(layer.weight)] if other != name]
        if others:
            raise ConfigError(
                f"the weight of the linear layer {name} is also that of {others[0]}",
                expected="weights of one layer each, since a quantized weight is a copy",
                do=f"add {name!r} to {path}",
            )


def _cast_rest(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert what is floating point; not `Module.to`, which would convert complex parameters too."""
    if dtype is torch.float32:
        return  # as the precision "32-true": dtypes stay
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
