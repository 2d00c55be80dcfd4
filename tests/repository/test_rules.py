"""The rules that keep the core small and plugins equal, as docs/architecture.md states them."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from stratagem.api.kinds import Command
from stratagem.discovery import catalog, registry
from stratagem.errors import ConfigError
from stratagem.runtime.default_hooks import DEFAULTS
from stratagem.stack.construction import make
from stratagem.stack.plugins import hook_functions, hook_implementations, hook_specifications
from stratagem_trainer.option_texts import option_docs

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "stratagem"
CORE_SOURCES = sorted(CORE.glob("**/*.py"))
#: What `stratagem plugins new` writes, to be read; nobody's package.
TEMPLATE = ROOT / "contrib" / "template" / "pyproject.toml"
PROJECTS = sorted({*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("contrib/*/pyproject.toml")} - {TEMPLATE})
OURS = {tomllib.loads(path.read_text())["project"]["name"]: path.parent for path in PROJECTS}
ENTRIES = [entry for entry in registry.entries() if entry.distribution in OURS]

#: Hooks whose first real plugin comes with a later strategy, and which one.
AWAITED: dict[str, str] = {}


def names_of_plugins() -> set[str]:
    """Commands are left out: a run cannot choose `stratagem fit`."""
    return {entry.name for entry in ENTRIES if entry.kind != "command"}


#: The Python packages of all distributions, each with its folder or file.
MODULES = {path.stem: path for folder in OURS.values() for path in folder.glob("stratagem_*")}


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


def test_core_imports_no_plugin():
    """`stratagem` itself names what users import from it, the trainer's classes among them, and imports it when asked."""
    sources = [path for path in CORE_SOURCES if path != CORE / "__init__.py"]

    assert {str(path): found for path in sources if (found := imported_by(path) & MODULES.keys())} == {}


def test_core_names_no_plugin_in_code():
    """Names stand in catalog.toml; docstrings may give examples, code may not compare with a name."""
    generic = {
        "cpu",
        "cuda",
        "gpu",
        "mps",
        "xpu",
        "full",
        "local",
        "progress",
        "checkpoint",
        "mpi",
        "deepspeed",
    }  # also words for other things
    launchers = {"fork", "spawn", "subprocess"}  # also start methods of multiprocessing
    arguments = {
        "activation_checkpointing",
        "compile",
        "sync_batchnorm",
        "deferred_init",
    }  # roles in the catalog, and plugins
    names = names_of_plugins() - generic - launchers - arguments

    assert {str(path): found for path in CORE_SOURCES if (found := strings_in_code(path) & names)} == {}


