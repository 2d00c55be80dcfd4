"""Which cases `make test` runs, which shard of `make test-all` a case belongs to, and what each promise is guarded by.

A promise is a test function. `make test` runs at least one of its cases, or its marker names the test that guards the
promise there: ``sweep(guard="tests/core/test_x.py::test_y")``.
"""

from __future__ import annotations

import subprocess
import zlib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def leave_to_test_all(items: list[pytest.Item], base: str | None) -> None:
    """Mark as `sweep` the cases that `every_push` does not name, and those of packages that did not change."""
    for item in items:
        unchosen = any(not _names(item) & set(marker.args) for marker in item.iter_markers("every_push"))
        folders = [folder for marker in item.iter_markers("when_changed") for folder in marker.args]
        if unchosen or (folders and not any(path.startswith(tuple(folders)) for path in changed_files(base))):
            item.add_marker(pytest.mark.sweep)


def _names(item: pytest.Item) -> set[str]:
    """Return what `every_push` may call a case: its parameters, its test, or both as pytest prints them."""
    case = getattr(item, "callspec", None)
    return {item.name, getattr(item, "originalname", item.name)} | ({case.id} if case else set())


@cache
def changed_files(base: str | None) -> frozenset[str]:
    """Return the files that differ from `base`: by default where the branch left origin/main, or the last release.

    Nothing counts as changed where there is neither.
    """
    base = (
        base or _git("merge-base", "HEAD", "origin/main") or _git("describe", "--tags", "--abbrev=0", "--match", "v*")
    )
    if not base:
        return frozenset()
    return frozenset(_git("diff", "--name-only", base).splitlines()) | new_files()


def new_files() -> frozenset[str]:
    """Return the files that git does not know yet."""
    return frozenset(_git("ls-files", "--others", "--exclude-standard").splitlines())


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def in_shard(item: pytest.Item, number: int, count: int) -> bool:
    """Whether `item` is part of shard `number` of `count`: all cases of a test, and all tests of a group, are in one."""
    group = item.get_closest_marker("xdist_group")
    key = str(group.args or group.kwargs) if group else item.nodeid.partition("[")[0]
    return zlib.crc32(key.encode()) % count == number - 1


def promises(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the cases of each test function."""
    found = defaultdict(list)
    for item in items:
        found[item.nodeid.partition("[")[0]].append(item)
    return found


def unguarded(items: list[pytest.Item]) -> list[str]:
    """Return a sentence for each test of which `make test` runs no case and that names no guard which it runs."""
    tests, wrong = promises(items), []
    kept = {test for test, cases in tests.items() if any(map(_is_in_make_test, cases))}
    for test in tests.keys() - kept:
        guards = {marker.kwargs.get("guard") for marker in tests[test][0].iter_markers("sweep")} - {None}
        if not guards:
            wrong.append(f"{test} runs in `make test-all` alone; write sweep(guard=...) with a test of `make test`")
        wrong += [f"{test} names the guard {guard}, which `make test` does not run" for guard in guards - kept]
    return sorted(wrong)


def _is_in_make_test(item: pytest.Item) -> bool:
    return not (item.get_closest_marker("sweep") or item.get_closest_marker("gpu"))


def table(items: list[pytest.Item]) -> str:
    """Return the promises whose cases `make test` does not run all, as a table in Markdown, with what guards them."""
    lines = ["| promise | guarded in `make test` by | cases there | in `make test-all` |", "|---|---|---|---|"]
    for test, cases in sorted(promises(items).items()):
        kept = [case for case in cases if _is_in_make_test(case)]
        if len(kept) < len(cases) and not cases[0].get_closest_marker("gpu"):
            guards = {marker.kwargs["guard"] for marker in cases[0].iter_markers("sweep") if "guard" in marker.kwargs}
            shown = kept[0].name if kept else ", ".join(sorted(guards))
            lines.append(f"| `{test}` | `{shown}` | {len(kept)} | {len(cases)} |")
    return "\n".join(lines) + "\n"
