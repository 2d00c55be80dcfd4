"""The base class of strategies that connect a torch process group with options of the user's."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from attrs import define, field, fields

from stratagem.api import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CUSTOM_STEP,
    FULL_STATE,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    WITHIN_TEAM,
    Strategy,
    hookimpl,
)
from stratagem.api.validators import duration, not_empty
from stratagem_process_group.options import gloo_options, nccl_options
from stratagem_process_group.variables import unset_variables, variables_set

if TYPE_CHECKING:
    from attrs import Attribute

    from stratagem.api import Collectives, RunContext, World

#: What strategies over a process group provide, unless an engine of their own takes the steps.
USUAL = frozenset({
    CLIP_BY_NORM, CLIP_BY_VALUE, CUSTOM_STEP, FULL_STATE, MANUAL_OPTIMIZATION, MULTI_PROCESS, MULTIPLE_OPTIMIZERS,
    NO_SYNC, WITHIN_TEAM,
})  # fmt: skip
#: NCCL's variable that lets ranks share a GPU, as an option.
_SHARING = "multi_rank_gpu_enable"


@define(eq=False, kw_only=True)
class ProcessGroupStrategy(Strategy):
    """Connects the process group with the user's timeout, backend and options for NCCL and gloo.

    A subclass with a `connect`, `teardown` or `__attrs_post_init__` of its own calls this one's.
    """

    #: How long a rank waits for the others in a collective before it gives up, in seconds or as a timedelta; by default
    #: 10 minutes over NCCL and 30 otherwise.
    timeout: timedelta | None = field(default=None, validator=duration)
    #: How long a rank waits for the others to start, given in the same way; by default as long as `timeout`, and at
    #: least 5 minutes.
    start_timeout: timedelta | None = field(default=None, validator=duration)
    #: torch.distributed backend; by default the one that fits the device (nccl for CUDA, gloo for the CPU).
    process_group_backend: str | None = field(default=None, validator=not_empty, metadata={"example": "gloo"})
    #: NCCL's variables, in lower case and without the prefix: {"socket_ifname": "eth0"}. What speeds up one network
    #: slows down another; by default NCCL chooses them.
    nccl: dict[str, Any] | None = field(
        default=None, validator=nccl_options, metadata={"example": {"socket_ifname": "eth0"}}
    )
    #: gloo's variables, given in the same way. Beside NCCL, gloo sends objects and decisions.
    gloo: dict[str, Any] | None = field(
        default=None, validator=gloo_options, metadata={"example": {"socket_ifname": "eth0"}}
    )

    def __attrs_post_init__(self) -> None:
        for name in ("timeout", "start_timeout"):
            if isinstance(given := getattr(self, name), int | float):
                setattr(self, name, timedelta(seconds=given))

    def timeouts(self) -> tuple[timedelta | None, timedelta | None]:
        return self.start_timeout, self.timeout

    def may_share_device(self) -> bool:
        """Whether the user chose a backend for which ranks may share a GPU, or told NCCL to allow it."""
        backend = (self.process_group_backend or "nccl").lower()
        asked = (self.nccl or {}).get(_SHARING, os.environ.get(f"NCCL_{_SHARING.upper()}", "0"))
        return "nccl" not in backend or str(asked) not in ("0", "False")

    @hookimpl
    def connect(self, world: World, run: RunContext) -> Collectives:
        from stratagem.distributed.process_group import join

        backend = self.process_group_backend or run.accelerator.backend
        with variables_set(self, run, backend):
            return join(world, backend, run)

    @hookimpl
    def teardown(self, run: RunContext) -> None:
        unset_variables(run)

    @hookimpl(wrapper=True)
    def explain_error(self) -> Generator[None, BaseException, BaseException]:
        from stratagem_process_group.torch_errors import explained

        return explained((yield))

    def buffer_peers(self, run: RunContext) -> Collectives | None:
        """Return the ranks that train with the same buffers and evaluate with those of the first; None for no ranks."""
        return run.peers

    @hookimpl(optionalhook=True)
    def on_validation_start(self, run: RunContext) -> None:
        """Evaluate with the first rank's buffers, which checkpoints have: ranks differ after a step."""
        import torch

        from stratagem_process_group.messages import broadcast_from_first, local_tensor

        over = self.buffer_peers(run)
        if over is None or over.world_size == 1:
            return
        assert run.module is not None, "it was wrapped"
        with torch.inference_mode():  # buffers may have been made in it
            buffers = {name: local_tensor(buffer) for name, buffer in run.module.named_buffers() if not buffer.is_meta}
            broadcast_from_first(buffers, over, run.device, sender="buffers")

    on_test_start = on_predict_start = on_validation_start


def group_options_after(option: str) -> Callable[[type, list[Attribute[Any]]], list[Attribute[Any]]]:
    """Return a `field_transformer` that lists the options of `ProcessGroupStrategy` behind `option`.

    attrs lists a base class's options first; people read those that make a strategy what it is first. A subclass of
    an attrs class that has this transformer needs it again.
    """

    def reorder(_: type, attributes: list[Attribute[Any]]) -> list[Attribute[Any]]:
        shared = {each.name for each in fields(ProcessGroupStrategy)}
        own = [each for each in attributes if each.name not in shared]
        place = 1 + [each.name for each in own].index(option)
        return [*own[:place], *(each for each in attributes if each.name in shared), *own[place:]]

    return reorder
