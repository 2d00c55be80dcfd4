"""The distributions of this repository, and clean environments into which their wheels are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"


@frozen
class Project:
    """A distribution of this repository."""

    folder: Path
    name: str
    version: str

    @property
    def wheel(self) -> Path:
        return DIST / f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def license(self) -> str:
        """The name of the license in the wheel."""
        return f"{self.name.replace('-', '_')}-{self.version}.dist-info/licenses/LICENSE"

    @property
    def is_third_party(self) -> bool:
        return self.folder.parent.name == "contrib"

    def source_files(self) -> set[str]:
        """Return the files that the wheel must have, as they are named in it."""
        listed = call("git", "ls-files", cwd=self.folder)
        return {name for name in listed.splitlines() if name.startswith("stratagem")}


def projects() -> list[Project]:
    """Return what is released; contrib/template is what `stratagem plugins new` writes, and no package of ours."""
    found = []
    for pattern in ("pyproject.toml", "core/pyproject.toml", "plugins/*/pyproject.toml", "contrib/*/pyproject.toml"):
        for path in sorted(ROOT.glob(pattern)):
            if path.parent.name != "template":
                project = tomllib.loads(path.read_text())["project"]
                found.append(Project(path.parent, project["name"], project["version"]))
    return found


def call(*command: object, cwd: Path = ROOT) -> str:
    """Run a program and return its output; exit with that output if it fails."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\nexited with {done.returncode}:\n{done.stdout}")
    return done.stdout


def uv(*arguments: object) -> str:
    beside = Path(sys.executable).with_name("uv")
    return call(beside if beside.exists() else "uv", *arguments)


@frozen
class Environment:
    """A clean environment in `folder`, in which our distributions can come from dist/ alone."""

    folder: Path
    torch: str
    constraints: Path

    @classmethod
    def make(cls, folder: Path, torch: str) -> Environment:
        uv("venv", "--quiet", "--python", sys.executable, folder)
        constraints = folder / "constraints.txt"
        constraints.write_text("".join(f"{each.name} @ {each.wheel.as_uri()}\n" for each in projects()))
        return cls(folder, torch, constraints)

    def copy(self, folder: Path) -> Environment:
        """Return an environment with the same packages, its files hard links to the ones here, compiled ones too."""
        shutil.copytree(self.folder, folder, copy_function=os.link, symlinks=True)
        return Environment(folder, self.torch, self.constraints)

    def install(self, *requirements: str) -> None:
        uv(
            "pip",
            "install",
            "--quiet",
            "--python",
            self.python,
            "--constraints",
            self.constraints,
            self.torch,
            *requirements,
        )
        uv("pip", "check", "--quiet", "--python", self.python)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *arguments: object) -> str:
        return call(self.python, "-P", *arguments, cwd=self.folder)

    def stratagem(self, *arguments: object) -> str:
        return call(self.folder / "bin" / "stratagem", *arguments, cwd=self.folder)
