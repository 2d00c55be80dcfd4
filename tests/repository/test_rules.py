"""The rules that keep the core small and plugins equal, as docs/architecture.md states them."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import pytest

from stratagem.api import hooks
from stratagem.api.kinds import KINDS, Command
from stratagem.errors import ConfigError
from stratagem.runtime.default_hooks import DEFAULTS
from stratagem.stack import catalog, registry
from stratagem.stack.construction import make
from stratagem.stack.describe import option_docs
from stratagem.stack.plugin_hooks import hook_implementations, hook_specifications

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "stratagem"
#: What `stratagem plugins new` writes, to be read; nobody's package.
TEMPLATE = ROOT / "contrib" / "template" / "pyproject.toml"
PROJECTS = sorted({*ROOT.glob("plugins/*/*/pyproject.toml"), *ROOT.glob("contrib/*/pyproject.toml")} - {TEMPLATE})
OURS = {tomllib.loads(path.read_text())["project"]["name"]: path.parent for path in PROJECTS}
ENTRIES = [entry for entry in registry.entries() if entry.distribution in OURS]

#: Hooks whose first real plugin comes with a later strategy, and which one.
AWAITED = {"forward_backward": "a pipeline strategy, which owns the step"}


def names_of_plugins() -> set[str]:
    """Commands are left out: `stratagem fit` is no plugin that a run could choose."""
    return {entry.name for entry in ENTRIES if entry.kind != "command"}


def module_of(folder: Path) -> str:
    """Return what Python calls the package in `folder`."""
    return tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flit"]["module"]["name"]


MODULES = {module_of(folder) for folder in OURS.values()}


def class_of(entry):
    """The plugin's class; None for a preset that this machine cannot make (`gpu` without one)."""
    target = entry.load()
    if isinstance(target, type):
        return target
    try:
        return type(make(entry, {}))
    except ConfigError:
        return None


# --- 1. The core knows no plugin ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", sorted(CORE.glob("**/*.py")), ids=lambda path: path.name)
def test_core_imports_no_plugin(source):
    imported = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])

    assert not imported & MODULES


@pytest.mark.parametrize("source", sorted(CORE.glob("**/*.py")), ids=lambda path: path.name)
def test_core_names_no_plugin_in_code(source):
    """Names stand in catalog.toml; docstrings may give examples, code may not compare with a name."""
    tree = ast.parse(source.read_text())
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
    }
    generic = {"cpu", "cuda", "gpu", "mps", "full", "local", "progress", "checkpoint"}  # also words for other things
    launchers = {"fork", "spawn", "subprocess"}  # also start methods of multiprocessing

    assert not strings & (names_of_plugins() - generic - launchers)


def test_catalog_agrees_with_the_packages():
    listed = {
        (package, kind, name)
        for package, kinds in catalog._catalog()["packages"].items()
        for kind, names in kinds.items()
        for name in names
    }
    provided = set()
    for path in PROJECTS:
        project = tomllib.loads(path.read_text())["project"]
        for group, points in project.get("entry-points", {}).items():  # a library has none
            provided |= {(project["name"], group.removeprefix("stratagem."), name) for name in points}

    assert listed == provided


def test_catalog_defaults_exist():
    known = {name for entry in ENTRIES for name in (entry.name,)}

    assert set(catalog._catalog()["defaults"].values()) <= known


# --- 2. Hooks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", sorted(hook_specifications()))
def test_hook_is_documented_with_its_exact_signature(hook):
    signature = f"{hook}({', '.join(inspect.signature(getattr(hooks, hook)).parameters)})"

    assert f"### `{signature}`" in (ROOT / "docs" / "hooks.md").read_text()


def test_docs_describe_no_hook_that_does_not_exist():
    documented = set(re.findall(r"^### `(\w+)\(", (ROOT / "docs" / "hooks.md").read_text(), re.MULTILINE))

    assert documented == set(hook_specifications())


