"""What all tests share: no environment left over from a launcher, and a folder of their own to work in."""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

import costs
import selection
import starts

#: With --check-slow: how long a test may take that is not marked as taking longer than a second. The first one of a worker
#: that runs a script waits three seconds for the process that forks scripts.
SLOW_S = 5.0

#: The markers of `make test`.
EVERY_PUSH = "not gpu and not sweep"

#: Changed files that affect no test, as far as --changed can tell.
WITHOUT_TESTS = pytest.StashKey()

# Hundreds of tests start programs: each would compile these sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Ranks print to one pipe: unbuffered, the parts of a line would be written one by one, between those of other ranks.
os.environ.pop("PYTHONUNBUFFERED", None)

# Several ranks under each of pytest's workers share the cores: more threads only wait for each other. torch reads this
# when it is imported, which pytest's plugins may already have done.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# torch asks for the name of every peer that connects: a name server that drops a question must not cost five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_addoption(parser):
    parser.addoption("--check-slow", action="store_true", help="fail tests of seconds that are not marked as slow")
    parser.addoption("--costs", metavar="FILE", help="write to FILE what each test costs, and print sums")
    parser.addoption("--shard", metavar="I/N", help="run one of N shards, which have about the same number of tests")
    parser.addoption(
        "--base",
        metavar="COMMIT",
        default=os.environ.get("STRATAGEM_TESTS_BASE") or None,
        help="what `when_changed` compares with (default: where the branch began), and --changed (default: HEAD)",
    )
    parser.addoption("--changed", action="store_true", help="run the tests that changes since --base may affect")
    parser.addoption("--promises", metavar="FILE", help="write to FILE what guards each promise; fail if nothing does")


def pytest_configure(config):
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests:
        config.pluginmanager.register(starts.Count())
    if not hasattr(config, "workerinput"):
        whole = _asks_for_all(config) and config.option.markexpr == EVERY_PUSH and not config.option.keyword
        config.pluginmanager.register(starts.Ceilings(fails=whole, shows=bool(config.getoption("--costs"))))
    if path := config.getoption("--costs"):
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(costs.Collect(Path(path)))
        if runs_tests:
            config.pluginmanager.register(costs.Measure())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With --check-slow, on a machine that does nothing else: tell which marks are missing."""
    report = yield
    unmarked = report.when == "call" and not item.get_closest_marker("slow")
    if item.config.getoption("--check-slow", False) and unmarked and report.passed and call.duration > SLOW_S:
        report.outcome = "failed"
        report.longrepr = f"it took {call.duration:.1f} s; mark it with pytest.mark.slow, or make it faster"
    return report


def pytest_collection_finish(session):
    """Leave what was imported alone: each collection of garbage, and each fork, would go through all of it.

    Where many tests follow, train once first: each fork would import and prepare the same again, in a third of its time.
    """
    if len(session.items) > 200 and "stratagem_testing.training" in sys.modules:
        _train_once()
    gc.collect()
    gc.freeze()


def _train_once():
    import stratagem_meeting  # noqa: F401
    from stratagem import Trainer
    from stratagem.discovery import registry
    from stratagem.distributed.default_group import forget_meshes
    from stratagem_testing.reference import Net, data
    from stratagem_testing.training import QUIET

    for strategy in ("ddp", "fsdp", "ddp_sharded", "parallel"):
        Trainer(**QUIET, strategy=strategy, launcher="fork")
    Trainer(**QUIET, accelerator="cpu", devices=1).fit(Net(), [data()])
    forget_meshes()
    registry.refresh()


def pytest_runtest_setup(item):
    """Fail a test that pytest-xdist does not keep with its group: two SLURMs, for one, would take each other's ports."""
    marker = item.get_closest_marker("xdist_group")
    grouped = getattr(item.config.option, "loadgroup", False)  # on a worker, with --dist loadgroup
    if grouped and marker and "@" not in item.nodeid.rpartition("]")[2]:
        pytest.fail(
            f"pytest-xdist {version('pytest-xdist')} does not keep groups of tests on one worker with pytest "
            f"{pytest.__version__}; install the pytest that the Makefile names", pytrace=False,
        )  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(config, items):
    """Leave cases to `make test-all`, keep heavy imports on one worker, and keep the tests of one shard."""
    for item in items:
        is_heavy = "deepspeed" in item.nodeid.lower() or not _PRELOADED.isdisjoint(item.fixturenames)
        if is_heavy and not item.get_closest_marker("xdist_group"):
            item.add_marker(selection.HEAVY)
    selection.leave_to_test_all(items, config.getoption("--base"))
    unguarded = selection.unguarded(items) if _asks_for_all(config) else None
    config.stash[selection.UNGUARDED] = unguarded
    if path := config.getoption("--promises"):
        if unguarded is None:
            raise pytest.UsageError("--promises got a part of the tests; expected the folder tests")
        Path(path).write_text(selection.table(items))
        if unguarded:
            raise pytest.UsageError("\n".join(unguarded))
    if config.getoption("--changed"):
        items[:], config.stash[WITHOUT_TESTS] = selection.affected(items, _changed(config))
    if (shard := config.getoption("--shard")) is not None:
        items[:] = selection.shard_of(items, *selection.part_of(shard))


