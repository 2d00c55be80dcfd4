"""Checkpoints at URLs: an S3 server, and memory; whole or not there, and nothing left behind."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

import stratagem as sg
from ports import free_port
from stratagem.api.paths import as_path
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoints import FullCheckpoint, ShardedCheckpoint
from stratagem.cli import main
from stratagem.errors import CheckpointError, ConfigError
from stratagem.runtime.state_io import read_checkpoint
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Scheduled, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import outcome, share, weights_of
from stratagem_trainer.checkpoint_files import newest_complete, read_any

pytestmark = pytest.mark.xdist_group("one server")

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
FORMATS = {"sharded": ShardedCheckpoint, "full": FullCheckpoint}
#: The smallest part of an object, in bytes.
PART = 5 * 2**20


@pytest.fixture(scope="module")
def server():
    """The address of an S3 server on this machine."""
    importlib.import_module("s3fs")  # seconds: once here, and not in each process that a test forks
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 180
    while True:
        try:
            urllib.request.urlopen(f"{address}/moto-api/")
            break
        except OSError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
    yield address
    process.terminate()
    process.wait(30)


@pytest.fixture
def bucket(server, monkeypatch):
    """The URL of an empty bucket, for this process and those it forks."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST"))
    urllib.request.urlopen(urllib.request.Request(f"{server}/runs", method="PUT"))
    return "s3://runs"


def in_another_process(function, *arguments):
    """s3fs has a thread of its own, which processes forked from this one would lack."""
    (result,) = run_in_processes(lambda rank, size, *given: function(*given), 1, *arguments)
    return result


def names_in(url):
    return sorted(path.name for path in as_path(url).iterdir())


def _save_half(rank, world_size, strategy, checkpoint, url, batches):
    trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, checkpoint=checkpoint, **QUIET)
    trainer.fit(Scheduled(), share(trainer, batches[:4]))
    trainer.save_checkpoint(url)
    trainer.close()


def _continue(rank, world_size, strategy, checkpoint, url, batches):
    trainer = sg.Trainer(max_epochs=2, strategy=strategy, devices=world_size, checkpoint=checkpoint, **QUIET)
    trainer.fit(Scheduled(seed=3), share(trainer, batches[4:]), ckpt_path=url)
    return weights_of(trainer)


@pytest.mark.every_push("full-True")
@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("checkpoint", list(FORMATS))
def test_saved_to_a_bucket_by_two_and_read_by_three(checkpoint, asynchronous, bucket):
    batches, url = joined_batches(8, 24), f"{bucket}/a/x.ckpt"
    options = {"name": checkpoint, "async_save": asynchronous}
    for _ in range(2):  # the second one replaces the first
        run_in_processes(_save_half, 2, "fsdp", options, url, batches)
    files = in_another_process(names_in, url if checkpoint == "sharded" else f"{bucket}/a")
    if checkpoint == "sharded":
        assert [name[-10:] for name in files] == ["-00000.bin", "-00001.bin", "ifest.json"], "the replaced one is left"
    else:
        assert files == ["x.ckpt", "x.ckpt.sum"]

    whole, _ = train_module_plainly(Scheduled(), batches)
    for weights in run_in_processes(_continue, 3, "ddp", checkpoint, url, batches):
        assert relative_difference(weights, whole) < 1e-6


@pytest.mark.slow
def test_the_command_reads_urls(bucket, capfd):
    url = f"{bucket}/x.ckpt"
    run_in_processes(_save_half, 2, "ddp", "sharded", url, joined_batches(4, 24))
    assert in_another_process(main, ["checkpoint", "verify", url]) == 0
    assert in_another_process(main, ["checkpoint", "inspect", url]) == 0
    assert "net.0.weight  float32" in capfd.readouterr().out


def _damage(url, name_end):
    for path in as_path(url).iterdir():
        if path.name.endswith(name_end):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(bytes(content))
            return FORMATS["sharded"]().is_whole(as_path(url)), outcome(lambda: read_any(url))
    raise AssertionError(f"no {name_end} in {names_in(url)}")


