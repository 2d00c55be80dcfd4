"""One device trains what plain PyTorch trains on a CPU: every strategy, precision and checkpoint format."""

from __future__ import annotations

import csv

import pytest
import torch
from on_device import DEVICE, ON_CUDA, OTHER_ORDER, AdamW, Noisy, SaveAt, delay, differing, fit, run_ranks
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem_testing.precision import tolerance_of
from stratagem_testing.reference import (
    Net,
    data,
    joined_batches,
    loss_of,
    relative_difference,
    train_module_plainly,
    train_plainly,
)

STRATEGIES = ("single_device", "ddp", "ddp_sharded", "fsdp", "fsdp_cpu_offload")
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true")
FORMATS = ("full", "sharded", "dcp", "safetensors")
#: Of a scale that fits from the first step on: a skipped step would be another training.
OPTIONS = {"16-mixed": {"name": "16-mixed", "init_scale": 1024.0}}


# --- Every strategy and precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_plain_pytorch_on_a_cpu(strategy, precision):
    batches, model = joined_batches(10, 16), Net()
    wide = precision == "64-true"
    reference, norms = train_module_plainly(
        Net().double() if wide else Net(), [tuple(t.double() for t in b) for b in batches] if wide else batches,
        max_norm=1.0,
    )  # fmt: skip

    weights, trainer = fit(
        model, batches, strategy=strategy, precision=OPTIONS.get(precision, precision), gradient_clip_val=1.0
    )

    assert max(norms) > 1
    assert trainer.run.device.type == DEVICE
    if strategy != "fsdp_cpu_offload":
        assert {parameter.device.type for parameter in model.parameters()} == {DEVICE}
    # The loss is computed in fp32 by the reference model, also under 64-true.
    tolerance = OTHER_ORDER if precision in ("32-true", "64-true") else tolerance_of(trainer.run.policy)
    assert relative_difference(weights, reference) < tolerance


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumes_within_an_epoch_bit_for_bit_in_every_format(strategy, precision, tmp_path):
    """Dropout, a shuffled loader, AdamW, a schedule and the loss scale go on exactly where they were."""
    options = {"strategy": strategy, "precision": OPTIONS.get(precision, precision)}
    for name in FORMATS:
        path = tmp_path / name
        torch.manual_seed(11)
        loader = DataLoader(TensorDataset(*data(64)), 8, shuffle=True)
        saver = SaveAt(path, 3)
        whole, _ = fit(Noisy(), loader, max_epochs=2, callbacks=[saver], checkpoint=name, **options)

        torch.manual_seed(99)
        torch.randn(5, device=DEVICE)
        resumed, trainer = fit(Noisy(), loader, max_epochs=2, checkpoint=name, ckpt_path=path, **options)

        assert trainer.global_step == 16
        assert differing(whole, resumed) == [], name
        assert differing(whole, saver.weights) != []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forced_overflow_skips_one_step_and_no_other(strategy):
    class Overflows(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 3 else 1.0)

    batches = joined_batches(10, 16)
    weights, trainer = fit(Overflows(), batches, strategy=strategy, precision=OPTIONS["16-mixed"])
    reference, _ = train_plainly(batches[:3] + batches[4:])

    assert trainer.position.skipped_steps == 1
    assert relative_difference(weights, reference) < tolerance_of(trainer.run.policy)


@pytest.mark.parametrize("name", FORMATS)
def test_offloaded_parameters_are_clipped_and_saved(name, tmp_path):
    batches, path = joined_batches(8, 16), tmp_path / name
    saver = SaveAt(path, 3)
    options = {"strategy": "fsdp_cpu_offload", "gradient_clip_val": 0.5, "checkpoint": name}
    weights, _ = fit(AdamW(), batches, callbacks=[saver], **options)
    resumed, _ = fit(AdamW(), batches, ckpt_path=path, **options)
    reference, norms = train_module_plainly(AdamW(), batches, max_norm=0.5)

    assert max(norms) > 1
    assert relative_difference(weights, reference) < OTHER_ORDER
    assert differing(weights, resumed) == []


