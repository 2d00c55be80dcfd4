"""Tell the attempts of a restarted run apart in a store that outlives them.

[Note: attempts]
torchrun's agent keeps one store over all restarts of its workers, at one port. It still holds what failed workers
wrote, such as the addresses at which their gloo groups listened. Variables do not number the attempts: each agent
counts its own restarts, and none counts the arrival or the loss of another agent. So the ranks agree on a generation, a
prefix of all keys of this attempt, through the store itself:

* each other rank writes a *nonce* that no process used before under its rank, and waits for the answer to that nonce;
* rank 0 draws the generation and answers the nonces of all ranks, again when a nonce changes (the first one may be that
  of a dead process), until all have confirmed this generation.

An answer belongs to one nonce and a confirmation to one generation, so neither can be left over from a dead attempt. A
nonce comes with the world size: an orphan of a lost agent cannot answer a rank of the smaller world that goes on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from attrs import evolve

from stratagem.errors import LaunchError

if TYPE_CHECKING:
    from stratagem.api.world import World

_POLL_S = 0.01


def agree_on_generation(world: World, timeout: timedelta) -> World:
    """Return `world` with a generation that no earlier attempt had. Collective, through the store that is hosted.

    Raises:
        LaunchError: another rank did not connect to the store within `timeout`.
    """
    import torch.distributed as dist

    assert world.main_port is not None, "the store is hosted"
    missing, deadline = 0, time.monotonic() + timeout.total_seconds()
    try:
        store: Any = dist.TCPStore(world.main_address, world.main_port, is_master=False, timeout=timeout)
        store = dist.PrefixStore("stratagem/attempts", store)
        if world.rank != 0:
            return evolve(world, generation=_ask(store, world))
        generation = secrets.token_hex(8)
        for missing in _unanswered(store, world, generation):  # noqa: B007 - the message has it
            if time.monotonic() > deadline:
                raise dist.DistError("the time is up")
            time.sleep(_POLL_S)
    except dist.DistError as error:
        raise LaunchError(
            f"rank {world.rank} of {world.world_size} waited for rank {missing} at {world.main_address}:"
            f"{world.main_port} ({str(error).splitlines()[0]})",
            do="check that all ranks were started and can reach that address",
        ) from error
    return evolve(world, generation=generation)


def _ask(store: Any, world: World) -> str:
    nonce = secrets.token_hex(8)
    store.set(f"nonce/{world.rank}", f"{nonce} of {world.world_size}")
    generation: str = store.get(f"generation/{nonce}").decode()
    store.set(f"confirmed/{generation}/{world.rank}", "")
    return generation


def _unanswered(store: Any, world: World, generation: str) -> Iterator[int]:
    """Tell all other ranks the `generation`; yield the first rank that has not confirmed it, until there is none."""
    answered: set[str] = set()
    pending = list(range(1, world.world_size))
    while pending:
        for rank in pending:
            if store.check([f"nonce/{rank}"]):
                nonce, _, size = store.get(f"nonce/{rank}").decode().partition(" of ")
                if nonce not in answered and int(size) == world.world_size:
                    answered.add(nonce)
                    store.set(f"generation/{nonce}", generation)
        pending = [rank for rank in pending if not store.check([f"confirmed/{generation}/{rank}"])]
        if pending:
            yield pending[0]
