"""Check that all ranks compute the same layers in the same order, and name a rank that does not.

Stage 3 gathers a layer's parameters on all ranks at once, so all ranks must compute the same layers in the same order:
the forward and backward of each layer, and the gradient of each parameter, are events of `stratagem_sharding.order`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.distributed.comparison import fingerprint
from stratagem.errors import ConfigError
from stratagem_process_group.comparison import are_equal
from stratagem_sharding.order import Order

if TYPE_CHECKING:
    from stratagem.api import RunContext


class LayerOrder(Order):
    """The layers of each step, in order. Made on all ranks at the same time."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run, run.collectives.new_group())
        #: The error that was raised; nothing is gathered after it.
        self.error: ConfigError | None = None

    def begin_step(self, step: str) -> None:
        """Begin a step of the module, which ends the one before. All ranks run the same steps."""
        if self._open:
            self.end()
        self.begin(step)

    def visit(self, what: str) -> None:
        """Return once all ranks are about to compute `what`.

        Raises:
            ConfigError: another rank is about to compute something else; on all ranks.
        """
        self.next((what,))

    def _error(self, found: Mapping[int, tuple[Any, ...]]) -> ConfigError:
        reached = self._told(found, lambda event: f"reached {event[0] if event else 'none that it has reported'}")
        self.error = ConfigError(
            f"ranks went through different layers: {reached}, and stage 3 gathers each layer on all ranks at once",
            expected="the same layers in the same order on every rank",
            do="use the layer on every rank, multiplied by zero where it is not needed, or set "
            'strategy="ddp_find_unused_parameters_true"',
        )
        return self.error


class EngineTrace:
    """Reports an engine's layers and gradients to a `LayerOrder`."""

    def __init__(self, order: LayerOrder, engine: Any, user: nn.Module) -> None:
        self.order, self._offload = order, getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        names = {id(part): name or type(part).__name__ for name, part in user.named_modules()}
        self._layers = {
            id(part): tuple(f"the {way} of {names.get(id(part), type(part).__name__)!r}" for way in _WAYS)
            for part in engine.module.modules()
        }
        self._gradients = {id(each): f"the gradient of {name!r}" for name, each in user.named_parameters()}
        for number, way in enumerate(_WAYS):
            self._report(self._offload, f"pre_sub_module_{way}_function", functools.partial(self._layer, number))
        if self._offload is not engine.optimizer:
            self._report(engine.optimizer, "reduce_ready_partitions_and_remove_grads", self._gradient)
            self._report(engine, "_backward_epilogue", lambda: "the end of backward")

    def _report(self, owner: Any, name: str, what: Callable[..., str]) -> None:
        """Have `name` of `owner` visit `what` it is called with, first."""
        visit, inner = self.order.visit, getattr(owner, name)

        def visit_first(*arguments: Any) -> None:
            visit(what(*arguments))
            inner(*arguments)

        owner.__dict__[name] = visit_first

    def _layer(self, number: int, layer: nn.Module) -> str:
        ways = self._layers.get(id(layer))
        return f"the {_WAYS[number]} of {type(layer).__name__!r}" if ways is None else ways[number]

    def _gradient(self, parameter: nn.Parameter) -> str:
        return self._gradients.get(id(parameter), "the gradient of a parameter without a name")

    def stop(self) -> None:
        """Stop the thread."""
        self.order.close()
        if self.order.error is not None:
            self._abandon_gathers()

    def _abandon_gathers(self) -> None:
        """Abandon pending gathers, which other ranks do not join; the parameters are partitioned as before."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        registry = getattr(self._offload.module, "ds_inflight_param_registry", None)
        if registry is not None:
            registry.data.clear()
        for parameter in self._offload.module.parameters():
            if getattr(parameter, "ds_status", None) is ZeroParamStatus.INFLIGHT:
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


_WAYS = ("forward", "backward")


class GradientOrder:
    """Records which parameters received gradients, in order, to compare the ranks.

    Stages 1 and 2 reduce buffers of gradients over the ranks. If ranks use different parameters, their buffers have
    different layouts, and gradients of different parameters would be added without an error message.
    """

    def __init__(self, parameters: list[nn.Parameter], run: RunContext) -> None:
        self._run, self._order = run, list[int]()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, index))
            for index, parameter in enumerate(parameters)
        ]

    def _arrived(self, index: int, _: torch.Tensor) -> None:
        self._order.append(index)

    def compare(self, *, ordered: bool) -> None:
        """Check that all ranks recorded the same parameters since the last call. Collective.

        Raises:
            ConfigError: two ranks differ; on every rank.
        """
        seen = self._order if ordered else sorted(set(self._order))
        self._order = []
        if not are_equal(torch.tensor(fingerprint(repr(seen))), self._run.collectives):
            order = ", in the same order" if ordered else ""
            raise ConfigError(
                f"ranks used different parameters in one step{order and ', or in another order'}, and DeepSpeed would "
                "add the gradients of different parameters",
                expected=f"a loss that uses the same parameters on every rank{order}",
                do='add unused parameters times zero to the loss, or set strategy="ddp_find_unused_parameters_true"',
            )

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
