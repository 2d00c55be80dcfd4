"""Cut a model that is not an nn.Sequential at the names of modules, by tracing the modules around them.

[Note: what is traced]
torch's tracer runs the forward of the modules that contain split points, with symbols for tensors. The modules at the
split points, and all others in between, are called as they are: they may do anything. What a stage computes that later
stages need, besides what the split point is called with, passes through the stages between: skip connections are right.

Operations are recorded and nothing else: what the traced code does besides would be lost. So code that differs between
training and evaluation, computes within ``torch.no_grad()`` or autocast, makes tensors without looking at its inputs,
or sets attributes, is refused. A number that it reads from an attribute keeps the value of the first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from stratagem.errors import ConfigError, nearest
from stratagem_parallel.pipeline.stages import Cut, Stage

#: Functions that make tensors from numbers: called with symbols, torch does not ask the tracer.
_FACTORIES = ("arange", "zeros", "ones", "full", "empty", "rand", "randn", "eye", "linspace", "tril_indices",
              "triu_indices")  # fmt: skip


def cut_at(user: nn.Module, split_points: list[str]) -> Cut:
    """Cut `user` before each of the modules `split_points`.

    Raises:
        ConfigError: a name that is wrong, a module that is not called once, or code that cannot be traced.
    """
    _check_names(user, split_points)
    where = _container(user, split_points)
    graph, defaults = _trace(user, where, split_points)
    stage_of = _stages(graph, where, split_points)
    last = len(split_points)
    steps: list[list[fx.Node]] = [[] for _ in range(last + 1)]
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            steps[stage_of[node]].append(node)
    carried = [_carried(graph, stage_of, stage) for stage in range(last)]
    (output,) = (node for node in graph.nodes if node.op == "output")
    stages = []
    for index, nodes in enumerate(steps):
        results = output.args[0] if index == last else {node.name: node for node in carried[index]}
        used = [*nodes, *([output] if index == last else [])]
        stages.append(
            Stage(
                modules=tuple(dict.fromkeys(_joined(where, str(n.target)) for n in nodes if n.op == "call_module")),
                tensors=tuple(
                    dict.fromkeys(_joined(where, str(a.target)) for n in used for a in n.all_input_nodes
                                  if a.op == "get_attr")
                ),
                compute=_Traced(user, where, nodes, results),
            )
        )  # fmt: skip
    return Cut(where, tuple(stages), _Binding(user.get_submodule(where), defaults, graph), passes_numbers=True)


def _check_names(user: nn.Module, split_points: list[str]) -> None:
    known = [name for name, _ in user.named_modules() if name]
    for name in split_points:
        if name not in known:
            raise ConfigError(
                f"strategy.parallel.split_points names {name!r}, which {type(user).__name__} does not have",
                expected="names of its modules", do=nearest(name, known),
            )  # fmt: skip
    if len(set(split_points)) < len(split_points):
        raise ConfigError(f"strategy.parallel.split_points is {split_points}", expected="each name once")


def _container(user: nn.Module, split_points: list[str]) -> str:
    """Return the name of the innermost module with a forward that contains all `split_points`."""
    paths = [name.split(".")[:-1] for name in split_points]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    while common and isinstance(user.get_submodule(".".join(common)), nn.ModuleList | nn.ModuleDict):
        common.pop()
    return ".".join(common)


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _within(where: str, name: str) -> str:
    return name[len(where) + 1 :] if where else name


# --- Tracing -----------------------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    """Traces a module and what contains split points; arguments with defaults have these as values."""

    def __init__(self, inside: set[str]) -> None:
        super().__init__()
        self.inside = inside
        self.defaults: dict[str, Any] = {}
        self._modes = _modes()

    def create_node(self, kind: str, target: Any, *arguments: Any, **options: Any) -> fx.Node:
        if _modes() != self._modes:
            raise _NotRecorded("it computes within torch.no_grad() or autocast")
        return super().create_node(kind, target, *arguments, **options)

    def create_arg(self, a: Any) -> Any:
        if _has_fields(type(a)):  # torch's tracer would make a dictionary of it
            _register(type(a))
            fields = {name: self.create_arg(value) for name, value in _fields(a).items()}
            return self.create_node("call_function", type(a), (), fields)
        made = super().create_arg(a)
        if isinstance(made, fx.Node) and made.op == "get_attr" and str(made.target).startswith("_tensor_constant"):
            raise _NotRecorded("it makes a tensor that does not depend on its inputs")
        return made

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.inside

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        arguments: list[Any] = [self.root]
        for each in parameters:
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                continue
            if each.default is each.empty:
                arguments.append(self.create_proxy("placeholder", each.name, (), {}))
            else:
                self.defaults[each.name] = each.default
                arguments.append(each.default)
        return root_fn, arguments


def _trace(user: nn.Module, where: str, split_points: list[str]) -> tuple[fx.Graph, dict[str, Any]]:
    root = user.get_submodule(where)
    parts = [_within(where, name).split(".")[:-1] for name in split_points]
    inside = {".".join(path[:count]) for path in parts for count in range(1, len(path) + 1)}
    tracer = _Tracer(inside)
    traced = [root, *(root.get_submodule(name) for name in inside)]
    was_training = {part: part.training for part in root.modules()}
    before = [_attributes(part) for part in traced]
    try:
        with _symbolic_factories(tracer):
            graph = tracer.trace(root)
            if [_attributes(part) for part in traced] != before:
                raise _NotRecorded("it sets an attribute or a buffer")
            root.train(not root.training)
            other = _Tracer(inside).trace(root)
        if str(other) != str(graph):
            raise _NotRecorded("it differs between training and evaluation")
    except Exception as error:
        why = (
            error.why if isinstance(error, _NotRecorded) else "a forward that does not branch on data, nor loop over it"
        )
        raise ConfigError(
            f"{type(root).__name__}.forward cannot be traced for strategy.parallel.split_points: "
            f"{' '.join(str(error).split())}",
            expected=why,
            do="move that code into a submodule, which is not traced, or build the model as sequential_module",
        ) from error
    finally:
        for part, training in was_training.items():
            part.training = training
    return graph, tracer.defaults


def _has_fields(kind: type) -> bool:
    """Return whether values of `kind` are made of named values: dataclasses, and dictionaries of users' classes."""
    is_own = issubclass(kind, dict) and kind is not dict and not kind.__module__.startswith("torch.")
    return is_own or dataclasses.is_dataclass(kind)


