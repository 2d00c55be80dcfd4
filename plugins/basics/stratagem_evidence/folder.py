"""Where the processes of a machine write their evidence."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

#: The folder of the launcher that started this process.
EVIDENCE_VARIABLE = "STRATAGEM_EVIDENCE"


def evidence_folder(is_first: bool) -> str:
    """Return the launcher's folder; without a launcher a new one on the machine's first process, "" on the others."""
    given = os.environ.get(EVIDENCE_VARIABLE)
    if given is not None and os.path.isdir(given):
        return given
    with contextlib.suppress(OSError):  # the temporary folder cannot be written: training needs no evidence
        return tempfile.mkdtemp(prefix="stratagem-") if is_first else ""
    return ""


def delete_evidence(folder: Path, rank: int) -> None:
    """Delete the files of `rank`, and the folder once it is empty. A launcher clears its folder when all have ended."""
    if str(folder) == os.environ.get(EVIDENCE_VARIABLE):
        return
    for kind in ("ring", "sites", "stack", "calls", "note"):
        (folder / f"{rank}.{kind}").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
