"""Every distribution declares what its modules import, and nothing else; `stratagem` requires all of them."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from attrs import frozen
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import stratagem

ROOT = Path(__file__).parents[2]

#: Declared without an import of our own: distribution, and what it needs these for.
USED_BY_OTHERS = {
    "stratagem-core": {"numpy"},  # torch.distributed sends objects through it, and torch does not require it
    "stratagem-mlflow": {"sqlalchemy", "alembic"},  # the local store of MLflow
    "stratagem-testing": {  # what the kit compares a plugin with, and runs it beside
        "stratagem-basics", "stratagem-callbacks", "stratagem-checkpoints", "stratagem-comm-hooks", "stratagem-ddp",
    },
}  # fmt: skip
#: Imported within a function that says what to install: distribution, extra, and what the extra adds.
OPTIONAL = {
    ("stratagem-transformer-engine", "engine", "transformer-engine"),
    ("stratagem-basics", "mpi", "mpi4py"),
    ("stratagem-callbacks", "plots", "matplotlib"),
    ("stratagem-callbacks", "tensorboard", "tensorboard"),
    ("stratagem-callbacks", "tqdm", "tqdm"),
    ("stratagem-checkpoints", "safetensors", "safetensors"),
    ("stratagem-tools", "safetensors", "safetensors"),
    ("stratagem-trainer", "cli", "pyyaml"),
    ("stratagem-loggers-hosted", "aim", "aim"),
    ("stratagem-loggers-hosted", "clearml", "clearml"),
    ("stratagem-loggers-hosted", "comet", "comet-ml"),
    ("stratagem-loggers-hosted", "trackio", "trackio"),
    ("stratagem-core", "remote", "universal-pathlib"),
    ("stratagem-parallel", "unchanged", "stratagem-parallel-unchanged"),
    ("stratagem-plan", "png", "resvg-py"),
    ("stratagem-tools", "kit", "stratagem-testing"),
}
#: Of no use without a library that pip does not install: in no set.
OF_ANOTHER_LIBRARY = {"mpi4py"}
#: Modules of engines that are in environments of their own, with the distribution where its name differs.
NOT_INSTALLED = {"mlflow": "mlflow-skinny"}
#: Engines that users install in another way: built by a script, or from a vendor's index; imported in modules of their own.
INSTALLED_APART = {
    "stratagem-colossalai": {"colossalai"},
    "stratagem-horovod": {"horovod"},
    "stratagem-transformer-engine": {"transformer-engine"},
}
#: Packages of contrib/ whose engine needs one version of torch.
OWN_TORCH = ("xla",)
#: Extras that users and tests install, which no module asks for.
SETS = {"all", "test"}
#: Engines that take long to install, or compile their operations: in `stratagem[all]` alone.
HEAVY = {"stratagem-deepspeed"}


@frozen
class Package:
    """A distribution of this repository, as its pyproject.toml and its sources describe it."""

    folder: Path
    name: str
    version: str
    requires: dict[str, Requirement]
    extras: dict[str, dict[str, Requirement]]

    @property
    def modules(self) -> dict[str, Path]:
        """Its Python packages by name; `stratagem` itself has none."""
        return {path.stem: path for path in self.folder.glob("stratagem*")}

    @property
    def sources(self) -> list[Path]:
        return [path for place in self.modules.values() for path in sorted(place.rglob("*.py")) or [place]]


def read(path: Path) -> Package:
    project = tomllib.loads(path.read_text())["project"]
    return Package(
        path.parent,
        project["name"],
        project["version"],
        requirements(project["dependencies"]),
        {extra: requirements(lines) for extra, lines in project.get("optional-dependencies", {}).items()},
    )


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(each.name): each for each in map(Requirement, lines)}


PACKAGES = {
    package.name: package
    for pattern in (
        "core/pyproject.toml",
        "plugins/*/pyproject.toml",
        "contrib/*/pyproject.toml",
        "examples/*/*/pyproject.toml",
    )
    for package in map(read, sorted(ROOT.glob(pattern)))
}
#: The distribution without code.
EVERYTHING = read(ROOT / "pyproject.toml")
#: Names of `stratagem` as modules write them, and the module of another distribution that has each.
NAMES_ELSEWHERE = {
    f"{prefix}.{name}": module.partition(".")[0]
    for name, module in stratagem._MODULES.items()
    if not module.startswith("stratagem.")
    for prefix in ("sg", "stratagem")
}
#: The Python packages of our distributions, installed or not.
OURS = {module: package.name for package in PACKAGES.values() for module in package.modules}


# --- Imports -----------------------------------------------------------------------------------------------------


def imported(package: Package) -> tuple[set[str], set[str]]:
    """Return the distributions that `package` imports while it is imported, and those within functions alone."""
    found, in_functions = set(), set()
    for path in package.sources:
        if path.name == "conformance.py" and package.name != "stratagem-testing":  # the kit alone imports it
            continue
        collect(ast.parse(path.read_text()), found, in_functions)
    at_once, later = (
        {provider(module, package) for module in modules - sys.stdlib_module_names - package.modules.keys()}
        for modules in (found, in_functions)
    )
    return at_once, later - at_once


def collect(node: ast.AST, found: set[str], in_functions: set[str]) -> None:
    """Add the first words of modules that are imported below `node`; imports for type checkers need no package."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in child.names}
        elif isinstance(child, ast.ImportFrom) and not child.level:
            found.add(str(child.module).partition(".")[0])
        elif isinstance(child, ast.Attribute) and ast.unparse(child) in NAMES_ELSEWHERE:
            found.add(NAMES_ELSEWHERE[ast.unparse(child)])
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            collect(child, in_functions, in_functions)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                collect(ast.Module([other], []), found, in_functions)
        else:
            collect(child, found, in_functions)