def _fields(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else vars(value)


def _register(kind: type) -> None:
    """Tell torch how values of `kind` are taken apart and put together, as the messages between stages need it."""
    if kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            kind, lambda value: (list(_fields(value).values()), list(_fields(value))),
            lambda values, names: kind(**dict(zip(names, values, strict=True))),
        )  # fmt: skip


class _NotRecorded(Exception):
    """The traced code does what a graph of operations does not hold."""

    why = "operations on its inputs and parameters alone: the tracer records nothing else"


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _attributes(part: nn.Module) -> tuple[Any, ...]:
    """Return what changes if `part` sets an attribute, or a buffer in place."""
    own = {name: id(value) for name, value in vars(part).items() if not name.startswith("_")}
    return own, [(name, id(value), value._version) for name, value in part._buffers.items() if value is not None]


@contextlib.contextmanager
def _symbolic_factories(tracer: fx.Tracer) -> Iterator[None]:
    """Record, within, calls like ``torch.arange(x.shape[1])`` whose arguments are symbols."""
    originals = {name: getattr(torch, name) for name in _FACTORIES}

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            symbols: list[Any] = []
            fx.node.map_aggregate((arguments, options), lambda each: symbols.append(each))
            if any(isinstance(each, fx.Proxy) for each in symbols):
                return tracer.create_proxy("call_function", original, arguments, options)
            return original(*arguments, **options)

        return call

    for name, original in originals.items():
        setattr(torch, name, recording(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


# --- Stages of a graph -------------------------------------------------------------------------------------------


def _stages(graph: fx.Graph, where: str, split_points: list[str]) -> dict[fx.Node, int]:
    """Return the stage of each computation: it rises at each split point."""
    points = {_within(where, name): name for name in split_points}
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    for target, name in points.items():
        if calls.count(target) != 1:
            raise ConfigError(
                f"strategy.parallel.split_points names {name!r}, which forward calls {calls.count(target)} times",
                expected="a module that is called once",
            )
    order = [points[target] for target in calls if target in points]
    if order != split_points:
        raise ConfigError(
            f"strategy.parallel.split_points is {split_points}", expected=f"the order in which they are called, {order}"
        )
    found: dict[fx.Node, int] = {}
    stage = 0
    for node in graph.nodes:
        if node.op == "call_module" and str(node.target) in points:
            stage += 1
        found[node] = 0 if node.op == "placeholder" else stage
    return found


def _carried(graph: fx.Graph, stage_of: dict[fx.Node, int], stage: int) -> list[fx.Node]:
    """Return what passes from `stage` to the next: computed up to it, and used later."""
    return [
        node
        for node in graph.nodes
        if node.op not in ("get_attr", "output")
        and stage_of[node] <= stage
        and any(stage_of[user] > stage or (user.op == "output" and stage < max(stage_of.values()))
                for user in node.users)
    ]  # fmt: skip


class _Traced:
    """Computes the nodes of one stage, with the modules that the user's module has when it is called."""

    def __init__(self, user: nn.Module, where: str, nodes: list[fx.Node], results: Any) -> None:
        self.user, self.where = user, where
        self.nodes: list[tuple[str, str, Any, Any, Any]] = [
            (node.name, node.op, node.target, _names(node.args), _names(node.kwargs)) for node in nodes
        ]
        self.results = _names(results)

    def __call__(self, values: dict[str, Any]) -> Any:
        root = self.user.get_submodule(self.where)
        known = dict(values)
        for name, op, target, arguments, options in self.nodes:
            given, named = _filled(arguments, known, root), _filled(options, known, root)
            if op == "call_module":
                known[name] = root.get_submodule(target)(*given, **named)
            elif op == "call_method":
                known[name] = getattr(given[0], target)(*given[1:], **named)
            else:
                known[name] = target(*given, **named)
        results: Any = _filled(self.results, known, root)
        if type(results) is dict:  # what only passes through needs a gradient of its own
            return {key: _passed(value, values.get(key)) for key, value in results.items()}
        return results


def _passed(value: Any, before: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.Tensor) and value is before else value


class _Name:
    """Stands for the value of a node."""

    def __init__(self, node: fx.Node) -> None:
        self.name, self.attribute = node.name, str(node.target) if node.op == "get_attr" else ""


def _names(arguments: Any) -> Any:
    replace: Any = lambda each: _Name(each) if isinstance(each, fx.Node) else each  # noqa: E731 - typed
    return fx.node.map_aggregate(arguments, replace)


def _filled(arguments: Any, known: dict[str, Any], root: nn.Module) -> Any:
    def fill(each: Any) -> Any:
        if not isinstance(each, _Name):
            return each
        if not each.attribute:
            return known[each.name]
        module, _, name = each.attribute.rpartition(".")
        return getattr(root.get_submodule(module), name)

    filled = fx.node.map_aggregate(arguments, fill)
    if isinstance(arguments, _Name) or hasattr(filled, "_fields"):
        return filled
    if isinstance(filled, dict):
        return dict(filled)
    return tuple(filled) if isinstance(filled, tuple) else list(filled) if isinstance(filled, list) else filled


class _Binding:
    """Makes the input of the first stage of the arguments with which the traced module is called."""

    def __init__(self, root: nn.Module, defaults: dict[str, Any], graph: fx.Graph) -> None:
        self.signature, self.name = inspect.signature(type(root).forward), type(root).__name__
        self.defaults = defaults
        #: By parameter: the node's name, which is another one for a name of Python's own, such as `input`.
        self.nodes = {str(node.target): node.name for node in graph.nodes if node.op == "placeholder"}

    def __call__(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        bound = self.signature.bind(None, *arguments, **options)
        values = dict(list(bound.arguments.items())[1:])
        for name, default in self.defaults.items():
            given = values.pop(name, default)
            if given is not default and (isinstance(given, torch.Tensor) or given != default):
                raise ConfigError(
                    f"{self.name} was called with {name}, and was traced for strategy.parallel.split_points with its "
                    f"default, {default!r}",
                    expected="the default of each argument that has one",
                    do=f"leave out {name}, or give the parameter no default in forward",
                )
        return {self.nodes.get(name, name): value for name, value in values.items()}
