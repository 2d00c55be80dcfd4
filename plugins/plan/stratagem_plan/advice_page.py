"""The page of an advice: time over memory of all candidates, what each advised one holds, and its code."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from stratagem_pictures.drawings import tag
from stratagem_pictures.pages import document, figure, listed
from stratagem_plan import pictures
from stratagem_plan.advice import NOTHING, advice, facts, others, sections
from stratagem_plan.page import Drawn
from stratagem_plan.plan_file import structure
from stratagem_plan.search import Explorer, front


def drawn(explorer: Explorer) -> Drawn:
    """Return the pictures: one of all candidates, one of the memory of each advice."""
    best, limit = front(explorer.fitting), explorer.limit
    compared = [
        (each.candidate.words, each.seconds, float(each.peak), each.peak <= limit)
        for each in (*best, *others(explorer, best))
    ]
    note = "A line connects what nothing beats in both; numerics that are more exact do not count here."
    found: Drawn = {"compared": ("Time and memory", pictures.pareto(compared, limit), note)}
    for number, each in enumerate(best, start=1):
        assert each.tree
        picture = pictures.memory(structure(each.tree, each.candidate.words), limit)
        found[f"memory-{number}"] = (f"Memory of advice {number}", picture, each.candidate.words)
    return found


def text(explorer: Explorer, pictures_of: Drawn) -> str:
    """Return the page with these pictures."""
    script, best = explorer.script, front(explorer.fitting)
    advised = [advice(number, each, best, explorer.limit) for number, each in enumerate(best, start=1)]
    return document(
        f"{script.path.name}: advice", tag("p", "Which strategy to train with", class_="note"),
        tag("h1", script.path.name), tag("p", tag("code", " ".join([str(script.path), *script.arguments]))),
        tag("p", facts(explorer)), *([] if best else [tag("p", NOTHING.capitalize(), class_="bad")]),
        tag("div", *(_advised(*each) for each in advised), class_="tables"),
        tag("div", *(figure(*each) for each in pictures_of.values()), class_="charts"),
        tag("div", *(listed(title.capitalize(), lines) for title, lines in sections(explorer, best)), class_="tables"),
    )  # fmt: skip


def _advised(title: str, code: str, needs: str) -> Element:
    return tag("section", tag("h2", title), tag("pre", tag("code", code)), tag("p", needs))
