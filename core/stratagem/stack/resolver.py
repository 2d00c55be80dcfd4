"""Turn names and options into an ordered, validated stack of plugins, before any process starts.

The resolver uses data only: settings, package metadata, options, capabilities. It calls no hook of a plugin, and knows
no plugin by name (`catalog.toml` has the defaults).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import attrs

from stratagem.api.kinds import Kind, Plugin
from stratagem.api.notebook import in_notebook
from stratagem.api.options import as_list, check, is_list, options_in
from stratagem.api.options import options as options_of
from stratagem.config.devices import devices_of_processes, parse_devices
from stratagem.config.settings import PluginOption
from stratagem.discovery import catalog, registry
from stratagem.errors import ConfigError, PluginError, nearest, shown
from stratagem.stack.checks import check_absorbed, check_capabilities, check_hooks, check_order, needs_of
from stratagem.stack.construction import by_name, default, default_strategy, make
from stratagem.stack.detection import detect_accelerator, detect_environment
from stratagem.stack.plugins import Choice, Stack, hook_implementations


def resolve(settings: Any) -> Stack:
    """Return the validated stack that `settings` (a `RunSettings`) describes.

    Raises:
        ConfigError, PluginError: a name, option or combination that cannot work. No process was started.
    """
    for remark in registry.list_remarks():
        warnings.warn(remark, stacklevel=2)
    chooser = Chooser(settings)
    accelerator = chooser.one("accelerator", settings.accelerator) or chooser.refine(detect_accelerator())
    environment = chooser.one("environment", settings.environment) or chooser.refine(detect_environment())
    given = settings.devices is not None and settings.devices != "auto"
    if settings.strategy in ([], ()):
        raise ConfigError("strategy is an empty list", expected="a strategy", do='use "auto" for the default')
    strategies = chooser.many("strategy", settings.strategy)
    one_each = not strategies or strategies[-1].plugin.process_per_device
    devices = _devices(settings, accelerator, environment, one_each=one_each)
    num_nodes = environment.plugin.num_nodes() or settings.num_nodes
    strategies = strategies or [
        chooser.refine(default_strategy(accelerator, len(devices), num_nodes, environment.plugin))
    ]
    if strategies[-1].plugin.outer:
        strategies.append(default("strategy", "strategy", f"the default inside {strategies[-1]}"))
    precision = chooser.one("precision", settings.precision) or chooser.refine(default("precision", "precision"))
    policy = precision.plugin.policy()
    stack = Stack(
        strategies=strategies,
        precision=precision,
        environment=environment,
        launcher=_launcher(chooser, settings, strategies[-1], len(devices) if one_each else 1),
        accelerator=accelerator,
        checkpoint=_checkpoint(chooser, settings, strategies[-1]),
        callbacks=[],
        loggers=[],
        others=[*chooser.extras["plugin"], *_added(chooser, settings, strategies[-1])],
        automatic=automatic_callbacks(settings, "callback"),
        devices=devices,
        devices_given=given,
        num_nodes=num_nodes,
        policy=policy,
        precision_absorbed=any(choice.plugin.absorbs(policy) for choice in strategies)
        and not precision.plugin.replaces_layers,
    )
    stack.callbacks = _of_arguments(settings, stack)
    settings.add_to(stack, chooser)
    chooser.check_all_used()
    check_absorbed(stack)
    check_order(stack)
    check_capabilities(stack, needs_of(settings, stack))
    check_hooks(stack)
    return stack


# --- Choosing ----------------------------------------------------------------------------------------------------


class Chooser:
    """Turns the arguments for a kind into choices; `plugins=` adds to every kind."""

    def __init__(self, settings: Any) -> None:
        self.origins, self.options = settings.origins, dict(settings.options)
        self.extras: dict[str, list[Choice]] = {kind: [] for kind in (*registry.kinds(), "plugin")}
        for index, value in enumerate(as_list(settings.plugins)):
            choice = self._extra(value, f"plugins[{index}]")
            if choice.kind not in self.extras:
                raise PluginError(
                    f"plugins[{index}] is a {choice.name} of the kind {choice.kind!r}, which no installed package has",
                    do="install or repair the package that has it",
                )
            self.extras[choice.kind].append(choice)

    def one(self, kind: str, value: Any) -> Choice | None:
        extras = self.extras[kind]
        asked = [] if _unset(value) else [self._choose(kind, value, kind)]
        if len(asked) + len(extras) > 1:
            raise _several(kind, asked + extras)
        return next(iter(asked + extras), None)

    def many(self, kind: str, value: Any, argument: str = "") -> list[Choice]:
        values = [] if _unset(value) else as_list(value)
        # What `plugins` adds comes with the kind's own argument only.
        extras, argument = [] if argument else self.extras.get(kind, []), argument or registry.argument_of(kind)
        path = f"{argument}[{{}}]" if is_list(value) and len(values) > 1 else argument
        alone = len(values) == 1
        return [self._choose(kind, each, path.format(i), alone) for i, each in enumerate(values)] + extras

    def default_callback(self, value: Any) -> Choice:
        """Return a callback that the user did not choose, without options that were set for a chosen one."""
        return self._choose("callback", value, "callback", alone=False)

    def _choose(self, kind: str, value: Any, path: str, alone: bool = True) -> Choice:
        base = registry.kinds()[kind].base
        if isinstance(value, base) or (kind in ("callback", "logger") and hook_implementations(value)):
            return self._instance(kind, value)
        if isinstance(value, Mapping):
            if not isinstance(value.get("name"), str):
                raise ConfigError(
                    f"{path} is {shown(value)}", expected='a mapping with a "name"', do="add the plugin's name"
                )
            return self._named(kind, value["name"], options_in(value), alone, path)
        if isinstance(value, str) or (type(value) is int and kind == "precision"):
            return self._named(kind, str(value), {}, alone)
        if moved := catalog.moved(str(value).lower()):  # for example a dtype
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
            for name, option in options_of(type(plugin)).items()
            if not _is_default(option, getattr(plugin, option.name, None))
        }
        return Choice(kind=kind, name=name, plugin=plugin, reason="given as an instance", entry=entry, origins=changed)

    def _named(self, kind: str, name: str, values: Mapping[str, Any], alone: bool, path: str = "") -> Choice:
        entry = registry.find(kind, name)
        source = self.origins.get(registry.argument_of(kind), "code")
        given = {option: PluginOption(value, source, text=False) for option, value in values.items()}
        if alone:  # with several plugins an option would be ambiguous
            given |= self.options.pop(kind, {})
        return self._build(entry, given, f"asked for ({source})", path if path == "profiler" else "")

    def refine(self, choice: Choice) -> Choice:
        """Apply the options that were set for this kind by a dotted name or in a mapping with the plugin's name."""
        options = self.options.pop(choice.kind, {})
        return self._build(choice.entry, options, choice.reason) if options and choice.entry else choice

    def _build(self, entry: registry.Entry, options: Mapping[str, PluginOption], reason: str, path: str = "") -> Choice:
        values = {name: option.value for name, option in options.items()}
        texts = {name for name, option in options.items() if option.text}
        try:
            plugin = make(entry, values, texts, path)
        except ConfigError as error:
            sources = {o.origin for name, o in options.items() if f".{name} " in f"{error.found} "} - {"code"}
            if not sources:
                raise
            found = f"{error.found} ({', '.join(sorted(sources))})"
            raise ConfigError(found, expected=error.expected, do=error.do) from None
        origins = {name: option.origin for name, option in options.items()}
        return Choice(kind=entry.kind, name=entry.name, plugin=plugin, reason=reason, entry=entry, origins=origins)

    def check_all_used(self) -> None:
        """Refuse options that no plugin used: they were set for an instance, or for several plugins at once."""
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
        found = [entry for entry in registry.entries() if entry.is_called(wanted)]
        kinds = [kind for kind in registry.kinds() if any(entry.kind == kind for entry in found)]
        if len(kinds) > 1:
            raise ConfigError(f"{path} {name!r} is the name of a {' and of a '.join(kinds)}", do=f"use {kinds[0]}=")
        if not kinds:
            raise _not_installed(path, name)
        return self._choose(kinds[0], value, path)


