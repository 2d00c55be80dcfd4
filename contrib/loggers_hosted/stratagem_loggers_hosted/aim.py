"""Log to Aim: to a repository in a folder, or to a server of Aim."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from attrs import define

from stratagem.errors import ConfigError
from stratagem_loggers_hosted.hosted import HostedLogger


@define(eq=False, kw_only=True)
class AimLogger(HostedLogger):
    """Log to one run of Aim on rank 0; `project` is Aim's experiment, `version` a run hash."""

    label: ClassVar[str] = "aim"
    __getstate__, __setstate__ = HostedLogger.__getstate__, HostedLogger.__setstate__

    #: Folder of the repository ``.aim``, or a server such as ``aim://host:53800``; ``default_root_dir`` if not given.
    repo: str | None = None
    #: The process that opened a run last: the threads of Aim's storage are in it, and not in one that it forks.
    _opened_by: ClassVar[int | None] = None

    def library(self) -> Any:
        """Import aim."""
        import aim

        if self._opened_by not in (None, os.getpid()):
            raise ConfigError(
                "logger 'aim' logged before this process was forked, in which Aim's storage waits for a thread forever",
                expected="processes that do not fork, or none that logs before",
                do='set strategy="ddp_spawn", or start the program again',
            )
        return aim

    def start(self, version: str | None) -> tuple[Any, str, str]:
        """Open a run of the repository, without terminal output and measurements of the machine."""
        if self.repo is None:
            self.folder.mkdir(parents=True, exist_ok=True)
        AimLogger._opened_by = os.getpid()
        run = self.library().Run(
            version,
            repo=self.repo or str(self.folder),
            experiment=self.project,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        if self.name is not None:
            run.name = self.name
        for tag in self.tags or []:
            run.add_tag(tag)
        return run, run.hash, "" if self.repo else str(self.folder / ".aim")

    def write_metrics(self, run: Any, metrics: dict[str, float], step: int) -> None:
        """Track each one at `step`."""
        for name, value in metrics.items():
            run.track(value, name=name, step=step)

    def write_hyperparams(self, run: Any, params: dict[str, Any]) -> None:
        """Set them as ``run["hparams"]``."""
        run["hparams"] = params

    def end(self, run: Any, failed: str) -> None:
        """Close the run."""
        if failed:
            run["failed"] = failed
        run.close()
