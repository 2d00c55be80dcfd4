"""Building DeepSpeed's ops: once on a machine, whoever asks first, and what to say where that is not possible.

[Note: whose build it is]
An op is a shared library in a folder of its own. torch compiles it there, guarded by a file named ``lock`` that a
killed build leaves behind; whoever comes later waits for that file to go, forever. So we hold a lock of the kernel's
around torch's, which ends with its process: whoever has ours and sees nobody at work in the folder takes torch's away.

torch also compiles again whenever a path in the command changes, as it does from one virtual environment to the next.
What we built carries a mark of all that it depends on (the versions of Python, torch and deepspeed, the CPU) and is
loaded without asking torch, or a compiler, as long as the mark fits.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
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
    #: The class of deepspeed that builds it.
    builder: str
    #: How to do without it.
    otherwise: str


_ADAM = 'use an optimizer of torch\'s ("torch_adam": true in a configuration)'

#: The ops that a training may need, by name.
OPS = {
    "cpu_adam": _Op("CPUAdamBuilder", _ADAM),
    "cpu_adagrad": _Op("CPUAdagradBuilder", "use torch.optim.Adagrad"),
    "cpu_lion": _Op("CPULionBuilder", "use an optimizer of torch's"),
    "fused_adam": _Op("FusedAdamBuilder", _ADAM),
    "fused_lion": _Op("FusedLionBuilder", "use an optimizer of torch's"),
    "fused_lamb": _Op("FusedLambBuilder", "use an optimizer of torch's"),
    "async_io": _Op("AsyncIOBuilder", "offload to the CPU in place of NVMe"),
    "pin_memory": _Op("PinMemoryBuilder", "unset DS_PIN_MEMORY_BACKEND and offload to the CPU in place of NVMe"),
}


#: deepspeed's own way to build an op, while ours is in its place.
_theirs: Callable[..., ModuleType] | None = None
#: This process tells the user what takes long.
_speaks = True


def take_over(*, speaks: bool) -> None:
    """Build every op that anything in this process asks deepspeed for as `prepare_ops` does. Safe to call twice.

    An optimizer of deepspeed's that a user makes loads its op by itself.
    """
    global _theirs, _speaks
    from deepspeed.ops.op_builder.builder import OpBuilder

    _speaks = speaks
    if _theirs is None:
        _theirs, OpBuilder.jit_load = OpBuilder.jit_load, _load


def give_back() -> None:
    """Undo `take_over`. Safe to call twice."""
    global _theirs, _speaks
    from deepspeed.ops.op_builder.builder import OpBuilder

    _speaks = True
    if _theirs is not None:
        OpBuilder.jit_load, _theirs = _theirs, None


def _load(builder: Any, verbose: bool = False) -> ModuleType:
    """Load an op, built if need be; what deepspeed calls for one that was not installed with it."""
    library = _library(builder)
    try:
        module = library.loaded() or _built(builder, library, verbose)
    except OSError as error:
        raise ConfigError(
            f"deepspeed's {builder.name} cannot be kept in {library.folder} ({error})",
            expected="a folder to write to, with space for 100 MB", do="set TORCH_EXTENSIONS_DIR to one",
        ) from error  # fmt: skip
    type(builder)._loaded_ops[builder.name] = module
    return module


def _built(builder: Any, library: _Library, verbose: bool) -> ModuleType:
    if not library.is_there():
        check_tools(builder)
        if _speaks:
            _say(f"building deepspeed's {builder.name} in {library.folder}, once on this machine; a few minutes")
    with library.locked():
        found = library.loaded()  # another process may have built it meanwhile
        if found is not None:
            return found
        library.clear()
        module = _compiled(builder, library, verbose)
        library.mark()
        return module


def _compiled(builder: Any, library: _Library, verbose: bool) -> ModuleType:
    assert _theirs is not None, "taken over before"
    try:
        with _variables(TORCH_EXTENSIONS_DIR=str(library.folder.parent), PATH=_path()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _theirs(builder, verbose)
    except Exception as error:
        raise unusable(builder.name, error) from error


def unusable(name: str, error: Exception) -> ConfigError:
    """Return what to raise where an op cannot be had."""
    return ConfigError(
        f"deepspeed's {name} could not be built and loaded on {socket.gethostname()} ({_root(error)})",
        do=_advice(name, "repair that"),
    )


def _root(error: Exception) -> str:
    """Return the line of what a compiler printed that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = [line for line in lines if "error:" in line.lower()]
    return (wrong or lines or [type(error).__name__])[0]


def _say(text: str) -> None:
    print(f"stratagem: {text}", file=sys.stderr, flush=True)


# --- What a build needs ------------------------------------------------------------------------------------------


