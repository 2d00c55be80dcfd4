"""What all formats do alike: plan a save, write it now or in the background, publish it whole, verify before reading.

[Note: layouts]
A layout of one file (`FileLayout`) says what the file contains and how it is read; rank 0 writes it. A layout of a
folder (`FolderLayout`) says which part this rank writes, and what the manifest has of all parts. Neither handles
temporary names, claims, background saves, or an error on one rank alone: nothing is visible before it is complete, and
all ranks raise together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import xxhash
from attrs import define, field
from torch import Tensor

from stratagem.api import CheckpointFormat, hookimpl
from stratagem.api.paths import modified_at, replacing
from stratagem.checkpoint.atomic import StagedFolder, remove_folder, writing
from stratagem.checkpoint.files import publish_file, remove_file, verify_file
from stratagem.checkpoint.state_checks import on_all_ranks
from stratagem.errors import CheckpointError
from stratagem_checkpoints.cpu_copies import CPUCopies

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext

#: Copies a tensor to the CPU.
Copy = Callable[[Tensor], Tensor]
#: Writes all of a file.
Writer = Callable[[BinaryIO], object]


@define(eq=False, kw_only=True)
class Layout(CheckpointFormat):
    """Saves for all formats; see [Note: layouts]."""

    #: Write in the background: training waits only until each rank has copied what it writes.
    async_save: bool = False
    #: Memory of the copies, which the next save uses again.
    _memory: Any = field(init=False, default=None)

    @hookimpl
    def save_checkpoint(self, state: dict[str, Any], path: Path, run: RunContext) -> bool:
        run.saver.wait()  # one copy at a time
        write = functools.partial(self.write, self.plan(state, path, run), path)
        run.saver.submit(write, background=self.async_save)
        return True

    @hookimpl
    def teardown(self) -> None:
        self._memory = None

    def is_whole(self, path: Path) -> bool:
        try:
            return self.verify(path)
        except CheckpointError:
            return False

    def plan(self, state: dict[str, Any], path: Path, run: RunContext) -> Any:
        """Return what this rank writes of `state`; copied, if it is written in the background. Collective."""
        raise NotImplementedError

    def write(self, plan: Any, path: Path, collectives: Collectives) -> None:
        """Write `plan` to `path`, atomically. Collective.

        Raises:
            CheckpointError: it cannot be written, or another run writes there; on all ranks.
        """
        raise NotImplementedError

    def verify(self, path: Path) -> bool:
        """Return whether `path` is a checkpoint of this format.

        Raises:
            CheckpointError: it is damaged.
        """
        raise NotImplementedError


@define(eq=False, kw_only=True)
class FileLayout(Layout):
    """One file, written on rank 0 and read by all; without a checksum if another program wrote it."""

    def plan(self, state: dict[str, Any], path: Path, run: RunContext) -> Any:
        def content() -> Any:
            copies = self._memory = self._memory or CPUCopies()
            try:
                return self.content(state, copies.take if self.async_save else None)
            finally:
                copies.wait()

        return on_all_ranks(run.collectives, lambda: content() if run.is_global_zero else None)

    def write(self, plan: Any, path: Path, collectives: Collectives) -> None:
        def publish() -> None:
            if plan is not None:
                publish_file(path, plan, xxhash.xxh3_128)

        on_all_ranks(collectives, publish)

    @hookimpl
    def load_checkpoint(self, path: Path, run: RunContext) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            self.verify_sum(path)
            return self.state_in(path)

        return on_all_ranks(run.collectives, read)

    def verify(self, path: Path) -> bool:
        return self.verify_sum(path) or self.is_readable(path)

    def verify_sum(self, path: Path) -> bool:
        """Compare `path` with its checksum; return False if it has none.

        Raises:
            CheckpointError: it differs.
        """
        return verify_file(path, xxhash.xxh3_128)

    def remove(self, path: Path) -> None:
        remove_file(path)

    def content(self, state: dict[str, Any], copy: Copy | None) -> Writer:
        """Return what writes `state` to a file; with `copy`, tensors are copied by it at once."""
        raise NotImplementedError

    def state_in(self, path: Path) -> dict[str, Any]:
        """Return the state at `path`, with tensors that may be mapped from it."""
        raise NotImplementedError

    def is_readable(self, path: Path) -> bool:
        """Return whether a file without a checksum appears to be complete."""
        return bool(self.state_in(path))


@define(eq=False, kw_only=True)
class FolderLayout(Layout):
    """One folder, written by all ranks: each writes its part, and rank 0 writes the manifest last."""

    takes_shards: ClassVar[bool] = True
    #: The files by whose presence the folder is recognised, and with what rank 0 adds when all parts are written.
    index: ClassVar[str]
    manifest: ClassVar[str]

    def plan(self, state: dict[str, Any], path: Path, run: RunContext) -> Any:
        plan = on_all_ranks(run.collectives, lambda: self.planned(state, path, run))
        plan.divide(run.collectives)
        if self.async_save:
            self._memory = plan.copy(self._memory)
        return plan

    def write(self, plan: Any, path: Path, collectives: Collectives) -> None:
        staged, is_first = StagedFolder(path), collectives.rank == 0

        def begin() -> None:
            staged.begin(self.recognises, self.files_at)
            self.prepare(plan, staged.path)

        def finish(parts: list[Any]) -> None:
            content = self.described(plan, parts, staged.path)
            with replacing(staged.path / self.manifest, durable=True) as file:
                file.write(content)
            staged.publish()

        def step(act: Callable[[], Any]) -> Any:
            return on_all_ranks(collectives, writing(path)(act))

        try:
            step(lambda: begin() if is_first else None)
            part = step(lambda: self.write_part(plan, staged.path, collectives))
            parts = collectives.all_gather_object(part)
            step(lambda: finish(parts) if is_first else None)
        finally:
            staged.clear_away()

    def saved_at(self, path: Path) -> float:
        return modified_at(path / self.index)

    def remove(self, path: Path) -> None:
        remove_folder(path, self.files_at(path))  # a damaged one may be deleted, too

    def files_at(self, path: Path) -> set[str]:
        """Return the names of all files of the checkpoint at `path`; of a damaged one, those that are known."""
        raise NotImplementedError

    def planned(self, state: dict[str, Any], path: Path, run: RunContext) -> Any:
        """Return a plan with the methods `divide`, for what this rank writes, and `copy`."""
        raise NotImplementedError

    def prepare(self, plan: Any, folder: Path) -> None:
        """Create what all ranks write to, on rank 0."""

    def write_part(self, plan: Any, folder: Path, collectives: Collectives) -> Any:
        """Write what this rank writes; return what the manifest has of it."""
        raise NotImplementedError

    def described(self, plan: Any, parts: list[Any], folder: Path) -> bytes:
        """Return the manifest, given what `write_part` returned on each rank."""
        raise NotImplementedError


def unreadable(
    path: Path, form: str, reason: object, expected: str = "the content that was written", other: str = "one"
) -> CheckpointError:
    """Return the error to raise if what is at `path` cannot be read as `form`, for a `reason`."""
    do = f"use another {other}; no code of this one was executed"
    return CheckpointError(f"{path} cannot be read as {form} ({reason})", expected=expected, do=do)


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error to raise if `what` of the folder `path` has another checksum."""
    return CheckpointError(
        f"{path} is not what was written: {what}", expected="the content that was written", do="use an older checkpoint"
    )
