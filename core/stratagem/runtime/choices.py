"""`Choices`: what is read of the resolved plugins of a run, whether it is connected or not."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stratagem.api.capabilities import COMPILATION, SHARDED_PARAMETERS, Capabilities
from stratagem.api.kinds import Accelerator, CheckpointFormat, CommHook, Environment, Strategy
from stratagem.api.values import PrecisionPolicy

if TYPE_CHECKING:
    from stratagem.config.settings import RunSettings
    from stratagem.stack.plugins import Choice, Stack


class Choices:
    """See the same names in `stratagem.api.context.RunContext`."""

    stack: Stack
    settings: RunSettings

    @property
    def policy(self) -> PrecisionPolicy:
        """The precision's policy."""
        return self.stack.policy

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded over the ranks, so that every forward needs all ranks."""
        return SHARDED_PARAMETERS in self.stack.strategy.capabilities.provides

    @property
    def compiles(self) -> bool:
        """Whether a plugin compiles the model."""
        every = (getattr(choice.plugin, "capabilities", Capabilities()) for choice in self.stack.active())
        return any(COMPILATION in each.provides for each in every)

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return self.stack.num_processes

    @property
    def num_nodes(self) -> int:
        """Nodes that have processes of this run."""
        return self.stack.num_nodes

    @property
    def devices_given(self) -> bool:
        """The user set `devices`, rather than leaving it to "auto"."""
        return self.stack.devices_given

    @property
    def environment(self) -> Environment:
        environment: Environment = self.stack.environment.plugin
        return environment

    @property
    def checkpoint_format(self) -> CheckpointFormat:
        checkpoint_format: CheckpointFormat = self.stack.checkpoint.plugin
        return checkpoint_format

    @property
    def strategy(self) -> Strategy:
        """The strategy that answers hooks: the innermost one."""
        return self.stack.strategy

    @property
    def comm_hooks(self) -> list[CommHook]:
        return [choice.plugin for choice in self.stack.comm_hooks]

    @property
    def accelerator(self) -> Accelerator:
        accelerator: Accelerator = self.stack.accelerator.plugin
        return accelerator

    @property
    def backend(self) -> str:
        """The accelerator's torch.distributed backend."""
        return self.accelerator.backend

    @property
    def join_timeout(self) -> timedelta:
        """How long a rank waits for the other ranks to connect."""
        return self.stack.join_timeout()

    @property
    def precision_absorbed(self) -> bool:
        """Whether the strategy applies the precision's policy itself."""
        return self.stack.precision_absorbed

    def name_of(self, plugin: Any) -> str:
        """Return the name by which `plugin` was chosen; of one that is not in this run, its class's name."""
        choice = self._choice_of(plugin)
        return type(plugin).__name__ if choice is None else choice.name

    def title_of(self, plugin: Any) -> str:
        """Return the kind and the name of `plugin`, for a message: ``strategy 'ddp'``."""
        choice = self._choice_of(plugin)
        return type(plugin).__name__ if choice is None else str(choice)

    def _choice_of(self, plugin: Any) -> Choice | None:
        return next((choice for choice in self.stack.choices() if choice.plugin is plugin), None)

    def describe(self) -> dict[str, Any]:
        """Return the resolved plugins, their options and where these came from, as plain data."""
        from stratagem.stack.describe import explain_stack

        return explain_stack(self.stack, self.settings)

    def explain(self) -> str:
        """Return the resolved stack as a tree: plugins, packages, options and where they came from, hooks."""
        from stratagem.stack.describe import render_stack

        return render_stack(self.describe())

    def preload(self) -> None:
        """Import the modules that plugins import lazily, before this process is forked."""
        self.stack.preload()
