"""Turn names and options into an ordered, validated stack of plugins, before any process starts.

Everything here is decided from data: settings, package metadata, options, capabilities. No plugin hook runs, and no
plugin is known by name (`catalog.toml` holds the defaults).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import attrs
from attrs import define, field, frozen

from stratagem.api import hooks
from stratagem.api.capabilities import ACCUMULATION, CLIP_BY_NORM, CLIP_BY_VALUE, MULTI_PROCESS, Capabilities
from stratagem.api.kinds import KINDS, Environment, Plugin, Strategy
from stratagem.api.options import build, check, convert_options
from stratagem.api.values import PrecisionPolicy
from stratagem.api.world import DEFAULT_TIMEOUT, NCCL_TIMEOUT
from stratagem.checkpoint.state_checks import applying, check_similar
from stratagem.config.devices import devices_of_processes, parse_devices
from stratagem.config.settings import CHOICES, PluginOption
from stratagem.errors import ConfigError, PluginError, StratagemError, nearest, shown
from stratagem.stack import catalog, registry
from stratagem.stack.identity import keyed, matched

#: What each kind must answer to be of any use.
_DUTIES = {
    "strategy": ("wrap_model",),
    "environment": ("setup_environment",),
    "launcher": ("launch",),
    "checkpoint": ("save_checkpoint", "load_checkpoint"),
    "comm_hook": ("reduce_bucket",),
}


@frozen(kw_only=True)
class Choice:
    """One plugin of the stack, and how it came to be there."""

    kind: str
    #: As a user would write it; a class name for an instance that no entry point names.
    name: str
    plugin: Any
    #: Why it is here: "asked for", "the default for one process", "RANK is set" ...
    reason: str
    entry: registry.Entry | None = None
    #: The options that were set, each with its origin ("code", "file run.yaml", ...).
    origins: Mapping[str, str] = field(factory=dict)

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


@define(eq=False, kw_only=True)
class Stack:
    """The plugins of a run, resolved: in the order in which they act."""

    strategies: list[Choice]
    precision: Choice
    comm_hooks: list[Choice]
    environment: Choice
    launcher: Choice
    accelerator: Choice
    checkpoint: Choice
    callbacks: list[Choice]
    loggers: list[Choice]
    others: list[Choice]
    #: Device numbers that this node's processes use: one each, or all of them the only process.
    devices: tuple[int, ...]
    #: The user set `devices`, rather than leaving it to "auto".
    devices_given: bool
    policy: PrecisionPolicy
    #: The strategy applies the precision by itself: the precision's own hooks stand down.
    precision_absorbed: bool

    @property
    def strategy(self) -> Strategy:
        """The innermost strategy: the one that answers."""
        strategy: Strategy = self.strategies[-1].plugin
        return strategy

    def join_timeout(self) -> timedelta:
        """How long a rank waits for the others: the outermost strategy that was told decides, else the backend."""
        answers = [choice.plugin.join_timeout() for choice in self.strategies]
        default = NCCL_TIMEOUT if "nccl" in self.accelerator.plugin.backend else DEFAULT_TIMEOUT
        return next((answer for answer in answers if answer is not None), default)

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.devices) if self.strategy.process_per_device else 1

    def devices_of(self, local_rank: int) -> tuple[int, ...]:
        """The device numbers of one process of this node.

        Raises:
            ConfigError: there are fewer devices than processes.
        """
        if not self.strategy.process_per_device:
            return self.devices
        if local_rank >= len(self.devices):
            raise ConfigError(
                f"{self.environment} gave this process the local rank {local_rank}, and the run has "
                f"{len(self.devices)} devices on this node",
                expected="a device for each process", do="start as many processes on each node as devices",
            )  # fmt: skip
        return self.devices[local_rank : local_rank + 1]

    def choices(self) -> list[Choice]:
        """All plugins, in order."""
        return [
            *self.strategies, self.precision, *self.comm_hooks, self.environment, self.launcher, self.accelerator,
            self.checkpoint, *self.others, *self.callbacks, *self.loggers,
        ]  # fmt: skip

    def preload(self) -> None:
        """Import what all plugins import late, so that copies of this process need not do it each for itself."""
        device_type = self.accelerator.plugin.device(0).type
        for choice in self.choices():
            if isinstance(choice.plugin, Plugin):
                choice.plugin.preload(device_type)

    def stateful(self) -> list[tuple[str, Any]]:
        """The plugins with state to survive a restart, by the key that it is saved under."""
        return keyed(self, "state_dict")

    def stateful_by_rank(self) -> list[tuple[str, Any]]:
        """The plugins with state that differs from rank to rank, by the key that it is saved under."""
        return keyed(self, "rank_state")

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Give the states in `saved` back to the plugins that are here and were there."""
        plugins = dict(self.stateful())
        for key, saved_as in matched(plugins, saved).items():
            where = f"the checkpoint's state of {key}"
            with applying(where):
                check_similar(plugins[key].state_dict(), saved[saved_as], where)
                plugins[key].load_state_dict(saved[saved_as])

    def active(self) -> list[Choice]:
        """The plugins whose hooks are registered."""
        return [choice for choice in self.choices() if not (self.precision_absorbed and choice is self.precision)]


