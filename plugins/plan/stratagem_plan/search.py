"""Search the candidates of `stratagem advise`: what a closed formula leaves is planned, and the plan decides."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from attrs import define, evolve, field, frozen

from stratagem.errors import ConfigError
from stratagem_plan.allocator import LIBRARY_BYTES
from stratagem_plan.assumptions import check_used
from stratagem_plan.candidates import (
    CHECKPOINTING,
    MARGIN,
    Candidate,
    Layout,
    cutting_layers,
    layouts,
    pipelines,
    precisions,
)
from stratagem_plan.cost import Interval, predict
from stratagem_plan.devices import Device
from stratagem_plan.micro_batches import divisors, largest
from stratagem_plan.plan_file import structure
from stratagem_plan.script import PlannedScript
from stratagem_plan.variants import CannotBePlanned, Variant, micro_batch_of, peak_of, plan_all

#: What a candidate on the front needs less than all faster ones, unless its numerics are more exact.
SMALLER = 0.9
#: Times that differ less count as equal.
AS_LONG = 1.02


@frozen(kw_only=True)
class Planned:
    """A candidate with its plan and the time of a step, or the sentence of why it has none."""

    candidate: Candidate
    tree: dict[str, Any] | None = None
    step_s: Interval | None = None
    #: The host needs more time than the device, and its time is known least.
    is_host_bound: bool = False
    error: str = ""

    @property
    def peak(self) -> int:
        """Return the most bytes that a rank needs."""
        return peak_of(self.tree) if self.tree else 0

    @property
    def is_tight(self) -> bool:
        """Whether torch's allocator gives back what it keeps, for which a step waits."""
        return any(each["returns"] for each in self.tree["classes"]) if self.tree else False

    @property
    def seconds(self) -> float:
        """Return the expected time of a step."""
        return self.step_s.expected if self.step_s else 0.0

    @property
    def peak_phase(self) -> str:
        """Return the phase of the step that needs most."""
        return max(self.tree["classes"], key=lambda each: int(each["peak"]))["peak_phase"] if self.tree else ""

    @property
    def stack(self) -> dict[str, str]:
        """Return the names of its strategy and precision."""
        return self.tree["stack"] if self.tree else {}

    @property
    def numerics(self) -> int:
        """Return how far its numerics are from fp32."""
        return self.candidate.numerics(self.stack["precision"])

    @property
    def micro_batch(self) -> int:
        """Return the samples of one of its batches."""
        return micro_batch_of(self.tree) if self.tree else 0


#: Yields the next candidate to plan, and is sent what came of it.
Search: TypeAlias = Generator[Candidate, Planned, Any]