@pytest.mark.parametrize("hook", sorted(hook_specifications()))
def test_hook_is_mentioned_by_a_test(hook):
    here = Path(__file__)
    sources = [path.read_text() for path in (ROOT / "tests").glob("**/*.py") if path != here]

    assert any(re.search(rf"\b{hook}\b", source) for source in sources)


@pytest.mark.parametrize("hook", sorted(hook_specifications()))
def test_hook_is_used_by_a_real_plugin(hook):
    """A hook that the core itself answers where no plugin does is in use by nature."""
    used = set(DEFAULTS)
    for entry in ENTRIES:
        if entry.kind in KINDS:
            used |= set(hook_implementations(class_of(entry), of_class=True))

    assert (hook in used) != (hook in AWAITED), f"{hook}: use it, or list it as awaited, not both"


# --- 3. Entry points ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_entry_point_names_a_plugin_with_documented_attrs_options(entry):
    cls = class_of(entry)
    if entry.kind == "command":
        assert issubclass(cls, Command)
        return
    if cls is None:
        pytest.skip("this preset needs a device that this machine does not have")

    assert issubclass(cls, KINDS[entry.kind].base)
    assert attrs.has(cls)
    documented = option_docs(cls)
    assert [field.name for field in attrs.fields(cls) if field.init and field.name not in documented] == []


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_entry_point_has_a_line_in_the_docs(entry):
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").glob("**/*.md"))

    assert f"`{entry.name}`" in pages


# --- 4. Packages -------------------------------------------------------------------------------------------------


def test_all_txt_equals_the_folders():
    lines = (ROOT / "plugins" / "all.txt").read_text().splitlines()
    listed = {line.removeprefix("-e ").strip() for line in lines if line.startswith("-e plugins/")}

    assert listed == {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("plugins/*/*/pyproject.toml")}


@pytest.mark.parametrize("name", sorted(OURS))
def test_distribution_requires_the_core_and_is_described(name):
    project = tomllib.loads((OURS[name] / "pyproject.toml").read_text())["project"]

    assert any(re.match(r"stratagem\b(?!-)", requirement) for requirement in project["dependencies"])
    assert (OURS[name] / "README.md").read_text().startswith(f"# {name}")


@pytest.mark.parametrize("path", sorted(ROOT.glob("plugins/*/*/**/*.py")), ids=lambda path: path.stem)
def test_plugins_import_no_other_plugin(path):
    own = path.relative_to(ROOT).parts[:3]
    foreign = {
        entry.value.partition(":")[0].partition(".")[0]
        for entry in ENTRIES
        if OURS[entry.distribution].relative_to(ROOT).parts[:3] != own
    }
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []

        assert not {name.partition(".")[0] for name in names} & foreign


# --- 5. No strategy is special ------------------------------------------------------------------------------------


def test_nobody_asks_for_the_class_of_a_strategy():
    pattern = re.compile(r"(isinstance|issubclass)\([^)]*Strategy\b")
    sources = [*CORE.glob("**/*.py"), *ROOT.glob("plugins/**/*.py"), *ROOT.glob("contrib/**/*.py")]

    assert [str(path) for path in sources if pattern.search(path.read_text())] == []


# --- 6. Start-up -------------------------------------------------------------------------------------------------


def test_listing_plugins_imports_neither_torch_nor_a_plugin():
    code = (
        "import sys; from stratagem.cli import main; main(['plugins', 'list']);"
        f"print('IMPORTED', sorted(set(sys.modules) & { ({'torch', *MODULES})!r}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "IMPORTED []" in result.stdout


def test_importing_the_package_imports_no_room():
    code = "import sys, stratagem; print([m for m in sys.modules if m.startswith('stratagem.') or m == 'torch'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


# --- The project stands alone ------------------------------------------------------------------------------------


def test_no_file_points_outside_the_repository():
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    outside = re.compile("|".join(map(re.escape, (str(ROOT), "/".join(["..", "shared"])))))
    found = []
    for name in listing.split():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".yml"} and path != Path(__file__) and path.exists():
            found += [name] if outside.search(path.read_text()) else []

    assert found == []
