"""Start the processes of a run and call a function in each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import define

from stratagem.api.seeding import random_state, restore_random_state
from stratagem.api.world import World
from stratagem.discovery import registry

if TYPE_CHECKING:
    from torch import nn

    from stratagem.runtime.context import Context

R = TypeVar("R", bound="Context")

#: Set by ``stratagem explain``: show the first stack that would be launched, and stop.
EXPLAIN_VARIABLE = "STRATAGEM_EXPLAIN"

#: Attribute of an error that has been through `explained`: calls of a run may be nested.
_EXPLAINED = "_explained_by_stratagem"


def launch(run: R, main: Callable[[R], Any], module: nn.Module | None = None) -> Any:
    """Start the processes of this node, call ``main(run)`` in each, and return rank 0's result.

    Where the processes exist already (torchrun, a scheduler, an earlier launch), only call `main`.

    Args:
        module: the one to train, if it is known yet: for ``stratagem explain``.
    """
    if EXPLAIN_VARIABLE in os.environ:
        _explain_and_stop(run, module)
    if run.connected:
        return run_main(run, main)
    body = _ProcessBody(run, main)
    environment, launcher = run.stack.environment.plugin, run.stack.launcher.plugin
    alone = run.num_processes * run.stack.num_nodes == 1 and launcher.parent_trains
    if environment.processes_exist() or alone:
        return body()
    run.world = _whole_world(run, run.settings.num_nodes) if launcher.starts_all_nodes else _world_here(run)
    if not launcher.parent_trains:
        body.is_worker, body.random_state = True, random_state()
    return run.hooks.hook.launch(main=body, run=run)


def _world_here(run: Context) -> World:
    """Return the world of local rank 0 of this node, which can resolve the address of the store."""
    from stratagem.distributed.rendezvous import check_address

    world: World = run.ask("setup_environment")
    check_address(world, run.stack.timeouts().start.total_seconds())
    return world


def _whole_world(run: Context, num_nodes: int) -> World:
    """Return the world of rank 0 without an address: that, and the machines, a launcher may choose."""
    return World(world_size=run.num_processes * num_nodes, local_world_size=run.num_processes, num_nodes=num_nodes)


def run_main(run: R, main: Callable[[R], Any]) -> Any:
    """Return what ``main(run)`` returns; if another rank makes it fail, say which one and how."""
    run.collectives.failed = False
    try:
        return main(run)
    except BaseException as error:
        cause = explained(error, run)
        if cause is error:
            raise
        raise cause from cause.__cause__


def explained(error: BaseException, run: Context) -> BaseException:
    """Return the error to raise in place of `error`: the answer of plugins, which are called once for each error."""
    if _EXPLAINED in vars(error):
        return error
    run.collectives.failed = True
    cause: BaseException = run.ask("explain_error", error=error)
    vars(cause)[_EXPLAINED] = True
    return cause


def _explain_and_stop(run: Context, module: nn.Module | None) -> None:
    from stratagem.runtime.connection import peers_world_of

    layout = run.strategy.layout(peers_world_of(run.stack, _whole_world(run, run.stack.num_nodes)), module)
    registry.find("command", "explain").load().show(run, layout, os.environ[EXPLAIN_VARIABLE])
    raise SystemExit(0)


@define
class _ProcessBody:
    """What runs in each process; pickled where the launcher needs that."""

    run: Context
    main: Callable[[Any], Any]
    #: The launcher does not train in its own process, and gets what this one returns.
    is_worker: bool = False
    #: The launching process's, so that a seed set there holds here.
    random_state: dict[str, Any] | None = None

    def __call__(self) -> Any:
        run = self.run
        run.is_worker = self.is_worker
        run.stack.launcher.plugin.enter_process()
        run.connect()
        if self.random_state is not None:
            restore_random_state(self.random_state, run.devices)
        try:
            return run_main(run, self.main)
        finally:
            if run.is_worker:
                run.close()
