"""Colossal-AI's wrapped model, for steps that the trainer drives. Imports Colossal-AI.

[Note: not boosted]
`Booster.boost` would also replace every batch norm by torch's SyncBatchNorm, which fails on a CPU and stays in the
user's module after the fit. So the model is made as the plugin makes it, from the plugin's arguments, without that.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.booster.plugin.torch_ddp_plugin import TorchDDPModel
from torch.nn.parallel.distributed import _find_tensors

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api.traffic import Traffic

_WITHOUT_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+:((?: \d+)+)")


def replicated(module: torch.nn.Module, options: dict[str, Any], group: Any, traffic: Traffic) -> Replica:
    """Return `module` wrapped as TorchDDPPlugin with `options` does; it averages over the ranks of `group`."""
    plugin = TorchDDPPlugin(**options)
    return Replica(module, traffic, process_group=group, **plugin.ddp_kwargs)


class Replica(TorchDDPModel):  # type: ignore[misc]  # the engine has no types
    """Averages gradients in training; sends nothing in evaluation, where ranks may have different batches."""

    def __init__(self, module: torch.nn.Module, traffic: Traffic, **options: Any) -> None:
        super().__init__(module, **options)
        #: Names of the parameters that are averaged, by DDP's numbers.
        self.names = self._trained()
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        #: Whether the graph is static and no backward has run: the first one averages, also during accumulation.
        self.learns_its_graph = self.module.static_graph
        self._count_buffers(traffic)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module.module(*inputs, **kwargs)
        with self._explained():
            return super().forward(*inputs, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.learns_its_graph else self.module.no_sync()

    @contextlib.contextmanager
    def reducing(self, loss: torch.Tensor, prepare: bool) -> Iterator[None]:
        """Run a backward within. With `prepare` its forward ran under `no_sync`, and it shall average nevertheless."""
        ddp = self.module
        if prepare:
            ddp.require_backward_grad_sync = True
            ddp.reducer.prepare_for_backward(list(_find_tensors(loss)) if ddp.find_unused_parameters else [])
        try:
            with self._explained():
                yield
        finally:
            if prepare:
                ddp.require_backward_grad_sync = False
        if prepare:
            ddp.require_forward_param_sync = True  # the next forward broadcasts buffers
        self.learns_its_graph = False

    def check_complete(self, manual: bool, rank: int) -> None:
        """Raise an error if a parameter that DDP waits for got no gradient."""
        with self._explained():
            self.module._check_reducer_finalized()
        if not manual and all(p.grad is None for p in self.trained if p.requires_grad):
            raise ConfigError(
                f"the loss of rank {rank} reaches no trainable parameter, and the other ranks wait for its gradients",
                expected="a loss that depends on them",
                do="return the usual loss multiplied by zero to skip a batch",
            )

    def check_frozen(self) -> None:
        """Refuse a parameter that is trained now and was frozen when the fit began: it is not averaged."""
        thawed = set(self._trained()) - set(self.names)
        if thawed:
            raise ConfigError(
                f"{min(thawed)!r} was frozen when training began and is trained now, which DDP does not support",
                expected="the same trainable parameters during a fit",
                do="make it trainable before the fit, or train in two fits",
            )

    def _trained(self) -> list[str]:
        parameters = self.module.module.named_parameters()
        return [name.removeprefix("module.") for name, each in parameters if each.requires_grad]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Replace DDP's error about parameters without gradients by one that names them."""
        try:
            yield
        except RuntimeError as error:
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            match = _WITHOUT_GRADIENT.search(str(error))
            names = [self.names[int(number)] for number in match[1].split()] if match else ["some parameters"]
            raise ConfigError(
                f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''} got no gradient, and DDP waits for it",
                expected="a loss that every trainable parameter takes part in",
                do="set strategy.colossalai.find_unused_parameters, or freeze what is not trained",
            ) from error

    def _count_buffers(self, traffic: Traffic) -> None:
        """Let `traffic` count the buffers that DDP broadcasts."""
        ddp = self.module
        send, size = ddp._sync_buffers, sum(buffer.nbytes for buffer in ddp.modules_buffers)
        world_size = torch.distributed.get_world_size(ddp.process_group)

        def counted() -> None:
            send()
            traffic.add("broadcast", size, world_size, sender="buffers")

        ddp._sync_buffers = counted
