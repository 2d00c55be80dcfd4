"""What the pages of reports, plans and post-mortems share: scales, drawings as SVG, a page in one file, its colours."""

from __future__ import annotations

from importlib.resources import files


def style(*names: str) -> str:
    """Return style sheets of this package. "palette" has colours of both schemes; its class ``c1`` is the first."""
    return "".join((files("stratagem_pictures") / f"{name}.css").read_text(encoding="utf-8") for name in names)
