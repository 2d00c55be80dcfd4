"""Plan several variants of a script, each in a process of its own that begins with everything imported."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from attrs import evolve, frozen

from stratagem.errors import ConfigError, StratagemError
from stratagem_plan.assumptions import check_used
from stratagem_plan.backend import check_autograd
from stratagem_plan.result import tree_of
from stratagem_plan.script import PlannedScript

#: Processes at a time.
AT_ONCE = 2


class CannotBePlanned(ConfigError):
    """A script has no plan, for the reason that its text tells."""


@frozen(kw_only=True)
class Variant:
    """A script with settings, and the rank of it to plan."""

    script: PlannedScript
    device: str
    rank: int = 0


def plan_all(variants: Sequence[Variant], *, quiet: bool = False) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Plan `variants`, two at a time; yield the position of each and its plan, or why it has none, as they end.

    Args:
        quiet: leave out what the script prints; it goes to stderr otherwise.
    """
    processes = multiprocessing.get_context("fork")  # a plan changes torch for its whole process
    left, running = list(enumerate(variants)), dict[Any, Any]()
    try:
        while left or running:
            while left and len(running) < AT_ONCE:
                position, variant = left.pop(0)
                answer, question = processes.Pipe(duplex=False)
                process = processes.Process(target=_answer, args=(question, variant, quiet))
                process.start()
                question.close()
                running[answer] = position, process
            for ready in wait(running):
                position, process = running.pop(ready)
                yield position, _received(ready, process)
    finally:
        for _, process in running.values():
            process.kill()


def plan(variant: Variant) -> dict[str, Any]:
    """Return the plan of one variant.

    Raises:
        CannotBePlanned: what is in its way.
    """
    ((_, found),) = plan_all([variant])
    if isinstance(found, str):
        raise CannotBePlanned(found)
    return found


def plan_ranks(variant: Variant, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Return one plan with all `ranks`, or with one rank of each class.

    Raises:
        CannotBePlanned: what is in the way of one of them.
        ConfigError: none of them has used one of the script's assumptions.
    """
    first, *others = dict.fromkeys(ranks or [0])
    tree = plan(evolve(variant, rank=first))
    others += tree["other_classes"] if ranks is None else []
    found = dict(plan_all([evolve(variant, rank=rank) for rank in others]))
    for position, _ in enumerate(others):
        other = found[position]
        if isinstance(other, str):
            raise CannotBePlanned(other)
        tree["classes"] += other["classes"]
        tree["assumptions"] = [*dict.fromkeys(tree["assumptions"] + other["assumptions"])]
    check_used(variant.script.assume, tree["assumptions"])
    return tree


def peak_of(tree: dict[str, Any]) -> int:
    """Return the most bytes that a planned rank needs."""
    return max(int(each["needs"]) for each in tree["classes"])


def micro_batch_of(tree: dict[str, Any]) -> int:
    """Return the samples of one of a rank's batches."""
    return int(tree["inputs"]["samples"]) // int(tree["accumulate"])


def _received(answer: Any, process: Any) -> dict[str, Any] | str:
    try:
        found: dict[str, Any] | str = answer.recv()
    except EOFError:
        process.join()
        return f"the process that planned it has ended with exit code {process.exitcode}"
    process.join()
    return found


def _answer(question: Connection, variant: Variant, quiet: bool) -> None:
    """Plan `variant` in this process, and send the plan, or the sentence of what is in its way."""
    with contextlib.ExitStack() as stack:
        if quiet:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        else:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            check_autograd()
            planner = variant.script.on(variant.rank)
            question.send(tree_of(variant.script, variant.device, planner))
        except StratagemError as error:
            question.send(str(error))