def _not_installed(path: str, name: str) -> PluginError:
    """Return the error for `name` in `plugins`, where the kind is unknown."""
    packages = (catalog.providers(kind).get(name.lower()) for kind in registry.kinds())
    if package := next(filter(None, packages), None):
        return PluginError(f"{path} {name!r} is not installed", do=catalog.how_to_install(package))
    everything = [entry.name for entry in registry.entries()]
    do = catalog.moved(name.lower()) or nearest(name, everything) or "see `stratagem plugins list`"
    return PluginError(f"{path} {name!r} is not installed", expected="an installed plugin", do=do)


def _entry_of(kind: str, cls: type[Any]) -> tuple[str, registry.Entry | None]:
    """Return the name and the entry of `cls`, if an entry point names it; otherwise the class name and None."""
    for entry in registry.entries(kind) if kind in registry.kinds() else ():
        module, _, attribute = entry.value.partition(":")
        if attribute == cls.__qualname__ and cls.__module__.partition(".")[0] == module.partition(".")[0]:
            return entry.name, entry
    return cls.__name__, None


def _is_default(option: attrs.Attribute[Any], value: Any) -> bool:
    default: Any = option.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return not default.takes_self and _equal(value, default.factory())
    return default is not attrs.NOTHING and _equal(value, default)


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; False for arrays and tensors of several elements."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):
        return False


