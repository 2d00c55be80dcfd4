"""Bytes as they are reported are those of the formulas, and those that the system counted on its connections."""

from __future__ import annotations

import csv
import socket

import pytest
from torch import nn

import stratagem as sg
from stratagem.callbacks import CommStats
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import EveryBatch, bytes_sent, share

QUIET = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1}
#: Bytes of the gradients of `Net`, in fp32.
SIZE = 4 * sum(parameter.numel() for parameter in Net().parameters())


def _fit(rank, world_size, folder, strategy, comm_hook, accumulate=1):
    stats = CommStats()
    sent = EveryBatch(lambda trainer: bytes_sent())
    trainer = sg.Trainer(
        strategy=strategy, comm_hook=comm_hook, devices=world_size, callbacks=[stats, sent], log_every_n_steps=2,
        default_root_dir=folder, accumulate_grad_batches=accumulate, **QUIET,
    )  # fmt: skip
    trainer.fit(Net(), share(trainer, joined_batches(8, 24)))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("comm/")}
    return (
        metrics,
        {key: count.payload for key, count in stats.totals.items()},
        dict(trainer.published.bar),
        sent.results,
    )


def _gathered(world_size):
    """What FSDP gathers of `Net` in units of a layer: shards padded to the same size."""
    sizes = [(p.shape[0], p.numel() // p.shape[0]) for p in Net().parameters()]
    return sum(-(-first // world_size) * rest * 4 for first, rest in sizes)


IN_UNITS = {"name": "fsdp", "auto_wrap_policy": {nn.Linear}}
CASES = [
    ("ddp", None, lambda n: {("all_reduce", "gradients"): SIZE}),
    ("ddp", "fp16_compress", lambda n: {("all_reduce", "fp16_compress"): SIZE // 2}),
    (
        "ddp_sharded",
        "fp16_compress",
        lambda n: {
            ("all_reduce", "fp16_compress"): SIZE // 2,
            ("broadcast", "parameters"): SIZE,
            ("all_reduce", ""): 6,
        },
    ),
    (
        IN_UNITS,
        None,
        lambda n: {
            ("all_gather", "parameters"): 2 * _gathered(n),
            ("reduce_scatter", "gradients"): n * _gathered(n),
        },
    ),
    (
        {"name": "fsdp", "sharding_strategy": "NO_SHARD"},
        "bf16_compress",
        lambda n: {
            ("all_reduce", "bf16_compress"): SIZE // 2,
            ("all_reduce", ""): 8,
        },  # and whether all shards were finite,
    ),
]


@pytest.mark.every_push("ddp_sharded fp16_compress-2")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("strategy", "comm_hook", "formula"),
    CASES,
    ids=["ddp", "ddp fp16_compress", "ddp_sharded fp16_compress", "fsdp in units", "fsdp NO_SHARD bf16_compress"],
)
def test_reported_bytes_are_those_of_the_formula(strategy, comm_hook, formula, world_size, tmp_path):
    expected = formula(world_size)

    for metrics, totals, bar, _ in run_in_processes(_fit, world_size, tmp_path, strategy, comm_hook):
        sent = {key: payload for key, payload in totals.items() if payload and key[1] != "comparison of ranks"}
        wanted = {key: 8 * payload for key, payload in expected.items()}
        others = ("all_reduce", "")  # with whether a loader has another length, twice in an epoch
        assert sent == wanted | {others: wanted.get(others, 0) + 2 * 8}
        assert metrics["comm/bytes_per_step"] == sum(expected.values())
        for (collective, sender), payload in expected.items():
            assert metrics[f"comm/{collective}/{sender or 'other'}"] == payload
        assert bar["comm_mb"] == pytest.approx(sum(expected.values()) / 1e6)
        assert bar.get("comm_ratio") == metrics.get("comm/compression_ratio") == (2.0 if comm_hook else None)


def test_inner_micro_batches_are_not_counted(tmp_path):
    metrics, totals, _, _ = run_in_processes(_fit, 2, tmp_path, "ddp", None, 2)[0]

    assert totals["all_reduce", "gradients"] == 4 * SIZE
    assert metrics["comm/bytes_per_step"] == SIZE


class Wide(Net):
    """Large enough for what else is said on a connection not to matter."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 2048), nn.Tanh(), nn.Linear(2048, 256), nn.Tanh(), nn.Linear(256, 1))


def _measured(rank, world_size, comm_hook):
    sent, counted = EveryBatch(lambda trainer: bytes_sent()), EveryBatch(
        lambda trainer: sum(count.wire for count in trainer.run.collectives.traffic.counts.values())
    )  # fmt: skip
    trainer = sg.Trainer(
        strategy="ddp", comm_hook=comm_hook, devices=world_size, callbacks=[sent, counted], logger=False, **QUIET
    )
    trainer.fit(Wide(), share(trainer, joined_batches(6, 24)))
    return [results[-1] - results[1] for results in (sent.results, counted.results)]


def test_bytes_count_once_they_are_written():
    if bytes_sent() is None:
        pytest.skip("this system does not tell how many bytes a connection sent")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as writer:
        reader, _ = server.accept()
        with reader:
            before = bytes_sent()
            writer.setblocking(False)
            written = writer.send(bytes(10_000_000))  # as much as fits into buffers: nobody reads

            assert bytes_sent() - before == written


@pytest.mark.slow
@pytest.mark.every_push("fp16_compress-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("comm_hook", [None, "fp16_compress"])
def test_wire_bytes_are_what_connections_carried(comm_hook, world_size):
    if bytes_sent() is None:
        pytest.skip("this system does not tell how many bytes a connection sent")
    for measured, counted in run_in_processes(_measured, world_size, comm_hook):
        assert measured == pytest.approx(counted, rel=0.02)


def test_they_reach_the_logger(tmp_path):
    run_in_processes(_fit, 2, tmp_path, "ddp", "fp16_compress")
    (path,) = tmp_path.rglob("metrics.csv")
    rows = [row for row in csv.DictReader(path.open()) if row.get("comm/bytes_per_step")]

    assert [float(row["comm/bytes_per_step"]) for row in rows] == [SIZE / 2 + 3 * 8] + [SIZE / 2] * 4
    assert [float(row["comm/compression_ratio"]) for row in rows] == [2.0] * 5


def _report(rank, world_size, folder):
    trainer = sg.Trainer(
        strategy="ddp", comm_hook={"name": "topk", "ratio": 0.5}, devices=world_size, callbacks=["comm_stats", "report"],
        log_every_n_steps=1, default_root_dir=folder, **QUIET,
    )  # fmt: skip
    trainer.fit(Net(), share(trainer, joined_batches(4, 24)))


@pytest.mark.slow
def test_they_are_drawn_in_the_report(tmp_path):
    run_in_processes(_report, 2, tmp_path)
    (page,) = (path.read_text() for path in tmp_path.rglob("*.html"))

    for name in ("comm/bytes_per_step", "comm/compression_ratio", "comm/topk/error_norm"):
        assert name in page


def test_one_process_has_nothing_to_count():
    trainer = sg.Trainer(callbacks=["comm_stats"], devices=1, logger=False, **QUIET)

    with pytest.raises(ConfigError, match="comm_stats is chosen and the run has one process"):
        trainer.fit(Net(), joined_batches(1, 8))