def resolve(settings: Any) -> Stack:
    """Return the validated stack that `settings` (a `RunSettings`) describes.

    Raises:
        ConfigError, PluginError: a name, option or combination that cannot work; nothing has been started.
    """
    chooser = _Chooser(settings)
    accelerator = chooser.one("accelerator", settings.accelerator) or chooser.refine(_detect_accelerator())
    environment = chooser.one("environment", settings.environment) or chooser.refine(_detect_environment())
    given = settings.devices is not None and settings.devices != "auto"
    if settings.strategy in ([], ()):
        raise ConfigError("strategy is an empty list", expected="a strategy", do='use "auto" for the default')
    strategies = chooser.many("strategy", settings.strategy)
    one_each = not strategies or strategies[-1].plugin.process_per_device
    devices = _devices(settings, accelerator, environment, one_each=one_each)
    strategies = strategies or [chooser.refine(_default_strategy(len(devices), settings.num_nodes, environment.plugin))]
    if strategies[-1].plugin.outer:
        strategies.append(_default("strategy", "strategy", f"the default inside {strategies[-1]}"))
    precision = chooser.one("precision", settings.precision) or chooser.refine(_default("precision", "precision"))
    policy = precision.plugin.policy()
    stack = Stack(
        strategies=strategies,
        precision=precision,
        comm_hooks=_comm_hooks(chooser, settings, strategies[-1]),
        environment=environment,
        launcher=_launcher(chooser, settings, strategies[-1]),
        accelerator=accelerator,
        checkpoint=_checkpoint(chooser, settings, strategies[-1]),
        callbacks=chooser.many("callback", getattr(settings, "callbacks", ()))
        + _profiler(settings, chooser)
        + _standard_callbacks(settings),
        loggers=_loggers(settings, chooser),
        others=chooser.extras["plugin"],
        devices=devices,
        devices_given=given,
        policy=policy,
        precision_absorbed=any(choice.plugin.absorbs(policy) for choice in strategies),
    )
    chooser.check_all_used()
    _check_absorbed(stack)
    _check_order(stack)
    _check_hooks(stack)
    _check_sync_batchnorm(settings, stack)
    _check_capabilities(stack, _needs(settings, stack))
    return stack


def with_callbacks(stack: Stack, settings: Any, values: Any) -> list[Choice]:
    """Return the callbacks of `stack` with `values` (one or a list, as for ``callbacks=``) added.

    One of `values` replaces those of its class, and of classes that its class derives from. What keeps checkpoints
    stays last.

    Raises:
        ConfigError, PluginError: no such callback, or one that does not fit the stack.
    """
    chooser = _Chooser(settings)
    chooser.extras, chooser.options = {kind: [] for kind in chooser.extras}, {}
    added = chooser.many("callback", values)
    kept = [each for each in stack.callbacks if not any(isinstance(a.plugin, type(each.plugin)) for a in added)]
    callbacks = sorted([*kept, *added], key=lambda choice: hasattr(choice.plugin, "best_model_path"))
    changed = attrs.evolve(stack, callbacks=callbacks)
    _check_hooks(changed)
    _check_capabilities(changed, {})
    return callbacks


