"""`Run`: a resolved stack of plugins for a training loop of your own.

run = sg.Run(strategy="ddp", precision="bf16-mixed", devices=2)

def main(run):
    model, optimizer = run.setup(model, optimizer)
    for batch in run.dataloader(loader):
        loss = model(batch)
        run.backward(loss)
        run.optimizer_step(optimizer)
        optimizer.zero_grad()
    run.save("last.ckpt", model=model, optimizer=optimizer)

run.launch(main)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stratagem.config.environment import warn_of_trainer_variables
from stratagem.config.settings import RunSettings, gather, remember_arguments
from stratagem.runtime import launching, state_io
from stratagem.runtime.context import Context
from stratagem.runtime.handles import LoaderHandle, ModelHandle

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Literal

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from stratagem.api.kinds import (
        Accelerator,
        CheckpointFormat,
        CommHook,
        Environment,
        Launcher,
        Precision,
        Strategy,
    )
    from stratagem.api.world import Collectives, Mesh, World
    from stratagem.config.settings import NameOr
    from stratagem.stack.plugins import Stack


class Run:
    """A resolved stack of plugins; every argument is documented in `stratagem.config.settings.RunSettings`.

    Raises:
        ConfigError, PluginError: the choices cannot work together; raised here, before any process starts.
    """

    @remember_arguments(RunSettings)
    def __init__(
        self,
        settings: RunSettings | None = None,
        /,
        *,
        accelerator: NameOr[Accelerator] = "auto",
        devices: int | str | Sequence[int | str] = "auto",
        num_nodes: int = 1,
        strategy: NameOr[Strategy] | Sequence[NameOr[Strategy]] = "auto",
        precision: NameOr[Precision] | int | None = None,
        comm_hook: NameOr[CommHook] | Sequence[NameOr[CommHook]] | None = None,
        environment: NameOr[Environment] = "auto",
        launcher: NameOr[Launcher] | None = None,
        checkpoint: NameOr[CheckpointFormat] | None = None,
        activation_checkpointing: Collection[type | str] | Mapping[str, Any] | Callable[..., Any] | None = None,
        compile: bool | str | Mapping[str, Any] | None = None,  # noqa: A002 - torch's name for it
        plugins: Any = (),
        lock: str | Path | None = None,
        default_root_dir: str | Path | None = None,
        use_distributed_sampler: bool = True,
        sync_batchnorm: bool = False,
        deterministic: bool | Literal["warn"] = False,
        float32_matmul_precision: Literal["highest", "high", "medium"] | None = None,
    ) -> None:
        self._given: dict[str, Any]
        if settings is None:
            warn_of_trainer_variables()
        #: What hooks receive as `run`.
        self.context = Context(settings if settings is not None else gather(RunSettings, self._given))

    # --- World and devices ---------------------------------------------------------------------------------------

    @property
    def settings(self) -> RunSettings:
        """The arguments, with where each came from."""
        return self.context.settings

    @property
    def stack(self) -> Stack:
        """The resolved plugins."""
        return self.context.stack

    @property
    def world(self) -> World | None:
        """This process's place among all processes; None before they connect."""
        return self.context.world

    @property
    def rank(self) -> int:
        """This process's rank, from 0; 0 before they connect."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of processes; 1 before they connect."""
        return self.context.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has rank 0."""
        return self.context.is_global_zero

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.context.device

    @property
    def collectives(self) -> Collectives:
        """Collective operations over all ranks."""
        return self.context.collectives

    @property
    def mesh(self) -> Mesh:
        """How the strategy arranges the processes."""
        return self.context.mesh

    def ask(self, hook: str, **arguments: Any) -> Any:
        """Call an answer hook, such as ``model_state``, and return the answer."""
        return self.context.ask(hook, **arguments)

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank 0 only."""
        self.context.print(*values, **options)

    def explain(self) -> str:
        """Return the resolved stack as a tree: plugins, packages, options and where they came from, hooks."""
        return self.context.explain()

    # --- Processes -----------------------------------------------------------------------------------------------

    def launch(self, main: Callable[[Run], Any]) -> Any:
        """Start the processes of this node, call ``main(run)`` in each, and return rank 0's result.

        Where the processes exist already (torchrun, a scheduler, an earlier launch), only call `main`.
        """
        return launching.launch(self.context, _Main(self, main))

    def connect(self) -> None:
        """Determine this process's rank and join the others; once per process, further calls do nothing."""
        self.context.connect()

    def close(self) -> None:
        """Call `teardown` of the plugins, then close the collectives. Safe to call twice."""
        self.context.close()

    def __enter__(self) -> Run:
        self.connect()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        cause = launching.explained(error, self.context) if error is not None and self.context.connected else error
        self.close()
        if cause is not None and cause is not error:
            raise cause from cause.__cause__

    # --- The model -----------------------------------------------------------------------------------------------

    def init_context(self, empty: bool = False) -> AbstractContextManager[None]:
        """Enter the contexts under which modules are to be built; `empty` ones get their values in `setup`."""
        return self.context.init_context(empty)

    def setup(self, module: nn.Module, *optimizers: Optimizer) -> Any:
        """Prepare a module and its optimizers for a loop of your own.

        Returns:
            A callable that stands for the module, and the optimizers to step: ``(model, *optimizers)``, or just the
            model when no optimizer was given. Optimizers are re-pointed by name if the strategy replaces parameters.
        """
        self.connect()
        run = self.context
        run.prepare(module, (lambda: list(optimizers)) if optimizers else None, optimizers_from="the caller of setup")
        handle = ModelHandle(run, module)
        return (handle, *run.optimizers) if optimizers else handle

    def dataloader(self, loader: Any, stage: str = "train") -> Any:
        """Return an iterable over this process's share of `loader`, its batches on the device."""
        self.connect()
        return LoaderHandle(self.context, self.context.share(loader, stage))

    # --- The step ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally within this block; the next step outside it sends them."""
        run = self.context
        before, run.sync_gradients = run.sync_gradients, False
        try:
            yield
        finally:
            run.sync_gradients = before

    def backward(self, loss: Tensor) -> None:
        """Scale `loss` through the precision, and differentiate it through the strategy."""
        self.context.step.backward(loss)

    def clip_gradients(
        self, optimizer: Optimizer, max_norm: float | None = None, max_value: float | None = None
    ) -> Any:
        """Clip by norm or by value (one of the two); return the norm before clipping, or 0.0 by value.

        Raises:
            ConfigError: not one limit, or complex gradients by value.
        """
        return self.context.step.clip_gradients(optimizer, max_norm, max_value)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Tensor] | None = None) -> bool:
        """Step; return False if the precision skipped it because gradients overflowed."""
        return self.context.step.optimizer_step(optimizer, closure)

    # --- Files ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, model: Any, optimizer: Any = (), **values: Any) -> None:
        """Write a checkpoint that any strategy can read: weights, optimizers, states of plugins, and `values`.

        All ranks call it.
        """
        state_io.save(self.context, path, model=model, optimizer=optimizer, **values)

    def load(self, path: str | Path, *, model: Any, optimizer: Any = (), strict: bool = True) -> dict[str, Any]:
        """Read what `save` (or a Trainer) wrote into `model` and `optimizer`; return the extra values."""
        return state_io.load(self.context, path, model=model, optimizer=optimizer, strict=strict)


class _Main:
    """The user's function, called with its `Run`; pickled where the launcher needs that."""

    def __init__(self, run: Run, main: Callable[[Run], Any]) -> None:
        self.run, self.main = run, main

    def __call__(self, context: Context) -> Any:
        self.run.context = context
        return self.main(self.run)
