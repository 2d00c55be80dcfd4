"""What pytest gets where stratagem is installed."""

from __future__ import annotations

import pytest
import torch

from stratagem_testing.pytest_plugin import pytest_collection_modifyitems


class Item:
    """A collected test with the marker gpu."""

    def __init__(self, *arguments, **options):
        self.marker, self.reasons = pytest.mark.gpu(*arguments, **options).mark, []

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


def test_looking_for_gpus_does_not_initialize_cuda(monkeypatch):
    """Tests may fork, and is_available would rule that out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("is_available was asked"))

    pytest_collection_modifyitems([Item()])