# --- Choosing ----------------------------------------------------------------------------------------------------


class _Chooser:
    """Turns what the user wrote for a kind into choices; `plugins=` adds to every kind."""

    def __init__(self, settings: Any) -> None:
        self.origins, self.options = settings.origins, dict(settings.options)
        self.extras: dict[str, list[Choice]] = {kind: [] for kind in (*KINDS, "plugin")}
        for index, value in enumerate(_as_list(settings.plugins)):
            choice = self._extra(value, f"plugins[{index}]")
            self.extras[choice.kind].append(choice)

    def one(self, kind: str, value: Any) -> Choice | None:
        extras = self.extras[kind]
        asked = [] if _unset(value) else [self._choose(kind, value, kind)]
        if len(asked) + len(extras) > 1:
            names = " and ".join(repr(choice.name) for choice in asked + extras)
            raise ConfigError(f"{kind} is chosen more than once: {names}", expected=f"one {kind}", do="drop the others")
        return next(iter(asked + extras), None)

    def many(self, kind: str, value: Any, argument: str = "") -> list[Choice]:
        values = [] if _unset(value) else _as_list(value)
        argument = argument or _argument_of(kind)
        path = f"{argument}[{{}}]" if isinstance(value, list | tuple) and len(values) > 1 else argument
        alone = len(values) == 1
        return [self._choose(kind, each, path.format(i), alone) for i, each in enumerate(values)] + self.extras[kind]

    def _choose(self, kind: str, value: Any, path: str, alone: bool = True) -> Choice:
        base = KINDS[kind].base
        if isinstance(value, base) or (kind in ("callback", "logger") and hook_implementations(value)):
            return self._instance(kind, value)
        if isinstance(value, Mapping):
            chosen = dict(value)
            if not isinstance(chosen.get("name"), str):
                raise ConfigError(
                    f"{path} is {shown(value)}", expected='a mapping with a "name"', do="add the plugin's name"
                )
            return self._named(kind, chosen.pop("name"), chosen, alone)
        if isinstance(value, str) or (type(value) is int and kind == "precision"):
            return self._named(kind, str(value), {}, alone)
        if moved := catalog.moved(str(value).lower()):  # a dtype, say
            raise ConfigError(f"{path} is {shown(value)}", expected="a name", do=moved)
        if isinstance(value, type):
            raise ConfigError(f"{path} is the class {value.__name__}", expected="an instance", do="call the class")
        wanted = f"a name, a mapping or an instance of stratagem.{base.__name__}"
        raise ConfigError(f"{path} is {shown(value)}", expected=wanted, do="run `stratagem plugins list` for the names")

    def _instance(self, kind: str, plugin: Any) -> Choice:
        if attrs.has(type(plugin)):
            check(plugin, type(plugin).__name__)
        name, entry = _entry_of(kind, type(plugin))
        changed = {
            name: "code"
            for name, option in _options(plugin).items()
            if not _is_default(option, getattr(plugin, option.name, None))
        }
        return Choice(kind=kind, name=name, plugin=plugin, reason="given as an instance", entry=entry, origins=changed)

    def _named(self, kind: str, name: str, values: Mapping[str, Any], alone: bool) -> Choice:
        entry = registry.find(kind, name)
        source = self.origins.get(kind, self.origins.get(f"{kind}s", "code"))
        given = {option: PluginOption(value, source, text=False) for option, value in values.items()}
        if alone:  # otherwise, whose option would it be?
            given |= self.options.pop(kind, {})
        return self._build(entry, given, f"asked for ({source})")

    def refine(self, choice: Choice) -> Choice:
        """Apply the options that were set for this kind by a dotted name or beside the plugin's name."""
        options = self.options.pop(choice.kind, {})
        return self._build(choice.entry, options, choice.reason) if options and choice.entry else choice

    def _build(self, entry: registry.Entry, options: Mapping[str, PluginOption], reason: str) -> Choice:
        values = {name: option.value for name, option in options.items()}
        texts = {name for name, option in options.items() if option.text}
        try:
            plugin = make(entry, values, texts)
        except ConfigError as error:
            sources = {o.origin for name, o in options.items() if f".{name} " in f"{error.found} "} - {"code"}
            if not sources:
                raise
            found = f"{error.found} ({', '.join(sorted(sources))})"
            raise ConfigError(found, expected=error.expected, do=error.do) from None
        origins = {name: option.origin for name, option in options.items()}
        return Choice(kind=entry.kind, name=entry.name, plugin=plugin, reason=reason, entry=entry, origins=origins)

    def check_all_used(self) -> None:
        """Refuse options that nothing took: they were set for an instance, or for several plugins at once."""
        for kind, options in self.options.items():
            name, option = next(iter(options.items()))
            raise ConfigError(
                f"{kind}.{name} is set ({option.origin}) and the {kind} is an instance, a list, or absent",
                expected="one plugin chosen by name",
                do="set the option where the plugin is chosen",
            )

    def _extra(self, value: Any, path: str) -> Choice:
        if isinstance(value, Plugin):
            return self._instance(value.kind, value)
        if hook_implementations(value):
            return Choice(kind="plugin", name=type(value).__name__, plugin=value, reason="given as an instance")
        name = value.get("name") if isinstance(value, Mapping) else value
        if not isinstance(name, str):
            raise ConfigError(
                f"{path} is {shown(value)}", expected="a name, a mapping, or an object with @hookimpl methods"
            )
        wanted = name.lower()
        found = [e for e in registry.entries() if wanted in (e.name.lower(), e.qualified_name.lower())]
        kinds = [kind for kind in KINDS if any(entry.kind == kind for entry in found)]
        if len(kinds) > 1:
            raise ConfigError(f"{path} {name!r} is the name of a {' and of a '.join(kinds)}", do=f"use {kinds[0]}=")
        if not kinds:
            everything = [entry.name for entry in registry.entries()]
            raise PluginError(f"{path} {name!r} is not installed", expected="an installed plugin",
                              do=nearest(name, everything) or "see `stratagem plugins list`")  # fmt: skip
        return self._choose(kinds[0], value, path)


