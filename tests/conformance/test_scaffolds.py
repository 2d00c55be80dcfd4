"""The tests that `stratagem plugins new` writes pass untouched, for every kind."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from stratagem.discovery import registry
from stratagem_devtools.scaffold import write

#: That of a strategy last: an author who follows the page has it checked too, in tests/repository/test_docs.py.
ORDER = sorted([*registry.kinds(), "command"], key=lambda kind: kind == "strategy")


@pytest.mark.when_changed(
    "plugins/testing/",
    "plugins/tools/",
    guard="tests/repository/test_docs.py::test_the_comm_hook_of_the_docs_is_short_and_passes_the_kit",
)
@pytest.mark.every_push("precision")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ORDER)
def test_the_tests_of_a_new_plugin_pass_untouched(kind, tmp_path):
    folder = write(kind, f"my_{kind}", tmp_path)
    # As installed: importable, and its entry point on the path.
    metadata = f"from flit_core import buildapi; buildapi.prepare_metadata_for_build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", metadata], cwd=folder, check=True)

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= (2 if kind == "command" else 5)
