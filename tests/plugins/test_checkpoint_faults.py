"""Whatever happens in the middle of a save, a whole checkpoint is left, and nobody waits forever."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import resource
import signal
import threading
import time

import pytest
import torch

import stratagem as sg
from stratagem.api.paths import claim
from stratagem.checkpoints import FullCheckpoint, ShardedCheckpoint
from stratagem.errors import CheckpointError, StratagemError
from stratagem_checkpoints import shards as writing
from stratagem_testing import run_in_processes
from stratagem_testing.processes import ProcessesFailed
from stratagem_trainer.checkpoint_files import newest_complete, read_any

CALLS = ("pwrite", "fsync", "rename", "replace", "open", "mkdir", "truncate", "unlink", "rmdir")
FORMATS = {"sharded": ShardedCheckpoint, "full": FullCheckpoint}


def state(value):
    return {"state_dict": {f"{i}": torch.full((400_000,), float(value)) for i in range(4)} | {"scalar": torch.ones(())}}


def value_of(path):
    (value,) = {float(tensor.min()) for name, tensor in read_any(path)["state_dict"].items() if name != "scalar"}
    return value


class Interrupted:
    """Does something instead of the n-th system call of this process that changes files."""

    def __init__(self, at, act):
        self.calls, self.at, self.act, self.lock = 0, at, act, threading.Lock()

    def __enter__(self):
        self.plain = {name: getattr(os, name) for name in CALLS}
        for name, call in self.plain.items():
            setattr(os, name, self.counting(call))
        return self

    def __exit__(self, *_):
        for name, call in self.plain.items():
            setattr(os, name, call)

    def counting(self, call):
        def counted(*arguments, **options):
            with self.lock:
                self.calls += 1
                mine = self.calls == self.at
            if mine:
                self.act()
            return call(*arguments, **options)

        return counted


def outcome(call):
    """Return "done", or what the call was refused with."""
    try:
        call()
    except StratagemError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full():
    raise OSError(errno.ENOSPC, "No space left on device")


def _save(rank, world_size, checkpoint, path, value, victim=-1, at=-1, act=kill, times=1):
    """Save; `act` at a system call of rank `victim`. Return the number of calls, or what was raised."""
    with sg.Run(accelerator="cpu", checkpoint=checkpoint, devices=world_size) as run, Interrupted(-1, act) as calls:
        said = ""
        for _ in range(times):
            calls.calls, calls.at = 0, at if rank == victim else -1
            said = outcome(lambda: run.ask("save_checkpoint", state=state(value), path=path))
            run.collectives.barrier()
        return calls.calls if said == "done" else said


@pytest.mark.every_push("some-sharded-1-0")
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("checkpoint", list(FORMATS))
@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.sweep)])
def test_killed_at_every_call_of_a_save_there_is_always_a_whole_one(checkpoint, ranks, victim, which, tmp_path):
    path = tmp_path / "x.ckpt"
    run_in_processes(_save, ranks, checkpoint, path, 0)  # the first one makes other calls
    calls = run_in_processes(_save, ranks, checkpoint, path, 1)[victim]
    if checkpoint == "full" and victim == 1:
        assert calls == 0  # rank 0 writes alone
        return
    assert calls >= (8 if victim == 0 else 3)
    done = 1
    for at in range(1, calls + 1, 1 if which == "all" else 4):
        with pytest.raises(ProcessesFailed, match="ended with -9"):
            run_in_processes(_save, ranks, checkpoint, path, done + 1, victim, at)
        assert FORMATS[checkpoint]().is_whole(path), f"killed at call {at} of {calls}"
        assert newest_complete(tmp_path, FORMATS[checkpoint]()) == path
        assert value_of(path) in (done, done + 1)
        done = value_of(path)
    run_in_processes(_save, ranks, checkpoint, path, 99)
    assert value_of(path) == 99
    assert not list(tmp_path.glob("*staged*")) + list(tmp_path.glob(".*staged*")), "what was killed was left behind"


def _fill_the_disk_everywhere(rank, world_size, checkpoint, path, victim):
    """Let each call in turn find the disk full; return what was said, on this rank, of each."""
    said = []
    with sg.Run(accelerator="cpu", checkpoint=checkpoint, devices=world_size) as run:

        def save(value, at=-1):
            with Interrupted(at if rank == victim else -1, disk_full) as calls:
                said.append(outcome(lambda: run.ask("save_checkpoint", state=state(value), path=path)))
            run.collectives.barrier()
            return calls.calls

        save(0)
        total = run.collectives.all_gather_object(save(1))[victim]
        said.clear()
        for at in range(1, total + 1):
            save(2, at)
            assert run.checkpoint_format.is_whole(path), (at, said[-1])
    return said


@pytest.mark.every_push("sharded-0", "sharded-1")
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("checkpoint", list(FORMATS))
def test_a_full_disk_is_an_error_on_all_ranks_and_the_old_one_stays(checkpoint, victim, tmp_path):
    path = tmp_path / "x.ckpt"
    first, second = run_in_processes(_fill_the_disk_everywhere, 2, checkpoint, path, victim)
    refused = [said for said in (second if victim else first) if said.startswith("CheckpointError: ")]
    if checkpoint == "full" and victim == 1:
        assert first + second == []  # rank 1 writes nothing
        return
    assert len(refused) >= 4
    odd = [said for said in refused if "could not be written (No space left on device)" not in said]
    assert odd == []
    for mine, other in zip(first, second, strict=True):
        assert (mine == "done") == (other == "done"), (mine, other)


def test_a_limit_of_the_system_is_an_error(tmp_path):
    def limited(rank, world_size):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        return [_save(0, 1, name, tmp_path / name, 1) for name in FORMATS]

    (said,) = run_in_processes(limited, 1)
    assert len(said) == 2
    for each in said:
        assert "could not be written (File too large)" in each, each
    assert list(tmp_path.iterdir()) == []


# --- Two runs ----------------------------------------------------------------------------------------------------


def test_two_runs_that_save_to_one_path_at_once(tmp_path):
    """The second is told; the first is not disturbed."""
    path = tmp_path / "x.ckpt"
    context = multiprocessing.get_context("fork")
    inside, go_on = context.Event(), context.Event()

    def slow():
        plain = writing._write_parts

        def waiting(*arguments):
            inside.set()
            go_on.wait(60)
            return plain(*arguments)

        writing._write_parts = waiting
        _save(0, 1, "sharded", path, 1)

    first = context.Process(target=slow)
    first.start()
    assert inside.wait(60)
    with sg.Run(accelerator="cpu", checkpoint="sharded") as run:
        with pytest.raises(CheckpointError, match="is being written by another run; expected one run for each folder"):
            run.ask("save_checkpoint", state=state(2), path=path)
        go_on.set()
        first.join(60)
        assert value_of(path) == 1
        run.ask("save_checkpoint", state=state(2), path=path)
    assert value_of(path) == 2


@pytest.mark.slow
def test_two_runs_that_write_one_file_leave_one_of_them_whole(tmp_path):
    path = tmp_path / "x.ckpt"
    context = multiprocessing.get_context("fork")

    def often(value):
        torch.set_num_threads(1)
        for _ in range(15):
            _save(0, 1, "full", path, value)

    runs = [context.Process(target=often, args=(value,)) for value in (1, 2)]
    for run in runs:
        run.start()
    seen, deadline = 0, time.monotonic() + 60
    while any(run.is_alive() for run in runs) and time.monotonic() < deadline:
        seen += path.exists() and FullCheckpoint().is_whole(path)
    for run in runs:
        run.join(60)
    assert [run.exitcode for run in runs] == [0, 0]
    assert seen
    assert value_of(path) in (1, 2)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_removed_before_it_is_locked_cannot_be_claimed(tmp_path, monkeypatch, kind):
    path = tmp_path / "mine"
    path.mkdir() if kind == "folder" else path.touch()
    lock = fcntl.flock
    remove = path.rmdir if kind == "folder" else path.unlink
    monkeypatch.setattr(fcntl, "flock", lambda *given: (remove(), lock(*given)))

    with pytest.raises(FileNotFoundError):
        claim(path)


def test_a_claim_that_is_denied_with_eacces_is_taken(tmp_path, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, "as SMB says that another process has it")

    monkeypatch.setattr(fcntl, "flock", denied)

    assert claim(tmp_path) is None


def test_a_file_is_locked_where_only_what_is_open_for_writing_can_be(tmp_path, monkeypatch):
    lock = fcntl.flock

    def as_nfs_does(descriptor, operation):
        if operation & fcntl.LOCK_EX and not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE:
            raise OSError(errno.EBADF, "not open for writing")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_nfs_does)
    (tmp_path / "file").touch()

    with claim(tmp_path / "file"):
        assert claim(tmp_path / "file") is None


def test_a_claim_ends_with_its_process_or_when_released(tmp_path):
    first = claim(tmp_path)
    assert first is not None
    assert claim(tmp_path) is None
    first.release()
    with claim(tmp_path) as second:
        assert second is not None