def make(entry: registry.Entry, values: Mapping[str, Any], texts: Iterable[str] = ()) -> Any:
    """Load the plugin of `entry` and build it with the options in `values`, parsing those named in `texts`."""
    target = entry.load()
    path = f"{entry.kind}.{entry.name}"
    if isinstance(target, type):
        return _check_kind(build(target, _convert(target, values, path, texts), path), entry)
    try:
        preset = target()
    except StratagemError:
        raise
    except Exception as error:
        raise PluginError(f"{path} of {entry.distribution} failed ({type(error).__name__}: {error})") from error
    _check_kind(preset, entry)
    if not values:
        return preset
    converted = _convert(type(preset), values, path, texts)
    current = {name: getattr(preset, option.name) for name, option in _options(preset).items()}
    return build(type(preset), current | converted, path)


def _convert(cls: type[Any], values: Mapping[str, Any], path: str, texts: Iterable[str]) -> dict[str, Any]:
    from_text = {option: values[option] for option in values if option in set(texts)}
    others = {option: value for option, value in values.items() if option not in from_text}
    return convert_options(cls, others, path) | convert_options(cls, from_text, path, text=True)


def _check_kind(plugin: Any, entry: registry.Entry) -> Any:
    base = KINDS[entry.kind].base
    if not isinstance(plugin, base):
        raise PluginError(
            f"{entry.kind} {entry.name!r} of {entry.distribution} is a {type(plugin).__name__}",
            expected=f"a stratagem.{base.__name__}",
            do="its author should name it in the entry-point group of its kind",
        )
    return plugin


def _entry_of(kind: str, cls: type[Any]) -> tuple[str, registry.Entry | None]:
    """Return the name that users type for `cls`, if an entry point spells it."""
    for entry in registry.entries(kind) if kind in KINDS else ():
        module, _, attribute = entry.value.partition(":")
        if attribute == cls.__qualname__ and cls.__module__.partition(".")[0] == module.partition(".")[0]:
            return entry.name, entry
    return cls.__name__, None


