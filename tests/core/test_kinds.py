"""A package adds a kind of plugins: an argument, hooks, duties, a default; a broken one is nobody's problem."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import stratagem as sg
from stratagem.config.sources import from_arguments
from stratagem.discovery import registry
from stratagem.errors import ConfigError, PluginError
from stratagem_testing.training import QUIET

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


def test_the_engine_runs_without_the_trainer_and_its_names_say_what_to_install():
    code = """
        import sys
        sys.modules["stratagem_trainer"] = None  # as if it were not installed
        import stratagem as sg, torch
        run, model = sg.Run(strategy="ddp", accelerator="cpu"), torch.nn.Linear(2, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.backward(model(torch.ones(3, 2)).sum())
        print(run.optimizer_step(optimizer))
        try:
            sg.Trainer
        except ImportError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)

    assert done.stdout.splitlines() == [
        "True", "stratagem.Trainer is in a package that is not installed; run `pip install stratagem-trainer`"
    ], done.stderr  # fmt: skip
