"""A page with a timeline: a row for each rank, a mark for each collective that it began."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from xml.etree.ElementTree import Element

from stratagem_evidence import RankEvidence
from stratagem_pictures.drawings import bar, drawing, path, tag, text
from stratagem_pictures.pages import document, table
from stratagem_pictures.scales import Scale
from stratagem_postmortem.tables import rows

#: Pixels: the timeline's width, a row's height, the width of the names.
_WIDTH, _ROW, _NAMES = 960.0, 34, 80.0
#: Maximum number of marks of a rank: those of its newest collectives.
_MARKS = 200


def page(sentence: str, known: Mapping[int, RankEvidence]) -> str:
    """Return one self-contained HTML page."""
    head = ("rank", "process", "ended", "step", "batch", "was in")
    return document(
        "Post-mortem of a run",
        tag("h1", sentence or "The evidence does not tell why this run ended", class_="sentence"),
        table(head, rows(known), words=len(head)),
        *(tag("p", f"Before: {told.note}") for _, told in sorted(known.items()) if told.note),
        *_timeline(known),
    )


def _timeline(known: Mapping[int, RankEvidence]) -> Iterator[Element]:
    records = {rank: each.records[-_MARKS:] for rank, each in sorted(known.items())}
    times = [record.began for each in records.values() for record in each]
    if not times:
        yield tag("p", "No collective was recorded.", class_="note")
        return
    first, span = min(times), max(max(times) - min(times), 1e-6)
    scale, bottom = Scale(0.0, span, _NAMES, _WIDTH - 4), _ROW * len(records)
    drawn = []
    for y, (rank, marks) in zip(range(6, bottom, _ROW), records.items(), strict=False):
        drawn += [text(0, y + 16, f"rank {rank}"), path([(_NAMES, y + 11), (_WIDTH, y + 11)], "rule")]
        for record in marks:
            kind = "last bad" if record is marks[-1] else "c1"
            drawn.append(bar(scale.at(record.began - first), y, 4, kind, f"{record.number}: {record.site}", 22))
    for x, seconds, kind in ((_NAMES, first, "soft"), (_WIDTH, first + span, "soft end")):
        drawn.append(text(x, bottom + 22, time.strftime("%H:%M:%S", time.localtime(seconds)), kind))
    yield tag("h2", "Collectives")
    yield tag("p", f"The last of each rank is red. All began within {span:.3g} s.", class_="note")
    timeline = drawing("Collectives of each rank over time", bottom + 30, drawn, _WIDTH)
    yield tag("div", timeline, class_="scroll wide")
