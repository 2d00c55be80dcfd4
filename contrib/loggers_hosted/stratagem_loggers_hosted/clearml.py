"""Log to ClearML, or with `offline` to an archive for ``Task.import_offline_session``."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from attrs import define

from stratagem_loggers_hosted.hosted import HostedLogger


@define(eq=False, kw_only=True)
class ClearMLLogger(HostedLogger):
    """Log to one task of ClearML on rank 0; `version` is the id of a task."""

    label: ClassVar[str] = "clearml"
    __getstate__, __setstate__ = HostedLogger.__getstate__, HostedLogger.__setstate__

    #: Upload nothing, and need no server; for the whole process. The archive is in ClearML's cache folder.
    offline: bool = False

    def library(self) -> Any:
        """Import clearml, and let it report from a thread: closing a process that it forks takes 6 to 11 seconds."""
        import clearml
        from clearml.config import config_obj

        config_obj.set_overrides({"sdk": {"development": {"report_use_subprocess": False}}})
        return clearml

    def start(self, version: str | None) -> tuple[Any, str, str]:
        """Start a task without what ClearML takes from torch, the command line and the output."""
        tasks = self.library().Task
        if self.offline:
            tasks.set_offline(True)
        run = tasks.init(
            self.project, self.name, tags=self.tags, reuse_last_task_id=False, continue_last_task=version or False,
            auto_connect_arg_parser=False, auto_connect_frameworks=False, auto_connect_streams=False,
            auto_resource_monitoring=False,
        )  # fmt: skip
        run.set_initial_iteration(0)  # ClearML would add the last step of a task that is continued to all steps
        return run, run.id, str(run.get_offline_mode_folder() or "")

    def write_metrics(self, run: Any, metrics: dict[str, float], step: int) -> None:
        """Report scalars; ``a/b`` is the line b of the plot a."""
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            if math.isfinite(value):  # ClearML would report 0
                run.get_logger().report_scalar(title, series or title, value, step)

    def write_hyperparams(self, run: Any, params: dict[str, Any]) -> None:
        """Connect a copy of them: ClearML changes it where a task runs again with other values."""
        run.connect(dict(params))

    def end(self, run: Any, failed: str) -> None:
        """Close the task; one that failed is marked so."""
        if failed:
            run.mark_failed(status_message=failed)
        run.close()
