"""`stratagem migrate` reads a notebook as one program, and rewrites the cells that change and nothing else."""

from __future__ import annotations

import json
import os

import nbformat
import pytest

from stratagem.cli import main

OUTPUT = {"output_type": "stream", "name": "stdout", "text": ["pytorch_lightning é\n"]}


def notebook(path, *cells, **layout):
    """Write a notebook with these cells, those that begin with ``#md`` as text."""
    described = []
    for number, source in enumerate(cells):
        cell = {"cell_type": "markdown", "id": f"cell-{number}", "metadata": {"tags": [str(number)]}}
        if not source.startswith("#md"):
            cell |= {"cell_type": "code", "execution_count": number, "outputs": [OUTPUT]}
        described.append(cell | {"source": source.splitlines(keepends=True)})
    document = {"cells": described, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(document, **layout), encoding="utf-8")
    return path


def migrated(path, *cells, **layout):
    """Return the sources after `migrate --write`; all else must be as it was, and a second call changes nothing."""
    notebook(path, *cells, **layout)
    before = json.loads(path.read_text())
    main(["migrate", "--write", "--force", str(path)])
    once = path.read_bytes()
    main(["migrate", "--write", "--force", str(path)])
    assert path.read_bytes() == once
    after = json.loads(once)
    nbformat.validate(nbformat.reads(once.decode(), 4))
    sources = ["".join(cell.pop("source")) for cell in after["cells"]]
    old = ["".join(cell.pop("source")) for cell in before["cells"]]
    assert after == before
    assert len(sources) == len(old)
    return sources


def test_a_name_that_one_cell_imports_counts_in_later_cells(tmp_path):
    cells = migrated(
        tmp_path / "a.ipynb",
        "#md import pytorch_lightning as pl",
        "import torch\nimport pytorch_lightning as pl",
        "class Net(pl.LightningModule):\n    pass",
        "trainer = pl.Trainer(gpus=0, resume_from_checkpoint='a.ckpt')",
        "trainer.fit(Net())\n",
    )

    assert cells == [
        "#md import pytorch_lightning as pl",
        "import torch\nimport stratagem as sg",
        "class Net(sg.Module):\n    pass",
        'trainer = sg.Trainer(accelerator="cpu")',
        "trainer.fit(Net(), ckpt_path='a.ckpt')\n",
    ]


def test_each_of_two_classes_with_one_name_is_rewritten(tmp_path):
    step = "class Net(L.LightningModule):\n    def training_end(self, output):\n        return output"

    cells = migrated(tmp_path / "a.ipynb", "import lightning as L", step, step)

    assert cells[1] == cells[2] == step.replace("L.Lightning", "sg.").replace("training_end", "training_step_end")


@pytest.mark.parametrize(
    "cell",
    [
        "%matplotlib inline\n{}",
        "!pip install torch \\\n    -q\n{}",
        "files = !ls *.py\n{}",
        "files = %sx ls\n{}",
        "%%time\n{}",
        "\n%%capture out\n{}",
        "{}\nTrainer?",
        "?Trainer\n{}",
        "{}\nif True:\n    !ls\n    %cd ..\n",
        "{}\nx = 7\ny = (x\n  % 4)",
        "{}\nx = 7 \\\n  % 4",
        "{}\nx = '''\n%magic \n!no\n'''",
        "{}\nx = 1 ;",
        "{}\nprint('why?')",
    ],
)
def test_lines_that_are_not_python_stay(tmp_path, cell):
    old, new = (
        "from lightning import Trainer\nTrainer(gpus=0)",
        'from stratagem import Trainer\nTrainer(accelerator="cpu")',
    )

    cells = migrated(tmp_path / "a.ipynb", cell.format(old))

    assert cells == [cell.format(new)]


@pytest.mark.parametrize("magic", ["%%bash", "%%writefile lightning.py", "%%html"])
def test_a_cell_in_another_language_stays(tmp_path, magic):
    cell = f"{magic}\nimport lightning as L\n{{"

    cells = migrated(tmp_path / "a.ipynb", "import lightning as L", cell, "L.Trainer()")

    assert cells == ["import stratagem as sg", cell, "sg.Trainer()"]


