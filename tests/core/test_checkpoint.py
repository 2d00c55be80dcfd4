"""A published file is whole or not there, whenever the process dies."""

from __future__ import annotations

import errno
import hashlib
import os

import pytest
import torch

import stratagem as sg
from stratagem.api.kinds import CheckpointFormat
from stratagem.api.paths import replace_text, replacing
from stratagem.checkpoint import files as checkpoint
from stratagem.checkpoint.background_save import SingleProcessRun
from stratagem.checkpoint.files import publish_file, remove_file, sidecar, verify_file
from stratagem.errors import CheckpointError, ConfigError
from stratagem_testing.reference import Net, joined_batches
from stratagem_trainer.checkpoint_files import newest_whole


def publish(path, content):
    publish_file(path, lambda file: file.write(content), hashlib.sha256)


def is_whole(path):
    return verify_file(path, hashlib.sha256)


class Crash(BaseException):
    """Ends the process as far as the code under test can tell."""


def crash_at(monkeypatch, name, call):
    """Raise Crash instead of the `call`-th call of os.`name`, or right after it."""
    number, when = divmod(call, 2)
    original, calls = getattr(os, name), []

    def wrapper(*arguments, **options):
        calls.append(1)
        if len(calls) == number + 1 and when == 0:
            raise Crash
        result = original(*arguments, **options)
        if len(calls) == number + 1:
            raise Crash
        return result

    monkeypatch.setattr(os, name, wrapper)


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("call", range(8))
def test_a_crash_at_any_moment_leaves_a_whole_file(tmp_path, monkeypatch, name, call):
    path = tmp_path / "last.ckpt"
    publish(path, b"old")
    with monkeypatch.context() as patched:
        crash_at(patched, name, call)
        try:
            publish(path, b"new content")
        except Crash:
            pass

    assert is_whole(path)
    assert path.read_bytes() in (b"old", b"new content")
    publish(path, b"later")
    assert is_whole(path)
    assert len(sidecar(path).read_text().splitlines()) == 1


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("call", range(0, 8, 2))
def test_a_full_disk_leaves_the_old_file_and_one_sentence(tmp_path, monkeypatch, name, call):
    path = tmp_path / "last.ckpt"
    publish(path, b"old")
    original, calls = getattr(os, name), []

    def full(*arguments, **options):
        calls.append(1)
        if len(calls) == call // 2 + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, name, full)
        try:
            publish(path, b"new content")
        except CheckpointError as error:
            assert "could not be written (No space left on device)" in str(error)

    assert is_whole(path)
    assert not list(tmp_path.glob("*.staged"))


def test_a_truncated_or_changed_file_does_not_verify(tmp_path):
    path = tmp_path / "a.ckpt"
    publish(path, b"0123456789")
    path.write_bytes(b"01234")
    with pytest.raises(CheckpointError, match="it has 5 bytes instead of 10"):
        is_whole(path)
    path.write_bytes(b"0123456780")
    with pytest.raises(CheckpointError, match="its checksum differs"):
        is_whole(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        is_whole(tmp_path / "b.ckpt")


def test_a_file_of_another_program_has_nothing_to_verify(tmp_path):
    (tmp_path / "foreign").write_bytes(b"x")

    assert is_whole(tmp_path / "foreign") is False


def test_a_folder_in_the_way_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="could not be written"):
        publish(tmp_path, b"x")


class Format(CheckpointFormat):
    def recognises(self, path):
        return path.suffix == ".ckpt"

    def is_whole(self, path):
        try:
            return is_whole(path)
        except CheckpointError:
            return False


def test_the_newest_whole_file_is_found(tmp_path):
    for age, name in enumerate(["a", "b", "c"]):
        publish(tmp_path / f"{name}.ckpt", name.encode())
        os.utime(tmp_path / f"{name}.ckpt", ns=(age, age))
    (tmp_path / "c.ckpt").write_bytes(b"?")
    (tmp_path / "d.ckpt.1.staged").write_bytes(b"half")

    assert newest_whole(tmp_path, Format()) == tmp_path / "b.ckpt"
    assert newest_whole(tmp_path / "nowhere", Format()) is None


def test_files_that_are_older_than_the_newest_whole_one_are_not_opened(tmp_path):
    class Notes(Format):
        def recognises(self, path):
            opened.append(path.stem)
            return super().recognises(path)

    opened: list[str] = []
    for age in range(20):
        publish(tmp_path / f"{age}.ckpt", b"x")
        os.utime(tmp_path / f"{age}.ckpt", ns=(age, age * 10**9))
    (tmp_path / "19.ckpt").write_bytes(b"damaged")
    os.utime(tmp_path / "19.ckpt", ns=(0, 10**12))

    with pytest.warns(UserWarning, match=r"19.ckpt is damaged"):
        assert newest_whole(tmp_path, Notes()) == tmp_path / "18.ckpt"
    assert opened == ["19", "18"]


