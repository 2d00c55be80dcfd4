"""Cut a model into stages: each runs the model's own forward, with ghosts for absent parts.

[Note: ghosts]
The *parts* of a model are the modules that are called around its split points: layers, embeddings, a head. Each belongs
to a stage. All stages call the forward of the whole model with the user's arguments, which every rank has. A part of
another stage is a ghost then: its call computes nothing and returns tensors of the right shapes. What a stage needs of
ghosts is sent to it, and the rest of what they return is never looked at. A stage ends when it has called its last
part. So control flow, options, masks, positions and classes of outputs stay those of the model, and what is computed
around the parts is computed by each stage again.

[Note: what a stage needs]
For each form of call, the parts are called once on their ranks without gradients, and all ranks get what they return.
With these values each rank runs the forward once more, and follows through all operations which tensors depend on which
part's output: also those without gradients, such as masks, numbers that Python reads, and writes into tensors.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn, overrides
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stratagem.api.seeding import random_state
from stratagem.errors import ConfigError, nearest
from stratagem_parallel.parts import are_equal
from stratagem_parallel.pipeline.boundaries import (
    Form,
    TensorForm,
    assembled,
    form_of,
    register,
    tensors_in,
    tensors_within,
)
from stratagem_parallel.pipeline.random_numbers import AROUND, generators_of
from stratagem_parallel.pipeline.targets import Losses

#: A call of a part: its name, and how often it was called before.
_Call = tuple[str, int]
#: A tensor in what a part returns: the call, and its number there.
_Key = tuple[str, int, int]
#: Takes the place of a part's call: it gets the part, the call, the part itself and the arguments.
_Answer = Callable[["Part", _Call, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
#: What is in them is a part each.
_LISTS = nn.Sequential | nn.ModuleList | nn.ModuleDict
#: A part outside of lists with this share of the parameters at most is called by each stage that needs it.
_SMALL = 0.01


@frozen(eq=False)
class Given:
    """What a stage computes with: the call of the model, and tensors of stages before."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    tensors: dict[_Key, Tensor] = field(factory=dict)


@frozen(eq=False)
class Part:
    """A module that belongs to one stage, or to each in which it has a name."""

    name: str
    stages: frozenset[int]
    #: The module that has it, and its key there: a wrapper may replace it.
    parent: nn.Module
    key: str

    @property
    def module(self) -> Any:
        return self.parent._modules[self.key]


@define(eq=False)
class Record:
    """What a call of the model does; the calls of parts are in their order."""

    device: torch.device
    #: The form of what each call of a part returns, and that of the model's output.
    forms: dict[_Call, Form] = field(factory=dict)
    output: Form | None = None
    #: Parts that draw random numbers.
    draws: set[str] = field(factory=set)
    #: Which tensors of parts the arguments of each call of a part depend on, and the model's output.
    depends: dict[_Call, set[_Key]] = field(factory=dict)
    of_output: set[_Key] = field(factory=set)
    #: Tensors of parts into which other parts, or the code around them, write.
    written: set[_Key] = field(factory=set)
    #: By stage: the calls of its parts with which it ends, and what passes to the next stage.
    calls: list[list[_Call]] = field(factory=list)
    carried: list[list[_Key]] = field(factory=list)


class _Done(BaseException):
    """The stage has called its last part; no `except Exception` of a model may catch it."""


class _Waits(BaseException):
    """A part of the stage in `args` was called whose output is not known yet."""


@frozen
class Stage:
    """What a stage computes with, by name."""

    #: Modules, whose parameters and buffers belong to the stage with all that is in them.
    modules: tuple[str, ...]
    #: Parameters and buffers without a module around them.
    tensors: tuple[str, ...]


