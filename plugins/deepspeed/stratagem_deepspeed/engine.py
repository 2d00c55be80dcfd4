"""A module that runs the user's steps in DeepSpeed's engine: start, backward, clip, step and stop."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.errors import ConfigError
from stratagem_deepspeed.autocast import AutocastSteps
from stratagem_deepspeed.clipping import combined_norm, gradient_norms, without_averaging
from stratagem_deepspeed.gradient_guard import GradientGuard
from stratagem_deepspeed.manual_writes import ManualWrites
from stratagem_deepspeed.partitioned_reads import StepReads
from stratagem_deepspeed.patches import (
    clear_model_caches,
    let_zero_grad_drop_all,
    refuse_double_backward,
    replaced,
    zero_gradient_buffers,
)
from stratagem_deepspeed.state import masters, put_masters
from stratagem_deepspeed.trace import EngineTrace, GradientOrder, LayerOrder

if TYPE_CHECKING:
    from stratagem.api import RunContext

_UNCHANGED = contextlib.nullcontext()
#: Attribute of a module: weak reference to the last `EngineModule` that wrapped it.
_LATEST = "_stratagem_engine"
#: Attribute of a module: fp32 masters of its 16-bit parameters, kept from one engine to the next.
_MASTERS = "_stratagem_masters"


class EngineModule(nn.Module):
    """The module that a run calls: the user's steps inside DeepSpeed's engine, or directly while there is no engine."""

    #: DeepSpeed's, which has no types.
    engine: Any
    user: nn.Module

    def __init__(self, step: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
        super().__init__()
        self.step = AutocastSteps(step, dtype, device) if dtype is not None else step
        self.dtype = dtype
        self.dtypes = [(parameter, parameter.dtype) for parameter in step.parameters()]
        #: Gradient norms measured for the next step, which clips with them.
        self.norms: list[torch.Tensor] | None = None
        self.gradient_order: GradientOrder | None = None
        #: At stage 3 on several ranks: checks that all ranks compute the same layers.
        self.layer_trace: EngineTrace | None = None
        #: At stages 1 to 3: detects weights that user code writes between steps.
        self.manual_writes: ManualWrites | None = None
        #: At stage 3: gathers parameters that steps list.
        self.step_reads: StepReads | None = None
        #: At stages 2 and 3: refuses user code that reads or changes `parameter.grad`.
        self.gradient_guard: GradientGuard | None = None
        #: Whether there was a backward since the last step.
        self._differentiated = False
        self._frozen: set[int] = set()
        #: At stage 0: trainable parameters in no group of the optimizer; their gradients are dropped.
        self._ungrouped: list[nn.Parameter] = []
        #: Replaces `linear` by one that does not save weights for backward, which would keep every gathered weight.
        self._linear: Any = None
        #: Entered where the engine reads values of tensors: a plan's have none.
        self._reading: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        # Not registered as submodules, since the engine has the steps as one.
        self.__dict__["engine"], self.__dict__["user"] = None, step.module
        step.module.__dict__[_LATEST] = weakref.ref(self)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        engine = self.engine
        if engine is not None:
            if self.layer_trace is not None:
                self.layer_trace.order.begin_step(arguments[0])
            if self.manual_writes is not None:
                self.manual_writes.begin_step()
            try:
                with self._with_memory_efficient_linear():
                    return engine(*arguments, **options)
            finally:
                if self.step_reads is not None:
                    self.step_reads.end()
        self._check_whole()
        return self.step(*arguments, **options)

    @property
    def zero(self) -> Any:
        """ZeRO's optimizer, if there is one."""
        optimizer = getattr(self.engine, "optimizer", None)
        return optimizer if hasattr(optimizer, "optimizer") else None

    def _check_whole(self) -> None:
        if any(hasattr(parameter, "ds_id") for parameter in self.step.parameters()):
            raise ConfigError(
                "the model is partitioned over the processes and this run has no engine that gathers it: another run "
                "uses the model, or this one has no optimizer",
                expected="a fit, or an evaluation, of the run that uses it",
            )

    def start(self, deepspeed: Any, config: dict[str, Any], optimizer: Any, run: RunContext) -> None:
        """Make the engine; without an optimizer it only gathers parameters for a forward."""
        trained = [parameter for parameter in self.step.parameters() if parameter.requires_grad]
        self._frozen = {id(parameter) for parameter in self.step.parameters() if not parameter.requires_grad}
        accelerator = deepspeed.accelerator.get_accelerator()
        groups = None if optimizer is None else optimizer.param_groups  # ZeRO replaces their parameters later
        inside = {id(each) for group in groups or () for each in group["params"]}
        with contextlib.ExitStack() as stack:
            # All ranks have the same parameters already, and it fails for those without dimensions.
            stack.enter_context(replaced(deepspeed.DeepSpeedEngine, "_broadcast_model", lambda _: None))
            if accelerator.device_name() == "cpu":  # torch supports it on any processor
                stack.enter_context(replaced(accelerator, "is_fp16_supported", lambda: True))
            self.__dict__["engine"], *_ = deepspeed.initialize(
                model=self.step, optimizer=optimizer, model_parameters=trained, config=config
            )
        self._clip(config["gradient_clipping"])
        if self.dtype is not None and self._keeps_masters() and (kept := self.user.__dict__.pop(_MASTERS, None)):
            put_masters(kept, self.engine.optimizer, self.dtype)
        zero = config["zero_optimization"]
        if zero["stage"] == 0 and optimizer is not None:
            self._ungrouped = [parameter for parameter in trained if id(parameter) not in inside]
        if zero["stage"] == 2 and self.zero is not None:
            let_zero_grad_drop_all(self.zero)
        if zero["stage"] == 3 and zero.get("memory_efficient_linear", True):
            from deepspeed.runtime.zero.linear import zero3_linear_wrap

            self._linear = zero3_linear_wrap
        is_plan = run.environment.simulated
        if is_plan:
            from stratagem_deepspeed.planned import Answered

            self._reading = Answered
        if self.zero is not None and not is_plan:
            self.manual_writes = ManualWrites(self.zero, self.user, run.collectives)
        if self.zero is not None:
            self.gradient_guard = GradientGuard(self.user, zero["stage"], None if groups is None else inside, self.zero)
        if zero["stage"] == 3:
            refuse_double_backward(self.engine)
            if not is_plan:
                self.step_reads = StepReads(self.engine.module, self.manual_writes)
        if run.world_size > 1 and zero["stage"] == 3 and not is_plan:
            self.layer_trace = EngineTrace(LayerOrder(run), self.engine, self.user)
            if self.manual_writes is not None:
                self.manual_writes.visit = self.layer_trace.order.visit
        if run.world_size > 1 and zero["stage"] in (1, 2) and optimizer is not None:
            self.gradient_order = GradientOrder(trained, run)
            if zero["stage"] == 2:
                self._check_each_backward()

    def check_thawed(self) -> None:
        """Refuse a parameter that was frozen when the engine was made and is not now: the engine would not train it."""
        for name, parameter in self.user.named_parameters():
            if parameter.requires_grad and id(parameter) in self._frozen:
                raise ConfigError(
                    f"{name!r} was frozen when training began and is trained now, which DeepSpeed does not notice",
                    expected="the same trainable parameters during the whole fit",
                    do="begin with it trainable, or train in two fits",
                )

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate `loss`, with the same `linear` in recomputed layers as in forward."""
        with self._with_memory_efficient_linear():
            self.engine.backward(loss)
        self._differentiated = True
        if self.manual_writes is not None:
            self.manual_writes.in_step = False

    def _check_each_backward(self) -> None:
        """At stage 2, which averages gradients at the end of each backward: compare the ranks before that."""
        finish, gradient_order = self.engine._backward_epilogue, self.gradient_order
        assert gradient_order is not None, "set by start"

        def compare_and_finish() -> None:
            gradient_order.compare(ordered=True)
            finish()

        self.engine.__dict__["_backward_epilogue"] = compare_and_finish

    def _compare_gradient_order(self) -> None:
        if self.gradient_order is not None and not self.engine.zero_optimization_partition_gradients():
            self.gradient_order.compare(ordered=False)  # stage 1 averages once in an accumulation window

    def _with_memory_efficient_linear(self) -> contextlib.AbstractContextManager[None]:
        return _UNCHANGED if self._linear is None else replaced(nn.functional, "linear", self._linear)

    def clip(self, max_norm: float) -> Any:
        """Clip in the next step; return the norm before clipping.

        The engine averages, measures and clips in its step. Here gradients are averaged and measured before the step.
        """
        engine = self.engine
        if self.norms is None:  # otherwise measured by an earlier call
            with _UNCHANGED if self.gradient_guard is None else self.gradient_guard.guarding(refused=False):
                self._finish_window()
                with self._reading():
                    self.norms = gradient_norms(engine)
        self._clip(max_norm)
        with self._reading():
            return combined_norm(self.norms) / getattr(engine.optimizer, "loss_scale", 1.0)

    def _finish_window(self) -> None:
        """Average the gradients of this accumulation window over the ranks."""
        engine = self.engine
        self._compare_gradient_order()
        for parameter in self._ungrouped:
            parameter.grad = None
        engine._running_engine_step = True  # marks the end of a window, where gradients are averaged
        if not engine.zero_optimization_partition_gradients():
            engine.allreduce_gradients()
        else:
            engine.optimizer.finalize_gradient_accumulation_boundary()

    def step_optimizer(self) -> bool:
        """Step; return whether parameters changed."""
        engine, norms = self.engine, self.norms
        if not self._differentiated:
            raise ConfigError(
                "an optimizer step was requested without a backward since the last one",
                expected="a backward before each step", do="call backward of the run first, or skip the step",
            )  # fmt: skip
        self.norms, self._differentiated = None, False
        if self.manual_writes is not None:
            self.manual_writes.take_over()
        if self.gradient_guard is not None:
            self.gradient_guard.check_unset()
        if norms is None:
            self._compare_gradient_order()
            with self._reading():
                engine.step()
        else:
            with without_averaging(engine, norms), self._reading():
                engine.step()
            self._clip(engine.config["gradient_clipping"])
        zero_gradient_buffers(engine.optimizer)
        if self.manual_writes is not None:
            self.manual_writes.record(stepped=True)
        return bool(engine.was_step_applied())

    def _clip(self, max_norm: float) -> None:
        self.engine._config.gradient_clipping = max_norm
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = max_norm

    def _keeps_masters(self) -> bool:
        return self.dtype is not None and self.zero is not None

    def cast(self) -> None:
        """Convert parameters to the engine's 16-bit dtype, where no engine is made."""
        if self.dtype is not None:
            for parameter, dtype in self.dtypes:
                if dtype.is_floating_point:
                    parameter.data = parameter.data.to(self.dtype)

    def stop(self, *, keep_masters: bool = False) -> None:
        """Remove the engine's hooks from the model and restore the dtypes of its parameters. Safe to call twice.

        Args:
            keep_masters: keep the fp32 masters of 16-bit parameters for the next engine, which would round them.
        """
        if self.manual_writes is not None:
            self.manual_writes.stop()
            self.manual_writes = None
        if self.gradient_guard is not None:
            self.gradient_guard.stop()
            self.gradient_guard = None
        if keep_masters and self._keeps_masters():
            self.user.__dict__[_MASTERS] = masters(self.engine.optimizer)
        engine, self.__dict__["engine"] = self.engine, None
        if self.layer_trace is not None:
            self.layer_trace.stop()
            self.layer_trace = None
        if engine is not None:
            if hasattr(engine.optimizer, "empty_partition_cache"):
                engine.optimizer.empty_partition_cache()  # parameters that are still being gathered
                clear_model_caches()
            if torch.distributed.is_initialized():  # it asks for the rank, also after a script has destroyed the group
                engine.destroy()
            engine.__dict__["destroy"] = lambda: None  # its finalizer would destroy state of the next engine
            engine.module_forward_pre_hook.remove()
            engine.module_forward_post_hook.remove()
            for parameter in self.step.parameters():
                parameter.__dict__.pop("_z3_optimizer", None)  # it would keep the engine alive as long as the model
        for parameter, dtype in self.dtypes:
            if parameter.dtype != dtype and not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(dtype)
        if self.gradient_order is not None:
            self.gradient_order.stop()
            self.gradient_order = None
        if isinstance(self.step, AutocastSteps):
            self.step.stop()


def stop_earlier(module: nn.Module) -> None:
    """Stop an earlier engine, of another call or run, whose hooks are still on the user's `module`."""
    earlier = module.__dict__.get(_LATEST, lambda: None)()
    if earlier is not None:
        earlier.stop(keep_masters=True)
