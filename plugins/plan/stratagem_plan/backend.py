"""A device that computes nothing: tensors on it have shapes, dtypes and bytes, and strategies take it for a GPU.

torch lets a Python program register a type of device under the key "privateuse1". Fake tensors on it go through
autograd and the optimizers like those of a GPU, on a machine that has none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stratagem.errors import ConfigError

#: The type of the device, as in ``torch.device("planned", 0)``.
NAME = "planned"


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Module:
    """``torch.planned``: what torch asks a type of device for; streams and events that do nothing."""

    Stream, Event = _Stream, _Event
    #: The stream to which operations go.
    stream_now: ClassVar[_Stream] = _Stream()
    _default: ClassVar[_Stream] = stream_now

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None: ...

    @staticmethod
    def synchronize(device: Any = None) -> None: ...

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None: ...

    manual_seed = manual_seed_all

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def get_rng_state(_device: Any = None) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: Any, device: Any = None) -> None: ...

    @classmethod
    def current_stream(cls, _device: Any = None) -> _Stream:
        return cls.stream_now

    @classmethod
    def default_stream(cls, _device: Any = None) -> _Stream:
        return cls._default

    @classmethod
    @contextlib.contextmanager
    def stream(cls, stream: Any) -> Iterator[None]:
        before = cls.stream_now
        cls.stream_now = before if stream is None else stream
        try:
            yield
        finally:
            cls.stream_now = before

    @staticmethod
    @contextlib.contextmanager
    def device(_device: Any) -> Iterator[None]:
        yield


@functools.cache
def planned_device() -> torch.device:
    """Return the device; registers its type, once in a process.

    Raises:
        ConfigError: torch cannot register one, or another one is registered.
    """
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
    except ImportError as error:
        raise ConfigError(
            f"torch {torch.__version__} cannot register a type of device from Python", expected="torch 2.10 or later",
            do="plan in an environment that has it: a plan needs no GPU",
        ) from error  # fmt: skip
    register(NAME, backend_module=_Module())
    return torch.device(NAME, 0)


def check_autograd() -> None:
    """Refuse a process that cannot compute gradients on the device.

    Raises:
        ConfigError: autograd has already run, and has threads for the devices that it knew then.
    """
    with FakeTensorMode():
        number = torch.zeros((), device=planned_device(), requires_grad=True)
        try:
            number.backward()
        except RuntimeError as error:
            raise ConfigError(
                "this process has computed gradients, and autograd takes no other device afterwards",
                expected="a plan before the first backward", do="plan before training, or in a process of its own",
            ) from error  # fmt: skip


def current_stream() -> object:
    """Return the stream to which operations go now."""
    return _Module.stream_now