def called_module(user: nn.Module, split_points: list[str]) -> str:
    """Return the name of the outermost module in `user` that has a forward and contains all `split_points`.

    Raises:
        ConfigError: a name is wrong.
    """
    known = [name for name, _ in user.named_modules(remove_duplicate=False) if name]
    for name in split_points:
        if name not in known:
            raise ConfigError(
                f"strategy.parallel.split_points names {name!r}, which {type(user).__name__} does not have",
                expected="names of its modules", do=nearest(name, known),
            )  # fmt: skip
    common = os.path.commonprefix([name.split(".")[:-1] for name in split_points])  # noqa: RUF071 - of lists
    names = [".".join(common[: count + 1]) for count in range(len(common))]
    modules = {name: user.get_submodule(name) for name in names}
    called = (name for name in names if not isinstance(modules[name], _LISTS) or "forward" in vars(type(modules[name])))
    return next(called, "")


class Cut:
    """The model `where` of `user`, cut before each of the modules `split_points`. See [Note: ghosts].

    Raises:
        ConfigError: the order of names is not that in which the modules are defined.
    """

    def __init__(self, user: nn.Module, where: str, split_points: list[str]) -> None:
        self.user, self.where, self.count = user, where, len(split_points) + 1
        self._name = where or type(user).__name__
        self._is_sequence = type(user.get_submodule(where)).forward is nn.Sequential.forward
        #: The model's own forward, whatever takes its place later.
        self.forward: Callable[..., Any] = user.get_submodule(where).forward
        #: By what `_outline` returns.
        self.records: dict[Any, Record] = {}
        self._tensors: list[str] = []
        seen: list[str] = []
        found = list(self._found(where, split_points, seen))
        if seen != split_points:
            raise ConfigError(
                f"strategy.parallel.split_points is {split_points}", expected="the order in which "
                f"{type(user).__name__} defines them, {seen}",
            )  # fmt: skip
        most = _SMALL * sum(each.numel() for each in user.get_submodule(where).parameters())
        stages: dict[Any, set[int]] = {}
        for _, stage, parent, key in found:
            part, in_list = parent._modules[key], isinstance(parent, _LISTS)
            is_small = not in_list and sum(each.numel() for each in part.parameters()) <= most  # type: ignore[union-attr,misc]
            stages.setdefault(part, set()).update(range(self.count) if is_small else [stage])
        parts = [Part(name, frozenset(stages[parent._modules[key]]), parent, key) for name, _, parent, key in found]
        #: By the first name of each.
        self.parts = {part.name: part for part in {id(part.module): part for part in reversed(parts)}.values()}
        self.stages = [
            Stage(tuple(part.name for part in parts if number in part.stages), tuple(self._tensors))
            for number in range(self.count)
        ]

    def _found(self, name: str, points: list[str], seen: list[str]) -> Iterator[tuple[str, int, nn.Module, str]]:
        """Yield the parts in the module `name`, with their stages; note the tensors that it holds itself."""
        module = self.user.get_submodule(name)
        own = (*module._parameters.items(), *module._buffers.items())
        self._tensors += [_joined(name, key) for key, value in own if value is not None]
        for key, child in module._modules.items():
            inner = _joined(name, key)
            seen += [inner] if inner in points else []
            if child is None:
                continue
            if type(child).forward is nn.Module.forward or any(point.startswith(f"{inner}.") for point in points):
                yield from self._found(inner, points, seen)
            elif isinstance(module, _LISTS) or _has_state(child):
                yield inner, len(seen), module, key

    def _run(self, given: Given, answer: _Answer) -> Any:
        """Return what the model returns if a call of a part returns what `answer` does."""
        counts: dict[str, int] = {}
        within: list[str] = []

        def replaced(part: Part, compiled: Callable[..., Any] | None) -> Callable[..., Any]:
            itself = compiled or part.module._call_impl

            def computed(*arguments: Any, **options: Any) -> Any:
                within.append(part.name)
                # Torch would compile what the mode does with losses, too.
                hides = compiled is not None and isinstance(overrides._get_current_function_mode(), Losses)
                try:
                    with overrides._pop_mode_temporarily() if hides else contextlib.nullcontext():
                        return itself(*arguments, **options)
                finally:
                    within.pop()

            def call(*arguments: Any, **options: Any) -> Any:
                if within:  # another part has it, too
                    return itself(*arguments, **options)
                number = counts[part.name] = counts.get(part.name, -1) + 1
                return answer(part, (part.name, number), computed, arguments, options)

            return call

        modules = [(part, vars(part.module)) for part in self.parts.values()]
        before = [attributes.get(_CALL) for _, attributes in modules]
        try:
            for (part, attributes), compiled in zip(modules, before, strict=True):
                attributes[_CALL] = replaced(part, compiled)
            return self.forward(*given.arguments, **given.options)
        finally:
            for (_, attributes), compiled in zip(modules, before, strict=True):
                attributes.pop(_CALL, None)
                if compiled is not None:
                    attributes[_CALL] = compiled

    # --- A step --------------------------------------------------------------------------------------------------

    def compute(self, stage: int, given: Given) -> Any:
        """Return the output of the last stage, or what passes from `stage` to the next."""
        record, ratio = self._record(given)
        is_last = stage == self.count - 1
        wanted, own = record.carried[stage] if not is_last else [], record.calls[stage]
        outputs: dict[_Key, Tensor] = {}

        def answer(part: Part, call: _Call, itself: Any, arguments: Any, options: Any) -> Any:
            if stage not in part.stages:
                return self._ghost(record, call, given, ratio)
            with self._drawing(record, call):
                output = itself(*arguments, **options)
            for number, leaf in enumerate(pytree.tree_leaves(output) if wanted else ()):
                if (key := (*call, number)) in wanted:
                    outputs[key] = leaf.clone() if key in record.written else leaf
            if not is_last and call == own[-1]:
                raise _Done
            return output

        if is_last:
            return self._run(given, answer)
        if own:
            with contextlib.suppress(_Done):
                self._run(given, answer)
                raise self._called_otherwise(own[-1])
        # What passes through gets a gradient apart from that of its use here.
        return {
            key: outputs[key] if key in outputs else given.tensors[key].view_as(given.tensors[key]) for key in wanted
        }

    def _called_otherwise(self, call: _Call) -> ConfigError:
        return ConfigError(
            f"{self._name} called {call[0]} {call[1]} times or {call[1] + 1} times, for inputs of the same shapes",
            expected="calls that depend on shapes alone: strategy.parallel.split_points puts them on several processes",
            do="turn off what leaves layers out by chance, or choose another strategy",
        )  # fmt: skip

    def blank_output(self, given: Given) -> Any:
        """Return the model's output where parts return tensors without their values."""
        record, ratio = self._record(given)
        return self._run(given, lambda _, call, *__: self._ghost(record, call, given, ratio))

    def _ghost(self, record: Record, call: _Call, given: Given, ratio: Fraction) -> Any:
        """Return what the call of a part of another stage returns: tensors that were sent, and others."""
        form = record.forms.get(call)
        if form is None:
            raise self._called_otherwise(call)
        leaves = list(form.leaves)
        for number, leaf in enumerate(leaves):
            if (tensor := given.tensors.get(key := (*call, number))) is not None:
                # An alias: an autograd function that returns what it was sent would take it for its own.
                leaves[number] = tensor.clone() if key in record.written else tensor.view_as(tensor)
            elif isinstance(leaf, TensorForm):
                leaves[number] = self._blank(leaf, record, ratio)
        return pytree.tree_unflatten(leaves, form.spec)

    def _blank(self, form: TensorForm, record: Record, ratio: Fraction) -> Tensor:
        """Return zeros: nobody looks at them."""
        shape = [int(form.shape[0] * ratio), *form.shape[1:]] if form.shape else []
        if self._is_sequence:  # no memory: nothing but other ghosts gets it
            return torch.zeros((), dtype=form.dtype, device=record.device).expand(shape)
        return torch.zeros(shape, dtype=form.dtype, device=record.device)

    def _drawing(self, record: Record, call: _Call) -> contextlib.AbstractContextManager[None]:
        """Within: the part that is called draws numbers of its own, so that all stages draw the same around it."""
        if call[0] not in record.draws or call not in record.forms:
            return contextlib.nullcontext()
        return generators_of(torch.initial_seed(), list(record.forms).index(call), 0, record.device)

    def _record(self, given: Given) -> tuple[Record, Fraction]:
        """Return what is known of a call, and how many times its samples there are here."""
        call, firsts = self._outline(given)
        if (known := self.records.get((call, firsts))) is not None:
            return known, Fraction(1)
        for (other, its), record in self.records.items():
            ratios = {Fraction(*pair) for pair in zip(firsts, its, strict=True)} if other == call else set()
            if len(ratios) == 1:
                return record, ratios.pop()
        raise ConfigError(f"{self._name} was called with other shapes within a step", expected="the same ones")

    def _outline(self, given: Given) -> tuple[Any, tuple[int, ...]]:
        """Return what decides what a call does, but for values of tensors and numbers; apart from it first sizes."""
        leaves, spec = pytree.tree_flatten((given.arguments, given.options))
        call = self.user.training, spec, tuple(
            (leaf.dim(), leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor)
            else leaf if leaf is None or isinstance(leaf, bool | str) else type(leaf)
            for leaf in leaves
        )  # fmt: skip
        return call, tuple(len(leaf) or 1 for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())

    # --- What a call does ----------------------------------------------------------------------------------------

    def learn(self, given: Given, runner: Any) -> list[Form]:
        """Return the forms of what stages return; see [Note: what a stage needs]. Collective where the call is new."""
        call = self._outline(given)
        known = self.records.get(call)
        if known is None:
            known = Record(runner.device)
            with torch.no_grad(), generators_of(runner.seed, AROUND, 0, runner.device):
                values, error = self._values(given, known, runner), None
                try:
                    foreign = self._follow(given, known, values)
                    self._divide(known)
                    self._check_weights(known, foreign, runner.here)
                except Exception as raised:  # noqa: BLE001 - raised on all ranks
                    error = raised
            runner.among.fail_together(error)
            self.records[call] = known
        assert known.output is not None, "the model returned"
        return [*(_form_of(known, keys) for keys in known.carried), known.output]

    def _values(self, given: Given, record: Record, runner: Any) -> dict[_Call, Any]:
        """Return what each call of a part returns. Collective: ranks call their parts in turns."""
        values: dict[_Call, Any] = {}
        stage: int | None = 0
        while stage is not None:
            rank, mine, told = runner.ranks[stage], dict[_Call, Any](), None
            if runner.outline is not None:
                mine, told = runner.outline.advanced(given, record, values)
            elif rank == runner.among.rank:
                mine, told = self.advanced(stage, given, record, values, runner.whole)
            new, draws, written, stage, record.output = runner.told(told, rank)
            record.draws |= draws
            record.written |= written
            for call, form in new.items():
                tensors = tensors_in(mine[call], form, rank) if call in mine else None
                record.forms[call] = form
                values[call] = assembled(runner.everywhere(tensors, form, rank), form)
        return values

    def advanced(
        self, stage: int | None, given: Given, record: Record, values: dict[_Call, Any], whole: Callable[[Any], Any]
    ) -> tuple[dict[_Call, Any], Any]:
        """Call the parts of `stage`, of all stages if it is None, as far as what others return is known.

        Returns:
            what they return, and an error or what to tell the other ranks: the forms of that, which parts draw
            random numbers, into what they write, which stage comes next, and the form of the model's output.
        """
        mine: dict[_Call, Any] = {}
        draws: set[str] = set()
        written: set[_Key] = set()
        following, output, given_out = None, None, list[tuple[Tensor, _Key]]()

        def answer(part: Part, call: _Call, itself: Any, arguments: Any, options: Any) -> Any:
            if call in values:
                copied = _copied(values[call])
                leaves = enumerate(pytree.tree_leaves(copied))
                given_out.extend((leaf, (*call, number)) for number, leaf in leaves if isinstance(leaf, Tensor))
                return copied
            if stage is not None and stage not in part.stages:
                raise _Waits(min(part.stages))
            _check_frames(part.name)
            before, held = random_state([record.device]), tensors_within((arguments, options))
            result = itself(*arguments, **options)
            if {id(each) for each in held} - {id(each) for each in tensors_within((arguments, options))}:
                raise ConfigError(
                    f"{part.name} replaces a tensor in one of its arguments", expected="layers that return what they "
                    "compute: strategy.parallel.split_points puts them on several processes", do="return it",
                )  # fmt: skip
            if not are_equal(before, random_state([record.device])):
                draws.add(part.name)
            register(result)
            mine[call] = _copied(whole(result))
            written.update(key for tensor, key in given_out if tensor._version)
            return result

        try:
            try:
                result = whole(self._run(given, answer))
                register(result)
                output = form_of(result)
            except _Waits as waits:
                (following,) = waits.args
            forms = {call: form_of(value) for call, value in mine.items()}
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            return {}, self._of_weights() if is_of_meta(error) else error
        return mine, (forms, draws, written, following, output)

    def _of_weights(self) -> ConfigError:
        return ConfigError(
            f"{self._name} computes with a weight of a layer that it does not call, and that layer is on another "
            "process of the pipeline",
            expected="calls of layers between strategy.parallel.split_points", do="move that code into a layer",
        )  # fmt: skip

    def _check_weights(self, record: Record, foreign: set[int], here: Sequence[int]) -> None:
        """Refuse code around parts that computes with a weight that this process does not have.

        Args:
            foreign: before which calls there is such code.
            here: the stages of this process.

        Raises:
            ConfigError: one of these runs it.
        """
        order = list(record.forms)
        for stage in here:
            last = max(map(order.index, record.calls[stage]), default=-1)
            if any(number <= last or stage == self.count - 1 for number in foreign):
                raise self._of_weights()

    def _follow(self, given: Given, record: Record, values: dict[_Call, Any]) -> set[int]:
        """Find which tensors of parts each call depends on, by one run in which no part computes.

        Returns:
            before which calls, by their numbers, something is computed with weights that this process does not have.
        """
        uses = _Uses()

        def answer(_: Part, call: _Call, __: Any, arguments: Any, options: Any) -> Any:
            record.depends[call] = uses.of((arguments, options))
            if call not in values:
                raise self._called_otherwise(call)
            value = _copied(values[call])
            for number, leaf in enumerate(pytree.tree_leaves(value)):
                if isinstance(leaf, Tensor):
                    uses.begin(leaf, (*call, number))
            uses.calls += 1
            return value

        with uses:
            output = self._run(given, answer)
        for call in values.keys() - record.depends.keys():
            raise self._called_otherwise(call)
        record.of_output = uses.of(output)
        record.written |= uses.written
        return uses.foreign

    def _divide(self, record: Record) -> None:
        """Find what passes from stage to stage.

        Raises:
            ConfigError: a stage needs what a later one computes.
        """
        needed = [self._needed(record, stage) for stage in range(self.count)]
        sources = {key: min(self.parts[key[0]].stages) for keys in needed for key in keys}
        for stage, keys in enumerate(needed):
            for key in keys:
                if sources[key] >= stage:
                    calls = [call for call in record.forms if stage in self.parts[call[0]].stages]
                    first = next((call[0] for call in calls if key in record.depends[call]), self._name)
                    raise ConfigError(
                        f"{first} is in stage {stage} of the pipeline, and needs what {key[0]} of stage {sources[key]} "
                        "computes", expected="stages in the order in which the model computes",
                        do="set strategy.parallel.split_points to modules between which that is so",
                    )  # fmt: skip
        order = {call: number for number, call in enumerate(record.forms)}
        for stage in range(self.count):
            later = {key for keys in needed[stage + 1 :] for key in keys if sources[key] <= stage}
            own = {call for call in order if self.parts[call[0]].stages == {stage}}
            own |= {key[:2] for key in later if stage in self.parts[key[0]].stages}
            record.calls.append(sorted(own, key=lambda call: order[call]))
            if stage < self.count - 1:
                record.carried.append(sorted(later, key=lambda key: (order[key[:2]], key[2])))

    def _needed(self, record: Record, stage: int) -> set[_Key]:
        """Return the tensors of parts that `stage` needs and does not have."""
        calls = [call for call in record.forms if self.parts[call[0]].stages == {stage}]
        needed = set().union(*(record.depends[call] for call in calls))
        needed |= record.of_output if stage == self.count - 1 else set()
        followed: set[_Call] = set()
        while more := {key[:2] for key in needed if stage in self.parts[key[0]].stages} - followed:
            followed |= more
            needed = needed.union(*(record.depends[call] for call in more))
        return {key for key in needed if stage not in self.parts[key[0]].stages}


