"""The plugins "low_level_zero" and "gemini": a strategy that runs an engine with an optimizer of its own.

The engines mix precisions, scale losses, reduce gradients and clip; here each of these is called by the hook that it
belongs to. `zero.py` and `gemini.py` have what differs, and import Colossal-AI.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import torch
from attrs import define, field
from torch import nn

from stratagem.api import (
    ACCUMULATION,
    CLIP_BY_NORM,
    COMPILATION,
    DEVICE_CUDA,
    FULL_STATE,
    MULTI_PROCESS,
    NO_SYNC,
    SHARDED_PARAMETERS,
    STEPPED_COPIES,
    Capabilities,
    hookimpl,
)
from stratagem.api.named_state import logical_optimizer_state, physical_optimizer_state
from stratagem.errors import ConfigError
from stratagem_colossalai.options import PATH
from stratagem_colossalai.strategy import ENGINES, ColossalAIStrategy
from stratagem_colossalai.weights import EngineOptimizer, Originals, check_optimizer, check_parameters
from stratagem_process_group import group_options_after

if TYPE_CHECKING:
    from stratagem.api import PrecisionPolicy, RunContext

#: The strategy whose engine trains, or trained, a user's module.
_TRAINED_BY: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_SIXTEEN = {torch.float16: "fp16", torch.bfloat16: "bf16"}
#: Attributes of the engine's loss scaler that change during training.
_SCALER = ("_growth_step", "_hysteresis_step")


class Engine(Protocol):
    """An engine that trains a model."""

    #: The engine's optimizer, and its model to call.
    optimizer: Any
    model: Any
    #: Whether there are gradients: a backward since the last step or `drop_gradients`.
    pending: bool

    @property
    def num_bytes_of_step(self) -> int:
        """Bytes of parameters that all ranks gather after a step."""
        ...

    def no_sync(self) -> contextlib.AbstractContextManager[Any]: ...

    def backward(self, loss: torch.Tensor, run: RunContext) -> None: ...

    def clip(self, max_norm: float) -> float: ...

    def step(self) -> bool: ...

    def drop_gradients(self) -> None: ...

    def model_state(self, module: nn.Module, run: RunContext) -> dict[str, Any]: ...

    def load_model_state(self, state: dict[str, Any], module: nn.Module, strict: bool, run: RunContext) -> None: ...

    def optimizer_state(self, run: RunContext) -> dict[str, Any]: ...

    def load_optimizer_state(self, state: dict[str, Any]) -> None: ...

    def release(self) -> None: ...


class SteppedModel(nn.Module):
    """Calls the engine's model where there is one: while training, when the optimizer is known."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        vars(self)["engine"] = None  # not a submodule: parameters keep their names

    def forward(self, *inputs: Any, **options: Any) -> Any:
        engine = vars(self)["engine"]
        return (self.module if engine is None else engine)(*inputs, **options)

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self


