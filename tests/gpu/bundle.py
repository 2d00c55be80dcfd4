"""Write a folder with which the GPU tests and benchmarks run on a machine that has Python, torch and no network.

    python tests/gpu/bundle.py [--into gpu-bundle] [--python 3.11 --python 3.12]

Run it where stratagem, its plugins and the tools of its tests are installed: their versions are the ones that go into the
folder, as wheels; compiled ones for each version of Python. torch and what torch itself needs stay out.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
#: What the tests import beside the packages.
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "torchdata", "torchmetrics")
#: torch is on the machine; tensorboard would be half of the bundle.
LEFT_OUT = {"torch", "tensorboard", "torchvision"}
#: C libraries that a machine may have; pip matches each tag exactly.
GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)

RUN = """#!/bin/sh
# run test | bench | llama [--help]: with $PYTHON, or the python3 of this machine; it needs torch and nothing else.
here=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python3}" "$here/tests/gpu/run.py" "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "gpu-bundle")
    parser.add_argument("--python", action="append", help="a version of Python that the machine may have")
    arguments = parser.parse_args()
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    pythons = sorted(set(arguments.python or ["3.11", "3.12"]))
    with tempfile.TemporaryDirectory(prefix="bundle-", dir=arguments.into.parent) as name:
        folder = Path(name) / "bundle"
        wheels = folder / "wheels"
        (wheels / "any").mkdir(parents=True)
        copy_sources(folder)
        build(wheels / "any")
        for python in pythons:
            download(packages(python), python, wheels)
        (folder / "manifest.json").write_text(json.dumps(manifest(wheels, pythons, here), indent=1) + "\n")
        (folder / "run").write_text(RUN)
        (folder / "run").chmod(0o755)
        shutil.rmtree(arguments.into, ignore_errors=True)
        folder.rename(arguments.into)
    size = sum(path.stat().st_size for path in arguments.into.rglob("*") if path.is_file())
    print(f"{arguments.into}: {size / 1e6:.0f} MB, for Python {' and '.join(pythons)} on {platform.machine()}")


def copy_sources(folder: Path) -> None:
    """Copy the tests and the benchmarks into `folder`."""
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (folder / "benchmarks").mkdir()
    for name in ("gpu.py", "llama.py"):
        shutil.copy(ROOT / "benchmarks" / name, folder / "benchmarks")
    shutil.copy(ROOT / "pyproject.toml", folder)  # pytest's options


def build(folder: Path) -> None:
    """Write wheels of stratagem and all its plugins into `folder`."""
    projects = [ROOT / "core", *(path.parent for path in sorted(ROOT.glob("plugins/*/pyproject.toml")))]
    projects.append(ROOT / "contrib" / "dp")  # tests train under it
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, *projects)


def packages(python: str) -> dict[str, str]:
    """Return what the packages and their tests need under that version of Python: names and installed versions."""
    environment = default_environment() | {"python_version": python, "python_full_version": f"{python}.0"}
    ours = [
        str(name) for each in importlib.metadata.distributions() if (name := each.metadata["Name"]).startswith("stratagem-")
    ]  # fmt: skip
    needed: dict[str, str] = {}
    nothing: frozenset[str] = frozenset()
    chosen = {"stratagem-core": {"cli"}, "stratagem-checkpoints": {"safetensors"}}
    waiting = [
        *((name, frozenset(extras)) for name, extras in chosen.items()),
        *((name, nothing) for name in (*ours, *TOOLS)),
    ]
    seen = set()
    while waiting:
        name, extras = waiting.pop()
        key = canonicalize_name(name)
        if (key, extras) in seen or key in LEFT_OUT:
            continue
        seen.add((key, extras))
        distribution = importlib.metadata.distribution(name)
        if not key.startswith("stratagem"):
            needed[key] = distribution.version
        waiting += _requirements(distribution, extras, environment)
    return needed


def _requirements(
    distribution: importlib.metadata.Distribution, extras: Iterable[str], environment: dict[str, str]
) -> list[tuple[str, frozenset[str]]]:
    found = []
    for text in distribution.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate(environment | {"extra": extra}) for extra in ("", *extras)):
            found.append((requirement.name, frozenset(requirement.extras)))
    return found


def download(needed: dict[str, str], python: str, wheels: Path) -> None:
    """Put a wheel of each package into ``any``, or into the folder of that Python where it is compiled for one."""
    short = "cp" + python.replace(".", "")
    folder = wheels / short
    folder.mkdir()
    machine = platform.machine()
    tags = [f"manylinux{version}_{machine}" for version in (*(f"_2_{number}" for number in GLIBC), "2014", "2010", "1")]
    where = ["--python-version", python, "--implementation", "cp", *(f"--platform={tag}" for tag in tags)]
    sources = {"deepspeed"}  # published as a source alone; it compiles its operations where it runs
    pip(
        "download", "--no-deps", "--only-binary=:all:", *where, "--dest", folder,
        *(f"{name}=={version}" for name, version in needed.items() if name not in sources),
    )  # fmt: skip
    for name in sources & needed.keys():
        if not list((wheels / "any").glob(f"{name}-*.whl")):
            pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels / "any", f"{name}=={needed[name]}",
                DS_BUILD_OPS="0", CUDA_VISIBLE_DEVICES="")  # fmt: skip
    for wheel in folder.glob("*-none-any.whl"):
        wheel.replace(wheels / "any" / wheel.name)


def pip(*arguments: object, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ... failed:\n{done.stdout}{done.stderr}")


def manifest(wheels: Path, pythons: list[str], here: str) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "made_with": {"python": here, "torch": importlib.metadata.version("torch")},
        "pythons": pythons,
        "machine": platform.machine(),
        "wheels": {each.name: sorted(path.name for path in each.glob("*.whl")) for each in sorted(wheels.iterdir())},
    }


if __name__ == "__main__":
    main()
