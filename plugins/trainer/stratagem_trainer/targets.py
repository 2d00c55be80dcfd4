"""What ``Trainer(loss_normalization=...)`` means; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, fields_dict, frozen
from attrs.validators import instance_of

from stratagem.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class Targets:
    """Which elements of a batch are targets."""

    #: Key or position of the class targets in a batch, any shape.
    labels: str | int = field(default="labels", validator=instance_of((str, int)))
    #: Targets with this value do not count, as in ``torch.nn.functional.cross_entropy``.
    ignore_index: int = field(default=-100, validator=instance_of(int))
    #: The model predicts each element from those before it in the last dimension, so the first one is not a target.
    shifted: bool = field(default=False, validator=instance_of(bool))

    def count(self, batch: Any) -> int:
        """Return the number of targets in `batch`.

        Raises:
            ConfigError: `batch` has no such labels.
        """
        labels = self.find(batch)
        if labels is None:
            keys = [str(key) for key in list(batch.keys())] if isinstance(batch, Mapping) else []
            has = f"a {type(batch).__name__}" + (f" with {', '.join(keys)}" if keys else "")
            do = 'name them: loss_normalization={"labels": KEY_OR_POSITION}'
            if not isinstance(batch, Mapping | list | tuple):
                do = 'return {"loss": SUM, "count": NUMBER} without it, or yield a dict or tuple with labels'
            raise ConfigError(
                f"loss_normalization counts {self.labels!r} of a batch, and the loader yields {has}",
                expected="class targets there",
                do=nearest(str(self.labels), keys) or do,
            )
        if self.shifted:
            labels = labels[..., 1:]
        return int((labels != self.ignore_index).sum())

    def find(self, batch: Any) -> torch.Tensor | None:
        """Return the class targets of `batch`, a mapping, list or tuple; None if it has none."""
        import torch

        key = self.labels
        if isinstance(batch, Mapping):
            found = batch[key] if key in list(batch.keys()) else None  # not `in batch`: a TensorDict refuses it
        elif isinstance(batch, list | tuple) and isinstance(key, int) and -len(batch) <= key < len(batch):
            found = batch[key]
        else:
            return None
        is_class = isinstance(found, torch.Tensor) and found.dim() and not found.is_floating_point()
        return found if is_class else None


def read(value: str | Mapping[str, Any]) -> Targets | None:
    """Return what ``Trainer(loss_normalization=...)`` means; None for "batches".

    Raises:
        ConfigError: neither "batches", "tokens" nor options of `Targets`.
    """
    if value == "batches":
        return None
    names = fields_dict(Targets)
    if value and isinstance(value, Mapping) and value.keys() <= names.keys():
        try:
            return Targets(**value)
        except TypeError as error:
            wrong, found = error.args[1].name, error.args[3]  # as attrs tells it
            raise ConfigError(
                f"loss_normalization.{wrong} is {found!r}", expected=str(names[wrong].type).replace(" | ", " or ")
            ) from error
    if value == "tokens":
        return Targets()
    raise ConfigError(
        f"loss_normalization is {value!r}", expected=f'"batches", "tokens", or a dictionary with {", ".join(names)}'
    )


def normalization(_: Any, __: Any, value: Any) -> None:
    """Accept what `read` reads."""
    read(value)