@pytest.mark.every_push("-00001.bin")
@pytest.mark.slow
@pytest.mark.parametrize("name_end", ["-00001.bin", "manifest.json"])
def test_a_flipped_bit_in_an_object_is_found(name_end, bucket):
    url = f"{bucket}/x.ckpt"
    run_in_processes(_save_half, 2, "fsdp", "sharded", url, joined_batches(4, 24))
    whole, said = in_another_process(_damage, url, name_end)
    assert whole is False
    assert said.startswith("refused: "), said


def _fails_in_mid_upload(rank, world_size, checkpoint, url, victim, call):
    """The store gives up at one of its calls on one rank; return what was said and what is in the bucket then."""
    import s3fs
    from aiobotocore.client import AioBaseClient

    s3fs.S3FileSystem.default_block_size = PART  # of what is written to an object
    s3fs.core.calculate_chunksize = lambda *_, **__: PART  # of a file that is copied to one
    with sg.Run(accelerator="cpu", checkpoint=checkpoint, devices=world_size) as run:
        run.ask("save_checkpoint", state=_large(1), path=as_path(url))
        plain, calls = AioBaseClient._make_api_call, 0

        async def failing(self, operation, *arguments):
            nonlocal calls
            if operation in ("PutObject", "UploadPart", "CompleteMultipartUpload"):
                calls += 1
                if rank == victim and calls == call:
                    raise OSError(5, "the store went away")
            return await plain(self, operation, *arguments)

        AioBaseClient._make_api_call = failing
        said = outcome(lambda: run.ask("save_checkpoint", state=_large(2), path=as_path(url)))
        AioBaseClient._make_api_call = plain
        run.collectives.barrier()
        value = float(read_any(as_path(url))["state_dict"]["w"][0])
        folder = as_path(url) if checkpoint == "sharded" else as_path(url).parent
        folder.fs.invalidate_cache()
        uploads = folder.fs.call_s3("list_multipart_uploads", Bucket="runs").get("Uploads", [])
        return said, value, sorted(path.name for path in folder.iterdir()), len(uploads)


def _large(value):
    return {"state_dict": {"w": torch.full((3_000_000,), float(value))}}  # 12 MB: uploaded in several parts


@pytest.mark.every_push("sharded-0-1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "victim", "call"),
    [("sharded", 0, 1), ("sharded", 1, 2), ("sharded", 0, 3), ("full", 0, 1), ("full", 0, 2), ("full", 0, 4)],
)
def test_a_store_that_fails_in_mid_upload_leaves_the_old_one(checkpoint, victim, call, bucket):
    url = f"{bucket}/x.ckpt"
    for said, value, files, uploads in run_in_processes(_fails_in_mid_upload, 2, checkpoint, url, victim, call):
        assert "could not be written (OSError: [Errno 5] the store went away)" in said, said
        assert value == 1
        assert len(files) == (3 if checkpoint == "sharded" else 2), files
        assert uploads == 0, "parts were left that nobody sees and somebody pays for"


@pytest.mark.slow
def test_nobody_there_is_one_sentence(monkeypatch):
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    def said(rank, world_size):
        with sg.Run(accelerator="cpu", devices=world_size) as run:
            return outcome(lambda: run.load("s3://runs/x.ckpt", model=torch.nn.Linear(1, 1)))

    first, second = run_in_processes(said, 2)
    assert first.startswith("refused: s3://runs/x.ckpt")
    assert "could not be read" in first
    assert "could not be read" in second


# --- Memory, and what is shared ----------------------------------------------------------------------------------


