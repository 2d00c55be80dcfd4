"""Log to Trackio: to its database on this machine, or to a Space of Hugging Face."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import define

from stratagem_loggers_hosted.hosted import HostedLogger


@define(eq=False, kw_only=True)
class TrackioLogger(HostedLogger):
    """Log to one run of Trackio on rank 0; `version` is the name of a run."""

    label: ClassVar[str] = "trackio"
    __getstate__, __setstate__ = HostedLogger.__getstate__, HostedLogger.__setstate__

    #: Group of the run: Trackio shows runs of a group together.
    group: str | None = None
    #: Space of Hugging Face to log to, such as ``user/name``; the database on this machine if not given.
    space_id: str | None = None

    def library(self) -> Any:
        """Import trackio."""
        import trackio

        return trackio

    def start(self, version: str | None) -> tuple[Any, str, str]:
        """Start a run without measurements of the machine."""
        run = self.library().init(
            self.project, name=version or self.name, group=self.group, space_id=self.space_id, embed=False,
            resume="never" if version is None else "allow", config={"tags": self.tags} if self.tags else None,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        return run, run.name, "" if self.space_id else str(self.library().utils.TRACKIO_DIR)

    def write_metrics(self, run: Any, metrics: dict[str, float], step: int) -> None:
        """Log them at `step`."""
        run.log(metrics, step=step)

    def write_hyperparams(self, run: Any, params: dict[str, Any]) -> None:
        """Make them the run's config."""
        run.config.update(params)

    def end(self, run: Any, failed: str) -> None:
        """Finish the run, which waits for the thread that writes."""
        run.finish()
