"""A PyTorchJob for Kubeflow's training operator: one pod for each node, in which torchrun starts the processes.

The operator tells torchrun in each pod, by variables with the prefix PET_, the number of nodes and processes, the pod's
rank and the address of the first pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from attrs import evolve, frozen

from stratagem.errors import ConfigError
from stratagem_run.options import cli_option
from stratagem_run.program import Program
from stratagem_run.quantities import parse_memory, parse_time
from stratagem_run.targets.base import Target

#: The operator finds the container by this name.
_CONTAINER = "pytorch"


@frozen(kw_only=True, slots=False)
class Kubernetes(Target):
    """Runs in the working directory of the image, in which the script must be."""

    title = "kubernetes"
    command = ("kubectl", "apply", "-f", "-")
    machine = "a machine with access to a Kubernetes cluster"

    launcher: Literal["torchrun"] = cli_option("", default="torchrun")
    image: str | None = cli_option("the image of the pods; it contains the script, Python and torch", "IMAGE")
    namespace: str | None = cli_option("the namespace of the job", "NAME")

    def program(self, program: Program, *, python_given: bool) -> Program:
        return program if python_given else evolve(program, python="python")

    def render(self, program: Program) -> str:
        import yaml

        return yaml.safe_dump(self.manifest(program), sort_keys=False, allow_unicode=True)

    def manifest(self, program: Program) -> dict[str, Any]:
        """Return the PyTorchJob.

        Raises:
            ConfigError: no image is set, or the name is not one that Kubernetes accepts.
        """
        name = self.name or program.title
        _check_label("--name", name)
        if self.namespace is not None:
            _check_label("--namespace", self.namespace)
        policy = None if self.time is None else int(parse_time(self.time).total_seconds())
        workers = (self.nodes or 1) - 1
        replicas = {"Master": 1} | ({"Worker": workers} if workers else {})
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name} | ({"namespace": self.namespace} if self.namespace else {}),
            "spec": {
                "nprocPerNode": str(self.processes),
                "runPolicy": {"cleanPodPolicy": "None"} | ({"activeDeadlineSeconds": policy} if policy else {}),
                "pytorchReplicaSpecs": {role: self._replica(count, program) for role, count in replicas.items()},
            },
        }

    def _replica(self, count: int, program: Program) -> dict[str, Any]:
        return {
            "replicas": count,
            "restartPolicy": "OnFailure" if self.requeue else "Never",
            "template": {"spec": self._pod(program)},
        }

    def _pod(self, program: Program) -> dict[str, Any]:
        if self.image is None:
            raise ConfigError("--image is not set", expected="the image of the pods", do="add --image NAME")
        variables = [{"name": name, "value": literal(value)} for name, value in program.variables.items()]
        container: dict[str, Any] = {
            "name": _CONTAINER,
            "image": self.image,
            "command": [literal(word) for word in program.under("torch.distributed.run")],
            **({"env": variables} if variables else {}),
            **({"resources": {"limits": limits}} if (limits := self._limits()) else {}),
            # Workers of data loaders pass tensors through it; containers have 64 MB by default.
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - a fixed path of Linux
        }
        return {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}

    def _limits(self) -> Mapping[str, str]:
        limits = {
            "nvidia.com/gpu": self.gpus,
            "cpu": self.cpus and self.cpus * self.processes,
            "memory": self.memory and "{}{}i".format(*parse_memory(self.memory)),
        }
        return {name: str(amount) for name, amount in limits.items() if amount is not None}


def literal(text: str) -> str:
    """Return `text` so that Kubernetes does not replace references such as ``$(HOME)`` in it."""
    return text.replace("$", "$$")


def _check_label(option: str, name: str) -> None:
    # The operator appends "-worker-" and a number to the name.
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name, re.ASCII) or len(name) > 50:
        raise ConfigError(
            f"{option} is {name!r}", expected="at most 50 lower-case letters, digits and dashes, a letter first",
            do=f"pass for example {option} train",
        )  # fmt: skip