@define(kw_only=True)
class Explorer:
    """Plans candidates for one script on one device, and keeps what came of each."""

    script: PlannedScript
    device: Device
    #: Words of `SEARCH`.
    searched: frozenset[str]
    planned: list[Planned] = field(init=False, factory=list)
    #: What was left out, and why.
    left_out: list[tuple[str, str]] = field(init=False, factory=list)
    #: The plan that tells how large the model and a step are.
    first: dict[str, Any] = field(init=False, factory=dict)

    @property
    def limit(self) -> float:
        """Return the bytes of the device's memory."""
        return float(self.device.need("memory_bytes"))

    @property
    def samples(self) -> int:
        """Return the samples of a step of all ranks."""
        return int(self.first["inputs"]["samples"] * self.first["data_ranks"])

    def explore(self) -> None:
        """Plan the script as it is, then what is searched.

        Raises:
            CannotBePlanned: neither the script as it is nor with another strategy.
            ConfigError: the first plan has not used one of the script's assumptions.
        """
        known = list(layouts(self.script.devices, self.script.nodes))
        self._measure([Candidate()])
        if self.planned[0].tree is None and "strategy" in self.searched:
            self._measure([Candidate(layout=known[0])])
        tree = self.planned[-1].tree
        if tree is None:
            raise CannotBePlanned(self.planned[0].error)
        check_used(self.script.assume, tree["assumptions"])
        self.first = tree
        kinds = precisions(self.device) if "precision" in self.searched else (None,)
        ways = self._searched(known)
        self._run(self._of_layout(way, kinds[0]) for way in ways)
        for last in self._last_resorts(kinds[0]) if "strategy" in self.searched else ():
            if not self.fitting:
                self._run(self._of_layout(way, kinds[0]) for way in last)
                ways += last
        self._run(self._of_precision(best, other) for best in self._fastest() for other in kinds[1:])
        fit = {each.candidate.layout and each.candidate.layout.words for each in self.fitting}
        others = [way for way in ways if (way and way.words) not in fit]
        self._run(self._of_layout(way, lowest) for way in others for lowest in kinds[2:])

    def _last_resorts(self, precision: str | None) -> Iterator[list[Layout]]:
        """Yield layouts that send activations; in a pipeline what stays on a rank takes at most half of its memory.

        With four micro-batches for each stage a pipeline waits a fifth of the time; with one it holds fewer messages.
        """
        devices, nodes = self.script.devices, self.script.nodes
        whole = Candidate(layout=Layout(strategy="", data_ranks=1), precision=precision)
        least = 2 * self._bytes_of_states(whole) / self.limit
        staged = [[*pipelines(devices, nodes, self.samples, least, parts)] if self._resizes else [] for parts in (4, 1)]
        yield [*cutting_layers(devices, nodes), *staged[0]]
        yield staged[1]

    def _fastest(self) -> list[Planned]:
        """Return the fastest candidates: of all, and of those that average gradients in every step."""
        found = [each for each in self.fitting if each.candidate.settings]
        in_step = [each for each in found if each.candidate.layout is None or not each.candidate.layout.period]
        fastest = [front(each)[0] for each in (found, in_step) if each]
        return [each for number, each in enumerate(fastest) if each not in fastest[:number]]

    @property
    def fitting(self) -> list[Planned]:
        """Return the candidates that fit."""
        return [each for each in self.planned if each.tree and each.peak <= self.limit]

    def _searched(self, ways: Sequence[Layout]) -> list[Layout | None]:
        found, names = list[Layout | None](), set[str]()
        for way in ways:
            is_new = way.name not in names
            names.add(way.name)
            if "strategy" in self.searched:
                found += [way] * (is_new or "shard" in self.searched)
            elif "shard" in self.searched and way.name == self.first["stack"]["strategy"]:
                found.append(way)
        return found or [None]

    # --- What is planned of a layout -----------------------------------------------------------------------------

    def _of_layout(self, layout: Layout | None, precision: str | None) -> Search:
        """Plan a layout with ever more checkpointing, until the largest batch fits."""
        candidate = Candidate(layout=layout, precision=precision)
        sizes = self._sizes(candidate)
        if not sizes:
            return
        levels: list[str | None] = ["full"] if layout and layout.microbatches > 1 else list(CHECKPOINTING)
        levels = levels if "checkpointing" in self.searched else [None]
        for level in levels:
            best = yield from self._largest(evolve(candidate, checkpointing=level), sizes)
            if best is not None and best.error and "auto_wrap_policy" in best.error and layout:
                self.planned.remove(best)
                yield from self._of_layout(layout.in_one_unit, precision)
                return
            if best is None or best.error:
                return
            if level == levels[-1]:
                return
            if best.peak <= self.limit and (len(sizes) == 1 or best.micro_batch == sizes[-1]):
                why = "the largest batch already fits with less"
                self.left_out.append((f"{candidate.words}, more checkpointing", why))
                return
            if best.peak > self.limit and best.peak_phase == "optimizer":
                why = "the optimizer's step does not fit, which has no activations"
                self.left_out.append((f"{candidate.words}, more checkpointing", why))
                return

    def _of_precision(self, best: Planned, precision: str) -> Search:
        """Plan one of the best candidates with another precision, and with batches that are not larger."""
        candidate = evolve(best.candidate, precision=precision)
        sizes = [size for size in self._sizes(candidate) if size <= best.micro_batch]
        if sizes:
            yield from self._largest(candidate, sizes)

    def _largest(self, candidate: Candidate, sizes: list[int]) -> Generator[Candidate, Planned, Planned | None]:
        """Plan the largest batch that fits; return its plan, that of the smallest batch if none fits, or an error."""
        found = dict[int, Planned]()
        states = self._bytes_of_states(candidate)
        first = 0 if states > self.limit else len(sizes) - 1
        search = largest(sizes, self.limit, first, states + LIBRARY_BYTES)
        try:
            size = next(search)
            while True:
                found[size] = yield self._sized(candidate, size)
                if found[size].tree is None:
                    return found[size]
                size = search.send(found[size].peak)
        except StopIteration as end:
            return found[end.value or sizes[0]]

    def _sizes(self, candidate: Candidate) -> list[int]:
        """Return the sizes of batches to choose from; none if a closed formula, or the samples, rule the layout out."""
        layout, tree = candidate.layout, self.first
        ranks = layout.data_ranks if layout else tree["data_ranks"]
        if self.samples % ranks:
            why = f"{self.samples:,} samples of a step do not divide into those of {ranks:,} ranks"
            self.left_out.append((candidate.words, why))
            return []
        states = self._bytes_of_states(candidate)
        if states > MARGIN * self.limit:
            why = "by a closed formula, what is kept beside activations takes more than twice the memory"
            self.left_out.append((f"{candidate.words} ({states / 1e9:,.0f} GB)", why))
            return []
        parts = layout.microbatches if layout else 1
        own = micro_batch_of(tree) * parts
        sizes = [size for size in divisors(self.samples // ranks) if size % parts == 0]
        if "micro_batch" in self.searched and self._resizes:
            return sizes
        return [own if own in sizes else sizes[-1]] if sizes else [1]

    @property
    def _resizes(self) -> bool:
        """Whether the size of batches can change: a loop of the user's decides itself what a step is."""
        return bool(self.first["trainer"]) and self.samples > 0

    def _sized(self, candidate: Candidate, size: int) -> Candidate:
        """Return a candidate with batches of `size` samples, so many that a step has its samples."""
        if not self._resizes:
            return candidate
        ranks = candidate.layout.data_ranks if candidate.layout else self.first["data_ranks"]
        return evolve(candidate, micro_batch=size, accumulate=self.samples // ranks // size)

    def _bytes_of_states(self, candidate: Candidate) -> float:
        """Return what a closed formula says of a candidate's parameters, gradients and optimizer; 0 if it cannot."""
        if candidate.layout is None:
            return 0.0
        tree = self.first
        end = tree["classes"][0]["end"]
        per_parameter = min(2.0, end["optimizer"] / max(1, end["parameters"]))
        precision = candidate.precision or tree["stack"]["precision"]
        return candidate.layout.bytes_of_states(tree["model"]["parameters"], precision, per_parameter)

    # --- Planning ------------------------------------------------------------------------------------------------

    def _run(self, searches: Iterable[Search]) -> None:
        """Run searches side by side: each asks for one plan at a time."""
        asking = [(search, first) for search in searches if (first := next(search, None))]
        while asking:
            answers = self._measure([candidate for _, candidate in asking])
            asking = [
                (search, following)
                for (search, _), answer in zip(asking, answers, strict=True)
                if (following := _next(search, answer))
            ]

    def _measure(self, candidates: Sequence[Candidate]) -> list[Planned]:
        """Plan `candidates`, but for those that are planned; return what came of each."""
        scripts = [(each, script) for each in candidates if not self._known(each) for script in self._scripts(each)]
        answers: list[Any] = [None] * len(scripts)
        variants = [Variant(script=script, device=self.device.name) for _, script in scripts]
        for position, answer in plan_all(variants, quiet=True):
            answers[position] = answer
            print(f"planned: {scripts[position][0].words}", file=sys.stderr)
        stages = [(number, rank) for number, answer in enumerate(answers) for rank in self._other_stages(answer)]
        others = [evolve(variants[number], rank=rank) for number, rank in stages]
        for position, answer in plan_all(others, quiet=True):
            number = stages[position][0]
            if isinstance(answer, str):
                answers[number] = answer
            elif not isinstance(answers[number], str):
                answers[number]["classes"] += answer["classes"]
        for candidate in candidates:
            if not self._known(candidate):
                own = [answer for (each, _), answer in zip(scripts, answers, strict=True) if each is candidate]
                self.planned.append(self._of(candidate, own))
        return [found for each in candidates if (found := self._known(each))]

    def _other_stages(self, answer: dict[str, Any] | str) -> list[int]:
        """Return a rank of each other kind of stage, if the first one fits."""
        if isinstance(answer, str) or answer["mesh"].get("pipeline", 1) == 1 or peak_of(answer) > self.limit:
            return []
        return list(answer["other_classes"])

    def _known(self, candidate: Candidate) -> Planned | None:
        return next((each for each in self.planned if each.candidate == candidate), None)

    def _scripts(self, candidate: Candidate) -> list[PlannedScript]:
        """Return what to plan for a candidate: steps without and with an average of replicas, if it has such."""
        layout = candidate.layout
        with_syncs = [evolve(candidate, layout=layout.syncing)] if layout and layout.period else []
        return [
            evolve(self.script, settings=each.settings, micro_batch=each.micro_batch, accumulate=each.accumulate)
            for each in (candidate, *with_syncs)
        ]

    def _of(self, candidate: Candidate, answers: Sequence[dict[str, Any] | str]) -> Planned:
        """Return a candidate with its time, given its plans; or with the first sentence that is in its way."""
        trees = [each for each in answers if not isinstance(each, str)]
        if len(trees) < len(answers):
            return Planned(candidate=candidate, error=next(each for each in answers if isinstance(each, str)))
        tree = trees[0]
        if candidate.layout and candidate.layout.period:
            tree = with_syncs(trees[0], trees[1], candidate.layout.period)
        try:
            step, step_s = predict(structure(tree, candidate.words), self.device)
        except ConfigError as error:
            return Planned(candidate=candidate, error=f"its time is not known: {error}")
        return Planned(candidate=candidate, tree=tree, step_s=step_s, is_host_bound=step.host > step.total / 2)


def front(fitting: Iterable[Planned]) -> list[Planned]:
    """Return the fastest, and those that are smaller or more exact than all faster ones."""
    kept: list[Planned] = []
    for each in sorted(fitting, key=lambda planned: (planned.seconds, planned.peak)):
        if all(beats(each, faster) for faster in kept):
            kept.append(each)
    return [each for each in kept if not any(_replaces(other, each) for other in kept)]


def _replaces(other: Planned, planned: Planned) -> bool:
    """Whether a candidate that takes about as long is smaller, with numerics that are as exact."""
    is_smaller = other.peak <= SMALLER * planned.peak and other.numerics <= planned.numerics
    return is_smaller and other.seconds <= AS_LONG * planned.seconds


def beats(planned: Planned, faster: Planned) -> bool:
    """Whether a candidate is worth more time than a faster one."""
    return planned.peak <= SMALLER * faster.peak or planned.numerics < faster.numerics


def with_syncs(tree: dict[str, Any], syncing: dict[str, Any], period: int) -> dict[str, Any]:
    """Return the plan of a step with its part of an average of replicas, every `period` steps.

    Args:
        tree: Of a step without such an average.
        syncing: Of a step with one.
    """
    classes = []
    for one, other in zip(tree["classes"], syncing["classes"], strict=True):
        shared = {
            "work": _shared(one["work"], other["work"], "count", period),
            "collectives": _shared(one["collectives"], other["collectives"], "calls", period),
            "flops": one["flops"] + (other["flops"] - one["flops"]) / period,
        }
        classes.append(max(one, other, key=lambda each: int(each["peak"])) | shared)
    return tree | {"classes": classes}


def _shared(one: list[dict[str, Any]], other: list[dict[str, Any]], count: str, period: int) -> list[dict[str, Any]]:
    """Return the items of both lists, each with its count in `one` and what `other` has more, divided by `period`."""
    items = {_key(each, count): dict(each) for each in other}
    before = {_key(each, count): each[count] for each in one}
    for key, item in items.items():
        item[count] = before.get(key, 0) + (item[count] - before.get(key, 0)) / period
    return list(items.values())


def _key(item: dict[str, Any], count: str) -> tuple[Any, ...]:
    return tuple(value for name, value in item.items() if name != count)


def _next(search: Search, answer: Planned) -> Candidate | None:
    """Return what `search` asks for after `answer`; None if it has ended."""
    try:
        return search.send(answer)
    except StopIteration:
        return None
