"""Compressed gradients are the average within the rounding of 16 bits, for many buckets, alone and stacked."""

from __future__ import annotations

import os

import pytest
import torch

import stratagem as sg
from stratagem.comm_hooks import BF16Compress, FP16Compress
from stratagem.plugin import Bucket
from stratagem.testing import run_in_processes
from stratagem.testing.reference import Net, joined_batches, part, relative_difference, train_plainly

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def _fit(rank, world_size, batches, comm_hook, precision):
    model = Net()
    trainer = sg.Trainer(
        max_epochs=1, strategy={"name": "ddp", "bucket_cap_mb": 0.002}, devices=world_size, comm_hook=comm_hook,
        precision=precision, **QUIET,
    )  # fmt: skip
    trainer.fit(model, part(batches, int(os.environ["RANK"]), world_size))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.parametrize(
    ("comm_hook", "tolerance"),
    [
        ("fp16_compress", 1e-3),
        ("bf16_compress", 1e-2),
        (["fp16_compress", "fp16_compress"], 1e-3),
        (["bf16_compress", "fp16_compress"], 1e-2),
        ([FP16Compress()], 1e-3),
    ],
)
def test_training_with_compressed_gradients_stays_close(comm_hook, tolerance, precision):
    batches = joined_batches(10, 16)
    reference, _ = train_plainly(batches)

    first, second = run_in_processes(_fit, 2, batches, comm_hook, precision)

    assert all(torch.equal(first[name], second[name]) for name in first)
    difference = relative_difference(first, reference)
    assert 1e-7 < difference < tolerance, "either not compressed, or not the average"


def recorded(dtype):
    """Return a stand-in for the wire that halves what it gets, and the dtypes it saw."""
    seen = []

    def average(tensor):
        seen.append(tensor.dtype)
        future = torch.futures.Future()
        future.set_result(tensor / 2)
        return future

    return average, seen


@pytest.mark.parametrize(("hook", "dtype"), [(FP16Compress(), torch.float16), (BF16Compress(), torch.bfloat16)])
def test_sixteen_bits_travel_and_the_buffer_keeps_its_dtype(hook, dtype):
    average, seen = recorded(dtype)
    buffer = torch.tensor([1.0, 2.0, 4.0])

    result = hook.reduce_bucket(Bucket(buffer=buffer), average).wait()

    assert seen == [dtype]
    assert result.dtype == torch.float32
    assert result.tolist() == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("hook", [FP16Compress(), BF16Compress()])
def test_sixteen_bit_gradients_are_left_alone(hook):
    average, seen = recorded(torch.bfloat16)

    hook.reduce_bucket(Bucket(buffer=torch.ones(3, dtype=torch.bfloat16)), average).wait()

    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("hook", [FP16Compress(), BF16Compress()])
def test_complex_gradients_keep_both_parts(hook):
    average, seen = recorded(hook.dtype)

    result = hook.reduce_bucket(Bucket(buffer=torch.tensor([1 + 2j, 4 - 8j])), average).wait()

    assert seen == [hook.dtype]
    assert result.tolist() == [0.5 + 1j, 2 - 4j]


def test_the_stack_runs_from_the_outside_in():
    run = sg.Run(strategy="ddp", comm_hook=["fp16_compress", "bf16_compress"], accelerator="cpu")

    assert [choice.name for choice in run.stack.comm_hooks] == ["fp16_compress", "bf16_compress"]
