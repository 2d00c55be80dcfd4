"""Test packages of contrib/ with their engines, each in an environment of its own: `make test-engines`.

    python scripts/engines.py [NAME ...] [--quick] [-- ARGUMENTS OF PYTEST]

A package has an engine if it has a file `engine.lock`: requirements with exact versions, installed without their
dependencies. Comments of that file change what is done:

    # torch: own      nothing of the calling environment is visible: the lock has torch, too
    # quick           it installs in seconds, and is tested by `make test`

The module `build` of the package, if there is one, builds what pip does not have as a wheel. Environments are kept in
the user's cache directory, and made again when the lock, the script that builds, Python or torch changed.

A package whose engine cannot be installed, or whose tests fail, does not stop the others. The last lines tell the
result of each; the exit code is 0 if all passed, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from attrs import define, frozen

ROOT = Path(__file__).parents[1]


@frozen
class Result:
    """How the tests of a package ended."""

    name: str
    #: Whether the engine was installed, and no test failed.
    passed: bool
    details: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name:20} {'passed' if self.passed else 'FAILED':7} {self.details}, {self.seconds:.0f} s"


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
            try:
                self._make(folder, python)
            except BaseException:  # nothing uses a part of an environment, which may have gigabytes
                shutil.rmtree(folder, ignore_errors=True)
                raise
            (folder / "complete").touch()
        if self.has_own_torch:
            self._install_ours(folder, python)
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
        if self.build.exists():
            subprocess.run([python, self.build], check=True)

    def _install_ours(self, folder: Path, python: Path) -> None:
        """Install the packages of this repository as editable ones, unless it was done for what they declare now."""
        lines = [line.split() for line in (ROOT / "plugins" / "all.txt").read_text().splitlines() if "-e" in line]
        paths = [part.split("[")[0] for _, part in lines]
        declared = hashlib.sha256(
            b"\0".join((ROOT / path / "pyproject.toml").read_bytes() for path in paths)
        ).hexdigest()
        done = folder / "declared"
        if not done.exists() or done.read_text() != declared:
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            editable = [word for path in paths for word in ("-e", path)]
            subprocess.run([*pip, "--no-build-isolation", *editable], cwd=ROOT, check=True)
            done.write_text(declared)

    def test(self, arguments: list[str]) -> Result:
        """Install the package as it is now, and run its tests with these arguments of pytest."""
        print(f"\n=== {self.name}", flush=True)
        start = time.monotonic()
        try:
            python = self.environment()
            self._install_package(python)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{self.name}: {error}", flush=True)
            return Result(self.name, False, "its environment could not be made", time.monotonic() - start)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            code = self._run_tests(python, [f"--junitxml={report}", *arguments])
            found = [counts(report)] if report.exists() else []
        if code not in (0, 1):  # no test was chosen, or one ended the process
            found.append(f"pytest ended with exit code {code}")
        details = ", ".join(found)
        return Result(self.name, code == 0, details, time.monotonic() - start)

    def _install_package(self, python: Path) -> None:
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--force-reinstall", "--no-build-isolation", self.folder], check=True)

    def _run_tests(self, python: Path, arguments: list[str]) -> int:
        tests = sorted(self.folder.glob("test_*.py"))
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={self.folder}", "-q", *arguments]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"}
        return subprocess.run([*command, *tests], cwd=self.folder, env=variables, check=False).returncode


def counts(report: Path) -> str:
    """Return the numbers of tests in a report of pytest (JUnit XML) as text, such as "12 passed, 1 skipped"."""
    suites = list(ElementTree.parse(report).iter("testsuite"))  # noqa: S314 - pytest wrote it
    number = {
        word: sum(int(suite.get(word, 0)) for suite in suites) for word in ("tests", "failures", "errors", "skipped")
    }
    passed = number["tests"] - number["failures"] - number["errors"] - number["skipped"]
    others = {"failed": number["failures"], "errors": number["errors"], "skipped": number["skipped"]}
    return ", ".join([f"{passed} passed", *(f"{count} {word}" for word, count in others.items() if count)])


def engines() -> list[Engine]:
    """Return the packages of contrib/ that have an engine."""
    return [Engine(path.parent) for path in sorted(ROOT.glob("contrib/*/engine.lock"))]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="folders of contrib/; all that have an engine if none is given"
    )
    parser.add_argument("--quick", action="store_true", help="only those that install in seconds")
    border = arguments.index("--") if "--" in arguments else len(arguments)
    own, pytest = arguments[:border], arguments[border + 1 :]
    options = parser.parse_args(own)
    known = {engine.name: engine for engine in engines()}
    if unknown := set(options.names) - set(known):
        parser.error(f"{', '.join(sorted(unknown))} has no engine.lock; expected some of {', '.join(known)}")
    chosen = [known[name] for name in options.names or known]
    results = [engine.test(pytest) for engine in chosen if engine.is_quick or not options.quick]
    print("\n" + "\n".join(map(str, results)), flush=True)
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
