"""Compile a model with `torch.compile`: whole steps, or blocks one by one.

    Trainer(compile=True)
    Trainer(compile={"mode": "max-autotune", "modules": {Block}})

Compiled in place: modules, parameters and the names in a ``state_dict`` stay the same, with any strategy.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Generator, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from attrs import define, field, frozen
from torch import nn

from stratagem.api import COMPILATION, Capabilities, hookimpl
from stratagem.errors import ConfigError, nearest, shown
from stratagem_trainer.api import Callback
from stratagem_trainer.uncompiled import step_compiler
from stratagem_transforms.activation_checkpointing import RECOMPUTED, Selective
from stratagem_transforms.compilation_errors import explained
from stratagem_transforms.wrap_policy import check_policy, children_first, outermost, repeated, select

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem.stack.plugins import Stack

#: torch's names for sets of inductor's options.
MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")
#: Backends that need no search among installed ones, which imports torch's compiler.
_BACKENDS: Final = ("inductor", "aot_eager", "eager", "cudagraphs")
_PATH: Final = "compile"
#: The arguments of `torch.compile` for each module that this plugin compiled; not in the module, which may be pickled.
_COMPILED: Final[WeakKeyDictionary[nn.Module, dict[str, Any]]] = WeakKeyDictionary()


@define(eq=False, kw_only=True)
class Compile(Callback):
    """Compiles the model with torch.compile, which starts later and trains faster.

    A strategy that gathers the model unit by unit has each unit compiled; elsewhere whole steps are.
    """

    #: A set of inductor's options: "reduce-overhead" uses CUDA graphs, "max-autotune" tries kernels for minutes.
    mode: str | None = None
    #: True compiles for sizes that vary, False for each size that occurs; by default sizes that were seen to vary.
    dynamic: bool | None = None
    #: Refuse code that cannot be compiled as one graph, instead of running parts of it uncompiled.
    fullgraph: bool = False
    #: What compiles a graph: a name such as "aot_eager" (no compilation, to look for errors), or a callable.
    backend: Any = "inductor"
    #: Options of the backend; for inductor those of `torch._inductor.list_options()`. Not together with `mode`.
    options: dict[str, Any] | None = None
    #: Compile nothing: to compare without removing the other options.
    disable: bool = False
    #: True compiles blocks one by one, which starts sooner: units of the strategy, else layers of one class in a
    #: ModuleList or Sequential. False compiles whole steps.
    per_block: bool | None = None
    #: Which modules to compile one by one: classes, names of classes, patterns of names such as "model.layers.*", a
    #: torch policy or a callable.
    modules: Any = None

    #: The backend as the strategy wraps it.
    _wrapped_backend: Any = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        _check(self)

    @staticmethod
    def from_argument(value: Any, _: Stack) -> dict[str, Any] | None:
        """Return the options for ``compile=value``; None to compile nothing.

        Raises:
            ConfigError: it is neither a switch, a mode nor a mapping of options.
        """
        switches = {"true": True, "false": False, "none": None}
        if isinstance(value, str) and value.strip().startswith("{"):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if isinstance(value, str):
            value = switches.get(value.strip().lower(), value)  # from a command line or the environment
        if value is None or value is False:
            return None
        if value is True:
            return {}
        if isinstance(value, str):
            return {"mode": value}
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return dict(value)
        raise ConfigError(
            f"compile is {shown(value)}", expected="true or false, a mode, or a mapping of options",
            do='write compile=True, compile="max-autotune" or compile={"dynamic": True}',
        )  # fmt: skip

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # an option decides
        return Capabilities(provides=() if self.disable else {COMPILATION})

    @hookimpl
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        if not self.disable:
            _check_tools(self, run)
            _check_graphs(self, module, run)
            self._wrapped_backend = run.ask("wrap_backend", backend=self._chosen_backend)
        parts = [] if self.disable else self._parts(module, run)
        for part in module.modules():
            if part in _COMPILED and part not in parts:  # compiled by an earlier run, which chose other parts
                del _COMPILED[part]
                part._compiled_call_impl = None
        for part in parts:
            self._compile(part, module)

    @hookimpl(wrapper=True)
    def wrap_model(self, module: Any, run: RunContext) -> Generator[None, nn.Module, nn.Module]:
        if not self.disable:
            _check_recomputed(module)
        steps = not self.disable and not self._parts(module.module, run)
        if steps:
            if module.compiles_steps:
                raise _compiled_twice(module.module)
            module.compile_steps(step_compiler(self.compiler()))
        model = yield
        parts: Iterable[Any] = model.modules()
        for part in parts:  # an earlier call's, where a sharded model is wrapped once
            if steps and part is not module and hasattr(part, "compile_steps"):
                part.compile_steps(step_compiler(self.compiler()))
        return model

    @hookimpl(wrapper=True)
    def explain_error(self) -> Generator[None, BaseException, BaseException]:
        error = yield
        return error if self.disable else explained(error, self.backend, fullgraph=self.fullgraph)

    def compiler(self, count: int = 1) -> Any:
        """Return a function that compiles a function; `count` is how many modules may share its code."""
        return torch.compile(**self._arguments(count))

    @property
    def _chosen_backend(self) -> _Backend:
        return _Backend(self.backend, self.mode, self.options, self.dynamic)

    def _arguments(self, count: int) -> dict[str, Any]:
        arguments = {"fullgraph": self.fullgraph, "dynamic": self.dynamic}
        own = self._chosen_backend
        is_chosen = self._wrapped_backend in (None, own)
        arguments |= own.arguments() if is_chosen else {"backend": self._wrapped_backend}
        # Layers that keep their number in an attribute each have code of their own: torch gives up after eight.
        limited = "recompile_limit" in inspect.signature(torch.compile).parameters
        return arguments | ({"recompile_limit": 8 + count} if limited and count > 1 else {})

    def _parts(self, module: nn.Module, run: RunContext) -> list[nn.Module]:
        """Return the modules to compile one by one; none if steps are compiled."""
        if self.modules is not None:
            return chosen(module, self.modules)
        units = [unit for unit in run.ask("units", module=module) if any(True for _ in unit.parameters())]
        if self.per_block is False and units:
            raise ConfigError(
                f"{_PATH}.per_block is False, and the strategy gathers or calls {len(units)} units one by one, in "
                "hooks that torch cannot compile",
                expected="units that are compiled one by one", do="drop per_block",
            )  # fmt: skip
        if self.per_block is False:
            return []
        if units:
            return _compilable(units)
        if not self.per_block:
            return []
        blocks = repeated(module)
        if not blocks:
            raise ConfigError(
                f"{_PATH}.per_block is True, and {type(module).__name__} has no ModuleList or Sequential with several "
                "layers of one class", expected="blocks", do=f'name them, as in {_PATH}={{"modules": {{Block}}}}',
            )  # fmt: skip
        return blocks

    def _compile(self, part: nn.Module, module: nn.Module) -> None:
        arguments = self._arguments(len(list(module.modules())))
        earlier = _COMPILED.get(part)
        if earlier == arguments and part._compiled_call_impl is not None:
            return
        if part._compiled_call_impl is not None and earlier is None:
            raise _compiled_twice(part)
        if _is_torchs(part):  # torch.compile skips torch's own files, unless they are called from another one
            part._compiled_call_impl = torch.compile(
                lambda *values, **named: part._call_impl(*values, **named), **arguments
            )
        else:
            part.compile(**arguments)
        _COMPILED[part] = arguments


@frozen
class _Backend:
    """The backend that was chosen, as a function of a graph and example inputs."""

    backend: Any
    mode: str | None
    options: dict[str, Any] | None
    dynamic: bool | None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``torch.compile`` that choose it."""
        given = {"backend": self.backend, "mode": self.mode, "options": self.options}
        return {name: value for name, value in given.items() if value}

    def __call__(self, graph: Any, inputs: Any) -> Any:
        if self.backend == "inductor":
            import torch._inductor as inductor

            of_mode = inductor.list_mode_options(self.mode, self.dynamic) if self.mode else {}
            return inductor.compile(graph, inputs, options=of_mode | (self.options or {}))
        from torch._dynamo import lookup_backend

        options = {name: value for name, value in self.arguments().items() if name != "backend"}
        return lookup_backend(self.backend)(graph, inputs, **options)


