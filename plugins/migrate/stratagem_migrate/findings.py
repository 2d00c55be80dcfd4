"""`Finding`: a necessary or possible change in one line."""

from __future__ import annotations

from typing import Final

from attrs import frozen

#: The line raises an error or has no effect until it is changed.
CHANGE: Final = "change"
#: The line runs, but may behave differently.
CHECK: Final = "check"
#: The line has the same meaning.
SAME: Final = "same"

CERTAINTIES: Final = {CHANGE: "must be changed", CHECK: "works differently", SAME: "stays as it is"}


@frozen(order=True)
class Finding:
    """A change in one line of a script."""

    path: str
    line: int
    column: int
    certainty: str
    #: The source in the script.
    old: str
    #: The replacement; empty if there is none.
    new: str
    #: An explanation; may be empty.
    note: str = ""
    #: The number of the cell of a notebook, in which `line` counts; None in other files.
    cell: int | None = None

    def __str__(self) -> str:
        arrow = f" -> {self.new}" if self.new else ""
        note = f" ({self.note})" if self.note and arrow else f": {self.note}" if self.note else ""
        cell = "" if self.cell is None else f":cell {self.cell}"
        return f"{self.path}{cell}:{self.line}: {self.old}{arrow}{note}"