def _unset(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() == "auto")


#: The kinds that the engine and its Trainer call by name; a `Stack` has a field for each.
_OF_STACK = {
    "strategy", "precision", "environment", "launcher", "accelerator", "checkpoint", "callback", "logger",
}  # fmt: skip


def _added(chooser: Chooser, settings: Any, strategy: Choice) -> list[Choice]:
    """Return the plugins of the kinds that other packages add: the user's, else the strategy's, else the default."""
    choices = []
    for kind in registry.kinds().values():
        if kind.name in _OF_STACK:
            continue
        value = settings.chosen.get(kind.argument)
        found = chooser.many(kind.name, None if value is False else value)
        if wanted := strategy.plugin.default_plugins(kind.name):
            _check_not_chosen(kind, found, strategy)
            reason = f"{strategy} needs it"
            found = [attrs.evolve(choice, reason=reason) for choice in chooser.many(kind.name, wanted)]
        if kind.single and len(found) > 1:
            raise _several(kind.name, found)
        if kind.default and not found and _unset(value) and kind.needs_trainer <= settings.for_trainer:
            found = _default_of(kind, chooser)
        choices += found
    return choices


def _check_not_chosen(kind: Kind, choices: list[Choice], strategy: Choice) -> None:
    if choices:
        names, others = [choice.name for choice in choices], f"{kind.name.replace('_', ' ')}s"
        raise ConfigError(
            f"{kind.argument} is {names} and {strategy} has {others} of its own", expected="one of the two"
        )


def _default_of(kind: Kind, chooser: Chooser) -> list[Choice]:
    """Return the default of a kind that another package adds; nothing where it is not there, since nobody asked."""
    if not any(entry.is_called(kind.default) for entry in registry.entries(kind.name)):
        if not any(entry.is_called(kind.default) for entry in registry.entries(kind.name, hidden=True)):
            warnings.warn(
                f"the default of the kind {kind.name!r} is {kind.default!r}, which is not installed: the run goes on "
                "without it", stacklevel=2
            )  # fmt: skip
        return []
    return [chooser.refine(by_name(kind.name, kind.default, f"the default of the kind {kind.name!r}"))]


def _several(kind: str, choices: list[Choice]) -> ConfigError:
    names = " and ".join(repr(choice.name) for choice in choices)
    return ConfigError(f"{kind} is chosen more than once: {names}", expected=f"one {kind}", do="drop the others")


def _launcher(chooser: Chooser, settings: Any, strategy: Choice, processes: int) -> Choice:
    role = "launcher_notebook" if processes > 1 and in_notebook() else "launcher"
    return _for_strategy(chooser, "launcher", settings.launcher, strategy, strategy.plugin.default_launcher(), role)


