"""`make test-engines` tests every package, also after one that fails, and tells the result of each."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = {
    "a_killed": "import os\ndef test():\n    os.kill(os.getpid(), 9)\n",
    "b_fails": "import pytest\ndef test(): assert False\n@pytest.mark.skip\ndef test_skipped(): pass\n",
    "c_cannot_be_installed": "",
    "d_passes": "def test(): pass\ndef test_other(): pass\n",
}


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Return the script, as if `contrib/` had the packages of `TESTS`."""
    specification = importlib.util.spec_from_file_location("engines", ROOT / "scripts" / "engines.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for name, text in TESTS.items():
        folder = tmp_path / "contrib" / name
        folder.mkdir(parents=True)
        (folder / "engine.lock").write_text("# quick\n" if name == "d_passes" else "")
        (folder / f"test_{name}.py").write_text(text)
    monkeypatch.setattr(module, "ROOT", tmp_path)

    def environment(self):
        if self.name == "c_cannot_be_installed":
            raise subprocess.CalledProcessError(1, ["pip"])
        return Path(sys.executable)

    monkeypatch.setattr(module.Engine, "environment", environment)
    monkeypatch.setattr(module.Engine, "_install_package", lambda self, python: None)
    return module


@pytest.mark.slow
def test_the_others_are_tested_after_one_that_fails(engines, capfd):
    code = engines.main([])
    lines = capfd.readouterr().out.strip().splitlines()[-4:]

    assert code == 1
    assert [line.split(", ")[:-1] for line in lines] == [
        ["a_killed             FAILED  pytest ended with exit code -9"],
        ["b_fails              FAILED  0 passed", "1 failed", "1 skipped"],
        ["c_cannot_be_installed FAILED  its environment could not be made"],
        ["d_passes             passed  2 passed"],
    ]


@pytest.mark.slow
def test_names_and_arguments_of_pytest(engines, capfd):
    assert engines.main(["d_passes", "--", "-k", "other"]) == 0
    assert "passed  1 passed, " in capfd.readouterr().out
    assert engines.main(["--quick"]) == 0
    assert "passed  2 passed, " in capfd.readouterr().out
    assert engines.main(["d_passes", "--", "-k", "nothing"]) == 1
    assert "FAILED  0 passed, pytest ended with exit code 5, " in capfd.readouterr().out


def test_a_name_without_an_engine_is_refused(engines, capfd):
    with pytest.raises(SystemExit):
        engines.main(["central"])
    assert "central has no engine.lock; expected some of a_killed, b_fails" in capfd.readouterr().err


@pytest.mark.slow
def test_arguments_of_pytest_need_no_name(engines, capfd):
    assert engines.main(["--quick", "--", "-k", "other"]) == 0
    assert engines.main(["--", "--collect-only"]) == 1
    assert "a_killed             passed" in capfd.readouterr().out
