"""`stratagem postmortem` shows what each rank did last, as text, as data and as a page."""

from __future__ import annotations

import json

import pytest
from browser import browser

from stratagem.cli import main
from stratagem.errors import LaunchError
from stratagem_evidence import RankEvidence, keep
from stratagem_evidence.ring import Ring, Site

PHASES = ("next batch", "training_step")
EVIL = "<script>alert('you')</script> & \"both\" <!-- train.py:3"


def write(folder, last):
    """Write the evidence of three ranks, of which rank 1 stopped one collective before the others."""
    for rank in range(3):
        ring = Ring(folder, rank, PHASES)
        ring.add_site("a", Site("broadcast", "0,1,2#1", (0, 1, 2), 5, "int64", "train.py:1"))
        ring.add_site("b", Site("all_reduce", "0,1,2#1", (0, 1, 2), 7_000, "float32", last))
        for key in "aab"[: 2 if rank == 1 else 3]:
            ring.begin(key)
        ring.enter(2, step=12, batch=3)
        ring.close()
    known = {rank: RankEvidence(rank=rank, process=7, ending=-9 if rank == 1 else None) for rank in range(3)}
    known[1].place = last
    (folder / "2.note").write_text("rank 2 is slower than the others")
    keep(folder, known, LaunchError("rank 1 was killed by SIGKILL", do="look at the kernel log"))


def test_the_sentence_and_the_last_collectives_are_shown_side_by_side(tmp_path, capsys):
    write(tmp_path, "train.py:3")
    data = tmp_path / "all.json"

    assert main(["postmortem", str(tmp_path), "--last", "2", "--json", str(data)]) == 0
    sentence, empty, head, *ranks = capsys.readouterr().out.splitlines()
    assert (sentence, empty) == ("rank 1 was killed by SIGKILL; look at the kernel log.", "")
    assert head.split() == ["rank", "process", "ended", "step", "batch", "was", "in"]
    assert ranks[1].split()[:1] + ranks[1].split()[2:] == ["1", "SIGKILL", "12", "3", "train.py:3"]
    assert ranks[2].split()[-1] == "training_step"
    assert ranks[3:] == [
        "before: rank 2 is slower than the others",
        "", "collectives of ranks 0,1,2", "       1  all: broadcast() of 5 elements of int64 (train.py:1)",
        "       2  rank 0: all_reduce() of 7,000 elements of float32 (train.py:3)", "       2  rank 1: -",
        "       2  rank 2: all_reduce() of 7,000 elements of float32 (train.py:3)",
    ]  # fmt: skip
    written = json.loads(data.read_text())
    assert written["verdict"] == sentence
    assert [len(each["records"]) for each in written["ranks"].values()] == [3, 2, 3]


def test_files_that_do_not_tell_end_with_4_and_no_files_with_an_error(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "stratagem-one"
    folder.mkdir()
    Ring(folder, 0, PHASES).close()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert main(["postmortem"]) == 4  # the newest; this process still runs
    assert capsys.readouterr().out.startswith("the evidence does not tell which rank made this run end")
    assert main(["postmortem", str(tmp_path)]) == 1
    assert f"{tmp_path} has no evidence of a run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_page_fits_the_screen_and_runs_no_text_of_a_program(need, tmp_path, width, scheme):
    need("chromium", package="chromium")
    write(tmp_path, EVIL)
    path = tmp_path / "page.html"
    assert main(["postmortem", str(tmp_path), "--html", str(path)]) == 0

    with browser("chromium", tmp_path) as page:
        page.show(width, 900, scheme)
        page.open(path.as_uri())

        assert page.value("document.documentElement.scrollWidth") == width
        assert page.value("document.querySelectorAll('rect').length") == 8
        assert page.value("document.querySelectorAll('rect.last').length") == 3
        assert page.value("document.querySelector('td:last-child').textContent") == "training_step"
        assert EVIL in page.value("document.querySelector('table').textContent")
        assert page.complaints == []
        assert page.requested == [path.as_uri()]
