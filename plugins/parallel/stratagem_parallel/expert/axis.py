"""The axis `expert`: divides the experts of layers, and makes steps send tokens to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from stratagem.api.parameters import replace_parameter
from stratagem.errors import ConfigError, nearest
from stratagem_parallel.expert.dispatch import DispatchedExperts
from stratagem_parallel.placement import check_no_hooks

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext

#: The style of modules of experts in a plan.
STYLE = "expert"


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
        replace_parameter(part, parameter)
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


# --- Which modules hold experts: from the plan, or from their parameters -----------------------------------------


def expert_modules(user: nn.Module, plan: Any, size: int) -> dict[str, nn.Module]:
    """Return the modules of `user` whose experts are divided over `size` ranks, by name.

    Args:
        plan: the option; modules of style "expert" are taken from it, else from the module's ``parallel_plan()``, else
            every module is taken that has `num_experts` and parameters with that many rows.

    Raises:
        ConfigError: there is none, or the experts of one cannot be divided.
    """
    own: Any = getattr(user, "parallel_plan", None)
    if not isinstance(plan, dict) and callable(own):
        plan = own()
    patterns = [name for name, style in plan.items() if style == STYLE] if isinstance(plan, dict) else []
    modules = dict(user.named_modules())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ConfigError(
                f"the plan's pattern {pattern!r} of style 'expert' matches no module of {type(user).__name__}",
                expected="the name of a module", do=nearest(pattern, list(modules)),
            )  # fmt: skip
    if patterns:
        found = {name: part for name, part in modules.items() if any(fnmatchcase(name, each) for each in patterns)}
    else:
        found = {name: part for name, part in modules.items() if _is_stacked(part)}
    if not found:
        raise ConfigError(
            f"strategy.parallel.expert is {size}, and {type(user).__name__} has no layer of experts",
            expected="modules with an attribute num_experts and parameters of shape (num_experts, ...)",
            do="name the modules in strategy.parallel.plan with style 'expert', or choose another axis",
        )
    names = _names_of_parameters(user)
    for name, module in found.items():
        _check(name, module, size, names)
    return found


def _is_stacked(module: nn.Module) -> bool:
    number = getattr(module, "num_experts", None)
    shapes = [parameter.shape for parameter in module.parameters()]
    return (
        isinstance(number, int)
        and any(len(shape) > 2 for shape in shapes)  # a router has one vector for each expert
        and all(len(shape) > 0 and shape[0] == number for shape in shapes)
    )


def _check(name: str, module: nn.Module, size: int, names: dict[int, list[str]]) -> None:
    parameters = dict(module.named_parameters())
    number = getattr(module, "num_experts", None)
    rows = {parameter.shape[0] if parameter.dim() else 0 for parameter in parameters.values()}
    if not isinstance(number, int) or rows != {number}:
        shapes = ", ".join(f"{key} {tuple(each.shape)}" for key, each in parameters.items()) or "none"
        raise ConfigError(
            f"{name} has style 'expert', num_experts {number} and parameters {shapes}",
            expected="an attribute num_experts, and parameters of shape (num_experts, ...)",
            do="stack the parameters of its experts: a list of modules cannot be divided",
        )
    if number % size:
        raise ConfigError(
            f"{name} has {number} experts, and strategy.parallel.expert is {size}",
            expected=f"a multiple of {size}", do="choose a divisor of the number of experts",
        )  # fmt: skip
    for buffer_name, buffer in module.named_buffers():
        if buffer.dim() and buffer.shape[0] == number:
            raise ConfigError(
                f"{name} has style 'expert' and a buffer {buffer_name!r} with a row for each expert",
                expected="parameters only: buffers are not divided", do="keep the buffer in the router",
            )  # fmt: skip
    for own, parameter in parameters.items():
        check_no_hooks(parameter, f"{name}.{own}", "expert")
        if len(names[id(parameter)]) > 1:
            raise ConfigError(
                f"{name}.{own} of style 'expert' is also {' and '.join(names[id(parameter)][1:])}",
                expected="experts that are not tied to other parameters",
            )


def _names_of_parameters(user: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in user.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
