"""Which cases `make test` runs, which shard of `make test-all` a case belongs to, and what each promise is guarded by.

A promise is a test function. `make test` runs at least one of its cases, or its marker names the test that guards the
promise there: ``sweep(guard="tests/core/test_x.py::test_y")``. Where none can, it says why: ``sweep(reason=...)``.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import zlib
from collections import defaultdict
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Keeps on one worker what imports DeepSpeed, transformers or torchmetrics: seconds, and twice the time of each later fork.
HEAVY = pytest.mark.xdist_group("heavy imports")
#: What `unguarded` returned for all tests; None where only a part of them was collected.
UNGUARDED = pytest.StashKey[list[str] | None]()


def leave_to_test_all(items: list[pytest.Item], base: str | None) -> None:
    """Mark as `sweep` the cases that `every_push` does not name, and those of packages that did not change.

    Checks of the kit are left with the largest world size of their class.
    """
    for item in items:
        unchosen = any(not _names(item) & set(marker.args) for marker in item.iter_markers("every_push"))
        folders = tuple(folder for marker in item.iter_markers("when_changed") for folder in marker.args)
        unchanged = folders and not any(path.startswith(folders) for path in changed_files(base))
        if unchosen or unchanged or _has_a_larger_world(item):
            item.add_marker(pytest.mark.sweep)


def _has_a_larger_world(item: pytest.Item) -> bool:
    """Whether a check of the kit also runs in more processes than `item` does."""
    size = item.callspec.params.get("world_size") if hasattr(item, "callspec") else None
    return size is not None and size < max(getattr(item.cls, "world_sizes", [0]))


def _names(item: pytest.Item) -> set[str]:
    """Return what `every_push` may call a case: its parameters, its test, or both as pytest prints them."""
    case = getattr(item, "callspec", None)
    return {item.name, getattr(item, "originalname", item.name)} | ({case.id} if case else set())


@cache
def changed_files(base: str | None) -> frozenset[str]:
    """Return the files that differ from `base`.

    By default that is where the branch left origin/main, the last release, or else the last commit.
    """
    base = (
        base or _git("merge-base", "HEAD", "origin/main") or _git("describe", "--tags", "--abbrev=0", "--match", "v*")
    )
    changed = _git("diff", "--name-only", base or "HEAD", check=True)
    return frozenset([*changed.splitlines(), *_git("ls-files", "--others", "--exclude-standard").splitlines()])


def _git(*words: str, check: bool = False) -> str:
    """Return what git prints; an empty string where it fails, unless that is to be raised."""
    errors = None if check else subprocess.DEVNULL  # not every clone has origin/main
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, check=check)
    return done.stdout.strip()


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


def is_whole(items: list[pytest.Item]) -> bool:
    """Whether every file of tests was collected."""
    folders = ("tests/*/test_*.py", "tests/test_*.py")
    return {path for pattern in folders for path in ROOT.glob(pattern)} <= {Path(item.path) for item in items}


def unguarded(items: list[pytest.Item]) -> list[str]:
    """Return a sentence for each test of which `make test` runs no case and that names no guard which it runs."""
    tests, wrong = promises(items), []
    kept = {test for test, cases in tests.items() if any(map(_is_in_make_test, cases))}
    for test in tests.keys() - kept:
        case = tests[test][0]
        if case.get_closest_marker("gpu") or _reasons(case):
            continue
        guards = _guards(test, case)
        if not guards:
            wrong.append(
                f"{test} runs in `make test-all` alone; write guard=... in its marker, with a test of `make test`"
            )
        wrong += [f"{test} has the guard {guard}, which `make test` does not run" for guard in guards - kept]
    return sorted(wrong)


def _guards(test: str, case: pytest.Item) -> set[str]:
    """Return the tests that guard the promise of `test`; where a marker names a class, that is the class's test."""
    markers = [*case.iter_markers("sweep"), *case.iter_markers("every_push"), *case.iter_markers("when_changed")]
    named = {marker.kwargs["guard"] for marker in markers if marker.kwargs.get("guard")}
    is_class = re.compile(r"::[A-Z]\w*$").search
    return {f"{guard}::{test.rpartition('::')[2]}" if is_class(guard) else guard for guard in named}


def _reasons(case: pytest.Item) -> list[str]:
    """Return why `make test` cannot guard a promise, as its markers say."""
    return [marker.kwargs["reason"] for marker in case.iter_markers("sweep") if "reason" in marker.kwargs]


def _is_in_make_test(item: pytest.Item) -> bool:
    return not (item.get_closest_marker("sweep") or item.get_closest_marker("gpu"))


def table(items: list[pytest.Item]) -> str:
    """Return the promises of which `make test` does not run every case, as a table in Markdown, with their guards."""
    lines = ["| promise | guarded in `make test` by | cases there | in `make test-all` |", "|---|---|---|---|"]
    for test, cases in sorted(promises(items).items()):
        kept = [case for case in cases if _is_in_make_test(case)]
        if len(kept) < len(cases) and not cases[0].get_closest_marker("gpu"):
            shown = [kept[0].name] if kept else _reasons(cases[0]) or sorted(_guards(test, cases[0]))
            lines.append(f"| `{test}` | `{', '.join(shown)}` | {len(kept)} | {len(cases)} |")
    return "\n".join(lines) + "\n"


def affected(items: list[pytest.Item], files: frozenset[str]) -> list[pytest.Item]:
    """Return the tests that a change of `files` is likely to affect; `make test` decides.

    These are all tests of a file that changed, that has the name of a changed module or imports it, or that mentions
    another changed file; and tests whose own code mentions a class, function or entry point of a changed module.
    """
    changed = [ROOT / file for file in files if (ROOT / file).exists()]
    sources = [path for path in changed if path.suffix == ".py" and path.is_relative_to(ROOT / "core")]
    sources += [path for path in changed if path.suffix == ".py" and path.is_relative_to(ROOT / "plugins")]
    words = {word for path in sources for word in _public_names(path)}
    modules = {_module(path) for path in sources}
    stems = tuple(f"test_{path.stem.strip('_')}" for path in sources)
    names = {path.name for path in changed if path not in sources}
    return [item for item in items if _is_affected(item, set(changed), modules, stems, words, names)]


def _is_affected(item, changed, modules, stems, words, names) -> bool:
    path = Path(item.path)
    text = _text(path)
    if path in changed or path.stem in stems or any(name in text for name in names):
        return True
    if any(module in text for module in modules):
        return True
    owner = getattr(item, "cls", None) or getattr(item, "function", None)
    return bool(words & _words(owner)) if owner else False


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _words(owner: object) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", inspect.getsource(owner)))


def _module(path: Path) -> str:
    """Return the dotted name of a source, which has its distribution's folder before it."""
    depth = 1 if path.is_relative_to(ROOT / "core") else 3
    parts = path.relative_to(ROOT).with_suffix("").parts[depth:]
    return ".".join(part for part in parts if part != "__init__")


def _public_names(path: Path) -> set[str]:
    """Return the public classes and functions of a source, and the names of entry points that refer to it."""
    tree = ast.parse(_text(path))
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    points = [point for each in distributions() for point in each.entry_points if point.attr in found]
    of_package = _module(path).partition(".")[0]
    return {name for name in found if name[0] != "_"} | {
        point.name for point in points if point.group.startswith("stratagem.") and point.module.startswith(of_package)
    }
