"""Save one folder from all ranks, each its part of the state; any number of ranks can read it.

[Note: one file for all]
``tensors.bin`` has each tensor as one contiguous row-major block. Each rank writes its rows at their offsets, so the
file does not depend on the number of ranks. A reader maps the file into memory (mmap): only the pages that it touches
are read, so a strategy with sharded parameters reads only its shards. ``manifest.json`` is written last. It has the
position of each tensor, the checksum of each piece, and all values that are not tensors. No code of either file is
executed.

[Note: objects]
In an object store several processes cannot write to one file. There each rank writes one object, and the manifest has
the object of each piece. Each save uses new object names, so that replacing the manifest switches atomically from one
complete set to the next. A reader copies the pieces to their offsets in a temporary local file, and maps that; the
processes of a node share the file, and each fetches a part.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field

from stratagem.api import CheckpointFormat, hookimpl
from stratagem.api.paths import is_private, is_remote, modified_at
from stratagem.checkpoint.atomic import remove_folder
from stratagem.errors import CheckpointError
from stratagem_checkpoint_sharded import folder, objects
from stratagem_checkpoint_sharded.layout import Plan
from stratagem_checkpoint_sharded.manifest import MANIFEST, TENSORS, files_at, files_of, has_tag, read_manifest, verify
from stratagem_checkpoint_sharded.reading import assembled, mapped

if TYPE_CHECKING:
    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class ShardedCheckpoint(CheckpointFormat):
    """Write one folder from all ranks, each rank its part; any number of ranks reads it.

    See [Note: one file for all] and [Note: objects].
    """

    #: Write in the background: training waits only until each rank has copied its part of the state, into memory that
    #: is kept for the next save.
    async_save: bool = False
    _memory: Any = field(init=False, factory=list)

    suffix: ClassVar[str] = ".ckpt"
    takes_shards: ClassVar[bool] = True

    @hookimpl
    def save_checkpoint(self, state: dict[str, Any], path: Path, run: RunContext) -> bool:
        plan: Plan | None = None
        error = None
        try:
            plan = Plan(state, run.rank, run.world_size)
            if is_private(path) and run.world_size > 1:
                raise CheckpointError(
                    f"{path} is in the memory of each process and the run has {run.world_size} of them",
                    expected="storage that all ranks share",
                )
        except CheckpointError as caught:
            error = caught
        run.collectives.fail_together(error)
        assert plan is not None, "fail_together raised on all ranks otherwise"
        plan.divide(run.collectives)
        if self.async_save:
            run.wait_for_saves()  # the save before this one may still read the memory
            self._memory = plan.copy(self._memory)
        write = objects.write if is_remote(path) else folder.write
        run.save_in_background(functools.partial(write, plan, path), background=self.async_save)
        return True

    @hookimpl
    def load_checkpoint(self, path: Path, run: RunContext) -> dict[str, Any]:
        manifest, error = None, None
        if run.is_global_zero:
            try:
                manifest = read_manifest(path)
            except CheckpointError as caught:
                error = caught
        run.collectives.fail_together(error)
        manifest = run.collectives.broadcast_object(manifest)
        if is_remote(path) or files_of(manifest) - {TENSORS}:
            return assembled(path, manifest, run)
        state: dict[str, Any] = {}
        try:
            # Each byte is read by one rank.
            verify(path, manifest, run.rank, run.collectives.world_size)
            state = mapped(path / TENSORS, manifest)
        except CheckpointError as caught:
            error = caught
        run.collectives.fail_together(error)
        return state

    @hookimpl
    def teardown(self) -> None:
        self._memory = []

    def recognises(self, path: Path) -> bool:
        return has_tag(path)

    def is_whole(self, path: Path) -> bool:
        try:
            verify(path, read_manifest(path))
        except CheckpointError:
            return False
        return True

    def saved_at(self, path: Path) -> float:
        return modified_at(path / MANIFEST)

    def remove(self, path: Path) -> None:
        if not self.recognises(path):
            raise CheckpointError(f"{path} is not a sharded checkpoint", do="check the path; nothing was deleted")
        files = files_at(path)  # a damaged one may be deleted, too
        if is_remote(path):
            objects.remove(path, files)
            return
        remove_folder(path, files)
