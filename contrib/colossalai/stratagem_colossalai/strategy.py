"""The strategy `colossalai`, and its plugin "ddp": a replica of the model in every process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from attrs import define, field

from stratagem.api import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CLOSURE_OPTIMIZERS,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    FULL_STATE,
    GRADIENT_BUCKETS,
    LOCAL_STEPS,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    WITHIN_TEAM,
    Capabilities,
    hookimpl,
)
from stratagem.errors import ConfigError
from stratagem_buckets.reducer import bucket_reducer
from stratagem_colossalai import engine
from stratagem_colossalai.options import PATH, ColossalAIOptions
from stratagem_process_group import group_options_after

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stratagem.api import RunContext

#: The classes of plugins that are engines, by plugin; `sharded.py` adds them.
ENGINES: dict[str, type[Any]] = {}


@define(eq=False, kw_only=True, field_transformer=group_options_after("min_chunk_size"))
class ColossalAIStrategy(ColossalAIOptions):
    """Train with a plugin of Colossal-AI's Booster: TorchDDPPlugin, LowLevelZeroPlugin or GeminiPlugin.

    With `plugin` "low_level_zero" or "gemini" the instance is of a subclass, whose hooks run that engine.

    Li et al., "Colossal-AI: A Unified Deep Learning System For Large-Scale Parallel Training", ICPP 2023.
    """

    #: Bytes of gradients that are sent in a step without comm hooks.
    _num_bytes: int = field(init=False, default=0)

    capabilities = Capabilities(
        provides={
            CLIP_BY_NORM, CLIP_BY_VALUE, CLOSURE_OPTIMIZERS, CUSTOM_CLIPPING, CUSTOM_STEP, FULL_STATE,
            GRADIENT_BUCKETS, LOCAL_STEPS, MANUAL_OPTIMIZATION, MULTI_PROCESS, MULTIPLE_OPTIMIZERS, NO_SYNC,
            WITHIN_TEAM,
        }
    )  # fmt: skip

    def __new__(cls, *_: Any, plugin: str = "ddp", **__: Any) -> Self:
        made: Any = ENGINES.get(plugin, cls) if cls is ColossalAIStrategy else cls
        instance: Self = object.__new__(made)
        return instance

    def preload(self, device_type: str) -> None:
        if device_type == "cpu":  # the import asks for the current GPU, which initializes it
            engine.load(device_type)

    # --- The model -----------------------------------------------------------------------------------------------

    @hookimpl
    def on_connect(self, run: RunContext) -> None:
        if run.environment.simulated:
            raise ConfigError(
                "strategy is 'colossalai', whose engines read values, and a plan has shapes only",
                do='plan strategy="ddp" or "ddp_sharded"',
            )
        engine.load(run.device.type)

    @hookimpl
    def wrap_model(self, module: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        module = module.to(run.device)
        self._num_bytes = 0
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if run.stage != "train" or not trained:
            run.collectives.replicate((*module.parameters(), *module.buffers()))
            return module
        if self.static_graph and run.manual:
            raise ConfigError(
                f"{PATH}.static_graph is true and the module uses manual optimization",
                expected="false: the parameters that a loss depends on may change between calls",
            )
        from stratagem_colossalai.replica import replicated

        replica = replicated(module, self._options(run), run.peers.group, run.collectives.traffic)
        reducer = bucket_reducer(run)
        if reducer is None:
            self._num_bytes = sum(parameter.nbytes for parameter in trained)
        else:
            reducer.serve(replica.module)
        return replica

    def _options(self, run: RunContext) -> dict[str, Any]:
        """Return the arguments of Colossal-AI's plugin."""
        search = run.manual if self.find_unused_parameters is None else self.find_unused_parameters
        return {
            "broadcast_buffers": self.broadcast_buffers,
            "bucket_cap_mb": self.bucket_cap_mb,
            "find_unused_parameters": search,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
        }

    # --- The step ------------------------------------------------------------------------------------------------

    @hookimpl
    def step_context(self, stage: str, sync: bool, run: RunContext) -> AbstractContextManager[Any] | None:
        replica = self._replica(run.model)
        return replica.no_sync() if stage == "train" and not sync and replica is not None else None

    @hookimpl
    def backward(self, loss: torch.Tensor, module: torch.nn.Module, run: RunContext) -> bool:
        replica = self._replica(module)
        if replica is None:
            run.differentiate(loss)
            return True
        averages = run.sync_gradients or replica.learns_its_graph
        with replica.reducing(loss, prepare=run.manual and run.sync_gradients):
            run.differentiate(loss)
        if run.sync_gradients and run.owns_loop:
            replica.check_complete(run.manual, run.rank)
        if self._num_bytes and averages:
            run.collectives.traffic.add("all_reduce", self._num_bytes, run.peers.world_size, sender="gradients")
        return True

    @hookimpl(optionalhook=True)
    def on_train_epoch_end(self, run: RunContext) -> None:
        replica = self._replica(run.model)
        if replica is not None:
            replica.check_frozen()

    @staticmethod
    def _replica(model: Any) -> Any:
        """Return `model` if it averages gradients, else None."""
        return model if hasattr(model, "check_complete") else None
