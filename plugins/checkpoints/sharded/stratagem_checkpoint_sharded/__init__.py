"""Every rank writes its part of the state into one folder; any number of ranks reads what it needs of it.

[Note: one file for all]
``tensors.bin`` holds each tensor whole, row after row, whoever wrote which rows: ranks write at their own places of one
file, and the file does not tell how many they were. So a reader maps it into memory as whole tensors, and only the
pages it touches cost anything: a strategy that keeps a shard reads a shard. ``manifest.json`` is written last and names
every tensor, every piece with its checksum, and all that is no tensor. Nothing in either is ever executed.

[Note: objects]
An object store has no file that many can write to. There each rank writes one object, and the manifest says for each
piece in which object it is. Objects have names of their own in every save, so that the manifest, replaced at once,
switches from one complete set to the next. A reader brings the pieces to their places in a temporary local file and
goes on as before; the processes of a node share that file and the work of filling it.
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
    """A folder that all ranks write together; see [Note: one file for all] and [Note: objects]."""

    #: Write in the background: training waits only while each rank copies its part of the state, into memory that is
    #: kept for the next time.
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
                    expected="a place that all ranks share",
                )
        except CheckpointError as caught:
            error = caught
        run.collectives.fail_together(error)
        assert plan is not None, "ranks without one have failed together"
        plan.divide(run.collectives.all_gather_object(plan.absent))
        if self.async_save:
            run.wait_for_saves()  # the save before this one may still read the memory
            self._memory = plan.copy(self._memory)
        write = objects.write if is_remote(path) else folder.write
        run.save_in_background(functools.partial(write, plan, path), background=self.async_save)
        return True

    @hookimpl
    def load_checkpoint(self, path: Path, into: dict[str, Any] | None, run: RunContext) -> dict[str, Any]:
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
            # Together the ranks read every byte once.
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
            raise CheckpointError(f"{path} is no sharded checkpoint", do="nothing was deleted")
        files = files_at(path)  # a damaged one may go, too
        if is_remote(path):
            objects.remove(path, files)
            return
        remove_folder(path, files)
