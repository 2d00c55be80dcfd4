"""Which cases `make test` runs, which shard of `make test-all` a case belongs to, and what each promise is guarded by.

A promise is a test function. `make test` runs at least one of its cases, or its marker names the test that guards the
promise there: ``sweep(guard="tests/core/test_x.py::test_y")``. Where none can, it says why: ``sweep(reason=...)``.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import zlib
from collections import defaultdict
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Keeps on one worker what imports DeepSpeed, transformers or torchmetrics: seconds, and twice the time of each later fork.
HEAVY = pytest.mark.xdist_group("heavy imports")
#: What `unguarded` returned for all tests; None where only a part of them was asked for.
UNGUARDED = pytest.StashKey[list[str] | None]()


def leave_to_test_all(items: list[pytest.Item], base: str | None) -> None:
    """Mark as `sweep` the cases that `every_push` does not name, and those of packages that did not change.

    Checks of the kit are left with the largest world size of their class.
    """
    for item in items:
        unchosen = any(not _names(item) & set(marker.args) for marker in item.iter_markers("every_push"))
        packages = packages_of(item)
        unchanged = packages and not any(_has_changed(folder, base) for folder in packages)
        if unchosen or unchanged or _has_a_larger_world(item):
            item.add_marker(pytest.mark.sweep)


def packages_of(item: pytest.Item) -> list[str]:
    """Return the folders of which one must have changed before `make test` runs `item`; none for most."""
    names = _names(item)
    markers = [each for each in item.iter_markers("when_changed") if names & {*each.kwargs.get("cases", names)}]
    return [folder for marker in markers for folder in marker.args]


def _has_changed(folder: str, base: str | None) -> bool:
    """Whether a file of a package, or one that the package imports, differs from `base`, or git cannot tell."""
    changed = changed_files(base)
    return changed is None or any(path.startswith(_with_imports(folder)) for path in changed)


@cache
def _with_imports(folder: str) -> tuple[str, ...]:
    """Return `folder`, and the first-party modules that its sources import, as paths below the root."""
    imported = {name for path in (ROOT / folder).rglob("*.py") for name in _imports(path)}
    return (folder, *(_relative(path) for path, module in _modules().items() if module in imported))


def _has_a_larger_world(item: pytest.Item) -> bool:
    """Whether a check of the kit also runs in more processes than `item` does."""
    size = item.callspec.params.get("world_size") if hasattr(item, "callspec") else None
    return size is not None and size < max(getattr(item.cls, "world_sizes", [0]))


def _names(item: pytest.Item) -> set[str]:
    """Return what `every_push` may call a case: its parameters, its test, or both as pytest prints them."""
    case = getattr(item, "callspec", None)
    return {item.name, getattr(item, "originalname", item.name)} | ({case.id} if case else set())


@cache
def changed_files(base: str | None) -> frozenset[str] | None:
    """Return the files that differ from `base`; None where git does not tell.

    By default that is where the branch left origin/main, the last release, or else the last commit.
    """
    head, branched = _git("rev-parse", "HEAD"), _git("merge-base", "HEAD", "origin/main")
    base = base or (branched if branched != head else "") or _git("describe", "--tags", "--abbrev=0", "--match", "v*")
    changed = _git("diff", "--name-only", base or "HEAD", "--")
    if changed is None:
        return None
    return frozenset([*changed.splitlines(), *(_git("ls-files", "--others", "--exclude-standard") or "").splitlines()])


def _git(*words: str) -> str | None:
    """Return what git prints; None where it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def part_of(shard: str) -> tuple[int, int]:
    """Return the number and the count in a `shard` such as 2/4."""
    found = re.fullmatch(r"(\d+)/(\d+)", shard)
    number, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--shard is {shard!r}; expected one such as 1/4, 2/4, 3/4 or 4/4")
    return number, count


def shard_of(items: list[pytest.Item], number: int, count: int) -> list[pytest.Item]:
    """Return the items of shard `number` of `count`: each shard gets as many tests of a file, in no order.

    Cases of a test share what their group prepares and are in one shard.
    """
    dealt = set(sorted(set(map(_in_one_shard, items)))[number - 1 :: count])
    return [item for item in items if _in_one_shard(item) in dealt]


