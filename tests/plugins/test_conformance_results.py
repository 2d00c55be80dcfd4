"""What a package states of the kit: written into its README by `check`, read by `plugins list` and by the index page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from flit_core import buildapi

from stratagem.cli import main
from stratagem.discovery import registry
from stratagem.errors import StratagemError
from stratagem_devtools import conformance_results
from stratagem_devtools.scaffold import write

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return the folder of a new plugin, and a function that puts it on the path as an installation would."""
    folder = write("accelerator", "my_device", tmp_path)
    monkeypatch.syspath_prepend(folder)

    def install():
        monkeypatch.chdir(folder)
        shutil.rmtree(folder / "stratagem_my_device-0.1.0.dist-info", ignore_errors=True)
        buildapi.prepare_metadata_for_build_wheel(str(folder))
        conformance_results._metadata.cache_clear()
        registry.refresh()

    install()
    yield folder, install
    monkeypatch.undo()
    conformance_results._metadata.cache_clear()
    registry.refresh()


@pytest.mark.slow
def test_a_result_goes_into_the_readme_and_is_listed(installed, capsys):
    folder, install = installed
    assert main(["plugins", "list", "--kind", "accelerator"]) == 0
    assert "my_device  " in (before := capsys.readouterr().out)
    assert "checks:" not in before

    # Twice: the second result stands in place of the first.
    for _ in range(2):
        assert main(["plugins", "check", "my_device", "--json", "--write", str(folder / "README.md")]) == 0
    capsys.readouterr()
    install()
    assert main(["plugins", "list", "--kind", "accelerator"]) == 0
    listed = " ".join(capsys.readouterr().out.split())

    assert re.search(r"\(stratagem-my-device 0\.1\.0; checks: \d+ passed, \d+ skipped\)", listed)
    text = (folder / "README.md").read_text()
    assert text.startswith("# stratagem-my-device\n")
    assert text.count("| accelerator `my_device` | 0.1.0 |") == 1
    rows = page_of("stratagem-my-device", text, version="0.1.0")
    assert re.search(r"^\| \[stratagem-my-device\].* \| 0\.1\.0 \| .* \| `my_device`: \d+ passed", rows, re.MULTILINE)
    # Of another version nothing is stated.
    assert "passed" not in page_of("stratagem-my-device", text, version="0.2.0")


def test_a_failure_writes_nothing(tmp_path):
    entry = registry.find("strategy", "ddp")
    readme = tmp_path / "README.md"
    readme.write_text("mine\n")

    for rows in ([], [{"outcome": "passed"}, {"outcome": "failed"}]):
        with pytest.raises(StratagemError, match="so .*README.md stays as it is"):
            conformance_results.write(readme, entry, rows)
    assert readme.read_text() == "mine\n"


def test_write_needs_a_name_and_a_readme(tmp_path, capsys):
    assert main(["plugins", "check", "--write", str(tmp_path / "README.md")]) == 1
    assert "--write is given without a name" in capsys.readouterr().err
    assert main(["plugins", "check", "ddp", "--write", str(tmp_path / "README.md")]) == 1
    assert "which is not a file; expected the package's README.md" in capsys.readouterr().err


def page_of(name, description, version):
    """Return the page of an index with that project, one without the keyword, and one of another name."""
    info = {"name": name, "version": version, "summary": "An idea | of mine", "description": description,
            "package_url": f"https://index.example/{name}", "keywords": "stratagem-plugin"}  # fmt: skip
    answers = {
        "/simple/": {"projects": [{"name": name}, {"name": "stratagem-game"}, {"name": "torch"}]},
        f"/pypi/{name}/json": {"info": info},
        "/pypi/stratagem-game/json": {"info": info | {"name": "stratagem-game", "keywords": "chess,go"}},
    }

    class Index(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path]).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, str(ROOT / "scripts/plugin_index.py"), "--index", index]
        page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        server.shutdown()
    assert "game" not in page
    return page
