"""Draw what a command printed as a terminal, in an SVG picture.

    stratagem demo --steps 100 > demo.txt
    head -n 18 demo.txt | python scripts/terminal.py "stratagem demo --steps 100" > docs/pictures/demo.svg

Lines are wrapped at `COLUMNS` characters, so that the picture can be read on a phone.
"""

from __future__ import annotations

import html
import sys
import textwrap

COLUMNS = 72
#: Width of a character, height of a line, and the margin, in the picture's own units.
_CHARACTER, _LINE, _MARGIN = 8.4, 19, 16
#: First words of lines that are drawn brighter.
_BRIGHT = ("$", "validation", "training ended")

_FRAME = """<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" viewBox="0 0 {width:.0f} {height}">
<rect width="100%" height="100%" rx="8" fill="#1d2127"/>
<g fill="#b9c0c8" font-family="Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="14">
{lines}</g>
</svg>
"""


def picture(command: str, output: str) -> str:
    """Return the picture of a terminal in which `command` printed `output`."""
    rows = [row for line in [f"$ {command}", *output.splitlines()] for row in textwrap.wrap(line, COLUMNS) or [""]]
    lines = "".join(
        f'<text x="{_MARGIN}" y="{_MARGIN + _LINE * number + 12}" textLength="{len(row) * _CHARACTER:.1f}" '
        f'xml:space="preserve"{_colour(row)}>{html.escape(row, quote=False)}</text>\n'
        for number, row in enumerate(rows)
        if row.strip()
    )
    return _FRAME.format(width=COLUMNS * _CHARACTER + 2 * _MARGIN, height=len(rows) * _LINE + 2 * _MARGIN, lines=lines)


def _colour(row: str) -> str:
    return ' fill="#fff"' if row.startswith(_BRIGHT) else ""


if __name__ == "__main__":
    sys.stdout.write(picture(sys.argv[1], sys.stdin.read()))
