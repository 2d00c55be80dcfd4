"""Styles: how a layer is cut, what it takes and what it returns."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.errors import ConfigError
from stratagem_parallel.derived_plan import EXPERTS, features
from stratagem_parallel.plan import WHOLE
from stratagem_parallel_unchanged.tensor.moves import all_whole, for_parts, part_of, summed, summed_part, whole
from stratagem_parallel_unchanged.tensor.slices import Slice, as_slice, part_of_slice
from stratagem_sharding.shards import local

if TYPE_CHECKING:
    from collections.abc import Callable

    from stratagem_parallel_unchanged.tensor.moves import Line

#: The dimension of activations that holds the sequence: the last but one, before the features.
SEQUENCE_DIM = -2
#: Where a layer keeps the style that computes it.
_STYLE = "_stratagem_tensor_style"


class Style:
    """Computes one layer with this rank's parts of its parameters.

    Args:
        line: the ranks that hold the parts.
        by_sequence: whether sums over the ranks are left cut along the sequence.
    """

    #: By parameter: the dimension that is cut. What is not named is replicated.
    cuts: ClassVar[dict[str, int]] = {}
    #: Whether parts may be of different sizes.
    uneven = False

    def __init__(self, line: Line, by_sequence: bool) -> None:
        self.line, self.by_sequence = line, by_sequence
        #: Whether a layer beside it, in one module, is cut by inputs: it takes the result.
        self.has_taker = False
        self._kept: dict[str, Any] = {}

    def attach(self, module: nn.Module) -> None:
        """Have `module` take, compute and return what this style says.

        Its forward is replaced where this style knows how: torch's compiler compiles hooks for each layer again.
        """
        forward = None if "forward" in module.__dict__ else self.forward_of(module)
        if forward is not None:
            module.__dict__[_STYLE] = self
            module.forward = MethodType(forward, module)
        elif self.cuts:
            module.register_forward_pre_hook(self._lend)
            module.register_forward_hook(self._take_back, always_call=True)
        else:
            module.register_forward_pre_hook(self.taken, with_kwargs=True)
            module.register_forward_hook(lambda module, _, output: self.give(module, output))

    def forward_of(self, module: nn.Module) -> Callable[..., Any] | None:
        """Return a forward for all modules of this class, which finds the style of each; None if hooks are needed."""
        return None if self.cuts else _around

    def _lend(self, module: nn.Module, _args: Any) -> None:
        """Have a forward of the program's own find slices in place of parameters that are cut."""
        self._kept = {name: module._parameters[name] for name in self.cuts if module._parameters.get(name) is not None}
        for name, parameter in self._kept.items():
            dim = self.cuts[name]
            module._parameters[name] = as_slice(local(parameter), dim, parameter.shape[dim], self.line)  # type: ignore[assignment]

    def _take_back(self, module: nn.Module, _args: Any, _output: Any) -> None:
        kept, self._kept = self._kept, {}
        module._parameters.update(kept)

    def taken(self, module: nn.Module, args: Any, options: Any) -> Any:
        """Return the arguments of the layer's forward, the first one as `take` returns it."""
        if args:
            return (self.take(module, args[0]), *args[1:]), options
        if options:
            first = next(iter(options))
            options = options | {first: self.take(module, options[first])}
        return args, options

    def take(self, module: nn.Module, value: Any) -> Any:
        """Return what the layer computes with, given its input."""
        return value

    def give(self, module: nn.Module, output: Any) -> Any:
        """Return the layer's output, given what it computed."""
        return output

    def _summed(self, summand: Tensor) -> Any:
        """Return the sum over the ranks, cut along the sequence if sums are."""
        if not self.by_sequence or summand.dim() < 2:
            return summed(summand, self.line)
        dim = summand.dim() + SEQUENCE_DIM
        return as_slice(summed_part(summand, dim, self.line), dim, summand.shape[dim], self.line)


def _around(module: Any, *args: Any, **options: Any) -> Any:
    style = module.__dict__[_STYLE]
    args, options = style.taken(module, args, options)
    return style.give(module, type(module).forward(module, *args, **options))


class _Linear(Style):
    """A linear layer."""

    def forward_of(self, module: nn.Module) -> Callable[..., Any] | None:
        if not isinstance(module, nn.Linear):
            return _transposed
        return _linear if type(module).forward is nn.Linear.forward else None

    def bias_of(self, module: nn.Module) -> Tensor | None:
        """Return what is added before results are given."""
        bias = module._parameters["bias"]
        return None if bias is None else local(bias)


def _linear(module: Any, input: Tensor) -> Any:  # noqa: A002  # torch's name
    style = module.__dict__[_STYLE]
    weight, bias = local(module._parameters["weight"]), style.bias_of(module)
    return style.give(module, functional.linear(style.take(module, input), weight, bias))


def _transposed(module: Any, x: Tensor) -> Any:
    style = module.__dict__[_STYLE]
    weight, bias = local(module._parameters["weight"]).T, style.bias_of(module)
    return style.give(module, functional.linear(style.take(module, x), weight, bias))


class Colwise(_Linear):
    """A linear layer of which each rank computes some outputs."""

    cuts: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def take(self, module: nn.Module, value: Any) -> Any:
        if torch.compiler.is_compiling() and not (self.line.sharing.traces and self.has_taker):
            return for_parts(value, self.line)
        return self.line.sharing.shared(value, self.line, for_parts)

    def give(self, module: nn.Module, output: Any) -> Any:
        return as_slice(output, -1, _size(module, self.cuts["weight"]), self.line)


