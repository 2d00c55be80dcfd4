"""Save what there is when training fails."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from attrs import define, field

from stratagem import Callback, hookimpl
from stratagem.launch import is_echo
from stratagem.options import more_than, not_empty
from stratagem.places import place


@define(eq=False, kw_only=True)
class OnExceptionCheckpoint(Callback):
    """Saves to ``<dirpath>/<filename>`` when an exception (Ctrl-C, too) ends training.

    With several ranks this needs all of them to fail at the same step, as they do with Ctrl-C or an error in all of
    them: a rank whose peers are gone, or still working, says that it could not save.
    """

    #: Folder; ``<default_root_dir>/checkpoints`` if not given.
    dirpath: Path | None = None
    #: Name; without an ending, the checkpoint format's own.
    filename: str = field(default="on_exception", validator=not_empty)
    #: Seconds to wait for the other ranks; they wait as long to learn of an error.
    patience_s: float = field(default=3.0, validator=more_than(0))

    _training: bool = field(init=False, default=False)

    def folder(self, trainer: Any) -> Path:
        """Return where it saves."""
        return place(self.dirpath) if self.dirpath is not None else Path(trainer.default_root_dir) / "checkpoints"

    @hookimpl
    def on_train_start(self):
        self._training = True

    @hookimpl
    def on_train_end(self):
        self._training = False

    @hookimpl
    def on_exception(self, trainer, exception):
        in_order = isinstance(exception, SystemExit) and exception.code in (None, 0)
        was_training, self._training = self._training, False
        # An error of the connection tells that a peer is gone: nobody will come.
        if not was_training or in_order or is_echo(exception):
            return
        path = self.folder(trainer) / self.filename
        if not path.suffix:
            path = path.with_name(path.name + trainer.checkpoint_format.suffix)
        try:
            trainer.run.collectives.meet("on_exception_checkpoint", self.patience_s)
            trainer.save_checkpoint(path)
            trainer.run.saver.wait()
        except Exception as error:  # noqa: BLE001 - what ended training is what the user must see
            warnings.warn(f"on_exception_checkpoint could not save {path} ({error})", stacklevel=2)
        else:
            trainer.print(f"on_exception_checkpoint: saved {path} after step {trainer.global_step}")