def imported_by(path) -> set[str]:
    """Return the first words of the modules that `path` imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def strings_in_code(path) -> set[str]:
    """Return the strings of `path` that are not documentation."""
    tree = ast.parse(path.read_text())
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
    }


def test_catalog_agrees_with_the_packages():
    listed = {
        (package, kind, name)
        for package, kinds in (catalog._catalog()["packages"] | catalog._catalog()["elsewhere"]).items()
        for kind, names in kinds.items()
        for name in names
    }
    provided = set()
    for path in PROJECTS:
        project = tomllib.loads(path.read_text())["project"]
        for group, points in project.get("entry-points", {}).items():  # a library has none
            if group.startswith("stratagem."):  # other groups name no plugins
                provided |= {(project["name"], group.removeprefix("stratagem."), name) for name in points}

    assert listed == provided


def test_catalog_knows_what_the_distribution_stratagem_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]}

    without_plugins = {"stratagem-core", "stratagem-parallel-unchanged", "stratagem-testing"}
    assert set(catalog._catalog()["packages"]) == installed - without_plugins


def test_catalog_defaults_exist():
    known = {name for entry in ENTRIES for name in (entry.name,)}

    assert {
        *catalog._catalog()["defaults"].values(),
        *catalog.arguments().values(),
        *catalog.automatic("callback"),
        *catalog.automatic("trainer_callback"),
    } <= known


# --- 2. Hooks ----------------------------------------------------------------------------------------------------


def test_every_hook_is_documented_with_its_exact_signature():
    text = (ROOT / "docs" / "hooks.md").read_text()
    signatures = [
        f"{hook}({', '.join(inspect.signature(hook_functions()[hook]).parameters)})" for hook in hook_specifications()
    ]

    assert signatures
    assert [signature for signature in signatures if f"### `{signature}`" not in text] == []


def test_every_hook_is_documented_with_its_docstring():
    text = " ".join((ROOT / "docs" / "hooks.md").read_text().split())
    docstrings = {
        hook: " ".join(inspect.getdoc(hook_functions()[hook]).replace("``", "`").split())
        for hook in hook_specifications()
    }

    assert [hook for hook, docstring in docstrings.items() if f")` {docstring}" not in text] == []


def test_docs_describe_no_hook_that_does_not_exist():
    documented = set(re.findall(r"^### `(\w+)\(", (ROOT / "docs" / "hooks.md").read_text(), re.MULTILINE))

    assert documented == set(hook_specifications())


def test_every_hook_is_mentioned_by_a_test():
    here = Path(__file__)
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").glob("**/*.py") if path != here)
    words = set(re.findall(r"\w+", sources))

    assert sorted(set(hook_specifications()) - words) == []


def test_every_hook_is_used_by_a_real_plugin():
    """A hook that the core itself answers where no plugin does is in use by nature."""
    used = set(DEFAULTS)
    for entry in ENTRIES:
        if entry.kind in registry.kinds():
            used |= set(hook_implementations(class_of(entry), of_class=True))
    unused = set(hook_specifications()) - used

    assert unused == set(AWAITED), "use each hook, or list it as awaited, not both"


# --- 3. Entry points ---------------------------------------------------------------------------------------------


def test_every_entry_point_names_a_plugin_with_documented_attrs_options():
    assert {f"{entry.kind} {entry.name}": wrong for entry in ENTRIES if (wrong := wrong_with(entry))} == {}


def wrong_with(entry) -> str:
    """Return what is wrong with the class that `entry` names, or nothing."""
    cls = class_of(entry)
    if entry.kind == "command":
        return "" if issubclass(cls, Command) else "is not a Command"
    if cls is None:  # a preset that needs a device that this machine does not have
        return ""
    if not (issubclass(cls, registry.kinds()[entry.kind].base) and attrs.has(cls)):
        return f"is not an attrs class derived from {registry.kinds()[entry.kind].base.__name__}"
    documented = option_docs(cls)
    missing = [field.name for field in attrs.fields(cls) if field.init and field.name not in documented]
    return f"options without a `#:` line: {missing}" if missing else ""


def test_every_entry_point_has_a_line_in_the_docs():
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").glob("**/*.md"))

    assert [entry.name for entry in ENTRIES if f"`{entry.name}`" not in pages] == []


# --- 4. Packages -------------------------------------------------------------------------------------------------


def test_all_txt_equals_the_folders():
    lines = (ROOT / "plugins" / "all.txt").read_text().splitlines()
    listed = {line.removeprefix("-e ").strip().partition("[")[0] for line in lines if line.startswith("-e plugins/")}

    assert listed == {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("plugins/*/pyproject.toml")}


def test_every_distribution_requires_the_core_and_is_described():
    wrong = []
    for name, folder in OURS.items():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        requires = any(re.match(r"stratagem-core\b(?!-)", requirement) for requirement in project["dependencies"])
        described = (folder / "README.md").read_text().startswith(f"# {name}")
        wrong += [] if requires and described else [name]

    assert wrong == []


#: Distributions that are a part of a plugin, which may support a release of torch later: package, and that of the plugin.
SECOND_LEVELS = {"stratagem_parallel_unchanged": "stratagem_parallel"}


@pytest.mark.slow
def test_plugins_import_no_other_plugin():
    """But libraries: they are there to be imported, and may bring plugins too; and the second level of a plugin's own."""
    packages = {entry.value.partition(":")[0].partition(".")[0] for entry in ENTRIES}
    plugins = {module for module in packages if MODULES[module].parent != ROOT / "plugins" / "libraries"}
    wrong = {}
    for module, path in sources_of_plugins():
        if foreign := imported_by(path) & plugins - {module, SECOND_LEVELS.get(module)}:
            wrong[str(path)] = foreign

    assert wrong == {}


def sources_of_plugins() -> Iterator[tuple[str, Path]]:
    """Yield the sources in plugins/, each with the Python package that it belongs to."""
    for module, place in MODULES.items():
        if place.is_relative_to(ROOT / "plugins"):
            yield from ((module, path) for path in sorted(place.rglob("*.py")) or [place])


