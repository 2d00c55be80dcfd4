"""`Context`: one resolved stack of plugins at work in one process. What hooks receive as `run`."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stratagem.api.capabilities import SHARDED_PARAMETERS, Capabilities
from stratagem.api.kinds import Accelerator, CheckpointFormat, CopyStream, Environment, PrecisionPolicy, Strategy
from stratagem.api.named_state import logical_optimizer_state
from stratagem.api.run_parts import PHASE
from stratagem.api.world import Collectives, Mesh, World
from stratagem.checkpoint.background_save import Saver
from stratagem.config.settings import RunSettings
from stratagem.discovery import registry
from stratagem.distributed.default_group import note_groups
from stratagem.distributed.standard_streams import open_standard_streams
from stratagem.errors import ConfigError, StratagemError
from stratagem.runtime import connection, state_io
from stratagem.runtime.hook_caller import HookCaller
from stratagem.runtime.numerics import switch
from stratagem.runtime.parameter_names import begun_on_meta, named_parameters, point_at
from stratagem.runtime.replaced_layers import check_replaced, note_replaced, parts_of
from stratagem.runtime.step import Step
from stratagem.runtime.step_module import StepModule
from stratagem.stack import description
from stratagem.stack.plugins import Choice, Stack
from stratagem.stack.resolver import resolve

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from stratagem.api.context import RunContext
    from stratagem.api.run_parts import Materializer
    from stratagem.runtime.handles import ModelHandle


def _of(path: str) -> Any:
    """Return a property that is the attribute at `path` of a run."""
    return property(attrgetter(path), doc=f"`{path}`: see `stratagem.api.context.RunContext`.")


class Context:
    """The plugins that `settings` describe, at work in one process: see `stratagem.api.context.RunContext`.

    Raises:
        ConfigError, PluginError: the choices cannot work together; raised here, before any process starts.
    """

    def __init__(self, settings: RunSettings) -> None:
        open_standard_streams()
        connection.tell_others_of_errors()
        self.settings = settings
        self.stack: Stack = resolve(self.settings)
        if self.settings.lock is not None:
            description.check_lock(self.stack, self.settings, self.settings.lock)
        #: How far the trainer that drives this run has come; None for a loop of your own.
        self.progress: Any = None
        self.module: nn.Module | None = None
        self.model: Any = None
        self.optimizers: list[Optimizer] = []
        #: The same as `configure_optimizers` made them.
        self.made_optimizers: list[Optimizer] = []
        #: Learning rate schedulers with their intervals; empty for a loop of your own.
        self.lr_scheduler_configs: list[Any] = []
        self.stage: str = "train"
        self.manual = False
        self.sync_gradients = True
        self.gradient_scale = 1.0
        self._enter()

    def _enter(self) -> None:
        """Set the state of a run that is not connected in this process."""
        self.world: World | None = None
        self._place: World | None = None
        self.mesh: Mesh = Mesh(axes={})
        self.device = torch.device("cpu")
        #: All devices of this process; `device` is the first of them.
        self.devices: tuple[torch.device, ...] = (self.device,)
        #: Collective operations over all ranks.
        self.collectives: Collectives = Collectives()
        #: The same, over the ranks that the strategy spreads the model over: all, or one team of an outer strategy.
        self.peers: Collectives = self.collectives
        #: The same, over ranks with different samples or parts of samples: those whose metrics differ.
        self.readers: Collectives = self.collectives
        #: Runs the saves of checkpoint formats, in the background if they ask for it.
        self.saver = Saver(self.collectives)
        self.connected = False
        self.activity: list[float] | memoryview[float] = [0.0] * 4
        #: Copies batches to the device while it computes, on devices that can.
        self.copy_stream: CopyStream | None = None
        #: Restores torch's switches.
        self._numerics = contextlib.ExitStack()
        #: Modules that were prepared for a loop of the user's.
        self.handles: weakref.WeakSet[ModelHandle] = weakref.WeakSet()
        #: Strategies answer `model_state` and `optimizer_state` with whole tensors, not with each rank's shards.
        self.whole_state = not self.checkpoint_format.takes_shards
        #: Whether the state goes to another process rather than to a file, so that nothing may be left out of it.
        self.hands_over = False
        #: True in a worker whose results are sent back to the launching process.
        self.is_worker = False
        #: How to move a batch, where the module that is trained or evaluated defines it.
        self.custom_transfer: Callable[[Any], Any] | None = None
        self._register_plugins()

    def use_callbacks(self, callbacks: list[Choice]) -> None:
        """Replace the callbacks of the stack."""
        self.stack.callbacks = callbacks
        self._register_plugins()

    def _register_plugins(self) -> None:
        """Register the hooks of the stack's plugins."""
        self.hooks = HookCaller(self.stack, self)
        self.step = Step(self, self.hooks)

    @property
    def needs_values(self) -> bool:
        """Whether whole tensors of the state are used on this rank; elsewhere they may be on the meta device."""
        return self.is_global_zero or self.hands_over

    @property
    def owns_loop(self) -> bool:
        """Whether a `Trainer` drives this run; False for the user's own loop."""
        return self.progress is not None

    @property
    def place(self) -> World:
        """This process's rank and world, also before the ranks connect: what the environment answers."""
        if self.world is not None:
            return self.world
        if self._place is None:
            try:
                self._place = self.hooks.ask("setup_environment")
            except StratagemError:  # raised again by calls that need it
                self._place = World()
        return self._place

    @property
    def rank(self) -> int:
        return self.world.rank if self.world else self.place.rank

    @property
    def world_size(self) -> int:
        return self.world.world_size if self.world else 1

    @property
    def is_global_zero(self) -> bool:
        return self.rank == 0

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank 0 only."""
        if self.is_global_zero:
            print(*values, **options)

    # --- What the stack and the step have, as `RunContext` says --------------------------------------------------

    policy: PrecisionPolicy = _of("stack.policy")
    strategy: Strategy = _of("stack.strategy")
    accelerator: Accelerator = _of("stack.accelerator.plugin")
    environment: Environment = _of("stack.environment.plugin")
    checkpoint_format: CheckpointFormat = _of("stack.checkpoint.plugin")
    num_processes: int = _of("stack.num_processes")

    differentiate: Callable[[Tensor], None] = _of("step.differentiate")
    #: Call an answer hook, such as ``model_state``, and return the answer.
    ask: Callable[..., Any] = _of("hooks.ask")

    # --- What was chosen -----------------------------------------------------------------------------------------

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded over the ranks, so that every forward needs all ranks."""
        return SHARDED_PARAMETERS in self.stack.strategy.capabilities.provides

    def provides(self, word: str) -> bool:
        """Whether a plugin of the run provides a capability."""
        every = (getattr(choice.plugin, "capabilities", Capabilities()) for choice in self.stack.active())
        return any(word in each.provides for each in every)

    def plugins_of(self, kind: str) -> list[Any]:
        """Return the plugins of `kind`, in the order in which they act."""
        return [choice.plugin for choice in self.stack.of(kind)]

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
        return description.describe(self.stack, self.settings)

    def explain(self) -> str:
        """Return the resolved stack as a tree: plugins, packages, options and where they came from, hooks."""
        return str(registry.find("command", "explain").load().text(self.describe()))

    # --- Processes -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Determine this process's rank and join the others; once per process, further calls do nothing."""
        if self.connected:
            return
        accelerator = self.stack.accelerator.plugin
        self.world = self.hooks.ask("setup_environment")
        connection.tell_others_of_errors(self.world)
        connection.check_world(self.stack, self.world)
        self.mesh = connection.mesh_of(self.stack, self.world)
        self.devices = tuple(map(accelerator.device, self.stack.devices_of(self.world.local_rank)))
        self.device = self.devices[0]
        with switch(self.settings, self.device.type) as numerics:
            accelerator.activate(self.device)
            self.collectives = connection.join(self.world, self.stack, self.settings, self.hooks, self.device)
            self.peers = connection.split_peers(self.collectives, self.world, self.peers_world)
            self.readers = connection.split_readers(self.collectives, self.mesh)
            self.hooks.hook.on_connect(run=self)
            self._numerics = numerics.pop_all()
        self.copy_stream = accelerator.copy_stream(self.device, hints=self.is_global_zero)
        self.saver = Saver(self.collectives)
        if self.checkpoint_format.saves_in_background:
            self.saver.connect()
        self.connected = True
        atexit.register(_close, weakref.ref(self))

    @property
    def peers_world(self) -> World:
        """This process's place among its peers: what an inner strategy takes for the world."""
        assert self.world is not None, "known once connected"
        return connection.peers_world_of(self.stack, self.world)

    def close(self) -> None:
        """Call `teardown` of the plugins, then close the collectives. Safe to call twice."""
        if not self.connected:
            return
        self.connected = False
        try:
            self.saver.wait()
        finally:
            with contextlib.ExitStack() as rest:  # even if a plugin raises
                rest.callback(self._numerics.close)
                rest.callback(self.collectives.close)
                self.hooks.hook.teardown(run=self)
                self.model, self.optimizers, self.copy_stream = None, [], None
                self.made_optimizers = []
                for handle in self.handles:
                    handle.release()

    # --- The model -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def init_context(self, empty: bool = False) -> Iterator[None]:
        """Enter the contexts under which modules are to be built; `empty` ones get their values in `prepare`."""
        with contextlib.ExitStack() as stack:
            if empty:
                self.hooks.use_deferred_init()
            self.hooks.enter_all(stack, "init_context", empty=empty)
            yield

    def prepare(
        self, module: nn.Module, make_optimizers: Callable[[], list[Optimizer]] | None = None, stage: str = "train",
        optimizers_from: str = "configure_optimizers",
    ) -> None:  # fmt: skip
        """Convert and wrap `module`, then make its optimizers: sets `module`, `model`, `optimizers` and `stage`."""
        self.module, self.stage, make = module, stage, make_optimizers or list
        check_replaced(module, self.stack, stage)
        parts = parts_of(module, self.stack)
        with named_parameters(module):
            self.hooks.hook.prepare_module(module=module, run=self)  # a precision may replace layers
            note_replaced(module, self.stack, parts)
            fills = not self.shards_parameters and any(parameter.is_meta for parameter in module.parameters())
            # Made of the parameters that users know, before others take their place.
            early = fills or self.shards_parameters or not self.owns_loop
            made = make() if early else []
            if fills:
                self.materializer(module).fill(module)
            if self.world_size > 1:
                _separate_elements(module)
                if stage == "train" and self.strategy.mesh(self.peers_world).num_data_shards > 1:
                    _check_rows(module)
            self.model = self.hooks.ask("wrap_model", module=StepModule(module))
            if not early or begun_on_meta(made):
                made, early = make(), False
            each_once = self.owns_loop and not self.manual
            point_at(module, made, optimizers_from, self.title_of(self.strategy), each_once, self.is_global_zero)
        begun = early and any(getattr(each, "state", None) for each in made)
        states = [logical_optimizer_state(each, module) for each in made] if begun else []
        self.made_optimizers, self.optimizers = made, []
        if make_optimizers:
            self.optimizers = list(self.hooks.ask("wrap_optimizers", optimizers=made, module=self.model))
        if begun:
            state_io.load_optimizers(self, states, self.optimizers, module, path=optimizers_from)
        note_groups()
        if self.shards_parameters and self.world_size > 1 and self.is_global_zero:
            state_io.StateDictWarning(self.title_of(self.strategy)).watch(module)
        if stage == "train" and self.settings.writes_files and self.is_global_zero:
            description.write_lock(self.stack, self.settings)

    def materializer(self, module: nn.Module) -> Materializer:
        """Return a `Materializer` for a `module` that was built on the meta device. Collective."""
        self.hooks.use_deferred_init()
        materializer: Materializer = self.hooks.ask("materializer", module=module)
        return materializer

    def share(self, loader: Any, stage: str) -> Any:
        """Return `loader` restricted to this process's share, unless ``use_distributed_sampler=False``."""
        if not self.settings.use_distributed_sampler:
            return loader
        return self.hooks.ask("wrap_dataloader", loader=loader, stage=stage)

    def transfer(self, batch: Any) -> Any:
        """Return `batch` on the device, in the precision's dtype."""
        return self.hooks.transfer_batch(batch=batch, run=self)

    # --- The step ------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Scale `loss` through the precision, and differentiate it through the strategy."""
        caller = self.activity[PHASE]
        self.step.backward(loss)
        self.activity[PHASE] = caller

    def clip_gradients(
        self, optimizer: Optimizer, max_norm: float | None = None, max_value: float | None = None
    ) -> Any:
        """Clip by norm or by value (one of the two); return the norm before clipping, or 0.0 by value."""
        return self.step.clip_gradients(optimizer, max_norm, max_value)

    # --- Files ---------------------------------------------------------------------------------------------------

    def format_of(self, path: Path) -> CheckpointFormat:
        """Return the installed checkpoint format that reads `path`: this run's, if it does."""
        from stratagem.stack.formats import format_of

        return format_of(path, self.checkpoint_format)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Send `metrics` to all loggers. Called on rank 0."""
        if (log := self.hooks.implemented("log_metrics")) is not None:
            log(metrics=metrics, step=step, run=self)

    @contextlib.contextmanager
    def gathered_state(self) -> Iterator[None]:
        """Within: `model_state` and `optimizer_state` are whole on every rank, whatever the checkpoint format takes."""
        before = self.whole_state, self.hands_over
        self.whole_state = self.hands_over = True
        try:
            yield
        finally:
            self.whole_state, self.hands_over = before

    # --- To another process ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        sent = ("settings", "stack", "progress", "module", "stage", "manual", "sync_gradients", "gradient_scale")
        return {name: getattr(self, name) for name in sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.model, self.optimizers, self.made_optimizers, self.lr_scheduler_configs = None, [], [], []
        self._enter()


def _separate_elements(module: nn.Module) -> None:
    """Give parameters and buffers that were expanded memory for every element: collectives write into them."""
    for tensor in (*module.parameters(), *module.buffers()):
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def _check_rows(module: nn.Module) -> None:
    """Refuse a table whose forward scales the rows that a batch uses: ranks have different batches."""
    for name, part in module.named_modules():
        if hasattr(part, "num_embeddings") and getattr(part, "max_norm", None) is not None:
            raise ConfigError(
                f"{name!r} has max_norm={part.max_norm}: forward writes into the rows that a batch uses",
                expected="max_norm=None, since ranks have batches of their own and would have other weights",
                do="scale what the table returns, or train in one process",
            )


def _close(reference: weakref.ref[Context]) -> None:
    if (run := reference()) is not None:
        with contextlib.suppress(StratagemError, RuntimeError, KeyboardInterrupt):  # the process ends
            run.close()


if TYPE_CHECKING:

    def _satisfies(run: Context) -> RunContext:
        """Checked by mypy: it has all that hooks use."""
        return run
