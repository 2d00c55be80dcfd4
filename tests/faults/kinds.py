"""What a diagnosis has to say of each kind of fault."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

#: By kind: the words of its cause. The first half were known when the rules were written, the second half were not.
KNOWN = {
    "skip": r"did not call all_reduce|where|called", "size": r"3 elements.*7,000 elements", "order": r"broadcast.*where.*all_reduce",
    "product_skip": r"all_gather", "product_shape": r"all_gather", "killed": r"SIGKILL|is gone", "rank_0_killed": r"SIGKILL|is gone",
    "exit_0": r"code 0|is gone", "error": r"KeyError", "error_in_worker": r"corrupt sample", "stuck": r"is in|did not call",
    "stuck_save": r"is in|did not call", "nan": r"nan|finite", "no_memory": r"memory", "slow_loader": r"next batch",
    "stopped": r"stopped", "segmentation_fault": r"SIGSEGV", "skipped_backward": r"gradient|backward|reaches no trainable",
}  # fmt: skip
SET_ASIDE = {
    "dtype": r"float64.*float32", "other_root": r"broadcast\(src=\d\).*where", "extra": r"barrier", "gather_sizes": r"9 elements.*5 elements", "exit_3": r"code 3|is gone",
    "sys_exit_0": r"code 0|sys.exit", "error_in_dataset": r"corrupt sample", "killed_worker": r"worker", "stuck_in_c": r"is in|did not call",
    "busy": r"is in|did not call", "aborted": r"SIGABRT", "bus_error": r"SIGBUS", "error_in_hook": r"KeyError",
    "stuck_in_hook": r"is in|did not call", "error_in_validation": r"KeyError", "stuck_validation": r"is in|did not call",
    "collective_in_validation": r"all_reduce", "error_in_save": r"KeyError", "half_of_a_group": r"did not call all_reduce|where|waits for",
    "deadlock_of_groups": r"waits for", "object_skip": r"did not call|where", "one_logs": r"extra", "one_saves": r"save_checkpoint",
    "other_model": r"65|elements", "error_in_thread": r"SIGSEGV", "interrupted": r"interrupt",
    "parameter_written": r"not the same on rank 1", "rank_0_full_disk": r"No space left", "stuck_in_gc": r"is in|did not call",
    "skip_skewed": r"did not call all_reduce|where|called", "error_skewed": r"KeyError",
}  # fmt: skip
#: Faults without a line: of these the phase is the place.
PHASES = {
    "killed": "training_step", "rank_0_killed": "training_step", "exit_0": "training_step", "exit_3": "training_step",
    "stopped": "training_step", "sys_exit_0": "training_step", "nan": "in batch 3",
    "slow_loader": "next batch", "killed_worker": "", "skipped_backward": "", "other_model": "", "interrupted": "",
    "one_logs": "", "parameter_written": "net.0.weight' after step", "rank_0_full_disk": "",
}  # fmt: skip
#: Faults of which two ranks are as much the cause.
BOTH = ("deadlock_of_groups",)


@frozen
class Judgement:
    """Whether the output of a run names the rank, the cause and the place."""

    rank: bool
    cause: bool
    place: bool


def judge(kind: str, text: str, world_size: int) -> Judgement:
    """Return what the last sentence of the output `text` has right."""
    sentence, bad = sentence_of(text), int(not kind.startswith("rank_0_"))
    blamed = re.search(r"\branks? ((?:\d+(?:, | and )?)+)", sentence)
    ranks = {int(each) for each in re.findall(r"\d+", blamed[1])} if blamed else set()
    # Of ranks that wait for each other, and of two that call different things, any may be right: all are named.
    named = re.search(r"waits for|did not call", sentence) and (kind in BOTH or world_size == 2)
    rank = ranks == {bad} or bool(named)
    rank = rank or (blamed is None and sentence.startswith(f"[rank{bad}]:"))  # how torch prints a rank's own error
    for words in (
        rf"rank \d+ (has heard nothing from|lost its connection:) rank {bad}\b",  # the second one is blamed
        rf"rank \d+ is in .* and rank {bad} in ",
        rf"on rank {bad}:",  # the note of a rank's own error
        rf"(?s)Root Cause .*  rank      : {bad} .*Error",  # what torchrun says of it
    ):
        rank = rank or re.search(words, text) is not None
    lines = [number for number, line in enumerate(_LAB.read_text().splitlines(), 1) if re.search(rf"# {kind}\b", line)]
    place = any(re.search(rf"lab.py(:|\", line ){number}\b", text) for number in lines)
    if kind in PHASES:
        place = PHASES[kind] in sentence
    cause = re.search((KNOWN | SET_ASIDE)[kind], sentence, re.IGNORECASE)
    return Judgement(rank, cause is not None, place)


def sentence_of(text: str) -> str:
    """Return the diagnosis in the output `text`: what a rank said as it was ended, or the last error."""
    lines = text.splitlines()
    said = [line for line in lines if line.startswith("stratagem: rank")]
    errors = [
        line
        for line in lines
        if re.search(r"Error\b.*: .|^\S*KeyboardInterrupt", line) and "ChildFailedError" not in line
    ]
    return (said or errors or [""])[-1]


_LAB = Path(__file__).with_name("lab.py")