def test_memory_is_a_place_for_one_process(tmp_path):
    for name in FORMATS:
        trainer = sg.Trainer(max_epochs=1, checkpoint=name, **QUIET)
        trainer.fit(Scheduled(), joined_batches(4, 24))
        trainer.save_checkpoint(f"memory://here/{name}.ckpt")
        again = sg.Trainer(max_epochs=1, **QUIET)
        again.fit(Scheduled(seed=3), joined_batches(4, 24), ckpt_path=f"memory://here/{name}.ckpt")
        assert relative_difference(weights_of(again), weights_of(trainer)) == 0
        FORMATS[name]().remove(as_path(f"memory://here/{name}.ckpt"))
    assert not [path for path in as_path("memory://here").iterdir() if path.is_file()]


def _save_to_memory(rank, world_size):
    with sg.Run(accelerator="cpu", checkpoint="sharded", devices=world_size) as run:
        return outcome(lambda: run.ask("save_checkpoint", state=_large(1), path=as_path("memory://x")))


def test_memory_is_refused_for_several():
    for said in run_in_processes(_save_to_memory, 2):
        assert (
            "is in the memory of each process and the run has 2 of them; expected storage that all ranks share" in said
        )


def test_a_folder_of_objects_may_be_copied_to_a_disk(tmp_path):
    """What `aws s3 cp --recursive` brings home is read like any other."""
    with sg.Run(accelerator="cpu", checkpoint="sharded") as run:
        run.ask("save_checkpoint", state=_large(3), path=as_path("memory://there/x.ckpt"))
        (tmp_path / "x.ckpt").mkdir()
        for path in as_path("memory://there/x.ckpt").iterdir():
            (tmp_path / "x.ckpt" / path.name).write_bytes(path.read_bytes())
        assert torch.equal(read_checkpoint(run, tmp_path / "x.ckpt")["state_dict"]["w"], _large(3)["state_dict"]["w"])
    assert ShardedCheckpoint().is_whole(tmp_path / "x.ckpt")


def test_the_callback_keeps_its_checkpoints_at_a_url(tmp_path):
    arguments = QUIET | {"default_root_dir": tmp_path, "checkpoint": "sharded", "enable_checkpointing": True}
    callback = ModelCheckpoint(dirpath="memory://kept", save_last=True)
    trainer = sg.Trainer(max_epochs=3, callbacks=[callback], **arguments)
    trainer.fit(Scheduled(), joined_batches(2, 24))
    assert names_in("memory://kept") == ["epoch=2-step=6.ckpt", "last.ckpt"]
    assert newest_complete(as_path("memory://kept"), ShardedCheckpoint()) == as_path("memory://kept/last.ckpt")

    again = sg.Trainer(max_epochs=4, callbacks=[ModelCheckpoint(dirpath="memory://kept", save_last=True)], **arguments)
    again.fit(Scheduled(), joined_batches(2, 24), ckpt_path="last")
    assert again.global_step == 8
    assert names_in("memory://kept") == ["epoch=3-step=8.ckpt", "last.ckpt"]


# --- Mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default_root_dir", "lock"])
def test_some_places_are_on_this_machine(name):
    with pytest.raises(ConfigError, match=rf"{name} is 's3://b/x' \(code\); expected a path on this machine"):
        sg.Trainer(**(QUIET | {name: "s3://b/x"}))


def test_an_unknown_protocol_is_told():
    with pytest.raises(ConfigError, match="'nowhere://x' is a URL that cannot be opened"):
        as_path("nowhere://x")


def test_a_stranger_at_the_url_is_left_alone():
    as_path("memory://stranger/x").mkdir(parents=True, exist_ok=True)
    as_path("memory://stranger/x/thesis.txt").write_bytes(b"mine")
    run = sg.Run(accelerator="cpu", checkpoint="sharded")
    with run, pytest.raises(CheckpointError, match="exists and is not a checkpoint of this format"):
        run.ask("save_checkpoint", state={"state_dict": {}}, path=as_path("memory://stranger/x"))
    with pytest.raises(CheckpointError, match="nothing was deleted"):
        ShardedCheckpoint().remove(as_path("memory://stranger/x"))
    assert names_in("memory://stranger/x") == ["thesis.txt"]
