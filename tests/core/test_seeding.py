"""Random states: those of this process's devices, by their order, and never of one that was not started."""

from __future__ import annotations

import pytest
import torch

from stratagem.api.seeding import random_state, restore_random_state, seed_everything


def device(index):
    return torch.device("cuda", index)


@pytest.fixture
def gpus(monkeypatch):
    """Return how to see a number of GPUs that are started, each with a generator of its own."""

    def see(count, current=0):
        generators = tuple(torch.Generator().manual_seed(100 + index) for index in range(count))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "default_generators", generators)
        monkeypatch.setattr(torch.cuda.random, "_lazy_init", lambda: None)
        monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call, **_: call())
        return generators

    return see


def draw(generator):
    return torch.rand(3, generator=generator)


@pytest.mark.parametrize(("saving", "loading"), [((4, 3), (1, 0)), ((1, 0), (8, 5)), ((2, 1), (2, 0))])
def test_the_state_of_a_device_goes_to_the_device_in_its_place(gpus, saving, loading):
    """Devices are numbered otherwise where others are visible."""
    there, index = gpus(saving[0])[saving[1]], saving[1]
    draw(there)
    state = random_state([device(index)])
    expected = draw(there)
    here = gpus(loading[0])
    others = [generator.get_state() for generator in here]
    restore_random_state(state, [device(loading[1])])

    assert len(state["devices"]) == 1
    assert torch.equal(draw(here[loading[1]]), expected)
    for number, (generator, before) in enumerate(zip(here, others, strict=True)):
        assert number == loading[1] or torch.equal(generator.get_state(), before)


def test_several_devices_of_one_process_keep_their_order(gpus):
    there = gpus(3)
    state = random_state([device(2), device(0)])
    expected = [draw(there[2]), draw(there[0])]
    restore_random_state(state, [device(1), device(2)])

    assert torch.equal(draw(there[1]), expected[0])
    assert torch.equal(draw(there[2]), expected[1])


def test_the_current_device_stands_for_those_that_are_not_named(gpus):
    there = gpus(3, current=2)
    state = random_state()
    expected = draw(there[2])
    restore_random_state(state)

    assert torch.equal(draw(there[2]), expected)


def test_an_xpu_has_a_state(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "default_generators", (generator,))
    state = random_state([torch.device("xpu", 0)])
    expected = draw(generator)
    restore_random_state(state, [torch.device("xpu", 0)])

    assert torch.equal(draw(generator), expected)


def test_a_device_without_a_saved_state_begins_with_the_seed(gpus):
    torch.manual_seed(17)
    state = random_state([torch.device("cpu")])
    torch.manual_seed(18)
    (here,) = gpus(1)
    restore_random_state(state, [device(0)])

    assert state["devices"] == []
    assert torch.equal(draw(here), torch.rand(3, generator=torch.Generator().manual_seed(17)))


def test_a_device_that_is_not_started_stays_so(monkeypatch):
    def start(*_):
        raise AssertionError("CUDA was started, or the driver was asked")

    for name in ("is_available", "device_count", "current_device"):
        monkeypatch.setattr(torch.cuda, name, start)
    monkeypatch.setattr(torch.cuda.random, "_lazy_init", start)
    state = random_state()
    expected = torch.rand(3)
    restore_random_state(state, [device(0)])

    assert state["devices"] == []
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("rank", "verbose", "printed"), [("0", True, True), ("1", True, False), ("0", False, False)])
def test_rank_0_prints_the_seed_when_it_is_asked_to(rank, verbose, printed, monkeypatch, capsys):
    for name in ("STRATAGEM_SEED", "STRATAGEM_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("RANK", rank)

    assert seed_everything(7, verbose=verbose) == 7
    assert capsys.readouterr().out == ("seed_everything: the seed is 7\n" if printed else "")
