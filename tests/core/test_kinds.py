"""A package adds a kind of plugins: an argument, hooks, duties, a default; a broken one is nobody's problem."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

import stratagem as sg
from stratagem.discovery import registry
from stratagem.errors import ConfigError, PluginError
from stratagem_testing.training import QUIET
from stratagem_trainer.sources import from_arguments

SOURCE = '''
    """Judges answer `judge`; a run has exactly one."""

    import sys
    from typing import ClassVar

    from attrs import define
    from stratagem.api import Kind, Plugin, hookimpl
    from stratagem.api.markers import hookspec


    @hookspec(firstresult=True)
    def judge(value, run):
        """Answer: a verdict."""


    @define(eq=False, kw_only=True)
    class Judge(Plugin):
        kind: ClassVar[str] = "judge"


    @define(eq=False, kw_only=True)
    class Strict(Judge):
        """Wants at least `least`."""

        #: More refuses more.
        least: int = 3

        @hookimpl
        def judge(self, value):
            return "good" if value >= self.least else "bad"


    @define(eq=False, kw_only=True)
    class Kind_(Judge):
        """Likes everything."""

        @hookimpl
        def judge(self):
            return "good"


    @define(eq=False, kw_only=True)
    class Idle(Judge):
        """Judges nothing."""


    JUDGE = Kind("judge", Judge, single=True, duties=("judge",), default="kind", hooks=sys.modules[__name__])
'''

POINTS = """
    [stratagem.kind]
    judge = acme_judges:JUDGE
    broken = acme_nothing:BROKEN

    [stratagem.judge]
    strict = acme_judges:Strict
    kind = acme_judges:Kind_
    idle = acme_judges:Idle
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path, monkeypatch):
    folder = tmp_path / "acme_judges-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-judges\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(textwrap.dedent(POINTS))
    (tmp_path / "acme_judges.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme_judges", raising=False)
    registry.refresh()
    with pytest.warns(UserWarning, match=r"goes on without it: kind 'broken' of acme-judges 1.0 cannot be imported"):
        registry.kinds()
    yield
    monkeypatch.undo()
    registry.refresh()


def verdict(run, value=2):
    run.connect()
    try:
        return run.ask("judge", value=value)
    finally:
        run.close()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "good"),
        ({"judge": "strict"}, "bad"),
        ({"judge": {"name": "strict", "least": 2}}, "good"),
        ({"plugins": ["strict"]}, "bad"),
    ],
)
def test_a_run_has_the_plugin_that_its_argument_chooses_or_the_default(arguments, expected):
    assert verdict(sg.Run(accelerator="cpu", **arguments)) == expected


def test_a_trainer_and_a_command_line_choose_it_too():
    layer, *_ = from_arguments(["--judge", "strict", "--judge.least", "1"])
    trainer = sg.Trainer(**QUIET, accelerator="cpu", sources=[layer])

    assert verdict(trainer.run) == "good"
    assert "judge strict  (acme-judges 1.0; asked for (command line))" in trainer.run.explain()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"judge": ["strict", "kind"]}, ConfigError, "judge is chosen more than once: 'strict' and 'kind'"),
        (
            {"judge": {"name": "strict", "leest": 2}},
            ConfigError,
            "option judge.strict.leest is unknown.*did you mean 'least'",
        ),
        ({"judge": "stricd"}, PluginError, "judge 'stricd' is unknown.*did you mean 'strict'"),
        ({"judge": "idle"}, PluginError, "judge 'idle' does not implement judge"),
        ({"juge": "strict"}, ConfigError, "Run has no argument 'juge'.*did you mean 'judge'"),
    ],
)
def test_what_cannot_be_is_refused_as_for_every_kind(arguments, error, message):
    with pytest.raises(error, match=message):
        sg.Run(accelerator="cpu", **arguments)


def test_it_is_listed_where_it_acts(capsys):
    from stratagem.cli import main

    assert main(["plugins", "list", "--kind", "judge"]) == 0
    listed = capsys.readouterr().out

    assert list(registry.kinds())[-3:] == ["judge", "callback", "logger"]
    assert "strict  Wants at least `least`" in listed
    assert all("judge" not in entry.name for entry in registry.entries())


OTHERS = {
    "a class": ("referee = acme_others:Referee", "is <class 'acme_others.Referee'>; expected stratagem.api.Kind"),
    "another name": ("referee = acme_others:JUDGE", r"is Kind\('judge', ...\); expected stratagem.api.Kind\('referee'"),
    "twice": ("judge = acme_others:JUDGE", "kind 'judge' of acme-others 1.0 is also the kind of another package"),
    "of the engine": ("strategy = acme_others:STRATEGY", "kind 'strategy' .* is also the kind of another package"),
    "of the Trainer": ("callback = acme_others:CALLBACK", "kind 'callback' of acme-others .* kind of another package"),
    "an argument": ("steps = acme_others:STEPS", "has the argument 'max_steps', which exists already"),
    "a word": ("words = acme_others:WORDS", "has the argument 'sources', which exists already"),
    "a hook": ("hooked = acme_others:HOOKED", "adds the hook 'judge', which exists already"),
}

