"""Precision and determinism of torch's kernels: set when a run connects, restored when it closes."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.config.settings import RunSettings

#: cuBLAS reads it when it starts on a device.
_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
#: Its values under which matrix products are the same in every run.
_REPEATABLE: Final = (":4096:8", ":16:8")


def switch(settings: RunSettings, device_type: str) -> ExitStack:
    """Set torch's flags from `settings`, before a device of `device_type` is started; closing restores it.

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
    if device_type == "cuda":
        _set_workspace()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    put = lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])  # noqa: E731
    _put("deterministic", before, (True, warn_only), put, undo)
    # A benchmark selects algorithms by time, so each run may use others.
    cudnn = torch.backends.cudnn
    for name, value in (("deterministic", True), ("benchmark", False)):
        _put(f"cudnn.{name}", getattr(cudnn, name), value, functools.partial(setattr, cudnn, name), undo)


def _set_workspace() -> None:
    found = os.environ.get(_WORKSPACE)
    if found is None:
        if torch.cuda.is_initialized():
            warnings.warn(
                f"deterministic was asked for after CUDA was started: cuBLAS may have read {_WORKSPACE} already, and "
                f"matrix products may differ from run to run. Set {_WORKSPACE}={_REPEATABLE[0]} in the environment",
                stacklevel=2,
            )
        os.environ[_WORKSPACE] = _REPEATABLE[0]  # not restored: cuBLAS has read it
    elif found not in _REPEATABLE:
        raise ConfigError(
            f"deterministic is set and {_WORKSPACE} is {found!r} in the environment",
            expected=" or ".join(map(repr, _REPEATABLE)), do="unset it",
        )  # fmt: skip


def _set_precision(wanted: str, undo: ExitStack) -> None:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError as error:  # of the newer switches, one for each backend
        raise ConfigError(
            f"float32_matmul_precision is {wanted!r} and this process has set an fp32_precision of torch.backends",
            expected="one of the two", do="drop one",
        ) from error  # fmt: skip
    _put("float32_matmul_precision", before, wanted, torch.set_float32_matmul_precision, undo)


#: For each switch, the values that open runs found, in the order in which they set it.
_found: dict[str, list[list[Any]]] = {}


def _put(name: str, before: Any, wanted: Any, put: Callable[[Any], None], undo: ExitStack) -> None:
    """Call ``put(wanted)``. Closing `undo` restores `before`, or leaves that to a later run that is still open."""
    found, mine = _found.setdefault(name, []), [before]

    def back() -> None:
        place = next(place for place, each in enumerate(found) if each is mine)
        if place == len(found) - 1:
            put(mine[0])
        else:
            found[place + 1][0] = mine[0]
        del found[place]

    found.append(mine)
    undo.callback(back)
    put(wanted)