def provider(module: str, package: Package) -> str:
    """Return the distribution that has `module`, the declared one of several; the module's name if none is installed."""
    others = installed().get(module) or [NOT_INSTALLED.get(module, module)]
    names = [OURS[module]] if module in OURS else sorted(map(canonicalize_name, others))
    return next((name for name in names if name in package.requires), names[0])


installed = cache(packages_distributions)


@pytest.mark.slow
def test_every_distribution_declares_what_its_modules_import():
    wrong = {}
    for name, package in PACKAGES.items():
        at_once, later = imported(package)
        optional = {needed for owner, _, needed in OPTIONAL if owner == name}
        apart = INSTALLED_APART.get(name, set())
        optional -= apart
        needed = (at_once | (later - optional) | USED_BY_OTHERS.get(name, set())) - apart
        if package.requires.keys() ^ needed or optional - later:
            wrong[name] = {
                "imports, but does not declare": needed - package.requires.keys(),
                "declares, but does not import": package.requires.keys() - needed,
                "does not import within functions alone": optional - later,
            }

    assert wrong == {}


def test_extras_add_what_modules_import_within_functions():
    declared = {
        (package.name, extra, needed)
        for package in PACKAGES.values()
        for extra, lines in package.extras.items()
        if extra not in SETS
        for needed in lines
    }

    assert declared == OPTIONAL


def test_imports_for_type_checkers_and_within_functions_are_told_apart():
    found, in_functions = set(), set()
    source = (
        "import a.b, c\nfrom d.e import f\nfrom . import g\n"
        "if TYPE_CHECKING:\n    import h\nelse:\n    import i\n"
        "class K:\n    import j\n    def m(self):\n        if k:\n            from l import m\n"
    )
    collect(ast.parse(source), found, in_functions)

    assert found == {"a", "c", "d", "i", "j"}
    assert in_functions == {"l"}


# --- The distribution that installs all --------------------------------------------------------------------------


def test_stratagem_requires_the_core_and_every_plugin_and_its_extra_all_has_heavy_engines():
    lines = (ROOT / "plugins" / "all.txt").read_text().splitlines()
    folders = {ROOT / line.removeprefix("-e ") for line in lines if line.startswith("-e ")}
    listed = {package.name for package in PACKAGES.values() if package.folder in folders}

    assert "." in lines
    assert EVERYTHING.requires.keys() == listed - HEAVY
    assert "stratagem-core" in listed
    assert {extra: lines.keys() for extra, lines in EVERYTHING.extras.items()} == {"all": HEAVY}


def test_stratagem_has_every_option_of_what_it_requires():
    """Of the core's extras and the plugins' own; the kit stands in the list itself."""
    required = {each for each in OPTIONAL if each[0] in EVERYTHING.requires}
    declared = {(name, extra) for name, extra, needed in required if needed not in {*PACKAGES, *OF_ANOTHER_LIBRARY}}

    assert declared == {(name, extra) for name, needed in EVERYTHING.requires.items() for extra in needed.extras}


