"""The small callbacks do what they say: timers, tables, statistics, spikes, norms, predictions, profiles."""

from __future__ import annotations

import csv
import json
import math
import os
import pstats
import signal
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientNorms,
    LearningRateFinder,
    MemoryProfiler,
    ModelSummary,
    OnExceptionCheckpoint,
    PredictionWriter,
    Preemption,
    SpikeDetection,
    Throughput,
    Timer,
)
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data, joined_batches, train_module_plainly
from stratagem_testing.training import share, weights_of
from stratagem_trainer.checkpoint_files import read_any

QUIET = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
BATCHES = joined_batches(6, 8)


def trainer(tmp_path, *callbacks, **arguments):
    options = QUIET | {"max_epochs": 1, "default_root_dir": tmp_path, "log_every_n_steps": 1}
    return sg.Trainer(callbacks=list(callbacks), **(options | arguments))


def rows(tmp_path, name):
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(lines) if row.get(name)}


# --- timer -------------------------------------------------------------------------------------------------------


class Sleepy(Net):
    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def test_the_timer_ends_training_and_counts_earlier_time(tmp_path, capsys):
    timer = Timer(duration=0.12)
    made = trainer(tmp_path, timer, logger=False, max_epochs=50)
    made.fit(Sleepy(), BATCHES)
    assert 1 <= made.global_step <= 3
    assert "as timer.duration says" in capsys.readouterr().out
    assert timer.time_elapsed() > 0.12
    assert timer.time_remaining() == 0.0
    made.save_checkpoint(tmp_path / "a.ckpt")

    again = trainer(tmp_path, Timer(duration=0.12), logger=False, max_epochs=50)
    again.fit(Sleepy(), BATCHES, ckpt_path=tmp_path / "a.ckpt")
    assert again.global_step == made.global_step + 1  # it looks after each step


def _timed(rank, world_size):
    # Rank 1's clock says so first; both stop.
    timer = Timer(duration=1e9, verbose=False)
    timer._limit = 1e9 if rank == 0 else 0.1
    made = sg.Trainer(strategy="ddp", devices=world_size, callbacks=timer, max_epochs=50, logger=False, **QUIET)
    made.fit(Sleepy(), share(made, BATCHES))
    return made.global_step


def test_one_ranks_time_is_up_for_all():
    one, other = run_in_processes(_timed, 2)
    assert one == other < 10


def test_a_timer_reads_a_duration_as_the_trainer_does():
    assert Timer(duration="00:01:00:30").time_remaining() == 3630
    with pytest.raises(ConfigError, match="timer.duration is 'soon'"):
        Timer(duration="soon")


# --- model_summary -----------------------------------------------------------------------------------------------


class Frozen(Net):
    def __init__(self):
        super().__init__()
        for parameter in self.net[0].parameters():
            parameter.requires_grad = False


def test_the_summary_names_layers_and_counts(tmp_path, capsys):
    module = Frozen()
    trainer(tmp_path, ModelSummary(max_depth=2), logger=False).fit(module, BATCHES)
    output = capsys.readouterr().out
    total = sum(parameter.numel() for parameter in module.parameters())
    frozen = sum(parameter.numel() for parameter in module.net[0].parameters())

    assert f"Frozen: {total:,} parameters" in output
    assert f"{frozen:,} frozen" in output
    assert [line.split()[:2] for line in output.splitlines()][1:4] == [
        ["net", "Sequential"],
        ["0", "Linear"],
        ["1", "Tanh"],
    ]


def test_the_summary_is_on_where_it_is_asked_for(tmp_path, capsys):
    trainer(tmp_path, logger=False, enable_model_summary=True).fit(Net(), BATCHES)
    assert "Net: " in capsys.readouterr().out
    trainer(tmp_path, logger=False).fit(Net(), BATCHES)
    assert capsys.readouterr().out == ""  # no terminal


# --- device_stats, throughput, gradient_norms --------------------------------------------------------------------


