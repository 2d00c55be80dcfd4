"""`bf16_feedback` passes the checks for comm hooks, and its rounding errors do not accumulate."""

import torch

import stratagem
from stratagem_buckets import Bucket
from stratagem_buckets.reducer import bucket_reducer
from stratagem_testing import CommHookConformance


class TestBF16Feedback(CommHookConformance):
    plugin = "bf16_feedback"
    tolerance = 2e-2  # a step also sends the residual of the previous step
    training_tolerance = 1e-3


def test_rounding_errors_do_not_accumulate():
    run = stratagem.Run(accelerator="cpu", strategy="ddp", comm_hook="bf16_feedback")
    reduce = bucket_reducer(run)  # over one process: the average is what was sent
    gradient, total = torch.full((8,), 1.001), torch.zeros(8)

    for _ in range(100):
        total += reduce(Bucket(buffer=gradient.clone())).wait()

    assert torch.allclose(total, 100 * gradient, atol=0.01)  # bf16 alone would be off by 0.1


def test_a_residual_is_not_added_to_another_parameter():
    run = stratagem.Run(accelerator="cpu", strategy="ddp", comm_hook="bf16_feedback")
    reduce = bucket_reducer(run)
    first, second = torch.zeros(4), torch.zeros(4)
    reduce(Bucket(buffer=torch.tensor([1.001] * 4 + [0.0] * 4), parameters=(first, second))).wait()

    average = reduce(Bucket(buffer=torch.zeros(8), parameters=(second, first))).wait()  # as DDP does after a step

    assert not average[:4].any()
