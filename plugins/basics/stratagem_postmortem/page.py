"""A page with a timeline: a row for each rank, a mark for each collective that it began."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from html import escape

from stratagem_evidence import RankEvidence
from stratagem_postmortem.tables import rows

#: Pixels: the timeline's width, a row's height, the width of the names.
_WIDTH, _ROW, _NAMES = 960, 34, 80
#: Marks of a rank; of more the newest are drawn.
_MARKS = 200

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6875; --line: #d5dbe1; --mark: #2f6fb3; --bad: #b3372f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ee; --soft: #9aa7b4; --line: #3a444f; --mark: #7fb2ea; --bad: #ef8a82; } }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem clamp(.75rem, 3vw, 2rem); color: var(--ink);
  font: .95rem/1.5 system-ui, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.2rem; } h2 { font-size: 1rem; margin-top: 2rem; } .soft { color: var(--soft); }
.scroll { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; white-space: nowrap; } th, td { padding: .2rem 1rem .2rem 0; text-align: left; }
th { color: var(--soft); font-weight: 500; } svg { min-width: 40rem; width: 100%; height: auto; display: block; }
svg text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); } svg .soft { fill: var(--soft); }
svg line { stroke: var(--line); } svg rect { fill: var(--mark); } svg rect.last { fill: var(--bad); }
"""


def page(sentence: str, known: Mapping[int, RankEvidence]) -> str:
    """Return one self-contained HTML page."""
    return "".join(_parts(sentence, known)) + "\n"


def _parts(sentence: str, known: Mapping[int, RankEvidence]) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><meta charset="utf-8"><title>Post-mortem of a run</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<style>{_STYLE}</style><h1>{escape(sentence or 'The evidence does not tell why this run ended')}</h1>"
    yield '<div class="scroll"><table><tr><th>rank<th>process<th>ended<th>step<th>batch<th>was in</tr>'
    for cells in rows(known):
        yield f"<tr>{''.join(f'<td>{escape(cell)}' for cell in cells)}</tr>"
    yield "</table></div>"
    yield from (f"<p>Before: {escape(told.note)}</p>" for _, told in sorted(known.items()) if told.note)
    yield from _timeline(known)


def _timeline(known: Mapping[int, RankEvidence]) -> Iterator[str]:
    records = {rank: each.records[-_MARKS:] for rank, each in sorted(known.items())}
    times = [record.began for each in records.values() for record in each]
    if not times:
        yield '<p class="soft">No collective was recorded.</p>'
        return
    first, span = min(times), max(max(times) - min(times), 1e-6)
    height = _ROW * len(records) + 30
    yield f"<h2>Collectives</h2><p class='soft'>The last of each rank is red. All began within {span:.3g} s.</p>"
    yield f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {height}" role="img">'
    yield "<title>Collectives of each rank over time</title>"
    for row, (rank, marks) in enumerate(records.items()):
        y = row * _ROW + 6
        yield f'<text x="0" y="{y + 16}">rank {rank}</text>'
        yield f'<line x1="{_NAMES}" x2="{_WIDTH}" y1="{y + 11}" y2="{y + 11}"/>'
        for record in marks:
            x = _NAMES + (record.began - first) / span * (_WIDTH - _NAMES - 4)
            kind = ' class="last"' if record is marks[-1] else ""
            yield f'<rect x="{x:.1f}" y="{y}" width="4" height="22"{kind}>'
            yield f"<title>{record.number}: {escape(str(record.site))}</title></rect>"
    clock = time.strftime("%H:%M:%S", time.localtime(first)), time.strftime("%H:%M:%S", time.localtime(first + span))
    yield f'<text class="soft" x="{_NAMES}" y="{height - 8}">{clock[0]}</text>'
    yield f'<text class="soft" x="{_WIDTH}" y="{height - 8}" text-anchor="end">{clock[1]}</text></svg></div>'
