"""The program that calls fit: connect to Ray, start the actors, wait for them, and find the cause of a failure.

When one process fails, the others are ended within seconds, and the root error is raised, not that of a rank whose
connection broke because another one had failed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ray
from attrs import define, evolve, frozen
from ray import cloudpickle
from ray._private import services
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stratagem.api import World
from stratagem.distributed.process_variables import process_variables
from stratagem.distributed.rendezvous import LOOPBACK
from stratagem.errors import ConfigError, LaunchError, StratagemError
from stratagem_launchers_local.reports import Report, as_error
from stratagem_ray.placement import Request
from stratagem_ray.worker import Answer, Place, Worker

#: Seconds that Ray may take to start the actors, which import stratagem.
START_S = 120.0

#: Seconds that a cluster may take to answer.
ANSWER_S = 10.0

#: Seconds in which the cause may arrive after an error that only follows from it: Ray notices a lost actor later.
NOTICE_S = 10.0


def pack(main: Any) -> bytes:
    """Return `main` with everything it refers to; classes and functions of the program by value.

    Raises:
        ConfigError: something in it cannot be pickled.
    """
    try:
        packed: bytes = cloudpickle.dumps(main)
    except Exception as error:
        raise ConfigError(
            f"the module, a callback or a loader cannot be sent to a Ray actor ({error})",
            expected="everything to pickle", do="open files, locks and connections in a hook such as setup()",
        ) from error  # fmt: skip
    return packed


def connect(address: str | None) -> None:
    """Connect this program to a Ray cluster, unless it is; start a local cluster if there is none and none was named.

    Raises:
        ConfigError: no cluster answers at the address, or this program is connected to another one.
    """
    if ray.is_initialized():
        _check_connected_to(address)
        return
    option, found = _address(address)
    if found not in (None, "local") and _answers(found):
        ray.init(address=found, logging_level=logging.WARNING)
    elif option is None or found == "local":
        _start_local_cluster()
    else:
        raise ConfigError(
            f"{option} is {address if found is None else found!r}, and no Ray cluster answers within {ANSWER_S:g} s",
            expected="the address of a running cluster",
            do="start one with `ray start --head`, or leave the address out to start one on this machine",
        )


def _address(address: str | None) -> tuple[str | None, str | None]:
    """Return which option or variable names a cluster, None if nothing does; and the address of the cluster to try."""
    if address not in (None, "auto"):
        return "launcher.ray.address", address
    if named := os.environ.get("RAY_ADDRESS"):
        return "RAY_ADDRESS", named
    # What `ray start` wrote on this machine. ray.init reads it too, and waits for minutes if that cluster has ended.
    return None if address is None else "launcher.ray.address", services.find_bootstrap_address(None)


def _answers(address: str) -> bool:
    """Whether a cluster answers at `address`. ray.init would try again for minutes."""
    client, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError):
        return False
    return bool(client) or _is_cluster(place)


def _is_cluster(address: str) -> bool:
    """Whether what listens at `address` is a Ray cluster: another server might never answer."""
    found: list[GcsClient] = []

    def ask() -> None:
        with contextlib.suppress(RayError):
            found.append(GcsClient(address=address))

    thread = threading.Thread(target=ask, daemon=True, name="stratagem-ray")
    thread.start()
    thread.join(ANSWER_S)
    return bool(found)


def _start_local_cluster() -> None:
    ray.init(address="local", logging_level=logging.WARNING, include_dashboard=False)
    cpus = ray.cluster_resources().get("CPU", 0)
    print(f"no Ray cluster was found: started one on this machine, with {cpus:g} CPUs, until the program ends")


def _check_connected_to(address: str | None) -> None:
    there = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", there):
        raise ConfigError(
            f"launcher.ray.address is {address!r} and this program is connected to the Ray cluster at {there}",
            expected="one cluster", do="leave address out, or call ray.shutdown() first",
        )  # fmt: skip


# --- Actors ------------------------------------------------------------------------------------------------------


@frozen
class Actor:
    """An actor and its rank."""

    rank: int
    handle: Any
    place: Place

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.place.address} (pid {self.place.pid})"


def run_actors(packed: bytes, request: Request, group: Any, world: World, runtime_env: Mapping[str, Any]) -> Any:
    """Call the `packed` function in one actor for each rank of `world`; return rank 0's result.

    Raises:
        StratagemError: of the class that the failing process raised, or `LaunchError`; its note holds the traceback.
    """
    handles: list[Any] = []
    try:
        handles += _start(request, group, runtime_env)
        actors = _located(handles)
        hosted = _with_store(world, actors, request)
        folder = None if "working_dir" in runtime_env else os.getcwd()
        code = ray.put(packed)
        pending = {}
        for actor in actors:
            place = _world_of(actor.rank, hosted)
            gpus = [
                gpu
                for other in actors[place.rank - place.local_rank :][: place.local_world_size]
                for gpu in other.place.gpus
            ]
            pending[actor.handle.run.remote(code, _variables(place), gpus, folder)] = actor
        return _unpack(_Outcome(pending).wait())
    finally:
        for handle in handles:
            ray.kill(handle)


def _start(request: Request, group: Any, runtime_env: Mapping[str, Any]) -> Iterator[Any]:
    resources = dict(request.each)
    options: dict[str, Any] = {
        "num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources,
        "runtime_env": dict(runtime_env) or None, "max_restarts": 0,
    }  # fmt: skip
    for rank in range(request.num_nodes * request.processes_per_node):
        node = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank // request.processes_per_node)
        yield ray.remote(Worker).options(scheduling_strategy=node, **options).remote(rank)


def _located(handles: list[Any]) -> list[Actor]:
    """Return the actors with their places, once all of them have started."""
    try:
        places = ray.get([handle.place.remote() for handle in handles], timeout=START_S)
    except RayError as error:
        raise LaunchError(
            f"an actor of launcher 'ray' could not start ({_first_line(error)})",
            do="install the same versions of stratagem, stratagem-ray and Python on all machines of the cluster, and "
            "check launcher.ray.runtime_env",
        ) from error
    return [Actor(rank, handle, place) for rank, (handle, place) in enumerate(zip(handles, places, strict=True))]


def _with_store(world: World, actors: list[Actor], request: Request) -> World:
    """Return the world with the address and port of the store, which rank 0's process hosts."""
    several = request.num_nodes > 1
    address = actors[0].place.address if several else LOOPBACK
    port = ray.get(actors[0].handle.reserve_store.remote(address, several))
    return evolve(world, main_address=address, main_port=port, store_hosted=True)


