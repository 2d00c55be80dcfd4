"""Call models of Hugging Face on parts of sequences: position ids, shifted labels, masks.

These models number positions from 0, shift labels by one and build masks from what they are given. So they are given
what belongs to a part, in a hook before forward: `position_ids` of whole sequences, `shift_labels` with the label after
the part, and a mask of whole sequences if documents are packed. Masks that they build, for causal attention, windows
and padding, are those of whole sequences. What they would compute wrongly is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem_parallel.context.part import Part


def models_of(module: nn.Module) -> list[nn.Module]:
    """Return the models of Hugging Face within `module` that are in no other."""
    bases = {f"{base.__module__}.{base.__name__}" for base in type(module).__mro__}
    if "transformers.modeling_utils.PreTrainedModel" in bases:
        return [module]
    return [model for child in module.children() for model in models_of(child)]


class HuggingFaceModels:
    """The hooks of the models of Hugging Face within `module`."""

    def __init__(self, module: nn.Module, axis: Part) -> None:
        self.axis = axis
        #: The models and how they computed attention.
        self._used: list[Any] = [(model, _attention_of(model)) for model in models_of(module)]
        self._handles: list[Any] = []
        #: How transformers builds masks and finds documents, while a model is called.
        self._builds: Any = None
        self._finds: Any = None
        #: The model that is called, which may call others.
        self._caller: nn.Module | None = None
        self._masking: Any = sys.modules.get("transformers.masking_utils")
        #: The document of each position of whole sequences, if several are packed into one.
        self._documents: Tensor | None = None
        #: How models number positions, if not from 0 on.
        self._numbers = {model: _numbering(model) for model, _ in self._used}
        self._causal = {
            each for each in self._numbers if any(getattr(part, "is_causal", False) for part in each.modules())
        }
        for model in self._numbers:
            self._handles.append(model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
            self._handles.append(model.register_forward_hook(self._after_forward, always_call=True))

    def close(self) -> None:
        """Leave the models alone from now on."""
        while self._handles:
            self._handles.pop().remove()
        while self._used:
            model, used = self._used.pop()
            if used != "sdpa":
                model.set_attn_implementation(used)

    @torch._disable_dynamo
    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.axis.is_running:
            return None
        if self._caller is None:
            self._caller, masks = model, self._masking.ALL_MASK_ATTENTION_FUNCTIONS
            self._builds, masks["sdpa"] = masks["sdpa"], self._mask
            self._finds = self._masking.find_packed_sequence_indices
            self._masking.find_packed_sequence_indices = _none
        with torch._C.DisableTorchFunction():  # what follows knows that sequences are cut
            return self._arguments(model, args, kwargs)

    @torch._disable_dynamo
    def _after_forward(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if model is self._caller:
            self._masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = self._builds
            self._masking.find_packed_sequence_indices, self._caller = self._finds, None

    @torch._disable_dynamo
    def _mask(self, *, q_length: int, kv_length: int, attention_mask: Any = None, **options: Any) -> Any:
        """Return what transformers builds for whole sequences. Collective if positions are padded."""
        with torch._C.DisableTorchFunction():
            size = self.axis.over.world_size
            padded = None if attention_mask is None else self._whole(attention_mask.to(torch.uint8)).bool()
            options |= {"q_length": q_length * size, "kv_length": kv_length * size, "attention_mask": padded}
            if self._documents is None:
                return self._builds(**options)
            same = self._documents[:, None, :, None] == self._documents[:, None, None, :]
            return self._builds(**options | {"allow_is_causal_skip": False}) & same

    def _whole(self, part: Tensor) -> Tensor:
        """Return whole sequences, of shape (samples, positions). Collective."""
        return torch.cat(list(self.axis.over.unchecked.all_gather(part.contiguous())), 1)

    def _arguments(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the call with what belongs to a part."""
        parameters = inspect.signature(model.forward).parameters
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        tokens = next((given[name] for name in ("input_ids", "inputs_embeds") if name in given), None)
        if not isinstance(tokens, Tensor):
            return None
        mask, self._documents = given.get("attention_mask"), None
        positions = given.get("position_ids")
        if positions is None and "position_ids" in parameters:
            given["position_ids"] = self._positions(model, tokens, mask)
        elif positions is not None and mask is None and positions.dim() == 2 and model in self._causal:
            self._documents = self._packed(positions)
        shifts = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
        if shifts and "labels" in given and "shift_labels" not in given:
            following = self._whole(given["labels"])[:, 1:]
            given["shift_labels"] = self._own(nn.functional.pad(following, (0, 1), value=-100))
        return (), given

    def _packed(self, positions: Tensor) -> Tensor | None:
        """Return the document of each position of whole sequences; None if none are packed. Collective.

        Documents begin where positions do not count on, as transformers finds them, which would look at a part alone.
        """
        whole = self._whole(positions)
        documents = (whole.diff(dim=-1, prepend=whole[..., :1] - 1) != 1).cumsum(-1)
        return documents if self.axis.over.values(documents.any(), False) else None

    def _positions(self, model: nn.Module, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Return position ids as the `model` numbers whole sequences. Collective where others' words matter."""
        number = self._numbers[model] if tokens.dim() == 2 else None
        if number is None:
            length = tokens.shape[1] * self.axis.over.world_size
            return self._own(torch.arange(length, device=tokens.device).expand(tokens.shape[0], -1))
        mask = torch.ones_like(tokens) if mask is None else mask
        return self._own(number(self._whole(tokens), self._whole(mask).long()))

    def _own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of `whole` sequences."""
        return whole.tensor_split(self.axis.over.world_size, 1)[self.axis.over.rank].contiguous()


def _none(*_: Any) -> None:
    """Stand for transformers' search for packed documents, which would look at a part alone."""


def _numbering(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return what numbers positions for ids and a mask of whole sequences; None if they count from 0 on."""
    for part in model.modules():
        number = getattr(part, "create_position_ids_from_input_ids", None)
        if number is not None:
            return lambda *both, number=number, padding=part.padding_idx: number(both[0], padding)
        if isinstance(part, nn.Embedding) and "attention_mask" in inspect.signature(part.forward).parameters:
            return lambda *both: both[1].cumsum(1) * both[1] - 1
    return None


def _attention_of(model: Any) -> str:
    """Return how `model` computes attention; from now on it calls ``scaled_dot_product_attention``."""
    used: str = getattr(model.config, "_attn_implementation", "sdpa")
    softens = getattr(model.config, "attn_logit_softcapping", None) is not None
    if used != "sdpa" and (softens or not model._supports_sdpa):
        raise ConfigError(
            f"{type(model).__name__} computes attention with {used!r}, and strategy.parallel.context cuts sequences",
            expected="a model that can compute it with 'sdpa', without attn_logit_softcapping",
            do="use another axis, such as tensor",
        )
    if used != "sdpa":
        model.set_attn_implementation("sdpa")
    return used
