"""How exact and how repeatable torch's kernels are: switched when a run connects, put back when it closes."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.settings import RunSettings

#: cuBLAS reads it when it starts on a device.
_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
#: Its values under which matrix products are the same in every run.
_REPEATABLE: Final = (":4096:8", ":16:8")


def switch(settings: RunSettings, device_type: str) -> ExitStack:
    """Switch torch to what `settings` ask for, before a device of `device_type` is started; closing puts it back.

    What `settings` leave open stays as the process has it.

    Raises:
        ConfigError: the process was switched otherwise, in a way that contradicts `settings`.
    """
    undo = ExitStack()
    try:
        if settings.deterministic:
            _make_deterministic(settings.deterministic == "warn", device_type, undo)
        if settings.float32_matmul_precision is not None:
            _set_precision(settings.float32_matmul_precision, undo)
    except BaseException:
        undo.close()
        raise
    return undo


def _make_deterministic(warn_only: bool, device_type: str, undo: ExitStack) -> None:
    import torch

    if device_type == "cuda":
        _set_workspace()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    undo.callback(lambda: torch.use_deterministic_algorithms(before[0], warn_only=before[1]))
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # A benchmark chooses by time, so another algorithm in another run.
    cudnn = torch.backends.cudnn
    for name, value in (("deterministic", True), ("benchmark", False)):
        undo.callback(setattr, cudnn, name, getattr(cudnn, name))
        setattr(cudnn, name, value)


def _set_workspace() -> None:
    import torch

    found = os.environ.get(_WORKSPACE)
    if found is None:
        if torch.cuda.is_initialized():
            warnings.warn(
                f"deterministic was asked for after CUDA was started: cuBLAS may have read {_WORKSPACE} already, and "
                f"matrix products may differ from run to run. Set {_WORKSPACE}={_REPEATABLE[0]} in the environment",
                stacklevel=2,
            )
        os.environ[_WORKSPACE] = _REPEATABLE[0]  # it stays: what cuBLAS has read cannot be taken back
    elif found not in _REPEATABLE:
        raise ConfigError(
            f"deterministic is set and {_WORKSPACE} is {found!r} in the environment",
            expected=" or ".join(map(repr, _REPEATABLE)), do="unset it",
        )  # fmt: skip


def _set_precision(wanted: str, undo: ExitStack) -> None:
    import torch

    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError as error:  # of the newer switches, one for each backend
        raise ConfigError(
            f"float32_matmul_precision is {wanted!r} and this process has set an fp32_precision of torch.backends",
            expected="one of the two", do="drop one",
        ) from error  # fmt: skip
    undo.callback(torch.set_float32_matmul_precision, before)
    torch.set_float32_matmul_precision(wanted)