def _options(plugin: Any) -> dict[str, attrs.Attribute[Any]]:
    from stratagem.api.options import options

    return options(type(plugin))


def _argument_of(kind: str) -> str:
    """Return the argument that chooses plugins of `kind`."""
    return next((argument for argument, chosen in CHOICES.items() if chosen == kind), kind)


def _is_default(option: attrs.Attribute[Any], value: Any) -> bool:
    default: Any = option.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return not default.takes_self and _equal(value, default.factory())
    return default is not attrs.NOTHING and _equal(value, default)


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; arrays and tensors of several elements are equal to nothing."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):
        return False


def _unset(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() == "auto")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# --- Defaults ----------------------------------------------------------------------------------------------------


def _default(kind: str, role: str, reason: str = "the default", **values: Any) -> Choice:
    entry = registry.find(kind, catalog.default(role))
    return Choice(kind=kind, name=entry.name, plugin=make(entry, values), reason=reason, entry=entry)


def _default_strategy(processes: int, num_nodes: int, environment: Environment) -> Choice:
    if processes * num_nodes == 1 and not (environment.processes_exist() and environment.local_processes()):
        return _default("strategy", "strategy", "the default for one process")
    if in_notebook():
        return _default("strategy", "strategy_notebook", "the default for several processes from a notebook")
    return _default("strategy", "strategy_distributed", "the default for several processes")


def in_notebook() -> bool:
    """Whether this process is an IPython kernel, whose script cannot be started again."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


def _launcher(chooser: _Chooser, settings: Any, strategy: Choice) -> Choice:
    return _for_strategy(chooser, "launcher", settings.launcher, strategy, strategy.plugin.default_launcher())


def _checkpoint(chooser: _Chooser, settings: Any, strategy: Choice) -> Choice:
    return _for_strategy(chooser, "checkpoint", settings.checkpoint, strategy, strategy.plugin.default_checkpoint())


def _comm_hooks(chooser: _Chooser, settings: Any, strategy: Choice) -> list[Choice]:
    asked, wanted = chooser.many("comm_hook", settings.comm_hook), strategy.plugin.default_comm_hooks()
    if asked and wanted:
        raise ConfigError(
            f"comm_hook is {[choice.name for choice in asked]} and {strategy} asks for comm hooks of its own",
            expected="one of the two",
        )
    reason = f"{strategy} asks for it"
    return asked or [attrs.evolve(choice, reason=reason) for choice in chooser.many("comm_hook", wanted or None)]


def _for_strategy(chooser: _Chooser, kind: str, value: Any, strategy: Choice, wanted: str | None) -> Choice:
    """Return what the user chose for `kind`, else what `strategy` wants, else the default."""
    asked = chooser.one(kind, value)
    if asked is None and wanted is None:
        return chooser.refine(_default(kind, kind))
    if asked is None:
        entry = registry.find(kind, wanted or "")
        reason = f"{strategy} asks for it"
        return chooser.refine(Choice(kind=kind, name=entry.name, plugin=make(entry, {}), reason=reason, entry=entry))
    if wanted is not None and wanted != asked.name:
        raise ConfigError(
            f"{asked} was chosen and {strategy} asks for the {kind} {wanted!r}",
            do=f"drop the {kind}, or choose a strategy or an option of it that leaves it open",
        )
    return asked


def _standard_callbacks(settings: Any) -> list[Choice]:
    wanted = {
        "progress": "enable_progress_bar", "checkpointing": "enable_checkpointing", "summary": "enable_model_summary",
    }  # fmt: skip
    quiet = getattr(settings, "barebones", False)
    choices = []
    for role, switch in wanted.items():
        value = getattr(settings, switch, False)
        if not (sys.stdout.isatty() if value is None else value) or quiet:
            continue
        if role == "checkpointing" and settings.fast_dev_run:
            continue
        entry = registry.find("callback", catalog.default(role))
        listed = [*_as_list(settings.callbacks), *_as_list(settings.plugins)]
        if not any(_names(value, entry) for value in listed):
            choices.append(_default("callback", role, f"{switch}=True"))
    return choices


def _names(value: Any, entry: registry.Entry) -> bool:
    """Whether the user's `value` already chooses the plugin of `entry`, or one of a class derived from it."""
    name = value.get("name") if isinstance(value, Mapping) else value
    if isinstance(name, str):
        if name.lower() == entry.name:
            return True
        chosen = [other for other in registry.entries("callback") if other.name == name.lower()]
        return any(issubclass(other.load(), entry.load()) for other in chosen)
    return any(_entry_of("callback", cls)[1] == entry for cls in type(value).__mro__)


