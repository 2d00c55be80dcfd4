"""Hooks that no strategy answers; `docs/hooks.md` has all hooks in the order of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.api.markers import hookspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn

    from stratagem.api.context import RunContext
    from stratagem.api.run_parts import Materializer
    from stratagem.api.world import World


@hookspec(firstresult=True)
def setup_environment(run: RunContext) -> World:
    """Answer (environment): the ranks of this process. The first hook of every process; nothing is connected yet.

    Also called in the process that the user started, before `launch`: the answer is then the `World` of local rank 0,
    with ``main_port=None`` if no port is chosen yet. Raise `ConfigError` if the processes found are not those that
    ``run.settings`` requests (``run.num_processes`` on this node, ``run.settings.num_nodes`` nodes).
    """


@hookspec(firstresult=True)
def launch(main: Callable[[], Any], run: RunContext) -> Any:
    """Answer (launcher): start ``run.num_processes`` processes, call `main` in each, return the result of rank 0.

    Called once, in the process that the user started, unless all processes exist already
    (`Environment.processes_exist`); ``run.world`` is that of local rank 0. With `Launcher.starts_all_nodes` it starts
    the processes of all nodes, and ``run.world`` follows from the settings. Set the variables of
    `stratagem.distributed.process_variables` for every started process. Only this answer may be None: `main` is the
    user's function.
    """


@hookspec(firstresult=True)
def materializer(module: nn.Module, run: RunContext) -> Materializer:
    """Answer: a `Materializer` for `module`, which was built on the meta device (``empty``). Collective.

    Called for ``run.materializer(module)``. The values depend only on rank 0's seed and the names of parameters, not
    on the rank that initializes them.
    """


@hookspec(firstresult=True)
def scale_loss(loss: Tensor, run: RunContext) -> Tensor:
    """Answer (precision): the loss to differentiate. Default: unchanged."""


@hookspec(firstresult=True)
def save_checkpoint(state: dict[str, Any], path: Path, run: RunContext) -> bool:
    """Answer (checkpoint format): write `state` to `path` atomically; return True. Called on all ranks."""


@hookspec(firstresult=True)
def load_checkpoint(path: Path, run: RunContext) -> dict[str, Any]:
    """Answer (checkpoint format): read and verify `path`.

    Tensors of the model and the optimizers may be mapped from the file, as `stratagem_checkpoints.mapped_file` does it.
    """


@hookspec(firstresult=True)
def explain_error(error: BaseException, run: RunContext) -> BaseException:
    """Answer: the error to raise in place of `error`, which ends the run on this rank. Default: `error`.

    Called once for each error, after `on_exception`. Other ranks may be gone: no collectives here.
    """
