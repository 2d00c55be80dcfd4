"""Strategies for devices of XLA: one device, all devices with a replica on each, all devices with a shard on each.

[Note: one graph for each batch]
On an XLA device, operations are queued. `torch_xla.sync` compiles what is queued into one program, or finds the program
of an equal graph in a cache, and starts it; the host does not wait. Here that happens once for each batch: after the
optimizer's step, after a backward whose gradients are only accumulated, and after the forward of an evaluation. Reading
a number, such as ``loss.item()``, would run a program of its own, and wait.

[Note: SPMD]
Under `torch_xla.runtime.use_spmd` one process has one virtual device, ``xla:0``, for all its devices. A program is
written for the whole batch; tensors that are annotated with `mark_sharding` are cut over the devices, and the compiler
adds the communication. So what a step computes is what one device would compute, whatever is cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import Tensor, nn

from stratagem.api import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    FULL_STATE,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    Capabilities,
    Strategy,
    hookimpl,
)
from stratagem.api.batches import map_batch
from stratagem.api.named_state import logical_optimizer_state, physical_optimizer_state
from stratagem.errors import ConfigError
from stratagem_xla.accelerator import DEVICE_XLA, XLA_STEPS

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from stratagem.api import RunContext

_CAPABILITIES = Capabilities(
    provides={
        CLIP_BY_NORM,
        CLIP_BY_VALUE,
        CUSTOM_CLIPPING,
        CUSTOM_STEP,
        FULL_STATE,
        MANUAL_OPTIMIZATION,
        MULTIPLE_OPTIMIZERS,
        NO_SYNC,  # a single process sends nothing to another one
        XLA_STEPS,
    },
    requires={DEVICE_XLA},
)


@define(eq=False, kw_only=True)
class SingleXLAStrategy(Strategy):
    """Train on one XLA device; see [Note: one graph for each batch]."""

    capabilities = _CAPABILITIES

    #: The state of XLA's random numbers in a checkpoint that was read before the device is started.
    _loaded: int | None = field(init=False, default=None)
    _started: bool = field(init=False, default=False)

    def how_to_provide(self, word: str) -> str:
        return {DEVICE_XLA: 'set accelerator="tpu"', MULTI_PROCESS: 'choose strategy="xla" for several devices'}.get(
            word, ""
        )

    # --- Processes and devices -----------------------------------------------------------------------------------

    @hookimpl
    def on_connect(self, run: RunContext) -> None:
        import torch_xla

        self._start(run)
        torch_xla.device(run.device.index)  # what `sync` runs
        _check_autograd(run.device)
        torch_xla.manual_seed(torch.initial_seed() if self._loaded is None else self._loaded)
        self._started = True

    def _start(self, run: RunContext) -> None:
        """Set up the devices, before the first tensor is on one of them."""

    @hookimpl
    def teardown(self) -> None:
        self._started, self._loaded = False, None

    # --- The model and the step ----------------------------------------------------------------------------------

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        return _moved(module, run.device)

    @hookimpl(wrapper=True)
    def transfer_batch(self) -> Generator[None, Any, Any]:
        with torch.inference_mode(False):  # see `_evaluating`
            return (yield)

    @hookimpl
    def step_context(self, stage: str) -> AbstractContextManager[Any] | None:
        return None if stage == "train" else _evaluating()

    @hookimpl
    def backward(self, loss: Tensor, run: RunContext) -> bool:
        run.differentiate(loss)
        if not run.sync_gradients:
            _sync()
        return True

    @hookimpl(wrapper=True)
    def step_optimizers(self) -> Generator[None, bool, bool]:
        stepped = yield
        _sync()
        return stepped

    # --- State: copies on the CPU, since what reads a checkpoint need not have torch_xla -------------------------

    @hookimpl
    def model_state(self, module: nn.Module) -> dict[str, Any]:
        state: dict[str, Any] = _on_cpu(module.state_dict())
        return state

    @hookimpl
    def optimizer_state(self, optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
        state: dict[str, Any] = _on_cpu(logical_optimizer_state(optimizer, module))
        return state

    def state_dict(self) -> dict[str, Any]:
        if not self._started:
            return {}
        import torch_xla.core.xla_model as xm

        return {"random": xm.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state.get("random")
        if self._started and self._loaded is not None:
            import torch_xla

            torch_xla.manual_seed(self._loaded)


@define(eq=False, kw_only=True)
class XLAStrategy(SingleXLAStrategy):
    """Split every batch over all devices of this process, with a replica of the model on each; see [Note: SPMD].

    Xu et al., "GSPMD", 2021.
    """

    process_per_device = False
    capabilities = _CAPABILITIES

    #: The devices as one axis; None where there is only one.
    _mesh: Any = field(init=False, default=None)

    def _start(self, run: RunContext) -> None:
        available = run.accelerator.count()
        if len(run.devices) != available:
            title = run.title_of(self)
            raise ConfigError(
                f"devices selects {len(run.devices)} of {available}, and a program of {title} runs on all of them",
                expected=f'devices={available}, or "auto"', do='choose strategy="single_xla" for one device',
            )  # fmt: skip
        self._mesh = None
        if available > 1:
            import numpy as np
            import torch_xla.distributed.spmd as spmd
            import torch_xla.runtime as xr

            if not xr.is_spmd():
                _check_unused()
                xr.use_spmd()
            self._mesh = spmd.Mesh(np.arange(available), (available,), ("fsdp",))

    @hookimpl(wrapper=True)
    def transfer_batch(self) -> Generator[None, Any, Any]:
        with torch.inference_mode(False):
            batch = yield
            return batch if self._mesh is None else map_batch(batch, self._split)

    def _split(self, leaf: Any) -> Any:
        """Cut a tensor along dimension 0 if the devices divide it; any other is on every device."""
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] and leaf.shape[0] % self._mesh.size() == 0:
            import torch_xla.distributed.spmd as spmd

            spmd.mark_sharding(leaf, self._mesh, ("fsdp", *[None] * (leaf.dim() - 1)))
        return leaf


@define(eq=False, kw_only=True)
class XLAFSDPStrategy(XLAStrategy):
    """Keep a shard of each parameter, its gradient and its optimizer state on each device, through SPMD (FSDPv2)."""

    capabilities = _CAPABILITIES

    #: Classes of modules whose outputs are cut over the devices, and whose backward is not fused with that of others:
    #: name the blocks of the model. More and smaller ones need less memory for unsharded parameters at a time, and
    #: give the compiler less to overlap.
    auto_wrap_policy: set[type[nn.Module]] | None = None

    _hooks: list[Any] = field(init=False, factory=list)

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        from torch_xla.distributed.spmd.xla_sharding import apply_backward_optimization_barrier
        from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

        module = _moved(module, run.device)
        self._remove_hooks()
        if self._mesh is None:
            return module
        units = [each for each in module.modules() if isinstance(each, tuple(self.auto_wrap_policy or ()))]
        if self.auto_wrap_policy and not units:
            names = ", ".join(sorted(each.__name__ for each in self.auto_wrap_policy))
            raise ConfigError(
                f"strategy.xla_fsdp.auto_wrap_policy is {{{names}}}, and the module has no such part",
                expected="classes of its parts", do="print the module to see them",
            )  # fmt: skip
        for unit in units:
            self._hooks.append(unit.register_forward_hook(lambda _module, _inputs, output: self._split_all(output)))
            before = set(unit._backward_hooks)
            apply_backward_optimization_barrier(unit)
            self._hooks += [_Registered(unit._backward_hooks, key) for key in set(unit._backward_hooks) - before]
        sharded: nn.Module = SpmdFullyShardedDataParallel(module, mesh=self._mesh, shard_output=_leave_output)
        return sharded

    def _split_all(self, output: Any) -> Any:
        return map_batch(output, self._split)

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    @hookimpl
    def teardown(self) -> None:
        self._remove_hooks()
        super().teardown()

    @hookimpl
    def load_optimizer_state(self, state: Any, optimizer: Optimizer, module: nn.Module) -> bool:
        optimizer.load_state_dict(physical_optimizer_state(state, optimizer, module))
        if self._mesh is not None:
            _shard_like_parameters(optimizer, self._mesh)
        return True


@define
class _Registered:
    """A hook of a module, to be removed."""

    hooks: Any
    key: int

    def remove(self) -> None:
        self.hooks.pop(self.key, None)


def _leave_output(output: Any, mesh: Any) -> None:
    """Leave what the whole model returns as it is: a loss, or what the user's step returns."""