def _world_of(rank: int, first: World) -> World:
    node, local = divmod(rank, first.local_world_size)
    return evolve(first, rank=rank, node_rank=node, local_rank=local)


def _variables(world: World) -> dict[str, str]:
    """Return the variables of one process: its ranks, and the settings of this program that are variables."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("STRATAGEM_")}
    return ours | process_variables(world)


# --- Outcome -----------------------------------------------------------------------------------------------------


@define
class _Outcome:
    """Collects what the actors answer until all have, or until the cause of a failure is known."""

    #: Ray's references to the answers that have not arrived.
    pending: dict[Any, Actor]

    def wait(self) -> Answer:
        """Return rank 0's answer. Raise the root error if a process failed."""
        answers: list[Answer] = []
        failures: list[BaseException] = []
        echoes: list[BaseException] = []
        codes: set[str] = set()
        deadline: float | None = None
        while self.pending and not failures:
            for reference, actor in self._ready(deadline):
                answer = _answer(reference, actor)
                if isinstance(answer, StratagemError):
                    failures.append(answer)
                elif answer.failure is None:
                    answers.append(answer)
                elif answer.failure["type"] == SystemExit.__name__:
                    codes.add(answer.failure["message"])
                    echoes.insert(0, _as_error(answer.failure, actor))  # a cause, unless all ranks exit
                elif answer.failure["is_echo"]:
                    echoes.append(_as_error(answer.failure, actor))
                else:
                    failures.append(_as_error(answer.failure, actor))
            if echoes and deadline is None:
                deadline = time.monotonic() + NOTICE_S
            if deadline is not None and time.monotonic() > deadline:
                break
        if failures or echoes:
            raise _cause(failures, echoes, codes, finished=not self.pending and not answers)
        return min(answers, key=lambda answer: answer.rank)

    def _ready(self, deadline: float | None) -> Iterable[tuple[Any, Actor]]:
        limit = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(self.pending), timeout=limit)
        return [(reference, self.pending.pop(reference)) for reference in ready]


def _cause(
    failures: list[BaseException], echoes: list[BaseException], codes: set[str], finished: bool
) -> BaseException:
    if failures:
        return failures[0]
    if finished and len(codes) == 1 and (code := min(codes)).isdecimal():
        return SystemExit(int(code))  # all ranks called sys.exit with this code
    return echoes[0]


def _answer(reference: Any, actor: Actor) -> Answer | StratagemError:
    """Return what `actor` answered; an error if it is lost."""
    try:
        answer: Answer = ray.get(reference)
    except RayError as error:
        return _lost(actor, error)
    return answer


def _lost(actor: Actor, error: RayError) -> LaunchError:
    died = isinstance(error, RayActorError)
    what = "died and left no error report" if died else f"failed in Ray with {_first_line(error)}"
    if "node has died" in str(error).lower():
        what = "was lost with its machine"
    lost = LaunchError(
        f"{actor} {what}",
        do="check its output, and the kernel log of that machine for an out-of-memory kill",
    )
    lost.add_note(f"Ray tells of {actor}:\n{error}")
    return lost


def _as_error(failure: Mapping[str, Any], actor: Actor) -> StratagemError:
    """Return the error that a process reported, with its place."""
    error = as_error(Report(**failure))
    error.add_note(f"by {actor}")
    return error


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _unpack(answer: Answer) -> Any:
    import torch

    if answer.result is None:
        raise SystemExit(0)  # rank 0 called sys.exit in `main`: do the same here
    # Our own actor made it. On the CPU: this machine may have other devices.
    return torch.load(io.BytesIO(answer.result), map_location="cpu", weights_only=False)
