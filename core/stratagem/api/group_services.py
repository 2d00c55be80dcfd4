"""What a group of ranks offers beside collectives: groups for other threads, a store, a counter of bytes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Self

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from stratagem.api.traffic import Traffic


class KeyValueStore:
    """Strings that all ranks can write and read, by key. No call waits for another rank."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        """Write `text` under `key`, over an earlier value."""
        self._values[key] = text

    def append(self, key: str, text: str) -> None:
        """Write `text` after what is under `key`; what several ranks append at once is all there."""
        self._values[key] = self._values.get(key, "") + text

    def get(self, key: str) -> str | None:
        """Return the value of `key`; None if there is none."""
        return self._values.get(key)


class GroupServices:
    """For the loop of a Trainer, for saves, and to find out which rank was lost; strategies count what they send."""

    #: Number of ranks of the group.
    world_size = 1
    #: An error ended the run on this rank: `close` does not wait for what it sent.
    failed = False
    #: Whether a collective on tensors of `device` raises an error when another rank dies, before the timeout.
    reports_lost_ranks = True

    @functools.cached_property
    def traffic(self) -> Traffic:
        """The counter of bytes of sent tensors; groups made by `split` share it."""
        from stratagem.api.traffic import Traffic

        return Traffic()

    def values(self, tensor: torch.Tensor, planned: Any) -> Any:
        """Return what `tensor.tolist()` does, which waits for its device; not collective.

        For decisions by value: in a plan, which has neither values nor other ranks, it is `planned`.
        """
        return tensor.tolist()

    def barrier_with_timeout(self, what: str, limit_s: float) -> None:
        """Wait until every rank has called this for the same `what`, but at most `limit_s` seconds.

        For calls that a user may make on one rank only: a collective would hang, this raises an error.

        Raises:
            ConfigError: some ranks did not call it within `limit_s` seconds.
        """

    def key_value_store(self, shared: bool = False) -> KeyValueStore:
        """Return a store that ranks write and read at any time. Not collective.

        What is written stays after this process ends if the launcher hosts the store, as the local launchers and
        torchrun do.

        Args:
            shared: over the connection of these collectives, which may be waiting in another thread, rather than over
                a separate one.
        """
        if self.world_size > 1:
            raise ConfigError(
                f"{type(self).__name__} has no key_value_store()", expected="one, for ranks to agree on when to stop",
                do="tell the strategy's author",
            )  # fmt: skip
        return KeyValueStore()

    def duplicate(self, purpose: str) -> Self:
        """Return collectives over another group of the same ranks, for CPU tensors; one group for each `purpose`.

        Calls over different groups never match each other, so some ranks may use one while others use another. All
        ranks call it.
        """
        return self

    def new_group(self) -> Self:
        """Return collectives over a new group of the same ranks, on the CPU, for use in another thread."""
        if self.world_size > 1:
            raise ConfigError(
                f"{type(self).__name__} has no new_group()", expected="one, for saving in the background",
                do="save without async_save, or tell the strategy's author",
            )  # fmt: skip
        return self
