"""Targets of ``--submit``: schedulers that start a job later, one class for each."""

from __future__ import annotations

from stratagem.errors import ConfigError, nearest
from stratagem_run.targets.base import Target
from stratagem_run.targets.kubernetes import Kubernetes
from stratagem_run.targets.lsf import Lsf
from stratagem_run.targets.slurm import Slurm

TARGETS: dict[str, type[Target]] = {"slurm": Slurm, "kubernetes": Kubernetes, "lsf": Lsf}


def target_of(name: str) -> type[Target]:
    """Return the target of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TARGETS:
        raise ConfigError(f"--submit is {name!r}", expected=", ".join(TARGETS), do=nearest(name, TARGETS))
    return TARGETS[name]