def test_offloaded_gradients_are_divided_by_the_scale_of_their_own_step():
    """The scale is computed behind what is queued on the GPU; the CPU must wait for it."""

    class Queues(sg.Callback):
        @sg.hookimpl
        def on_after_backward(self):
            delay(0.02)

    batches = joined_batches(8, 16)
    scaled = {"name": "16-mixed", "init_scale": 2.0, "growth_interval": 1}  # another scale in each step
    weights, trainer = fit(Net(), batches, strategy="fsdp_cpu_offload", precision=scaled, callbacks=[Queues()])

    assert trainer.position.skipped_steps == 0
    assert relative_difference(weights, train_plainly(batches)[0]) < tolerance_of(trainer.run.policy)


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_a_compiled_module_trains_the_same(strategy):
    batches, model = joined_batches(6, 16), Net()
    weights, _ = fit(torch.compile(model), batches, strategy=strategy, gradient_clip_val=1.0)

    assert relative_difference(weights, train_plainly(batches, max_norm=1.0)[0]) < OTHER_ORDER


@pytest.mark.gpu
def test_mixed_precision_computes_in_16_bits_on_the_gpu():
    seen = {}

    class Looks(Net):
        def forward(self, x):
            out = super().forward(x)
            seen["dtype"], seen["device"] = out.dtype, out.device.type
            return out

    for precision, dtype in (("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)):
        fit(Looks(), joined_batches(2, 16), precision=precision)
        assert seen == {"dtype": dtype, "device": "cuda"}


# --- Batches -----------------------------------------------------------------------------------------------------


def test_pinned_and_pageable_loaders_train_the_same():
    samples = TensorDataset(*data(64))
    pageable, _ = fit(Net(), DataLoader(samples, 8))
    pinned, _ = fit(Net(), DataLoader(samples, 8, pin_memory=ON_CUDA))
    with_workers, _ = fit(Net(), DataLoader(samples, 8, pin_memory=ON_CUDA, num_workers=2))

    assert differing(pageable, pinned) == differing(pageable, with_workers) == []
    assert relative_difference(pageable, train_plainly(joined_batches(8, 8, seed=1))[0]) < OTHER_ORDER


class Packed(sg.Module):
    """Reads packed sequences."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            self.layer, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        sequences, target = batch
        assert sequences.data.device == target.device == self.layer.weight.device
        assert sequences.batch_sizes.device.type == "cpu"
        padded, _ = pad_packed_sequence(sequences, batch_first=True)
        return loss_of(self.head(self.layer(padded).tanh().mean(1)), target)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_packed_sequences_reach_the_device():
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(4):
        sequences = torch.randn(3, 5, 4, generator=generator)
        packed = pack_padded_sequence(sequences, torch.tensor([5, 3, 2]), batch_first=True)
        batches.append((packed, torch.randn(3, 1, generator=generator)))
    module = Packed()
    optimizer = module.configure_optimizers()
    for batch in batches:
        module.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, _ = fit(Packed(), batches)

    assert relative_difference(weights, module.state_dict()) < OTHER_ORDER


# --- Memory ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_memory_of_the_device_is_reported(tmp_path):
    options = {"logger": "csv", "default_root_dir": tmp_path, "log_every_n_steps": 1}
    fit(Net(), joined_batches(4, 16), callbacks=["device_stats"], **options)
    (path,) = tmp_path.rglob("metrics.csv")
    rows = [row for row in csv.DictReader(path.open()) if row.get("device/allocated_bytes")]

    assert rows
    for row in rows:
        assert 0 < float(row["device/allocated_bytes"]) <= float(row["device/allocated_peak_bytes"])
        assert float(row["device/reserved_bytes"]) >= float(row["device/allocated_bytes"])


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "ddp_sharded", "fsdp"])
def test_training_holds_no_second_copy_of_the_model(strategy):
    """Parameters, gradients, two moments; beside them DDP's buckets, and what AdamW computes for all at once."""
    model = Large()
    size = sum(parameter.nbytes for parameter in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fit(model, [(torch.randn(4, 512), torch.randn(4, 1))] * 4, strategy=strategy)

    assert torch.cuda.max_memory_allocated() - before < 8 * size


class Large(Net):
    """32 MiB of parameters in eight layers of 1 MiB and a table of 24."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(512, 512) for _ in range(8)]
        self.table = torch.nn.Parameter(torch.zeros(24, 512, 512))
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(512, 1))

    def forward(self, x):
        return self.net(x) + self.table.mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full", "sharded"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp_sharded", "fsdp"])
def test_an_asynchronous_save_takes_no_memory_on_the_gpu(strategy, name, tmp_path):
    """At most the largest tensor, whole, and its copy: parameters, moments and gradients stay where they are."""
    peaks = []
    model = Large()
    largest = max(parameter.nbytes for parameter in model.parameters())

    class Saves(sg.Callback):
        @sg.hookimpl
        def on_train_batch_end(self, trainer, batch_idx):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")
            peaks.append(torch.cuda.max_memory_allocated() - before)

    batches = [(torch.randn(4, 512), torch.randn(4, 1))] * 2
    fit(model, batches, strategy=strategy, checkpoint={"name": name, "async_save": True}, callbacks=[Saves()])

    assert len(peaks) == 2
    assert max(peaks) < 2 * largest + 2**20


# --- What is saved -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "sharded"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp_sharded", "fsdp", "fsdp_cpu_offload"])
def test_an_asynchronous_save_holds_the_moment_of_the_call(strategy, name, tmp_path):
    """The device is a second behind when the save is asked for, and training goes on at once."""
    from stratagem_trainer.checkpoint_files import read_any

    path = tmp_path / "x.ckpt"
    saver = SaveAt(path, 1, before=lambda: delay(1.0))
    weights, _ = fit(
        Noisy(), joined_batches(8, 16), strategy=strategy, checkpoint={"name": name, "async_save": True},
        callbacks=[saver],
    )  # fmt: skip
    saved = read_any(path)

    assert saved["loop"]["global_step"] == 2
    assert differing(saved["state_dict"], saver.weights) == []
    assert differing(saved["state_dict"], weights) != []


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_a_file_loads_where_there_is_no_gpu(asynchronous, tmp_path):
    path = tmp_path / "x.ckpt"
    checkpoint = {"name": "full", "async_save": asynchronous}
    weights, trainer = fit(Noisy(), joined_batches(2, 16), checkpoint=checkpoint)
    trainer.save_checkpoint(path)
    trainer.close()
    ((read, devices, available),) = run_ranks(_load, 1, str(path), variables={"CUDA_VISIBLE_DEVICES": ""})

    assert not available
    assert devices == {"cpu"}
    assert differing(read, weights) == []


def _load(rank, world_size, path):
    """Read the file as its users do, without this library."""
    checkpoint = torch.load(path, weights_only=True)
    devices = {tensor.device.type for tensor in _tensors(checkpoint)}
    return checkpoint["state_dict"], devices, torch.cuda.is_available()


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _tensors(item)


# --- Beside other devices ----------------------------------------------------------------------------------------


def _forks(rank, world_size):
    """Train on the CPU in forked processes, though this one sees a GPU."""
    import os

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    batches = joined_batches(4, 16)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    model = Net()
    trainer = sg.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp_fork", logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    # Every process takes every other sample: as a set, the joined batches.
    order = torch.arange(len(x))
    trainer.fit(model, DataLoader(TensorDataset(x[order], y[order]), 8))
    return relative_difference(model.state_dict(), train_plainly(batches)[0]), torch.cuda.is_initialized()


def test_processes_may_fork_for_the_cpu():
    ((difference, initialized),) = run_ranks(_forks, 1)

    assert difference < OTHER_ORDER
    assert not initialized


@pytest.mark.gpu(2)
def test_a_run_moves_to_another_gpu_within_an_epoch(tmp_path):
    path = tmp_path / "x.ckpt"
    batches = joined_batches(8, 16)
    torch.manual_seed(11)
    whole, _ = fit(Noisy(), batches, devices=[1], callbacks=[SaveAt(path, 3)])
    torch.manual_seed(99)
    resumed, _ = fit(Noisy(), batches, devices=[0], ckpt_path=path)

    assert differing(whole, resumed) == []