def _profiler(settings: Any, chooser: _Chooser) -> list[Choice]:
    """Return the callback that ``profiler=`` stands for."""
    value = getattr(settings, "profiler", None)
    if value is None or value is False:
        return []
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping):
        known = [entry.name.removesuffix("_profiler") for entry in registry.entries("callback")
                 if entry.name.endswith("_profiler")]  # fmt: skip
        name = value.get("name")
        if not isinstance(name, str) or name.lower() not in known:
            raise ConfigError(
                f"profiler is {shown(name if isinstance(name, str) else value)}",
                expected=f"{' or '.join(map(repr, known)) or 'an installed one'}, or an instance of stratagem.Callback",
                do=nearest(str(name), known),
            )
        value = {**value, "name": f"{name}_profiler"}
    return chooser.many("callback", value, "profiler")


def _loggers(settings: Any, chooser: _Chooser) -> list[Choice]:
    value = getattr(settings, "logger", False)
    quiet = getattr(settings, "barebones", False) or getattr(settings, "fast_dev_run", False)
    if quiet:
        value = False if isinstance(value, bool) or getattr(settings, "fast_dev_run", False) else value
    if isinstance(value, bool):
        extras = chooser.extras["logger"]
        return extras if extras or not value else [chooser.refine(_default("logger", "logger", "logger=True"))]
    return chooser.many("logger", value)


# --- Asking the machine ------------------------------------------------------------------------------------------


def _candidates(kind: str) -> list[tuple[registry.Entry, Any]]:
    """Return the installed plugins of `kind` that can be built, highest precedence first; broken ones are passed by."""
    found = []
    for entry in registry.entries(kind):
        try:
            target = entry.load()
            if isinstance(target, type):  # presets ("gpu") are other names for what is asked anyway
                found.append((entry, make(entry, {})))
        except Exception:  # noqa: BLE001, S112 - one broken package must not touch a run that does not name it
            continue
    return sorted(found, key=lambda pair: -pair[1].precedence)


def _detect_accelerator() -> Choice:
    for entry, accelerator in _candidates("accelerator"):
        if _ask(accelerator.count):
            reason = f"{accelerator.count()} found" if accelerator.indexed else "no other device found"
            return Choice(kind="accelerator", name=entry.name, plugin=accelerator, reason=reason, entry=entry)
    raise _nothing_installed("accelerator")


def _detect_environment() -> Choice:
    for entry, environment in _candidates("environment"):
        if evidence := _ask(environment.detect):
            return Choice(kind="environment", name=entry.name, plugin=environment, reason=evidence, entry=entry)
    raise _nothing_installed("environment")


def _ask(question: Any) -> Any:
    try:
        return question()
    except Exception:  # noqa: BLE001 - asked in isolation: a plugin that cannot answer is not present
        return None


def _nothing_installed(kind: str) -> PluginError:
    packages = sorted(set(catalog.providers(kind).values()))
    return PluginError(f"no usable {kind} plugin is installed", do=f"run `pip install {' '.join(packages)}`")


