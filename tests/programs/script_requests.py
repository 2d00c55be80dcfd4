"""Requests to a process that has imported torch: which commands can run in a fork of it, and how they are described."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from stratagem_testing.processes import LAUNCH_VARIABLES

#: Read at start-up: a fork puts these folders into `sys.path`.
_SEARCHED = "PYTHONPATH"
_PATH = tuple(sys.path)

#: Variables that no import of the server reads. A command with another value of any other variable gets an interpreter
#: of its own. (scikit-learn, torch's compiler, DeepSpeed and MLflow set the last five when they are imported.)
_READ_LATE = (
    *LAUNCH_VARIABLES, "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "COLUMNS", "LINES", "PWD",
    "OLDPWD", "SHLVL", _SEARCHED, "_", "NO_COLOR", "TERM", "TMPDIR",
    "CUBLAS_WORKSPACE_CONFIG", "DS_ACCELERATOR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK", "_MLFLOW_TELEMETRY_SESSION_ID", "MPLBACKEND",
)  # fmt: skip
_READ_LATE_PREFIXES = (
    "STRATAGEM_", "PYTEST_", "TORCHELASTIC_", "HF_", "GLOO_", "NCCL_", "TORCH_NCCL_", "SLURM_", "OMPI_", "PMI_", "PMIX_",
)  # fmt: skip


def request_of(
    arguments: tuple[Any, ...], environment: Mapping[str, str]
) -> tuple[dict[str, Any], list[int], Any] | None:
    """Return what to ask a server, its standard streams and its ``preexec_fn``; None where it needs an interpreter.

    Args:
        arguments: Those of `subprocess.Popen._execute_child`, in the order of Python 3.11 to 3.14.
        environment: The variables that the server had when it imported.
    """
    command, executable, preexec_fn, close_fds, pass_fds, cwd, env = arguments[:7]
    shell, pipes = arguments[9], arguments[10:16]
    unusual = executable or not close_fds or pass_fds or shell or not arguments[16]
    others = (*((each, None) for each in arguments[17:20]), (arguments[20], -1), (arguments[22], -1))
    if unusual or not all(value in (None, usual) for value, usual in others):
        return None
    request = _request(command, cwd, env, arguments[21], environment)
    if request is None:
        return None
    streams: list[int] = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
    return request, streams, preexec_fn


def spawn_request(
    words: Sequence[Any], passed: Iterable[int], environment: Mapping[str, str]
) -> tuple[dict[str, Any], list[int], Any] | None:
    """Return the same for a process that multiprocessing spawns, which gets the descriptors `passed`."""
    request = _request([os.fsdecode(word) for word in words], None, None, False, environment)
    if request is None or words[-1] != "--multiprocessing-fork":
        return None
    numbers = sorted({0, 1, 2, *passed})
    return request | {"numbers": numbers, "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ())}, numbers, None


def _request(
    command: Any, cwd: Any, env: Mapping[str, str] | None, new_session: bool, environment: Mapping[str, str]
) -> dict[str, Any] | None:
    words = [os.fspath(word) for word in ([command] if isinstance(command, str | os.PathLike) else command)]
    folder = os.path.abspath(cwd or os.getcwd())
    variables = dict(os.environ if env is None else env)
    if sys.platform != "linux" or not os.path.isdir(folder) or not all(isinstance(word, str) for word in words):
        return None
    differing = [name for name in variables | dict(environment) if variables.get(name) != environment.get(name)]
    if variables.get("OMP_NUM_THREADS") != "1" or not all(_is_read_late(name) for name in differing):
        return None
    added = _folders(variables, folder) if _SEARCHED in differing else []
    if _SEARCHED in differing and (_SEARCHED in environment or _hide_a_module(added)):
        return None
    unbuffered = words[:2] == [sys.executable, "-u"]
    program = _program(words[:1] + words[2:] if unbuffered else words, folder)
    return program and {
        "program": program, "unbuffered": unbuffered, "cwd": folder, "env": variables, "new_session": new_session,
        "command": words if words[0] == sys.executable else [sys.executable, *words],
        "path": added, "own_variables": [f"{name}={variables[name]}" for name in differing if name in variables],
    }  # fmt: skip


def _folders(variables: Mapping[str, str], folder: str) -> list[str]:
    """Return what PYTHONPATH adds to `sys.path` of a program that starts in `folder`."""
    named = variables.get(_SEARCHED)
    return [os.path.abspath(os.path.join(folder, each)) for each in named.split(os.pathsep)] if named else []


def _hide_a_module(folders: Sequence[str]) -> bool:
    """Whether `folders` have modules of their own with names of those that an interpreter, torch or stratagem may import."""
    if any(map(os.path.isfile, folders)):  # ZIP files
        return True
    names = {each.name.partition(".")[0] for folder in filter(os.path.isdir, folders) for each in _modules(folder)}
    known = [name for name in names if name in _known_modules() or name in sys.modules or name.startswith("stratagem")]
    return any(_origin(name, [*folders, *_PATH]) != _origin(name, _PATH) for name in known)


def _modules(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return list(filter(_is_module, found))


def _is_module(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir():
        return os.path.isfile(os.path.join(entry.path, "__init__.py"))  # others do not come before a module
    return entry.name.endswith((".py", ".pyc", ".so"))


def _origin(name: str, folders: Sequence[str]) -> str | None:
    spec = PathFinder.find_spec(name, folders)
    return spec and spec.origin


@cache
def _known_modules() -> frozenset[str]:
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    names = {each.name.partition(".")[0] for folder in installed for each in _modules(folder)}
    return frozenset(names | sys.stdlib_module_names | {"sitecustomize", "usercustomize"})


def _is_read_late(name: str) -> bool:
    return name in _READ_LATE or name.startswith(_READ_LATE_PREFIXES)


def _program(words: list[str], folder: str) -> tuple[str, str, list[str]] | None:
    """Return how a Python program is given ("file", "c" or "m"), its name or code, and its arguments."""
    if words[0] == sys.executable and words[1:]:
        words = words[1:]
        if words[0] in ("-c", "-m") and words[1:]:
            return words[0][1], words[1], words[2:]
    elif not _is_script_of_this_environment(words[0]):
        return None
    is_file = not words[0].startswith("-") and os.path.isfile(os.path.join(folder, words[0]))
    return ("file", words[0], words[1:]) if is_file else None


def _is_script_of_this_environment(name: str) -> bool:
    """Whether `name` is a script that pip made from an entry point."""
    path = Path(name)
    if path.parent != Path(sys.executable).parent or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().rstrip() == f"#!{sys.executable}".encode()