def _shard_like_parameters(optimizer: Optimizer, mesh: Any) -> None:
    """Cut tensors of the state that have the shape of their parameter as FSDP cuts the parameter."""
    import torch_xla.distributed.spmd as spmd

    for parameter, entries in optimizer.state.items():
        for value in entries.values():
            if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                largest = parameter.shape.index(max(parameter.shape))
                axes = tuple("fsdp" if dim == largest else None for dim in range(value.dim()))
                spmd.mark_sharding(value, mesh, axes)


def _check_unused() -> None:
    """Refuse to turn SPMD on after a device was used: on the CPU the process would be killed by SIGSEGV later."""
    import torch_xla

    if torch_xla._XLAC._xla_get_spmd_config_is_locked():
        raise ConfigError(
            "this process used one device of XLA before it trains on several",
            expected="SPMD to be on from the start", do="call `torch_xla.runtime.use_spmd()` at the top of the program",
        )  # fmt: skip


def _check_autograd(device: torch.device) -> None:
    """Refuse a process whose autograd engine was started without XLA: it has no queue for its devices."""
    try:
        torch.zeros((), device=device, requires_grad=True).neg().backward()
    except RuntimeError as error:
        if "device_ready_queues" not in str(error):
            raise
        raise ConfigError(
            "this process called backward before it used a device of XLA, for which autograd then has no thread",
            expected="the device to be used first",
            do="call `torch_xla.runtime.global_runtime_device_count()` at the top of the program, after "
            "`torch_xla.runtime.use_spmd()` where it trains on several devices",
        ) from None  # fmt: skip


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Move `module` with its parameters changed in place, and what users attached to them kept.

    To a device of XLA ``Module.to`` would make other parameters, which an optimizer that exists already would not step,
    and shared parameters would no longer be shared.
    """
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    attached = [(p, dict(p.__dict__), [getattr(p, name) for name in hooks]) for p in module.parameters()]
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module = module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for parameter, attributes, registered in attached:
        parameter.__dict__.update(attributes)
        for name, each in zip(hooks, registered, strict=True):
            if each:
                setattr(parameter, name, each)
    return module


@contextlib.contextmanager
def _evaluating() -> Iterator[None]:
    """Within: no gradients, but no inference mode, in which layers fail on XLA; afterwards run what was queued."""
    with torch.inference_mode(False), torch.no_grad():
        yield
    _sync()


def _sync() -> None:
    import torch_xla

    torch_xla.sync()


def _on_cpu(state: Any) -> Any:
    """Return `state` with its tensors on the CPU."""
    return map_batch(state, lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf)
