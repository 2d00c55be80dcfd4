"""Replace DDP's long errors about parameters with and without gradients by short ones that name the parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stratagem.errors import ConfigError
from stratagem_process_group.losses import check_reached, second_gradient

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Attribute of a replica with a static graph: the parameters that the first step used.
REACHED = "_stratagem_reached"
#: Attribute of a replica: the parameters that were trained when it was first asked for.
_TRAINED = "_stratagem_trained"
#: Minimum steps of a fit before `advice` gives any.
_ENOUGH_STEPS = 10
#: Where functions with a backward in Python are defined that take the parameters which they use as arguments.
_SHOWS_PARAMETERS = ("torch._functorch", "torch.nn.", "stratagem_")
_WITHOUT_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+:((?: \d+)+)")


def check_complete(replica: DistributedDataParallel, run: RunContext) -> None:
    """Raise torch's error for parameters without a gradient now; torch raises it in the next step, if there is one."""
    replica._check_reducer_finalized()
    for parameter in trained(replica):
        if parameter.requires_grad and parameter.grad is not None:
            return
    check_reached(False, run)


def explain(error: RuntimeError, replica: DistributedDataParallel, rank: int, loss: torch.Tensor | None = None) -> None:
    """Raise a short error instead of torch's `error` about parameters with and without gradients; else return."""
    text = str(error)
    if "Expected to have finished reduction in the prior iteration" in text:
        raise _without_gradient(text, replica, rank) from error
    if "Expected to mark a variable ready only once" in text:
        raise second_gradient("a parameter") from error
    if replica.static_graph and "Your training graph has changed in this iteration" in text:
        raise _with_a_new_gradient(replica, rank, loss) from error


def _without_gradient(text: str, replica: DistributedDataParallel, rank: int) -> ConfigError:
    names = getattr(replica, "names", None) or names_of(replica)
    match = _WITHOUT_GRADIENT.search(text)
    numbers = [int(number) for number in match[1].split()] if match else []
    found = f"{_list([names[number] for number in numbers])} got no gradient on rank {rank}"
    if replica.static_graph:
        return _graph_changed(found)
    if replica.find_unused_parameters:
        return ConfigError(
            f"{found}, though training_step returned a tensor that depends on them",
            expected="all returned tensors to contribute to the loss", do="detach the others",
        )  # fmt: skip
    return unused([names[number] for number in numbers], rank)


def unused(names: list[str], rank: int) -> ConfigError:
    """Return the error for parameters that got no gradient and are not searched."""
    return ConfigError(
        f"{_list(names)} got no gradient on rank {rank}, and DDP waits for all of them",
        expected="a loss that every trainable parameter takes part in",
        do='choose strategy="ddp_find_unused_parameters_true" (strategy.ddp.find_unused_parameters: true), or freeze '
        "what is not trained",
    )


def _with_a_new_gradient(replica: DistributedDataParallel, rank: int, loss: torch.Tensor | None) -> ConfigError:
    before, now = vars(replica).get(REACHED, set()), set() if loss is None else reached(loss)
    new = now - before if before else set()
    names = [name for name, parameter in trained_names(replica) if parameter in new]
    return _graph_changed(f"{_list(names)} got a gradient on rank {rank}, and none in the first step")


def _graph_changed(found: str) -> ConfigError:
    return ConfigError(
        f"{found}, while strategy.ddp.static_graph is true",
        expected="every step to use the same parameters",
        do="set strategy.ddp.find_unused_parameters to true instead",
    )


def trained_names(replica: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters that DDP averages, in its order, by their names in the user's module."""
    return [
        (name.removeprefix("module."), parameter)
        for name, parameter in replica.get_submodule("module").named_parameters()
        if parameter.requires_grad
    ]


def trained(replica: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the parameters that DDP averages, without walking over the modules in each step."""
    found: list[torch.Tensor] | None = vars(replica).get(_TRAINED)
    if found is None:
        found = vars(replica)[_TRAINED] = [parameter for _, parameter in trained_names(replica)]
    return found


def names_of(replica: DistributedDataParallel) -> list[str]:
    return [name for name, _ in trained_names(replica)]


def _list(names: list[str], shown: int = 3) -> str:
    """Return the first of `names`, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(names[:shown])}{more}" if names else "some parameters"


def reached(loss: torch.Tensor) -> set[torch.Tensor]:
    """Return the leaves of the graph of `loss`."""
    return {node.variable for node in _graph(loss) if hasattr(node, "variable")}


def left_out(loss: torch.Tensor, replica: DistributedDataParallel) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the trained parameters that the graph of `loss` leaves out, and the names of those that it does not use.

    No names where no graph shows all: with a function of a user's, or a reentrant checkpoint.
    """
    nodes = _graph(loss)
    leaves = {node.variable for node in nodes if hasattr(node, "variable")}
    left = {name: parameter for name, parameter in trained_names(replica) if parameter not in leaves}
    hidden = left and any(
        not getattr(node, "_forward_cls", _graph).__module__.startswith(_SHOWS_PARAMETERS) for node in nodes
    )
    return left, [] if hidden else [*left]


def found_unused(names: list[str]) -> str:
    """Return what to say once unused parameters are searched, of which `names` are this rank's."""
    return (
        f"{_list(names)} got no gradient in the first step, and DDP looks for unused parameters in each step from now "
        "on; freeze what is not trained, or set strategy.ddp.find_unused_parameters to true, which says nothing"
    )


def _graph(loss: torch.Tensor) -> set[Any]:
    seen: set[Any] = {None}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(dict(node.next_functions))
    return seen


def advice(run: RunContext, steps: int) -> str:
    """Return advice about `find_unused_parameters` after a fit; "" if there is none. Collective."""
    # Not "can_set_static_graph" of the logging data: torch writes that only for the first replica of a process.
    changed = not run.model.reducer._ddp_graph_static()
    unused = run.model._get_ddp_logging_data().get("unused_parameter_size", 0) > 0
    changed, unused = run.collectives.any(changed), run.collectives.any(unused)
    if changed or steps < _ENOUGH_STEPS:
        return ""
    if not unused:
        return (
            f"strategy.ddp.find_unused_parameters is true and no parameter was unused in {steps} steps: set it to "
            "false to save a traversal of the graph in each step"
        )
    return (
        f"strategy.ddp.find_unused_parameters is true and the same parameters were unused in all {steps} steps: if "
        "this never changes, set strategy.ddp.static_graph to save a traversal of the graph in each step"
    )
