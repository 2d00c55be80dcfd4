"""The axis `expert`: divides the experts of layers, and makes steps send tokens to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from stratagem.api.parameters import take_place
from stratagem_parallel.expert.dispatch import DispatchedExperts
from stratagem_parallel.expert.plan import expert_modules

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext


class ExpertAxis:
    """Experts that are divided over the ranks of `over`, which are the ranks of the one-dimensional `mesh`."""

    def __init__(self, over: Collectives, mesh: Any) -> None:
        self.over, self.mesh = over, mesh
        self._layers: dict[nn.Module, DispatchedExperts] = {}

    def find(self, user: nn.Module, plan: Any) -> None:
        """Find the layers of experts of `user`, according to the option `plan`."""
        modules = expert_modules(user, plan, self.over.world_size)
        self._layers = {module: DispatchedExperts(module, name, self.over) for name, module in modules.items()}

    def divide(self, fill: Callable[[nn.Module], None], run: RunContext) -> None:
        """Keep this rank's experts of each layer: parameters become DTensors. Once for each model.

        Args:
            fill: gives values to a part that was built without them; it leaves alone what other stages hold.
        """
        for module in self._layers:
            fill(module)
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None and not parameter.is_meta:
                        part._parameters[name] = self._rows_of(parameter)
        layers = ", ".join(f"{layer.name} ({layer.number})" for layer in self._layers.values())
        run.print(
            f"strategy.parallel.expert: each of {self.over.world_size} ranks holds a part of the experts of {layers}"
        )

    def _rows_of(self, parameter: nn.Parameter) -> nn.Parameter:
        rows = parameter.detach().chunk(self.over.world_size)[self.over.rank].clone()  # a view would keep all of them
        whole = DTensor.from_local(rows, self.mesh, [Shard(0)], run_check=False)
        part = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        take_place(part, parameter)
        return part

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Within: layers of experts send tokens to the ranks that hold their experts."""
        layers = {module: layer for module, layer in self._layers.items() if "forward" not in module.__dict__}
        for module, layer in layers.items():
            module.__dict__["forward"] = layer
        try:
            yield
        finally:
            for module in layers:
                del module.__dict__["forward"]
