"""DeepSpeed's own checkpoint folder: its files, checks that it is complete, and reading it without executing pickles.

[Note: DeepSpeed's files and the manifest]
``latest`` contains the name of a subfolder, the *tag*. In it are one file per rank with the rank's partition of the
optimizer state (stages 1 to 3), and the weights in one file (up to stage 2) or in one per rank (stage 3). All of them
are pickles, which can execute any code when they are loaded. ``stratagem.json`` is the manifest that this package adds
last: it describes the run that wrote the folder, with the checksum of every other file. A folder without it was written
by another program.

Folders of this package contain tensors, plain values, and a few classes of DeepSpeed's without code: `as_data` makes
torch read these and refuse everything else, so that resuming from a folder does not require trust in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from stratagem.api.paths import is_remote, replace_text
from stratagem.errors import CheckpointError

#: Name of the subfolder that this package writes.
TAG = "checkpoint"
MANIFEST, LATEST = "stratagem.json", "latest"
#: All files of a checkpoint outside of the tag's subfolder.
BESIDE = {MANIFEST, LATEST, "zero_to_fp32.py", "zero_to_torch.py"}
_FORMAT, _VERSION = "stratagem deepspeed checkpoint", 1
_CHUNK = 4 << 20
_FORCED, _FORBIDDEN = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def looks_like_one(path: Path) -> bool:
    """Whether `path` is a DeepSpeed folder or a part of one; reads no file."""
    if is_remote(path):
        return False
    if path.is_dir():
        if (path / ".metadata").is_file():  # of torch.distributed.checkpoint, with a manifest of the same name
            return False
        return (path / MANIFEST).is_file() or (path / LATEST).is_file() or _is_inner(path)
    return path.is_file() and _is_inner(path.parent) and path.suffix == ".pt"


def is_ours(path: Path) -> bool:
    """Whether `path` is a folder that this package wrote."""
    return not is_remote(path) and path.is_dir() and (path / MANIFEST).is_file()


def check_place(path: Path) -> None:
    """Refuse a path that is not a DeepSpeed folder.

    Raises:
        CheckpointError: the path is a URL, does not exist, is a part of a checkpoint, or is another folder.
    """
    if is_remote(path):
        raise CheckpointError(f"{path} is a URL", expected="a local folder: DeepSpeed cannot read or write URLs")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", expected="a folder that DeepSpeed wrote", do="check the path")
    inner = path if path.is_dir() else path.parent
    if _is_inner(inner):
        what = (
            "is the inner folder of a DeepSpeed checkpoint" if path is inner else "is a file of a DeepSpeed checkpoint"
        )
        raise CheckpointError(f"{path} {what}", expected="the checkpoint's folder", do=f"use {inner.parent}")
    if not path.is_dir() or not (path / LATEST).is_file():
        raise CheckpointError(
            f"{path} is not a folder that DeepSpeed wrote",
            expected=f"a folder with a file {LATEST!r}",
            do="check the path",
        )


def tag_in(path: Path) -> str:
    """Return the tag: the name of the subfolder that ``latest`` contains.

    Raises:
        CheckpointError: there is no such subfolder.
    """
    tag = (path / LATEST).read_text(errors="replace").strip()
    if not tag or "/" in tag or tag in (".", "..") or not (path / tag).is_dir():
        raise CheckpointError(f"{path / LATEST} names {tag!r}", expected=f"a folder in {path}")
    return tag


def model_file(path: Path, tag: str) -> Path:
    """Return rank 0's weights file, which also holds the trainer's state."""
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        if (path / tag / name).is_file():
            return path / tag / name
    raise CheckpointError(f"{path / tag} has no weights file", expected="what DeepSpeed wrote", do="check the path")


def has_shards(path: Path, tag: str) -> bool:
    """Whether the folder has the ranks' partitions of the optimizer state: at every stage except 0."""
    return any((path / tag).glob("*_optim_states.pt"))


def has_placeholders(path: Path, tag: str) -> bool:
    """Whether the weights file has no values, because they are in the ranks' partitions: at stage 3."""
    return model_file(path, tag).name.startswith("zero_pp_rank_")


