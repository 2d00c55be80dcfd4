"""The axes of `parallel`, each over two ranks: over NCCL on a GPU each, and over gloo on one GPU where that can carry them."""

from __future__ import annotations

import pytest
from on_device import DEVICE, OTHER_ORDER, AdamW, run_ranks
from test_ranks import talk  # noqa: F401 - a fixture

import stratagem as sg
from stratagem_testing.precision import tolerance_of
from stratagem_testing.reference import joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of

AXES = {
    "replicate": {"replicate": 2}, "shard": {"shard": 2}, "tensor": {"tensor": 2},
    "context by heads": {"context": 2, "context_method": "ulysses"},
    "context by keys": {"context": 2, "context_method": "all_gather"},
    "pipeline": {"pipeline": 2, "microbatches": 4}, "interleaved": {"pipeline": 2, "schedule": "interleaved_1f1b"},
}  # fmt: skip
#: gloo does not carry what these send from a GPU, which the strategy says.
NOT_OVER_GLOO = ("shard", "tensor")


def _batches():
    return joined_batches(10, 16, sequence=8)


def _train(rank, world_size, strategy):
    results = []
    for precision in ("32-true", "bf16-mixed"):
        trainer = sg.Trainer(
            max_epochs=1, strategy={"name": "parallel", **strategy}, devices=world_size, precision=precision,
            gradient_clip_val=1.0, accelerator=DEVICE, logger=False, enable_progress_bar=False,
            enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(AdamW(), share(trainer, _batches()))
        limit = OTHER_ORDER if precision == "32-true" else tolerance_of(trainer.run.policy)
        results.append((weights_of(trainer), limit))
        trainer.close()
    return results


def _check(results):
    reference, norms = train_module_plainly(AdamW(), _batches(), max_norm=1.0)
    assert max(norms) > 1
    for result in results:
        for weights, limit in result:
            assert relative_difference(weights, reference) < limit


@pytest.mark.parametrize("axis", list(AXES))
def test_two_ranks_of_an_axis_train_as_one_process(axis, talk):  # noqa: F811
    if talk and axis in NOT_OVER_GLOO:  # not a segmentation fault
        with pytest.raises(AssertionError, match="backend there is gloo, which cannot gather"):
            run_ranks(_train, 2, AXES[axis] | talk)
        return
    _check(run_ranks(_train, 2, AXES[axis] | talk))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("axis", list(AXES))
def test_two_gpus_of_an_axis_train_as_one_process(axis):
    _check(run_ranks(_train, 2, AXES[axis], one_gpu=False))
