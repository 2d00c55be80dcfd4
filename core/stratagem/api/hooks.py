"""The hooks of a run, in the order in which they are called; the last one ends it.

More, for other kinds, are in `stratagem.api.other_hooks`.

[Note: answering, acting, wrapping]
* An **answer** hook (``firstresult``) is answered by exactly one plugin, and the answer is never None. Where no plugin
  answers, the core's default does. Two plugins that answer are an error before anything runs.
* Any number of plugins may **wrap** an answer hook with ``@hookimpl(wrapper=True)``: code before ``yield``, the inner
  answer as its value, code after. A wrapper can change the answer; it cannot change the arguments, nor skip the rest.
* Every other hook is **acted** on by all plugins that implement it, in the order of the stack: strategies (outer ones
  first), precision, comm hooks, environment, launcher, accelerator, checkpoint format, then callbacks as listed, then
  loggers. "All enter" means that each returned context manager is entered, in that order.

An implementation names only the arguments that it uses. `run` is a `stratagem.api.context.RunContext`: together with
the bases of `stratagem.api.kinds` that is all of the core that a plugin uses. A hook runs in every process, unless its
description says otherwise.

Other packages add hooks, as the Trainer does; a plugin that works without them uses ``@hookimpl(optionalhook=True)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.api.markers import hookspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from stratagem.api.context import RunContext
    from stratagem.api.world import Collectives, World

# --- Processes ---------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def connect(world: World, run: RunContext) -> Collectives:
    """Answer (strategy): join the other processes. ``run.world`` and ``run.device`` are set.

    Default: a torch.distributed group with the accelerator's backend, or none for a single process.
    """


@hookspec
def on_connect(run: RunContext) -> None:
    """All act: the ranks are connected and have equal settings; ``run.collectives`` and ``run.peers`` can be used."""


# --- The model ---------------------------------------------------------------------------------------------------


@hookspec
def init_context(empty: bool, run: RunContext) -> AbstractContextManager[Any] | None:
    """All enter: contexts under which modules are built (`configure_model`, `Trainer.init_module`); None adds none.

    With `empty`, parameters are built on the meta device; a checkpoint will provide their values.
    """


@hookspec
def prepare_module(module: nn.Module, run: RunContext) -> None:
    """All act: change the user's module in place before it is wrapped (convert dtypes, swap layers)."""


@hookspec(firstresult=True)
def units(module: nn.Module, run: RunContext) -> list[nn.Module]:
    """Answer (strategy): the parts of the user's `module` that it gathers or calls one by one. Default: none.

    Called for ``run.ask("units", module=module)``, before ``wrap_model`` is: by plugins that compile each unit.
    """


@hookspec(firstresult=True)
def wrap_backend(backend: Callable[[Any, Any], Any], run: RunContext) -> Callable[[Any, Any], Any]:
    """Answer (strategy): what compiles graphs, given the `backend` of ``torch.compile``. Default: the same.

    Called for ``run.ask("wrap_backend", backend=backend)``. A backend takes a graph and example inputs and returns a
    function of the inputs. Torch hands activations of a class with ``__torch_function__`` to graphs.
    """


@hookspec(firstresult=True)
def wrap_model(module: nn.Module, run: RunContext) -> nn.Module:
    """Answer (strategy): place `module` on ``run.device`` and return the module to call instead.

    `module` is a `StepModule`, whose forward runs ``training_step``, ``validation_step`` and so on. So an engine
    with hooks on ``forward`` covers the whole step. Outer strategies wrap. In every stage replicas begin with rank 0's
    values. What replaces parameters calls ``stratagem.api.parameters.replace_parameter``, which keeps what users
    attached to them.
    """


@hookspec(firstresult=True)
def wrap_optimizers(optimizers: list[Optimizer], module: nn.Module, run: RunContext) -> list[Optimizer]:
    """Answer (strategy): the optimizers to step, given those made on the wrapped `module`. Default: the same."""


@hookspec(firstresult=True)
def wrap_dataloader(loader: DataLoader[Any], stage: str, run: RunContext) -> DataLoader[Any]:
    """Answer (strategy): the loader of this rank's part of the data. Default: the rules of `stratagem.runtime.data`.

    Not called when the user sets ``use_distributed_sampler=False``.
    """


@hookspec(firstresult=True)
def transfer_batch(batch: Any, run: RunContext) -> Any:
    """Answer (strategy): `batch` on ``run.device``. Default: move every tensor. A precision wraps to convert dtypes."""


# --- The step ----------------------------------------------------------------------------------------------------