def chosen(module: nn.Module, wanted: Any) -> list[nn.Module]:
    """Return the parts of `module` that `wanted` selects, none of them inside another.

    Raises:
        ConfigError: it selects none, or names a class or a pattern that nothing matches.
    """
    option = f"{_PATH}.modules"
    if not _lists(wanted):
        return outermost(module, select(module, wanted, option))
    found: set[nn.Module] = set()
    names = {name: part for name, part in module.named_modules() if name}
    classes = {cls.__name__ for part in names.values() for cls in type(part).__mro__}
    for each in [wanted] if isinstance(wanted, str | type) else wanted:
        if isinstance(each, type) or each in classes:
            found.update(select(module, {each}, option))
            continue
        matched = [part for name, part in names.items() if _matches(name, each)]
        if not matched:
            own = sorted({type(part).__name__ for part in names.values()})
            raise ConfigError(
                f"{option} names {each!r}, and {type(module).__name__} has no such class or part",
                expected=f"a class of its parts ({', '.join(own)}), or a pattern of their names",
                do=nearest(each, [*own, *names]),
            )
        found.update(matched)
    return outermost(module, children_first(module, found))


def _compilable(units: list[nn.Module]) -> list[nn.Module]:
    """Return the units to compile: those without units inside them, whose hooks torch cannot compile.

    Raises:
        ConfigError: all of these are torch's own layers, which it does not compile together with their hooks.
    """
    every = {id(unit) for unit in units}
    inner = [unit for unit in units if not any(id(part) in every for part in unit.modules() if part is not unit)]
    found = [unit for unit in inner if not _is_torchs(unit)]
    if not found:
        names = sorted({type(unit).__name__ for unit in inner})
        raise ConfigError(
            f"{_PATH} is set, and the innermost units of the strategy are layers of torch ({', '.join(names)}), which "
            "gain nothing",
            expected="units of classes of the model, such as its blocks",
            do="name only blocks in the strategy's policy",
        )
    return found


