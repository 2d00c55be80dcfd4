"""The base of all conformance classes: how a plugin is chosen, how checks are parametrized, and checks of every kind.

A check is a ``test_`` method. It takes parameters by name from `Conformance.parameters`, so that pytest and
`Conformance.checks` run the same ones.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import stratagem as sg
from stratagem.api.capabilities import Capabilities
from stratagem.api.kinds import keeps_state
from stratagem.api.options import convert_options, options, redact
from stratagem.discovery import registry
from stratagem.errors import ConfigError, StratagemError
from stratagem.stack.identity import match_keys, plugins_by_key
from stratagem.stack.plugins import Choice
from stratagem_plugin_checks import check_class
from stratagem_testing import state
from stratagem_testing.expectations import expect_equal
from stratagem_testing.frames import files_of, only_of
from stratagem_testing.processes import ProcessesFailed, run_in_processes
from stratagem_testing.reference import Net
from stratagem_testing.sharing import Call, Recorder, Share, SharedRun
from stratagem_testing.training import quiet
from stratagem_trainer.option_texts import option_docs


class Conformance:
    """Base of the classes that test a plugin. Subclass that of its kind, and set `plugin`."""

    kind: ClassVar[str]
    #: The plugin to test: a name, a mapping with a name and options, or an instance.
    plugin: ClassVar[Any] = None
    #: Numbers of processes to test with, on this machine.
    world_sizes: ClassVar[Sequence[int]] = (1, 2)
    #: Further arguments that the plugin needs: of a Run; for callbacks and the like of a Trainer, such as a logger.
    arguments: ClassVar[dict[str, Any]] = {}
    #: Devices on which the checks run. On a GPU, rounding needs a larger `tolerance`.
    accelerator: ClassVar[str] = "cpu"
    #: Timeout for the processes of one check, in seconds.
    limit_s: ClassVar[float] = 60

    #: Whether checks share processes; not if most of them start none, nor if the plugin keeps a server running.
    shares_processes: ClassVar[bool] = True
    _shared_run: ClassVar[SharedRun]
    #: Where the first call of `run_in` finds its results; None for processes of its own.
    _source: Recorder | Share | None = None
    #: Whether tracebacks of processes show all frames, not those of the plugin and of its class of checks alone.
    _full_trace = False
    #: `plugin`, and what the resolver made of it.
    _resolved: tuple[Any, Choice] | None = None

    @classmethod
    def parameters(cls) -> dict[str, Sequence[Any]]:
        """Return the values of each parameter that a check may have."""
        sizes = cls.world_sizes
        several, alone = [size for size in sizes if size > 1], [size for size in sizes if size == 1]
        return {"world_size": sizes, "several": several, "alone": alone}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize the checks of a subclass; called by pytest."""
        for name, values in metafunc.cls.parameters().items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=_identifier)

    @classmethod
    def checks(cls) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield every check with its name, for runners other than pytest. A skip raises ``pytest.skip.Exception``."""
        available = cls.parameters()
        for name in _in_order(cls):
            wanted = [each for each in inspect.signature(getattr(cls, name)).parameters if each != "self"]
            for values in itertools.product(*(available[each] for each in wanted)):
                label = "-".join(_identifier(value) for value in values)
                check = functools.partial(getattr(cls(), name), **dict(zip(wanted, values, strict=True)))
                yield (f"{name}[{label}]" if label else name), check

    # --- The plugin ----------------------------------------------------------------------------------------------

    def choose(self, **arguments: Any) -> dict[str, Any]:
        """Return the arguments of a Run or Trainer that select the plugin, plus `arguments`."""
        return {"accelerator": self.accelerator, self.kind: self.plugin} | self.arguments | arguments

    def choice(self) -> Choice:
        """Return the plugin as the resolver makes it from `plugin`, once a check. Raises the resolver's errors."""
        if self.plugin is None:
            raise ConfigError(f"{type(self).__name__}.plugin is None", expected="a name, a mapping or an instance")
        if self._resolved is None or self._resolved[0] is not self.plugin:
            run = sg.Run(**self.choose())
            self._resolved = self.plugin, next(choice for choice in run.stack.choices() if self._is_it(choice))
        return self._resolved[1]

    def _is_it(self, choice: Choice) -> bool:
        if choice.kind != self.kind:
            return False
        wanted = self.plugin.get("name") if isinstance(self.plugin, Mapping) else self.plugin
        if isinstance(wanted, str):
            return wanted.lower() in (choice.name.lower(), choice.entry.qualified_name.lower() if choice.entry else "")
        return choice.plugin is wanted

    def prepare(self, module: Any) -> Any:
        """Return the module to train, given one of the kit; called in each process, and for the reference in fp32.

        Override it where the plugin needs more of a module than every module has, such as layers of experts, or changes
        values before training, such as weights that it rounds and freezes. The modules of the kit have a
        `sequential_module` and a `parallel_plan`; their layers are linear, in ``net``.
        """
        return module

    def maker(self, make: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that makes what `prepare` returns for ``make()``."""
        return lambda: self.prepare(make())

    @property
    def capabilities(self) -> Capabilities:
        capabilities: Capabilities = self.choice().plugin.capabilities
        return capabilities

    def claims(self, word: str) -> bool:
        """Whether the plugin's capabilities provide `word`."""
        return word in self.capabilities.provides

    def run_in(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """Call ``function(rank, world_size, *arguments)`` in processes; return the results in rank order.

        Under pytest the first calls of a class's checks share processes: see [Note: shared processes] in `sharing`.
        """
        __tracebackhide__ = True
        source, self._source = self._source, None
        results = None if source is None else source.results_of(Call(function, world_size, arguments))
        if results is not None:
            return results
        try:
            return run_in_processes(function, world_size, *arguments, limit_s=self.limit_s)
        except ProcessesFailed as error:
            if self._full_trace:
                raise
            files = [files_of(type(self.choice().plugin)), files_of(type(self))]
            raise ProcessesFailed(only_of(files, str(error))) from None

    @pytest.fixture(autouse=True)
    def _shared_processes(self, request: pytest.FixtureRequest) -> None:
        """Let a check take its results from the processes that the checks of its class share."""
        self._full_trace = request.config.option.fulltrace
        cls = type(self)
        if "_shared_run" not in vars(cls):
            cls._shared_run = SharedRun(dict(_sharing(request.session.items, cls)), cls.limit_s)
        if request.node.name in cls._shared_run.checks:
            self._source = Share(cls._shared_run, request.node.name)

    # --- Checks of every kind ------------------------------------------------------------------------------------

    def test_it_is_a_plugin_of_its_kind(self) -> None:
        """It resolves, its class is well formed, and every hook that it implements exists."""
        plugin = self.choice().plugin

        base, cls = registry.kinds()[self.kind].base, type(plugin)
        assert isinstance(plugin, base), f"{cls.__name__} must derive from {base.__name__}"
        assert check_class(cls, self.kind) is None, check_class(cls, self.kind)
        assert isinstance(plugin.capabilities, Capabilities), f"`capabilities` are {plugin.capabilities!r}"

    def test_options_are_typed_and_documented(self) -> None:
        """Every option has a type and a ``#:`` line above it that describes its trade-off."""
        cls = type(self.choice().plugin)
        try:
            inspect.getsource(cls)
        except (OSError, TypeError):
            pytest.skip("its source, which has the comments of its options, cannot be read")
        documented = option_docs(cls)
        for name, field in options(cls).items():
            assert field.type is not None, f"option {name} of {cls.__name__} has no type"
            assert documented.get(field.name), f"option {name} of {cls.__name__} has no `#:` line above it"

    def test_unknown_and_wrong_options_are_refused(self) -> None:
        """The error message has the option's path."""
        cls = type(self.choice().plugin)
        with pytest.raises(ConfigError, match="no_such_option"):
            convert_options(cls, {"no_such_option": 1}, "plugin")
        for name, field in options(cls).items():
            if "Any" not in str(field.type):
                with pytest.raises(ConfigError, match=name):
                    convert_options(cls, {name: object()}, "plugin")

    def test_it_travels_to_other_processes(self) -> None:
        """It can be pickled, as launchers that start new processes do."""
        choice = self.choice()
        if choice.entry is None:
            pytest.skip("passed as an instance, which other processes may not be able to import")
        copied = pickle.loads(pickle.dumps(choice.plugin))  # noqa: S301 - our own bytes

        for field in options(type(copied)).values():
            found, expected = getattr(copied, field.name), getattr(choice.plugin, field.name)
            expect_equal(f"option {field.name} after pickling", found, expected, "its value needs an __eq__")

    def test_it_can_be_found_by_its_name_in_any_case(self) -> None:
        choice = self.choice()
        if choice.entry is None:
            pytest.skip("passed as an instance, without a name")

        for name in (choice.name.upper(), choice.entry.qualified_name):
            expect_equal(f"the plugin called {name}", registry.find(self.kind, name), choice.entry)

    # --- State of every kind -------------------------------------------------------------------------------------

    def test_its_state_comes_back_under_every_spelling(self, world_size: int) -> None:
        """Selected by name, alias, mapping, instance or a subclass without new state, it is resumed with its state."""
        cls = type(self._with_state())
        self._require_saving(world_size)
        chosen = self._arguments(world_size)
        others = [(repr(each), self._choosing(each)._arguments(world_size)) for each in self._spellings()]
        with tempfile.TemporaryDirectory(prefix="stratagem-test-") as folder:
            dropped = self.run_in(
                state.resume_each, world_size, chosen, self.maker(Net), cls, self._state_methods(), others, Path(folder)
            )
        look = "`state_key` must depend neither on how the plugin is chosen nor on the rank"
        assert not any(dropped), f"resumed without its state: {'; '.join(itertools.chain(*dropped))}; {look}"

    def test_its_state_comes_back_where_an_option_changed(self) -> None:
        """State is restored after an option changed, such as a larger patience or another rate."""
        plugin = self._with_state()
        for method, (name, other) in itertools.product(self._state_methods(), changed(plugin)):
            [saved], [wanted] = self._keys(method, plugin), self._keys(method, other)
            said = f"saved as {saved!r}; with another {name} loaded as {wanted!r}; leave {name} out of `state_key`"
            assert match_keys([wanted], [saved]), said

    def test_states_of_two_are_not_exchanged(self) -> None:
        """Two plugins of the class that differ in an option keep their state when they are listed in another order."""
        if not registry.kinds()[self.kind].base.identified_by_options:
            pytest.skip(f"a run has one {self.kind}")
        plugin = self._with_state()
        for method, (name, other) in itertools.product(self._state_methods(), changed(plugin)):
            first, second = self._keys(method, plugin, other)
            at_second, at_first = self._keys(method, *copy.deepcopy((other, plugin)))
            found = match_keys([at_second, at_first], [first, second])
            assert found == {at_first: first, at_second: second}, (
                f"two with different {name} are saved as {first!r} and {second!r}, "
                f"and in another order loaded as {at_first!r} and {at_second!r}; `state_key` must tell them apart"
            )

    # --- Helpers -------------------------------------------------------------------------------------------------

    def _arguments(self, world_size: int, **arguments: Any) -> dict[str, Any]:
        """Return the arguments of a Trainer in `world_size` processes that select the plugin, plus `arguments`."""
        return quiet(self.choice().plugin) | self.choose(devices=world_size, **arguments)

    def _require_saving(self, world_size: int) -> None:
        """Skip the check if nothing can be saved at `world_size`."""

    def _state_methods(self) -> list[str]:
        plugin = self.choice().plugin
        return [method for method in ("state_dict", "rank_state") if keeps_state(plugin, method)]

    def _with_state(self) -> Any:
        """Return the plugin; skip the check if it has no state."""
        if not self._state_methods():
            pytest.skip("it has no state")
        return self.choice().plugin

    def _spellings(self) -> list[Any]:
        """Return other values that select the plugin with the same options."""
        choice = self.choice()
        cls = type(choice.plugin)
        instance, subclass = copy.deepcopy(choice.plugin), copy.deepcopy(choice.plugin)
        subclass.__class__ = type(f"My{cls.__name__}", (cls,), {"__slots__": ()})
        found = [instance, subclass]
        if choice.entry is not None:
            names = [each.name for each in registry.entries(self.kind) if each.value == choice.entry.value]
            names += [choice.name.upper(), choice.entry.qualified_name]
            options = dict(self.plugin) if isinstance(self.plugin, Mapping) else {}
            found += [options | {"name": name} for name in names] if options else [{"name": names[0]}, *names]
        return found

    def _choosing(self, plugin: Any) -> Conformance:
        """Return these checks for `plugin`."""
        other = copy.copy(self)
        other.plugin = plugin  # type: ignore[misc]
        return other

    def _keys(self, method: str, *plugins: Any) -> list[str]:
        """Return the keys under which the states of `plugins`, in this order, are saved."""
        choices = [SimpleNamespace(kind=self.kind, plugin=plugin) for plugin in plugins]
        stack: Any = SimpleNamespace(active=lambda: choices)
        return [key for key, _ in plugins_by_key(stack, method)]


def changed(plugin: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of `plugin` with another value of one option each, with the option's name."""
    for name, field in options(type(plugin)).items():
        value, copied = getattr(plugin, field.name), copy.deepcopy(plugin)
        if redact(name, value) != value or not isinstance(value, bool | int | float | str):
            continue
        other = not value if isinstance(value, bool) else f"{value}x" if isinstance(value, str) else value + 1
        try:
            setattr(copied, field.name, other)
        except (AttributeError, TypeError, ValueError, StratagemError):  # frozen, or a value that its validator refuses
            continue
        yield name, copied


def refusal(act: Callable[[], Any]) -> str | None:
    """Return the message of the `StratagemError` that `act` raises; None if it raises none."""
    try:
        act()
    except StratagemError as error:
        return str(error)
    return None


def _sharing(items: Sequence[pytest.Item], cls: type[Conformance]) -> Iterator[tuple[str, Callable[[Recorder], None]]]:
    """Yield the checks among `items` that may share processes, by name: the kit's own, of `cls`."""
    if not (cls.shares_processes and isinstance(cls.plugin, str | Mapping)):
        return
    for item in items:
        if not isinstance(item, pytest.Function) or item.cls is not cls:
            continue
        on_any_worker = hasattr(item.config, "workerinput") and "@" not in item.nodeid.rpartition("]")[2]
        given = item.callspec.params if hasattr(item, "callspec") else {}
        module = item.function.__module__
        starts_processes = module.startswith(f"{__package__}.") and (given or module != __name__)
        if starts_processes and not on_any_worker:
            yield item.name, functools.partial(_record, cls, item.originalname, given)


def _record(cls: type[Conformance], name: str, given: Mapping[str, Any], recorder: Recorder) -> None:
    conformance = cls()
    conformance._source = recorder
    getattr(conformance, name)(**given)


def _in_order(cls: type[Any]) -> list[str]:
    """Return the names of the checks of `cls` in order of definition, those of its bases first."""
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        names |= dict.fromkeys(name for name in vars(base) if name.startswith("test_"))
    return [name for name in names if callable(getattr(cls, name))]


def _identifier(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value)
