"""`scaled_fp16` passes the checks of every comm hook, and small gradients do not become zero."""

import torch

import stratagem
from stratagem_buckets import Bucket
from stratagem_buckets.reducer import bucket_reducer
from stratagem_testing import CommHookConformance


class TestScaledFP16(CommHookConformance):
    plugin = "scaled_fp16"


def test_gradients_that_fp16_cannot_hold_arrive() -> None:
    run = stratagem.Run(accelerator="cpu", strategy="ddp", comm_hook="scaled_fp16")
    reduce = bucket_reducer(run)  # over one process: what is sent comes back
    assert reduce is not None
    gradients = torch.tensor([3e-12, -1e-12, 0.0])

    assert torch.allclose(reduce(Bucket(buffer=gradients.clone())).wait(), gradients, rtol=1e-3)
