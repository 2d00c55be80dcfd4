"""What a process leaves behind for others to read after it has died: its last collectives, its phase, its stack.

[Note: evidence]
A process cannot tell what it did when it is killed. So each rank writes, while it trains, to files that outlive it:

* ``RANK.ring``, a memory-mapped file: the last collectives that the process began, and what it is doing (`ring`);
* ``RANK.sites``: the texts that the ring's numbers stand for, a line each;
* ``RANK.stack``: the Python stack, which `faulthandler` writes at a fatal signal, or when it is asked to.

The files lie in the launcher's folder for reports or, without a launcher, in a folder of the machine's first process.
They are gone after a good end. `verdict` compares the files of all ranks.
"""

from stratagem_evidence.folder import EVIDENCE_VARIABLE, delete_evidence, evidence_folder
from stratagem_evidence.kept import clear, in_words, judged, keep, read_kept
from stratagem_evidence.rank_evidence import (
    RankEvidence,
    as_text,
    ask_for_stacks,
    delete_if_all_exited,
    from_text,
    read_all,
)
from stratagem_evidence.recorder import Recorder
from stratagem_evidence.rules import INTERRUPTED, Verdict, as_torch_recorded, by_group, it_was, signal_name, verdict

__all__ = [
    "EVIDENCE_VARIABLE", "INTERRUPTED", "RankEvidence", "Recorder", "Verdict", "as_text", "as_torch_recorded",
    "ask_for_stacks", "by_group", "clear", "delete_evidence", "delete_if_all_exited", "evidence_folder", "from_text",
    "in_words", "it_was", "judged", "keep", "read_all", "read_kept", "signal_name", "verdict",
]  # fmt: skip