def _asks_for_all(config):
    return selection.ROOT / "tests" in [(config.invocation_params.dir / each).resolve() for each in config.args]


def _changed(config):
    base = config.getoption("--base") or "HEAD"
    changed = selection.changed_files(base)
    if changed is None:
        raise pytest.UsageError(f"git knows no commit {base!r}, which --changed compares with")
    return changed


def pytest_terminal_summary(terminalreporter, config):
    for file in config.stash.get(WITHOUT_TESTS, []):
        terminalreporter.write_line(f"no test was found for {file}")


#: Variables of a group that an earlier test left behind.
_OF_GROUPS = ("GLOO_", "NCCL_", "TORCH_GLOO_", "TORCH_NCCL_", "TORCH_FR_")


#: Numbers of the folders of tests.
_NUMBERS = itertools.count()


@pytest.fixture
def tmp_path(tmp_path_factory, request):
    """A new folder for a test. pytest's fixture looks for a free number among the folders of all tests before."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}{next(_NUMBERS)}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(autouse=True)
def clean_environment(unlaunched, monkeypatch, tmp_path):
    """A test begins as a process that nobody launched, in a folder of its own, and leaves no process group.

    Its random numbers are the same in each run: a test that fails for some initial weights fails always, or never.
    """
    monkeypatch.chdir(tmp_path)
    random.seed(0)
    if torch := sys.modules.get("torch"):
        # Without a GPU, torch.manual_seed notes for later, with a stack, what it would do there: a millisecond each time.
        (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(0)
    for name in [name for name in os.environ if name.startswith(_OF_GROUPS)]:
        monkeypatch.delenv(name)


#: "1": a program that a test needs and that is not installed is an error. CI sets it, which installs all of them.
REQUIRED_VARIABLE = "STRATAGEM_TESTS_REQUIRE_ALL"


@pytest.fixture(scope="session")
def need():
    """Return a function that skips the test where one of `programs`, or root, is missing; in CI that is an error.

    A test that needs `root` makes namespaces: in a container that may not make any, it is skipped everywhere.
    """

    def check(*programs, package, root=False):
        missing = [name for name in programs if shutil.which(name) is None]
        if not missing and not (root and os.geteuid()):
            if root and subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
                pytest.skip("this container may not make namespaces")
            return
        reason = f"{', '.join(missing)} not found: `apt-get install {package}`" if missing else "it needs root"
        if os.environ.get(REQUIRED_VARIABLE) == "1":
            pytest.fail(reason)
        pytest.skip(reason)

    return check


#: Fixtures of tests that share a worker.
_PRELOADED = {"deepspeed_preloaded", "transformers_preloaded", "torchmetrics_preloaded"}


@pytest.fixture(scope="session")
def transformers_preloaded():
    """Importing a model of transformers takes seconds: once here, and not in each process that a test forks."""
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM, transformers.MixtralForCausalLM


@pytest.fixture(scope="session")
def torchmetrics_preloaded():
    return pytest.importorskip("torchmetrics")


@pytest.fixture(scope="session")
def deepspeed_preloaded():
    """Importing it takes seconds: once here, and not in each process that a test forks. So does asking for the CPU."""
    import cpuinfo

    from stratagem_deepspeed import DeepSpeedStrategy

    with starts.uncounted():
        DeepSpeedStrategy().preload("cpu")
        known = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: known


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package on the path, with metadata, as pip would."""
    from stratagem.discovery import registry

    modules = []

    def put(distribution, entry_points, source="", version="1.0", requires=()):
        module = distribution.replace("-", "_")
        folder = tmp_path / f"site-{distribution}"
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(textwrap.dedent(source))
        needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}")
        text = ""
        for group, points in entry_points.items():
            text += f"[{group}]\n" + "".join(f"{name} = {module}:{value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        modules.append(module)
        registry.refresh()

    yield put
    for module in modules:
        sys.modules.pop(module, None)
    registry.refresh()