def _is_inner(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*_model_states.pt"))


# --- Completeness -------------------------------------------------------------------------------------------------


def files_in(path: Path) -> list[str]:
    """Return the relative paths of all files in a folder except the manifest, sorted."""
    found = (each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file())
    return sorted(name for name in found if name != MANIFEST)


def files_at(path: Path) -> set[str]:
    """Return the checkpoint's files in a folder; if the manifest is damaged, files with DeepSpeed's usual names."""
    try:
        return {MANIFEST, *read_manifest(path)["files"]}
    except CheckpointError:
        named = [each.relative_to(path).as_posix() for each in path.glob(f"{TAG}/*.pt")]
        return {*BESIDE, *named}


def seal(path: Path, names: list[str]) -> dict[str, Any]:
    """Flush files to the disk (fsync), and return the size and checksum of each."""
    sealed = {}
    for name in names:
        with (path / name).open("rb") as file:
            os.fsync(file.fileno())
        sealed[name] = _entry(path / name)
    return sealed


def write_manifest(path: Path, facts: dict[str, Any]) -> None:
    """Write the manifest, as the last file of a checkpoint."""
    text = json.dumps({"format": _FORMAT, "version": _VERSION} | facts, ensure_ascii=False)
    replace_text(path / MANIFEST, f"{text}\n{xxhash.xxh3_128_hexdigest(text.encode())}\n", durable=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest after a check of its checksum and version.

    Raises:
        CheckpointError: another program wrote the folder, or a newer version of this one, or it is damaged.
    """
    check_place(path)
    if not is_ours(path):
        raise CheckpointError(
            f"{path} was written by another program, with pickles", expected="a folder that this strategy wrote",
            do=f"if you trust it, `stratagem checkpoint consolidate --trust {path} FILE` makes a file of its weights",
        )  # fmt: skip
    text, _, digest = (path / MANIFEST).read_bytes().partition(b"\n")
    if xxhash.xxh3_128_hexdigest(text).encode() != digest.strip():
        raise _damaged(path, MANIFEST)
    facts: dict[str, Any] = json.loads(text)
    if facts.get("format") != _FORMAT or facts.get("version", 0) > _VERSION:
        raise CheckpointError(
            f"{path} has version {facts.get('version')}", expected=f"at most {_VERSION}",
            do="read it with a newer stratagem-deepspeed",
        )  # fmt: skip
    return facts


def verify(path: Path, facts: dict[str, Any], rank: int = 0, world_size: int = 1) -> None:
    """Check this rank's part of the files against their checksums.

    Raises:
        CheckpointError: one of them differs, or is missing.
    """
    for name in sorted(facts["files"])[rank::world_size]:
        file = path / name
        if not re.fullmatch(r"(?!\.)[^/]+(/(?!\.)[^/]+)*", name) or file.is_symlink():
            raise _damaged(path, name)
        try:
            same = _entry(file) == facts["files"][name]
        except OSError:
            same = False
        if not same:
            raise _damaged(path, name)


def is_whole(path: Path) -> bool:
    """Whether a folder is complete and undamaged; for another program's folder, whether no file is truncated."""
    try:
        check_place(path)
        if is_ours(path):
            verify(path, read_manifest(path))
            return True
        return all(zipfile.is_zipfile(file) for file in (path / tag_in(path)).glob("*.pt"))
    except (CheckpointError, OSError):
        return False


def _entry(file: Path) -> dict[str, Any]:
    hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            hasher.update(buffer[:count])
    return {"bytes": file.stat().st_size, "xxh3_128": hasher.hexdigest()}


def _damaged(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: {name} does not match its checksum", expected="files that match their checksums",
        do="use an older checkpoint",
    )  # fmt: skip


# --- Reading -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_data() -> Iterator[None]:
    """Make every torch.load in the block, also DeepSpeed's, load with ``weights_only=True``."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = {name: os.environ.pop(name, None) for name in (_FORCED, _FORBIDDEN)}
    os.environ[_FORCED] = "1"
    try:
        with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in before.items() if value is not None})
