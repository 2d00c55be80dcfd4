"""Plugins are found through metadata, loaded when named, and one broken package harms nobody else."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import stratagem as sg
from stratagem.cli import main
from stratagem.discovery import registry
from stratagem.errors import PluginError
from stratagem_plugin_checks import check_entry

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


STRATEGY = """
    from attrs import define
    from stratagem import Strategy, hookimpl

    @define(eq=False, kw_only=True)
    class Mine(Strategy):
        #: Nothing.
        level: int = 1

        @hookimpl
        def wrap_model(self, module):
            return module
"""


def test_an_installed_strategy_is_listed_found_and_built(install):
    install("acme-strategy", {"stratagem.strategy": {"acme": "Mine"}}, STRATEGY)

    entry = registry.find("strategy", "ACME")
    trainer = sg.Trainer(strategy={"name": "acme", "level": 2}, **QUIET)

    assert (entry.distribution, entry.version) == ("acme-strategy", "1.0")
    assert trainer.strategy.level == 2


def test_listing_imports_nothing(install):
    install("acme-broken", {"stratagem.strategy": {"broken": "Nothing"}}, "raise RuntimeError('imported')")

    assert "broken" in [entry.name for entry in registry.entries("strategy")]
    assert "acme_broken" not in sys.modules


def test_a_broken_package_is_fatal_only_when_chosen(install):
    install("acme-broken", {"stratagem.strategy": {"broken": "Nothing"}}, "raise RuntimeError('out of order')")

    sg.Trainer(strategy="single_device", **QUIET)
    with pytest.raises(PluginError, match="acme-broken 1.0 cannot be imported .RuntimeError: out of order"):
        sg.Trainer(strategy="broken", **QUIET)


def test_a_broken_environment_does_not_stop_detection(install):
    install("acme-env", {"stratagem.environment": {"acme": "Nothing"}}, "raise RuntimeError('imported')")

    assert sg.Trainer(**QUIET).run.stack.environment.name == "local"


OLD_ENVIRONMENT = """
from attrs import define
from stratagem import Environment, World, hookimpl

@define(eq=False, kw_only=True)
class Mine(Environment):
    def detect(self){declared}:
        return {found}

    @hookimpl
    def setup_environment(self, run):
        return World()
