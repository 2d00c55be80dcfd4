"""Build DeepSpeed's ops once on a machine, and report what is missing where that is not possible.

[Note: locks of builds]
An op is a shared library in its own folder. torch compiles it there, guarded by a file named ``lock``. A killed build
does not remove that file, and later processes wait for it forever. So this module also holds a file lock of the kernel,
which is released when its process ends: a process that holds it, and sees no build in the folder, deletes torch's.

torch also compiles again whenever a path in the command changes, as between two virtual environments. This module
writes a stamp with all that a build depends on (the versions of Python, torch and deepspeed, the CPU), and loads the op
without torch or a compiler as long as the stamp matches.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import socket
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from attrs import define, frozen

from stratagem.errors import ConfigError


@frozen
class _Op:
    #: deepspeed's class that builds it.
    builder: str
    #: What to use instead.
    otherwise: str


_ADAM = 'use an optimizer of torch\'s ("torch_adam": true in a configuration)'

#: The ops that training may need, by name.
OPS = {
    "cpu_adam": _Op("CPUAdamBuilder", _ADAM),
    "cpu_adagrad": _Op("CPUAdagradBuilder", "use torch.optim.Adagrad"),
    "cpu_lion": _Op("CPULionBuilder", "use an optimizer of torch's"),
    "fused_adam": _Op("FusedAdamBuilder", _ADAM),
    "fused_lion": _Op("FusedLionBuilder", "use an optimizer of torch's"),
    "fused_lamb": _Op("FusedLambBuilder", "use an optimizer of torch's"),
    "async_io": _Op("AsyncIOBuilder", "offload to the CPU instead of NVMe"),
    "pin_memory": _Op("PinMemoryBuilder", "unset DS_PIN_MEMORY_BACKEND and offload to the CPU instead of NVMe"),
}


#: deepspeed's own function that builds an op, while it is replaced.
_original_jit_load: Callable[..., ModuleType] | None = None
#: Whether this process prints progress.
_prints_progress = True


def take_over(*, speaks: bool) -> None:
    """Replace deepspeed's function that builds an op by the one of this module. Safe to call twice.

    deepspeed's optimizers load their ops themselves when they are made.
    """
    global _original_jit_load, _prints_progress
    from deepspeed.ops.op_builder.builder import OpBuilder

    _prints_progress = speaks
    if _original_jit_load is None:
        _original_jit_load, OpBuilder.jit_load = OpBuilder.jit_load, _load


def give_back() -> None:
    """Undo `take_over`. Safe to call twice."""
    global _original_jit_load, _prints_progress
    from deepspeed.ops.op_builder.builder import OpBuilder

    _prints_progress = True
    if _original_jit_load is not None:
        OpBuilder.jit_load, _original_jit_load = _original_jit_load, None


def _load(builder: Any, verbose: bool = False) -> ModuleType:
    """Load an op, after building it if necessary; deepspeed calls this for ops that were not installed with it."""
    library = _library(builder)
    try:
        module = library.loaded() or _built(builder, library, verbose)
    except OSError as error:
        raise ConfigError(
            f"deepspeed's {builder.name} cannot be stored in {library.folder} ({error})",
            expected="a writable folder with space for 100 MB", do="set TORCH_EXTENSIONS_DIR to one",
        ) from error  # fmt: skip
    type(builder)._loaded_ops[builder.name] = module
    return module


def _built(builder: Any, library: _Library, verbose: bool) -> ModuleType:
    if not library.is_there():
        check_tools(builder)
        if _prints_progress:
            _print(f"building deepspeed's {builder.name} in {library.folder}, once on this machine; a few minutes")
    with library.locked():
        found = library.loaded()  # another process may have built it meanwhile
        if found is not None:
            return found
        library.clear()
        module = _compiled(builder, library, verbose)
        library.mark()
        return module


def _compiled(builder: Any, library: _Library, verbose: bool) -> ModuleType:
    assert _original_jit_load is not None, "set by take_over"
    try:
        own = {"TORCH_EXTENSIONS_DIR": str(library.folder.parent), "PATH": _path(), **_architectures()}
        with variables(**own), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _original_jit_load(builder, verbose)
    except Exception as error:
        raise unusable(builder.name, error) from error


def _architectures() -> dict[str, str]:
    """Return TORCH_CUDA_ARCH_LIST without the letters of features (9.0a, 12.0f), which deepspeed takes for numbers."""
    name = "TORCH_CUDA_ARCH_LIST"
    return {name: re.sub(r"(\d)[af]\b", r"\1", os.environ[name])} if name in os.environ else {}


def unusable(name: str, error: Exception) -> ConfigError:
    """Return the error for an op that cannot be built or loaded."""
    return ConfigError(
        f"deepspeed's {name} could not be built and loaded on {socket.gethostname()} ({_root(error)})",
        do=_advice(name, "fix that"),
    )


def _root(error: Exception) -> str:
    """Return the first line of a compiler's output that has an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = [line for line in lines if "error:" in line.lower()]
    return (wrong or lines or [type(error).__name__])[0]


def _print(text: str) -> None:
    print(f"stratagem: {text}", file=sys.stderr, flush=True)


