"""Build Horovod 0.28.1 for the installed torch, and install it: `python -m stratagem_horovod.build`.

Horovod exists as source only, and that asks for C++14 where the headers of today's torch need C++20. Its scripts remove
a standard from CXXFLAGS, so the compiler is wrapped. The wheel is kept in the user's cache directory, one for each
version of torch and Python. Variables of Horovod that are set (HOROVOD_GPU_OPERATIONS=NCCL ...) come before those here.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HOROVOD = "0.28.1"
#: What the build imports; torch must be there already.
TOOLS = {"setuptools": "setuptools<81", "wheel": "wheel", "packaging": "packaging", "cffi": "cffi"}
PROGRAMS = {"cmake": "pip install cmake", "c++": "install a C++ compiler, such as g++ 11", "make": "install make"}


def variables() -> dict[str, str]:
    """Return the variables that choose what is built: gloo and torch only, unless the user's say otherwise."""
    ours = {f"HOROVOD_WITHOUT_{name}": "1" for name in ("TENSORFLOW", "MXNET", "MPI")}
    ours |= {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_GLOO": "1"}
    theirs = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    for name in theirs:  # each contradicts the other
        ours.pop(name.replace("_WITH_", "_WITHOUT_"), None)
    return ours | theirs


def cached(chosen: dict[str, str]) -> Path:
    """Return the folder that holds the wheel for this torch, this Python and these variables."""
    parts = [sysconfig.get_platform(), sys.version, version("torch"), *(f"{k}={v}" for k, v in sorted(chosen.items()))]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "stratagem" / "horovod" / f"{HOROVOD}-torch{version('torch')}-{key}"


def build(folder: Path, chosen: dict[str, str]) -> Path:
    """Build the wheel into ``folder`` and return its path."""
    if missing := [what for name, what in TOOLS.items() if find_spec(name) is None]:
        raise SystemExit(f"the build of Horovod imports {', '.join(missing)}: run `pip install {shlex.join(missing)}`")
    compiler = os.environ.get("CXX") or shutil.which("c++") or "c++"
    # `pip install cmake` is found, too, where the environment is not active.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    programs = {name: shlex.split(compiler)[0] if name == "c++" else name for name in PROGRAMS}
    if lacking := [PROGRAMS[name] for name, program in programs.items() if shutil.which(program, path=path) is None]:
        raise SystemExit(f"a program that builds Horovod is missing: {'; '.join(lacking)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        wrapper = Path(temporary, "cxx")
        wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" -std=gnu++20 -w\n')  # the last -std is used
        wrapper.chmod(0o755)
        environment = os.environ | chosen | {"CXX": str(wrapper), "PATH": path}
        environment.setdefault("MAKEFLAGS", "-j2")
        environment.setdefault("CMAKE_POLICY_VERSION_MINIMUM", "3.5")  # CMake 4 refuses its third parties otherwise
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        built = Path(temporary, "wheels")
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", str(built)]
        subprocess.run([*pip, *options, f"horovod=={HOROVOD}"], env=environment, check=True)
        shutil.rmtree(folder, ignore_errors=True)
        built.rename(folder)
    return wheel_in(folder)


def wheel_in(folder: Path) -> Path:
    return next(folder.glob("horovod-*.whl"))


def main() -> None:
    chosen = variables()
    folder = cached(chosen)
    if not folder.exists():
        print(f"building Horovod {HOROVOD} for torch {version('torch')}, which takes some minutes", flush=True)
        build(folder, chosen)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--force-reinstall", wheel_in(folder)], check=True)


if __name__ == "__main__":
    main()