def _checkpoint(chooser: Chooser, settings: Any, strategy: Choice) -> Choice:
    return _for_strategy(
        chooser, "checkpoint", settings.checkpoint, strategy, strategy.plugin.default_checkpoint(), "checkpoint"
    )


def _for_strategy(chooser: Chooser, kind: str, value: Any, strategy: Choice, wanted: str | None, role: str) -> Choice:
    """Return the plugin of `kind` that the user chose, else the one that `strategy` needs, else the default."""
    asked = chooser.one(kind, value)
    if asked is None and wanted is None:
        return chooser.refine(default(kind, role))
    if asked is None:
        return chooser.refine(by_name(kind, wanted or "", f"{strategy} needs it"))
    if wanted is not None and wanted != asked.name:
        raise ConfigError(
            f"{asked} was chosen and {strategy} needs the {kind} {wanted!r}",
            do=f"drop the {kind}, or choose a strategy or an option of it that allows any",
        )
    return asked


def automatic_callbacks(settings: Any, group: str) -> list[Choice]:
    """Return the callbacks of a `group` of the catalog that are installed and that the user does not list."""
    names = catalog.automatic(group)
    choices = []
    listed = settings.listed()
    for entry in registry.entries("callback") if "callback" in registry.kinds() else ():
        if entry.name in names and not is_listed(entry, listed):
            try:
                plugin = make(entry, {})
            except PluginError as error:  # a broken package must not touch a run that does not name it
                warnings.warn(f"the run goes on without it: {error}", stacklevel=2)
                continue
            reason = "in every run where it is installed"
            choices.append(Choice(kind="callback", name=entry.name, plugin=plugin, reason=reason, entry=entry))
    return choices


def _of_arguments(settings: Any, stack: Stack) -> list[Choice]:
    """Return the callbacks that arguments of the catalog stand for, such as ``compile=``; each reads its argument.

    Raises:
        ConfigError: the user lists one of them too.
    """
    choices = []
    for argument, name in catalog.arguments().items():
        value = getattr(settings, argument)
        if value is None or (value is False and argument not in settings.origins):
            continue
        entry = registry.find("callback", name)
        options = entry.load().from_argument(value, stack)
        if options is None:
            continue
        if is_listed(entry, settings.listed()):
            raise ConfigError(
                f"{argument} is set, and callback {name!r} is listed", expected="one of the two", do="drop the argument"
            )
        choice = by_name("callback", name, f"{argument}={shown(value)}", path=argument, **options)
        choices.append(attrs.evolve(choice, origins=dict.fromkeys(options, settings.origins.get(argument, "code"))))
    return choices


def is_listed(entry: registry.Entry, listed: list[Any]) -> bool:
    """Whether the callback of `entry`, or one of a class derived from it, is one of those that the user lists."""
    return any(_names(value, entry) for value in listed)


def _names(value: Any, entry: registry.Entry) -> bool:
    """Whether `value` already chooses the plugin of `entry`, or one of a class derived from it."""
    name = value.get("name") if isinstance(value, Mapping) else value
    if isinstance(name, str):
        chosen = [other for other in registry.entries("callback") if other.is_called(name.lower())]
        if entry in chosen:
            return True
        return any(issubclass(other.load(), entry.load()) for other in chosen)
    return any(_entry_of("callback", cls)[1] == entry for cls in type(value).__mro__)


def _devices(settings: Any, accelerator: Choice, environment: Choice, *, one_each: bool) -> tuple[int, ...]:
    """Return the device numbers of this node; with `one_each`, one for each process that exists already."""
    if accelerator.plugin.count() == 0:
        raise ConfigError(f"{accelerator} finds no device on this machine", expected="one", do='use accelerator="auto"')
    wanted = "auto" if settings.devices is None else settings.devices
    count = environment.plugin.local_processes() if one_each else None
    if one_each and environment.plugin.processes_exist():
        return devices_of_processes(wanted, accelerator.plugin, count, str(environment))
    if count and wanted == "auto":
        wanted = count
    return parse_devices(wanted, accelerator.plugin)
