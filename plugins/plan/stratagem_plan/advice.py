"""What `stratagem advise` says: as text, as data, and the parts of its page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from attrs import asdict

from stratagem_plan.search import Explorer, Planned, beats, front

#: The strategies that guides name for models of fewer parameters than this.
GUIDES = ((1e9, ("ddp",)), (7e9, ("ddp", "fsdp")), (70e9, ("fsdp",)), (math.inf, ("fsdp", "parallel")))


def lines_of(explorer: Explorer) -> Iterator[str]:
    """Yield the advice as lines of text."""
    script = explorer.script
    yield " ".join([str(script.path), *script.arguments])
    yield facts(explorer)
    best = front(explorer.fitting)
    for number, each in enumerate(best, start=1):
        title, code, needs = advice(number, each, best, explorer.limit)
        yield from ("", title, f"   {code}", f"   {needs}")
    if not best:
        yield from ("", NOTHING)
    for title, found in sections(explorer, best):
        yield from ("", title, *(f"  {line}" for line in found))


NOTHING = "nothing that was planned fits"


def facts(explorer: Explorer) -> str:
    """Return the size of the model and of a step, and the devices."""
    script, first = explorer.script, explorer.first
    return (
        f"{first['model']['parameters']:,} parameters, {explorer.samples:,} samples a step; "
        f"{script.devices * script.nodes:,} x {explorer.device.name} (nodes: {script.nodes}, of {script.devices}), "
        f"{explorer.limit / 1e9:,.1f} GB each"
    )


def sections(explorer: Explorer, best: list[Planned]) -> Iterator[tuple[str, list[str]]]:
    """Yield title and lines of what is told beside the advice."""
    yield "what guides say", [guides(explorer, best)]
    whys = dict.fromkeys(why for _, why in explorer.left_out)
    found = {
        "not chosen": list(_others(explorer, best)),
        "cannot be planned": [f"{each.candidate.words}: {each.error}" for each in explorer.planned if each.error],
        "not planned": [f"{why}: {'; '.join(words for words, of in explorer.left_out if of == why)}" for why in whys],
    }
    yield from ((title, lines) for title, lines in found.items() if lines)
    yield "how certain", list(_CERTAINTY)


_CERTAINTY = (
    "Memory was within 0.25 % of an H200's counter in 13 trainings, what the allocator reserves within 0.7 % in 8.",
    "Times are expected (low to high). Where intervals overlap, or the host takes most of a step, measure both.",
    "Other precisions were planned for the fastest candidates of the first one, lower ones also for what did not fit.",
)


def advice(number: int, planned: Planned, best: list[Planned], limit: float) -> tuple[str, str, str]:
    """Return why a candidate is advised, its code, and the time and the memory that it needs."""
    assert planned.step_s
    candidate = planned.candidate
    code = f"the script as it is: {planned.stack['strategy']}, {planned.stack['precision']}"
    if candidate.settings or candidate.micro_batch:
        code = _code(planned) + f"  # batches of {planned.micro_batch}" * bool(candidate.micro_batch)
    part = f"{planned.peak / 1e9:,.1f} GB, {planned.peak / limit:.0%} of the memory"
    tight = "; tight, for what the allocator reserves" if planned.is_tight else ""
    title = f"{number}. {', '.join(reasons(planned, best))}"
    return title, code, f"{planned.step_s.time()} a step; {part}{tight}"


def _code(planned: Planned) -> str:
    assert planned.tree
    return planned.candidate.code("Trainer" if planned.tree["trainer"] else "Run")


def reasons(planned: Planned, best: list[Planned]) -> Iterator[str]:
    """Yield why a candidate is advised: against the fastest, and against all faster ones."""
    from stratagem_plan.candidates import WORDS

    position = best.index(planned)
    faster = best[:position]
    yield f"{_slower(planned, best[0])} than 1" if faster else "the fastest"
    as_exact = [each for each in faster if each.numerics <= planned.numerics]
    if as_exact:
        least = min(as_exact, key=lambda each: each.peak)
        yield f"{_memory(planned, least)} than {best.index(least) + 1}"
    if planned.numerics < min((each.numerics for each in faster), default=len(WORDS)):
        yield f"numerics: {WORDS[planned.numerics]}"


def _slower(one: Planned, other: Planned) -> str:
    """Return how much slower `one` is, and whether that is certain; "than" follows."""
    ratio = one.seconds / other.seconds
    text = f"{ratio:,.3g} times slower" if ratio > 2 else f"{abs(ratio - 1):.0%} {'slower' if ratio >= 1 else 'faster'}"
    return f"undecided, expected {text}" if _overlap(one, other) else text


def _overlap(one: Planned, other: Planned) -> bool:
    """Whether the intervals of two times have a part in common, or the host decides one of them."""
    assert one.step_s
    assert other.step_s
    is_unknown = one.is_host_bound or other.is_host_bound
    return is_unknown or (one.step_s.low <= other.step_s.high and other.step_s.low <= one.step_s.high)


def guides(explorer: Explorer, best: list[Planned]) -> str:
    """Return what guides say about a model of this size, and why the fastest candidate is another one, if it is."""
    numbers = explorer.first["model"]["parameters"]
    if explorer.script.devices * explorer.script.nodes == 1:
        return "their rules are about several devices"
    names = next(names for limit, names in GUIDES if numbers < limit)
    size = f"{numbers / 1e9:,.2g} billion" if numbers >= 1e8 else f"{numbers:,}"
    rule = f"{' or '.join(names)} for {size} parameters"
    chosen = [number for number, each in enumerate(best, start=1) if _name(each) in names]
    if chosen:
        slower = f", {_slower(best[chosen[0] - 1], best[0])} than 1" * (chosen[0] > 1)
        return f"{rule}: as advice {chosen[0]}{slower}"
    theirs = [each for each in explorer.planned if each.tree and _name(each) in names]
    if not theirs:
        return f"{rule}: not planned here, see below"
    fitting = [each for each in theirs if each.peak <= explorer.limit]
    if not fitting:
        over = min(each.peak for each in theirs) - explorer.limit
        return f"{rule}: does not fit here, by {_gigabytes(over)}"
    fastest = min(fitting, key=lambda each: each.seconds)
    number, better = _better(fastest, best)
    return f"{rule}: fits, {_slower(fastest, better)} than {number}, with {_memory(fastest, better)}"


def _better(planned: Planned, best: list[Planned]) -> tuple[int, Planned]:
    """Return the number of the advice because of which a candidate is not on the front, and that advice."""
    found = ((number, each) for number, each in enumerate(best, start=1) if not beats(planned, each))
    return next(found, (1, best[0]))


def _name(planned: Planned) -> str:
    return planned.stack["strategy"].split(", ")[0]


def _others(explorer: Explorer, best: list[Planned]) -> Iterator[str]:
    """Yield why each other candidate is not advised."""
    for each in others(explorer, best):
        if each.peak > explorer.limit:
            yield f"{each.candidate.words}: does not fit, by {_gigabytes(each.peak - explorer.limit)}"
        else:
            number, better = _better(each, best)
            yield f"{each.candidate.words}: {_slower(each, better)} than {number}, with {_memory(each, better)}"


def others(explorer: Explorer, best: list[Planned]) -> Iterator[Planned]:
    """Yield candidates that are not advised: of several sizes of batches the fastest that fits, else the smallest."""
    groups: dict[str, list[Planned]] = {}
    for each in explorer.planned:
        if each.tree:
            groups.setdefault(each.candidate.without_batches, []).append(each)
    for group in groups.values():
        fitting = [each for each in group if each.peak <= explorer.limit]
        if not any(each in best for each in fitting):
            yield min(fitting, key=lambda each: each.seconds) if fitting else min(group, key=lambda each: each.peak)


def _memory(one: Planned, other: Planned) -> str:
    part = one.peak / other.peak - 1
    return f"{abs(part):.0%} {'more' if part >= 0 else 'less'} memory"


def _gigabytes(num_bytes: float) -> str:
    amount = num_bytes / 1e9
    return f"{amount:,.1f} GB" if amount >= 1 else f"{amount:.2g} GB"


# --- JSON --------------------------------------------------------------------------------------------------------


def tree_of(explorer: Explorer) -> dict[str, Any]:
    """Return the advice as data."""
    best = front(explorer.fitting)
    return {
        "script": " ".join([str(explorer.script.path), *explorer.script.arguments]),
        "device": explorer.device.name,
        "memory_bytes": explorer.limit,
        "parameters": explorer.first["model"]["parameters"],
        "samples": explorer.samples,
        "advice": [_data(each, explorer.limit) | {"reasons": list(reasons(each, best))} for each in best],
        "guides": guides(explorer, best),
        "planned": [_data(each, explorer.limit) for each in explorer.planned if each.tree],
        "cannot_be_planned": [
            {"candidate": each.candidate.words, "error": each.error} for each in explorer.planned if each.error
        ],
        "not_planned": [{"candidate": words, "why": why} for words, why in explorer.left_out],
    }


def _data(planned: Planned, limit: float) -> dict[str, Any]:
    assert planned.step_s
    candidate = planned.candidate
    return {
        "candidate": candidate.words,
        "code": _code(planned),
        "settings": candidate.settings
        | ({"accumulate_grad_batches": candidate.accumulate} if candidate.accumulate else {}),
        "micro_batch": planned.micro_batch,
        "peak": planned.peak,
        "fits": planned.peak <= limit,
        "step_s": asdict(planned.step_s),
        "numerics": planned.numerics,
    }
