"""DeepSpeed's engine in a plan: it runs as on a GPU, with tensors that have shapes and no values."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cpu import NotImplementedBuilder
from deepspeed.runtime.utils import has_inf_or_nan
from deepspeed.runtime.zero import partitioned_param_coordinator, stage_1_and_2
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stratagem.errors import ConfigError
from stratagem_deepspeed.patches import replaced
from stratagem_deepspeed.zero_section import device_of

if TYPE_CHECKING:
    from stratagem_deepspeed.options import DeepSpeedOptions

#: Keys of zero_optimization for which DeepSpeed has kernels that return tensors, or threads that step.
_ZERO = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zenflow")
#: Options of ``deepspeed.checkpointing`` that write to tensors through their memory.
_LAYERS = ("partition_activations", "contiguous_memory_optimization")


def check(options: DeepSpeedOptions) -> None:
    """Refuse what DeepSpeed does outside of torch's operators.

    Raises:
        ConfigError: an option asks for it.
    """
    zero, config = options.zero, options.user_config
    for section in ("offload_optimizer", "offload_param"):
        if device_of(zero, section) == "nvme":
            _refuse(options.called(f"{section}.device"), "nvme", "'cpu', which leaves the same on the device")
    for key in _ZERO:
        if zero.get(key):
            _refuse(options.called(key), zero[key])
    for key in _LAYERS:
        value = getattr(options, key) if config is None else config.get("activation_checkpointing", {}).get(key)
        if value:
            place = (
                f"strategy.deepspeed.{key}" if config is None else f"activation_checkpointing.{key} of {options.origin}"
            )
            _refuse(place, value)


def _refuse(name: str, value: Any, expected: str = "a plan without it") -> None:
    raise ConfigError(f"{name} is {value!r}, which cannot be planned", expected=expected)


@contextlib.contextmanager
def planning(device: torch.device) -> Iterator[None]:
    """Within, DeepSpeed trains on the `device` of a plan."""

    def send(ints: list[int]) -> None:
        """Send what the ranks compare."""
        for size in ((), len(ints)):
            comm.broadcast(torch.empty(size, dtype=torch.long, device=device), src=0)

    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # DeepSpeed checks an alignment
    before = get_accelerator()
    set_accelerator(PlannedAccelerator(device))
    try:
        with (
            replaced(torch.Tensor, "record_stream", _do_nothing),
            replaced(OpBuilder, "load", _NoOp),
            replaced(NotImplementedBuilder, "load", _NoOp),
            replaced(stage_1_and_2, "has_inf_or_nan", _is_finite),
            replaced(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", send),
        ):
            yield
    finally:
        set_accelerator(before)


class PlannedAccelerator(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed has no types
    """What DeepSpeed asks an accelerator for; it works in streams, as on a GPU."""

    Stream: Any = None
    Event: Any = None

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        streams = getattr(torch, device.type)
        self._device, self._name, self._communication_backend_name = device, device.type, "fake"
        self.Stream, self.Event, self.stream = streams.Stream, streams.Event, streams.stream
        self.current_stream = self.default_stream = streams.current_stream

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: Any = None) -> str:
        return self._device.type

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return str(self._device)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device.type

    def is_fp16_supported(self) -> bool:
        return True

    def available_memory(self, device_index: Any = None) -> int:
        return 1 << 60  # whether it suffices is what the plan says


# --- Without values ------------------------------------------------------------------------------------------------


class Answered(TorchDispatchMode):
    """Within, a value that DeepSpeed asks for is zero: gradients are finite."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return torch.zeros((), dtype=args[0].dtype).tolist()
        return func(*args, **(kwargs or {}))


def _is_finite(gradient: torch.Tensor) -> bool:
    """Compute what DeepSpeed does to find an overflow, and find none."""
    has_inf_or_nan(gradient)
    return False


class _NoOp:
    """Stands for an op of DeepSpeed's in C++: each of its functions does nothing."""

    def __init__(self, builder: Any, verbose: bool = False) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None: ...


# --- Without memory ------------------------------------------------------------------------------------------------


class WithoutMemory(TorchFunctionMode):
    """Within, DeepSpeed makes its buffers where it wants them, and those of the CPU without memory.

    A plan builds modules on its device, and takes the engine for one of them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.empty, torch.zeros, torch.ones, torch.full):
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction(), _FakeOnCPU():  # type: ignore[no-untyped-call]  # torch's
            return func(*args, **(kwargs or {}))


class _FakeOnCPU(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fake = detect_fake_mode()
        assert fake is not None, "a plan computes with it"
        if torch.device(kwargs.get("device") or "cpu").type == "cpu":
            return fake.dispatch(func, types, args, kwargs)
        return func(*args, **kwargs)