"""


def test_an_environment_that_returns_no_evidence_is_ignored_with_a_warning(install):
    install(
        "acme-env", {"stratagem.environment": {"acme": "Mine"}}, OLD_ENVIRONMENT.format(declared="", found="'always'")
    )

    with pytest.warns(UserWarning, match=r"environment 'acme' is ignored: its detect\(\) returned 'always' and not an"):
        assert sg.Trainer(**QUIET).run.stack.environment.name == "local"


def test_an_environment_that_is_declared_to_return_text_is_broken(install):
    """Also where it is not present, so that nothing but the declaration shows it."""
    declared = " -> str | None"
    install(
        "acme-env", {"stratagem.environment": {"acme": "Mine"}}, OLD_ENVIRONMENT.format(declared=declared, found=None)
    )

    assert check_entry(registry.find("environment", "acme")) == (
        "its detect() is declared to return 'str | None', which is ignored; return a stratagem.api.Evidence, or None."
    )
    assert check_entry(registry.find("environment", "local")) is None


def test_two_packages_with_one_name_are_told_apart_by_distribution(install):
    install("acme-one", {"stratagem.strategy": {"twin": "Mine"}}, STRATEGY)
    install("acme-two", {"stratagem.strategy": {"twin": "Mine"}}, STRATEGY)

    with pytest.raises(PluginError, match="acme-one and acme-two.*'acme-one:twin' or 'acme-two:twin'"):
        sg.Trainer(strategy="twin", **QUIET)
    assert sg.Trainer(strategy="acme-two:twin", **QUIET).run.stack.strategies[0].entry.distribution == "acme-two"


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(PluginError, match="strategy 'ddpp' is unknown; expected one of.*did you mean 'ddp'"):
        sg.Trainer(strategy="ddpp", **QUIET)


def test_a_known_but_absent_plugin_names_its_package(monkeypatch):
    monkeypatch.setattr(registry.catalog, "providers", lambda kind: {"warp": "stratagem-warp"})

    with pytest.raises(
        PluginError,
        match="strategy 'warp' is not installed; run `pip install stratagem`; for this alone, run `pip install stratagem-warp`",
    ):
        sg.Trainer(strategy="warp", **QUIET)


@pytest.mark.parametrize(
    ("arguments", "name", "package"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm", "stratagem-libraries"),
        ({"activation_checkpointing": "Block"}, "activation_checkpointing", "stratagem-libraries"),
        ({}, "deferred_init", "stratagem-libraries"),
    ],
    ids=["sync_batchnorm", "activation_checkpointing", "init_module"],
)
def test_an_argument_whose_plugin_is_absent_names_the_package(request, monkeypatch, arguments, name, package):
    installed = [each for each in importlib.metadata.distributions() if each.name != package]
    monkeypatch.setattr(registry, "distributions", lambda: installed)
    request.addfinalizer(registry.refresh)
    registry.refresh()

    with (
        pytest.raises(
            PluginError,
            match=f"callback '{name}' is not installed; run `pip install stratagem`; for this alone, run `pip install {package}`",
        ),
        sg.Trainer(accelerator="cpu", **arguments, **QUIET).init_module(empty_init=True),
    ):
        pass


@pytest.mark.parametrize("name", ["stratagem-core", "stratagem_core", "stratagem", "stratagem-trainer"])
def test_a_package_for_another_core_is_refused(install, name):
    install("acme-new", {"stratagem.strategy": {"new": "Mine"}}, STRATEGY, requires=[f"{name}>=99"])

    with pytest.raises(PluginError, match=r"acme-new 1.0 needs stratagem >=99 and this is"):
        sg.Trainer(strategy="new", **QUIET)


@pytest.mark.parametrize(
    ("version", "clause", "fits"),
    [
        ("0.1.0", ">=0.1", True), ("0.1.0", ">0.1", False), ("0.1.0", "<0.2", True), ("1.4", "~=1.2", True),
        ("2.0", "~=1.2", False), ("1.2.9", "==1.2.*", True), ("1.3", "==1.2.*", False), ("1.3", "!=1.3", False),
        ("1.2.dev3", ">=1.2", True), ("0.1.0", ">=0.1,<0.2", True), ("0.2.0", ">=0.1,<0.2", False),
        ("0.10.1", ">=0.2,<0.11", True), ("0.1.0", ">=0.2,<0.11", False), ("0.1.dev3", ">=0.1,<0.2", True),
        ("0.1.0", "<0.2,>=0.1", True), ("0.2.0", "<0.2,>=0.1", False),
    ],
)  # fmt: skip
def test_version_clauses(version, clause, fits):
    assert (registry._unmet(f"stratagem{clause}", version) == "") is fits


@pytest.mark.parametrize("marker", ['python_version < "3"', 'extra == "next"'])
def test_a_requirement_counts_where_its_marker_applies(install, marker):
    requires = [f"stratagem>=99; {marker}", "stratagem-core[cli]>=0.1"]
    install("acme-marked", {"stratagem.strategy": {"marked": "Mine"}}, STRATEGY, requires=requires)

    assert sg.Trainer(strategy="marked", **QUIET).strategy.level == 1


def test_a_core_requirement_that_cannot_be_read_is_quoted(install):
    install("acme-odd", {"stratagem.strategy": {"odd": "Mine"}}, STRATEGY, requires=["stratagem>>1"])

    with pytest.raises(PluginError, match=r"acme-odd 1.0 needs 'stratagem>>1'; expected a requirement such as"):
        sg.Trainer(strategy="odd", **QUIET)


def test_deny_and_allow_lists(monkeypatch):
    monkeypatch.setenv("STRATAGEM_DISABLE_PLUGINS", "ddp")
    with pytest.raises(PluginError, match="strategy 'ddp' is hidden by STRATAGEM_DISABLE_PLUGINS"):
        registry.find("strategy", "ddp")

    monkeypatch.setenv("STRATAGEM_PLUGINS", "stratagem-ddp,single_device")
    names = {entry.name for entry in registry.entries()}
    assert "single_device" in names
    assert "ddp_spawn" in names
    assert "ddp" not in names
    assert "csv" not in names
    with pytest.raises(PluginError, match="logger 'csv' is hidden by STRATAGEM_PLUGINS; change"):
        registry.find("logger", "csv")


def test_a_run_warns_about_a_list_that_names_what_is_not_installed(monkeypatch):
    monkeypatch.setenv("STRATAGEM_DISABLE_PLUGINS", "peer_diagnosys")

    with pytest.warns(
        UserWarning, match="STRATAGEM_DISABLE_PLUGINS names 'peer_diagnosys', which is not installed; did"
    ):
        sg.Trainer(**QUIET)


def test_a_misspelt_hook_names_the_nearest(install):
    install("acme-typo", {"stratagem.strategy": {"typo": "Mine"}}, STRATEGY.replace("wrap_model", "wrap_modle"))

    with pytest.raises(PluginError, match="strategy 'typo' implements 'wrap_modle'.*did you mean 'wrap_model'"):
        sg.Trainer(strategy="typo", **QUIET)


def test_a_hook_argument_that_does_not_exist_is_refused(install):
    install("acme-arg", {"stratagem.strategy": {"arg": "Mine"}}, STRATEGY.replace("(self, module)", "(self, modul)"))

    with pytest.raises(PluginError, match="takes modul in wrap_model; .* did you mean 'module'"):
        sg.Trainer(strategy="arg", **QUIET)


def test_classes_are_importable_by_kind():
    from stratagem.strategies import DDPStrategy

    assert DDPStrategy().static_graph is False
    with pytest.raises(ImportError, match="WarpStrategy"):
        from stratagem.strategies import WarpStrategy  # noqa: F401


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("accelerators", "CPUAccelerator"), ("callbacks", "EarlyStopping"), ("checkpoints", "FullCheckpoint"),
        ("comm_hooks", "TopK"), ("environments", "LocalEnvironment"), ("launchers", "ForkLauncher"),
        ("loggers", "CSVLogger"), ("precisions", "MixedPrecision"), ("strategies", "DDPStrategy"),
    ],
)  # fmt: skip
def test_a_star_imports_the_classes_of_a_kind(module, name):
    space = {}
    exec(f"from stratagem.{module} import *", space)

    assert isinstance(space[name], type)
    assert {*space} - {"__builtins__"} == {*dir(sys.modules[f"stratagem.{module}"])}


def test_python_m_stratagem_is_the_same_program():
    result = subprocess.run(
        [sys.executable, "-m", "stratagem", "plugins", "list", "--kind", "strategy"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert "single_device" in result.stdout
    assert "precision" not in result.stdout


def test_check_lists_what_is_broken_and_why(install, capsys):
    install("acme-broken", {"stratagem.strategy": {"broken": "Nothing"}}, "raise RuntimeError('out of order')")
    install("acme-typo", {"stratagem.strategy": {"typo": "Mine"}}, STRATEGY.replace("wrap_model", "wrap_modle"))
    install("acme-kind", {"stratagem.precision": {"kind": "Mine"}}, STRATEGY)

    assert main(["plugins", "check"]) == 1
    lines = capsys.readouterr().out
    assert (
        "strategy broken: strategy 'broken' of acme-broken 1.0 cannot be imported (RuntimeError: out of order)" in lines
    )
    assert "strategy typo: it implements 'wrap_modle', which is not a hook; did you mean 'wrap_model'" in lines
    assert "precision kind: Mine is not a stratagem.Precision" in lines
    assert "strategy ddp: loads" in lines


@pytest.mark.parametrize("file", ["METADATA", "PKG-INFO"])
def test_names_versions_and_requirements_are_those_that_the_metadata_states(tmp_path, monkeypatch, file):
    folder = tmp_path / ("acme_odd-2.0.dist-info" if file == "METADATA" else "acme_odd.egg-info")
    folder.mkdir()
    headers = [
        "Metadata-Version: 2.1",
        "name: acme-odd",
        "Version:  2.0",
        "Requires-Dist: attrs",
        "Keywords: Name: no",
    ]
    core = "Requires-Dist: stratagem>=0.1; extra == 'x'"
    (folder / file).write_text(
        "\n".join([*headers, core, "", "Name: of-the-description", "Requires-Dist: stratagem>9"])
    )
    (folder / "entry_points.txt").write_text("[stratagem.logger]\nodd = acme_odd:Odd\n[console_scripts]\na = b:c\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.refresh()
    found = registry.find("logger", "odd")
    known = importlib.metadata.distribution("acme-odd")
    registry.refresh()

    assert (found.distribution, found.version, found.value) == (known.name, known.version, "acme_odd:Odd")
    assert found.core_requirements == (
        ("stratagem>=0.1; extra == 'x'",) if file == "METADATA" else found.core_requirements
    )
    assert list(found.core_requirements) == [each for each in known.requires or () if "stratagem" in each]


def test_kinds_are_listed_without_an_import_and_called_in_order():
    code = "import sys; from stratagem.discovery import registry as r; print(r.kind_names(), 'attrs' in sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert listed.split("] ") == [str(sorted(registry.kinds()))[:-1], "False\n"]
    assert [kind.place for kind in registry.kinds().values()] == sorted(
        kind.place for kind in registry.kinds().values()
    )
