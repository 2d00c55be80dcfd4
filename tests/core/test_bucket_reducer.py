"""Comm hooks at work: every rank sends in the same order, whatever arrives first, and what a hook breaks is said."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import define

import stratagem as sg
from stratagem.api.world import Collectives
from stratagem.errors import ConfigError, PluginError
from stratagem_buckets import Bucket
from stratagem_buckets.reducer import bucket_reducer
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_plainly
from stratagem_testing.training import train, weights_on_all_ranks


class Slow(Collectives):
    """Answers when it is told to."""

    def __init__(self):
        self.sent = []

    def average_async(self, tensor):
        self.sent.append((tensor, torch.futures.Future()))
        return self.sent[-1][1]

    def answer(self, index):
        tensor, future = self.sent[index]
        future.set_result(tensor)


class Twice(sg.CommHook):
    """Sends the sum of a bucket after the bucket, as a hook that works in phases does."""

    @sg.hookimpl
    def reduce_bucket(self, bucket):
        mean = yield bucket.buffer
        yield mean.sum().reshape(1)
        return mean


def reducer(*hooks, over):
    return bucket_reducer(sg.Run(strategy="ddp", comm_hook=list(hooks), accelerator="cpu"), over=over)


def buckets(count):
    return [Bucket(buffer=torch.full((4,), float(i)), index=i, is_last=i == count - 1) for i in range(count)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_messages_leave_in_one_order_whatever_arrives_first(order):
    wire = Slow()
    reduce = reducer(Twice(), over=wire)
    arrivals = [reduce(bucket) for bucket in buckets(3)]
    assert len(wire.sent) == 3, "the first messages leave at once"

    for index in order:
        wire.answer(index)

    assert [tensor.numel() for tensor, _ in wire.sent] == [4, 4, 4, 1, 1, 1]
    assert [float(tensor) for tensor, _ in wire.sent[3:]] == [0.0, 4.0, 8.0]
    for index in reversed(range(3, 6)):
        wire.answer(index)
    assert [float(arrival.wait()[0]) for arrival in arrivals] == [0.0, 1.0, 2.0]


def test_second_messages_wait_for_the_last_bucket():
    wire = Slow()
    reduce = reducer(Twice(), over=wire)
    first, last = buckets(2)

    reduce(first)
    wire.answer(0)
    assert len(wire.sent) == 1
    reduce(last)

    assert len(wire.sent) == 3


class Once(sg.CommHook):
    """Sends one message for each bucket, and says so; `twice` makes that wrong."""

    single_message = True

    def __init__(self, twice=False):
        self.twice = twice

    @sg.hookimpl
    def reduce_bucket(self, bucket):
        mean = yield bucket.buffer
        if self.twice:
            yield mean.clone()
        return 2 * mean


def test_a_hook_of_one_message_continues_before_the_last_bucket():
    wire = Slow()
    reduce = reducer(Once(), Once(), over=wire)
    first, second = (reduce(bucket) for bucket in buckets(3)[:2])

    wire.answer(1)

    assert second.done()
    assert second.wait().tolist() == [4.0] * 4
    assert not first.done()


def test_a_hook_of_several_messages_makes_those_of_its_stack_wait():
    wire = Slow()
    reduce = reducer(Once(), Twice(), over=wire)

    average = reduce(buckets(2)[0])
    wire.answer(0)

    assert len(wire.sent) == 1
    assert not average.done()


def test_a_second_message_of_a_hook_that_declares_one_is_refused():
    reduce = reducer(Once(twice=True), over=Collectives())

    with pytest.raises(PluginError, match="'Once' declares single_message and sent a second message for bucket 0"):
        reduce(Bucket(buffer=torch.ones(4))).wait()


def test_a_wait_for_a_bucket_before_the_last_returns_it():
    reduce = reducer(Twice(), over=Collectives())
    first, last = buckets(2)

    assert reduce(first).wait().tolist() == [0.0] * 4
    assert reduce(last).wait().tolist() == [1.0] * 4


def test_a_hook_gets_the_average_of_what_it_yields_through_the_hooks_below():
    class Doubles(sg.CommHook):
        @sg.hookimpl
        def reduce_bucket(self, bucket):
            return 2 * (yield bucket.buffer)

    class AddsOne(sg.CommHook):
        @sg.hookimpl
        def reduce_bucket(self, bucket):
            return 1 + (yield bucket.buffer)

    over = reducer(Doubles(), AddsOne(), over=Collectives())
    under = reducer(AddsOne(), Doubles(), over=Collectives())

    assert over(Bucket(buffer=torch.tensor([3.0]))).wait().item() == 8.0
    assert under(Bucket(buffer=torch.tensor([3.0]))).wait().item() == 7.0


class Cuts(sg.CommHook):
    @sg.hookimpl
    def reduce_bucket(self, bucket):
        return (yield bucket.buffer)[:-1]


class Sixteen(sg.CommHook):
    @sg.hookimpl
    def reduce_bucket(self, bucket):
        return (yield bucket.buffer).half()


class Nothing(sg.CommHook):
    @sg.hookimpl
    def reduce_bucket(self, bucket):
        yield bucket.buffer


class YieldsAList(sg.CommHook):
    @sg.hookimpl
    def reduce_bucket(self, bucket):
        yield [bucket.buffer]


class Fails(sg.CommHook):
    @sg.hookimpl
    def reduce_bucket(self, bucket):
        yield bucket.buffer
        raise KeyError("mine")


WRONG = {
    Cuts: "comm_hook 'Cuts' returned a float32 tensor of shape .*expected a float32 tensor of shape",
    Sixteen: "comm_hook 'Sixteen' returned a float16 tensor of shape",
    Nothing: "comm_hook 'Nothing' returned a NoneType for bucket 0",
    YieldsAList: "comm_hook 'YieldsAList' yielded a list; expected a tensor to average",
    Fails: "mine",
}


@pytest.mark.parametrize("hook", WRONG)
def test_what_a_hook_does_wrong_is_said(hook):
    with pytest.raises((PluginError, KeyError), match=WRONG[hook]):
        reducer(hook(), over=Collectives())(Bucket(buffer=torch.ones(4))).wait()


def _fit(rank, world_size, hook):
    strategy = {"name": "ddp", "bucket_cap_mb": 0.002}
    try:
        train(rank, world_size, Net, joined_batches(2, 16), {"strategy": strategy, "comm_hook": [hook]})
    except (PluginError, KeyError) as error:
        return str(error)
    return "nothing"


@pytest.mark.every_push("Cuts")
@pytest.mark.parametrize("hook", WRONG)
def test_it_is_said_on_every_rank_of_a_training(hook):
    for said in run_in_processes(_fit, 2, hook()):
        assert said != "nothing"


def _several_buckets(rank, world_size, batches):
    strategy = {"name": "ddp", "bucket_cap_mb": 0.002}
    return train(rank, world_size, Net, batches, {"strategy": strategy, "comm_hook": [Twice()], "accelerator": "cpu"})


@pytest.mark.slow
def test_phases_do_not_mix_up_on_three_ranks():
    batches = joined_batches(20, 24)

    weights = weights_on_all_ranks(run_in_processes(_several_buckets, 3, batches))

    assert relative_difference(weights, train_plainly(batches)[0]) < 1e-6


@pytest.mark.parametrize(
    ("flag", "stack", "message"),
    [
        ("outermost", [Twice, Cuts], "'Cuts' needs the shapes of the gradients.*expected .'Cuts', 'Twice'."),
        ("innermost", [Cuts, Twice], "'Cuts' calls its own collectives.*expected .'Twice', 'Cuts'."),
    ],
)
def test_the_order_of_hooks_is_checked(flag, stack, message, monkeypatch):
    monkeypatch.setattr(Cuts, flag, True)

    with pytest.raises(ConfigError, match=message):
        sg.Run(strategy="ddp", comm_hook=[hook() for hook in stack], accelerator="cpu")


# --- Overlap with backward ---------------------------------------------------------------------------------------


class Deep(Net):
    """Holds backward before its first layer, from the second step on, until the first bucket is averaged."""

    def on_train_start(self):
        self.events, self.averaged, self.steps = [], threading.Event(), 0
        next(self.parameters()).register_hook(self._hold)

    def on_train_batch_start(self, batch, batch_idx):
        self.averaged.clear()
        self.events, self.steps = [], self.steps + 1

    def _hold(self, gradient):
        if self.steps > 1:  # in the first step DDP has one bucket
            self.events.append("in time" if self.averaged.wait(20) else "too late")


@define(eq=False, kw_only=True)
class Traced(sg.CommHook):
    single_message = True

    module: Any = None

    @sg.hookimpl
    def prepare_module(self, module):
        self.module = module

    @sg.hookimpl
    def reduce_bucket(self, bucket):
        self.module.events.append(f"sent {bucket.index}")
        average = yield bucket.buffer
        self.module.averaged.set()
        return average


def _events(rank, world_size, hook):
    module = Deep()
    strategy = {"name": "ddp", "bucket_cap_mb": 0.002}
    train(rank, world_size, lambda: module, joined_batches(2, 16), {"strategy": strategy, "comm_hook": [hook]})
    return module.events


def test_messages_are_sent_and_averaged_while_backward_computes():
    for events in run_in_processes(_events, 2, Traced()):
        assert events.index("sent 0") < events.index("in time") < events.index(events[-1])


# --- Bytes -------------------------------------------------------------------------------------------------------


def _traffic(rank, world_size):
    run = sg.Run(strategy="ddp", comm_hook=[Twice()], devices=world_size, accelerator="cpu")
    run.connect()
    run.collectives.traffic.counts.clear()
    reduce = bucket_reducer(run)
    for bucket in buckets(2):
        future = reduce(bucket)
    future.wait()
    counts = dict(run.collectives.traffic.counts)
    run.close()
    return {key: (count.calls, count.payload, count.wire) for key, count in counts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_counted_by_collective_and_sender(world_size):
    payload = 2 * 4 * 4 + 2 * 4

    for counts in run_in_processes(_traffic, world_size):
        assert list(counts) == [("all_reduce", "Twice")]
        calls, given, wire = counts["all_reduce", "Twice"]
        assert (calls, given) == (4, payload)
        assert wire == pytest.approx(2 * payload * (world_size - 1) / world_size)


# --- Collectives among some ranks --------------------------------------------------------------------------------


def _collectives(rank, world_size):
    run = sg.Run(strategy="ddp", devices=world_size, accelerator="cpu")
    run.connect()
    collectives = run.collectives
    mine = torch.full((2,), float(rank))
    pairs = collectives.split([[0, 2], [1, 3]])
    said = {
        "rank": (pairs.rank, pairs.world_size),
        "mean": pairs.all_reduce(mine).tolist(),
        "average": pairs.average_async(mine.clone()).wait().tolist(),
        "gathered": pairs.all_gather_async(mine).wait().tolist(),
        "exchanged": collectives.all_to_all_async(torch.arange(4.0) + 10 * rank).wait().tolist(),
        "from": pairs.broadcast(mine.clone(), 1).tolist(),
        "objects": pairs.broadcast_object({"rank": rank}, 1),
        "passed": collectives.send_recv(mine, (rank + 1) % 4, (rank - 1) % 4).tolist(),
        "within": pairs.split([[0], [1]]).world_size,
    }
    run.close()
    return said


def beside_a_message(rank, world_size):
    """Receive what the caller sends and what a collective sends, of other sizes, from the same rank."""
    run = sg.Run(strategy="ddp", devices=world_size, accelerator="cpu")
    run.connect()
    own, other = torch.zeros(3), 1 - rank
    receiving = dist.irecv(own, src=other)
    passed = run.collectives.send_recv(torch.full((2,), float(rank)), other, other)
    dist.send(torch.full((3,), 10.0 + rank), dst=other)
    receiving.wait()
    run.close()
    return passed.tolist(), own.tolist()


def test_a_message_of_a_callers_own_is_not_taken_for_one_of_send_recv():
    found = run_in_processes(beside_a_message, 2)

    assert found == [([1.0] * 2, [11.0] * 3), ([0.0] * 2, [10.0] * 3)]


@pytest.mark.slow
def test_collectives_may_be_among_some_of_the_ranks():
    results = run_in_processes(_collectives, 4)

    for rank, said in enumerate(results):
        other = (rank + 2) % 4
        low, high = sorted((rank, other))
        assert said["rank"] == (0 if rank == low else 1, 2)
        assert said["mean"] == said["average"] == [(low + high) / 2] * 2
        assert said["gathered"] == [low, low, high, high]
        assert said["exchanged"] == [rank + 10.0 * sender for sender in range(4)]
        assert said["from"] == [float(high)] * 2
        assert said["objects"] == {"rank": high}
        assert said["passed"] == [float((rank - 1) % 4)] * 2
        assert said["within"] == 1


# --- Engines that send for themselves ----------------------------------------------------------------------------


def _searching(rank, world_size, batches):
    strategy = {"name": "ddp_find_unused_parameters_true", "bucket_cap_mb": 0.002}
    return train(rank, world_size, Net, batches, {"strategy": strategy, "comm_hook": [Twice()], "accelerator": "cpu"})


@pytest.mark.slow
def test_phases_do_not_cross_what_ddp_sends_after_the_last_bucket():
    batches = joined_batches(60, 16)

    weights = weights_on_all_ranks(run_in_processes(_searching, 2, batches))

    assert relative_difference(weights, train_plainly(batches)[0]) < 1e-6