def test_device_stats_are_logged(tmp_path):
    trainer(tmp_path, "device_stats", log_every_n_steps=2).fit(Net(), BATCHES)
    memory = rows(tmp_path, "device/process_rss_bytes")
    assert sorted(memory) == [1, 2, 4, 6]  # the first step, too
    assert all(value > 50e6 for value in memory.values())


@pytest.mark.parametrize(
    ("callback", "column", "steps"),
    [
        ("device_stats", "device/process_rss_bytes", [1, 6]),
        ("throughput", "throughput/samples_per_s", [1, 6]),
        ({"name": "learning_rate_monitor", "logging_interval": "step"}, "lr-SGD", [1, 6]),
        ("gradient_norms", "grad_norm", [1]),  # known before it is known that the step is the last
    ],
)
def test_a_short_run_logs_its_first_and_its_last_step(tmp_path, callback, column, steps):
    trainer(tmp_path, callback, log_every_n_steps=50).fit(Net(), BATCHES)

    assert sorted(rows(tmp_path, column)) == steps


def test_throughput_is_batches_samples_and_tokens_over_time(tmp_path):
    callback = Throughput(window=4, length_fn=lambda batch: batch[0].numel(), flops_per_batch=1e9, available_flops=1e12)
    trainer(tmp_path, callback).fit(Sleepy(), BATCHES)
    batches = rows(tmp_path, "throughput/batches_per_s")
    assert 0 < batches[6] < 20.5  # 50 ms each, and what the loop takes
    assert rows(tmp_path, "throughput/samples_per_s")[6] == pytest.approx(8 * batches[6])
    assert rows(tmp_path, "throughput/tokens_per_s")[6] == pytest.approx(8 * 16 * batches[6])
    assert rows(tmp_path, "throughput/mfu")[6] == pytest.approx(batches[6] * 1e9 / 1e12)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA L4", 121), ("NVIDIA L40", 181), ("NVIDIA L40S", 362), ("NVIDIA A10", 125), ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("A100-PCIE-40GB", 312), ("NVIDIA RTX A1000", None),
        ("Tesla T4", 65), ("NVIDIA T400 4GB", None), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989), ("NVIDIA GH200 480GB", 989), ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None), ("GRID A100-10C", None),
    ],
)  # fmt: skip
def test_throughput_knows_gpus_by_their_whole_names(monkeypatch, name, teraflops):
    from stratagem_callbacks import throughput

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    assert throughput._peak_of(torch.device("cuda", 0)) == (teraflops and teraflops * 1e12)


def test_throughput_counts_the_flops_of_a_batch(tmp_path):
    callback = Throughput(measure_flops=True)
    module = Net()
    trainer(tmp_path, callback).fit(module, BATCHES)
    layers = [layer for layer in module.net if isinstance(layer, nn.Linear)]
    forward = sum(2 * 8 * layer.in_features * layer.out_features for layer in layers)
    first = 2 * 8 * layers[0].in_features * layers[0].out_features  # nobody wants the gradient of the input
    assert callback.flops_per_batch == 3 * forward - first


@pytest.mark.parametrize(("options", "message"), [
    ({"flops_per_batch": 1.0, "measure_flops": True}, "flops_per_batch and measure_flops; expected one of the two"),
    ({"available_flops": 1.0}, "available_flops is set without the FLOPs of a batch"),
])  # fmt: skip
def test_throughput_refuses_what_has_no_effect(options, message):
    with pytest.raises(ConfigError, match=message):
        Throughput(**options)


@pytest.mark.parametrize("name", ["device_stats", "throughput", "gradient_norms"])
def test_what_only_logs_needs_a_logger(tmp_path, name):
    with pytest.raises(ConfigError, match=f"{name} has no logger to log to"):
        trainer(tmp_path, name, logger=False).fit(Net(), BATCHES)


def test_device_stats_are_refused_before_anything_is_built(tmp_path):
    class Slow(Net):
        def setup(self, stage):
            raise AssertionError("set up for a run that is refused")

    with pytest.raises(ConfigError, match="device_stats has no logger to log to"):
        trainer(tmp_path, "device_stats", logger=False).fit(Slow(), BATCHES)


