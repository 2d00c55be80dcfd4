"""The ``state_dict()`` of a module whose weights are sharded is not taken for the whole by mistake."""

from __future__ import annotations

import warnings

import pytest

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import share

BATCHES = joined_batches(2, 12)


class Saves(Net):
    def on_train_epoch_end(self):
        self.net.state_dict()


def said(rank, size, strategy, module, folder):
    """Return what is said in a fit that saves, by saves and loads afterwards, and then by the module's own state."""
    trainer = sg.Trainer(
        strategy=strategy, devices=size, accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        default_root_dir=folder,
    )  # fmt: skip
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, share(trainer, BATCHES))
        trainer.save_checkpoint(f"{folder}/mine.ckpt")
        trainer.fit(module, share(trainer, BATCHES), ckpt_path=f"{folder}/mine.ckpt")
        found.append([str(each.message) for each in caught if "state_dict()" in str(each.message)])
        module.net.state_dict()
        module.state_dict()
    here = [each for each in caught if "state_dict()" in str(each.message)]
    return [*found, [str(each.message) for each in here], [each.filename for each in here]]


@pytest.mark.when_changed("plugins/deepspeed/", cases=("deepspeed_stage_3-True",))
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "speaks"),
    [
        ("fsdp", True), ("deepspeed_stage_3", True), ({"name": "parallel", "pipeline": 2}, True),
        ({"name": "parallel", "tensor": 2}, True), ("ddp", False), ("ddp_sharded", False),
    ],
    ids=str,
)  # fmt: skip
def test_it_says_once_that_it_lacks_the_parts_of_other_ranks(strategy, speaks, tmp_path):
    (before, after, files), *others = run_in_processes(said, 2, strategy, Net(), str(tmp_path))
    assert before == [], "what a run reads is not the user's"
    assert len(after) == speaks
    assert not any(each for rank in others for each in rank)
    if speaks:
        assert "trainer.save_checkpoint(path, weights_only=True)" in after[0]
        assert files == [__file__], "where it was taken"


@pytest.mark.slow
def test_it_says_so_in_a_hook(tmp_path):
    (before, after, files), _ = run_in_processes(said, 2, "fsdp", Saves(), str(tmp_path))
    assert before == after
    assert files == [__file__]
