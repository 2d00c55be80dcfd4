"""Base class of callbacks that save to one path; only their own checkpoints are overwritten, never another run's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.paths import as_path, is_remote, refusals
from stratagem.errors import CheckpointError
from stratagem_trainer.api import Callback, has_role

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView

#: The key of the paths that the run wrote, in checkpoints.
_ENTRY = "own_files"


@define(eq=False, kw_only=True)
class OwnCheckpoint(Callback):
    """Save to ``<folder>/<filename>``.

    If a file of that name exists that neither this run nor the run that it resumes wrote, ``-v1``, ``-v2`` ... is
    added.
    """

    roles: ClassVar[frozenset[str]] = frozenset({"checkpoint-folder"})

    #: Folder to save in; that of the first callback with checkpoints, or ``<default_root_dir>/checkpoints``.
    dirpath: Path | None = None

    #: Paths that this run, and the run that it resumes, wrote; saved in each checkpoint.
    _written: list[str] = field(init=False, factory=list)
    _resumes: bool = field(init=False, default=False)

    def folder(self, trainer: TrainerView) -> Path:
        """Return the folder to save in."""
        if self.dirpath is not None:
            return as_path(self.dirpath)
        others = [each for each in trainer.callbacks if each is not self and has_role(each, "checkpoint-folder")]
        return others[0].folder(trainer) if others else Path(trainer.default_root_dir) / "checkpoints"

    def save(self, trainer: TrainerView, filename: str) -> Path:
        """Save to a path that this run may overwrite, and wait until it is written; return the path. Collective.

        Raises:
            CheckpointError: the path cannot be written; on all ranks.
        """
        path, error = None, None
        if trainer.is_global_zero:
            try:
                path = self._free_path(trainer, filename)
            except CheckpointError as caught:
                error = caught
        trainer.run.collectives.fail_together(error)
        path = trainer.run.collectives.broadcast_object(path)
        before = list(self._written)
        # The checkpoint lists its own path: a run that resumes it may overwrite it.
        self._written = [*(each for each in before if each != _key(path)), _key(path)]
        try:
            trainer.save_checkpoint(path)
            trainer.run.saver.wait()
        except BaseException:
            self._written = before
            raise
        saved: Path = path
        return saved

    def _free_path(self, trainer: TrainerView, filename: str) -> Path:
        form = trainer.run.checkpoint_format
        first = self.folder(trainer) / filename
        if not first.suffix:
            first = first.with_name(first.name + form.suffix)
        path, version = first, 0
        with refusals(first, "looked for"):
            while _is_taken(path) and not (_key(path) in self._written and form.recognises(path)):
                version += 1
                path = first.with_name(f"{first.stem}-v{version}{first.suffix}")
        return path

    # Not in state_dict(): resuming without the callback loses nothing, and must not warn.

    @hookimpl
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._written:
            checkpoint[_ENTRY] = sorted({*checkpoint.get(_ENTRY, ()), *self._written})

    @hookimpl
    def setup(self, trainer: TrainerView, stage: str) -> None:
        self._resumes = stage == "fit"  # evaluating a checkpoint does not resume its run
        self._written = self._written if trainer.global_step else []  # by a run of another model

    @hookimpl
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(_ENTRY)
        if self._resumes and isinstance(saved, list | tuple):
            self._written = [*self._written, *(path for path in saved if isinstance(path, str))]


def _is_taken(path: Path) -> bool:
    return path.exists() or (not is_remote(path) and path.is_symlink())


def _key(path: Path) -> str:
    """Return `path` in a canonical form."""
    return str(path) if is_remote(path) else os.path.realpath(path)
