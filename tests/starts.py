"""What tests start: interpreters, scripts in forks and ranks, by folder, and the ceilings of `make test`.

Time depends on the machine, what a test starts does not: so the suite stays fast. What a fixture of a module starts is
counted once, though each worker of pytest-xdist may set it up; what stays for later tests, such as the process that
forks scripts, is not counted. A test of `when_changed` does not run each time, and is not counted either.
The ceilings have two programs and, where a folder starts hundreds, four ranks to spare.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

import selection

KEY = "starts"
#: The audit event of a script in a fork of an interpreter that has imported torch.
SCRIPT = "stratagem.tests.script"
TICKS = os.sysconf("SC_CLK_TCK")
CEILINGS = Path(__file__).with_name("ceilings.json")
#: What this process has started.
started: Counter[str] = Counter({"interpreters": 0, "scripts": 0, "ranks": 0, "other programs": 0})
_uncounted = 0


def count(event: str, arguments: tuple) -> None:
    """Count what an audit event tells: for ``sys.addaudithook``."""
    if _uncounted:
        return
    if event == "os.fork":
        started["ranks"] += 1
    elif event == "subprocess.Popen":
        program = arguments[1] if isinstance(arguments[1], str | bytes) else [*arguments[1], ""][0]
        own = os.fsdecode(program).startswith(os.path.dirname(sys.executable)) or "python" in os.fsdecode(program)
        started["interpreters" if own else "other programs"] += 1
    elif event == SCRIPT:
        started["scripts"] += 1


@contextlib.contextmanager
def uncounted():
    """Within: what is started stays for later tests."""
    global _uncounted
    _uncounted += 1
    try:
        yield
    finally:
        _uncounted -= 1


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of what it has waited for, and of its living descendants."""
    own, living = os.times(), _living()
    below = sum(living[pid][1] for pid in _descendants(os.getpid(), living))
    return own.user + own.system + own.children_user + own.children_system + below


def _living() -> dict[int, tuple[int, float]]:
    """Return the parent and the CPU seconds of each process of this machine; nothing where there is no /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            found[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS
    return found


def _descendants(pid: int, living: dict[int, tuple[int, float]]) -> list[int]:
    children = [child for child, (parent, _) in living.items() if parent == pid]
    return [*children, *(found for child in children for found in _descendants(child, living))]


class Count:
    """On a worker: sends what each test and each fixture of more than a test has started."""

    def __init__(self) -> None:
        sys.addaudithook(count)
        #: In this test.
        self._by_fixture: dict[str, Counter[str]] = {}
        self._before: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        before, others = started.copy(), sum(self._by_fixture.values(), Counter())
        try:
            return (yield)
        finally:
            name = f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]"
            within = sum(self._by_fixture.values(), Counter()) - others
            self._by_fixture[name] = started - before - within

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        self._before, self._by_fixture = started.copy(), {}
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "teardown" and not selection.packages_of(item):
            own = started - self._before - sum(self._by_fixture.values(), Counter())
            by_name = {item.nodeid: own, **self._by_fixture}
            report.user_properties.append((KEY, {name: dict(found) for name, found in by_name.items() if found}))
        return report

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = cpu_seconds()


class Ceilings:
    """Where reports arrive: prints sums, and fails a whole run of `make test` that starts more than the ceilings.

    Args:
        fails: whether it is one.
        shows: whether to print the numbers of each folder.
    """

    def __init__(self, *, fails: bool, shows: bool) -> None:
        self._fails, self._shows, self._cpu_s = fails, shows, 0.0
        self._by_name: dict[str, dict[str, int]] = {}
        self._problems: list[str] = []

    def pytest_runtest_logreport(self, report):
        for key, by_name in report.user_properties:
            if key == KEY and report.when == "teardown":
                self._by_name.update(by_name)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self._cpu_s += getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0)

    def by_folder(self) -> dict[str, Counter[str]]:
        """Return what the tests of each folder have started."""
        found: dict[str, Counter[str]] = {}
        for name, numbers in sorted(self._by_name.items()):
            folder = [*name.partition("::")[0].split("/"), "."][1]
            found.setdefault(folder, Counter()).update(numbers)
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if not self._fails or exitstatus != pytest.ExitCode.OK or not CEILINGS.exists():
            return
        ceilings = json.loads(CEILINGS.read_text())
        for folder, numbers in self.by_folder().items():
            # Whether a script runs in a fork also depends on variables that libraries set when they are imported.
            programs = numbers["interpreters"] + numbers["scripts"]
            for what, number in {"programs": programs, "ranks": numbers["ranks"]}.items():
                if number > (ceiling := ceilings.get(folder, {}).get(what, 0)):
                    self._problems.append(
                        f"tests/{folder} starts {number} {what}; the ceiling in {CEILINGS.name} is {ceiling}, and may "
                        "only be lowered: let tests share what they start, or start less elsewhere in the folder"
                    )
        if self._problems:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self, config):
        """After all summaries, so that the sums and what is wrong are the last lines of `make test`."""
        terminalreporter = config.pluginmanager.get_plugin("terminalreporter")
        if terminalreporter is None:
            return
        total = sum(self.by_folder().values(), Counter())
        terminalreporter.write_line(
            f"started {total['interpreters']} interpreters, {total['scripts']} scripts in forks of one and "
            f"{total['ranks']} ranks; {self._cpu_s or cpu_seconds():.0f} CPU seconds"
        )
        if self._shows:
            for folder, numbers in self.by_folder().items():
                terminalreporter.write_line(f"  {folder}: {json.dumps(numbers, sort_keys=True)}")
        for problem in self._problems:
            terminalreporter.write_line(problem, red=True)
