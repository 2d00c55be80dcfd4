"""Test packages of contrib/ with their engines, each in an environment of its own: `make test-engines`.

    python scripts/engines.py [NAME ...] [--quick] [-- ARGUMENTS OF PYTEST]

A package has an engine if it has a file `engine.lock`: requirements with exact versions, installed without their
dependencies. Comments of that file change what is done:

    # torch: own      nothing of the calling environment is visible: the lock has torch, too
    # quick           it installs in seconds, and is tested by `make test`

The module `build` of the package, if there is one, builds what pip does not have as a wheel. Environments are kept in
the user's cache directory, and made again when the lock, the script that builds, Python or torch changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import version
from pathlib import Path

from attrs import define

ROOT = Path(__file__).parents[1]


@define
class Engine:
    """A package of contrib/ that has an engine."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def lock(self) -> Path:
        return self.folder / "engine.lock"

    @property
    def module(self) -> str:
        project = tomllib.loads((self.folder / "pyproject.toml").read_text())
        module: str = project["tool"]["flit"]["module"]["name"]
        return module

    @property
    def build(self) -> Path:
        return self.folder / self.module / "build.py"

    @property
    def has_own_torch(self) -> bool:
        return "# torch: own" in self.lock.read_text().splitlines()

    @property
    def is_quick(self) -> bool:
        return "# quick" in self.lock.read_text().splitlines()

    def environment(self) -> Path:
        """Return the Python of the environment; make it if it does not exist."""
        parts = [self.lock.read_bytes(), sys.version.encode(), version("torch").encode(), str(ROOT).encode()]
        parts += [self.build.read_bytes()] if self.build.exists() else []
        key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "stratagem" / "engines" / f"{self.name}-{key}"
        python = folder / "bin" / "python"
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            self._make(folder, python)
            (folder / "complete").touch()
        return python

    def _make(self, folder: Path, python: Path) -> None:
        print(f"{self.name}: making {folder}", flush=True)
        venv.create(folder, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        if not self.has_own_torch:
            ours = sysconfig.get_path("purelib")
            paths = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
            (Path(paths) / "calling_environment.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        tools = [line for line in self.lock.read_text().splitlines() if line.startswith(("setuptools", "wheel"))]
        if tools:  # sdists of old engines are built with these, not with newer ones
            subprocess.run([*pip, *tools], check=True)
        subprocess.run([*pip, "--no-build-isolation", "-r", self.lock], check=True)
        if self.has_own_torch:
            editable = [
                line.split() for line in (ROOT / "plugins" / "all.txt").read_text().splitlines() if "-e" in line
            ]
            paths = [part.split("[")[0] for _, part in editable]
            subprocess.run(
                [*pip, "--no-build-isolation", *(word for path in paths for word in ("-e", path))], cwd=ROOT, check=True
            )
        if self.build.exists():
            subprocess.run([python, self.build], check=True)

    def test(self, arguments: list[str]) -> int:
        """Install the package as it is now, and run its tests; return the exit code."""
        python = self.environment()
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "--force-reinstall", "--no-build-isolation", self.folder], check=True)
        tests = sorted(self.folder.glob("test_*.py"))
        command = [
            python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            f"--rootdir={self.folder}",
            "-q",
            *arguments,
            *tests,
        ]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"}
        return subprocess.run(command, cwd=self.folder, env=variables, check=False).returncode


def engines() -> list[Engine]:
    """Return the packages of contrib/ that have an engine."""
    return [Engine(path.parent) for path in sorted(ROOT.glob("contrib/*/engine.lock"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="folders of contrib/; all that have an engine if none is given"
    )
    parser.add_argument("--quick", action="store_true", help="only those that install in seconds")
    own, _, pytest = "\0".join(sys.argv[1:]).partition("\0--\0")
    options = parser.parse_args([word for word in own.split("\0") if word])
    known = {engine.name: engine for engine in engines()}
    if unknown := set(options.names) - set(known):
        parser.error(f"{', '.join(sorted(unknown))} has no engine.lock; expected some of {', '.join(known)}")
    chosen = [known[name] for name in options.names or known]
    codes = {
        engine.name: engine.test([word for word in pytest.split("\0") if word])
        for engine in chosen
        if engine.is_quick or not options.quick
    }
    for name, code in codes.items():
        print(f"{name}: {'passed' if code == 0 else f'failed with exit code {code}'}")
    return max(codes.values(), default=0)


if __name__ == "__main__":
    sys.exit(main())