def _form_of(record: Record, keys: Sequence[_Key]) -> Form:
    """Return the form of what passes on."""
    leaves = tuple(record.forms[key[:2]].leaves[key[2]] for key in keys)
    return Form({key: number for number, key in enumerate(keys)}, leaves)


#: Where torch looks for a compiled call of a module, before its hooks and its forward.
_CALL = "_compiled_call_impl"


class _Uses(TorchDispatchMode):
    """Follows which tensors depend on which outputs of parts, by the memory that they share."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of: dict[int, set[_Key]] = {}
        self._begun: dict[int, _Key] = {}
        self._held: list[Any] = []
        #: What Python has read: all that follows may depend on that.
        self._read: set[_Key] = set()
        self.written: set[_Key] = set()
        #: How many calls there were, and before which something was computed with tensors without values: where one of
        #: two operands has none, torch may return any numbers.
        self.calls, self.foreign = 0, set[int]()

    def begin(self, tensor: Tensor, key: _Key) -> None:
        """Let `tensor` be the one with `key`."""
        self._add(tensor, {key})
        self._begun[_memory(tensor)] = key

    def of(self, value: Any) -> set[_Key]:
        """Return what `value`, any nested structure, depends on."""
        return set().union(self._read, *(self._of.get(_memory(tensor), ()) for tensor in tensors_within(value)))

    def _add(self, tensor: Tensor, keys: set[_Key]) -> None:
        memory = _memory(tensor)
        if memory not in self._of:
            self._held.append(tensor)  # no other gets its address
        self._of.setdefault(memory, set()).update(keys)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(each.is_meta for each in tensors_within((args, kwargs))) and func is not torch.ops.aten.detach.default:
            self.foreign.add(self.calls)
        keys = self.of((args, kwargs)) - self._read
        if func is torch.ops.aten._local_scalar_dense.default:
            self._read |= keys
        declared = func._schema.arguments
        given = dict(zip((each.name for each in declared), args, strict=False)) | (kwargs or {})
        written = [given.get(each.name) for each in declared if each.alias_info and each.alias_info.is_write]
        self.written.update(self._begun[m] for m in map(_memory, tensors_within(written)) if m in self._begun)
        for tensor in tensors_within((result, written)) if keys else ():
            self._add(tensor, keys)
        return result


def is_of_meta(error: BaseException) -> bool:
    """Return whether an error is of a computation with a tensor without values."""
    return any(words in str(error) for words in ("device meta", "meta tensor", "meta device"))


def _check_frames(name: str) -> None:
    """Refuse a call of the part `name` within an autograd function, whose backward would call it again.

    Raises:
        ConfigError: there is one.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not Cut._run.__code__:
        for value in frame.f_locals.values():
            if isinstance(value, torch.autograd.function.FunctionCtx):
                raise ConfigError(
                    f"{name} is called in the autograd function {type(value).__name__.removesuffix('Backward')}",
                    expected="calls of layers outside of autograd functions, since the layers are on several processes",
                    do="use torch.utils.checkpoint with use_reentrant=False, or choose another strategy",
                )
        frame = frame.f_back  # type: ignore[assignment]


def _memory(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor."""
    try:
        memory: int = tensor.untyped_storage()._cdata
        return memory
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def _has_state(module: nn.Module) -> bool:
    """Return whether a module has parameters, or buffers of checkpoints: what has neither is called by each stage."""
    return bool(next(module.parameters(), None) is not None or module.state_dict())


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
