"""Refuse ranks that were started with different settings, before they hang.

With different settings on two ranks collectives do not match: a hang, or an abort far from the cause. So ranks compare
their resolved plugins before they join a group, and each call (fit, validate ...) before they run it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stratagem.errors import ConfigError, LaunchError
from stratagem.stack.lock import differences

if TYPE_CHECKING:
    from stratagem.api.world import Collectives, World

_DO = "start every rank with the same code, files, variables and packages"
#: How many comparisons this process has made; the same on all ranks.
_comparisons = 0


def agree_before_connecting(world: World, facts: Mapping[str, Any], timeout: timedelta) -> bool:
    """Compare `facts` with rank 0's over the store that a launcher hosts, before the process group is connected.

    Returns:
        Whether they were compared. If not, because no launcher hosts a store, call `agree` after connecting.

    Raises:
        ConfigError: on every rank, with the rank and the first differences.
        LaunchError: the other ranks did not connect within `timeout`.
    """
    if world.world_size == 1 or not world.store_hosted or world.main_port is None:
        return False
    import torch.distributed as dist

    global _comparisons
    _comparisons += 1
    place = f"stratagem/agreement/{world.generation}/{_comparisons}"
    try:
        store: Any = dist.TCPStore(world.main_address, world.main_port, is_master=False, timeout=timeout)
        store = dist.PrefixStore(place, store)
        if world.rank == 0:
            store.set("facts", json.dumps(dict(facts)))
        theirs = json.loads(store.get("facts"))
        if theirs is None:
            return False  # rank 0 was started by hand: no launcher hosts a store on its node
        if found := _difference(facts, theirs, world.rank):
            store.compare_set("verdict", "", found)
        if store.add("arrived", 1) == world.world_size:
            store.compare_set("verdict", "", "agreed")
        verdict = store.get("verdict").decode()
    except dist.DistError as error:
        raise LaunchError(
            f"rank {world.rank} of {world.world_size} waited for the others at {world.main_address}:{world.main_port} "
            f"({str(error).splitlines()[0]})",
            do="check that all ranks were started and can reach that address",
        ) from error
    if verdict != "agreed":
        raise ConfigError(verdict, expected="the same on all ranks", do=_DO)
    return True


def agree(collectives: Collectives, facts: Mapping[str, Any]) -> None:
    """Compare `facts` over all ranks. Collective.

    Raises:
        ConfigError: on every rank, with the first rank that differs from rank 0 and how.
    """
    if collectives.world_size == 1:
        return
    text = json.dumps(dict(facts), sort_keys=True)
    if len(set(collectives.all_gather_object(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    first, *others = [json.loads(each) for each in collectives.all_gather_object(text)]
    for rank, other in enumerate(others, start=1):
        if found := _difference(other, first, rank):
            raise ConfigError(found, expected="the same on all ranks", do=_DO)


def _difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], rank: int) -> str:
    return differences(json.loads(json.dumps(dict(mine))), theirs, f"on rank {rank}", "on rank 0")
