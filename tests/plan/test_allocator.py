"""What torch's CUDA allocator keeps; the numbers follow from the rules in its source."""

from __future__ import annotations

import pytest

from stratagem_plan.allocator import Allocator

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "fixed", "expandable"),
    [
        ([512], 2, 2),  # small allocations share segments of 2 MiB
        ([512, 2 * MIB - 512 - 1024], 22, 22),  # what is over 1 MiB is not small
        ([MIB, MIB], 2, 2),
        ([MIB + 512], 20, 20),
        ([9 * MIB, 9 * MIB], 20, 20),
        ([11 * MIB], 12, 20),  # from 10 MiB on a segment has the size that is asked for
        ([30 * MIB, 30 * MIB], 60, 60),  # the second one begins in what the first left of its segment
    ],
)
def test_allocations_reserve_segments(sizes, fixed, expandable):
    for is_expandable, expected in ((False, fixed), (True, expandable)):
        allocator = Allocator(is_expandable)
        for size in sizes:
            allocator.take(size, "stream")
        assert allocator.reserved == expected * MIB, is_expandable


def test_pieces_that_do_not_fit_are_kept():
    kept = {}
    for is_expandable in (False, True):
        allocator = Allocator(is_expandable)
        first, second = allocator.take(40 * MIB, "stream"), allocator.take(40 * MIB, "stream")
        allocator.give(first)
        allocator.give(second)
        allocator.take(80 * MIB, "stream")
        kept[is_expandable] = allocator.reserved

    # Two segments cannot be joined; the parts of one can.
    assert kept == {False: 160 * MIB, True: 80 * MIB}


def test_the_smallest_free_block_is_taken_and_its_rest_stays_free():
    allocator = Allocator(is_expandable=False)
    large, small = allocator.take(60 * MIB, "stream"), allocator.take(30 * MIB, "stream")
    allocator.give(large)
    allocator.give(small)
    allocator.take(28 * MIB, "stream")
    allocator.take(60 * MIB, "stream")
    rest = allocator.take(2 * MIB, "stream")

    assert allocator.reserved == 90 * MIB
    assert rest.before.size == 28 * MIB


def test_neighbours_that_are_free_are_joined():
    allocator = Allocator(is_expandable=False)
    parts = [allocator.take(5 * MIB, "stream") for _ in range(4)]
    for part in (parts[1], parts[3], parts[2]):
        allocator.give(part)
    allocator.take(15 * MIB, "stream")

    assert allocator.reserved == 20 * MIB


def test_streams_share_nothing():
    allocator = Allocator(is_expandable=True)
    allocator.give(allocator.take(20 * MIB, "one"))
    allocator.take(20 * MIB, "other")

    assert (allocator.reserved, allocator.peak) == (40 * MIB, 40 * MIB)
