"""Pictures of a mesh: a card for each rank, and the timeline of a schedule as inline SVG; see templates/mesh.html."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from stratagem_layout import byte_text
from stratagem_report.charts import COLOURS

if TYPE_CHECKING:
    from stratagem_layout import Layout, RankLayout, Slot, Timeline

_MOST_COLUMNS = 8
_SLOT, _ROW, _LABEL = 24, 26, 56
#: The colour of each kind of computation.
_KINDS = {"forward": 1, "backward": 2, "inputs": 2, "weights": 3}


@frozen
class MeshPicture:
    """All ranks, those with one position on the outermost axis in rows of one colour."""

    layout: Layout

    @property
    def columns(self) -> int:
        outermost = next(iter(self.layout.axes.values()), 1)
        return min(len(self.layout.ranks) // outermost or 1, _MOST_COLUMNS)

    @property
    def shape(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.layout.axes.items())

    def cards(self) -> Iterator[tuple[int, list[str]]]:
        """Yield colour and lines of each rank."""
        outermost = next(iter(self.layout.axes), "")
        for each in self.layout.ranks:
            size = "" if each.num_bytes is None else f" · {byte_text(each.num_bytes)}"
            lines = [f"rank {each.rank}{size}", _position(each), ", ".join(each.layers)]
            yield each.position.get(outermost, 0) % COLOURS + 1, lines

    @property
    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The rows of the table: rank, position, layers, slices and bytes."""
        return [
            (
                str(each.rank), _position(each), ", ".join(each.layers), "; ".join(each.slices),
                "" if each.num_bytes is None else byte_text(each.num_bytes),
            )
            for each in self.layout.ranks
        ]  # fmt: skip

    @property
    def messages(self) -> list[tuple[str, str, str, str]]:
        """The rows of the table: axis with its size, what is sent, bytes and their source."""
        return [
            (
                f"{each.axis} ({each.size} ranks)", each.what,
                "depends on the batch" if each.num_bytes is None else byte_text(each.num_bytes),
                "counted in one step" if each.counted else "computed" if each.num_bytes is not None else "",
            )
            for each in self.layout.messages
        ]  # fmt: skip


@frozen
class TimelinePicture:
    """A row for each rank of the schedule, with a box for each computation."""

    timeline: Timeline

    @property
    def width(self) -> int:
        return _LABEL + self.timeline.num_slots * _SLOT

    @property
    def height(self) -> int:
        return len(self.timeline.rows) * _ROW

    @property
    def title(self) -> str:
        each = self.timeline
        return (
            f"{each.schedule}: {each.stages} stages, {each.microbatches} micro-batches, {each.idle_share:.1%} of the "
            "time idle if messages take none"
        )

    def labels(self) -> Iterator[tuple[int, str]]:
        for number in range(len(self.timeline.rows)):
            yield number * _ROW + 17, f"rank {number}"

    def boxes(self) -> Iterator[tuple[int, int, int, int, str, str]]:
        """Yield x, y, width, colour, text and title of each computation."""
        for number, row in enumerate(self.timeline.rows):
            for slot in row:
                yield (
                    _LABEL + slot.start * _SLOT, number * _ROW + 1, slot.length * _SLOT - 1, _KINDS[slot.kind],
                    str(slot.microbatch), _slot_title(slot),
                )  # fmt: skip

    @property
    def legend(self) -> list[tuple[int, str]]:
        kinds = {slot.kind for row in self.timeline.rows for slot in row}
        names = {"inputs": "backward of inputs", "weights": "backward of weights"}
        return [(colour, names.get(kind, kind)) for kind, colour in _KINDS.items() if kind in kinds]


def _slot_title(slot: Slot) -> str:
    return f"{slot.kind} of micro-batch {slot.microbatch}, stage {slot.stage}"


def _position(each: RankLayout) -> str:
    return ", ".join(f"{axis} {index}" for axis, index in each.position.items())