def _norms(rank, world_size, strategy, precision, folder):
    made = sg.Trainer(
        strategy=strategy, devices=world_size, callbacks=["gradient_norms"], max_epochs=1, log_every_n_steps=1,
        precision=precision, default_root_dir=folder, gradient_clip_val=0.5, **QUIET,
    )  # fmt: skip
    made.fit(Net(), share(made, BATCHES))
    return weights_of(made)


@pytest.mark.every_push("single_device-1")
@pytest.mark.parametrize(
    ("strategy", "world_size"), [("single_device", 1), ("ddp", 2), ("fsdp", 2), ("ddp_sharded", 2)]
)
def test_gradient_norms_are_the_plain_loops_before_clipping(tmp_path, strategy, world_size):
    weights, norms = train_module_plainly(Net(), BATCHES, max_norm=0.5)
    for found in run_in_processes(_norms, world_size, strategy, None, str(tmp_path)):
        assert all(torch.allclose(found[name], weights[name], atol=1e-6) for name in weights)
    assert list(rows(tmp_path, "grad_norm").values()) == pytest.approx(norms, rel=1e-4)
    assert max(norms) > 1


def test_gradient_norms_are_unscaled_and_scaling_goes_on(tmp_path):
    scaled = {"name": "16-mixed", "init_scale": 1024.0}
    weights = _norms(0, 1, "single_device", scaled, str(tmp_path / "with"))
    made = trainer(tmp_path, logger=False, precision=scaled, gradient_clip_val=0.5)
    made.fit(Net(), BATCHES)
    assert all(torch.equal(weights_of(made)[name], weights[name]) for name in weights)
    _, norms = train_module_plainly(Net(), BATCHES, max_norm=0.5)
    assert list(rows(tmp_path / "with", "grad_norm").values()) == pytest.approx(norms, rel=0.05)


def test_gradient_norms_of_each_parameter(tmp_path):
    trainer(tmp_path, GradientNorms(per_parameter=True)).fit(Net(), BATCHES)
    each = [rows(tmp_path, f"grad_norm/{name}")[1] for name, _ in Net().named_parameters()]
    assert math.hypot(*each) == pytest.approx(rows(tmp_path, "grad_norm")[1], rel=1e-5)


