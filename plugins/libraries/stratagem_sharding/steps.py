"""What happens around each step of a model whose units FSDP2 gathers and reduces."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem_process_group.losses import second_gradient
from stratagem_sharding.gathered import keep_writes
from stratagem_sharding.memory import BufferPool, reuse_freed_blocks
from stratagem_sharding.param_groups import param_groups, units_in, with_gradients
from stratagem_sharding.part_writes import without_lost_writes
from stratagem_sharding.sharded_use import is_sharded_use, sharded_use
from stratagem_sharding.traffic import count_bytes
from stratagem_sharding.unit_order import UnitOrder
from stratagem_sharding.unsharded import KeptUnits

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext


class ShardedSteps:
    """Runs steps of models that were sharded, with what FSDP2 leaves to its caller.

    It compares the order of units between ranks, keeps units for a backward within the forward, and gathers the root
    for manual optimization.

    Args:
        policy: the option that chooses units, for messages.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.order: UnitOrder | None = None
        self._syncs: bool | None = None
        self._kept = KeptUnits()
        self._units: dict[nn.Module, list[Any]] = {}
        #: FSDP has up to four messages at a time: what is computed with, what is prefetched, and gradients, sent and
        #: received.
        self._messages = BufferPool(most=5)
        self._gradients = BufferPool(most=math.inf)
        self._has_stepped = False
        #: Models that have had a backward.
        self._checked: set[nn.Module] = set()
        #: Whether parameters are on the CPU, where the optimizer allocates with the C library.
        self._on_cpu = False

    def add(self, root: nn.Module, run: RunContext, peers: Collectives, num_replicas: int = 1) -> list[Any]:
        """Watch and count what the units of `root` send; return them.

        Args:
            peers: the ranks that use the same units in the same order.
            num_replicas: over how many FSDP itself averages.
        """
        self._syncs = None
        units = self._units[root] = units_in(root)
        self._on_cpu = any(parameter.device.type == "cpu" for parameter in root.parameters())
        self.order = self.order or UnitOrder(run, peers)
        self.order.add(root)
        for unit in units:
            self._kept.watch(unit._get_fsdp_state())
        count_bytes(units, num_replicas, run.collectives.traffic, self.order, self._messages, self._gradients)
        return units

    def step(
        self, root: nn.Module, stage: str, sync: bool, run: RunContext, dtype: torch.dtype | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of a step of `root`, in which operations compute in `dtype` if it is given.

        Args:
            sync: whether the backward of the step reduces gradients.
        """
        assert self.order is not None, "it was added"
        if stage == "train":
            self._reduce_in_backward(root, sync or run.manual)
        compared = self.order.compared((stage, sync, self.order.number(root)))
        contexts: list[AbstractContextManager[Any]] = [compared, without_lost_writes()]
        if dtype is not None:
            contexts.append(torch.autocast(run.device.type, dtype, cache_enabled=not run.manual))
        return self._within(contexts, root, run)

    def _reduce_in_backward(self, root: nn.Module, wanted: bool) -> None:
        if self._syncs is not wanted:
            for unit in self._units[root]:
                unit.set_requires_gradient_sync(wanted, recurse=False)
            self._syncs = wanted

    @contextlib.contextmanager
    def _within(self, contexts: list[AbstractContextManager[Any]], root: nn.Module, run: RunContext) -> Iterator[None]:
        try:
            with contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                with self._kept.computing(root if run.manual else None):
                    yield
                if run.stage == "train" and run.manual and self.order is not None:
                    keep_writes(self._units[root], self.order)
        except RuntimeError as error:
            if is_sharded_use(error):
                raise sharded_use(error, root, self.policy) from error
            raise
        finally:
            self._kept.release()

    @contextlib.contextmanager
    def backward(self, loss: torch.Tensor, root: Any, run: RunContext) -> Iterator[None]:
        """Differentiate `loss`; within, the gradients of shards are complete."""
        assert self.order is not None, "it was added"
        with self.order.compared(("backward", run.sync_gradients)):  # in a loop without a Trainer
            keep_writes(self._units[root], self.order)
            if run.manual:
                # The root's forward has not returned, so FSDP does not notice that a backward begins.
                state = root._get_fsdp_state()
                loss.register_hook(lambda _: state._register_root_post_backward_final_callback())
            with torch.autocast(run.device.type, enabled=False), self._kept.last_backward():
                run.differentiate(loss)
            if run.manual or run.sync_gradients:
                self._check_reduced(root)
            if not run.manual:
                self._kept.release()
            yield
            if run.manual:
                root.unshard()

    def _check_reduced(self, root: nn.Module) -> None:
        """Refuse gradients that came after their unit was reduced; in the first backward that reduces."""
        if root in self._checked:
            return
        self._checked.add(root)
        groups = ((unit, group) for unit in self._units[root] for group in param_groups(unit._get_fsdp_state()))
        if late := next((unit for unit, group in groups if with_gradients(group.fsdp_params)), None):
            raise second_gradient(f"a parameter of a {type(late).__name__.removeprefix('FSDP')}")

    def several_backwards(self) -> AbstractContextManager[None]:
        """Return a context for all backwards of a step that calls parts of a model; `reduce` follows."""
        return self._kept.last_backward()

    def reduce(self, root: nn.Module) -> None:
        """Reduce the gradients of all backwards since the last call, and reshard all units. Collective."""
        self._reduce_in_backward(root, True)
        states = [unit._get_fsdp_state() for unit in self._units[root]]
        states = [state for state in states if state._is_root is not None]  # others were never called
        for state in reversed(states):
            for group in param_groups(state):
                group.post_backward()
        with self._kept.last_backward():
            for state in states:
                if state._is_root:  # each part that is called
                    state._root_post_backward_final_callback()
        self._reduce_in_backward(root, False)
        self._reshard(root)

    @contextlib.contextmanager
    def step_optimizers(self, root: Any, run: RunContext) -> Iterator[None]:
        """Within, the optimizers of one step step."""
        self._kept.release()  # a unit that stayed unsharded would compute with the values before this step
        if not run.manual:
            self._reshard(root)  # such as after a step without a loss
        # The first step makes the state of the optimizer, which stays: it must not be among freed blocks.
        memory = reuse_freed_blocks() if self._has_stepped and self._on_cpu else contextlib.nullcontext()
        assert self.order is not None, "it was added"
        with self.order.compared("optimizer", reads=True), memory:
            yield
        self._has_stepped = True
        self._gradients.drop_free()  # what more than this step's gradients once needed
        if run.manual:  # the rest of this forward must compute with the values after this step
            root.reshard()
            root.unshard()

    def _reshard(self, root: nn.Module) -> None:
        for unit in self._units[root]:  # known: `reshard` would walk over all modules in each step
            unit.reshard()

    def close(self) -> None:
        """Forget the models, free buffers, and end the thread that compares."""
        self._units.clear()
        self._checked.clear()
        self._messages.clear()
        self._gradients.clear()
        self._has_stepped = False
        if self.order is not None:
            self.order.close()
            self.order = None
