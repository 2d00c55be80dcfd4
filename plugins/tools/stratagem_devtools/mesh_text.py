"""The mesh of a strategy as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem_layout import byte_text

if TYPE_CHECKING:
    from stratagem_layout import AxisMessages, Layout, RankLayout, Timeline

#: Timelines with more slots are not drawn as text.
_MOST_SLOTS = 60
_LETTERS = {"forward": "F", "backward": "B", "inputs": "I", "weights": "W"}


def mesh_lines(layout: Layout) -> list[str]:
    """Return `layout` as text."""
    shape = " x ".join(f"{axis} {size}" for axis, size in layout.axes.items())
    lines = [f"mesh: {shape}, {len(layout.ranks)} ranks"]
    lines += [f"  {line}" for each in layout.ranks for line in _rank_lines(each)]
    if layout.messages:
        lines.append("each rank sends in a step, along")
        lines += [f"  {_message_line(each)}" for each in layout.messages]
    return lines + ([] if layout.timeline is None else _timeline_lines(layout.timeline))


def _rank_lines(each: RankLayout) -> list[str]:
    position = ", ".join(f"{axis} {index}" for axis, index in each.position.items())
    size = "" if each.num_bytes is None else f"; {byte_text(each.num_bytes)} of parameters"
    lines = [f"rank {each.rank} ({position}): {', '.join(each.layers) or 'layers are known once it runs'}{size}"]
    return lines + [f"  {text}" for text in each.slices]


def _message_line(each: AxisMessages) -> str:
    size = "depends on the batch" if each.num_bytes is None else byte_text(each.num_bytes)
    source = "" if each.num_bytes is None else " (counted)" if each.counted else " (computed)"
    return f"{each.axis} ({each.size} ranks): {each.what}: {size}{source}"


def _timeline_lines(timeline: Timeline) -> list[str]:
    size = f"{timeline.stages} stages, {timeline.microbatches} micro-batches"
    lines = [f"schedule {timeline.schedule}: {size}, {timeline.idle_share:.1%} idle"]
    if timeline.num_slots > _MOST_SLOTS:
        return lines
    for number, row in enumerate(timeline.rows):
        cells = ["."] * timeline.num_slots
        for slot in row:
            text = f"{_LETTERS[slot.kind]}{slot.microbatch}"
            cells[slot.start : slot.start + slot.length] = [text] * slot.length
        width = max(len(str(timeline.microbatches - 1)) + 1, 2)
        lines.append(f"  {number}: " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return lines