class Waits(TorchDispatchMode):
    """Counts the numbers that Python asks a tensor for: each waits for a GPU to finish what it has to do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class Counted(GradientNorms):
    @sg.hookimpl
    def on_before_optimizer_step(self, trainer, module, optimizer, run):
        with Waits() as mode:
            super().on_before_optimizer_step(trainer, module, optimizer, run)
        self.waits = mode.count


@pytest.mark.parametrize("per_parameter", [False, True])
def test_gradient_norms_wait_for_the_device_as_often_whatever_the_number_of_parameters(tmp_path, per_parameter):
    callback = Counted(per_parameter=per_parameter)
    trainer(tmp_path, callback).fit(Net(), BATCHES[:1])

    assert callback.waits == 1


# --- spike_detection ---------------------------------------------------------------------------------------------


class Spiking(Net):
    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 0 + self.losses[self.trainer.current_epoch * 6 + batch_idx]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 9.0])
def test_a_spike_is_an_error_a_stop_or_a_warning(tmp_path, bad):
    losses = [1.0, 1.1, 0.9, 1.0, bad, 1.0]
    with pytest.raises(
        sg.StratagemError, match=r"the loss is \S+ in batch 4 of epoch 0, after a running mean of (1|0.9)"
    ):
        trainer(tmp_path, SpikeDetection(warmup=3), logger=False, checks=None).fit(Spiking(losses), BATCHES)
    stopping = SpikeDetection(warmup=3, on_spike="stop")
    made = trainer(tmp_path, stopping, logger=False, checks=None)
    with pytest.warns(UserWarning, match="in batch 4 of epoch 0"):
        made.fit(Spiking(losses), BATCHES)
    assert made.global_step == 5
    assert [spike[:2] for spike in stopping.spikes] == [(0, 4)]


def test_training_continues_without_a_spike(tmp_path):
    patient = SpikeDetection(warmup=3, rtol=3.0)
    trainer(tmp_path, patient, logger=False).fit(Spiking([9.0, 2.0, 2.0, 5.0, 2.0, 2.0]), BATCHES)
    assert patient.spikes == []


# --- on_exception_checkpoint, prediction_writer ------------------------------------------------------------------


class Failing(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise KeyError("no such thing")
        return super().training_step(batch, batch_idx)


def _fail(rank, world_size, folder, only_rank):
    cls = Failing if only_rank in (None, rank) else Net
    made = sg.Trainer(
        strategy="ddp", devices=world_size, max_epochs=1, logger=False, default_root_dir=folder,
        callbacks=OnExceptionCheckpoint(patience_s=30 if only_rank is None else 2), **QUIET,
    )  # fmt: skip
    try:
        made.fit(cls(), share(made, BATCHES))
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_what_was_trained_is_saved_and_goes_on(tmp_path, capsys):
    with pytest.raises(KeyError, match="no such thing"):
        trainer(tmp_path, "on_exception_checkpoint", logger=False).fit(Failing(), BATCHES)
    assert "after step 3" in capsys.readouterr().out
    made = trainer(tmp_path, logger=False)
    module = Net()
    made.fit(module, BATCHES, ckpt_path=tmp_path / "checkpoints" / "on_exception.ckpt")
    plain, _ = train_module_plainly(Net(), BATCHES)
    assert all(torch.equal(value, plain[name]) for name, value in module.state_dict().items())


@pytest.mark.slow
def test_ranks_that_fail_alike_save_together(tmp_path):
    assert {name for name, _ in run_in_processes(_fail, 2, str(tmp_path), None)} == {"KeyError"}
    made = trainer(tmp_path, logger=False)
    made.fit(Net(), BATCHES, ckpt_path=tmp_path / "checkpoints" / "on_exception.ckpt")
    assert made.global_step == 3  # three batches of two ranks are as many samples as six of one


class Ended(Net):
    """Fails in its third batch, or is told to stop."""

    def __init__(self, how):
        super().__init__()
        self.how, self.seen = how, 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        if self.seen == 3:
            if self.how == "on_exception":
                raise KeyError("no such thing")
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


@pytest.fixture
def end_a_fit(tmp_path):
    callbacks = {"on_exception": "on_exception_checkpoint", "preempted": {"name": "preemption", "look_every_s": 0.01}}

    def fit(name, checkpoint="full", ckpt_path=None):
        made = trainer(tmp_path, callbacks[name], logger=False, max_epochs=None, max_steps=10**6, checkpoint=checkpoint)
        with pytest.raises((KeyError, SystemExit)):
            made.fit(Ended(name), BATCHES, ckpt_path=ckpt_path)
        return made.global_step

    return fit


def steps_in(folder):
    return {path.name: read_any(path)["loop"]["global_step"] for path in folder.iterdir() if path.suffix != ".sum"}


@pytest.mark.every_push("preempted-sharded")
@pytest.mark.parametrize("checkpoint", ["full", "safetensors", "sharded"])
@pytest.mark.parametrize("name", ["on_exception", "preempted"])
def test_another_runs_checkpoint_of_that_name_is_kept(end_a_fit, tmp_path, name, checkpoint):
    folder = tmp_path / "checkpoints"
    first = end_a_fit(name, checkpoint)
    [path] = steps_in(folder)
    assert path.startswith(f"{name}.")

    other = end_a_fit(name, checkpoint)
    other_path = path.replace(name, f"{name}-v1")
    assert steps_in(folder) == {path: first, other_path: other}

    # Restarted, each run goes on with its own, under the same name.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = end_a_fit(name, checkpoint, "last")
        assert steps_in(folder) == {path: first, other_path: again}
        assert again > other
        resumed = end_a_fit(name, checkpoint, folder / path)
    assert steps_in(folder) == {path: resumed, other_path: again}


@pytest.mark.parametrize("name", ["on_exception", "preempted"])
def test_what_was_there_in_another_format_is_kept(end_a_fit, tmp_path, name):
    first = end_a_fit(name, "full")
    second = end_a_fit(name, "sharded", "last")

    assert steps_in(tmp_path / "checkpoints") == {f"{name}.ckpt": first, f"{name}-v1.ckpt": second}


@pytest.mark.parametrize("name", ["on_exception", "preempted"])
def test_a_run_overwrites_what_it_wrote_itself(tmp_path, name):
    callback = {"on_exception": OnExceptionCheckpoint, "preempted": Preemption}[name]()
    made = trainer(tmp_path, callback, logger=False, max_epochs=None, max_steps=10**6)
    module = Ended(name)
    for _ in range(2):
        module.seen = 0
        with pytest.raises((KeyError, SystemExit)):
            made.fit(module, BATCHES)

    assert steps_in(tmp_path / "checkpoints") == {f"{name}.ckpt": made.global_step}


class Elsewhere:
    """Stands for what a GPU holds: it knows where it was moved to."""

    device = torch.device("cuda")

    def to(self, device):
        moved = Elsewhere()
        moved.device = torch.device(device)
        return moved


class Predicts(Net):
    def predict_step(self, batch, batch_idx):
        return {"score": [Elsewhere()]}


@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_predictions_are_kept_and_written_on_the_cpu(tmp_path, monkeypatch, interval):
    written = []
    monkeypatch.setattr(torch, "save", lambda value, file: written.append(value))
    trainer(tmp_path, PredictionWriter(dirpath=tmp_path, write_interval=interval)).predict(Predicts(), [data(4)])
    value = written[0] if interval == "batch" else written[0][0][0]

    assert value["score"][0].device.type == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_predict_says_what_it_wrote_where(tmp_path, capsys, interval):
    writer = PredictionWriter(dirpath=tmp_path / "out", write_interval=interval)
    made = trainer(tmp_path, writer, enable_progress_bar=True)
    made.predict(Net(), BATCHES[:2], return_predictions=False)
    (line,) = capsys.readouterr().out.splitlines()
    said, _, pattern = line.rpartition(" ")

    assert said == "predict: wrote"
    assert sorted(tmp_path.glob(os.path.relpath(pattern, tmp_path))) == sorted((tmp_path / "out").iterdir())


def test_predict_says_that_it_returned_something(tmp_path, capsys):
    for shows in (True, False):
        made = sg.Trainer(accelerator="cpu", logger=False, enable_progress_bar=shows, default_root_dir=tmp_path)
        made.predict(Net(), BATCHES[:2])

    assert capsys.readouterr().out == "predict: returned the outputs of 2 batches\n"


@pytest.mark.slow
def test_predictions_are_written_by_each_rank(tmp_path):
    def predict(rank, world_size, folder, interval):
        writer = PredictionWriter(dirpath=folder, write_interval=interval)
        made = sg.Trainer(strategy="ddp", devices=world_size, callbacks=writer, logger=False, **QUIET)
        loader = DataLoader(TensorDataset(data(21)[0]), 4)
        made.predict(First(), [loader, loader])
        return True

    for interval in ("batch", "epoch"):
        run_in_processes(predict, 2, tmp_path / interval, interval)
    together = [torch.load(tmp_path / "epoch" / f"rank{rank}.pt") for rank in range(2)]
    x = data(21)[0]
    expected = First()(x)
    for rank in range(2):
        singles = [torch.load(tmp_path / "batch" / f"rank{rank}_loader1_batch{batch}.pt") for batch in range(3)]
        assert all(torch.equal(one, other) for one, other in zip(singles, together[rank][1], strict=True))
        assert torch.allclose(torch.cat(singles), expected[rank::2], atol=1e-6)


class First(Net):
    def predict_step(self, batch, batch_idx):
        return self(batch[0])


# --- finders -----------------------------------------------------------------------------------------------------


class Tunable(Net):
    def __init__(self, lr=1e-6, batch_size=4):
        super().__init__(lr=lr)
        self.save_hyperparameters()
        self.batch_size, self.sizes = batch_size, []

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > 20:
            raise RuntimeError("CPU out of memory. Tried to allocate")
        return super().training_step(batch, batch_idx)


def loader(count=64, size=4):
    return DataLoader(TensorDataset(*data(count)), size)


def _find_rate(rank, world_size, strategy, folder):
    finder = LearningRateFinder(min_lr=1e-6, max_lr=10.0, num_training_steps=60, plot=f"{folder}/rates.png")
    made = sg.Trainer(strategy=strategy, devices=world_size, callbacks=finder, max_epochs=1, logger=False, **QUIET)
    module = Tunable()
    made.fit(module, loader(16, 16))
    reference = Tunable(lr=finder.suggestion)
    again = sg.Trainer(strategy=strategy, devices=world_size, max_epochs=1, logger=False, **QUIET)
    again.fit(reference, loader(16, 16))
    same = all(torch.equal(weights_of(made)[n], v) for n, v in weights_of(again).items())
    return finder.suggestion, module.lr, module.hparams.lr, same, len(finder.results["lr"])


@pytest.mark.every_push("single_device-1")
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("single_device", 1), ("ddp", 2), ("fsdp", 2)])
def test_the_rate_finder_suggests_applies_and_leaves_no_trace(tmp_path, strategy, world_size):
    for found, attribute, hyper, same, tried in run_in_processes(_find_rate, world_size, strategy, str(tmp_path)):
        assert 1e-4 < found < 1.0
        assert attribute == hyper == found
        assert same, "training after the search is not training with the rate found"
        assert 20 < tried <= 60
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.every_push("power-16")
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "expected"), [("power", 16), ("binsearch", 20)])
def test_the_batch_size_finder_takes_the_largest_that_fits(tmp_path, mode, expected):
    finder, module = BatchSizeFinder(mode=mode), Tunable()
    made = trainer(tmp_path, finder, logger=False)
    made.fit(module, loader())
    reference = Tunable()
    trainer(tmp_path, logger=False).fit(reference, loader(size=expected))

    assert finder.optimal_batch_size == module.batch_size == module.hparams.batch_size == made.batch_size == expected
    assert made.global_step == math.ceil(64 / expected)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), reference.parameters(), strict=True))


@pytest.mark.slow
def test_the_batch_size_finder_on_a_cpu_leaves_a_gpu_beside_it_alone(tmp_path, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(True))
    trainer(tmp_path, BatchSizeFinder(max_val=8), logger=False).fit(Net(), loader(24))

    assert not emptied


@pytest.mark.slow
def test_the_batch_size_finder_stops_at_the_data_set(tmp_path):
    finder = BatchSizeFinder(max_val=None)
    trainer(tmp_path, finder, logger=False).fit(Net(), loader(24))
    assert finder.optimal_batch_size == 24


@pytest.mark.parametrize("name", ["learning_rate_finder", "batch_size_finder"])
def test_finders_refuse_what_they_cannot_train(tmp_path, name):
    from stratagem_testing.reference import Gan

    with pytest.raises(ConfigError, match=f"{name} found Gan with 2 optimizers and automatic_optimization = False"):
        trainer(tmp_path, name, logger=False).fit(Gan(), loader())


def test_an_error_of_the_model_is_not_taken_for_a_lack_of_memory(tmp_path):
    with pytest.raises(KeyError, match="no such thing"):
        trainer(tmp_path, BatchSizeFinder(steps_per_trial=5), logger=False).fit(Failing(), loader())


# --- backbone_finetuning -----------------------------------------------------------------------------------------


class Pretrained(Net):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = self.net[:2], self.net[2:]
        self.rates = []

    def on_train_epoch_end(self):
        self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


def test_the_backbone_joins_at_its_epoch_also_after_a_resume(tmp_path):
    def finetuning():
        return BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_ratio_lr=0.1, multiplier=4)

    module = Pretrained()
    before = [parameter.clone() for parameter in module.backbone.parameters()]
    made = trainer(tmp_path, finetuning(), logger=False, max_epochs=2)
    made.fit(module, BATCHES)
    assert all(torch.equal(a, b) for a, b in zip(before, module.backbone.parameters(), strict=True))
    whole = Pretrained()
    trainer(tmp_path, finetuning(), logger=False, max_epochs=5).fit(whole, BATCHES)
    assert whole.rates == [pytest.approx(r) for r in ([1e-2], [1e-2], [1e-2, 1e-3], [1e-2, 4e-3], [1e-2, 1e-2])]
    assert not torch.equal(before[0], next(whole.backbone.parameters()))

    half = trainer(tmp_path, finetuning(), logger=False, max_epochs=3)
    half.fit(Pretrained(), BATCHES)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Pretrained()
    trainer(tmp_path, finetuning(), logger=False, max_epochs=5).fit(resumed, BATCHES, ckpt_path=tmp_path / "half.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("train_bn", [True, False])
def test_the_backbone_keeps_the_modes_that_the_user_set(tmp_path, train_bn):
    class Normalized(Pretrained):
        def __init__(self):
            super().__init__()
            self.backbone.append(torch.nn.BatchNorm1d(32).eval())
            self.modes, self.scales = [], []

        def forward(self, x):
            return self.head(self.backbone(x))

        def on_train_batch_end(self):
            self.modes.append((self.backbone.training, self.backbone[-1].training))
            self.scales.append(self.backbone[-1].weight.detach().clone())

    module = Normalized()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=train_bn)
    trainer(tmp_path, finetuning, logger=False, max_epochs=2).fit(module, BATCHES)

    assert module.modes[0] == (train_bn, False)
    assert (module.scales[0] != 1).any() == train_bn  # trained before the backbone is, as in Lightning
    assert (module.scales[-1] != 1).any()
    assert module.modes[-1] == (True, False)


def test_finetuning_says_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match="attr_name is 'bakcbone'; expected a submodule of Pretrained.*'backbone'"):
        trainer(tmp_path, BackboneFinetuning(attr_name="bakcbone"), logger=False).fit(Pretrained(), BATCHES)


# --- profilers ---------------------------------------------------------------------------------------------------


def test_the_simple_profiler_adds_up_actions(tmp_path, capsys):
    made = trainer(tmp_path, logger=False, profiler="simple", gradient_clip_val=1.0)
    made.fit(Sleepy(), BATCHES)
    profiler = next(callback for callback in made.callbacks if hasattr(callback, "summary"))
    plain, _ = train_module_plainly(Net(), BATCHES, max_norm=1.0)

    assert profiler.calls["forward and backward"] == profiler.calls["optimizer step"] == profiler.calls["clipping"] == 6
    assert (
        0.3
        < profiler.seconds["forward and backward"]
        < profiler.seconds["training batch"]
        < profiler.seconds["training"]
    )
    assert (tmp_path / "profile-simple-rank0.txt").read_text().strip() in capsys.readouterr().out
    assert all(torch.equal(value, plain[name]) for name, value in weights_of(made).items())


def test_the_simple_profiler_times_every_kind_of_evaluation(tmp_path, capsys):
    made, module = trainer(tmp_path, logger=False, profiler="simple"), Net()
    made.fit(module, BATCHES, BATCHES[:2])
    made.test(module, BATCHES[:3])
    made.predict(module, BATCHES[:4])
    calls = next(callback for callback in made.callbacks if hasattr(callback, "summary")).calls

    assert (calls["sanity check"], calls["validation"], calls["test"], calls["predict"]) == (1, 1, 1, 1)
    assert [calls[f"{stage} batch"] for stage in ("validation", "test", "predict")] == [4, 3, 4]  # 2 to try
    assert [calls[f"next {stage} batch"] for stage in ("validation", "test", "predict")] == [4, 3, 4]
    said = capsys.readouterr().out
    for stage in ("test", "predict"):
        assert (tmp_path / f"profile-simple-{stage}-rank0.txt").read_text().strip() in said


def test_the_advanced_profiler_knows_the_users_function(tmp_path):
    trainer(tmp_path, logger=False, profiler={"name": "advanced", "top": 5}).fit(Sleepy(), BATCHES)
    stats = pstats.Stats(str(tmp_path / "profile-advanced-rank0.prof"))
    assert {calls for (_, _, name), (calls, *_) in stats.stats.items() if name == "training_step"} >= {6}
    assert "cumulative" in (tmp_path / "profile-advanced-rank0.txt").read_text()


def test_the_memory_profiler_tells_what_holds_the_memory(tmp_path, capsys):
    module = Net()
    trainer(tmp_path, logger=False, profiler={"name": "memory", "active": 2}).fit(module, BATCHES)

    lines = (tmp_path / "memory-rank0.txt").read_text().splitlines()
    assert "\n".join(lines) in capsys.readouterr().out
    sizes = {line.rsplit(None, 2)[0].strip(): float(line.split()[-2]) for line in lines[1:]}
    parameters = sum(parameter.nbytes for parameter in module.parameters()) / 2**20
    assert sizes["parameters"] == sizes["gradients"] == pytest.approx(parameters, abs=0.051)
    assert sizes["peak"] == pytest.approx(sum(sizes.values()) / 2, abs=0.3)
    assert not list(tmp_path.glob("*.pickle"))


class OnCuda:
    """The parts of a trainer that the memory profiler uses, and what it asks of torch."""

    def __init__(self, folder, monkeypatch):
        self.run, self.default_root_dir, self.asked = self, folder, []
        self.device, self.global_rank, self.fast_dev_run = torch.device("cuda"), 1, False
        for name in ("_record_memory_history", "_dump_snapshot"):
            monkeypatch.setattr(
                torch.cuda.memory, name, lambda *args, name=name, **kwargs: self.ask(name, args, kwargs)
            )
        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: None)

    def ask(self, name, args, kwargs):
        self.asked.append((name, *args, *kwargs.values()))


@pytest.mark.parametrize(
    ("error", "dumps"), [(torch.OutOfMemoryError("CUDA out of memory"), True), (KeyError(), False)]
)
def test_a_snapshot_is_written_when_memory_runs_out(tmp_path, monkeypatch, error, dumps):
    made, profiler = OnCuda(tmp_path, monkeypatch), MemoryProfiler(wait=1, max_entries=9)
    profiler.on_train_start()
    profiler.on_train_batch_start(made)
    assert not made.asked
    profiler.on_train_batch_end(made)
    profiler.on_train_batch_start(made)
    profiler.on_exception(made, error)
    profiler.on_exception(made, error)

    snapshot = [("_dump_snapshot", str(tmp_path / "memory-rank1.pickle"))] if dumps else []
    assert made.asked == [("_record_memory_history", 9), *snapshot, ("_record_memory_history", None)]


def test_the_pytorch_profiler_leaves_a_trace(tmp_path, capsys):
    trainer(tmp_path, logger=False, profiler="pytorch").fit(Net(), BATCHES)
    events = json.loads((tmp_path / "trace-rank0.json").read_text())["traceEvents"]
    assert len({event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")}) == 3
    assert any(event.get("name") == "aten::addmm" for event in events)
    named = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    for phase in ("forward", "backward", "optimizer step", "zero gradients"):
        assert named.count(phase) == 3
    assert "aten::" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="needs 5 batches, and training has 2"):
        trainer(tmp_path, logger=False, profiler="pytorch").fit(Net(), BATCHES[:2])


# --- tqdm --------------------------------------------------------------------------------------------------------


def test_tqdm_takes_the_place_of_the_default_bar(tmp_path, monkeypatch, capsys):
    made = trainer(tmp_path, "tqdm", logger=False, enable_progress_bar=True, num_sanity_val_steps=0)
    assert [type(callback).__name__ for callback in made.callbacks] == ["TQDMProgressBar"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    made.fit(Watched(), BATCHES, BATCHES)
    output = capsys.readouterr()
    assert "epoch 1/1" in output.err
    assert "6/6" in output.err
    assert "shown" in output.out + output.err


class Watched(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self(batch[0]).mean())
