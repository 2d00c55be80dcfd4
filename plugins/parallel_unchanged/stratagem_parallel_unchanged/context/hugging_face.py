"""Call models of Hugging Face on parts of sequences: position ids, shifted labels, masks.

These models number positions from 0, shift labels by one and build masks from what they are given. So they are given
what belongs to a part, in a hook before forward: `position_ids` of whole sequences, `shift_labels` with the label after
the part, a mask of whole sequences if documents are packed, and no padding mask if it masks nothing. What they would
compute wrongly is refused.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem_parallel_unchanged.context.part import Part


def models_of(module: nn.Module) -> list[nn.Module]:
    """Return the models of Hugging Face within `module` that are in no other."""
    if any(
        f"{base.__module__}.{base.__name__}" == "transformers.modeling_utils.PreTrainedModel"
        for base in type(module).__mro__
    ):
        return [module]
    return [model for child in module.children() for model in models_of(child)]


class HuggingFaceModels:
    """The hooks of the models of Hugging Face within `module`."""

    def __init__(self, module: nn.Module, axis: Part) -> None:
        self.axis = axis
        models = models_of(module)
        for model in models:
            _check_attention(model)
        self._handles = [model.register_forward_pre_hook(self._before_forward, with_kwargs=True) for model in models]

    def close(self) -> None:
        """Leave the models alone from now on."""
        while self._handles:
            self._handles.pop().remove()

    @torch._disable_dynamo
    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.axis.is_running:
            return None
        with torch._C.DisableTorchFunction():  # what follows knows that sequences are cut
            return self._arguments(model, args, kwargs)

    def _arguments(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the call with what belongs to a part."""
        parameters = inspect.signature(model.forward).parameters
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        tokens = next((given[name] for name in ("input_ids", "inputs_embeds") if name in given), None)
        if not isinstance(tokens, Tensor):
            return None
        _check_window(model, tokens.shape[1] * self.axis.over.world_size)
        if "attention_mask" in given:
            self._check_mask(given.pop("attention_mask"))
        elif "position_ids" in given and given["position_ids"].dim() == 2 and _is_causal(model):
            given["attention_mask"] = self._within_documents(given["position_ids"])
        if "position_ids" not in given and "position_ids" in parameters:
            given["position_ids"] = self._positions(model, tokens)
        if "labels" in given and "shift_labels" not in given and _shifts_labels(model):
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                raise ConfigError(
                    f"{type(model).__name__} shifts labels itself, and strategy.parallel.context cuts sequences",
                    expected="a forward that takes shift_labels", do="compute the loss from its logits",
                )  # fmt: skip
            given["shift_labels"] = self._shifted(given["labels"])
        return (), given

    def _check_mask(self, mask: Any) -> None:
        """Refuse a mask that masks something, on any rank. Collective."""
        over = self.axis.over
        if over.unchecked.any(not (isinstance(mask, Tensor) and over.values((mask == 1).all(), True))):
            raise ConfigError(
                "attention_mask masks positions, and strategy.parallel.context cuts sequences",
                expected="sequences without padding: the model would combine the mask of a part with that part alone",
                do="pack sequences to one length; padding after causal sequences needs no mask, only labels of -100",
            )

    def _within_documents(self, positions: Tensor) -> Tensor | None:
        """Return a causal mask of whole sequences within documents that are packed; None if none are. Collective.

        Documents begin where positions do not count on, as transformers finds them, which would look at a part alone.
        """
        parts = self.axis.over.unchecked.all_gather(positions.contiguous())
        whole = torch.cat(list(parts), -1)
        documents = (whole.diff(dim=-1, prepend=whole[..., :1] - 1) != 1).cumsum(-1)
        if not self.axis.over.values(documents.any(), False):
            return None
        return (documents[:, None, :, None] == documents[:, None, None, :]).tril()

    def _positions(self, model: nn.Module, tokens: Tensor) -> Tensor:
        names = {type(part).__name__ for part in model.modules()}
        if not any("Rotary" in name for name in names) and not any(
            name.endswith("wpe") for name, _ in model.named_modules()
        ):
            raise ConfigError(
                f"{type(model).__name__} was called without position_ids, and strategy.parallel.context cuts sequences",
                expected="position_ids of whole sequences: it numbers positions in its own way",
                do="put position_ids into the batch, to be cut as input_ids are",
            )
        length = tokens.shape[1]
        first = length * self.axis.over.rank
        return torch.arange(first, first + length, device=tokens.device).expand(tokens.shape[0], length)

    def _shifted(self, labels: Tensor) -> Tensor:
        """Return the label after each position; -100 after the last one of the whole sequence. Collective."""
        over = self.axis.over
        following = over.unchecked.all_gather(labels[:, :1].contiguous())
        after = following[over.rank + 1] if over.rank + 1 < over.world_size else torch.full_like(labels[:, :1], -100)
        return torch.cat([labels[:, 1:], after], 1)


def _check_attention(model: Any) -> None:
    """Refuse attention that does not call ``scaled_dot_product_attention``."""
    used = getattr(model.config, "_attn_implementation", "sdpa")
    if used != "sdpa":
        raise ConfigError(
            f"{type(model).__name__} computes attention with {used!r}, and strategy.parallel.context cuts sequences",
            expected="'sdpa'", do='build it with attn_implementation="sdpa"',
        )  # fmt: skip


def _check_window(model: Any, length: int) -> None:
    """Refuse attention within a window that is shorter than sequences."""
    config = model.config
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if isinstance(window, int) and window < length and getattr(config, "use_sliding_window", True):
            raise ConfigError(
                f"{type(model).__name__} has {name} {window}, and sequences have length {length}",
                expected="attention over whole sequences with strategy.parallel.context",
                do=f"set config.{name} to None, or use shorter sequences",
            )


def _is_causal(model: nn.Module) -> bool:
    return any(getattr(module, "is_causal", False) for module in model.modules())


def _shifts_labels(model: Any) -> bool:
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
