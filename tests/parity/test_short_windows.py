"""The last accumulation window of an epoch, of fewer batches, is averaged over its own batches, in every combination."""

from __future__ import annotations

import itertools

import pytest

import stratagem as sg
from stratagem.errors import StratagemError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
#: Windows of 3, 3 and 1.
BATCHES = joined_batches(7, 8)
STRATEGIES = {
    "single_device": "single_device", "ddp": "ddp", "ddp_sharded": "ddp_sharded", "fsdp": "fsdp",
    "shard": {"name": "parallel", "shard": 2}, "tensor": {"name": "parallel", "tensor": 2},
    "pipeline": {"name": "parallel", "pipeline": 2, "microbatches": 2}, "deepspeed_stage_1": "deepspeed_stage_1",
    "deepspeed_stage_2": "deepspeed_stage_2", "deepspeed_stage_3": "deepspeed_stage_3",
}  # fmt: skip
#: How far from plain PyTorch in single precision, relative to what training changed.
CASES = [
    (precision, known, clip)
    for precision, known, clip in itertools.product(("32-true", "bf16-mixed", "64-true"), (True, False), (None, 0.5))
]
NEAR = {"32-true": 1e-5, "bf16-mixed": 0.03, "64-true": 1e-3}


class Stream:
    """Batches of unknown number."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def _train(rank, world_size, strategy):
    outcomes = {}
    for precision, known, clip in CASES:
        options = {"precision": precision, "gradient_clip_val": clip, "accumulate_grad_batches": 3}
        try:
            trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, **options, **QUIET)
        except StratagemError as error:
            outcomes[precision, known, clip] = str(error)
            continue
        batches = share(trainer, BATCHES)
        if precision == "64-true":
            batches = [tuple(each.double() for each in batch) for batch in batches]
        trainer.fit(Net(), batches if known else Stream(batches))
        outcomes[precision, known, clip] = weights_of(trainer)
        trainer.close()
    return outcomes


def changed(weights, before):
    return {name: weights[name].float() - before[name] for name in before}


@pytest.mark.sweep(guard="tests/core/test_loops.py::test_a_short_window_is_averaged_over_its_batches")
@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_it_equals_plain_pytorch(name, deepspeed_preloaded):
    before = {key: value.clone() for key, value in Net().state_dict().items()}
    expected = {clip: train_module_plainly(Net(), BATCHES, 3, clip) for clip in (None, 0.5)}
    assert min(expected[None][1]) > 1
    size = 1 if name == "single_device" else 2
    for outcomes in run_in_processes(_train, size, STRATEGIES[name], limit_s=900):
        for (precision, known, clip), found in outcomes.items():
            if isinstance(found, str):
                assert (name.startswith("deepspeed"), precision) == (True, "64-true"), found
                continue
            reference = changed(expected[clip][0], before)
            distance = relative_difference(changed(found, before), reference)
            in_bf16 = (name.startswith("deepspeed"), precision) == (True, "bf16-mixed")
            if in_bf16 and clip is not None:
                continue  # its weights are bf16, too: too coarse for steps that are clipped
            assert distance < (0.15 if in_bf16 else NEAR[precision]), (precision, known, clip)


def test_the_distances_tell_a_wrong_divisor():
    before = {key: value.clone() for key, value in Net().state_dict().items()}
    right = changed(train_module_plainly(Net(), BATCHES, 3)[0], before)
    wrong = changed(train_module_plainly(Net(), BATCHES[:6], 3)[0], before)
    assert relative_difference(wrong, right) * 2 / 3 > 2 * 0.15  # a third of the last step is lacking two thirds
