"""Give all distributions a version: `make version VERSION=0.2.0`.

    python scripts/version.py VERSION

Writes it into each pyproject.toml of ours, core/stratagem/_version.py and conda/recipe.yaml. What our distributions,
those of examples/, the template of new plugins and the pages for their authors require of ours is then the same minor
version.
"""

from __future__ import annotations

import re
import sys

from environment import ROOT, call, projects

_OWN = re.compile(r'^(version = |__version__: Final = |  version: )".+"', re.MULTILINE)
_REQUIRED = re.compile(r"(stratagem[a-z-]*(?:\[[a-z,]+\])?)>=\d+\.\d+,<\d+\.\d+")
#: Where one of both is.
_FILES = (
    "*.toml", "*.toml.txt", ":(glob)docs/*.md", "core/stratagem/_version.py", "conda/recipe.yaml",
    "*/stratagem_devtools/scaffold.py",
)  # fmt: skip


def main(version: str) -> None:
    major, minor = map(int, version.split(".")[:2])
    own = {ROOT / name for name in ("core/stratagem/_version.py", "conda/recipe.yaml")}
    own |= {project.folder / "pyproject.toml" for project in projects()}
    for path in (ROOT / name for name in call("git", "ls-files", *_FILES).splitlines()):
        text = _REQUIRED.sub(rf"\1>={major}.{minor},<{major}.{minor + 1}", path.read_text())
        path.write_text(_OWN.sub(rf'\g<1>"{version}"', text, count=1) if path in own else text)


if __name__ == "__main__":
    main(*sys.argv[1:])
