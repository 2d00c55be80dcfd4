"""`ModuleAccess`: what a module reads and asks of the trainer that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError
from stratagem_trainer.device_mesh import device_mesh_of
from stratagem_trainer.optimizer_handle import handles_of

if TYPE_CHECKING:
    from stratagem.api.world import Collectives
    from stratagem_trainer.api.user_view import UserView
    from stratagem_trainer.fit_state import FitState

#: Properties that raise an error without a trainer, or without one that has them.
_OF_A_TRAINER = {"trainer", "_state", "device_mesh", "current_epoch", "global_step", "logger", "loggers"}


def _export(name: str) -> Any:
    """Return a method that refuses to export, and tells what does."""

    def refuse(self: nn.Module, *_: Any, **__: Any) -> None:
        found = f"{type(self).__name__}.{name}() was called"
        do = f"use {moved_names('exports').get(name, 'torch.export.export(module, ...)')}"
        raise ConfigError(found, expected="a function of a package that exports", do=do)

    return refuse


class ModuleAccess(nn.Module):
    """The trainer, this process, the other ranks, optimizers and schedulers."""

    def __dir__(self) -> list[str]:
        """Return names that can be read now: torch.jit.trace and `inspect` read all of them."""
        return [name for name in super().__dir__() if name not in _OF_A_TRAINER or self._has(name)]  # type: ignore[no-untyped-call]

    def _has(self, name: str) -> bool:
        try:
            getattr(self, name)
        except ConfigError:
            return False
        return True

    # --- The trainer -----------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> UserView:
        """The trainer that runs this module."""
        return self._state.trainer

    @property
    def _state(self) -> FitState:
        """The state of the trainer that runs this module."""
        state: FitState | None = self.__dict__.get("_fit")
        if state is None:
            raise ConfigError(f"{type(self).__name__}.trainer was read outside a trainer", do="call trainer.fit()")
        return state

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters, torch's default without any; or what the module has set."""
        own: torch.dtype | None = self.__dict__.get("_own_dtype")
        return own or next((parameter.dtype for parameter in self.parameters()), torch.get_default_dtype())

    @dtype.setter
    def dtype(self, value: torch.dtype) -> None:
        self.__dict__["_own_dtype"] = value

    #: Torch's DeviceMesh, for a `configure_model` that cuts layers: ``self.device_mesh["tensor"]``.
    device_mesh = property(device_mesh_of)

    @property
    def global_rank(self) -> int:
        """This process's rank; 0 outside a trainer."""
        state = self.__dict__.get("_fit")
        return 0 if state is None else state.trainer.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node; 0 outside a trainer."""
        state = self.__dict__.get("_fit")
        return 0 if state is None else state.trainer.local_rank

    @property
    def current_epoch(self) -> int:
        """The epoch being trained, from 0."""
        return self.trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return self.trainer.global_step

    @property
    def logger(self) -> Any:
        """The trainer's first logger, or None."""
        return self.trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """The trainer's loggers."""
        return self.trainer.loggers

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank 0 only."""
        self.trainer.print(*values, **options)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Return `data` with each tensor, number and bool replaced by those of all ranks, stacked in rank order.

        A tensor of shape (...) becomes one of shape (world_size, ...); in one process `data` is returned as it is.
        Collective: all ranks call it, with equal shapes.

        Args:
            data: a tensor or a number, or dicts, lists and tuples of them.
            sync_grads: gradients flow back to each rank's tensor; without it the result has none.
        """
        collectives = self.trainer.run.collectives
        return data if collectives.world_size == 1 else _gathered(data, collectives, sync_grads, self.device)

    # --- Parameters ------------------------------------------------------------------------------------------------

    def freeze(self) -> Self:
        """Switch to evaluation, and compute no gradients of any parameter; return this module."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        return self.eval()

    to_onnx, to_tensorrt, to_torchscript = _export("to_onnx"), _export("to_tensorrt"), _export("to_torchscript")

    def unfreeze(self) -> Self:
        """Switch to training, and compute gradients of all parameters; return this module."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        return self.train()

    # --- Optimizers and schedulers ---------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of them, to step by hand; each steps through strategy and precision.

        Args:
            use_pl_optimizer: False returns torch's optimizers.
        """
        handles: list[Any] = handles_of(self._state) if use_pl_optimizer else self.trainer.optimizers
        return handles[0] if len(handles) == 1 else handles

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Compute gradients of the parameters of `optimizer` only, until `untoggle_optimizer`.

        For several optimizers stepped by hand: parameters of the others get no gradients meanwhile.
        """
        self.untoggle_optimizer()
        every = [p for each in self.trainer.optimizers for group in each.param_groups for p in group["params"]]
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.__dict__["_toggled"] = list({id(each): (each, each.requires_grad) for each in every}.values())
        for parameter, _ in self.__dict__["_toggled"]:
            if id(parameter) not in own:
                parameter.requires_grad = False

    def untoggle_optimizer(self, optimizer: Any = None) -> None:
        """Undo `toggle_optimizer`."""
        for parameter, wanted in self.__dict__.pop("_toggled", ()):
            parameter.requires_grad = wanted

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """`toggle_optimizer` within the block: ``with self.toggled_optimizer(optimizer): ...``."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of them, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return schedulers if len(schedulers) > 1 else schedulers[0] if schedulers else None


def _gathered(data: Any, collectives: Collectives, sync_grads: bool, device: torch.device) -> Any:
    """Return `data` with each tensor and number replaced by those of all ranks."""
    if isinstance(data, torch.Tensor):
        if sync_grads:
            return _Gather.apply(data, collectives)  # type: ignore[no-untyped-call]
        return _stacked(data.detach(), collectives)
    if isinstance(data, bool | int | float):
        return _stacked(torch.tensor(data, device=device), collectives)
    if isinstance(data, Mapping):
        return type(data)({name: _gathered(data[name], collectives, sync_grads, device) for name in data})  # type: ignore[call-arg]
    if isinstance(data, list | tuple):
        parts = [_gathered(each, collectives, sync_grads, device) for each in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    raise ConfigError(
        f"all_gather got a {type(data).__name__}", expected="tensors and numbers, in dicts, lists and tuples",
        do="use self.trainer.run.collectives.all_gather_object for other values",
    )  # fmt: skip


def _stacked(tensor: torch.Tensor, collectives: Collectives) -> torch.Tensor:
    return torch.stack(collectives.all_gather(tensor))


class _Gather(torch.autograd.Function):
    """Stack the tensors of all ranks; backward sums over ranks what each of them computes for this rank's tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, collectives: Collectives) -> torch.Tensor:
        ctx.collectives = collectives
        return _stacked(tensor, collectives)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = ctx.collectives.all_reduce(gradient.contiguous(), "sum")
        return summed[ctx.collectives.rank], None
