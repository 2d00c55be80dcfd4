"""The formulas, against numbers that were measured or worked out by hand."""

from __future__ import annotations

import pytest
from attrs import evolve

from stratagem.errors import ConfigError
from stratagem_plan.cost import HIGH, INTER_SHARE, INTRA_SHARE, LOW, Machine, predict
from stratagem_plan.devices import find
from stratagem_plan.plan_file import Bubble, Collective, Inputs, Plan, RankClass, Work, World

H200, A100 = find("h200-sxm-141gb"), find("a100-sxm-80gb")
MACHINE = Machine(H200, H200, 8)


def matmul(m, n, k, phase="forward", count=1, dtype="bfloat16"):
    return Work(phase=phase, kind="matmul", dtype=dtype, m=m, n=n, k=k, count=count)


def message(op="all_reduce", axis="data", ranks=8, within_node=True, payload=1e9, calls=1, phase="backward"):
    return Collective(phase=phase, op=op, axis=axis, ranks=ranks, within_node=within_node, payload=payload, calls=calls)


def plan(*work, collectives=(), bubble=None, device="h200-sxm-141gb", nodes=1):
    ranks = RankClass(rank=0, ranks=8, work=list(work), collectives=list(collectives), bubble=bubble)
    world = World(devices_per_node=8, nodes=nodes, world_size=8 * nodes)
    return Plan(script="x", device=device, world=world, inputs=Inputs(samples=8), data_ranks=8 * nodes, classes=[ranks])


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "seconds", "tolerance"),
    [
        (4096, 4096, 4096, "bfloat16", 0.0001755, 0.14),  # two other shapes of this size are slower
        (8192, 8192, 8192, "bfloat16", 0.0015985, 0.02),
        (8192, 3072, 768, "bfloat16", 0.0000749, 0.06),
        (32768, 3072, 768, "bfloat16", 0.0002714, 0.06),
        (2048, 16384, 4096, "bfloat16", 0.0004122, 0.06),
        (32768, 32768, 8192, "bfloat16", 0.0256308, 0.03),
        (4096, 4096, 4096, "float16", 0.0001893, 0.02),
        (4096, 4096, 4096, "float32", 0.0026952, 0.02),
    ],
)
def test_multiplications_take_the_measured_time(m, n, k, dtype, seconds, tolerance):
    assert MACHINE.seconds(matmul(m, n, k, dtype=dtype)) == pytest.approx(seconds, rel=tolerance)


def test_a_thin_multiplication_takes_the_time_of_its_bytes():
    thin = matmul(16384, 16384, 16)
    num_bytes = 2 * (16384 * 16384 + 2 * 16384 * 16)

    assert MACHINE.seconds(thin) == pytest.approx(num_bytes / 3.5e12, rel=0.1)


def test_a_small_operation_takes_the_time_between_two_kernels():
    work = Work(phase="forward", kind="vector", dtype="float32", bytes=4096, count=10)

    assert MACHINE.seconds(work) == pytest.approx(10 * H200.curve.kernel_s)


def test_a_device_without_a_curve_has_the_measured_shares_of_its_own_peaks():
    other = Machine(A100, H200, 8)
    work = matmul(8192, 8192, 8192, dtype="float16")

    assert other.seconds(work) / MACHINE.seconds(work) == pytest.approx(989 / 312)


def test_a_format_without_a_peak_is_one_sentence():
    with pytest.raises(ConfigError, match=r"device 'a100-sxm-80gb' has no flops.fp8_dense"):
        Machine(A100, H200, 8).seconds(matmul(64, 64, 64, dtype="float8_e4m3fn"))


def test_a_large_all_reduce_is_twice_an_all_gather_and_a_small_one_a_tree():
    large, gather = MACHINE.collective(message(), 8), MACHINE.collective(message("all_gather"), 8)
    small = MACHINE.collective(message(payload=8), 8)

    assert large == pytest.approx(2 * gather)
    assert gather == pytest.approx(7 / 8 * 1e9 / (450e9 * INTRA_SHARE), rel=0.02)
    assert small == pytest.approx(2 * 3 * 3.4e-6, rel=0.01)


def test_ranks_of_a_node_use_a_link_each():
    across = message("all_gather", ranks=64, within_node=False)
    one, eight = MACHINE.collective(across, 1), MACHINE.collective(across, 8)

    assert one == pytest.approx(63 / 64 * 1e9 / (50e9 * INTER_SHARE) + 64 * 14e-6)
    assert eight == pytest.approx(63 / 64 * 1e9 / (450e9 * INTRA_SHARE) + 8 * 14e-6 + 56 * 3.4e-6)


def test_messages_of_a_data_axis_are_hidden_but_for_one_call():
    work = matmul(8192, 8192, 8192, "backward", count=100)
    hidden = predict(plan(work, collectives=[message(calls=10)]), H200)[0]
    late = predict(plan(work, collectives=[message(calls=10, phase="optimizer")]), H200)[0]
    within_layers = predict(plan(work, collectives=[message(calls=10, axis="tensor")]), H200)[0]

    assert hidden.exposed == pytest.approx(hidden.communication / 10)
    assert late.exposed == within_layers.exposed == late.communication


def test_messages_longer_than_the_computation_are_exposed():
    step = predict(plan(matmul(1024, 1024, 1024, "backward"), collectives=[message(calls=100)]), H200)[0]

    assert step.exposed == pytest.approx(step.communication - step.backward)


def test_gradients_are_reduced_during_the_last_micro_batch_alone():
    whole = plan(matmul(8192, 8192, 8192, "backward", count=40), collectives=[message(calls=10)])
    once, four = (predict(evolve(whole, accumulate=number), H200)[0] for number in (1, 4))

    assert once.exposed == pytest.approx(once.communication / 10)
    assert four.exposed == pytest.approx(four.communication - four.backward / 4)
    assert four.exposed > 4 * once.exposed


def test_a_pipeline_waits_for_its_first_and_last_micro_batches():
    work = matmul(8192, 8192, 8192, count=1000)
    step = predict(plan(work, bubble=Bubble(stages=8, microbatches=32, interleave=2)), H200)[0]

    assert step.bubble == pytest.approx(step.forward * 7 / 64)


def test_many_small_operations_wait_for_the_host():
    work = Work(phase="backward", kind="vector", dtype="float32", bytes=8, count=1000)
    step = predict(plan(work), H200)[0]

    assert step.total == pytest.approx(1000 * H200.curve.host_backward_s)
    assert step.host == pytest.approx(step.total - step.backward)


def test_the_slowest_class_of_ranks_decides():
    whole = plan(matmul(8192, 8192, 8192))
    slow = RankClass(rank=8, ranks=1, work=[matmul(8192, 8192, 8192, count=2)])
    step = predict(evolve(whole, classes=[*whole.classes, slow]), H200)[0]

    assert step.rank_class is slow


def test_the_upper_bound_counts_one_link_for_each_node():
    across = message("all_gather", axis="shard", ranks=64, within_node=False, payload=1e11)
    step, interval = predict(plan(matmul(1024, 1024, 1024), collectives=[across], nodes=8), H200)

    assert interval.low == pytest.approx(LOW * step.total)
    assert interval.high > HIGH * step.total + 63 / 64 * 1e11 / (50e9 * INTER_SHARE) - step.communication - 0.1