@pytest.mark.parametrize("reverse", [False, True])
def test_files_and_folders_of_several_formats_are_ordered_by_when_they_were_saved(reverse, tmp_path):
    """The time of a folder is that of a file in it, which only its format knows."""
    from stratagem.checkpoints import DCPCheckpoint, FullCheckpoint, SafetensorsCheckpoint, ShardedCheckpoint

    formats = [FullCheckpoint(), ShardedCheckpoint(), SafetensorsCheckpoint(), DCPCheckpoint()]
    saved = []
    for number, form in enumerate(formats * 2):
        path = tmp_path / f"{number}"
        form.save_checkpoint({"state_dict": {"w": torch.ones(1)}}, path, SingleProcessRun())
        age = 1_000_000 + 10 * (8 - number if reverse else number)
        of_folder = age - 10**5 if number % 2 else age  # unlike what is in it
        for each in [*path.glob("*"), path] if path.is_dir() else [path]:
            os.utime(each, (age, age if each != path or path.is_file() else of_folder))
        saved.append((age, path, form))
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    (tmp_path / "folder").mkdir()
    saved.sort(key=lambda each: -each[0])

    while saved:
        assert {newest_whole(tmp_path, form) for form in formats} == {saved[0][1]}
        assert newest_whole(tmp_path, formats[0], lambda path: path != saved[0][1]) == (
            saved[1][1] if saved[1:] else None
        )
        _, path, form = saved.pop(0)
        form.remove(path)


def test_of_files_of_the_same_age_the_first_that_is_listed_is_found(tmp_path):
    for name in "cabd":
        publish(tmp_path / f"{name}.ckpt", b"x")
        os.utime(tmp_path / f"{name}.ckpt", ns=(7, 7))
    listed = [path for path in tmp_path.iterdir() if path.suffix == ".ckpt"]

    assert newest_whole(tmp_path, Format()) == listed[0]
    assert newest_whole(tmp_path, Format(), lambda path: path != listed[0]) == listed[1]


def test_removing_takes_the_sidecar_along(tmp_path):
    publish(tmp_path / "a.ckpt", b"x")
    remove_file(tmp_path / "a.ckpt")

    assert list(tmp_path.iterdir()) == []
    assert checkpoint.sidecar(tmp_path / "a").name == "a.sum"


# --- Links that somebody left -----------------------------------------------------------------------------------


NAMES = ["run.lock", "a.ckpt", "a.ckpt.sum", "metrics.csv", "metrics", "report.html", "rank0.pt", "rank0"]


def leave_links(folder, victim):
    """Leave links to `victim` at every name that could be guessed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        for staged in (f"{name}.staged", f".{name}.{os.getpid()}", f"{name}.{os.getpid()}.staged", f".{name}.staged"):
            (folder / staged).symlink_to(victim)


def test_nothing_is_written_through_a_link_at_a_name_that_can_be_guessed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    root = tmp_path / "root"
    version = root / "stratagem_logs" / "mine"
    for folder in (root, version, root / "predictions"):
        leave_links(folder, victim)
    trainer = sg.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, default_root_dir=root, enable_progress_bar=False, log_every_n_steps=1,
        enable_checkpointing=False, logger={"name": "csv", "version": "mine"},
        callbacks=["report", {"name": "prediction_writer", "dirpath": root / "predictions", "write_interval": "epoch"}],
    )  # fmt: skip
    trainer.fit(Net(), joined_batches(2, 8), joined_batches(1, 8))
    trainer.save_checkpoint(root / "a.ckpt")
    trainer.predict(Net(), joined_batches(1, 8))

    assert victim.read_text() == "precious"
    for path in (root / "run.lock", root / "a.ckpt", root / "report.html", version / "metrics.csv"):
        assert path.is_file(), path
        assert not path.is_symlink()
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_folder_is_not_occupied_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".in_use").symlink_to(victim)
    trainer = sg.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, logger=False, enable_progress_bar=False
    )

    with pytest.raises(ConfigError, match=r"\.in_use is a symbolic link; expected a file, or nothing; remove it"):
        trainer.fit(Net(), joined_batches(1, 8))
    assert victim.read_text() == "precious"


def test_a_pipe_in_the_way_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.ckpt.1.staged")
    publish(tmp_path / "a.ckpt", b"x")

    assert (tmp_path / "a.ckpt").read_bytes() == b"x"


def test_a_new_file_is_never_one_that_was_there(tmp_path, monkeypatch):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "a.000000000000.staged").symlink_to(tmp_path / "victim")
    (tmp_path / "a.010101010101.staged").write_text("precious")
    tokens = iter([bytes(6), b"\1" * 6, b"\2" * 6])
    monkeypatch.setattr(os, "urandom", lambda _: next(tokens))

    replace_text(tmp_path / "a", "mine")

    assert (tmp_path / "a").read_text() == "mine"
    assert (tmp_path / "victim").read_text() == (tmp_path / "a.010101010101.staged").read_text() == "precious"
    assert next(tokens, None) is None


def test_a_file_that_cannot_be_filled_replaces_none(tmp_path):
    replace_text(tmp_path / "a", "old")

    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a", durable=True) as file:
        file.write(b"new")
        raise ZeroDivisionError
    with pytest.raises(FileNotFoundError):
        replace_text(tmp_path / "none" / "a", "new")

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old"}
