"""`Run`: one resolved stack of plugins in one process. What hooks receive, and the API for a training loop of your own.

run = sg.Run(strategy="ddp", precision="bf16-mixed", devices=2)

def main(run):
    model, optimizer = run.setup(model, optimizer)
    for batch in run.dataloader(loader):
        loss = model(batch)
        run.backward(loss)
        run.optimizer_step(optimizer)
        optimizer.zero_grad()
    run.save("last.ckpt", model=model, optimizer=optimizer)

run.launch(main)
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import math
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy
import torch
from attrs import define, evolve

from stratagem.api import hooks
from stratagem.api.capabilities import MULTI_PROCESS, SHARDED_PARAMETERS
from stratagem.api.kinds import Accelerator, CheckpointFormat, CommHook, Strategy
from stratagem.api.optimizers import needs_closure
from stratagem.api.paths import place
from stratagem.api.seeding import random_state, restore_random_state
from stratagem.api.values import PrecisionPolicy
from stratagem.api.world import Collectives, Mesh, World
from stratagem.checkpoint.background_save import Saver
from stratagem.checkpoint.files import STATE_VERSION, check_version
from stratagem.checkpoint.state_checks import applying, check_optimizer, check_weights_fit, with_new_options
from stratagem.config.settings import RunSettings, gather
from stratagem.distributed.bucket_reducer import Level, Wire
from stratagem.distributed.rendezvous import check_address
from stratagem.distributed.standard_streams import open_standard_streams
from stratagem.distributed.supervision import join_supervision
from stratagem.errors import CheckpointError, ConfigError, PluginError, StratagemError, nearest
from stratagem.runtime import default_hooks
from stratagem.runtime.numerics import switch
from stratagem.runtime.peer_diagnosis import Neighbours, explained
from stratagem.runtime.preflight import agree, agree_before_connecting
from stratagem.runtime.step_module import StepModule
from stratagem.runtime.transfer import CopyStream
from stratagem.runtime.watchdog import Watchdog
from stratagem.stack import identity, lightning_callbacks, lock
from stratagem.stack.describe import explain_stack, render_stack, unread_arguments
from stratagem.stack.formats import check_is_no_folder, format_named, format_of, name_of_format, read_with
from stratagem.stack.identity import matched, warn_of_differences
from stratagem.stack.plugin_hooks import hook_implementations
from stratagem.stack.plugins import Choice, Stack
from stratagem.stack.resolver import resolve
from stratagem.transforms import activation_checkpointing
from stratagem.transforms.deferred_init import Materializer, has_no_values, meta_init

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from stratagem.api.context import RunContext

#: Set by ``stratagem explain``: show the first stack that would be launched, and stop.
EXPLAIN_VARIABLE = "STRATAGEM_EXPLAIN"

#: What an answer must be, for the hooks where a wrong one would show much later.
_ANSWERS: dict[str, tuple[type[Any], ...]] = {
    "setup_environment": (World,),
    "connect": (Collectives,),
    "wrap_model": (torch.nn.Module,),
    "wrap_optimizers": (list, tuple),
    "model_state": (Mapping,),
    "load_model_state": (bool,),
    "optimizer_state": (Mapping,),
    "load_optimizer_state": (bool,),
    "save_checkpoint": (bool,),
    "load_checkpoint": (Mapping,),
    "scale_loss": (torch.Tensor,),
    "backward": (bool,),
    "clip_gradients": (torch.Tensor, float, int),
    "optimizer_step": (bool,),
}

#: Hooks of the inner loop, bound once when the stack is connected.
_STEP_HOOKS = (
    "step_context", "forward_backward", "scale_loss", "backward", "clip_gradients", "optimizer_step", "transfer_batch",
)  # fmt: skip


class Run:
    """A stack of plugins at work. Arguments are those of `stratagem.config.settings.RunSettings`.

    Raises:
        ConfigError, PluginError: the choices cannot work together; raised here, before any process starts.
    """

    def __init__(self, settings: RunSettings | None = None, /, **arguments: Any) -> None:
        open_standard_streams()
        self.settings = settings if settings is not None else gather(RunSettings, arguments)
        self.stack: Stack = resolve(self.settings)
        wanted = self.settings.activation_checkpointing
        self._recomputes = None if wanted is None else activation_checkpointing.read(wanted)
        if self.settings.lock is not None:
            lock.check(self.stack, self.settings, self.settings.lock)
        #: How far the trainer that drives this run has come; None for a loop of your own.
        self.progress: Any = None
        self.module: nn.Module | None = None
        self.model: Any = None
        self.optimizers: list[Optimizer] = []
        #: Learning rate schedulers with their intervals; empty for a loop of your own.
        self.lr_scheduler_configs: list[Any] = []
        self.stage: str = "train"
        self.manual = False
        #: Batches for which `training_step` returned None, in this fit.
        self.skipped_batches = 0
        self.sync_gradients = True
        self._enter()

    def _enter(self) -> None:
        """Begin this run's life in this process: nothing is connected yet."""
        self.world: World | None = None
        self._place: World | None = None
        self.mesh: Mesh = Mesh(axes={})
        self.device = torch.device("cpu")
        #: All devices of this process; `device` is the first of them.
        self.devices: tuple[torch.device, ...] = (self.device,)
        #: What all ranks say to each other.
        self.collectives: Collectives = Collectives()
        #: What those ranks do that the strategy spreads the model over: all of them, or a team of an outer strategy's.
        self.peers: Collectives = self.collectives
        #: Where the other processes can be reached, to tell which one is gone.
        self.neighbours: Neighbours | None = None
        #: Ends this process if it waits for a rank that is gone; None where collectives raise then.
        self.watchdog: Watchdog | None = None
        #: Runs the saves of checkpoint formats, in the background if they ask for it.
        self.saver = Saver(self.collectives)
        self.connected = False
        #: Copies batches to the device beside its computation, where it can.
        self.copy_stream: CopyStream | None = None
        #: Puts torch's switches back.
        self._numerics = contextlib.ExitStack()
        #: The strategy has yet to ask for the comm hooks.
        self._reducer_is_due = False
        self._wires: list[Wire] = []
        self._handles: weakref.WeakSet[ModelHandle] = weakref.WeakSet()
        #: Strategies answer `model_state` and `optimizer_state` with whole tensors, not with each rank's shards.
        self.whole_state = not self.checkpoint_format.takes_shards
        self._whole_everywhere = False
        #: This process works on behalf of the one that launched it, and ends with the job.
        self.far_from_home = False
        #: What the module defines itself, while it is trained or evaluated: how to differentiate, and to move a batch.
        self.custom_backward: Callable[[Tensor], None] | None = None
        self.custom_transfer: Callable[[Any], Any] | None = None
        #: Called around each backward, with the loss before it is scaled; set by the training loop.
        self.before_backward: Callable[[Tensor], None] | None = None
        self.after_backward: Callable[[], None] | None = None
        self._register_plugins()

    def use_callbacks(self, callbacks: list[Choice]) -> None:
        """Have these callbacks in the stack instead of those that are there."""
        self.stack.callbacks = callbacks
        self._register_plugins()

    def _register_plugins(self) -> None:
        """Register the hooks of the stack's plugins."""
        self._hooks = _hook_manager(self.stack)
        self.hook = self._hooks.hook
        self._bind()

    # --- What the resolver decided -------------------------------------------------------------------------------

    @property
    def policy(self) -> PrecisionPolicy:
        """The precision's policy."""
        return self.stack.policy

    @property
    def shards_parameters(self) -> bool:
        """Whether every forward needs all ranks, as each holds a part of the parameters."""
        return SHARDED_PARAMETERS in self.stack.strategy.capabilities.provides

    @property
    def needs_values(self) -> bool:
        """Whether whole tensors of the state are used on this rank; elsewhere they may be on the meta device."""
        return self.is_global_zero or self._whole_everywhere

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return self.stack.num_processes

    @property
    def devices_given(self) -> bool:
        """The user set `devices`, rather than leaving it to "auto"."""
        return self.stack.devices_given

    @property
    def checkpoint_format(self) -> CheckpointFormat:
        checkpoint_format: CheckpointFormat = self.stack.checkpoint.plugin
        return checkpoint_format

    @property
    def strategy(self) -> Strategy:
        """The strategy that answers: the innermost one."""
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
        """How long a rank waits for the others."""
        return self.stack.join_timeout()

    @property
    def precision_absorbed(self) -> bool:
        """Whether the strategy applies the precision's policy itself."""
        return self.stack.precision_absorbed

    @property
    def owns_loop(self) -> bool:
        """Whether a `Trainer` drives this run; False for a loop of the user's."""
        return self.progress is not None

    def name_of(self, plugin: Any) -> str:
        """Return the name by which `plugin` was chosen; of one that is not in this run, its class's name."""
        return next((choice.name for choice in self.stack.choices() if choice.plugin is plugin), type(plugin).__name__)

    def title_of(self, plugin: Any) -> str:
        """Return the kind and the name of `plugin`, for a message: ``strategy 'ddp'``."""
        return next((str(choice) for choice in self.stack.choices() if choice.plugin is plugin), type(plugin).__name__)

    def describe(self) -> dict[str, Any]:
        """Return the resolved plugins, their options and where these came from, as plain data."""
        return explain_stack(self.stack, self.settings)

    def num_implementations(self, hook: str) -> int:
        """Return how many plugins of this run implement `hook`."""
        return len(getattr(self.hook, hook).get_hookimpls())

    def preload(self) -> None:
        """Let plugins import what they import late, before this process is copied."""
        self.stack.preload()

    @property
    def place(self) -> World:
        """This process's place, also before the ranks connect: what the environment says."""
        if self.world is not None:
            return self.world
        if self._place is None:
            try:
                self._place = self.ask("setup_environment")
            except StratagemError:  # raised again by what needs it
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
        """`print` on rank 0 alone."""
        if self.is_global_zero:
            print(*values, **options)

    # --- Processes -----------------------------------------------------------------------------------------------

    def launch(self, main: Callable[[Run], Any]) -> Any:
        """Start the processes of this node, call ``main(run)`` in each, and return rank 0's result.

        Where the processes exist already (torchrun, a scheduler, an earlier launch), only call `main`.
        """
        if EXPLAIN_VARIABLE in os.environ:
            self._explain_and_stop(os.environ[EXPLAIN_VARIABLE])
        if self.connected:
            return self.carry_out(main)
        body = _ProcessBody(self, main)
        environment, launcher = self.stack.environment.plugin, self.stack.launcher.plugin
        alone = self.num_processes * self.settings.num_nodes == 1 and launcher.parent_trains
        if environment.processes_exist() or alone:
            return body()
        self.world = self.ask("setup_environment")
        check_address(self.world, self.stack.join_timeout().total_seconds())
        if not launcher.parent_trains:
            body.far_from_home, body.random_state = True, random_state()
        return self.hook.launch(main=body, run=self)

    def carry_out(self, main: Callable[[Run], Any]) -> Any:
        """Return what ``main(self)`` returns; if another rank makes it fail, say which one and how."""
        try:
            return main(self)
        except BaseException as error:
            cause = explained(error, self)
            if cause is error:
                raise
            raise cause from cause.__cause__

    def explain(self) -> str:
        """Return the resolved stack as a tree: plugins, packages, options and where they came from, hooks."""
        return render_stack(self.describe())

    def _explain_and_stop(self, form: str) -> None:
        import json

        for sentence in unread_arguments(self.stack, self.settings, sys.argv[1:]):
            print(f"stratagem: {sentence}", file=sys.stderr)
        self.print(json.dumps(self.describe(), indent=2) if form == "json" else self.explain())
        raise SystemExit(0)

    def connect(self) -> None:
        """Find this process's place and join the others; once per process, further calls do nothing."""
        if self.connected:
            return
        accelerator = self.stack.accelerator.plugin
        self.world = self.ask("setup_environment")
        self._check_world(self.world)
        self.mesh = self._mesh(self.world)
        self.devices = tuple(map(accelerator.device, self.stack.devices_of(self.world.local_rank)))
        self.device = self.devices[0]
        with switch(self.settings, self.device.type) as numerics:
            accelerator.activate(self.device)
            self._join(self.world)
            self._numerics = numerics.pop_all()
        if self.device.type == "cuda":
            self.copy_stream = CopyStream(self.device, hints=self.is_global_zero)
        self.saver = Saver(self.collectives)
        if self.checkpoint_format.saves_in_background:
            self.saver.connect()
        self.connected = True
        atexit.register(_close, weakref.ref(self))

    def _join(self, world: World) -> None:
        """Join the other ranks, once it is known that they were started alike."""
        if world.world_size > 1 and not world.store_hosted:
            check_address(world, self.stack.join_timeout().total_seconds())
        facts = lock.facts(self.stack, self.settings) if world.world_size > 1 else {}
        compared = agree_before_connecting(world, facts, self.stack.join_timeout())
        self.collectives = self.ask("connect", world=world)
        if not compared:
            agree(self.collectives, facts)
        if self.collectives.world_size > 1:
            self.neighbours = Neighbours.meet(world, self.collectives)
            if not self.collectives.reports_lost_ranks:
                self.watchdog = Watchdog(self).start()
        size, every = self.peers_world.world_size, range(world.world_size)
        teams = [list(every[first : first + size]) for first in every[::size]]
        self.peers = self.collectives.split(teams) if len(teams) > 1 else self.collectives

    @property
    def peers_world(self) -> World:
        """This process's place among its peers: what an inner strategy takes for the world."""
        assert self.world is not None, "known once connected"
        return _team_world(self.stack, self.world)

    def _mesh(self, world: World) -> Mesh:
        inner = _team_world(self.stack, world)
        mesh = self.stack.strategy.mesh(inner)
        if inner.world_size == world.world_size:
            return mesh
        return Mesh(axes={"team": world.world_size // inner.world_size, **mesh.axes}, rank=world.rank)

    def _check_world(self, world: World) -> None:
        """Refuse processes that somebody else started for a strategy that would train each of them alone."""
        strategy = self.stack.strategies[-1]
        provided = {word for choice in self.stack.strategies for word in choice.plugin.capabilities.provides}
        if world.world_size > 1 and MULTI_PROCESS not in provided:
            raise ConfigError(
                f"{self.stack.environment} has {world.world_size} processes and {strategy} trains in one",
                expected="a strategy that provides 'multi-process'",
                do='choose one, such as the default (strategy="auto")',
            )
        if world.local_world_size > 1 and not strategy.plugin.process_per_device:
            raise ConfigError(
                f"{self.stack.environment} has {world.local_world_size} processes on this node, and {strategy} uses "
                "all devices of a node from one",
                expected="one process on each node",
            )

    def close(self) -> None:
        """Tear down: plugins first, then the connection. Safe to call twice."""
        if not self.connected:
            return
        self.connected = False
        try:
            self.saver.wait()
        finally:
            with contextlib.ExitStack() as rest:  # whatever a plugin raises
                rest.callback(self._numerics.close)
                rest.callback(self.collectives.close)
                if self.neighbours is not None:
                    rest.callback(self.neighbours.close)
                if self.watchdog is not None:
                    rest.callback(self.watchdog.close)
                self.hook.teardown(run=self)
                self.model, self.optimizers, self._wires, self.copy_stream = None, [], [], None
                for handle in self._handles:
                    handle.release()

    def __enter__(self) -> Run:
        self.connect()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        cause = explained(error, self) if error is not None and self.connected else error
        self.close()
        if cause is not None and cause is not error:
            raise cause from cause.__cause__

    # --- The model -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def init_context(self, empty: bool = False) -> Iterator[None]:
        """Enter the contexts under which modules are to be built; `empty` ones get their values in `prepare`."""
        with contextlib.ExitStack() as stack:
            if empty:
                stack.enter_context(meta_init())
            self._enter_all(stack, "init_context", empty=empty)
            yield

    def prepare(
        self, module: nn.Module, make_optimizers: Callable[[], list[Optimizer]] | None = None, stage: str = "train"
    ) -> None:
        """Convert and wrap `module`, then make its optimizers: sets `module`, `model`, `optimizers` and `stage`."""
        self.module, self.stage = module, stage
        self.hook.prepare_module(module=module, run=self)
        if self._recomputes is not None and stage == "train":
            activation_checkpointing.recompute(module, *self._recomputes)
        if not self.shards_parameters and has_no_values(module):
            self.materializer(module).fill(module)
        if self.world_size > 1:
            _separate_elements(module)
        if self.settings.sync_batchnorm and stage == "train" and self.world_size > 1:
            self._synchronize_batchnorm(module)
        self._reducer_is_due = True
        self._wires = []
        self.model = self.ask("wrap_model", module=StepModule(module))
        self.optimizers = []
        if make_optimizers is not None:
            made = make_optimizers()
            self.optimizers = list(self.ask("wrap_optimizers", optimizers=made, module=self.model))
        if stage == "train" and self.settings.writes_files and self.is_global_zero:
            lock.write(self.stack, self.settings)
        trains = stage == "train" and any(parameter.requires_grad for parameter in module.parameters())
        self._reducer_is_due = trains and bool(self.stack.comm_hooks) and self._reducer_is_due

    def _synchronize_batchnorm(self, module: nn.Module) -> None:
        from stratagem.transforms.batchnorm import synchronize

        if synchronize(module, self.peers) == 0:
            raise ConfigError(
                f"sync_batchnorm is True and {type(module).__name__} has no batch normalization", do="drop it"
            )

    def materializer(self, module: nn.Module) -> Materializer:
        """Return what initializes the parts of a `module` that was built without values. Collective.

        The seed is rank 0's.
        """
        return Materializer(module, self.collectives.broadcast_object(torch.initial_seed()), self.device)

    def setup(self, module: nn.Module, *optimizers: Optimizer) -> Any:
        """Prepare a module and its optimizers for a loop of your own.

        Returns:
            A callable that stands for the module, and the optimizers to step: ``(model, *optimizers)``, or just the
            model when no optimizer was given. Optimizers are re-pointed by name if the strategy replaces parameters.
        """
        self.connect()
        names = {id(parameter): name for name, parameter in module.named_parameters()}

        def repoint() -> list[Optimizer]:
            current = dict(module.named_parameters())
            lost = sorted(set(names.values()) - set(current))
            if lost:
                raise PluginError(
                    f"{self.stack.strategies[-1]} renamed the parameter {lost[0]!r}", expected="names to stay",
                    do="make the optimizer in Module.configure_optimizers, and tell the strategy's author",
                )  # fmt: skip
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["params"] = [current.get(names.get(id(p), ""), p) for p in group["params"]]
            return list(optimizers)

        self.prepare(module, repoint if optimizers else None)
        handle = ModelHandle(self, module)
        return (handle, *self.optimizers) if optimizers else handle

    def dataloader(self, loader: Any, stage: str = "train") -> Any:
        """Return an iterable over this process's share of `loader`, its batches on the device."""
        self.connect()
        return LoaderHandle(self, self.share(loader, stage))

    def share(self, loader: Any, stage: str) -> Any:
        """Return `loader` restricted to this process's share, unless ``use_distributed_sampler=False``."""
        if not self.settings.use_distributed_sampler:
            return loader
        return self.ask("wrap_dataloader", loader=loader, stage=stage)

    def transfer(self, batch: Any) -> Any:
        """Return `batch` on the device, in the precision's dtype."""
        return self._transfer_batch(batch=batch, run=self)

    def bucket_reducer(self, over: Collectives | None = None) -> Wire | None:
        """Return the stack of comm hooks as one function that averages a bucket; None if there is none.

        Args:
            over: the ranks to average over, if not all that the model is spread over (``run.peers``).
        """
        self._reducer_is_due = False
        implementations = {impl.plugin: impl for impl in self.hook.reduce_bucket.get_hookimpls()}
        found = [(choice.name, implementations[choice.plugin]) for choice in self.stack.comm_hooks]
        if not found:
            return None
        levels = [Level(name, implementation.function, implementation.argnames) for name, implementation in found]
        wire = Wire(levels, self.peers if over is None else over, self)
        self._wires.append(wire)
        return wire

    # --- The step ------------------------------------------------------------------------------------------------

    def train_step(self, batch: Any, batch_idx: int, divisor: int, sync: bool, with_index: bool = True) -> Any:
        """Forward and backward of one batch, its loss divided by `divisor`; return what `training_step` returned.

        `sync` is False when this batch's gradients are only accumulated.
        """
        self.sync_gradients = sync
        if self._step_context is None:
            return self._forward_backward_inside(batch, batch_idx, divisor, with_index)
        with contextlib.ExitStack() as stack:
            self._enter_all(stack, "step_context", stage="train", sync=sync and not self.manual)
            return self._forward_backward_inside(batch, batch_idx, divisor, with_index)

    def _forward_backward_inside(self, batch: Any, batch_idx: int, divisor: int, with_index: bool) -> Any:
        if self._forward_backward is not None:
            return self._forward_backward(module=self.model, batch=batch, batch_idx=batch_idx, run=self)
        if with_index:
            output = self.model("training_step", batch, batch_idx)
        else:
            output = self.model("training_step", batch)
        if self.manual:
            return output
        loss = output.get("loss") if isinstance(output, dict) else output
        if not (isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1 and not loss.is_complex()):
            self._check_may_skip(output, batch_idx)
            return None
        self.backward(loss / divisor if divisor > 1 else loss)
        return output

    def _check_may_skip(self, output: Any, batch_idx: int) -> None:
        """Refuse an `output` of ``training_step`` that is not a loss; None may skip a batch where one process trains.

        Raises:
            ConfigError: it is neither a loss nor None, or the other ranks wait for its gradients.
        """
        check_loss(output, self.rank)
        if self.world_size > 1:
            raise ConfigError(
                f"training_step returned None on rank {self.rank} of {self.world_size}", expected="a loss",
                do="return a loss multiplied by zero to skip a batch: the other ranks wait for its gradients",
            )  # fmt: skip
        if self.skipped_batches == 0:
            epoch = "" if self.progress is None else f" of epoch {self.progress.epoch}"
            warnings.warn(
                f"training_step returned None for batch {batch_idx}{epoch}: the batch is skipped. "
                "If that is not meant, end training_step with `return loss`",
                stacklevel=2,
            )
        self.skipped_batches += 1

    @contextlib.contextmanager
    def evaluate_context(self, stage: str) -> Iterator[None]:
        """Enter the step contexts for one forward without gradients."""
        with contextlib.ExitStack() as stack:
            if self._step_context is not None:
                self._enter_all(stack, "step_context", stage=stage, sync=True)
            yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally within this block; the next step outside it sends them."""
        before, self.sync_gradients = self.sync_gradients, False
        try:
            yield
        finally:
            self.sync_gradients = before

    def backward(self, loss: Tensor) -> None:
        """Scale `loss` as the precision wants and differentiate it as the strategy wants."""
        if self.before_backward is not None:
            self.before_backward(loss)
        if self._scale_loss is not None:
            loss = self._answered("scale_loss", self._scale_loss(loss=loss, run=self))
        try:
            if self._backward is None:
                self.differentiate(loss)
            else:
                self._answered("backward", self._backward(loss=loss, module=self.model, run=self))
        except Exception:
            self._raise_failure_of_hooks()
            raise
        if self._reducer_is_due and self.sync_gradients:
            raise PluginError(
                f"{self.stack.strategies[-1]} averaged past {self.stack.comm_hooks[0]}, which has no effect",
                expected="a strategy that provides 'gradient-buckets' to call run.bucket_reducer()",
                do="drop the comm hook, and tell the strategy's author",
            )
        if self.after_backward is not None:
            self.after_backward()

    def differentiate(self, loss: Tensor) -> None:
        """Call ``loss.backward()``, or the module's own `backward` if it defines one: for strategies' `backward`."""
        if self.custom_backward is None:
            loss.backward()
        else:
            self.custom_backward(loss)

    def _raise_failure_of_hooks(self) -> None:
        """Raise what went wrong in a comm hook on a thread of the backend's: an engine only knows that it did."""
        for wire in self._wires:
            if wire.failure is not None:
                raise wire.failure

    def clip_gradients(
        self, optimizer: Optimizer, max_norm: float | None = None, max_value: float | None = None
    ) -> Any:
        """Clip by norm or by value (one of the two); return the norm before clipping, or 0.0 by value.

        Raises:
            ConfigError: not one limit, or complex gradients by value.
        """
        if (max_norm is None) == (max_value is None):
            raise ConfigError(f"clip_gradients got max_norm={max_norm} and max_value={max_value}", expected="one limit")
        try:
            answer = self._clip_gradients(optimizer=optimizer, max_norm=max_norm, max_value=max_value, run=self)
        except NotImplementedError as error:
            if max_value is None or not _has_complex(optimizer):
                raise
            raise ConfigError(
                f"{type(optimizer).__name__} steps complex parameters, and gradients are clipped by value",
                expected="real parameters: complex numbers have no order",
                do='clip by norm (gradient_clip_algorithm="norm")',
            ) from error
        return self._answered("clip_gradients", answer)

    def unscale(self, optimizer: Optimizer) -> None:
        """Have the gradients of `optimizer` free of the loss scale, for a module that computes with them."""
        if self.policy.loss_scaling and not self.stack.precision_absorbed:
            self.clip_gradients(optimizer, max_value=math.inf)  # which unscales first, and changes nothing else

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Tensor] | None = None) -> bool:
        """Step; return False if the precision skipped it because gradients overflowed."""
        if self.saver.busy:
            self.saver.check()
        try:
            if self._optimizer_step is None and closure is None:
                optimizer.step()
                return True
            call = self._optimizer_step or self.hook.optimizer_step
            return bool(self._answered("optimizer_step", call(optimizer=optimizer, closure=closure, run=self)))
        except TypeError as error:
            if closure is not None or not needs_closure(optimizer):
                raise
            raise ConfigError(
                f"{type(optimizer).__name__}.step was called without a closure",
                expected="a closure: it evaluates the model itself, once or many times for each step",
                do="call step(closure); in optimizer_step, call optimizer.step(closure=optimizer_closure)",
            ) from error

    def count_skipped_step(self) -> None:
        """Report that an optimizer step which returned True turned out to have been skipped."""
        if self.progress is not None:
            self.progress.skipped_steps += 1

    # --- Files ---------------------------------------------------------------------------------------------------

    def format_of(self, path: Path) -> CheckpointFormat:
        """Return the installed checkpoint format that reads `path`: this run's, if it does."""
        return format_of(path, self.checkpoint_format)

    def save_in_background(self, write: Callable[[Collectives], None], *, background: bool) -> None:
        """Call `write` with collectives of its own, in a thread if `background`. Collective.

        Raises:
            whatever `write` raises, if it runs now; whatever the save before this one raised.
        """
        self.saver.submit(write, background)

    def wait_for_saves(self) -> None:
        """Return when no save is under way; raise what it raised."""
        self.saver.wait()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way. All ranks agree on it."""
        return self.saver.busy

    def after_save(self, action: Callable[[], None]) -> None:
        """Call `action` once the save under way has succeeded; now if there is none; never if it fails."""
        self.saver.afterwards(action)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Hand `metrics` to all loggers. Called on rank 0."""
        self.hook.log_metrics(metrics=metrics, step=step, run=self)

    def save(self, path: str | Path, *, model: Any, optimizer: Any = (), **values: Any) -> None:
        """Write a checkpoint that any strategy can read: weights, optimizers, what plugins remember, and `values`.

        All ranks call it.
        """
        module = model.module if isinstance(model, ModelHandle) else model
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        state = {
            "state_dict": self.ask("model_state", module=module),
            "optimizers": [self.ask("optimizer_state", optimizer=each, module=module) for each in optimizers],
            "plugins": {key: plugin.state_dict() for key, plugin in identity.stateful(self.stack)},
            "ranks": self.collectives.all_gather_object({"plugins": self.rank_states()}),
            "values": values,
            "format": format_tag(self.stack),
        }
        self.ask("save_checkpoint", state=state, path=place(path))

    def load(self, path: str | Path, *, model: Any, optimizer: Any = (), strict: bool = True) -> dict[str, Any]:
        """Read what `save` (or a Trainer) wrote into `model` and `optimizer`; return the extra values."""
        module = model.module if isinstance(model, ModelHandle) else model
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        state = self.read_checkpoint(place(path))
        self.load_model(state["state_dict"], module, strict, path)
        self.load_optimizers(state.get("optimizers", []), optimizers, module, state["state_dict"], path)
        identity.restore(self.stack, state.get("callbacks", {}) | state.get("plugins", {}))
        if self.is_global_zero:
            warn_of_differences(self.stack, state)
        self.load_rank_states(state.get("ranks", []))
        values: dict[str, Any] = state.get("values", {})
        return values

    def rank_states(self) -> dict[str, Any]:
        """Return what plugins keep of this rank's own."""
        return {key: plugin.rank_state(self) for key, plugin in identity.stateful_by_rank(self.stack)}

    def load_rank_states(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Give plugins what they kept on each of `ranks`, which are those that saved. Collective."""
        plugins = dict(identity.stateful_by_rank(self.stack))
        saved = [rank.get("plugins", {}) for rank in ranks]
        on_all = [key for key in saved[0] if all(key in each for each in saved)] if saved else []
        for key, saved_as in matched(plugins, on_all).items():
            plugins[key].load_rank_states([each[saved_as] for each in saved], self)

    def read_checkpoint(self, path: Path) -> dict[str, Any]:
        """Return the logical state at `path`, whichever installed format it is in. Collective.

        Raises:
            CheckpointError: there is none, it is damaged, or a newer stratagem wrote it; on all ranks.
        """
        self.saver.wait()
        other, error = None, None
        if self.is_global_zero:  # one rank looks, for all to do the same
            try:
                if not self.checkpoint_format.recognises(path):
                    other = name_of_format(path)
                    if other is None:
                        check_is_no_folder(path)
            except CheckpointError as caught:
                error = caught
        self.collectives.fail_together(error)
        other = self.collectives.broadcast_object(other)
        if other is None:
            state: dict[str, Any] = self.ask("load_checkpoint", path=path, into=None)
        else:
            state = read_with(format_named(other), path, self)
        check_version(state, path)
        return state

    def load_model(
        self, state: Mapping[str, Any], module: nn.Module, strict: bool, path: Any = "the checkpoint"
    ) -> None:
        """Put the weights `state`, of the checkpoint `path`, into `module`. Collective.

        Raises:
            CheckpointError: they are another model's, or would have to be converted.
        """
        check_weights_fit(state, module, path)
        with applying(f"{path}: state_dict"):
            self.ask("load_model_state", state=state, module=module, strict=strict)

    def load_optimizers(
        self, states: list[dict[str, Any]], optimizers: list[Optimizer], module: nn.Module,
        weights: Mapping[str, Any] | None = None, path: Any = "the checkpoint",
    ) -> None:  # fmt: skip
        """Put logical `states` into `optimizers`, one each; `weights` are those of the same checkpoint, `path`."""
        self.check_optimizers(states, optimizers, weights, path)
        for number, (state, optimizer) in enumerate(zip(states, optimizers, strict=False)):
            where = f"{path}: optimizers[{number}]"
            filled = self._with_new_options(state, optimizer, where) if _is_logical(state) else state
            with applying(where):
                self.ask("load_optimizer_state", state=filled, optimizer=optimizer, module=module)

    def check_optimizers(
        self, states: list[dict[str, Any]], optimizers: list[Optimizer], weights: Mapping[str, Any] | None, path: Any
    ) -> None:
        """Refuse `states` that are not for `optimizers`; see `load_optimizers`."""
        if optimizers and len(states) != len(optimizers):
            raise CheckpointError(
                f"the checkpoint holds {len(states)} optimizer states", expected=f"{len(optimizers)} as in this run",
                do="resume with the optimizers that wrote it, or load the weights alone",
            )  # fmt: skip
        for number, (state, optimizer) in enumerate(zip(states, optimizers, strict=False)):
            if _is_logical(state):
                check_optimizer(state, weights or {}, optimizer, f"{path}: optimizers[{number}]")

    def _with_new_options(self, state: dict[str, Any], optimizer: Optimizer, where: str) -> dict[str, Any]:
        filled, added = with_new_options(state, optimizer, where)
        for each in added if self.is_global_zero else ():
            warnings.warn(each, stacklevel=2)
        return filled

    # --- Hooks ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def making_whole(self) -> Iterator[None]:
        """Within: `model_state` and `optimizer_state` are whole on every rank, whatever the checkpoint format takes."""
        before = self.whole_state, self._whole_everywhere
        self.whole_state = self._whole_everywhere = True
        try:
            yield
        finally:
            self.whole_state, self._whole_everywhere = before

    def ask(self, hook: str, **arguments: Any) -> Any:
        """Call an answer hook and insist on an answer."""
        return self._answered(hook, getattr(self.hook, hook)(**arguments, run=self))

    def _enter_all(self, stack: contextlib.ExitStack, hook: str, **arguments: Any) -> None:
        """Enter the contexts that the implementations of `hook` return."""
        for context in getattr(self.hook, hook)(**arguments, run=self):
            try:
                stack.enter_context(context)
            except TypeError as error:
                if hasattr(type(context), "__enter__"):
                    raise
                who = " or ".join(str(c) for c in self.stack.active() if hook in hook_implementations(c.plugin))
                raise PluginError(
                    f"{who} returned a {type(context).__name__} from {hook}", expected="a context manager, or None",
                    do="return what docs/hooks.md says for this hook",
                ) from error  # fmt: skip

    def implemented(self, hook: str) -> Any:
        """Return the caller of `hook`, or None if nobody implements it: a loop then need not call it at all."""
        caller = getattr(self.hook, hook, None)
        return caller if caller is not None and caller.get_hookimpls() else None

    def _answered(self, hook: str, answer: Any) -> Any:
        if not isinstance(answer, _ANSWERS.get(hook, object)) or answer is None:
            found = "None" if answer is None else f"a {type(answer).__name__}"
            wanted = " or ".join(f"a {each.__name__}" for each in _ANSWERS.get(hook, ())) or "an answer"
            raise PluginError(
                f"{self._who_answers(hook)} returned {found} from {hook}", expected=wanted,
                do="return what docs/hooks.md says for this hook",
            )  # fmt: skip
        return answer

    def _who_answers(self, hook: str) -> str:
        for choice in self.stack.active():
            marker = hook_implementations(choice.plugin).get(hook)
            if marker is not None and not marker["wrapper"]:
                return str(choice)
        wrappers = [str(c) for c in self.stack.active() if hook in hook_implementations(c.plugin)]
        return f"a wrapper of it ({', '.join(wrappers)})" if wrappers else "nobody answers:"

    def _bind(self) -> None:
        """Look up the hooks of the inner loop once. None: nobody implements it, or only the core's default does."""
        for name in _STEP_HOOKS:
            caller = self.implemented(name)
            plain = caller is not None and all(
                type(implementation.plugin).__name__ == "CoreDefaults" for implementation in caller.get_hookimpls()
            )
            if plain and name == "transfer_batch":
                caller = default_hooks.transfer_batch  # every batch needs it; pluggy would only pass it on
            keep = not plain or name in ("clip_gradients", "transfer_batch")
            setattr(self, f"_{name}", caller if keep else None)

    _step_context: Any
    _forward_backward: Any
    _scale_loss: Any
    _backward: Any
    _clip_gradients: Any
    _optimizer_step: Any
    _transfer_batch: Any

    # --- Travel to another process -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        bound = {"hook", "_hooks", "model", "optimizers", "saver", "_wires", "_handles", "neighbours", "watchdog"}
        bound |= {"_numerics", "copy_stream", "lr_scheduler_configs", *(f"_{name}" for name in _STEP_HOOKS)}
        return {name: value for name, value in self.__dict__.items() if name not in bound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.model, self.optimizers, self.lr_scheduler_configs = None, [], []
        self._enter()


class ModelHandle:
    """A prepared module in a loop of your own: call it like the module; anything else is the module's."""

    def __init__(self, run: Run, module: nn.Module) -> None:
        self.run, self.module, self._model = run, module, run.model
        run._handles.add(self)

    def release(self) -> None:
        """Let go of what was wrapped: it must not outlive the processes' connection."""
        self._model = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        run = self.run
        run.module, run.model = self.module, self._model  # of several modules, the one that was called last
        stage = "train" if self.module.training and torch.is_grad_enabled() else "validate"
        if run._step_context is None:
            return run.model("__call__", *arguments, **options)
        with contextlib.ExitStack() as stack:
            run._enter_all(stack, "step_context", stage=stage, sync=run.sync_gradients)
            return run.model("__call__", *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class LoaderHandle:
    """A loader whose batches arrive on the device."""

    def __init__(self, run: Run, loader: Any) -> None:
        self.run, self.loader = run, loader

    def __iter__(self) -> Iterator[Any]:
        return (self.run.transfer(batch) for batch in self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


@define
class _ProcessBody:
    """What runs in each process; pickled where the launcher needs that."""

    run: Run
    main: Callable[[Run], Any]
    #: A launcher that does not train in its own process calls this.
    far_from_home: bool = False
    #: The launching process's, so that a seed set there holds here.
    random_state: dict[str, Any] | None = None

    def __call__(self) -> Any:
        run = self.run
        run.far_from_home = self.far_from_home
        join_supervision()
        run.connect()
        if self.random_state is not None:
            restore_random_state(self.random_state, run.devices)
        try:
            return run.carry_out(self.main)
        finally:
            if run.far_from_home:
                run.close()


def check_loss(output: Any, rank: int) -> None:
    """Return if `output` of ``training_step`` on `rank` is a loss, or None (also under ``"loss"``) for a batch to skip.

    Raises:
        ConfigError: anything else.
    """
    keys, where = (list(output), " under 'loss'") if isinstance(output, dict) else ([], "")
    if isinstance(output, dict) and "loss" not in output:
        found = f"a dict with {', '.join(map(repr, keys))}" if keys else "an empty dict"
        near = next((key for key in keys if str(key).lower() == "loss"), None)
        hint = f"did you mean {near!r}" if near is not None else nearest("loss", list(map(str, keys)))
        raise ConfigError(f"training_step returned {found}", expected="one with 'loss'", do=hint or 'add "loss"')
    loss = output["loss"] if isinstance(output, dict) else output
    if loss is None:
        return
    do = "return the loss as a tensor, or None to skip a batch"
    if not isinstance(loss, torch.Tensor):
        article = "an" if type(loss).__name__[:1] in "aeiou" else "a"
        raise ConfigError(f"training_step returned {article} {type(loss).__name__}{where}", expected="a loss", do=do)
    if loss.numel() != 1:
        raise ConfigError(
            f"training_step returned a loss of shape {tuple(loss.shape)}", expected="one number", do="take its mean"
        )
    if loss.is_complex():
        raise ConfigError("training_step returned a complex loss", expected="a real number", do="take its abs()")
    if not loss.requires_grad:
        raise ConfigError(
            f"the loss of rank {rank} reaches no trainable parameter", expected="a loss that was computed from them",
            do="compute it without detach() and no_grad; to skip a batch return the usual loss multiplied by zero",
        )  # fmt: skip


def _separate_elements(module: nn.Module) -> None:
    """Give parameters and buffers that were expanded an element of memory for each number: other ranks write there."""
    for tensor in (*module.parameters(), *module.buffers()):
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def _hook_manager(stack: Stack) -> pluggy.PluginManager:
    manager = pluggy.PluginManager("stratagem")
    manager.add_hookspecs(hooks)
    answered = set()
    # pluggy calls the last registered first.
    for choice in reversed(stack.active()):
        try:
            manager.register(choice.plugin)
        except (pluggy.PluginValidationError, ValueError) as error:
            lightning_callbacks.check_hook_arguments(choice)
            raise PluginError(
                f"{choice} does not fit the hook contract ({error})", do="see docs/hooks.md for the signature"
            ) from error
        implementations = hook_implementations(choice.plugin)
        _check_marked(choice, implementations)
        answered |= {hook for hook, marker in implementations.items() if not marker["wrapper"]}
    unanswered = [hook for hook in default_hooks.DEFAULTS if hook not in answered]
    manager.register(default_hooks.plugin_with(unanswered))
    return manager


def _check_marked(choice: Any, implementations: Mapping[str, Any]) -> None:
    """A method called like a hook that is not marked as one would never be called."""
    base = next(cls for cls in type(choice.plugin).__mro__ if cls.__module__.startswith("stratagem.") or cls is object)
    for name, instead in lightning_callbacks.CALLBACK.items():
        if choice.kind in ("callback", "plugin") and hasattr(choice.plugin, name):
            raise lightning_callbacks.refuse(str(choice), name, instead)
    for name in vars(hooks):
        method = getattr(choice.plugin, name, None)
        if name in implementations or name.startswith("_") or not callable(method) or hasattr(base, name):
            continue
        if hasattr(getattr(hooks, name), "stratagem_spec"):
            arguments = ", ".join(inspect.signature(getattr(hooks, name)).parameters)
            raise PluginError(
                f"{choice} has a method {name} that is not marked as a hook",
                expected=f"@hookimpl above it, and arguments out of ({arguments})",
                do="add it (`from stratagem import hookimpl`), or choose another name for the method",
            )


def _team_world(stack: Stack, world: World) -> World:
    """Return the place of `world` among the processes that the innermost strategy spreads the model over."""
    size = world.world_size
    for choice, inner in itertools.pairwise(stack.strategies):
        size = choice.plugin.processes_per_team(world, inner.plugin)
    if size == world.world_size:
        return world
    here = min(size, world.local_world_size)
    return evolve(
        world, rank=world.rank % size, world_size=size, local_rank=world.local_rank % here, local_world_size=here,
        num_nodes=size // here, node_rank=world.rank % size // here,
    )  # fmt: skip


def _is_logical(state: Any) -> bool:
    """Whether the `state` of an optimizer is a logical one, rather than an engine's own form of it."""
    return isinstance(state, dict) and bool(state.keys() & {"state", "param_groups"})


def _has_complex(optimizer: Optimizer) -> bool:
    return any(parameter.is_complex() for group in optimizer.param_groups for parameter in group["params"])


def _close(reference: weakref.ref[Run]) -> None:
    run = reference()
    if run is not None:
        with contextlib.suppress(StratagemError, RuntimeError):
            run.close()


def format_tag(stack: Stack) -> dict[str, Any]:
    """Return what a checkpoint says about itself: the version of its layout, and who wrote it."""
    from stratagem._version import __version__

    entries = [choice.entry for choice in stack.choices() if choice.entry is not None]
    return {
        "name": "stratagem",
        "version": STATE_VERSION,
        "stratagem": __version__,
        "torch": str(torch.__version__),
        "plugins": {f"{e.kind}.{e.name}": f"{e.distribution} {e.version}" for e in entries},
    }


if TYPE_CHECKING:

    def _satisfies(run: Run) -> RunContext:
        """Checked by mypy: a `Run` has all that hooks use."""
        return run