@hookspec
def step_context(stage: str, sync: bool, run: RunContext) -> AbstractContextManager[Any] | None:
    """All enter: contexts around one forward (and, when training, backward); None adds none.

    `sync` is False when the gradients of this micro-batch are only accumulated, or under manual optimization.
    """


@hookspec(firstresult=True)
def forward_backward(module: nn.Module, batch: Any, batch_idx: int, divisor: float, run: RunContext) -> Any:
    """Answer (a strategy that owns the step, such as a pipeline): forward and backward of one batch.

    Return what ``training_step`` returns. Differentiate its loss divided by `divisor`, which is the number of batches
    that are accumulated unless targets are counted, with ``run.backward``, which calls the hooks `on_before_backward`
    and `on_after_backward`. Default: ``run.step.forward_backward(batch, batch_idx, divisor)``.
    """


@hookspec(firstresult=True)
def backward(loss: Tensor, module: nn.Module, run: RunContext) -> bool:
    """Answer (strategy): differentiate `loss` with ``run.differentiate``; return True. `module` is ``run.model``.

    Default: ``run.differentiate`` alone, which is ``loss.backward()`` unless the module defines a `backward`.
    """


@hookspec(firstresult=True)
def clip_gradients(
    optimizer: Optimizer, max_norm: float | None, max_value: float | None, run: RunContext
) -> Tensor | float:
    """Answer (strategy): clip the gradients of `optimizer` by norm or value; return the norm before clipping.

    Exactly one of the two limits is set. A precision that scales the loss wraps, and unscales first. The answer to
    clipping by value is 0.0, since the norm is not needed.
    """


@hookspec(firstresult=True)
def step_optimizers(optimizers: list[Optimizer], closure: Callable[[], Tensor] | None, run: RunContext) -> bool:
    """Answer (a precision that scales): make one step with all `optimizers`; return whether parameters changed.

    Called once for each step, whatever the number of optimizers: count steps, and decide whether to skip one, in a
    wrapper of this hook. False means that all were skipped because gradients overflowed; all ranks must return the
    same. `closure` is set only for one optimizer that evaluates the model itself. Default: ``run.step.step_one`` for
    each.
    """


@hookspec(firstresult=True)
def optimizer_step(optimizer: Optimizer, closure: Callable[[], Tensor] | None, run: RunContext) -> bool:
    """Answer (an engine): update the parameters of one optimizer of a step; return whether they changed.

    Called by ``run.step.step_one``, within `step_optimizers`. Default: ``optimizer.step()``.
    """


# --- State -------------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def model_state(module: nn.Module, run: RunContext) -> dict[str, Tensor]:
    """Answer (strategy): logical state of the user's `module`: its parameter names, full tensors. Collective.

    If ``run.needs_values`` is False (on a rank that does not write), a tensor may be on the meta device. If
    ``run.whole_state`` is False, the checkpoint format writes shards: return DTensors and do not gather them; a tensor
    that is unsharded on some ranks only is on the meta device of the others. What you gathered in new memory give to
    ``stratagem.checkpoint.tensor_memory.as_gathered``: a background save does not copy it once more.
    """


@hookspec(firstresult=True)
def load_model_state(state: dict[str, Tensor], module: nn.Module, strict: bool, run: RunContext) -> bool:
    """Answer (strategy): put logical `state` into the model; return True. Collective.

    Dtypes and shapes were checked, except those of tensors that a part of the model names in ``loads_converted``. A
    precision that keeps weights in another form, such as packed integers, answers this and `model_state`. Tensors may
    be mapped from the checkpoint's file: copy what you keep.
    """


@hookspec(firstresult=True)
def optimizer_state(optimizer: Optimizer, module: nn.Module, run: RunContext) -> dict[str, Any]:
    """Answer (strategy): logical state of one optimizer, keyed by parameter name instead of number. Collective.

    ``run.whole_state`` and ``run.needs_values`` have the same meaning as for `model_state`.
    """


@hookspec(firstresult=True)
def load_optimizer_state(state: dict[str, Any], optimizer: Optimizer, module: nn.Module, run: RunContext) -> bool:
    """Answer (strategy): put logical `state` into `optimizer`; return True. Collective.

    Tensors may be mapped from the checkpoint's file: copy what you keep, as `physical_optimizer_state` does. You may
    take entries out of ``state["state"]``, so that each is freed once it is copied.
    """


# --- The end -----------------------------------------------------------------------------------------------------


@hookspec
def teardown(run: RunContext) -> None:
    """All act: release what this process holds; the processes are still connected. Must be safe to call twice."""
