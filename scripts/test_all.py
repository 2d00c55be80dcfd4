"""Run all tests, or one shard of them; run what failed once more, alone.

    python scripts/test_all.py --shard 1/4 -n 3

Other arguments are pytest's. Tests that pass alone are listed at the end. More than two of them fail the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

#: How many tests may pass only when they are run again.
FORGIVEN = 2

_REPORT = """
import pathlib, re

def pytest_runtest_logreport(report):
    if report.failed:
        with pathlib.Path({path!r}).open("a") as file:
            file.write(re.sub(r"@[^\\]]*$", "", report.nodeid) + "\\n")

pytest_collectreport = pytest_runtest_logreport
"""


def run(arguments: list[str]) -> tuple[int, list[str]]:
    """Run pytest; return its exit status and the tests that failed."""
    with tempfile.TemporaryDirectory(prefix="stratagem-test-all-") as folder:
        failed = Path(folder) / "failed"
        (Path(folder) / "failed_tests.py").write_text(_REPORT.format(path=str(failed)))
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "pytest", "-p", "failed_tests", *arguments]
        status = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
        return status, sorted(set(failed.read_text().splitlines())) if failed.exists() else []


def main(arguments: list[str]) -> int:
    """Return the exit status of the run."""
    status, failed = run([*arguments, "--dist", "loadgroup", "--max-worker-restart=0", "tests"])
    if status != 1 or not failed:
        return status
    again = [test for test in failed if run(["-n", "0", test])[0]]
    flaky = [test for test in failed if test not in again]
    for title, tests in (("failed twice", again), ("passed when run alone", flaky)):
        print(*(f"{title}: {test}" for test in tests), sep="\n")
    return int(bool(again) or len(flaky) > FORGIVEN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
