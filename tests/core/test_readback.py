"""Numbers come from a device in one copy, exactly, and without waiting where that is asked for."""

from __future__ import annotations

import math
import warnings

import torch

from stratagem.api.readback import Readback, as_numbers
from stratagem_testing import recording

DEVICE = torch.device("cpu", 0)
VALUES = {
    "plain": 3, "float": torch.tensor(0.1), "double": torch.tensor(0.1, dtype=torch.float64),
    "integer": torch.tensor(2**53), "one element": torch.tensor([[-2.5]]), "nan": torch.tensor(math.nan),
    "half": torch.tensor(0.1, dtype=torch.bfloat16), "gradient": torch.ones((), requires_grad=True),
}  # fmt: skip


def _on_device():
    return {
        name: value.to(DEVICE, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in VALUES.items()
    }


def test_all_numbers_come_in_one_copy():
    with recording() as recorder:
        values = _on_device()
        numbers = as_numbers(values)
        one_by_one = {name: float(value) for name, value in VALUES.items()}

    assert len(recorder.found) == 1
    assert list(numbers) == list(VALUES)
    assert repr(numbers) == repr(one_by_one)


def test_numbers_on_their_way_make_nobody_wait():
    with recording() as recorder:
        coming = Readback(_on_device())
        assert coming.ready
        numbers = coming.numbers()

    assert not recorder.found
    assert repr(numbers) == repr({name: float(value) for name, value in VALUES.items()})


def test_what_has_not_arrived_is_waited_for_only_when_it_is_read(monkeypatch):
    """With events as CUDA's."""

    class Event:
        arrived = False

        def query(self):
            return self.arrived

        def synchronize(self):
            self.arrived = True

    coming = Readback({"loss": torch.ones(())})
    coming._events = [Event(), Event()]

    assert not coming.ready
    assert coming.numbers() == {"loss": 1.0}
    assert coming.ready


def test_a_number_with_gradients_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_numbers({"a": torch.ones(1, requires_grad=True)}) == {"a": 1.0}
