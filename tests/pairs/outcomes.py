"""Train programs of features, and tell how each differs from its plain loop, or what refuses it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stratagem.errors import StratagemError
from stratagem_testing.processes import ProcessesFailed, run_in_processes

from .features import title
from .plain import Loop, Net, flat
from .program import Feature, Program

#: The sentence with which each combination that is refused is refused.
REFUSED: dict[str, str] = json.loads(Path(__file__).with_name("refused.json").read_text())


@dataclass(frozen=True)
class Outcome:
    """The sentence that refuses a program, or else how it differs from its plain loop."""

    refusal: str = ""
    differences: tuple[str, ...] = ()


def outcome(features: Iterable[Feature]) -> Outcome:
    """Train in this process, which is one of the ranks if there are several. Collective."""
    program = Program(features)
    try:
        program.train()
    except StratagemError as error:
        return Outcome(refusal=str(error))
    return Outcome(differences=tuple(differences(program)))


def differences(program: Program) -> list[str]:
    loop, weights, position = program.plainly(), program.weights, program.trainer.position
    found = []
    if not (far := distance(weights, loop)) <= program.tolerance:
        found.append(f"the weights are off by {far:.2g}")
    for name, value, expected in (
        ("optimizer steps", position.global_step, loop.steps),
        ("skipped steps", position.skipped_steps, loop.skipped),
    ):
        if value != expected:
            found.append(f"{value} {name} for {expected}")
    if not torch.allclose(torch.tensor(program.rates), torch.tensor(loop.rates)):
        found.append(f"the last learning rates are {program.rates} for {loop.rates}")
    found += [f"{each} had no effect" for each in program.features if each.acted and not each.acted(program)]
    return found


def distance(weights: torch.Tensor, loop: Loop) -> float:
    """Return how far `weights` are from those of `loop`, in parts of the way that these have moved."""
    start = flat(Net(0))
    return float((weights - loop.weights).norm() / (loop.weights - start).norm())


def invisible(features: Sequence[Feature]) -> list[Feature]:
    """Return those of `features` that a plain loop may leave out and train the same.

    Rounding is not seen where another feature rounds otherwise, too.
    """
    program = Program(features)
    whole = program.plainly()
    reorders, hidden = any(each.reorders for each in features), {each.hides for each in features}
    changing = [each for each in features if each.acted is None and each.kind not in hidden]
    changing = [each for each in changing if not (reorders and each.reordered)]
    return [each for each in changing if distance(program.plainly(without=each).weights, whole) < 3 * program.tolerance]


# --- Several processes ---------------------------------------------------------------------------------------------


def outcomes(combinations: Sequence[tuple[Feature, ...]], folder: Path) -> dict[str, Outcome]:
    """Return the outcome of each of `combinations`, by its title.

    They train in the same processes, one after the other; after one that fails the others train in new processes.
    """
    folder.mkdir(exist_ok=True)
    found: dict[str, Outcome] = {}
    left = list(combinations)
    while left:
        path = folder / f"{len(left)}.outcomes"
        error = ""
        try:
            run_in_processes(_each, max(feature.ranks for feature in left[0]), left, path, limit_s=60 + 5 * len(left))
        except ProcessesFailed as failed:
            error = str(failed)
        done = _read(path)
        found |= {title(each): one for each, one in zip(left, done, strict=False)}
        left = left[len(done) :]
        if left and error:
            found[title(left.pop(0))] = Outcome(differences=(error,))
    return found


def _each(rank: int, size: int, combinations: Sequence[tuple[Feature, ...]], path: Path) -> None:
    for features in combinations:
        one = outcome(features)
        if rank == 0:
            with path.open("ab") as file:
                pickle.dump(one, file)


def _read(path: Path) -> list[Outcome]:
    found: list[Outcome] = []
    if path.exists():
        with path.open("rb") as file:
            while file.peek(1):
                found.append(pickle.load(file))
    return found


# --- The table -----------------------------------------------------------------------------------------------------


def table(refused: Mapping[str, str] = REFUSED) -> str:
    """Return the combinations that are refused as a table in Markdown."""
    lines = ["| features | what a fit says |", "|---|---|"]
    lines += [f"| {pair} | {_escaped(sentence)} |" for pair, sentence in refused.items()]
    return "\n".join(lines) + "\n"


def _escaped(sentence: str) -> str:
    return sentence.replace("|", "\\|").replace("_", "\\_").replace("*", "\\*").replace("<", "&lt;")
