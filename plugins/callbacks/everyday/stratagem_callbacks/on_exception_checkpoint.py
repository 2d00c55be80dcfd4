"""Save what there is when training fails."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.paths import as_path
from stratagem.api.peer_errors import is_echo
from stratagem.api.validators import more_than, not_empty
from stratagem_callbacks.own_checkpoint import OwnCheckpoint

if TYPE_CHECKING:
    from stratagem.api import TrainerView


@define(eq=False, kw_only=True)
class OnExceptionCheckpoint(OwnCheckpoint):
    """Saves to ``<dirpath>/<filename>`` when an exception (Ctrl-C, too) ends training.

    With several ranks this needs all of them to fail at the same step, as they do with Ctrl-C or an error in all of
    them: a rank whose peers are gone, or still working, says that it could not save. A file of that name that neither
    this run nor the run that it resumes wrote is kept: the name gets ``-v1``.
    """

    #: Folder; ``<default_root_dir>/checkpoints`` if not given.
    dirpath: Path | None = None
    #: Name; without an ending, the checkpoint format's own.
    filename: str = field(default="on_exception", validator=not_empty)
    #: Seconds to wait for the other ranks; they wait as long to learn of an error.
    patience_s: float = field(default=3.0, validator=more_than(0))

    #: The exception that ended the last fit was followed by a save.
    saved_on_exception: bool = field(init=False, default=False)
    _training: bool = field(init=False, default=False)

    def folder(self, trainer: TrainerView) -> Path:
        """Return where it saves."""
        return as_path(self.dirpath) if self.dirpath is not None else Path(trainer.default_root_dir) / "checkpoints"

    @hookimpl
    def on_train_start(self) -> None:
        self._training, self.saved_on_exception = True, False

    @hookimpl
    def on_train_end(self) -> None:
        self._training = False

    @hookimpl
    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        in_order = isinstance(exception, SystemExit) and exception.code in (None, 0)
        was_training, self._training = self._training, False
        # An error of the connection tells that a peer is gone: nobody will come.
        if not was_training or in_order or is_echo(exception):
            return
        try:
            trainer.run.collectives.barrier_with_timeout("on_exception_checkpoint", self.patience_s)
            path = self.save(trainer, self.filename)
        except Exception as error:  # noqa: BLE001 - what ended training is what the user must see
            wanted = self.folder(trainer) / self.filename
            warnings.warn(f"on_exception_checkpoint could not save {wanted} ({error})", stacklevel=2)
        else:
            self.saved_on_exception = True
            trainer.print(
                f"on_exception_checkpoint: saved {path} after step {trainer.global_step}; "
                'go on with fit(ckpt_path="last")'
            )