@pytest.mark.parametrize(
    "layout",
    [{}, {"indent": 1}, {"indent": 2, "ensure_ascii": False}, {"indent": 4}, {"separators": (",", ":")}],
    ids=["line", "indent 1", "unicode", "indent 4", "compact"],
)
@pytest.mark.parametrize(
    "source",
    [
        ["import lightning as L\n", "L.Trainer() # é"],
        ["from lightning import Trainer as L"],
        "import lightning as L\nL.Trainer()",
    ],
)
def test_the_file_keeps_its_layout(tmp_path, layout, source):
    path = notebook(tmp_path / "a.ipynb", "1", "#md é", **layout)
    document = json.loads(path.read_text())
    document["cells"][0]["source"] = source
    before = json.dumps(document, **layout) + "\n"
    path.write_text(before, encoding="utf-8")

    assert main(["migrate", "--write", "--force", str(path)]) == 0

    after = path.read_text(encoding="utf-8")
    for old, new in (
        ("import lightning as L", "import stratagem as sg"),
        ("L.T", "sg.T"),
        ("om lightning", "om stratagem"),
    ):
        before = before.replace(old, new)
    assert after == before


def test_findings_name_the_cell_and_the_line_in_it(tmp_path, capsys):
    path = notebook(
        tmp_path / "a.ipynb",
        "#md text",
        "!pip install pytorch-lightning==1.9 torch\n!ls lightning_logs",
        "import lightning as L\n\ntrainer = L.Trainer(logger=False,\n  ipus=2)",
    )

    assert main(["migrate", str(path)]) == 1
    said = capsys.readouterr().out
    assert f"{path}:cell 2:1: !pip install pytorch-lightning==1.9 torch -> !pip install stratagem torch (" in said
    assert f"{path}:cell 2:2: !ls lightning_logs -> !ls stratagem_logs (" in said
    assert f"{path}:cell 3:1: import lightning as L -> import stratagem as sg" in said
    assert f"{path}:cell 3:4: ipus=2 -> " in said

    assert main(["migrate", "--json", str(path)]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [(each["cell"], each["line"]) for each in rows] == [(2, 1), (2, 2), (3, 1), (3, 3), (3, 4)]

    assert main(["migrate", "--write", "--force", str(path)]) == 1
    said = capsys.readouterr().out
    assert f"rewrote {path}" in said
    assert f"{path}:cell 3:4: ipus=2 -> " in said


def test_a_folder_of_logs_that_the_notebook_names_is_its_own(tmp_path, capsys):
    path = notebook(tmp_path / "a.ipynb", "folder = 'lightning_logs'", "%tensorboard --logdir lightning_logs")

    assert main(["migrate", str(path)]) == 0

    assert "nothing to change, nothing to check" in capsys.readouterr().out


def test_a_diff_is_one_of_the_file(tmp_path, capsys):
    path = notebook(tmp_path / "a.ipynb", "import lightning as L\nL.Trainer()", indent=1)

    assert main(["migrate", "--diff", str(path)]) == 0

    said = capsys.readouterr().out
    assert '-    "import lightning as L\\n"' in said
    assert '+    "import stratagem as sg\\n"' in said


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "a.ipynb is not a notebook (Expecting property name enclosed in double quotes"),
        ("[]", "a.ipynb is not a notebook (list indices must be integers"),
        ('{"worksheets": []}', "a.ipynb is not a notebook ('cells' is missing); expected version 4, in UTF-8"),
        ('{"cells": [{}]}', "a.ipynb is not a notebook ('cell_type' is missing)"),
        ("cell", "a.ipynb:cell 2 is not Python (invalid syntax, line 1)"),
    ],
    ids=["no JSON", "list", "version 3", "no type", "no Python"],
)
def test_a_notebook_that_cannot_be_read_is_named_beside_one_that_is_rewritten(tmp_path, capsys, content, sentence):
    path = tmp_path / "a.ipynb"
    if content == "cell":
        notebook(path, "import lightning as L", "L Trainer")
    else:
        path.write_text(content)
    before = path.read_bytes()
    notebook(tmp_path / "b.ipynb", "import lightning as L")

    assert main(["migrate", "--write", "--force", str(tmp_path)]) == 1

    said = capsys.readouterr()
    assert sentence in said.err
    assert f"rewrote {tmp_path / 'b.ipynb'}" in said.out
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_read_is_named(tmp_path, capsys, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refuse(path):
        if path == str(closed):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)

    assert main(["migrate", str(tmp_path)]) == 1

    assert f"{closed} cannot be read (Permission denied)" in capsys.readouterr().err


def test_settings_of_lightning_cli_that_cannot_be_read_are_named(tmp_path, capsys):
    (tmp_path / "fit.yaml").write_text("trainer: {max_epochs: 3\nmodel: x\n")

    assert main(["migrate", str(tmp_path)]) == 1

    assert "fit.yaml is not YAML (" in capsys.readouterr().err
