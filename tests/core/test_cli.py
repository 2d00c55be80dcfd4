"""The stratagem program lists and shows plugins, for people and for programs, and fails with one sentence."""

from __future__ import annotations

import json

import pytest

from stratagem.cli import main


def test_list_by_kind(capsys):
    assert main(["plugins", "list"]) == 0
    text = capsys.readouterr().out

    assert "strategy:" in text
    assert "stratagem-ddp 0.1.0" in text


def test_list_as_json(capsys):
    assert main(["plugins", "list", "--kind", "comm_hook", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)

    names = [row["name"] for row in rows]
    assert names == sorted(names)
    assert {"bf16_compress", "fp16_compress", "powersgd"} <= set(names)
    assert set(rows[0]) == {"kind", "name", "distribution", "version", "value"}


def test_show_tells_options_capabilities_and_hooks(capsys):
    assert main(["plugins", "show", "DDP"]) == 0
    text = capsys.readouterr().out

    assert "bucket_cap_mb = 25.0  (a number)" in text
    assert "Larger buckets mean fewer messages" in text
    assert "gradient-buckets" in text
    assert "answers: backward, connect, " in text


def test_show_of_a_preset_has_its_defaults(capsys):
    assert main(["plugins", "show", "ddp_spawn", "--json"]) == 0
    options = {option["name"]: option for option in json.loads(capsys.readouterr().out)["options"]}

    assert options["start_method"]["default"] == "'spawn'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plugins", "show", "ddpp"], "no installed plugin is called 'ddpp'; did you mean 'ddp'"),
        (["plugins", "list", "--kind", "strategies"], "kind 'strategies' is unknown; .*did you mean 'strategy'"),
        (["plugins", "show", "ddp", "--kind", "precision"], "precision 'ddp' is unknown"),
    ],
)
def test_mistakes_get_one_sentence(capsys, arguments, message):
    assert main(arguments) == 1
    error = capsys.readouterr().err

    assert error.count("\n") == 1
    import re

    assert re.search(message, error)


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "plugins" in text
    assert "demo" in text
