"""Run a program of Hydra again within the job that it carries out now."""

from __future__ import annotations

import sys
from typing import Any

from stratagem.errors import ConfigError

#: Hydra prints a short message and hides the exception without it; the launcher needs it for the report.
FULL_ERROR_VARIABLE = "HYDRA_FULL_ERROR"


def hydra_job() -> Any:
    """Return Hydra's configuration of the job that this program carries out; None if it carries out none.

    Raises:
        ConfigError: the program carries out several jobs, one after another (``--multirun``).
    """
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    job = module.HydraConfig.get()
    if job.mode is not None and job.mode.name == "MULTIRUN":
        raise ConfigError(
            "Hydra carries out several jobs in this program (--multirun), and the processes of launcher 'subprocess' "
            "live until the program ends",
            expected="a launcher that starts new processes for each fit",
            do='set strategy="ddp_fork" or "ddp_spawn" (or launcher="fork" with another strategy), or start the '
            "program once for each job",
        )
    return job


def job_arguments(job: Any, rank: int) -> list[str]:
    """Return what `rank` needs beside the program's arguments to share the job's folder and not to write over it."""
    return [
        f"hydra.run.dir={_quoted(job.runtime.output_dir)}",
        "hydra.output_subdir=null",  # rank 0 has written the configuration
        f"hydra.job.name={_quoted(f'{job.job.name}_rank_{rank}')}",  # the name of the log file
    ]


def _quoted(text: str) -> str:
    """Return `text` as a string in the grammar of Hydra's overrides."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