class ColwiseTransposed(Colwise):
    """As `Colwise`, of a layer whose weight is (inputs, outputs)."""

    cuts: ClassVar[dict[str, int]] = {"weight": 1, "bias": 0}


class ColwiseGathered(Colwise):
    """As `Colwise`, with the whole output on all ranks."""

    def give(self, module: nn.Module, output: Any) -> Any:
        return whole(super().give(module, output))


class Rowwise(_Linear):
    """A linear layer of which each rank computes with some inputs; the results are summed over the ranks."""

    cuts: ClassVar[dict[str, int]] = {"weight": 1}

    def take(self, module: nn.Module, value: Any) -> Any:
        if torch.compiler.is_compiling():
            self.line.sharing.end_group()
        if isinstance(value, Slice) and value.cut == value.dim() - 1:
            return part_of_slice(value)
        return part_of(whole(value), value.dim() - 1, self.line)

    def bias_of(self, module: nn.Module) -> None:
        return None

    def give(self, module: nn.Module, output: Any) -> Any:
        summed, bias = self._summed(output), module._parameters.get("bias")
        return summed if bias is None else summed + bias.to(summed.dtype)  # once, to the sum


class RowwiseTransposed(Rowwise):
    """As `Rowwise`, of a layer whose weight is (inputs, outputs)."""

    cuts: ClassVar[dict[str, int]] = {"weight": 0}


class Experts(Style):
    """Linear layers of experts in one tensor each: the first ones are cut by outputs, the last ones by inputs."""

    cuts: ClassVar[dict[str, int]] = {"gate_up_proj": 1, "down_proj": 2}


class ExpertsTransposed(Style):
    """As `Experts`, whose weights are (experts, inputs, outputs)."""

    cuts: ClassVar[dict[str, int]] = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1}


class VocabLinear(Colwise):
    """A linear layer whose outputs are the logits of a vocabulary, cut; the loss is computed from the parts."""

    uneven = True


class VocabLinearGathered(ColwiseGathered):
    uneven = True


class VocabEmbedding(Style):
    """An embedding of which each rank holds some of the vocabulary; the results are summed over the ranks."""

    cuts: ClassVar[dict[str, int]] = {"weight": 0}
    uneven = True


class ColwiseEmbedding(Style):
    """An embedding of which each rank holds some features."""

    cuts: ClassVar[dict[str, int]] = {"weight": 1}


class Sequence(Style):
    """A layer with replicated parameters of which each rank computes a part of the sequence."""

    def take(self, module: nn.Module, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            return value
        dim = value.dim() + SEQUENCE_DIM
        if isinstance(value, Slice):
            if value.cut == dim:
                return value
            value = whole(value)
        return as_slice(part_of(value, dim, self.line), dim, value.shape[dim], self.line)


class SequenceEmbedding(Sequence):
    """An embedding whose result is cut along the sequence."""

    def take(self, module: nn.Module, value: Any) -> Any:
        return whole(value)

    def give(self, module: nn.Module, output: Any) -> Any:
        return super().take(module, output)


class Foreign(Style):
    """A layer that one of torch's ParallelStyle objects cuts: it takes whole activations, after that object's hooks."""

    def forward_of(self, module: nn.Module) -> None:
        return None

    def take(self, module: nn.Module, value: Any) -> Any:
        return all_whole(value)


class Replicated(Style):
    """A layer that is not cut; what it computes with parts is right without a style, too."""

    def attach(self, module: nn.Module) -> None:
        pass


def _size(module: nn.Module, dim: int) -> int:
    weight = module.weight
    assert isinstance(weight, torch.Tensor), "it is a Linear or an Embedding"
    return weight.shape[dim]


#: The class of each of `plan.CUTTING`, for a Linear and for an Embedding.
_STYLES: dict[str, tuple[type[Style] | None, type[Style] | None]] = {
    "colwise": (Colwise, ColwiseEmbedding),
    "rowwise": (Rowwise, VocabEmbedding),
    "vocab": (VocabLinear, VocabEmbedding),
    "colwise_gather_output": (VocabLinearGathered, None),
}


#: The same of layers whose weight is (inputs, outputs).
_TRANSPOSED: dict[Any, type[Style]] = {Colwise: ColwiseTransposed, Rowwise: RowwiseTransposed}


def style_class(name: str, module: nn.Module) -> type[Style] | None:
    """Return the class for style `name` of `module`; None if it cannot cut such a module."""
    is_embedding = isinstance(module, nn.Embedding)
    if name == "sequence":
        return SequenceEmbedding if is_embedding else Sequence
    if name in WHOLE:
        return Replicated
    if name == EXPERTS:
        return ExpertsTransposed if getattr(module, "is_transposed", False) else Experts
    linear, embedding = _STYLES[name]
    if is_embedding:
        return embedding
    return linear if isinstance(module, nn.Linear) else _TRANSPOSED.get(linear) if features(module) else None


def check_embedding(module: nn.Embedding, name: str, where: str) -> None:
    """Refuse options of an embedding that need all of its rows in one process."""
    for option, usual in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
        if getattr(module, option) != usual:
            raise ConfigError(
                f"{where} cuts {name}, an Embedding with {option}={getattr(module, option)!r}",
                expected=f"{option}={usual!r}",
                do="leave it out of the plan",
            )
