"""DeepSpeed's engine as a module to call, and how a model and an optimizer become one."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.errors import ConfigError
from stratagem_deepspeed.autocast import AutocastSteps
from stratagem_deepspeed.clipping import combined_norm, gradient_norms, without_averaging
from stratagem_deepspeed.gradient_guard import GradientsElsewhere
from stratagem_deepspeed.gradient_order import GradientOrder
from stratagem_deepspeed.manual_writes import WrittenByHand
from stratagem_deepspeed.patches import (
    clear_model_caches,
    let_zero_grad_drop_all,
    refuse_double_backward,
    replaced,
    zero_gradient_buffers,
)
from stratagem_deepspeed.state import masters, put_masters
from stratagem_deepspeed.trace import SharedTrace, TraceOfEngine

if TYPE_CHECKING:
    from stratagem.api import RunContext

_UNCHANGED = contextlib.nullcontext()
#: Where a module remembers what wrapped it last.
_LATEST = "_stratagem_engine"
#: Where it keeps the masters of its 16-bit parameters from one engine to the next.
_MASTERS = "_stratagem_masters"


class EngineModule(nn.Module):
    """What a run calls: the user's steps inside DeepSpeed's engine, or by themselves as long as there is none."""

    #: DeepSpeed's, which has no types.
    engine: Any
    user: nn.Module

    def __init__(self, step: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
        super().__init__()
        self.step = AutocastSteps(step, dtype, device) if dtype is not None else step
        self.dtype = dtype
        self.dtypes = [(parameter, parameter.dtype) for parameter in step.parameters()]
        #: What the next step will clip by, as measured for it.
        self.norms: list[torch.Tensor] | None = None
        self.arrivals: GradientOrder | None = None
        #: At stage 3 on several ranks: which layers all of them compute.
        self.traced: TraceOfEngine | None = None
        #: At stages 1 to 3: weights that a program has written.
        self.written: WrittenByHand | None = None
        #: At stages 2 and 3: refuses those who look for gradients at the parameters.
        self.gradients: GradientsElsewhere | None = None
        #: There was a backward since the last step.
        self._differentiated = False
        self._frozen: set[int] = set()
        #: At stage 0, what is trained and in no group: its gradient counts for nothing.
        self._ungrouped: list[nn.Parameter] = []
        #: For linear layers that do not save their weights for backward, which would keep every gathered one.
        self._linear: Any = None
        # Not as submodules: the engine holds this model's steps itself.
        self.__dict__["engine"], self.__dict__["user"] = None, step.module
        step.module.__dict__[_LATEST] = weakref.ref(self)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        engine = self.engine
        if engine is not None:
            if self.traced is not None:
                self.traced.trace.begin(arguments[0])
            with self._with_memory_efficient_linear():
                return engine(*arguments, **options)
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
                "the model is shared out over the processes, and no engine gathers it: another run took it over, or "
                "this one got no optimizer",
                expected="a fit, or an evaluation, of the run that uses it",
            )

    def start(self, deepspeed: Any, config: dict[str, Any], optimizer: Any, run: RunContext) -> None:
        """Make the engine; without an optimizer it only gathers what a forward needs."""
        trained = [parameter for parameter in self.step.parameters() if parameter.requires_grad]
        self._frozen = {id(parameter) for parameter in self.step.parameters() if not parameter.requires_grad}
        accelerator = deepspeed.accelerator.get_accelerator()
        groups = None if optimizer is None else optimizer.param_groups  # ZeRO puts its own partitions there
        inside = {id(each) for group in groups or () for each in group["params"]}
        with contextlib.ExitStack() as stack:
            # All ranks have the same parameters already, and it stumbles over those without dimensions.
            stack.enter_context(replaced(deepspeed.DeepSpeedEngine, "_broadcast_model", lambda _: None))
            if accelerator.device_name() == "cpu":  # torch can, if the processor cannot
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
        if self.zero is not None:
            self.written = WrittenByHand(self.zero, self.user)
            if zero["stage"] > 1:
                self.gradients = GradientsElsewhere(self.user, zero["stage"], inside if groups is not None else None)
        if zero["stage"] == 3:
            refuse_double_backward(self.engine)
        if run.world_size > 1 and zero["stage"] == 3:
            self.traced = TraceOfEngine(SharedTrace(run), self.engine, self.user)
            self.traced.trace.watch()
        if run.world_size > 1 and zero["stage"] in (1, 2) and optimizer is not None:
            self.arrivals = GradientOrder(trained, run)
            if zero["stage"] == 2:
                self._check_each_backward()

    def check_thawed(self) -> None:
        """Refuse a parameter that was frozen when the engine was made, and is to be trained now: it never is."""
        for name, parameter in self.user.named_parameters():
            if parameter.requires_grad and id(parameter) in self._frozen:
                raise ConfigError(
                    f"{name!r} was frozen when training began and is trained now, which DeepSpeed does not notice",
                    expected="the same parameters from beginning to end of a fit",
                    do="begin with it trainable, or train in two fits",
                )

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate `loss`; what is computed again is computed as it was."""
        with self._with_memory_efficient_linear():
            self.engine.backward(loss)
        self._differentiated = True

    def _check_each_backward(self) -> None:
        """Stage 2 sends what backward has left as soon as it is over: compare before."""
        finish, arrivals = self.engine._backward_epilogue, self.arrivals
        assert arrivals is not None, "made before"

        def compare_and_finish() -> None:
            arrivals.compare(ordered=True)
            finish()

        self.engine.__dict__["_backward_epilogue"] = compare_and_finish

    def _compare_arrivals(self) -> None:
        if self.arrivals is not None and not self.engine.zero_optimization_partition_gradients():
            self.arrivals.compare(ordered=False)  # stage 1 sends once in a window

    def _with_memory_efficient_linear(self) -> contextlib.AbstractContextManager[None]:
        return _UNCHANGED if self._linear is None else replaced(nn.functional, "linear", self._linear)

    def clip(self, max_norm: float) -> Any:
        """Have the next step clip; return the norm before clipping.

        The engine averages, measures and clips when it steps. Here it averages and measures before, and not again.
        """
        engine = self.engine
        if self.norms is None:  # it may have been asked before, to measure alone
            with _UNCHANGED if self.gradients is None else self.gradients.lifted():
                self._finish_window()
                self.norms = gradient_norms(engine)
        self._clip(max_norm)
        return combined_norm(self.norms) / getattr(engine.optimizer, "loss_scale", 1.0)

    def _finish_window(self) -> None:
        """Average what the batches of this window have left."""
        engine = self.engine
        self._compare_arrivals()
        for parameter in self._ungrouped:
            parameter.grad = None
        engine._running_engine_step = True  # the end of a window, which is when gradients are averaged
        if not engine.zero_optimization_partition_gradients():
            engine.allreduce_gradients()
        else:
            engine.optimizer.finalize_gradient_accumulation_boundary()

    def step_optimizer(self) -> bool:
        """Step; return whether parameters changed."""
        engine, norms = self.engine, self.norms
        if not self._differentiated:
            raise ConfigError(
                "an optimizer step was asked for and there was no backward since the last one",
                expected="a backward before each step",
                do="call backward of the run first, or skip the step",
            )
        self.norms, self._differentiated = None, False
        if self.written is not None:
            self.written.take_over()
        if self.gradients is not None:
            self.gradients.check_unset()
        if norms is None:
            self._compare_arrivals()
            engine.step()
        else:
            with without_averaging(engine, norms):
                engine.step()
            self._clip(engine.config["gradient_clipping"])
        zero_gradient_buffers(engine.optimizer)
        if self.written is not None:
            self.written.remember(stepped=True)
        return bool(engine.was_step_applied())

    def _clip(self, max_norm: float) -> None:
        self.engine._config.gradient_clipping = max_norm
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = max_norm

    def _keeps_masters(self) -> bool:
        return self.dtype is not None and self.zero is not None

    def cast(self) -> None:
        """Have parameters in the engine's 16 bits where no engine is needed."""
        if self.dtype is not None:
            for parameter, dtype in self.dtypes:
                if dtype.is_floating_point:
                    parameter.data = parameter.data.to(self.dtype)

    def stop(self, *, keep_masters: bool = False) -> None:
        """Take the engine's hooks off the model, and leave its parameters as wide as they were. Safe to call twice.

        Args:
            keep_masters: leave the masters of 16-bit parameters for the next engine: it would begin with rounded ones.
        """
        if self.written is not None:
            self.written.stop()
            self.written = None
        if self.gradients is not None:
            self.gradients.stop()
            self.gradients = None
        if keep_masters and self._keeps_masters():
            self.user.__dict__[_MASTERS] = masters(self.engine.optimizer)
        engine, self.__dict__["engine"] = self.engine, None
        if self.traced is not None:
            self.traced.stop()
            self.traced = None
        if engine is not None:
            if hasattr(engine.optimizer, "empty_partition_cache"):
                engine.optimizer.empty_partition_cache()  # what it has begun to gather nobody else would finish
                clear_model_caches()
            engine.destroy()
            engine.__dict__["destroy"] = _nothing  # or its end, some time, would unmake what the next engine has made
            engine.module_forward_pre_hook.remove()
            engine.module_forward_post_hook.remove()
            for parameter in self.step.parameters():
                parameter.__dict__.pop("_z3_optimizer", None)  # it would keep the engine for as long as the model lives
        for parameter, dtype in self.dtypes:
            if parameter.dtype != dtype and not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(dtype)
        if self.arrivals is not None:
            self.arrivals.stop()
            self.arrivals = None
        if isinstance(self.step, AutocastSteps):
            self.step.stop()


def _nothing() -> None:
    pass


def stop_earlier(module: nn.Module) -> None:
    """Stop the engine of an earlier call, or of another run, that still has its hooks on the user's `module`."""
    earlier = module.__dict__.get(_LATEST, lambda: None)()
    if earlier is not None:
        earlier.stop(keep_masters=True)
