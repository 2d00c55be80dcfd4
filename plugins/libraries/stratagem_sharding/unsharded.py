"""Keep units unsharded for longer than FSDP does, where a step runs a backward within its forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from stratagem_sharding.param_groups import param_groups


class KeptUnits:
    """Keep units unsharded that a backward within the step (`torch.autograd.grad`) would leave without values.

    FSDP reshards a unit after each backward through it. Two kinds of units are needed for longer:

    * With ``create_graph=True`` the graph of the backward refers to the unit's parameters, and the last backward of
      the step reaches them without any hook of the unit's: these units stay unsharded until the step ends.
    * A unit whose forward has not returned, the root among them, computes with its parameters afterwards.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._root_groups: list[Any] = []
        self._is_last = False

    def watch(self, state: Any) -> None:
        """Notice each backward of the unit with this `state`."""
        for group in param_groups(state):
            group.pre_backward = functools.partial(self._begin, group, type(group).pre_backward)
        finish = type(state)._root_post_backward_final_callback
        state._root_post_backward_final_callback = functools.partial(self._finish, state, finish)

    def _begin(self, group: Any, begin: Any, *arguments: Any) -> None:
        if torch.is_grad_enabled() and group.reshard is not _do_nothing:
            group.reshard = _do_nothing
            self._kept.append(group)
        begin(group, *arguments)

    def _finish(self, state: Any, finish: Any) -> None:
        groups = [group for each in state._state_ctx.all_states for group in param_groups(each)]
        if self._is_last:
            for group in self._kept:  # gradients may have arrived since the unit's own backward was over
                group._training_state = TrainingState.IDLE
            finish(state)
            return
        root = state._state_ctx.iter_forward_root
        forward = TrainingState.FORWARD
        before = {group: group._training_state for group in groups if group._training_state is forward}
        before |= {group: group._training_state for group in self._root_groups}
        for group in before:
            group._training_state = TrainingState.POST_BACKWARD  # then FSDP does nothing with it
        finish(state)
        for group, training_state in before.items():
            group._training_state = training_state
        state._state_ctx.iter_forward_root = root

    @contextlib.contextmanager
    def computing(self, root: Any) -> Iterator[None]:
        """Within, `root` stays in its forward, even where FSDP takes it for ended after a backward of the step's."""
        self._root_groups = [] if root is None else param_groups(root._get_fsdp_state())
        try:
            yield
        finally:
            self._root_groups = []

    @contextlib.contextmanager
    def last_backward(self) -> Iterator[None]:
        """The backward within is that of the step: it reduces gradients and reshards units."""
        self._is_last = True
        try:
            yield
        finally:
            self._is_last = False

    def release(self) -> None:
        """Reshard the units that were kept."""
        while self._kept:
            group = self._kept.pop()
            del group.reshard
            group.reshard()


def _do_nothing() -> None:
    pass
