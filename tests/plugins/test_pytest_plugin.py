"""The kit's pytest plugin does what it says in projects that enable it, and nothing in others."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from stratagem_testing.pytest_plugin import pytest_collection_modifyitems, pytest_configure


class Item:
    """A collected test with the marker gpu."""

    def __init__(self, *arguments, **options):
        self.nodeid, self.marker, self.reasons = "test_a.py::test_it", pytest.mark.gpu(*arguments, **options).mark, []

    def get_closest_marker(self, name):
        return self.marker if name == "gpu" else None

    def add_marker(self, marker):
        assert marker.name == "skip"
        self.reasons.append(marker.kwargs["reason"])


def test_a_test_is_skipped_where_there_are_fewer_gpus_than_it_needs(monkeypatch):
    def reasons(available):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: available)
        items = [Item(), Item(2), Item(count=4)]
        pytest_collection_modifyitems(items)
        return [item.reasons for item in items]

    assert reasons(0) == [["no CUDA device is visible"]] * 3
    assert reasons(1) == [[], ["needs 2 CUDA devices and 1 are visible"], ["needs 4 CUDA devices and 1 are visible"]]
    assert reasons(8) == [[], [], []]


def test_a_marker_without_a_number_is_refused():
    with pytest.raises(pytest.UsageError, match=r"test_a.py::test_it is marked gpu\('a100'\); expected a number"):
        pytest_collection_modifyitems([Item("a100")])


def test_looking_for_gpus_does_not_initialize_cuda(monkeypatch):
    """Tests may fork, and is_available would rule that out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("is_available was asked"))

    pytest_collection_modifyitems([Item()])


def test_programs_of_tests_end_on_ctrl_c_where_a_background_job_would_ignore_it(pytestconfig):
    def after(handler):
        signal.signal(signal.SIGINT, handler)
        pytest_configure(pytestconfig)
        return signal.getsignal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    try:
        assert after(signal.SIG_IGN) is signal.default_int_handler
        assert after(own := lambda *_: None) is own
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_project_that_does_not_enable_it_is_left_alone(tmp_path):
    """Its marker `gpu` and its fixture of the same name mean what its own conftest says."""
    (tmp_path / "conftest.py").write_text(
        textwrap.dedent("""
        import pytest

        def pytest_configure(config):
            config.addinivalue_line("markers", "gpu(model): runs on that GPU in our laboratory")

        @pytest.fixture
        def run_in_processes():
            return "theirs"
        """)
    )
    (tmp_path / "test_theirs.py").write_text(
        textwrap.dedent("""
        import sys
        import pytest

        @pytest.mark.gpu
        def test_marked():
            pass

        @pytest.mark.gpu("a100")
        def test_marked_with_a_word(run_in_processes):
            assert run_in_processes == "theirs"

        def test_nothing_is_added(request, pytestconfig):
            names = [line.partition("(")[0].partition(":")[0] for line in pytestconfig.getini("markers")]
            assert names.count("gpu") == 1 and "slow" not in names
            with pytest.raises(pytest.FixtureLookupError):
                request.getfixturevalue("unlaunched")
            assert not [name for name in sys.modules if name.partition(".")[0].startswith("stratagem")]
        """)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "3 passed" in result.stdout, result.stdout
    assert "skipped" not in result.stdout


@pytest.mark.slow
def test_a_check_that_fails_shows_what_it_compared(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        textwrap.dedent("""
        from types import SimpleNamespace
        from stratagem_testing import CallbackConformance

        class TestMine(CallbackConformance):
            def choice(self):
                return SimpleNamespace(plugin=3)
        """)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "plugin_of_its_kind"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "where False = isinstance(3," in result.stdout, result.stdout
