"""The typed arguments of `Run`, and how they are gathered from code and other sources."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, get_args

from attrs import define, field, fields, frozen

from stratagem.api.options import as_list, build, changes, convert_options, option_types, options_in
from stratagem.api.paths import is_remote
from stratagem.api.validators import at_least
from stratagem.discovery import catalog, registry
from stratagem.distributed.uncaught_errors import end_with_sentence
from stratagem.errors import ConfigError, nearest

if TYPE_CHECKING:
    from typing import TypeAlias

    T = TypeVar("T")
    #: A plugin: its name, a mapping with its ``name`` and options, or an instance.
    NameOr: TypeAlias = str | Mapping[str, Any] | T

S = TypeVar("S", bound="RunSettings")

#: Of the environment variables that are read.
PREFIX = "STRATAGEM_"


@define(eq=False, repr=False)
class Source:
    """Arguments and plugin options from one source."""

    #: "file run.yaml", "environment", "command line"
    origin: str
    #: Arguments by name.
    values: dict[str, Any] = field(factory=dict)
    #: Plugin options by kind and name.
    options: dict[str, dict[str, Any]] = field(factory=dict)
    #: Values are text, to be parsed by the type of the argument or option. What chooses plugins is parsed already.
    text: bool = False


@frozen(eq=False, repr=False)
class PluginOption:
    """An option of a plugin that is not built yet."""

    value: Any
    origin: str
    #: The value is text, to be parsed by the option's type.
    text: bool


@define(eq=False, repr=False, kw_only=True)
class RunSettings:
    """The plugins of a run, and where it runs. Each kind takes a name, a mapping with a ``name``, or an instance."""

    #: Whether a Trainer has these arguments, and so calls the hooks of events.
    for_trainer: ClassVar[bool] = False
    #: The type of device: "auto", a name, or an instance.
    accelerator: Any = "auto"
    #: The devices of this node: a count, -1 for all, a list of indices, or "auto".
    devices: Any = "auto"
    #: The number of machines; start the script on each of them.
    num_nodes: int = field(default=1, validator=at_least(1))
    #: How the model is distributed over processes; a list stacks outer strategies around the last one.
    strategy: Any = "auto"
    #: The dtypes of parameters, compute and gradient reduction.
    precision: Any = None
    #: How a process finds its rank; "auto" detects it.
    environment: Any = "auto"
    #: How the processes of this node are started.
    launcher: Any = None
    #: The format of checkpoints.
    checkpoint: Any = None
    #: More plugins, of any kind: names, mappings, instances, or objects with `@hookimpl` methods.
    plugins: Any = ()
    #: The folder of logs and checkpoints; the current directory by default.
    default_root_dir: Path = field(factory=Path.cwd)
    #: Give each process its own share of every loader.
    use_distributed_sampler: bool = True
    #: Compute the statistics of batch normalization over all processes; on every device and backend.
    sync_batchnorm: bool = False
    #: Recompute these modules in backward instead of keeping their activations: a set of classes (or of their names), a
    #: torch policy, or ``{"policy": ..., "mode": "full" | "selective" | "offload"}``. Saves memory and costs time;
    #: "offload" keeps activations on the CPU.
    activation_checkpointing: Any = None
    #: Compile with `torch.compile`: True, a mode such as "max-autotune", or a mapping of options of the callback
    #: `compile`, such as ``{"dynamic": True, "modules": {Block}}``. Starts later and trains faster.
    compile: Any = None
    #: A ``run.lock`` of an earlier run: plugins, versions, options and arguments must be the same.
    lock: Path | None = None
    #: Use deterministic kernels of torch, cuDNN and cuBLAS; slower, and an error for an operation that has none.
    deterministic: bool | Literal["warn"] = False
    #: Precision of fp32 matrix products: "high" (TF32 on GPUs that have it) and "medium" are faster and less exact than
    #: "highest". By default the setting of `torch.set_float32_matmul_precision` is not changed.
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None

    @property
    def writes_files(self) -> bool:
        """Whether this run may write files that no argument requests explicitly."""
        return True

    def add_to(self, stack: Any, chooser: Any) -> None:
        """Add the plugins that these arguments stand for beside those of the engine's kinds; called by the resolver.

        Args:
            stack: a `stratagem.stack.plugins.Stack`, with the callbacks for ``compile=`` and its like.
            chooser: the `stratagem.stack.resolver.Chooser` of the run.
        """
        stack.callbacks = [*chooser.many("callback", ()), *stack.callbacks]
        stack.loggers = chooser.many("logger", ())

    def listed(self) -> list[Any]:
        """Return what the user lists where callbacks may stand."""
        return as_list(self.plugins)

    def needs(self) -> dict[str, str]:
        """Return the capabilities that arguments need, each with the argument, for messages."""
        return {}

    @property
    def plugin_arguments(self) -> frozenset[str]:
        """The names of the arguments that choose plugins."""
        return frozenset((*registry.arguments(), "plugins"))

    #: What was chosen for kinds of plugins that other packages add, by argument; filled by `gather`.
    chosen: dict[str, Any] = field(factory=dict, init=False, repr=False)
    #: Where each value that is not a default came from; filled by `gather`.
    origins: dict[str, str] = field(factory=dict, init=False, repr=False)
    #: Plugin options by kind and name; filled by `gather`.
    options: dict[str, dict[str, PluginOption]] = field(factory=dict, init=False, repr=False)


def gather(cls: type[S], code: Mapping[str, Any], layers: Sequence[Source] = ()) -> S:
    """Return settings of class `cls` from `layers` and then `code`; later ones override earlier ones.

    None in `code` for an argument that is never None means its default.

    Raises:
        ConfigError: an unknown argument, or a value of the wrong type or range, with the origin of the value.
    """
    types = option_types(cls)
    kept = {each.name for each in fields(cls) if each.default is None or type(None) in get_args(types.get(each.name))}
    given = {name: value for name, value in code.items() if value is not None or name in {*kept, *added_arguments(cls)}}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    options: dict[str, dict[str, PluginOption]] = {}
    for layer in (*layers, Source("code", given)):
        for name, value in layer.values.items():
            converted = _convert(cls, name, value, layer)
            if name in registry.arguments():
                converted = _split_options(registry.arguments()[name], converted, values.get(name), layer, options)
            values[name], origins[name] = converted, layer.origin
        for kind, set_here in layer.options.items():
            for option, value in set_here.items():
                options.setdefault(kind, {})[option] = PluginOption(value, layer.origin, layer.text)
    for change in changes:
        changed = change(cls, values)
        for name in registry.arguments().keys() & changed.keys():
            options.pop(registry.arguments()[name], None)  # they belong to what is replaced
        values.update(changed)
    chosen = {name: values.pop(name) for name in added_arguments(cls) if name in values}
    settings = build(cls, {name: value for name, value in values.items() if name != "default_root_dir" or value}, "")
    for name in ("default_root_dir", "lock"):
        if is_remote(folder := getattr(settings, name, None) or Path()):
            raise ConfigError(
                f"{name} is {str(folder)!r} ({origins[name]})", expected="a path on this machine",
                do=f"pass the URL to the plugin that writes there, such as ModelCheckpoint(dirpath={str(folder)!r})",
            )  # fmt: skip
    folder = settings.default_root_dir
    root = next(each for each in (folder, *folder.parents) if os.path.exists(each))  # Path.exists may raise an error
    if not root.is_dir():
        raise ConfigError(
            f"default_root_dir is {str(folder)!r} ({origins.get('default_root_dir', 'default')}), and {root} is a file",
            expected="a folder, or a path where one can be made", do="name another folder",
        )  # fmt: skip
    settings.chosen, settings.origins, settings.options = chosen, origins, options
    return settings


def _convert(cls: type[Any], name: str, value: Any, layer: Source) -> Any:
    """Return `value` converted to the type of argument `name`."""
    known = option_names(cls)
    if name in added_arguments(cls):
        return value
    if name not in known:
        if name in catalog.providers("kind"):
            registry.find("kind", name)  # raises an error that says what to install
        if layer.origin == "code":
            return convert_options(cls, {name: value}, "")  # raises an error that lists the known names
        raise ConfigError(
            f"{layer.origin} sets {name!r}, which is not an argument", expected="an argument of the Trainer",
            do=catalog.moved_names("arguments").get(name) or nearest(name, known) or "see --help",
        )  # fmt: skip
    try:
        return convert_options(cls, {name: value}, "", [name] * layer.text)[name]
    except ConfigError as error:
        if layer.origin == "code":
            raise
        raise ConfigError(f"{error.found} ({layer.origin})", expected=error.expected, do=error.do) from None


def _split_options(
    kind: str, choice: Any, earlier: Any, layer: Source, options: dict[str, dict[str, PluginOption]]
) -> Any:
    """Move the options out of a mapping, so that a later source can set one of them; return the name."""
    is_mapping = isinstance(choice, Mapping) and isinstance(choice.get("name"), str)
    name = choice["name"] if is_mapping else choice
    if earlier is not None and not _same_name(name, earlier):
        options.pop(kind, None)  # they belong to another plugin
    if not is_mapping:
        return choice
    for option, value in options_in(choice).items():
        options.setdefault(kind, {})[option] = PluginOption(value, layer.origin, text=False)
    return name


def _same_name(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and one.lower() == other.lower()


def added_arguments(cls: type[RunSettings]) -> list[str]:
    """Return the arguments that choose plugins of kinds which other packages add."""
    known, kinds = option_types(cls), registry.kinds().values()
    return [kind.argument for kind in kinds if kind.argument not in known and kind.needs_trainer <= cls.for_trainer]


def option_names(cls: type[Any]) -> list[str]:
    """Return the arguments of `cls`, and those of kinds that other packages add."""
    return [*option_types(cls), *added_arguments(cls)]


# --- Constructors -----------------------------------------------------------------------------------------------------


C = TypeVar("C", bound=Callable[..., None])


def remember_arguments(settings: type[RunSettings]) -> Callable[[C], C]:
    """Let ``__init__`` tell an argument that was given from one that has its default value.

    While it runs, the arguments that were given are in ``self._given``. Besides its own arguments it takes ``sources``,
    which are in ``self._sources``, and the arguments of kinds that other packages add: editors do not show these.

    Args:
        settings: the class whose fields the arguments are.

    Raises:
        ConfigError: on a call, an argument that ``__init__`` does not have.
    """

    def decorate(init: C) -> C:
        known = [name for name in inspect.signature(init).parameters if name != "self"]
        owner = init.__qualname__.partition(".")[0]

        @functools.wraps(init)
        def wrapper(self: Any, *values: Any, sources: Sequence[Source] = (), **arguments: Any) -> None:
            end_with_sentence()
            others = {name: arguments.pop(name) for name in [*arguments] if name not in known}
            added = added_arguments(settings) if others else []
            for name in [name for name in others if name not in added]:
                instead = catalog.moved_names("arguments").get(name)
                if others.pop(name) is not None or not instead:  # None asks for nothing
                    raise ConfigError(
                        f"{owner} has no argument {name!r}", expected="one of its arguments",
                        do=instead or nearest(name, [*known, *added]) or f"see help(stratagem.{owner})",
                    )  # fmt: skip
            self._given, self._sources = arguments | others, sources
            init(self, *values, **arguments)
            del self._given, self._sources

        return cast(C, wrapper)

    return decorate


#: Words of command lines and of constructors that are not arguments.
_OTHER_WORDS = ("config", "help", "sources", "settings")
registry.reserve((*option_types(RunSettings), *_OTHER_WORDS), "stratagem-core")
