"""Processes that horovodrun started, with gloo: it sets HOROVOD_RANK and others."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from attrs import define

from stratagem.api import Confidence, Environment, Evidence, World, hookimpl
from stratagem.distributed.process_variables import launched_world, was_launched
from stratagem.errors import ConfigError
from stratagem_horovod.variables import ALL, LOCAL_SIZE, NUM_HOSTS, RANK, SIZE, maybe, read_place, seen

if TYPE_CHECKING:
    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class HorovodEnvironment(Environment):
    """Processes that ``horovodrun --gloo`` started. Every strategy can train in them, not only that of Horovod.

    Rank 0 chooses a free port for its store, and the others learn it from the rendezvous server of horovodrun.
    """

    precedence = 90

    def detect(self) -> Evidence | None:
        if RANK not in os.environ and SIZE not in os.environ:
            return None
        missing = [name for name in ALL if name not in os.environ]
        return Evidence(
            seen(os.environ, (RANK, SIZE)) + (f" and {', '.join(missing)} not set" if missing else ""),
            Confidence.PARTIAL if missing else Confidence.CERTAIN,
            rank=maybe(os.environ, RANK),
            world_size=maybe(os.environ, SIZE),
        )

    def processes_exist(self) -> bool:
        return RANK in os.environ or was_launched(os.environ)

    def local_processes(self) -> int | None:
        return maybe(os.environ, LOCAL_SIZE) or None

    def num_nodes(self) -> int | None:
        return maybe(os.environ, NUM_HOSTS) or None

    @hookimpl
    def setup_environment(self, run: RunContext) -> World:
        if was_launched(os.environ):
            return launched_world(os.environ, run.num_processes)
        if self.detect() is None:
            raise ConfigError(
                "environment is 'horovod', and none of its variables is set", expected="a process of horovodrun",
                do='start the program with horovodrun, or leave environment at "auto"',
            )  # fmt: skip
        place = read_place(os.environ)
        if run.stack.devices_given and run.num_processes != place.local_world_size:
            raise ConfigError(
                f"devices is {run.settings.devices!r} and {LOCAL_SIZE} is '{place.local_world_size}'",
                expected="one process for each device",
                do=f'leave devices at "auto", or start horovodrun with {run.num_processes} slots on each host',
            )
        if run.settings.num_nodes not in (1, place.num_nodes):  # 1 is the default
            raise ConfigError(
                f"num_nodes is {run.settings.num_nodes} and {NUM_HOSTS} is '{place.num_nodes}'",
                expected="the same number", do="leave num_nodes out: horovodrun sets it",
            )  # fmt: skip
        from stratagem_horovod.address import with_address  # it needs sockets and a store

        return with_address(place, os.environ, run.stack.timeouts().start.total_seconds())