def _is_torchs(part: nn.Module) -> bool:
    return str(getattr(type(part).forward, "__module__", "")).startswith("torch.")


def _check_recomputed(module: nn.Module) -> None:
    selective = [part for part in module.modules() if part.__dict__.get(RECOMPUTED) == "selective"]
    if not all(isinstance(part.forward, Selective) for part in selective):
        raise ConfigError(
            f"{_PATH} is set, and a run without it has set activation_checkpointing.mode 'selective', in hooks that "
            "torch fails to compile",
            expected="one of the two for a model", do="build the model again",
        )  # fmt: skip


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _lists(wanted: Any) -> bool:
    return isinstance(wanted, str | type | set | frozenset | list | tuple)


def _compiled_twice(part: nn.Module) -> ConfigError:
    return ConfigError(
        f"{_PATH} is set, and {type(part).__name__} is compiled already", expected="one of the two",
        do=f"drop torch.compile, or leave {_PATH} out",
    )  # fmt: skip


# --- Checks before any process starts ----------------------------------------------------------------------------


def _check(options: Compile) -> None:
    """Refuse options that torch would refuse at the first step."""
    if options.mode is not None and options.mode not in MODES:
        raise ConfigError(
            f"{_PATH}.mode is {options.mode!r}", expected=" or ".join(map(repr, MODES)), do=nearest(options.mode, MODES)
        )
    if options.mode is not None and options.options is not None:
        raise ConfigError(
            f"{_PATH}.mode and {_PATH}.options are both set", expected="one of the two: a mode is a set of options",
            do="drop mode, and write its options out: torch._inductor.list_mode_options(mode)",
        )  # fmt: skip
    _check_backend(options)
    if options.options is not None and options.backend == "inductor":
        _check_options(options.options)
    if options.modules is None:
        return
    if options.per_block is not None:
        raise ConfigError(
            f"{_PATH}.modules and {_PATH}.per_block are both set", expected="one of the two", do="drop per_block"
        )
    _check_modules(options.modules)


