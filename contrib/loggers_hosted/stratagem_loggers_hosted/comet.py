"""Log to Comet, or with `offline` to an archive that ``comet upload`` sends later."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from attrs import define

from stratagem_loggers_hosted.hosted import HostedLogger


@define(eq=False, kw_only=True)
class CometLogger(HostedLogger):
    """Log to one experiment of Comet on rank 0; `version` is an experiment key."""

    label: ClassVar[str] = "comet"
    __getstate__, __setstate__ = HostedLogger.__getstate__, HostedLogger.__setstate__

    #: Workspace of the project; the user's default if not given.
    workspace: str | None = None
    #: Folder for archives of `offline`; ``default_root_dir`` if not given.
    save_dir: Path | None = None
    #: Upload nothing, and need no login: run ``comet upload`` on the archive later.
    offline: bool = False

    def library(self) -> Any:
        """Import comet_ml."""
        import comet_ml

        return comet_ml

    def start(self, version: str | None) -> tuple[Any, str, str]:
        """Start an experiment without the values that Comet takes from torch: stratagem logs them."""
        comet = self.library()
        config = comet.ExperimentConfig(
            name=self.name, tags=self.tags, offline_directory=str(self.folder) if self.offline else None,
            auto_metric_logging=False, auto_param_logging=False, parse_args=False,
        )  # fmt: skip
        if self.offline:
            self.folder.mkdir(parents=True, exist_ok=True)
        run = comet.start(
            workspace=self.workspace, project_name=self.project, experiment_key=version, online=not self.offline,
            mode="create" if version is None else "get_or_create", experiment_config=config,
        )  # fmt: skip
        return run, run.get_key(), str(self.folder) if self.offline else ""

    def write_metrics(self, run: Any, metrics: dict[str, float], step: int) -> None:
        """Log them at `step`."""
        run.log_metrics(metrics, step=step)

    def write_hyperparams(self, run: Any, params: dict[str, Any]) -> None:
        """Log them; Comet joins nested names with ``_``."""
        run.log_parameters(params)

    def end(self, run: Any, failed: str) -> None:
        """End the experiment, which writes the archive of `offline`."""
        if failed:
            run.log_other("failed", failed)
        run.end()