#: What any plugin may import of the core: the API, and the libraries that are published beside it.
PUBLISHED = {"api", "errors", "checkpoint", "distributed"}
#: What commands and libraries may import too, besides `stratagem` itself.
FOR_COMMANDS = {"stack", "config", "discovery", "cli"}
#: What drives a run may import, too: the Trainer is the engine's first client.
FOR_CLIENTS = FOR_COMMANDS | {"runtime"}
#: Imports that are none of these, by file, and why.
EXCEPTIONS = {
    "plugins/deepspeed/stratagem_deepspeed/consolidation.py": {"stratagem.checkpoints"},  # users call it
}


@pytest.mark.slow
def test_plugins_import_only_what_the_core_publishes():
    wrong = []
    for _, path in sources_of_plugins():
        name = path.relative_to(ROOT).as_posix()
        allowed = {f"stratagem.{part}" for part in PUBLISHED}
        if name.startswith(("plugins/libraries/", "plugins/migrate/", "plugins/testing/", "plugins/tools/")):
            allowed |= {"stratagem"} | {f"stratagem.{part}" for part in FOR_COMMANDS}
        if name.startswith("plugins/trainer/"):
            allowed |= {f"stratagem.{part}" for part in FOR_CLIENTS}
        modules = modules_of_core_imported_by(path) - EXCEPTIONS.get(name, set())
        wrong += [f"{name}: {each}" for each in sorted(modules) if ".".join(each.split(".")[:2]) not in allowed]

    assert wrong == []


def modules_of_core_imported_by(path) -> set[str]:
    """Return the modules of the core that `path` imports, at run time or for types alone."""
    parts = {part.stem for part in CORE.iterdir()}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "stratagem":
            found |= {f"stratagem.{each.name}" if each.name in parts else "stratagem" for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {module for module in found if module.split(".")[0] == "stratagem"}


# --- 5. No strategy is special ------------------------------------------------------------------------------------


def test_nobody_asks_for_the_class_of_a_strategy():
    pattern = re.compile(r"(isinstance|issubclass)\([^)]*Strategy\b")
    sources = [*CORE.glob("**/*.py"), *ROOT.glob("plugins/**/*.py"), *ROOT.glob("contrib/**/*.py")]

    assert [str(path) for path in sources if pattern.search(path.read_text())] == []


# --- 6. Start-up -------------------------------------------------------------------------------------------------


#: The package of `stratagem plugins list`, and the library that has its text for terminals.
THE_COMMAND = {"stratagem_devtools", "stratagem_trainer"}


def test_listing_plugins_imports_neither_torch_nor_a_plugin():
    code = (
        "import sys; from stratagem.cli import main; main(['plugins', 'list']);"
        f"print('IMPORTED', sorted(set(sys.modules) & { ({'torch', *MODULES} - THE_COMMAND)!r}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "IMPORTED []" in result.stdout


def test_importing_the_package_imports_no_layer():
    code = "import sys, stratagem; print([m for m in sys.modules if m.startswith('stratagem.') or m == 'torch'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


#: What explains errors, describes a run, or belongs to devices, options and stages that a plain fit does not use.
NOT_NEEDED = {
    "packaging.requirements", "stratagem.cli", "stratagem.stack.class_lookup",
    "stratagem_meeting.attempts", "stratagem.runtime.run", "stratagem_copy_stream",
    "stratagem_ddp_sharded", "stratagem_deferred_init", "stratagem_sequences", "stratagem_transforms",
    "stratagem_peer_diagnosis.watchdog", "stratagem_trainer.command_line", "stratagem_trainer.trial",
}  # fmt: skip
FIT = """
import sys
import torch
import stratagem as sg

class Model(sg.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = sg.Trainer(strategy="ddp", devices=2, accelerator="cpu", max_steps=1, barebones=True)
trainer.fit(Model(), [torch.ones(2, 4)] * 2)
print("IMPORTED", trainer.global_rank, sorted(set(sys.modules) & NOT_NEEDED), flush=True)
"""


@pytest.mark.slow
def test_a_fit_of_two_processes_imports_only_what_it_needs(tmp_path):
    (tmp_path / "fit.py").write_text(f"NOT_NEEDED = {NOT_NEEDED}\n{FIT}")
    result = subprocess.run([sys.executable, "fit.py"], cwd=tmp_path, capture_output=True, text=True, check=True)

    imported = [line for line in result.stdout.splitlines() if line.startswith("IMPORTED")]
    assert sorted(imported) == ["IMPORTED 0 []", "IMPORTED 1 []"]


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
