"""`shard`: parameters, gradients and optimizer state sharded with FSDP2, under all other axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import MixedPrecisionPolicy

from stratagem_sharding.param_groups import reshard, units_in
from stratagem_sharding.steps import ShardedSteps
from stratagem_sharding.units import shard_units, shared_parameters, units_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from stratagem.api import Collectives, RunContext

POLICY = "strategy.parallel.auto_wrap_policy"


class Sharding(ShardedSteps):
    """Shards modules over one dimension of a device mesh, and runs their steps.

    Gradients are averaged over the ranks of that dimension only; see `gradients`.
    """

    def __init__(self, mesh: Any, policy: Any, *, reshard_after_forward: bool) -> None:
        super().__init__(POLICY)
        self._policy = policy
        self._options = {
            "mesh": mesh, "reshard_after_forward": reshard_after_forward, "mp_policy": MixedPrecisionPolicy(),
        }  # fmt: skip

    def shard(self, root: nn.Module, user: nn.Module, fill: Callable[[nn.Module], None], run: RunContext) -> None:
        """Shard the units of `user` and the rest of `root`, whose forward runs it. Collective."""
        shard_units(
            root, user, policy=self._policy, option=POLICY, options=self._options, fill=fill, run=run, keep_root=True
        )

    def whole(self, parts: Sequence[nn.Module], user: nn.Module) -> set[nn.Parameter]:
        """Return the parameters outside of `parts` and of all units, and those of several."""
        within = {parameter for part in parts for parameter in part.parameters()}
        rest = {parameter for parameter in user.parameters() if parameter not in within}
        return rest | shared_parameters(user, {*units_of(user, self._policy, POLICY), *parts})

    def shard_parts(
        self, parts: Sequence[nn.Module], user: nn.Module, fill: Callable[[nn.Module], None], run: RunContext,
        *, divided: bool, whole: set[nn.Parameter],
    ) -> None:  # fmt: skip
        """Shard the units of `user`, of which only `parts` are called, several times in a step. Collective.

        Args:
            whole: what is not sharded.
            divided: whether gradients of parameters are computed apart from those of inputs. Both need the values of
                parameters, so units stay gathered until the step ends.
        """
        options = self._options
        if divided:
            options = options | {"reshard_after_forward": False}
        shard_units(
            None, user, policy=self._policy, option=POLICY, options=options, fill=fill, run=run, also=parts,
            ignored=whole,
        )  # fmt: skip
        if not options["reshard_after_forward"]:
            for unit in units_in(user):
                unit.set_reshard_after_backward(False, recurse=False)

    def watch(self, root: nn.Module, peers: Collectives, run: RunContext) -> None:
        """Compare what the units of `root`, which was sharded, send on `peers`. Collective."""
        reshard(root)  # optimizers are made of shards
        self.add(root, run, peers)
