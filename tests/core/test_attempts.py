"""Ranks agree on a generation of keys in a store that still holds what dead attempts wrote."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from attrs import evolve

from stratagem import World
from stratagem.distributed.rendezvous import RendezvousStore
from stratagem.errors import LaunchError
from stratagem_meeting.attempts import _unanswered, agree_on_generation

LIMIT = timedelta(seconds=20)


@pytest.fixture
def hosted():
    store = RendezvousStore()
    server = store.serve()
    yield World(world_size=3, main_port=store.port, store_hosted=True, generation=None), server
    store.close()


def _attempt(world, ranks, limit=LIMIT):
    places = [World(rank=rank, world_size=world.world_size, main_port=world.main_port) for rank in ranks]
    with ThreadPoolExecutor(len(places)) as threads:
        return [place.generation for place in threads.map(lambda place: agree_on_generation(place, limit), places)]


def test_each_attempt_has_one_generation_and_no_two_have_the_same(hosted):
    world, _ = hosted

    first, second = _attempt(world, range(3)), _attempt(world, range(3))

    assert len(set(first)) == len(set(second)) == 1
    assert first != second


def test_rank_0_answers_all_ranks_before_it_waits_for_one():
    store, waits = dist.HashStore(), 0
    for rank in range(1, 50):
        store.set(f"nonce/{rank}", f"of-{rank} of 50")
    for first in _unanswered(store, World(world_size=50), "g"):
        waits += 1
        assert first == 1
        for rank in range(1, 50):
            assert store.get(f"generation/of-{rank}") == b"g"
            store.set(f"confirmed/g/{rank}", "")

    assert waits == 1


def test_a_rank_that_died_while_it_waited_leaves_nothing_that_counts(hosted):
    world, server = hosted
    store = dist.PrefixStore("stratagem/attempts", server)
    store.set("nonce/1", f"of-a-dead-process of {world.world_size}")
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(_attempt, world, [0])
        store.wait(["generation/of-a-dead-process"], LIMIT)  # rank 0 has answered the dead rank

        assert set(_attempt(world, [1, 2])) == set(first.result())


@pytest.mark.slow
def test_a_rank_0_that_died_leaves_ranks_that_the_next_one_tells_another_generation(hosted):
    world, _ = hosted
    with ThreadPoolExecutor(1) as threads:
        orphan = threads.submit(_attempt, world, [1])
        with pytest.raises(LaunchError, match=r"rank 0 of 3 waited for rank 2 at 127\.0\.0\.1"):
            _attempt(world, [0], timedelta(seconds=1))

    generations = _attempt(world, range(3))

    assert len(set(generations)) == 1
    assert orphan.result()[0] not in generations


@pytest.mark.slow
def test_a_rank_of_a_world_of_another_size_gets_no_answer(hosted):
    world, _ = hosted
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(_attempt, evolve(world, world_size=4), [1], timedelta(seconds=3))
        with pytest.raises(LaunchError, match="waited for rank 1"):
            _attempt(world, [0], timedelta(seconds=1))

    with pytest.raises(LaunchError, match="rank 1 of 4 waited for rank 0"):
        other.result()
