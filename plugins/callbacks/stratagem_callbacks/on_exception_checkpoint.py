"""Save a checkpoint when training fails."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.paths import as_path
from stratagem.api.validators import more_than, not_empty
from stratagem.errors import is_echo
from stratagem_callbacks.own_checkpoint import OwnCheckpoint

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class OnExceptionCheckpoint(OwnCheckpoint):
    """Save to ``<dirpath>/<filename>`` when an exception, or Ctrl-C, ends training.

    With several ranks, all must fail at the same step, as they do with Ctrl-C or an error on all of them. If other
    ranks have died, or still train, a warning says that nothing was saved. An existing file that neither this run nor
    the run that it resumes wrote is kept: the name gets ``-v1``.
    """

    positional: ClassVar[tuple[str, ...]] = ("dirpath", "filename")
    #: Tells `interruption` that this callback saves on Ctrl-C.
    save_on_exception: ClassVar[bool] = True

    #: Folder to save in; ``<default_root_dir>/checkpoints`` if not given.
    dirpath: Path | None = None
    #: File name; without a suffix, the checkpoint format's is added.
    filename: str = field(default="on_exception", validator=not_empty)
    #: Seconds to wait for the other ranks; they need as long to notice an error of this rank.
    patience_s: float = field(default=3.0, validator=more_than(0))

    #: Whether the last fit ended with an exception and was saved.
    saved_on_exception: bool = field(init=False, default=False)
    _training: bool = field(init=False, default=False)

    def folder(self, trainer: TrainerView) -> Path:
        """Return the folder to save in."""
        return as_path(self.dirpath) if self.dirpath is not None else Path(trainer.default_root_dir) / "checkpoints"

    @hookimpl
    def on_train_start(self) -> None:
        self._training, self.saved_on_exception = True, False

    @hookimpl
    def on_train_end(self) -> None:
        self._training = False

    @hookimpl
    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        normal_exit = isinstance(exception, SystemExit) and exception.code in (None, 0)
        was_training, self._training = self._training, False
        # After a connection error a peer is gone, so the barrier would time out.
        if not was_training or normal_exit or is_echo(exception):
            return
        try:
            trainer.run.collectives.barrier_with_timeout("on_exception_checkpoint", self.patience_s)
            path = self.save(trainer, self.filename)
        except Exception as error:  # noqa: BLE001 - the user must see the exception that ended training
            wanted = self.folder(trainer) / self.filename
            warnings.warn(f"on_exception_checkpoint could not save {wanted} ({error})", stacklevel=2)
        else:
            self.saved_on_exception = True
            trainer.print(
                f"on_exception_checkpoint: saved {path} after step {trainer.global_step}; "
                'resume with fit(ckpt_path="last")'
            )