OTHER_SOURCE = """
    import acme_judges
    from stratagem.api import Kind, Plugin

    class Referee(Plugin): ...

    JUDGE, STRATEGY = Kind("judge", Referee), Kind("strategy", Referee)
    STEPS, WORDS = Kind("steps", Referee, argument="max_steps"), Kind("words", Referee, argument="sources")
    HOOKED, CALLBACK = Kind("hooked", Referee, hooks=acme_judges), Kind("callback", Referee, argument="referees")
"""


def add(tmp_path, name, points, source):
    folder = tmp_path / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(textwrap.dedent(points))
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
    sys.modules.pop(name, None)
    registry.refresh()


@pytest.mark.filterwarnings("ignore:the program goes on without it. kind 'broken'")
@pytest.mark.parametrize("case", OTHERS)
def test_a_kind_that_contradicts_another_is_left_out(case, tmp_path):
    point, warning = OTHERS[case]
    add(tmp_path, "acme_others", f"[stratagem.kind]\n{point}\n", OTHER_SOURCE)
    before = list(registry.kinds())  # names of this one are not there

    registry.refresh()
    with pytest.warns(UserWarning, match=warning):
        trainer = sg.Trainer(**QUIET, accelerator="cpu", max_steps=3, strategy="single_device")

    assert trainer.settings.max_steps == 3
    assert before == list(registry.kinds())
    assert "referee" not in before


def test_a_kind_of_the_trainer_is_not_replaced_where_the_trainer_is_not_imported(tmp_path):
    add(tmp_path, "acme_others", "[stratagem.kind]\ncallback = acme_others:CALLBACK\n", OTHER_SOURCE)
    code = "from stratagem.discovery import registry; print(registry.kinds()['callback'].base.__module__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )

    assert done.stdout.strip() == "stratagem_trainer.api.kinds", done.stderr


@pytest.mark.filterwarnings("ignore:the program goes on without it. kind 'broken'")
@pytest.mark.parametrize("name", ["logger", "checkpoint", "callback"])
def test_a_list_that_names_a_plugin_hides_no_kind_of_that_name(monkeypatch, name):
    monkeypatch.setenv("STRATAGEM_DISABLE_PLUGINS", name)

    assert name in registry.kinds()
    sg.Trainer(**QUIET, accelerator="cpu")


@pytest.mark.filterwarnings("ignore:the program goes on without it. kind 'broken'")
def test_what_is_denied_is_not_imported(monkeypatch):
    monkeypatch.setenv("STRATAGEM_DISABLE_PLUGINS", "acme-judges")
    sys.modules.pop("acme_judges", None)

    sg.Trainer(**QUIET, accelerator="cpu")

    assert "acme_judges" not in sys.modules
    assert "judge" not in registry.kinds()
    assert "judge" not in registry.kind_names()


@pytest.mark.filterwarnings("ignore:the program goes on without it. kind 'broken'")
@pytest.mark.parametrize("nothing", [False, []])
def test_a_default_that_is_not_wanted_or_not_allowed_is_left_out(nothing, monkeypatch):
    assert [each.name for each in sg.Run(accelerator="cpu").stack.others] == ["kind"]
    assert sg.Run(accelerator="cpu", judge=nothing).stack.others == []

    monkeypatch.setenv("STRATAGEM_PLUGINS", ",".join(entry.distribution for entry in registry.entries()
                                                     if entry.distribution.startswith("stratagem")))  # fmt: skip
    assert sg.Run(accelerator="cpu").stack.others == []


@pytest.mark.filterwarnings("ignore:the program goes on without it. kind 'broken'")
def test_run_files_and_help_know_the_argument(capsys):
    from stratagem_fit.schema import schema

    with pytest.raises(SystemExit):
        sg.Trainer.from_cli(["--help"])
    assert "--judge (the name of a stratagem.Judge" in capsys.readouterr().out
    assert "judge" in schema()["$defs"]["trainer"]["properties"]


@pytest.mark.filterwarnings("ignore:the program goes on without it. kind 'broken'")
def test_one_object_twice_and_a_plugin_of_no_kind_are_refused():
    callback = sg.Callback()

    with pytest.raises(ConfigError, match="callback 'Callback' is listed twice"):
        sg.Trainer(**QUIET, callbacks=[callback, callback])
    with pytest.raises(PluginError, match="of the kind 'referee', which no installed package has"):
        sg.Trainer(**QUIET, plugins=[type("Foo", (sg.Strategy,), {"kind": "referee"})()])


@pytest.mark.slow
def test_the_engine_runs_without_the_trainer_and_its_names_say_what_to_install():
    code = """
        import sys
        sys.modules["stratagem_trainer"] = None  # as if it were not installed
        import stratagem as sg, torch
        run, model = sg.Run(strategy="ddp", accelerator="cpu"), torch.nn.Linear(2, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.backward(model(torch.ones(3, 2)).sum())
        print(run.optimizer_step(optimizer))
        run.log_metrics({"loss": 1.0}, 1)  # there are no loggers
        try:
            sg.Trainer
        except ImportError as error:
            print(error)
    """
    hidden = os.environ | {registry.DENY_VARIABLE: "stratagem-trainer"}
    code = textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=hidden)

    assert done.stdout.splitlines() == [
        "True", "stratagem.Trainer is in a package that is not installed; run `pip install stratagem`"
    ], done.stderr  # fmt: skip