def check_tools(builder: Any) -> None:
    """Refuse to begin without what the build of that op needs, unless there is nothing to build."""
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import get_cxx_compiler

    came_with_deepspeed = installed_ops.get(builder.name, False)
    if came_with_deepspeed or builder.name in builder._loaded_ops or _library(builder).is_there():
        return
    path = _path()
    for tool, package in ((shlex.split(get_cxx_compiler())[0], "apt-get install g++"), ("ninja", "pip install ninja")):
        if shutil.which(tool, path=path) is None:
            raise _lacking(builder.name, tool, package)
    if builder.name == "async_io":
        with _variables(PATH=path):
            if not builder.has_function("io_submit", ("aio",)):
                raise _lacking(builder.name, "libaio", "apt-get install libaio-dev")


def _lacking(name: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"deepspeed's {name} is built on the machine that uses it, and {what} is missing on {socket.gethostname()}",
        do=_advice(name, f"install it ({remedy})"),
    )


def _advice(name: str, remedy: str) -> str:
    return f"{remedy}, or {OPS[name].otherwise}" if name in OPS else remedy


def _path() -> str:
    """Return PATH, with the place where pip puts ninja: a virtual environment need not be activated to be used."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


@contextlib.contextmanager
def _variables(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- Where they are kept -----------------------------------------------------------------------------------------


def _library(builder: Any) -> _Library:
    return _Library(builder.name, _folder() / builder.name)


def _folder() -> Path:
    """Return where ops are kept: TORCH_EXTENSIONS_DIR, or a folder of the user's for what is installed here."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "stratagem" / "deepspeed" / _fingerprint()


def _fingerprint() -> str:
    """Return a word for all that a built op depends on."""
    import deepspeed

    facts = (
        sysconfig.get_config_var("SOABI") or sys.version, torch.__version__, str(torch.version.cuda),
        deepspeed.__version__, _cpu(), _devices(),
    )  # fmt: skip
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    return f"torch-{torch.__version__}-deepspeed-{deepspeed.__version__}-{digest}"


def _cpu() -> str:
    """Return the model of this CPU and what it can do: ops are compiled for it alone."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    told = [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")]
    return "\n".join([platform.machine(), *sorted(set(told))])


def _devices() -> str:
    """Return what kind of devices deepspeed is here for: an op for GPUs is compiled for those that are there."""
    from deepspeed.accelerator import get_accelerator

    kind: str = get_accelerator().device_name()
    numbers = range(torch.cuda.device_count() if kind == "cuda" else 0)
    return " ".join([kind, *sorted({str(torch.cuda.get_device_capability(number)) for number in numbers})])


@define
class _Library:
    """A built op, or the place where it will be."""

    name: str
    folder: Path

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.name}.so"

    @property
    def _mark(self) -> Path:
        return self.folder / "built-by-stratagem"

    def is_there(self) -> bool:
        """Whether torch would load what is in the folder as it is, as far as one can tell."""
        import deepspeed

        if self._mark.exists() and self._file.exists():
            return self._mark.read_text() == self._state()
        commands, package = self.folder / "build.ninja", str(Path(deepspeed.__file__).parent)
        return self._file.exists() and commands.exists() and package in commands.read_text()

    def loaded(self) -> ModuleType | None:
        """Load it, if it was built for what is installed here."""
        with contextlib.suppress(FileNotFoundError):
            if self._mark.read_text() == self._state():
                return _import(self.name, self._file)
        return None

    def mark(self) -> None:
        """Note what it was built for."""
        # torch gives a changed op another name, within one process; the next one finds it under its own.
        if self._file.exists():
            self._mark.write_text(self._state())

    def clear(self) -> None:
        """Take away what a killed build left, which would make torch wait for it. Whoever calls this holds the lock."""
        self._mark.unlink(missing_ok=True)
        if _is_worked_in(self.folder):  # by another program, or by a compiler that outlived who started it
            _say(f"waiting for another build of deepspeed's {self.name} in {self.folder}")
        while _is_worked_in(self.folder):
            time.sleep(0.2)
        left = self.folder / "lock"
        if left.exists():
            _say(f"removing {left}, left by a build of deepspeed's {self.name} that was killed")
            left.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; the kernel lets go when this one ends, however it ends."""
        from filelock import FileLock

        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "stratagem.stack.lock"):
            yield

    def _state(self) -> str:
        status = self._file.stat()
        return f"{_fingerprint()} {status.st_size} {status.st_mtime_ns}"


def _is_worked_in(folder: Path) -> bool:
    """Whether a process of this machine builds in `folder`: it has torch's lock open, or is a ninja that runs there."""
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
    except OSError:  # one is gone, or belongs to somebody else
        return False


def _import(name: str, file: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None, "the name of a shared library"
    assert specification.loader is not None, "of which Python knows the loader"
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