def test_uv_installs_and_has_locked_every_package_of_plugins():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    locked = {each["name"]: each for each in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    folders = [path.parent for path in [ROOT / "pyproject.toml", *(ROOT.glob("plugins/*/pyproject.toml"))]]

    for folder in [*folders, ROOT / "core"]:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
        names = {canonicalize_name(Requirement(line).name) for line in [*project.get("dependencies", []), *extras]}
        known = locked[project["name"]]["metadata"].get("requires-dist", [])
        assert {each["name"] for each in known} == names, f"{project['name']}: run `uv lock`"
        assert folder == ROOT or root["sources"][project["name"]] == {"workspace": True}


def test_every_distribution_has_the_addresses_of_the_repository():
    others = (ROOT / "examples", ROOT / "contrib" / "template")
    published = [each for each in PACKAGES.values() if not any(map(each.folder.is_relative_to, others))]
    addresses = urls(EVERYTHING)

    assert addresses.keys() == {"Documentation", "Source", "Changelog", "Issues"}
    assert all(address.startswith(addresses["Source"]) for address in addresses.values())
    assert {package.name: urls(package) for package in published if urls(package) != addresses} == {}


def urls(package: Package) -> dict[str, str]:
    return tomllib.loads((package.folder / "pyproject.toml").read_text())["project"].get("urls", {})


# --- What is built -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", ["core", "plugins/basics", "plugins/callbacks", "plugins/libraries", "plugins/tools"]
)
def test_a_wheel_made_from_an_sdist_has_every_file(tmp_path, folder):
    run_hook("build_sdist", ROOT / folder, tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(tmp_path, filter="data")
    run_hook("build_wheel", archive.with_suffix("").with_suffix(""), tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT / folder, capture_output=True, text=True, check=True).stdout
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert files == set(listing.split()) - {"README.md", "pyproject.toml"}


@pytest.mark.slow
def test_stratagem_has_no_code(tmp_path):
    run_hook("build_sdist", ROOT, tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(tmp_path, filter="data")
    for source in (ROOT, archive.with_suffix("").with_suffix("")):
        run_hook("build_wheel", source, tmp_path)
        (wheel,) = tmp_path.glob("*.whl")

        assert [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name] == []
    assert list(tmp_path.rglob("*.py")) == []


def run_hook(name: str, source: Path, into: Path) -> None:
    """Call a hook of hatchling, as pip does: in the folder of the sources."""
    code = f"from hatchling import build; build.{name}({str(into)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, stdout=subprocess.DEVNULL)


# --- Versions ----------------------------------------------------------------------------------------------------


def test_every_distribution_fits_this_version_of_the_others():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    major, minor = map(int, version.split(".")[:2])
    expected = f"<{major}.{minor + 1},>={major}.{minor}"
    wrong = {
        (package.name, str(requirement))
        for package in [*PACKAGES.values(), EVERYTHING]
        for requirements in (package.requires, *package.extras.values())
        for requirement in requirements.values()
        if requirement.name in PACKAGES.keys() - {package.name} and str(requirement.specifier) != expected
    }

    assert wrong == set()
    assert {package.version for package in [*PACKAGES.values(), EVERYTHING]} == {version}


@pytest.mark.slow
def test_make_version_writes_every_version(tmp_path):
    listing = [
        "git", "ls-files", "*.toml", "*.toml.txt", "docs/*.md", "scripts/*.py", "*/_version.py", "*/scaffold.py", "conda",
    ]  # fmt: skip
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for command in (["git", "init", "-q"], ["git", "add", "."], [sys.executable, "scripts/version.py", "1.4.2"]):
        subprocess.run(command, cwd=tmp_path, check=True)

    written = {name: (tmp_path / name).read_text() for name in files if not name.startswith("docs/changes/")}
    assert [name for name, text in written.items() if re.search(r"stratagem\S*>=0\.", text)] == []
    assert {
        read(tmp_path / name).version for name in files if re.match(r"(core/|plugins/.*)?pyproject.toml$", name)
    } == {"1.4.2"}
    assert '__version__: Final = "1.4.2"' in written["core/stratagem/_version.py"]
    assert '  version: "1.4.2"' in written["conda/recipe.yaml"]
    assert "torch>=2.11,<2.14" in written["core/pyproject.toml"]


def test_torch_is_declared_with_the_range_that_is_tested():
    """`make test` pins the highest, `make test-lowest` the lowest; the template leaves the range to the core."""
    declared = {
        name: str(package.requires["torch"].specifier)
        for name, package in PACKAGES.items()
        if "torch" in package.requires and package.folder.name not in ("template", *OWN_TORCH)
    }
    lowest, highest = (
        re.search(rf"^{variable} *\?= torch==2\.(\d+)\.\*$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
        for variable in ("LOWEST_TORCH", "TORCH")
    )

    assert declared == dict.fromkeys(declared, f"<2.{int(highest) + 1},>=2.{lowest}")