# --- What a build needs ------------------------------------------------------------------------------------------


def check_tools(builder: Any) -> None:
    """Raise an error if a tool that the build of this op needs is missing, unless the op is built already."""
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import get_cxx_compiler

    came_with_deepspeed = installed_ops.get(builder.name, False)
    if came_with_deepspeed or builder.name in builder._loaded_ops or _library(builder).is_there():
        return
    path = _path()
    for tool, package in ((shlex.split(get_cxx_compiler())[0], "apt-get install g++"), ("ninja", "pip install ninja")):
        if shutil.which(tool, path=path) is None:
            raise _missing(builder.name, tool, package)
    if builder.name == "async_io":
        with variables(PATH=path):
            if not builder.has_function("io_submit", ("aio",)):
                raise _missing(builder.name, "libaio", "apt-get install libaio-dev")


def _missing(name: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"deepspeed's {name} is built on the machine that uses it, and {what} is missing on {socket.gethostname()}",
        do=_advice(name, f"install it ({remedy})"),
    )


def _advice(name: str, remedy: str) -> str:
    return f"{remedy}, or {OPS[name].otherwise}" if name in OPS else remedy


def _path() -> str:
    """Return PATH, with the folder in which pip installs ninja, for virtual environments that are not activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set environment variables within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- The folder of ops --------------------------------------------------------------------------------------------


def _library(builder: Any) -> _Library:
    return _Library(builder.name, _folder() / builder.name)


def _folder() -> Path:
    """Return the folder of ops: TORCH_EXTENSIONS_DIR, or one in the user's cache for the installed versions."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "stratagem" / "deepspeed" / _fingerprint()


def _fingerprint() -> str:
    """Return a string that identifies all that a built op depends on."""
    import deepspeed

    facts = (
        sysconfig.get_config_var("SOABI") or sys.version, torch.__version__, str(torch.version.cuda),
        deepspeed.__version__, _cpu(), _devices(),
    )  # fmt: skip
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    return f"torch-{torch.__version__}-deepspeed-{deepspeed.__version__}-{digest}"


def _cpu() -> str:
    """Return the model and the features of this CPU, for which ops are compiled."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    features = [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")]
    return "\n".join([platform.machine(), *sorted(set(features))])


def _devices() -> str:
    """Return the type of devices, and for GPUs their compute capabilities, for which ops are compiled."""
    from deepspeed.accelerator import get_accelerator

    kind: str = get_accelerator().device_name()
    numbers = range(torch.cuda.device_count() if kind == "cuda" else 0)
    return " ".join([kind, *sorted({str(torch.cuda.get_device_capability(number)) for number in numbers})])


@define
class _Library:
    """An op's shared library, which may not be built yet."""

    name: str
    folder: Path

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.name}.so"

    @property
    def _mark(self) -> Path:
        return self.folder / "built-by-stratagem"

    def is_there(self) -> bool:
        """Whether torch would probably load the library without building it again."""
        import deepspeed

        if self._mark.exists() and self._file.exists():
            return self._mark.read_text() == self._state()
        commands, package = self.folder / "build.ninja", str(Path(deepspeed.__file__).parent)
        return self._file.exists() and commands.exists() and package in commands.read_text()

    def loaded(self) -> ModuleType | None:
        """Load the library if it was built for the installed versions; otherwise return None."""
        with contextlib.suppress(FileNotFoundError):
            if self._mark.read_text() == self._state():
                return _import(self.name, self._file)
        return None

    def mark(self) -> None:
        """Write the stamp of the build."""
        # Within one process torch gives an op that is built again another name, which later processes do not load.
        if self._file.exists():
            self._mark.write_text(self._state())

    def clear(self) -> None:
        """Remove the lock of a killed build, for which torch would wait. The caller holds `locked`."""
        self._mark.unlink(missing_ok=True)
        if _is_worked_in(self.folder):  # by another program, or by a compiler whose parent was killed
            _print(f"waiting for another build of deepspeed's {self.name} in {self.folder}")
        while _is_worked_in(self.folder):
            time.sleep(0.2)
        left = self.folder / "lock"
        if left.exists():
            _print(f"removing {left}, left by a build of deepspeed's {self.name} that was killed")
            left.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the file lock; the kernel releases it when this process ends, also when it is killed."""
        from filelock import FileLock

        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "stratagem.lock"):
            yield

    def _state(self) -> str:
        status = self._file.stat()
        return f"{_fingerprint()} {status.st_size} {status.st_mtime_ns}"


def _is_worked_in(folder: Path) -> bool:
    """Whether a process of this machine builds in `folder`: it has torch's lock open, or is ninja and runs there."""
    processes, lock = Path("/proc"), folder / "lock"
    return any(_same(each, lock) for each in processes.glob("[0-9]*/fd/*")) or any(
        _same(each, folder) and _called(each.parent) == "ninja" for each in processes.glob("[0-9]*/cwd")
    )


def _called(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return ""


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # a file was removed, or belongs to another user
        return False


def _import(name: str, file: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None, "the name of a shared library"
    assert specification.loader is not None, "it has a loader"
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
