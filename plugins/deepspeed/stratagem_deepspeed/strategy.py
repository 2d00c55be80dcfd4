"""The strategy `deepspeed`: runs DeepSpeed's engine from stratagem's hooks."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import nn

from stratagem.api import (
    ACCUMULATION,
    CLIP_BY_NORM,
    COMPILATION,
    FULL_STATE,
    MULTI_PROCESS,
    NO_SYNC,
    SHARDED_PARAMETERS,
    STEPPED_COPIES,
    Capabilities,
    hookimpl,
)
from stratagem.api.named_state import logical_optimizer_state, parameter_names, physical_optimizer_state
from stratagem.errors import ConfigError
from stratagem_deepspeed import engine_state, native, start
from stratagem_deepspeed import state as logical
from stratagem_deepspeed.activations import CheckpointedLayers
from stratagem_deepspeed.checks import (
    check_dtypes,
    check_elementwise,
    check_groups,
    check_integers,
    check_same_optimizers,
    check_sizes,
    check_tested,
    of_whole_layers,
    the_only,
)
from stratagem_deepspeed.disk import Disk, check_not_lost, check_optimizer, check_parameters, patch_swapper, release
from stratagem_deepspeed.engine import EngineModule, stop_earlier
from stratagem_deepspeed.engine_config import engine_config, micro_batch_size
from stratagem_deepspeed.engine_optimizer import EngineOptimizer
from stratagem_deepspeed.options import DeepSpeedOptions
from stratagem_deepspeed.partitioned_reads import PartitionedReads
from stratagem_deepspeed.partitions import Partitions, check_not_compiled, partition
from stratagem_deepspeed.zero_section import device_of
from stratagem_process_group import group_options_after
from stratagem_process_group.losses import check_reached
from stratagem_process_group.torch_errors import explained

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

    from torch.utils.data import DataLoader

    from stratagem.api import Collectives, PrecisionPolicy, RunContext, World


@define(eq=False, kw_only=True, field_transformer=group_options_after("state_dict_type"))
class DeepSpeedStrategy(DeepSpeedOptions):
    """ZeRO: partitions the optimizer's state (stage 1), the gradients (2) and the parameters (3) over the processes.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020; "ZeRO-Offload",
    ATC 2021; "ZeRO-Infinity", SC 2021. Uses the engine of the package deepspeed.
    """

    _deepspeed: Any = field(init=False, default=None)
    _model: EngineModule | None = field(init=False, default=None)
    _disk: Disk | None = field(init=False, default=None)
    _layers: CheckpointedLayers | None = field(init=False, default=None)
    #: Under which the engine runs in a plan.
    _planning: contextlib.ExitStack = field(init=False, factory=contextlib.ExitStack)
    #: Entered where buffers are made.
    _making: Callable[[], AbstractContextManager[Any]] = field(init=False, default=contextlib.nullcontext)
    #: The models that are partitioned, at stage 3.
    _partitions: list[Partitions] = field(init=False, factory=list)
    #: The parameters of each group of the optimizer, by name.
    _groups: list[list[str]] = field(init=False, factory=list)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # an option decides
        provides = {ACCUMULATION, CLIP_BY_NORM, FULL_STATE, MULTI_PROCESS, native.ENGINE}
        own = {
            0: {NO_SYNC}, 1: {NO_SYNC, STEPPED_COPIES}, 2: {STEPPED_COPIES}, 3: {SHARDED_PARAMETERS, STEPPED_COPIES},
        }[self.zero_stage]  # fmt: skip
        return Capabilities(provides=provides | own, conflicts={COMPILATION} if self.zero_stage == 3 else set())

    def how_to_avoid(self, word: str) -> str:
        if word == COMPILATION:
            return (
                'drop compile, or choose strategy="fsdp" or "deepspeed_stage_2": stage 3 gathers the parameters of '
                "each layer in hooks, which torch cannot compile"
            )
        return ""

    # --- Before any process starts -------------------------------------------------------------------------------

    def default_checkpoint(self) -> str | None:
        return self.state_dict_type

    def hook_context(self) -> AbstractContextManager[Any] | None:
        """Let hooks read the shapes of partitioned parameters, and refuse what needs values."""
        return PartitionedReads() if self.zero_stage == 3 else None

    def makes_optimizer(self) -> bool:
        return self.configured_optimizer is not None

    def preload(self, device_type: str) -> None:
        if device_type == "cpu":  # looking for a GPU's ops might initialize it
            start.load(device_type, self.logging_level)
            start.load_late()

    def absorbs(self, policy: PrecisionPolicy) -> bool:
        """The engine itself computes in 16 bits, with fp32 masters."""
        dtype = policy.compute_dtype or policy.param_dtype
        if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
            raise ConfigError(
                f"strategy 'deepspeed' cannot be used with a precision that computes in {dtype}",
                expected="a precision of 32 or 16 bits",
            )
        return self.engine_dtype(policy) is not None

    # --- The model -----------------------------------------------------------------------------------------------

    @hookimpl
    def connect(self, world: World, run: RunContext) -> Collectives:
        is_plan = run.environment.simulated
        self._deepspeed = start.load("cpu" if is_plan else run.device.type, self.logging_level)
        if is_plan:
            self._plan(run)
        self._layers = CheckpointedLayers()
        collectives = super().connect(world, run)
        start.join(run)  # a model may use deepspeed while it is built
        return collectives

    def _plan(self, run: RunContext) -> None:
        """Make the engine run without values."""
        from stratagem_deepspeed.planned import WithoutMemory, check, planning

        check(self)
        self._planning.enter_context(planning(run.device))
        self._making = WithoutMemory

    @hookimpl
    def teardown(self, run: RunContext) -> None:
        if run.environment.simulated:  # its group has gone, and its process ends
            self._planning.close()
        else:
            self._stop(run)
        super().teardown(run)

    def _stop(self, run: RunContext) -> None:
        with start.telling_rank():
            if self._model is not None:
                self._model.stop()
            self._model = None
            for partitions in self._partitions:
                release(partitions.module)
                partitions.leave()
            self._partitions.clear()
        if self._disk is not None:
            self._disk.remove()
            self._disk = None
        if self._layers is not None:
            self._layers.reset()
            self._layers = None
        run.optimizers = []
        gc.collect()  # the engine has reference cycles, and must not outlive the group
        if self._deepspeed is not None:
            start.leave(run)

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        user = module.get_submodule("module")
        stop_earlier(user)
        start.join(run)
        start.count_bytes(run)
        self._use_disk(run)
        config, dtype = self._config(run), self.engine_dtype(run.policy)
        assert self._layers is not None, "made when the ranks connected"
        self._layers.configure(config.get("activation_checkpointing", {}), self.zero_stage, module)
        if self.zero_stage == 3:
            check_not_lost(user)
            check_not_compiled(user)
            check_sizes(user)
            with self._making():
                self._partitions.append(partition(user, lambda: self._maker(user, config, run), dtype, run))
        else:
            run.collectives.replicate(user.to(run.device).parameters())
        run.collectives.replicate(user.to(run.device).buffers())
        self._model = EngineModule(module, dtype, run.device)
        if run.stage != "train":
            self._start(None, run)
        return self._model

    def _config(self, run: RunContext) -> dict[str, Any]:
        """Return the engine's configuration, with this run's own folders on a disk."""
        config = engine_config(self, run)
        if self._disk is not None:
            self._disk.set_paths(config["zero_optimization"])
        return config

    def _use_disk(self, run: RunContext) -> None:
        """Make folders for the next model on the disk, if anything is offloaded to one. Collective."""
        if "nvme" not in (device_of(self.zero, "offload_optimizer"), device_of(self.zero, "offload_param")):
            return
        zero, error = engine_config(self, run)["zero_optimization"], None
        try:
            self._disk = self._disk or Disk(zero, self.called)
        except ConfigError as caught:
            error = caught
        run.collectives.fail_together(error)
        assert self._disk is not None, "made, or an error was raised"
        self._disk.begin()

    def _watched(self) -> Any:
        return contextlib.nullcontext() if self._disk is None else self._disk.watched()

    def _maker(self, module: nn.Module, config: dict[str, Any], run: RunContext) -> Any:
        """Return the ``deepspeed.zero.Init`` that partitions the parameters of `module`."""
        dtype = self.engine_dtype(run.policy)
        watched = contextlib.nullcontext()
        if device_of(self.zero, "offload_param") == "nvme":
            check_parameters(module, config, dtype, run.world_size, self.called)
            start.prepare_ops(start.ops_for(config, None, run.device.type), run)
            watched = self._watched()
        with watched:
            maker = self._deepspeed.zero.Init(config_dict_or_path=config, remote_device=self.remote_device, dtype=dtype)
        if maker.param_swapper is not None:
            patch_swapper(maker.param_swapper)
        return maker

    @hookimpl
    def wrap_optimizers(
        self, optimizers: list[torch.optim.Optimizer], module: nn.Module, run: RunContext
    ) -> list[torch.optim.Optimizer]:
        assert run.module is not None, "wrapped before"
        check_same_optimizers(optimizers, run.module, run)
        self._check_schedulers(run)
        optimizer = the_only(optimizers, self.configured_optimizer, run)
        self._start(optimizer, run)
        engine: Any = module.engine
        if engine is None or engine.optimizer is None:
            return []
        stepped = engine.optimizer
        return [stepped if isinstance(stepped, torch.optim.Optimizer) else EngineOptimizer(stepped)]

    def _start(self, optimizer: torch.optim.Optimizer | None, run: RunContext) -> None:
        """Make the engine, if this stage needs one."""
        assert self._model is not None, "wrapped before"
        assert run.module is not None, "wrapped before"
        if run.stage == "train" or self.zero_stage == 3:
            check_dtypes(run.module, self.engine_dtype(run.policy))
        if self.zero_stage:
            _check_dense(run.module)
        config = self._config(run)
        if optimizer is None and (self.configured_optimizer is None or run.stage != "train"):
            config.pop("optimizer", None)
            config.pop("scheduler", None)
            if self.zero_stage < 3:
                self._model.cast()
                return
        if optimizer is not None and device_of(self.zero, "offload_optimizer") == "nvme":
            check_optimizer(optimizer, config["zero_optimization"]["offload_optimizer"], self.called)
        names = parameter_names(run.module)
        trained = [names[id(p)] for p in run.module.parameters() if p.requires_grad]
        if optimizer is not None and self.zero_stage:
            check_integers(optimizer, run.module)
            check_groups(optimizer)
        self._groups = [trained] if optimizer is None else [
            [names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups
        ]  # fmt: skip
        if not run.environment.simulated:
            start.prepare_ops(start.ops_for(config, optimizer, run.device.type), run)
        start.advise(config, optimizer, run)
        if optimizer is not None and self.zero_stage:
            check_elementwise(optimizer)
            check_tested(optimizer, config, self.origin)
        with self._watched(), self._making():
            self._model.start(self._deepspeed, config, optimizer, run)

    def _check_schedulers(self, run: RunContext) -> None:
        """Refuse two schedulers of one learning rate."""
        own = run.lr_scheduler_configs
        if own and self.configured_scheduler is not None:
            raise ConfigError(
                f"there are two schedulers: {type(own[0].scheduler).__name__} of configure_optimizers, and "
                f"{self.configured_scheduler} of {self.origin}",
                expected="one of the two",
            )

    @hookimpl(wrapper=True)
    def explain_error(self) -> Generator[None, BaseException, BaseException]:
        return explained(of_whole_layers((yield)))

    @hookimpl(optionalhook=True)
    def on_train_epoch_end(self, run: RunContext) -> None:
        if run.model.engine is not None:
            run.model.check_thawed()
        if run.model.manual_writes is not None:
            run.model.manual_writes.always_check_values()

    @hookimpl(wrapper=True)
    def wrap_dataloader(
        self, loader: DataLoader[Any], stage: str, run: RunContext
    ) -> Generator[None, DataLoader[Any], DataLoader[Any]]:
        shared = yield
        wanted, size = micro_batch_size(self, run), getattr(loader, "batch_size", None)
        if stage == "train" and self.user_config is not None and None not in (wanted, size) and wanted != size:
            raise ConfigError(
                f"train_micro_batch_size_per_gpu of {self.origin} comes to {wanted}, and the training loader has "
                f"batches of {size}",
                expected="the same", do='drop it, or set "auto": the loader determines batches',
            )  # fmt: skip
        return shared

    # --- The step ------------------------------------------------------------------------------------------------

    @hookimpl
    def backward(self, loss: torch.Tensor, module: nn.Module, run: RunContext) -> bool:
        wrapped: Any = module  # an EngineModule
        if wrapped.engine is None:
            raise ConfigError("backward was called and DeepSpeed has no optimizer", expected="one optimizer")
        if loss.grad_fn is None:
            raise ConfigError(
                f"the loss of rank {run.rank} reaches no trainable parameter",
                expected="a loss that depends on at least one",
                do="return the usual loss multiplied by zero to skip a batch",
            )
        wrapped.backward(loss)
        if self.zero_stage == 0:  # the other stages compare which parameters got one
            check_reached(any(parameter.grad is not None for parameter, _ in wrapped.dtypes), run)
        return True

    @hookimpl
    def clip_gradients(self, max_norm: float | None, run: RunContext) -> torch.Tensor | float:
        norm: torch.Tensor | float = run.model.clip(max_norm)
        return norm

    @hookimpl(optionalhook=True, wrapper=True)
    def on_before_optimizer_step(self, run: RunContext) -> Generator[None, None, None]:
        gradients = run.model.gradient_guard
        if gradients is None or run.step.num_implementations("on_before_optimizer_step") == 1:
            return (yield)
        with gradients.guarding():
            return (yield)

    @hookimpl
    def optimizer_step(self, run: RunContext) -> bool:
        stepped: bool = run.model.step_optimizer()
        if not stepped and self.engine_dtype(run.policy) is not torch.float16 and run.is_global_zero:
            warnings.warn(
                "DeepSpeed skipped a step: the norm of its gradients is not finite (trainer.position.skipped_steps "
                "counts such steps)",
                stacklevel=2,
            )
        assert self._layers is not None, "made when the ranks connected"
        self._layers.check_used(speaks=run.is_global_zero)
        return stepped

    # --- State ---------------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Any:
        return None if self._model is None else self._model.engine

    @property
    def _zero(self) -> Any:
        return None if self._model is None else self._model.zero

    @property
    def _scaler(self) -> Any:
        return getattr(self._zero, "loss_scaler", None)

    @property
    def _scale_moves(self) -> bool:
        """Whether the loss scale is dynamic; a constant one is an option and not state."""
        return bool(getattr(self._scaler, "dynamic", False))

    @hookimpl
    def model_state(self, module: nn.Module, run: RunContext) -> dict[str, torch.Tensor]:
        if self._model is not None and self._model.manual_writes is not None:
            self._model.manual_writes.take_over()
        if native.takes_over(run):
            return engine_state.of_model(self, self._engine, self._zero, self._groups, module, run)
        return logical.model_state(module, self._zero, self._keeps(module, run), run)

    def _keeps(self, module: nn.Module, run: RunContext) -> Callable[[str], bool]:
        if not self.exclude_frozen_parameters or run.hands_over:
            return lambda _: True
        frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        return lambda name: name not in frozen

    @hookimpl
    def load_model_state(
        self, state: dict[str, torch.Tensor], module: nn.Module, strict: bool, run: RunContext
    ) -> bool:
        if isinstance(state, engine_state.EngineState):
            engine_state.load_model(state, self._engine, self._zero, module, strict, run)
            self._record_weights()
            return True
        if self.zero_stage == 3 and self._engine is not None:
            self._engine.optimizer.empty_partition_cache()  # drop parameters that a forward has gathered
        keeps = self._keeps(module, run)
        optional = {name for name in module.state_dict() if not keeps(name)}
        logical.load_model_state(state, module, self._zero, strict, optional)
        self._record_weights()
        return True

    def _record_weights(self) -> None:
        if self._model is not None and self._model.manual_writes is not None:
            self._model.manual_writes.record()

    @hookimpl
    def optimizer_state(self, optimizer: torch.optim.Optimizer, module: nn.Module, run: RunContext) -> dict[str, Any]:
        if native.takes_over(run):
            return engine_state.EngineState({}, {}, engine=self._engine)
        if self._zero is None:
            return logical_optimizer_state(optimizer, module)
        return logical.optimizer_state(self._zero, module, self._groups, run)

    @hookimpl
    def load_optimizer_state(
        self, state: dict[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module, run: RunContext
    ) -> bool:
        if isinstance(state, engine_state.EngineState):
            strict = getattr(module, "strict_loading", True)
            engine_state.load_optimizer(state, self._engine, self._zero, self._groups, strict, run)
        elif self._zero is None:
            optimizer.load_state_dict(physical_optimizer_state(state, optimizer, module))
        else:
            logical.load_optimizer_state(state, self._zero, module, self._groups)
        return True

    @hookimpl(optionalhook=True)
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.load_full_weights:
            checkpoint.pop("optimizers", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state besides weights and optimizer: the loss scale, and its scheduler's state."""
        scheduler = getattr(self._engine, "lr_scheduler", None)
        kept = {
            name: getattr(self._scaler, name) for name in _SCALER if self._scale_moves and hasattr(self._scaler, name)
        }
        return {"loss_scaler": kept, "scheduler": {} if scheduler is None else scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["loss_scaler"].items():
            if self._scale_moves and hasattr(self._scaler, name):
                setattr(self._scaler, name, value)
        scheduler = getattr(self._engine, "lr_scheduler", None)
        if state["scheduler"] and scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])


#: Attributes of DeepSpeed's loss scaler that change during training.
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _check_dense(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise ConfigError(
                f"{name or type(part).__name__} has sparse gradients, and ZeRO flattens gradients",
                expected="dense gradients", do=f'set sparse=False for {name or "it"}, or set strategy="ddp"',
            )  # fmt: skip
