"""A job of SLURM as a whole: its name, how often it was started again, and the command that starts it again."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem_environments_schedulers.variables import maybe


def job_name(variables: Mapping[str, str]) -> str | None:
    """Return what identifies the job, also after it was requeued; each task of an array is a job."""
    number = job_number(variables)
    parts = ("slurm", variables.get("SLURM_CLUSTER_NAME"), number)
    return None if number is None else " ".join(part for part in parts if part)


def job_number(variables: Mapping[str, str]) -> str | None:
    """Return the number of the job as scontrol takes it: ``12``, or ``12_3`` for task 3 of an array."""
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    # SLURM_JOB_ID of one task of an array is also the number of the array: scontrol would requeue all of its tasks.
    return f"{array}_{task}" if array and task else variables.get("SLURM_JOB_ID")


def num_restarts(variables: Mapping[str, str]) -> int:
    """Return how often SLURM has started the job again, after a requeue or because a node failed."""
    return maybe(variables, "SLURM_RESTART_COUNT") or 0


def requeue_command(variables: Mapping[str, str]) -> list[str] | None:
    """Return the command that starts the job again; None for the jobs of salloc and srun, which have no script."""
    number = job_number(variables)
    in_batch_job = variables.get("ENVIRONMENT") == "BATCH"  # SLURM sets it for scripts of sbatch
    return ["scontrol", "requeue", number] if number and in_batch_job else None
