"""`stratagem checkpoint` says what is in a checkpoint, whether it is whole, and how two differ."""

from __future__ import annotations

import json

import pytest
import torch

import stratagem as sg
from stratagem.cli import main
from stratagem_testing.reference import Net, joined_batches

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


@pytest.fixture
def written(tmp_path):
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Net(), joined_batches(3, 8))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


def test_inspect_tells_tensors_position_and_versions(written, capsys):
    assert main(["checkpoint", "inspect", str(written), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)

    assert report["model"][0] == {"name": "net.0.weight", "shape": [32, 16], "dtype": "float32"}
    assert report["parameters"] == sum(parameter.numel() for parameter in Net().parameters())
    assert report["optimizers"] == [6]
    assert report["loop"]["global_step"] == 3
    assert report["format"]["stratagem"] == sg.__version__
    assert main(["checkpoint", "inspect", str(written)]) == 0
    assert "net.0.weight  float32 (32, 16)" in capsys.readouterr().out


def test_verify_tells_whole_from_damaged(written, capsys):
    damaged = written.with_name("damaged.ckpt")
    damaged.write_bytes(written.read_bytes()[:-100])
    damaged.with_name("damaged.ckpt.sum").write_text(written.with_name("one.ckpt.sum").read_text())

    assert main(["checkpoint", "verify", str(written)]) == 0
    assert capsys.readouterr().out == f"{written}: whole\n"
    assert main(["checkpoint", "verify", str(written), str(damaged), str(written.with_name("no.ckpt"))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("whole")
    assert "is not what was written" in lines[1] or "not in an installed checkpoint format" in lines[1]
    assert "does not exist" in lines[2]


@pytest.mark.slow
def test_every_flipped_bit_is_found(written, capsys):
    content = written.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for position in torch.randint(len(content), (200,), generator=generator).tolist():
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        written.write_bytes(flipped)
        assert main(["checkpoint", "verify", str(written)]) == 1, f"the bit at {position}"
    written.write_bytes(content)
    assert main(["checkpoint", "verify", str(written)]) == 0
    capsys.readouterr()


def test_diff_names_what_differs(written, capsys, tmp_path):
    state = torch.load(written, weights_only=True)
    state["state_dict"]["net.0.bias"] = state["state_dict"]["net.0.bias"] * 1.01
    state["state_dict"]["net.4.bias"] = torch.zeros(2)
    del state["state_dict"]["net.2.bias"]
    state["loop"]["global_step"] = 9
    torch.save(state, tmp_path / "two.ckpt")

    assert main(["checkpoint", "diff", str(written), str(written)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["checkpoint", "diff", str(written), str(tmp_path / "two.ckpt"), "--json"]) == 1
    rows = {row["place"]: row["difference"] for row in json.loads(capsys.readouterr().out)}
    assert rows == {
        "state_dict.net.0.bias": "values differ by 1.0e-02 of their norm",
        "state_dict.net.2.bias": "only in the first",
        "state_dict.net.4.bias": "float32 (1,) and float32 (2,)",
        "loop.global_step": "3 and 9",
    }
    assert main(["checkpoint", "diff", str(written), str(tmp_path / "two.ckpt"), "--tolerance", "0.1"]) == 1
    assert "net.0.bias" not in capsys.readouterr().out


def test_mistakes_get_one_sentence(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("no checkpoint")

    assert main(["checkpoint", "inspect", str(tmp_path / "notes.txt")]) == 1
    assert "is not in an installed checkpoint format" in capsys.readouterr().err
    assert main(["checkpoint", "inspect", str(tmp_path / "no.ckpt")]) == 1
    assert "does not exist" in capsys.readouterr().err