def _check_modules(wanted: Any) -> None:
    if not _lists(wanted):
        check_policy(wanted, f"{_PATH}.modules")
        return
    parts = [wanted] if isinstance(wanted, str | type) else list(wanted)
    if not parts or not all(
        isinstance(each, type) or (isinstance(each, str) and each and each.isprintable()) for each in parts
    ):
        raise ConfigError(
            f"{_PATH}.modules is {shown(wanted)}", expected="classes, names of classes, or patterns of names of parts"
        )


def _check_backend(options: Compile) -> None:
    backend = options.backend
    if not isinstance(backend, str):
        if not callable(backend):
            raise ConfigError(f"{_PATH}.backend is {shown(backend)}", expected="a name or a callable")
        return
    if backend not in _BACKENDS:
        from torch._dynamo import list_backends

        known = list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(
                f"{_PATH}.backend is {backend!r}", expected=f"one of {', '.join(list_backends())}, or a callable",
                do=nearest(backend, known),
            )  # fmt: skip
    for name in ("mode", "options"):
        if backend != "inductor" and getattr(options, name) is not None and backend in _BACKENDS:
            raise ConfigError(
                f"{_PATH}.{name} is {shown(getattr(options, name))} and {_PATH}.backend is {backend!r}",
                expected=f"no {name}, which only inductor has", do=f"drop {name}, or the backend",
            )  # fmt: skip


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        try:
            torch.compile(lambda: None, options={name: value})
        except RuntimeError as error:
            from torch._inductor import config, list_options

            known, default = list_options(), getattr(config, name.replace("-", "_"), None)
            is_known = name.replace("-", "_") in known
            raise ConfigError(
                f"{_PATH}.options.{name} is {shown(value)}",
                expected=f"a value such as inductor's own, {default!r}" if is_known else "an option of inductor's",
                do="" if is_known else nearest(name, known) or "see torch._inductor.list_options()",
            ) from error


def _check_tools(options: Compile, run: RunContext) -> None:
    """Refuse a machine that lacks what inductor writes code for, or CUDA graphs, on all ranks. Collective."""
    problem = None
    uses_graphs = [("mode", "reduce-overhead"), ("backend", "cudagraphs")]
    useless = [(name, value) for name, value in uses_graphs if getattr(options, name) == value]
    if useless and run.device.type == "cpu":
        name, value = useless[0]
        problem = ConfigError(
            f"{_PATH}.{name} is {value!r}, which is for CUDA graphs, and the device is cpu",
            expected=f"another {name}", do=f"drop {name}, or train on a GPU",
        )  # fmt: skip
    elif options.backend == "inductor":
        problem = _missing_cpp() if run.device.type == "cpu" else _missing_triton(run)
    run.collectives.fail_together(problem)


def _check_graphs(options: Compile, module: nn.Module, run: RunContext) -> None:
    """Refuse CUDA graphs, which read parameters where they first were, of units that are gathered into new memory."""
    name, value = ("mode", options.mode) if options.mode is not None else ("backend", options.backend)
    is_graph = value in ("reduce-overhead", "max-autotune", "cudagraphs")
    if (options.options or {}).get("triton.cudagraphs"):
        name, value, is_graph = "options", options.options, True
    if is_graph and run.device.type == "cuda" and run.shards_parameters and run.ask("units", module=module):
        raise ConfigError(
            f"{_PATH}.{name} is {value!r}, which records CUDA graphs, and the strategy gathers parameters into other "
            "memory in each step",
            expected="a mode without graphs", do=f'use {_PATH}="max-autotune-no-cudagraphs", or {_PATH}=True',
        )  # fmt: skip


def _missing_cpp() -> ConfigError | None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return ConfigError(
            f"{_PATH} is set, and this machine has no C++ compiler, which torch's inductor runs on a CPU",
            expected="g++ or clang++", do='install one, set CXX to its path, or drop compile',
        )  # fmt: skip
    return None


def _missing_triton(run: RunContext) -> ConfigError | None:
    from torch.utils._triton import has_triton

    if run.device.type != "cuda" or has_triton():
        return None
    return ConfigError(
        f"{_PATH} is set, and triton, which torch's inductor runs on {run.device}, is not installed or cannot use it",
        expected="triton, and a GPU of compute capability 7.0 or more", do="install it, or drop compile",
    )  # fmt: skip