def _devices(settings: Any, accelerator: Choice, environment: Choice, *, one_each: bool) -> tuple[int, ...]:
    """Return what `devices` means; of processes that exist already, each has one if the strategy uses `one_each`."""
    if accelerator.plugin.count() == 0:
        raise ConfigError(f"{accelerator} finds no device on this machine", expected="one", do='use accelerator="auto"')
    wanted = "auto" if settings.devices is None else settings.devices
    running = environment.plugin.local_processes() if environment.plugin.processes_exist() else None
    if one_each and running:
        return devices_of_processes(wanted, accelerator.plugin, running, str(environment))
    return parse_devices(wanted, accelerator.plugin)


# --- Checking ----------------------------------------------------------------------------------------------------


def hook_implementations(plugin: Any, *, of_class: bool = False) -> dict[str, dict[str, Any]]:
    """Return what `plugin` (or, with `of_class`, a class) marks with ``@hookimpl``: the marker's options by name."""
    if isinstance(plugin, type) and not of_class:
        return {}
    cls = plugin if of_class else type(plugin)
    markers = {name: getattr(getattr(cls, name, None), "stratagem_impl", None) for name in dir(cls)}
    return {name: marker for name, marker in markers.items() if isinstance(marker, dict)}


def hook_specifications() -> dict[str, dict[str, Any]]:
    """Return every hook of the contract by name, with its options."""
    return {name: value.stratagem_spec for name, value in vars(hooks).items() if hasattr(value, "stratagem_spec")}


def _check_hooks(stack: Stack) -> None:
    specifications = hook_specifications()
    answers: dict[str, list[Choice]] = {}
    for choice in stack.active():
        for hook, marker in hook_implementations(choice.plugin).items():
            if hook not in specifications:
                raise PluginError(
                    f"{choice} implements {hook!r}, which is no hook of stratagem",
                    do=nearest(hook, specifications) or "see docs/hooks.md for the hooks",
                )
            if specifications[hook]["firstresult"] and not marker["wrapper"]:
                answers.setdefault(hook, []).append(choice)
    for hook, choices in answers.items():
        if len(choices) > 1:
            raise PluginError(
                f"hook {hook!r} is answered by {' and by '.join(str(choice) for choice in choices)}",
                expected="one plugin to answer and the others to wrap",
                do="drop one of them",
            )
    for choice in stack.active():
        duties = _DUTIES.get(choice.kind, ())
        outer = choice in stack.strategies[:-1]
        missing = [hook for hook in duties if hook not in hook_implementations(choice.plugin) and not outer]
        if missing:
            raise PluginError(
                f"{choice} does not implement {' and '.join(missing)}",
                expected=f"every {choice.kind} to do so",
                do="its author should add it; docs/hooks.md has the signature",
            )


def _check_order(stack: Stack) -> None:
    """Refuse strategies and comm hooks that cannot stand where they were put."""
    for outer, inner in itertools.pairwise(stack.strategies):
        if not outer.plugin.outer:
            raise ConfigError(
                f"strategy is {[choice.name for choice in stack.strategies]}, and {outer} wraps no other",
                expected="strategies that do, and one inside them",
                do=f"put {inner} before it, if that one does" if inner.plugin.outer else "drop one of them",
            )
    names = [choice.name for choice in stack.comm_hooks]
    for word in ("outermost", "innermost"):
        rivals = [choice for choice in stack.comm_hooks if getattr(choice.plugin, word)]
        if len(rivals) > 1:
            end = "first" if word == "outermost" else "last"
            raise ConfigError(
                f"comm_hook is {names}, and {rivals[0]} and {rivals[1]} must both be the {end} of a stack",
                expected="one of the two",
            )
    for place, choice in enumerate(stack.comm_hooks):
        if choice.plugin.outermost and place > 0:
            raise ConfigError(
                f"comm_hook is {names}, and {choice} needs the shapes of the gradients, which only the first one sees",
                expected=f"{[choice.name, *(name for name in names if name != choice.name)]}",
            )
        if choice.plugin.innermost and place + 1 < len(names):
            raise ConfigError(
                f"comm_hook is {names}, and {choice} sends by itself: {stack.comm_hooks[place + 1]} would get nothing",
                expected=f"{[*(name for name in names if name != choice.name), choice.name]}",
            )


