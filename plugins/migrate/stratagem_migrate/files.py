"""Read, compare and rewrite the files that `stratagem migrate` is given."""

from __future__ import annotations

import difflib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from attrs import frozen

from stratagem.api.paths import replacing
from stratagem.errors import ConfigError
from stratagem_migrate.findings import Finding

YAML: Final = (".yaml", ".yml")
NOTEBOOK: Final = ".ipynb"
_SUFFIXES: Final = (".py", NOTEBOOK, *YAML)
#: Folders that hold no scripts of the user.
_SKIPPED: Final = ("node_modules", "site-packages", "__pycache__")


class ProjectFile:
    """A file of a project, parsed; `text` is the script or the YAML in it."""

    path: Path
    text: str
    encoding: str

    def with_text(self, text: str) -> Self:
        """Return this file with another text, parsed."""
        raise NotImplementedError

    def in_file(self, text: str) -> str:
        """Return what the file holds if its text is `text`."""
        return text

    def placed(self, finding: Finding) -> Finding:
        """Return a finding about the text with its place in the file."""
        return finding


@frozen
class Rewritten:
    """What a file holds, and what it should hold."""

    path: Path
    old: str
    new: str
    encoding: str

    @property
    def is_changed(self) -> bool:
        return self.old != self.new

    def diff(self) -> str:
        """Return a unified diff, as `patch` reads it."""
        lines = difflib.unified_diff(
            self.old.splitlines(keepends=True), self.new.splitlines(keepends=True), str(self.path), str(self.path)
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def line_before(old: str, new: str, line: int) -> int:
    """Return the line of `old` that line `line` of `new` comes from."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    for _, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if new_start < line <= new_end:
            return min(old_start + line - new_start, max(old_end, 1))
    return line


def scripts(paths: Iterable[str]) -> list[Path]:
    """Return the scripts, notebooks and YAML files of `paths`, including those in folders.

    Raises:
        ConfigError: a folder has none, or cannot be read.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        inside = sorted(_inside(path)) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(f"{path} is a folder without a .py file", expected="scripts", do="check the path")
        found |= dict.fromkeys(inside)
    return list(found)


def _inside(folder: Path) -> Iterable[Path]:
    """Yield the files below a folder; not those of environments, and hidden folders."""
    for above, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [
            each for each in folders
            if not each.startswith(".") and each not in _SKIPPED and not Path(above, each, "pyvenv.cfg").exists()
        ]  # fmt: skip
        yield from (Path(above, name) for name in names if name.endswith(_SUFFIXES))


def _refuse(error: OSError) -> None:
    raise ConfigError(f"{error.filename} cannot be read ({error.strerror})", expected="a folder that can be read")


def write(files: Iterable[Rewritten], force: bool) -> None:
    """Write the new texts: each file is replaced as a whole and keeps its mode.

    Raises:
        ConfigError: git could not restore one of the files, so that none is written; or one cannot be written.
    """
    changed = [each for each in files if each.is_changed]
    for file in () if force else changed:
        if problem := _unsaved(file.path):
            raise ConfigError(
                f"--write would change {file.path}, which {problem}", expected="files that git can restore",
                do="commit it first, or pass --force; --diff shows the changes; nothing was written",
            )  # fmt: skip
    for file in changed:
        try:
            _replace(file.path.resolve(), file.new.encode(file.encoding))
        except (OSError, UnicodeEncodeError) as error:
            raise ConfigError(
                f"{file.path} cannot be written ({error})", expected="a file that can be written"
            ) from error


def _unsaved(path: Path) -> str:
    """Return why git could not restore a file; an empty string if it could."""
    path = path.resolve()
    try:
        done = subprocess.run(
            ["git", "-C", str(path.parent), "status", "--porcelain", "--ignored", "--", path.name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return "is not in a repository: git is not installed"
    if done.returncode != 0:
        return "is not in a git repository"
    return "has uncommitted changes" if done.stdout.strip() else ""


def _replace(path: Path, content: bytes) -> None:
    with replacing(path, durable=True) as file:
        os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
        file.write(content)
