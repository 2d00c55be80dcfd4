"""Pickle Python objects for collectives, with their tensors on the CPU."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    pass


class _Packer(pickle.Pickler):
    """Pickles all tensors as CPU tensors: otherwise another rank would load them onto the sender's device."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.detach().cpu().__reduce_ex__(self.proto)
        return NotImplemented

    proto = pickle.DEFAULT_PROTOCOL


#: Prefix of the message that replaces an object that cannot be pickled, so that all ranks raise. No pickle has it.
REFUSAL = b"stratagem: "


def packed(value: Any) -> bytes:
    """Return `value` pickled; if that fails, `REFUSAL` and the reason."""
    file = io.BytesIO()
    try:
        _Packer(file).dump(value)
    except Exception as error:  # noqa: BLE001 - the user's objects may raise anything
        return REFUSAL + f"{type(value).__name__}, {type(error).__name__}: {error}".encode()
    return file.getvalue()


def unpacked(message: bytes, rank: int) -> Any:
    """Return the object in a `message` of `packed` from `rank`.

    Raises:
        ConfigError: that rank could not pickle it.
    """
    if message.startswith(REFUSAL):
        reason = message.removeprefix(REFUSAL).decode().rstrip(".")
        raise ConfigError(
            f"rank {rank} sends an object that cannot be pickled ({reason})",
            do="send an object that can be pickled: without open files, local functions and local classes",
        )
    return pickle.loads(message)  # noqa: S301 - what a rank of this run sent