def _check_sync_batchnorm(settings: Any, stack: Stack) -> None:
    """Refuse to synchronize what processes compute where a process has several devices."""
    if getattr(settings, "sync_batchnorm", False) and len(stack.devices) > stack.num_processes:
        raise ConfigError(
            f"sync_batchnorm is True, and {stack.strategies[-1]} trains on {len(stack.devices)} devices in one process",
            expected="a process for each device",
            do="drop it, or choose a strategy that has one",
        )


def _check_absorbed(stack: Stack) -> None:
    """Refuse options of a precision that a strategy applies by itself: nobody would read them."""
    precision = stack.precision
    if stack.precision_absorbed and precision.origins:
        option, origin = next(iter(precision.origins.items()))
        raise ConfigError(
            f"precision.{precision.name}.{option} is set ({origin}), and {stack.strategies[-1]} applies the precision "
            "by itself",
            expected="the precision by its name alone", do="set an option of the strategy's, if it has one for that",
        )  # fmt: skip


def _needs(settings: Any, stack: Stack) -> dict[str, str]:
    """Return what the settings ask of the plugins: capability to the words the user wrote."""
    needs = {}
    running = stack.environment.plugin.local_processes() or 1
    if stack.num_processes * settings.num_nodes > 1 or running > 1:
        needs[MULTI_PROCESS] = f"devices={settings.devices!r} with num_nodes={settings.num_nodes}"
    if getattr(settings, "gradient_clip_val", None) is not None:
        word = CLIP_BY_NORM if settings.gradient_clip_algorithm == "norm" else CLIP_BY_VALUE
        needs[word] = f"gradient_clip_val={settings.gradient_clip_val!r} by {settings.gradient_clip_algorithm}"
    if getattr(settings, "accumulate_grad_batches", 1) != 1:
        needs[ACCUMULATION] = f"accumulate_grad_batches={settings.accumulate_grad_batches}"
    return needs


def _capabilities(choice: Choice) -> Capabilities:
    capabilities = getattr(choice.plugin, "capabilities", Plugin.capabilities)
    if not isinstance(capabilities, Capabilities):
        raise PluginError(
            f"the capabilities of {choice} are a {type(capabilities).__name__}",
            expected="stratagem.Capabilities(provides=..., requires=..., conflicts=...)",
            do="its author should make them one",
        )
    return capabilities


def _check_capabilities(stack: Stack, needs: Mapping[str, str]) -> None:
    choices = stack.active()
    provided = {word for choice in choices for word in _capabilities(choice).provides}
    wanted: list[tuple[str, str, Choice | None]] = [(word, reason, None) for word, reason in needs.items()]
    wanted += [(word, str(choice), choice) for choice in choices for word in sorted(_capabilities(choice).requires)]
    for word, who, asker in wanted:
        if word not in provided:
            raise ConfigError(
                f"{who} needs {word!r}, which {stack.strategies[-1]} does not provide",
                do=stack.strategy.how_to_provide(word) or _alternatives(word, asker),
            )
    for choice in choices:
        for other in choices:
            clash = sorted(_capabilities(choice).conflicts & _capabilities(other).provides)
            if clash and other is not choice:
                raise ConfigError(
                    f"{choice} cannot be used with {other}, which provides {clash[0]!r}", do="drop one of the two"
                )


def _alternatives(word: str, asker: Choice | None) -> str:
    """Name the installed strategies that provide `word`, without presets; imports them, which only an error may."""
    entries = registry.entries("strategy")
    able = [entry.name for entry in entries if word in _provided_without_options(entry, registry.generation())]
    if not able:
        return "no installed strategy provides it" + (f"; drop {asker}" if asker else "")
    return f"choose a strategy that does: {', '.join(able)}"


@functools.cache
def _provided_without_options(entry: registry.Entry, generation: int) -> frozenset[str]:  # noqa: ARG001 - a cache's key
    """Return what a strategy provides; nothing for a preset, or a package that cannot be imported or needs options."""
    try:
        return make(entry, {}).capabilities.provides if isinstance(entry.load(), type) else frozenset()
    except Exception:  # noqa: BLE001 - a broken package is not an alternative
        return frozenset()