@define(eq=False, kw_only=True, field_transformer=group_options_after("min_chunk_size"))
class ShardedStrategy(ColossalAIStrategy):
    """Runs an engine; the model is placed when its optimizer is known."""

    _engine: Any = field(init=False, default=None)
    _originals: Originals | None = field(init=False, default=None)

    def absorbs(self, policy: PrecisionPolicy) -> bool:
        """The engine itself computes in 16 bits, with fp32 masters."""
        dtype = policy.compute_dtype or policy.param_dtype
        if dtype not in (None, torch.float32, *_SIXTEEN):
            raise ConfigError(
                f"{PATH}.plugin is {self.plugin!r}, and the precision computes in {dtype}",
                expected="a precision of 32 or 16 bits",
            )
        return dtype in _SIXTEEN

    def how_to_provide(self, word: str) -> str:
        provided = word in ColossalAIStrategy.capabilities.provides
        return f'set {PATH}.plugin to "ddp", which provides it' if provided else ""

    def _dtype(self, run: RunContext) -> torch.dtype | None:
        dtype = run.policy.compute_dtype or run.policy.param_dtype
        return dtype if dtype in _SIXTEEN else None

    def _make(self, module: nn.Module, optimizer: torch.optim.Optimizer, run: RunContext) -> Engine:
        raise NotImplementedError

    # --- The model -----------------------------------------------------------------------------------------------

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        user = module.get_submodule("module")
        if self._engine is not None and run.stage != "train" and self._engine.user is user:
            return self._evaluating(module)
        for strategy in (self, _TRAINED_BY.get(user, lambda: None)()):
            if strategy is not None and strategy._engine is not None:
                strategy._stop(run)
        self._place(module, run)
        if run.stage != "train" and (dtype := self._dtype(run)) is not None:
            return _Cast(module, dtype, run.device)
        return SteppedModel(module)

    def _place(self, module: nn.Module, run: RunContext) -> None:
        """Give all ranks the tensors of rank 0, on the device. Collective."""
        module.to(run.device)
        run.collectives.replicate((*module.parameters(), *module.buffers()))

    def _evaluating(self, module: nn.Module) -> nn.Module:
        """Return `module`, called by the engine that trained the user's module."""
        model = SteppedModel(module)
        vars(model)["engine"] = self._engine
        return model

    def _stop(self, run: RunContext) -> None:
        """Put the weights back into the module that the engine trained. Collective."""
        engine: Any = self._engine
        everywhere: Any = _Everywhere(run)
        self._engine = None
        state = engine.model_state(engine.user, everywhere)
        engine.release()
        for name, value in engine.user.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                value.data = state[name].to(run.device)
        self._originals = None

    @hookimpl
    def wrap_optimizers(
        self, optimizers: list[torch.optim.Optimizer], module: nn.Module, run: RunContext
    ) -> list[torch.optim.Optimizer]:
        if run.stage != "train" or not optimizers:
            return optimizers
        if len(optimizers) > 1:
            raise ConfigError(
                f"configure_optimizers returned {len(optimizers)} optimizers, and Colossal-AI steps one",
                expected="one optimizer, with a parameter group instead of each",
            )
        assert run.module is not None, "wrapped before"
        check_parameters(run.module, self._dtype(run))
        check_optimizer(optimizers[0])
        self._originals = Originals(run.module, self._dtype(run))
        model: Any = module
        try:
            self._engine = self._make(model.module, optimizers[0], run)
        except AssertionError as error:
            raise ConfigError(
                f"Colossal-AI refused the options of {PATH}, or the optimizer ({error})",
                do="change the one that it names",
            ) from error
        vars(model)["engine"] = self._engine
        _TRAINED_BY[run.module] = weakref.ref(self)
        return [EngineOptimizer(self._engine)]

    @hookimpl
    def teardown(self, run: RunContext) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.release()
        run.optimizers = []
        super().teardown(run)

    # --- The step ------------------------------------------------------------------------------------------------

    @hookimpl
    def step_context(self, stage: str, sync: bool, run: RunContext) -> contextlib.AbstractContextManager[Any] | None:
        return self._engine.no_sync() if stage == "train" and not sync and self._engine is not None else None

    @hookimpl
    def backward(self, loss: torch.Tensor, module: nn.Module, run: RunContext) -> bool:
        if self._engine is None:
            raise ConfigError("backward was called and Colossal-AI has no optimizer", expected="one optimizer")
        if not loss.requires_grad:
            raise ConfigError(
                f"the loss of rank {run.rank} reaches no trainable parameter",
                expected="a loss that depends on at least one",
                do="return the usual loss multiplied by zero to skip a batch",
            )
        self._engine.backward(loss, run)
        return True

    @hookimpl
    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        assert max_norm is not None, "clip-by-value is not provided"
        return torch.tensor(self._engine.clip(max_norm))

    @hookimpl
    def optimizer_step(self, run: RunContext) -> bool:
        if not self._engine.pending:
            raise ConfigError(
                "an optimizer step was requested without a backward since the last one",
                expected="a backward before each step",
                do="call backward of the run first, or skip the step",
            )
        stepped: bool = self._engine.step()
        if stepped and (num_bytes := self._engine.num_bytes_of_step):
            run.collectives.traffic.add("all_gather", num_bytes, run.world_size, sender="parameters")
        return stepped

    @hookimpl(optionalhook=True)
    def on_train_epoch_end(self, run: RunContext) -> None:
        if self._engine is not None:
            self._engine.check_thawed()

    # --- State ---------------------------------------------------------------------------------------------------

    @hookimpl
    def model_state(self, module: nn.Module, run: RunContext) -> dict[str, Any]:
        if self._engine is None:
            return module.state_dict()
        state: dict[str, Any] = self._engine.model_state(module, run)
        return state

    @hookimpl
    def load_model_state(self, state: dict[str, Any], module: nn.Module, strict: bool, run: RunContext) -> bool:
        from stratagem.api.state_fit import load_weights

        if self._engine is None:
            load_weights(module, state, strict)
        else:
            self._engine.load_model_state(state, module, strict, run)
        return True

    @hookimpl
    def optimizer_state(self, optimizer: torch.optim.Optimizer, module: nn.Module, run: RunContext) -> dict[str, Any]:
        if self._engine is None:
            return logical_optimizer_state(optimizer, module)
        state: dict[str, Any] = self._engine.optimizer_state(run)
        return state

    @hookimpl
    def load_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module) -> bool:
        if self._engine is None:
            optimizer.load_state_dict(physical_optimizer_state(state, optimizer, module))
        else:
            self._engine.load_optimizer_state(state)
        return True

    @property
    def _scaler(self) -> Any:
        """The engine's loss scaler; None without one."""
        return None if self._engine is None else getattr(self._engine.mixin, "grad_scaler", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scaler."""
        scaler = self._scaler
        if scaler is None:
            return {}
        return {"scale": scaler.scale.item(), **{name: getattr(scaler, name) for name in _SCALER}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        scaler = self._scaler
        if scaler is not None and "scale" in state:
            scaler._scale.fill_(state["scale"])
            for name in _SCALER:
                setattr(scaler, name, state[name])


class _Everywhere:
    """A run in which every rank uses the values of whole tensors."""

    def __init__(self, run: RunContext) -> None:
        self._run, self.needs_values, self.whole_state = run, True, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


class _Cast(nn.Module):
    """Evaluates in 16 bits as the engine trains; the module keeps its weights."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.module, self._dtype, self._device_type = module, dtype, device.type

    def forward(self, *inputs: Any, **options: Any) -> Any:
        with torch.autocast(self._device_type, self._dtype):
            return self.module(*inputs, **options)


@define(eq=False, kw_only=True, field_transformer=group_options_after("min_chunk_size"))
class LowLevelZeroStrategy(ShardedStrategy):
    """LowLevelZeroPlugin: each rank keeps a shard of the optimizer state (stage 1) and of the gradients (stage 2).

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
    """

    plugin: Literal["low_level_zero"] = "low_level_zero"

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # an option decides
        provides = {ACCUMULATION, CLIP_BY_NORM, FULL_STATE, MULTI_PROCESS, STEPPED_COPIES}
        return Capabilities(provides=provides | (set() if self.stage == 2 else {NO_SYNC}))

    @hookimpl
    def on_connect(self, run: RunContext) -> None:
        super().on_connect(run)
        if run.device.type == "cpu":
            if self.overlap_communication:
                raise ConfigError(
                    f"{PATH}.overlap_communication is true, and the device is a CPU",
                    expected="false: it needs CUDA streams",
                    do="drop it",
                )
            from stratagem_colossalai.host import use_host

            use_host()

    def _make(self, module: nn.Module, optimizer: torch.optim.Optimizer, run: RunContext) -> Engine:
        from stratagem_colossalai.zero import ZeroEngine

        dtype = self._dtype(run)
        arguments = self.zero_arguments() | {"precision": "fp32" if dtype is None else _SIXTEEN[dtype]}
        assert self._originals is not None, "set by wrap_optimizers"
        return ZeroEngine(module, optimizer, arguments, self._originals, run)


@define(eq=False, kw_only=True, field_transformer=group_options_after("min_chunk_size"))
class GeminiStrategy(ShardedStrategy):
    """GeminiPlugin: parameters, gradients and optimizer state are sharded in chunks, which it moves as memory allows.

    Fang et al., "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory Management", TPDS 2023.
    """

    plugin: Literal["gemini"] = "gemini"

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # as in the class above
        return Capabilities(
            provides={ACCUMULATION, CLIP_BY_NORM, FULL_STATE, MULTI_PROCESS, SHARDED_PARAMETERS, STEPPED_COPIES},
            requires={DEVICE_CUDA},
            conflicts={COMPILATION},
        )

    def how_to_provide(self, word: str) -> str:
        if word != DEVICE_CUDA:
            return ShardedStrategy.how_to_provide(self, word)
        return (
            f'choose strategy="fsdp" or "deepspeed_stage_3", which shard as Gemini does, or set {PATH}.plugin to '
            '"low_level_zero"'
        )

    def how_to_avoid(self, word: str) -> str:
        return 'drop compile, or choose strategy="fsdp": Gemini gathers parameters within operations' * (
            word == COMPILATION
        )

    @hookimpl
    def on_connect(self, run: RunContext) -> None:
        if self._dtype(run) is None:
            raise ConfigError(
                f"{PATH}.plugin is 'gemini', which computes in 16 bits, and the precision in 32",
                expected='precision="bf16-mixed" or "16-mixed"',
                do='set one of them, or choose strategy="fsdp"',
            )
        super().on_connect(run)

    def _make(self, module: nn.Module, optimizer: torch.optim.Optimizer, run: RunContext) -> Engine:
        from stratagem_colossalai.gemini import GeminiEngine

        dtype = self._dtype(run)
        assert dtype is not None, "absorbs refuses 32 bits"
        arguments = self.gemini_arguments(run.world_size) | {"precision": _SIXTEEN[dtype]}
        arguments["enable_gradient_accumulation"] = self._accumulates(run)
        assert self._originals is not None, "set by wrap_optimizers"
        return GeminiEngine(module, optimizer, arguments, self._originals, run)

    def _place(self, module: nn.Module, run: RunContext) -> None:
        from stratagem_colossalai.gemini import check_not_released

        check_not_released(module.get_submodule("module"))
        if run.stage != "train":
            super()._place(module, run)
            return
        for tensor in (*module.parameters(), *module.buffers()):  # Gemini moves a chunk at a time
            there = tensor.data.to(run.device)
            run.collectives.replicate((there,))
            tensor.data = there.to(tensor.device)

    def _accumulates(self, run: RunContext) -> bool:
        if self.enable_gradient_accumulation is not None:
            return self.enable_gradient_accumulation
        return getattr(run.settings, "accumulate_grad_batches", 1) != 1


ENGINES.update(low_level_zero=LowLevelZeroStrategy, gemini=GeminiStrategy)
