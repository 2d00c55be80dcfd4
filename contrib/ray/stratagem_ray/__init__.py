"""Launch the processes of a run as actors on the machines of a Ray cluster, and return rank 0's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from stratagem.api import DEVICE_CUDA, Launcher, hookimpl
from stratagem.api.validators import at_least, more_than
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem_ray.placement import Request


@define(eq=False, kw_only=True)
class RayLauncher(Launcher):
    """Starts one actor for each process, on an existing Ray cluster or on a local one if none is found.

    The actors end with each call: a second fit starts new ones. Classes and functions of the script are sent with
    cloudpickle, so it needs no ``if __name__ == "__main__":``.
    """

    parent_trains = False
    starts_all_nodes = True

    #: Address of the cluster, such as "10.0.0.1:6379". None: the one that this program is connected to, that
    #: RAY_ADDRESS names or that runs on this machine; if there is none, a local cluster is started. "auto": the same,
    #: but an error if there is none.
    address: str | None = None
    #: Where the nodes of the run are placed. STRICT_SPREAD: each on a machine of its own. SPREAD: so, as far as
    #: possible. PACK: on as few machines as possible. STRICT_PACK: all on one. A node's processes are always together.
    placement: Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"] = "STRICT_SPREAD"
    #: CPUs that Ray reserves for each process; it also sets the number of threads. More, if the loaders have workers.
    num_cpus: int = field(default=1, validator=at_least(0))
    #: GPUs that Ray reserves for each process. None: one if the run trains on GPUs, otherwise none.
    num_gpus: int | None = field(default=None)
    #: Other resources that Ray reserves for each process, by name, to choose machines that have them.
    resources: dict[str, float] = field(factory=dict)
    #: Ray's runtime environment of the actors: working_dir, py_modules, env_vars, pip ... It takes time to install.
    runtime_env: dict[str, Any] = field(factory=dict)
    #: Seconds to wait until other jobs free the resources. What the cluster does not have at all is an error at once.
    placement_timeout: float = field(default=30.0, validator=more_than(0))

    @hookimpl
    def launch(self, main: Callable[[], Any], run: RunContext) -> Any:
        from stratagem_ray import driver, placement

        assert run.world is not None, "a launcher starts the processes of a world"
        request = self._request(run)
        packed = driver.pack(main)
        driver.connect(self.address)
        with placement.reserved(request, self.placement_timeout) as group:
            return driver.run_actors(packed, request, group, run.world, self.runtime_env)

    def _request(self, run: RunContext) -> Request:
        from stratagem_ray.placement import Request

        assert run.world is not None
        for name, option in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
            if name in self.resources:
                raise ConfigError(
                    f"launcher.ray.resources names {name}",
                    expected="other resources",
                    do=f"set launcher.ray.{option} instead",
                )
        each = {"CPU": float(self.num_cpus), "GPU": float(self._gpus(run)), **self.resources}
        each = {name: amount for name, amount in each.items() if amount}
        if not each:
            raise ConfigError(
                "launcher.ray.num_cpus is 0 and no other resource is asked for",
                expected="something for Ray to reserve", do="leave num_cpus out, or set num_gpus or resources",
            )  # fmt: skip
        return Request(each, run.world.local_world_size, run.world.num_nodes, self.placement)

    def _gpus(self, run: RunContext) -> int:
        """Return how many GPUs each process gets."""
        uses_cuda = DEVICE_CUDA in run.accelerator.capabilities.provides
        if self.num_gpus and not uses_cuda:
            raise ConfigError(
                f"launcher.ray.num_gpus is {self.num_gpus} and the accelerator is {type(run.accelerator).__name__}",
                expected="GPUs only for a run that uses them; they are looked for in the process that calls fit",
                do='set accelerator="cuda" on a machine that has GPUs as the others do, or leave num_gpus out',
            )
        if not uses_cuda:
            return 0
        if self.num_gpus == 0:
            raise ConfigError(
                "launcher.ray.num_gpus is 0 and the run trains on GPUs",
                expected="at least 1: Ray hides the GPUs otherwise", do='leave it out, or set accelerator="cpu"',
            )  # fmt: skip
        devices = run.settings.devices
        if isinstance(devices, list | tuple) or (isinstance(devices, str) and "," in devices):
            raise ConfigError(
                f"devices is {devices!r} and the launcher is 'ray', which chooses the GPUs", expected="a number",
                do="set devices to the number of processes on each node",
            )  # fmt: skip
        return 1 if self.num_gpus is None else self.num_gpus
