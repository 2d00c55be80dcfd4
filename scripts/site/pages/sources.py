"""The file that a person edits to change a page of the reference."""

from __future__ import annotations

import inspect
from pathlib import Path

from pages.plugins import SPLIT, all_plugins, by_class, path_of

_FILES = {
    "index.md": "README.md",
    "changelog.md": "docs/changes",
    "reference/trainer.md": "plugins/trainer/stratagem_trainer/settings.py",
    "reference/run.md": "core/stratagem/config/settings.py",
    "reference/module.md": "plugins/trainer/stratagem_trainer/module.py",
    "reference/datamodule.md": "plugins/trainer/stratagem_trainer/datamodule.py",
    "reference/bases.md": "core/stratagem/api/kinds.py",
    "reference/context.md": "core/stratagem/api/context.py",
    "reference/commands.md": "core/stratagem/cli.py",
    "reference/errors.md": "core/stratagem/errors.py",
}  # fmt: skip


def of(page: str, root: Path) -> str:
    """Return the path of the file from which `page` is written: of a strategy, the module of its class."""
    if page in _FILES:
        return _FILES[page]
    classes = by_class([each for each in all_plugins(root) if each.entry.kind == SPLIT])
    for cls, plugins in classes.items():
        if page == path_of(SPLIT, plugins):
            found = Path(inspect.getsourcefile(cls) or "")
            return found.relative_to(root).as_posix() if found.is_relative_to(root) else ""
    return "plugins"
