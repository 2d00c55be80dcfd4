"""Python objects as messages: pickled, with their tensors on the CPU."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    pass


class _Packer(pickle.Pickler):
    """Packs tensors of a device as tensors of the CPU: another rank would put them on the sender's device."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.detach().cpu().__reduce_ex__(self.proto)
        return NotImplemented

    proto = pickle.DEFAULT_PROTOCOL


#: Begins what is sent in place of an object that cannot be pickled: all ranks raise, and none waits. No pickle does.
REFUSAL = b"stratagem: "


def packed(value: Any) -> bytes:
    file = io.BytesIO()
    try:
        _Packer(file).dump(value)
    except Exception as error:  # noqa: BLE001 - objects of the user raise what they like
        return REFUSAL + f"{type(value).__name__}, {type(error).__name__}: {error}".encode()
    return file.getvalue()


def unpacked(message: bytes, rank: int) -> Any:
    if message.startswith(REFUSAL):
        reason = message.removeprefix(REFUSAL).decode().rstrip(".")
        raise ConfigError(
            f"rank {rank} sends an object that cannot be pickled ({reason})",
            do="send what pickle takes: no functions or classes from within a function, and no open files",
        )
    return pickle.loads(message)  # noqa: S301 - what a rank of this run sent
