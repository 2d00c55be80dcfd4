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
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stratagem.config.settings import PREFIX, RunSettings, gather, option_names, remember_arguments
from stratagem.discovery import registry
from stratagem.errors import shown
from stratagem.runtime import launching, state_io
from stratagem.runtime.context import Context
from stratagem.runtime.handles import LoaderHandle, ModelHandle

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path
    from typing import Literal

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from stratagem.api.kinds import Accelerator, CheckpointFormat, Environment, Launcher, Plugin, Precision, Strategy
    from stratagem.config.settings import NameOr


class Run(Context):
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
        comm_hook: NameOr[Plugin] | Sequence[NameOr[Plugin]] | None = None,
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
            _warn_of_trainer_variables()
        super().__init__(settings if settings is not None else gather(RunSettings, self._given))
        self._own = frozenset(vars(self))

    def __getstate__(self) -> dict[str, Any]:
        added = {name: value for name, value in vars(self).items() if name not in self._own}
        return super().__getstate__() | added  # what the user keeps in it, too

    # --- Processes -----------------------------------------------------------------------------------------------

    def launch(self, main: Callable[[Run], Any]) -> Any:
        """Start the processes of this node, call ``main(run)`` in each, and return rank 0's result.

        Where the processes exist already (torchrun, a scheduler, an earlier launch), only call `main`.
        """
        return launching.launch(self, main)

    def plan(self, main: Callable[[Run], Any], **options: Any) -> dict[str, Any]:
        """Return what two optimizer steps of ``main(run)`` need on devices that are not here: see docs/planner.md.

        Forked processes call `main`, with tensors without values; this one, its models and its files stay as they are.

        Args:
            options: those of `stratagem plan`: ``devices=8`` of a node, ``nodes=2``, ``device="h100-sxm-80gb"``,
                ``device_file``, and ``assume={"train.py:30": 12}``.

        Returns:
            What ``stratagem plan --json`` writes: ``plan["classes"][0]["peak"]`` is in bytes.

        Raises:
            ConfigError: the run refuses these devices, it cannot be planned, or this process has computed gradients.
            PluginError: stratagem-plan is not installed.
        """

        def train() -> None:
            Context.__init__(self, self.settings)
            self.launch(main)

        command = registry.find("command", "plan").load()
        planned: dict[str, Any] = command.of(self.settings, train, shown(main), options)
        return planned

    def __enter__(self) -> Run:
        self.connect()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        cause = launching.explained(error, self) if error is not None and self.connected else error
        self.close()
        if cause is not None and cause is not error:
            raise cause from cause.__cause__

    # --- The model -----------------------------------------------------------------------------------------------

    def setup(self, module: nn.Module, *optimizers: Optimizer) -> Any:
        """Prepare a module and its optimizers for a loop of your own.

        Returns:
            A callable that stands for the module, and the optimizers to step: ``(model, *optimizers)``, or just the
            model when no optimizer was given. Optimizers are re-pointed by name if the strategy replaces parameters.
        """
        self.connect()
        self.prepare(module, (lambda: list(optimizers)) if optimizers else None, optimizers_from="the caller of setup")
        handle = ModelHandle(self, module)
        return (handle, *self.optimizers) if optimizers else handle

    def dataloader(self, loader: Any, stage: str = "train") -> Any:
        """Return an iterable over this process's share of `loader`, its batches on the device."""
        self.connect()
        return LoaderHandle(self, self.share(loader, stage))

    # --- The step ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally within this block; the next step outside it sends them."""
        before, self.sync_gradients = self.sync_gradients, False
        try:
            yield
        finally:
            self.sync_gradients = before

    def optimizer_step(
        self, optimizers: Optimizer | list[Optimizer], closure: Callable[[], Tensor] | None = None
    ) -> bool:
        """Make one step with an optimizer, or with several; return False if it was skipped: gradients overflowed."""
        return self.step.step_optimizers(optimizers if isinstance(optimizers, list) else [optimizers], closure)

    # --- Files ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, model: Any, optimizer: Any = (), **values: Any) -> None:
        """Write a checkpoint that any strategy can read: weights, optimizers, states of plugins, and `values`.

        All ranks call it.
        """
        state_io.save(self, path, model=model, optimizer=optimizer, **values)

    def load(self, path: str | Path, *, model: Any, optimizer: Any = (), strict: bool = True) -> dict[str, Any]:
        """Read what `save` (or a Trainer) wrote into `model` and `optimizer`; return the extra values."""
        return state_io.load(self, path, model=model, optimizer=optimizer, strict=strict)


def _warn_of_trainer_variables() -> None:
    """Warn of variables with arguments of a `Trainer`, which a `Run` does not read."""
    prefix = f"{PREFIX}TRAINER_"
    known = option_names(RunSettings)
    for variable in sorted(os.environ):
        name = variable.removeprefix(prefix).lower()
        if variable.startswith(prefix) and name in known:
            warnings.warn(
                f"the variable {variable} is set, which a Trainer reads and a Run does not; pass {name}= to Run",
                stacklevel=2,
            )
