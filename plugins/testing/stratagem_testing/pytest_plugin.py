"""A pytest plugin: the markers `gpu` and `slow`, and fixtures. Enable it with ``-p stratagem_testing.pytest_plugin``.

Importing it does not import torch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stratagem_testing import processes
from stratagem_testing.processes import LAUNCH_VARIABLES


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and have programs that tests start end on Ctrl-C."""
    config.addinivalue_line("markers", "slow: takes longer than a second")
    config.addinivalue_line("markers", "gpu(count=1): needs that many CUDA devices; skipped where there are fewer")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; a program inherits it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the checks of a conformance class, which share processes, on one worker; skip tests that lack GPUs."""
    kit: Any = sys.modules.get("stratagem_testing.conformance")
    for item in items if kit is not None else ():
        cls = getattr(item, "cls", None)
        if cls is None or not issubclass(cls, kit.Conformance) or item.get_closest_marker("xdist_group"):
            continue
        if item.config.pluginmanager.hasplugin("xdist"):  # which declares the marker
            item.add_marker(pytest.mark.xdist_group(f"{cls.__module__}.{cls.__qualname__}"))
    _skip_without_gpus(items)


def _skip_without_gpus(items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than are available."""
    needing = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu"))]
    if not needing:
        return
    import torch

    available = torch.cuda.device_count()  # unlike is_available, does not initialize CUDA: tests may fork
    for item, marker in needing:
        count = marker.args[0] if marker.args else marker.kwargs.get("count", 1)
        if not isinstance(count, int):
            raise pytest.UsageError(f"{item.nodeid} is marked gpu({count!r}); expected a number of GPUs; write gpu(2)")
        if available < count:
            reason = (
                f"needs {count} CUDA devices and {available} are visible" if available else "no CUDA device is visible"
            )
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _environment_restored() -> Iterator[None]:
    """Restore the environment after each test, including variables that an imported library sets."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture
def run_in_processes() -> Callable[..., list[Any]]:
    """`stratagem_testing.run_in_processes`: call a function in several gloo processes."""
    return processes.run_in_processes


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test as a process without a launcher and without settings from variables; destroy its process group."""
    for name in [name for name in os.environ if name.startswith("STRATAGEM_")]:
        monkeypatch.delenv(name)
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    if "torch" in sys.modules:
        import torch

        from stratagem.distributed.default_group import leave_group

        torch.set_default_dtype(torch.float32)
        if torch.distributed.is_available():
            leave_group()
