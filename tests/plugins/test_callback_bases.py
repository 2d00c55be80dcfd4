"""Base classes of callbacks: they average weights, write predictions, and freeze parts of a model until an epoch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import stratagem as sg
from stratagem.callbacks import BaseFinetuning, BasePredictionWriter, WeightAveraging
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
BATCHES = joined_batches(3, 8)


# --- Averages ------------------------------------------------------------------------------------------------------


class EachEpoch(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None and epoch_idx >= 1


class Later(WeightAveraging):
    def __init__(self):
        super().__init__(avg_fn=get_ema_avg_fn(0.8))

    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None and step_idx >= 2


def averaged_plainly(epochs, **options):
    """Return torch's own average, updated after each step or epoch for which `when` is true."""
    when = options.pop("when", lambda step, epoch: step is not None)
    module = Net()
    optimizer, averaged, step = module.configure_optimizers(), AveragedModel(module, **options), 0
    for epoch in range(epochs):
        for x, y in BATCHES:
            optimizer.zero_grad()
            module.criterion(module(x), y).backward()
            optimizer.step()
            if when(step, None):
                averaged.update_parameters(module)
            step += 1
        if when(None, epoch):
            averaged.update_parameters(module)
    return averaged.module.state_dict()


CASES = {
    "all": (WeightAveraging, {}),
    "each_epoch": (EachEpoch, {"when": lambda step, epoch: epoch is not None and epoch >= 1}),
    "later": (Later, {"when": lambda step, _: step is not None and step >= 2, "avg_fn": get_ema_avg_fn(0.8)}),
    "multi": (
        lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.8)),
        {"multi_avg_fn": get_ema_multi_avg_fn(0.8)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_average_equals_torchs_own_also_after_resuming(tmp_path, case):
    make, options = CASES[case]
    expected = averaged_plainly(3, **options)
    whole = sg.Trainer(**QUIET, max_epochs=3, callbacks=[make()])
    module = Net()
    whole.fit(module, BATCHES)
    half = sg.Trainer(**QUIET, max_epochs=3, max_steps=5, callbacks=[make_without_keeping(make)])
    half.fit(Net(), BATCHES)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Net()
    sg.Trainer(**QUIET, max_epochs=3, callbacks=[make()]).fit(resumed, BATCHES, ckpt_path=tmp_path / "half.ckpt")

    assert relative_difference(module.state_dict(), expected) < 1e-6
    assert relative_difference(resumed.state_dict(), expected) < 1e-6


def make_without_keeping(make):
    callback = make()
    callback.keep = False
    return callback


def test_two_functions_are_refused():
    with pytest.raises(ConfigError, match="WeightAveraging has avg_fn and multi_avg_fn; expected one of the two"):
        WeightAveraging(avg_fn=get_ema_avg_fn(), multi_avg_fn=get_ema_multi_avg_fn())


# --- Predictions ---------------------------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    def __init__(self, folder, write_interval):
        super().__init__(write_interval)
        self.folder, self.ended = folder, []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        torch.save(prediction, self.folder / f"{trainer.global_rank}-{dataloader_idx}-{batch_idx}.pt")

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.ended.append((predictions, batch_indices))


def predictions_of(folder, interval, loaders, **arguments):
    writer = Writer(folder, interval)
    trainer = sg.Trainer(**QUIET, callbacks=[writer], **arguments)
    kept = trainer.predict(Net(), loaders)
    return writer, kept


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_predictions_are_written_when_asked(tmp_path, interval):
    loader = torch.utils.data.DataLoader(BATCHES[0][0], batch_size=4)
    writer, kept = predictions_of(tmp_path, interval, loader)

    files = [torch.load(path) for path in sorted(tmp_path.iterdir())]
    assert len(files) == (0 if interval == "epoch" else len(kept))
    assert all(torch.equal(a, b) for a, b in zip(files, kept, strict=False))
    assert len(writer.ended) == (interval != "batch")
    if writer.ended:
        ((predictions, indices),) = writer.ended
        assert all(torch.equal(a, b) for a, b in zip(predictions, kept, strict=True))
        assert indices is None


def test_predictions_of_several_loaders_come_as_lists(tmp_path):
    loaders = [torch.utils.data.DataLoader(BATCHES[n][0], batch_size=4) for n in range(2)]
    writer, kept = predictions_of(tmp_path, "epoch", loaders)

    ((predictions, _),) = writer.ended
    assert [len(each) for each in predictions] == [len(each) for each in kept]


def predict_on_two_ranks(rank, world_size, folder):
    loader = torch.utils.data.DataLoader(BATCHES[0][0], batch_size=2)
    predictions_of(folder, "batch", loader, devices=world_size, strategy="ddp")


def test_each_rank_writes_its_share(tmp_path):
    run_in_processes(predict_on_two_ranks, 2, tmp_path)

    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"0", "1"}


