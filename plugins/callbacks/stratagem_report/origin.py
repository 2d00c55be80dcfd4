"""Where a run comes from, and what it wrote: command line, commit, and files."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from stratagem.api.options import redact
from stratagem.api.paths import as_path, is_remote

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView

#: Seconds for git to answer.
_GIT_S = 5.0


def written_files(trainer: TrainerView, page: Path) -> list[tuple[str, str, str]]:
    """Return title, path and address relative to `page` of each file that plugins have written and that exists."""
    found = []
    for title, path in trainer.run.stack.written_files().items():
        if is_remote(as_path(path)):
            found.append((title, path, ""))
        elif os.path.exists(path) and not _same(path, page):
            found.append((title, path, quote(os.path.relpath(path, page.absolute().parent))))
    return found


def _same(path: str, page: Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(page)


def origin() -> list[tuple[str, str]]:
    """Return the command line without secrets, and the commit of the current folder, if it is in a repository."""
    commit = _commit(os.getcwd())
    return [("command line", command_line(sys.argv)), *([("git commit", commit)] if commit else [])]


def command_line(words: list[str]) -> str:
    """Return `words` as a shell would read them; values of options whose names look like secrets are hidden."""
    shown: list[str] = []
    for word, before in zip(words, ["", *words], strict=False):
        name, equals, value = word.partition("=")
        if equals and name.startswith("-"):
            word = f"{name}={redact(name.lstrip('-'), value)}"
        elif before.startswith("-") and "=" not in before and not word.startswith("-"):
            word = str(redact(before.lstrip("-"), word))
        shown.append(word)
    return " ".join(map(shlex.quote, shown))


@functools.cache
def _commit(folder: str) -> str:
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit[:12]}, with changes that are not committed" if changed else commit[:12]


def _git(folder: str, *words: str) -> str:
    """Return what git prints; "" without git, outside a repository, or if it takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", folder, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