def _in_one_shard(item: pytest.Item) -> tuple[str, int, str]:
    group = item.get_closest_marker("xdist_group")
    key = item.nodeid.partition("[")[0] + str(group.args or group.kwargs) if group else item.nodeid
    # Groups are few and long, such as the tests of an engine: one after the other, each in the next shard.
    return item.nodeid.partition("::")[0], 0 if group else zlib.crc32(key.encode()), key


def promises(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the cases of each test function that has any; parameters may leave none."""
    found = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("skip"):
            found[item.nodeid.partition("[")[0]].append(item)
    return found


def unguarded(items: list[pytest.Item]) -> list[str]:
    """Return a sentence for each test of which `make test` runs no case and that names no guard which it runs.

    It also has one for each marker that says what cannot be.
    """
    tests, wrong = promises(items), _mistakes(items)
    kept = {test for test, cases in tests.items() if any(map(_is_in_make_test, cases))}
    for test in tests.keys() - kept:
        cases = [case for case in tests[test] if not case.get_closest_marker("gpu")]
        guards = {guard for case in cases for guard in _guards(test, case)}
        if cases and not guards and not any(map(_reasons, cases)):
            wrong.append(
                f"{test} runs in `make test-all` alone; write guard=... in its marker, with a test of `make test`"
            )
        wrong += [f"{test} has the guard {guard}, which `make test` does not run" for guard in guards - kept]
    return sorted(wrong)


def _mistakes(items: list[pytest.Item]) -> list[str]:
    """Return a sentence for each case, folder or argument of a marker that does not exist."""
    names: dict[tuple[str, tuple[str, ...]], set[str]] = defaultdict(set)
    wrong = []
    for item in items:
        for marker in item.iter_markers("every_push"):
            owner = item.cls if item.cls and marker in getattr(item.cls, "pytestmark", []) else item.function
            names[f"every_push of {item.path.name}::{owner.__name__}", marker.args] |= _names(item)
        for marker in item.iter_markers("when_changed"):
            missing = [path for path in marker.args if not any(ROOT.glob(f"{path.rstrip('/')}*"))]
            wrong += [f"when_changed of {item.nodeid} names {path!r}, which does not exist" for path in missing]
            wrong += [] if marker.args else [f"when_changed of {item.nodeid} names no folder"]
            names[f"when_changed of {item.originalname}", tuple(marker.kwargs.get("cases", ()))] |= _names(item)
        for marker in (*item.iter_markers("sweep"), *item.iter_markers("every_push")):
            unknown = [*(set(marker.kwargs) - {"guard", "reason"}), *(marker.args if marker.name == "sweep" else ())]
            empty = [key for key, value in marker.kwargs.items() if not value]
            wrong += [f"{marker.name} of {item.nodeid} has {word!r}" for word in (*unknown, *empty)]
    for (owner, chosen), known in names.items():
        wrong += [f"{owner} names {name!r}, which is not a case of it" for name in set(chosen) - known]
    return wrong


def _guards(test: str, case: pytest.Item) -> set[str]:
    """Return the tests that guard the promise of `test`; where a marker names a class, that is the class's test."""
    markers = [*case.iter_markers("sweep"), *case.iter_markers("every_push"), *case.iter_markers("when_changed")]
    named = {marker.kwargs["guard"] for marker in markers if marker.kwargs.get("guard")}
    is_class = re.compile(r"::[A-Z]\w*$").search
    return {f"{guard}::{test.rpartition('::')[2]}" if is_class(guard) else guard for guard in named}


def _reasons(case: pytest.Item) -> list[str]:
    """Return why `make test` cannot guard a promise, as its markers say."""
    markers = [*case.iter_markers("sweep"), *case.iter_markers("when_changed")]
    return [marker.kwargs["reason"] for marker in markers if "reason" in marker.kwargs]


def _is_in_make_test(item: pytest.Item) -> bool:
    """Whether `make test` runs `item` whatever changed."""
    return not any(map(item.get_closest_marker, ("sweep", "gpu"))) and not packages_of(item)


def table(items: list[pytest.Item]) -> str:
    """Return the promises of which `make test` does not run every case, as a table in Markdown, with their guards."""
    lines = ["| promise | guarded in `make test` by | cases there | in `make test-all` |", "|---|---|---|---|"]
    for test, cases in sorted(promises(items).items()):
        kept = [case for case in cases if _is_in_make_test(case)]
        if len(kept) < len(cases) and not cases[0].get_closest_marker("gpu"):
            shown = [kept[0].name] if kept else _reasons(cases[0]) or sorted(_guards(test, cases[0]))
            lines.append(f"| `{test}` | `{', '.join(shown)}` | {len(kept)} | {len(cases)} |")
    return "\n".join(lines) + "\n"


def affected(items: list[pytest.Item], files: frozenset[str]) -> tuple[list[pytest.Item], list[str]]:
    """Return the tests that a change of `files` is likely to affect, and the files that affect none of them.

    These are all tests of a file that changed, that has the name of a changed module or imports it, or that mentions
    another changed file; and tests whose own code mentions a class, function or entry point of a changed module. Where
    there are none, they are those of the modules that import the changed one. What trains uses all of the core and of
    the Trainer, and names little of it: tests of that follow each change there. `make test` decides.
    """
    found: set[pytest.Item] = set()
    without = []
    for file in sorted(files):
        its = _affected_by(items, ROOT / file)
        found.update(its)
        without += [] if its else [file]
    return [item for item in items if item in found], without


def _affected_by(items: list[pytest.Item], path: Path) -> list[pytest.Item]:
    file = _relative(path)
    if file.startswith(("core/", "plugins/")) and path.suffix == ".py":
        trains, used = ROOT / "tests/parity", file.startswith(("core/", "plugins/trainer/"))
        training = [item for item in items if used and item.path.is_relative_to(trains)]
        return training + _affected_by_modules(items, {path})
    if file.startswith("contrib/"):
        return [item for item in items if item.path.name == "test_contrib.py" and f"[{path.parts[-2]}" in item.nodeid]
    if file.startswith("tests/") and path.suffix == ".py":
        stem = path.stem
        imports = re.compile(rf"^\s*(import|from) {stem}\b", re.MULTILINE)
        return [item for item in items if item.path == path or imports.search(_text(Path(item.path)))]
    return [item for item in items if (path.name if path.suffix else file) in _text(Path(item.path))]


def _affected_by_modules(items: list[pytest.Item], paths: set[Path]) -> list[pytest.Item]:
    """Return the tests of the modules at `paths`, or else of those that import them, and so on."""
    seen: set[Path] = set()
    while paths - seen:
        seen |= paths
        modules, words = {_module(path) for path in paths}, {word for path in paths for word in _public_names(path)}
        stems = {f"test_{path.stem.strip('_')}" for path in paths}
        found = [item for item in items if _mentions(item, modules, stems, words)]
        if found:
            return found
        paths = {path for path in _modules() if _imports(path) & modules}
    return []


def _mentions(item: pytest.Item, modules: set[str], stems: set[str], words: set[str]) -> bool:
    path = Path(item.path)
    if path.stem in stems or any(module in _text(path) for module in modules):
        return True
    owner = getattr(item, "cls", None) or getattr(item, "function", None)
    return bool(words & _words(owner)) if owner else False


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _words(owner: object) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", inspect.getsource(owner)))


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _module(path: Path) -> str:
    """Return the dotted name of a source, which has its distribution's folder before it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1 if parts[0] == "core" else 2 :]
    return ".".join(part for part in parts if part != "__init__")


@cache
def _modules() -> dict[Path, str]:
    """Return the sources of the core and of plugins, with their dotted names."""
    sources = (*ROOT.glob("core/**/*.py"), *ROOT.glob("plugins/*/**/*.py"))
    return {path: _module(path) for path in sources}


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return the modules that a source imports, and what it imports from them, which may be modules."""
    nodes = list(ast.walk(_tree(path)))
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    parts = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return frozenset(
        whole.union(*({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} for node in parts))
    )


def _tree(path: Path) -> ast.Module:
    """Return a source's tree; an empty one for a file that was deleted, or that is not finished."""
    try:
        return ast.parse(_text(path))
    except (OSError, SyntaxError):
        return ast.Module([], [])


def _public_names(path: Path) -> set[str]:
    """Return the public classes and functions of a source, and the names of entry points that refer to it."""
    found = {node.name for node in _tree(path).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    points = [point for each in distributions() for point in each.entry_points if point.attr in found]
    of_package = _module(path).partition(".")[0]
    return {name for name in found if name[0] != "_"} | {
        point.name for point in points if point.group.startswith("stratagem.") and point.module.startswith(of_package)
    }


if __name__ == "__main__":  # whether a file changed in one of the folders that are given
    changed = changed_files(os.environ.get("STRATAGEM_TESTS_BASE")) or ()
    sys.exit(not any(path.startswith(tuple(sys.argv[1:])) for path in changed))
