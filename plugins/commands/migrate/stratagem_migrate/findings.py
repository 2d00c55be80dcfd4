"""`Finding`: one thing about one line, and how certain it is."""

from __future__ import annotations

from typing import Final

from attrs import frozen

#: It is an error, or silently nothing, until the line is changed.
CHANGE: Final = "change"
#: It runs, and may do something else.
CHECK: Final = "check"
#: It means the same.
SAME: Final = "same"

CERTAINTIES: Final = {
    CHANGE: "must be changed",
    CHECK: "works differently",
    SAME: "stays as it is",
}


@frozen(order=True)
class Finding:
    """What becomes of something on a line."""

    path: str
    line: int
    column: int
    certainty: str
    #: As it stands in the script.
    old: str
    #: What to write; empty if nothing has to be written.
    new: str
    #: What to know about it; may be empty.
    note: str = ""

    def __str__(self) -> str:
        arrow = f" -> {self.new}" if self.new else ""
        note = f" ({self.note})" if self.note and arrow else f": {self.note}" if self.note else ""
        return f"{self.path}:{self.line}: {self.old}{arrow}{note}"