def test_a_writer_without_its_method_is_refused():
    class Nothing(BasePredictionWriter):
        pass

    with pytest.raises(ConfigError, match="Nothing has write_interval='epoch' and no write_on_epoch_end; expected one"):
        sg.Trainer(**QUIET, callbacks=[Nothing("epoch")]).predict(Net(), BATCHES[:1])
    with pytest.raises(ConfigError, match=r"write_interval is 'epochs'; expected 'batch' or 'epoch'"):
        sg.Trainer(**QUIET, callbacks=[Nothing("epochs")])


# --- What is trained when --------------------------------------------------------------------------------------------


class Model(Net):
    """Two parts and a BatchNorm; the optimizer gets what is trained from the start."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(self.net[0], torch.nn.BatchNorm1d(self.net[0].out_features))
        self.head = self.net[1:]
        del self.net

    def forward(self, x):
        return self.head(self.backbone(x))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


class Plan(BaseFinetuning):
    def __init__(self, at=1):
        super().__init__()
        self.at = at

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.at:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


def finetuned_plainly(epochs, at=1):
    module = Model()
    for parameter in module.backbone.parameters():
        parameter.requires_grad = False
    module.backbone[1].track_running_stats = False
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]
    for epoch in range(epochs):
        if epoch == at:
            module.backbone[1].track_running_stats = True
            for parameter in module.backbone.parameters():
                parameter.requires_grad = True
            rate = optimizer.param_groups[0]["lr"] / 10
            optimizer.add_param_group({"params": list(module.backbone.parameters()), "lr": rate})
            scheduler.base_lrs.append(rate)
        for x, y in BATCHES:
            optimizer.zero_grad()
            module.criterion(module(x), y).backward()
            optimizer.step()
        scheduler.step()
    return module.state_dict()


@pytest.mark.parametrize("stop", [3, 5, 6, 8])
def test_a_plan_equals_a_loop_by_hand_also_after_resuming(tmp_path, stop):
    expected, module = finetuned_plainly(3), Model()
    before = copy.deepcopy(module.state_dict())
    sg.Trainer(**QUIET, max_epochs=3, callbacks=[Plan()]).fit(module, BATCHES)
    half = sg.Trainer(**QUIET, max_epochs=3, max_steps=stop, callbacks=[Plan()])
    half.fit(Model(), BATCHES)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Model()
    sg.Trainer(**QUIET, max_epochs=3, callbacks=[Plan()]).fit(resumed, BATCHES, ckpt_path=tmp_path / "half.ckpt")

    assert relative_difference(before, expected) > 1e-2
    assert relative_difference(module.state_dict(), expected) < 1e-6
    assert relative_difference(resumed.state_dict(), expected) < 1e-6


def test_parts_are_found_frozen_and_filtered():
    module = Model()
    assert len(BaseFinetuning.flatten_modules([module.backbone, [module.head]])) == len(list(module.modules())) - 3
    BaseFinetuning.freeze(module)
    norm, linear = module.backbone[1], module.backbone[0]
    assert norm.weight.requires_grad
    assert not linear.weight.requires_grad
    assert len(list(BaseFinetuning.filter_params(module, requires_grad=False))) == len(list(module.parameters())) - 2
    BaseFinetuning.make_trainable([module])
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_several_processes_and_missing_methods_are_refused():
    class Nothing(BaseFinetuning):
        pass

    with pytest.raises(ConfigError, match=r"Nothing has no freeze_before_training\(module\); expected one"):
        sg.Trainer(**QUIET, callbacks=[Nothing()]).fit(Model(), BATCHES)
    with pytest.raises(ConfigError, match="Plan was chosen for 2 processes; expected one"):
        run = sg.Trainer(**QUIET, callbacks=[Plan()], devices=2, strategy="ddp_fork")
        run.fit(Model(), BATCHES)


def test_batch_normalization_is_trained_once_it_is_unfrozen():
    backbone = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    BaseFinetuning.freeze(backbone, train_bn=False)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    BaseFinetuning.unfreeze_and_add_param_group(backbone, optimizer)

    assert {id(p) for p in optimizer.param_groups[1]["params"]} == {id(p) for p in backbone.parameters()}
    kept = BaseFinetuning.filter_params(backbone, train_bn=False)
    assert {id(p) for p in kept} == {id(p) for p in backbone[0].parameters()}
