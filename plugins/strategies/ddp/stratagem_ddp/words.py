"""What torch's DDP says in a page about parameters with and without gradients, in a sentence that names them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Where a replica with a static graph remembers what its first step reached.
REACHED = "_stratagem_reached"
#: Steps from which on it is worth saying that none of them needed a search.
_ENOUGH_STEPS = 10
_WITHOUT_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+:((?: \d+)+)")


def check_complete(replica: DistributedDataParallel, run: RunContext) -> None:
    """Raise torch's error for parameters without a gradient now, and not in the next step: there may be none."""
    replica._check_reducer_finalized()
    if not run.manual and all(p.grad is None for p in replica.parameters() if p.requires_grad):
        raise ConfigError(
            f"the loss of rank {run.rank} reaches no trainable parameter, and the other ranks wait for its gradients",
            expected="a loss that was computed from them",
            do="return the usual loss multiplied by zero to skip a batch",
        )


def explain(error: RuntimeError, replica: DistributedDataParallel, rank: int, loss: torch.Tensor | None = None) -> None:
    """Raise what torch says in a page about parameters with and without gradients as a sentence."""
    text = str(error)
    if "Expected to have finished reduction in the prior iteration" in text:
        raise _without_gradient(text, replica, rank) from error
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
            f"{found}, though training_step returned something that was computed from them",
            expected="all that training_step returns to take part in the loss", do="detach the rest",
        )  # fmt: skip
    return ConfigError(
        f"{found}, and DDP waits for all of them",
        expected="a loss that every trainable parameter takes part in",
        do='choose strategy="ddp_find_unused_parameters_true" (strategy.ddp.find_unused_parameters: true), or freeze '
        "what is not trained",
    )


def _with_a_new_gradient(replica: DistributedDataParallel, rank: int, loss: torch.Tensor | None) -> ConfigError:
    before, now = vars(replica).get(REACHED, set()), set() if loss is None else reached(loss)
    new = now - before if before else set()
    names = [name for name, parameter in _trained(replica) if parameter in new]
    return _graph_changed(f"{_list(names)} got a gradient on rank {rank}, and none in the first step")


def _graph_changed(found: str) -> ConfigError:
    return ConfigError(
        f"{found}, while strategy.ddp.static_graph is true",
        expected="every step to use the same parameters",
        do="set strategy.ddp.find_unused_parameters to true in its place",
    )


def _trained(replica: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters that DDP counts, in its order, by the names that the user gave them."""
    return [
        (name.removeprefix("module."), parameter)
        for name, parameter in replica.module.named_parameters()
        if parameter.requires_grad
    ]


def names_of(replica: DistributedDataParallel) -> list[str]:
    return [name for name, _ in _trained(replica)]


def _list(names: list[str], shown: int = 3) -> str:
    """Return the first of `names`, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(names[:shown])}{more}" if names else "some parameters"


def reached(loss: torch.Tensor) -> set[torch.Tensor]:
    """Return the leaves of the graph of `loss`."""
    leaves, seen, waiting = set(), set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        waiting += [parent for parent, _ in node.next_functions]
    return leaves


def advice(run: RunContext, steps: int) -> str:
    """Return what the search for unused parameters was good for in this fit, if that is worth a word. Collective."""
    # Not "can_set_static_graph" of the logging data, which torch writes for the first replica of a process alone.
    changed = not run.model.reducer._ddp_graph_static()
    unused = run.model._get_ddp_logging_data().get("unused_parameter_size", 0) > 0
    changed, unused = run.collectives.any(changed), run.collectives.any(unused)
    if changed or steps < _ENOUGH_STEPS:
        return ""
    if not unused:
        return (
            f"strategy.ddp.find_unused_parameters is true and no parameter went unused in {steps} steps: without it, "
            "each step saves a walk through the graph"
        )
    return (
        f"strategy.ddp.find_unused_parameters is true and the same parameters went unused in all {steps} steps: if "
        "that will stay so, strategy.ddp.static_graph saves each step a walk through the graph"
    )
