"""Call the hooks of one run: look them up once, pass `run`, check the answers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pluggy
import torch

from stratagem.api.world import Collectives, World
from stratagem.discovery import registry
from stratagem.errors import PluginError, with_article
from stratagem.runtime import default_hooks
from stratagem.stack.checks import check_hook_arguments
from stratagem.stack.construction import default
from stratagem.stack.plugins import hook_functions, hook_implementations, hook_modules

if TYPE_CHECKING:
    from stratagem.api.context import RunContext
    from stratagem.stack.plugins import Stack

#: The type of the answer, for hooks where a wrong one would fail much later.
_ANSWERS: dict[str, tuple[type[Any], ...]] = {
    "setup_environment": (World,),
    "connect": (Collectives,),
    "units": (list,),
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
    "step_optimizers": (bool,),
    "optimizer_step": (bool,),
    "explain_error": (BaseException,),
}


class HookCaller:
    """The hooks of one run.

    Those of the inner loop are the attributes declared here, bound once: None where no plugin implements one.
    """

    step_context: Any
    forward_backward: Any
    scale_loss: Any
    backward: Any
    clip_gradients: Any
    step_optimizers: Any
    optimizer_step: Any
    transfer_batch: Any

    def __init__(self, stack: Stack, run: RunContext) -> None:
        self._stack, self._run = stack, run
        self._manager = _hook_manager(stack)
        kinds = registry.kinds()
        for choice in stack.active():
            if choice.kind in kinds and (joined := kinds[choice.kind].joined) is not None:
                joined(choice.plugin, run)
        #: Pluggy's callers, by name.
        self.hook = self._manager.hook
        self.bind()

    def use_deferred_init(self) -> None:
        """Register the plugin that builds modules without values and initializes them, unless there is one.

        Raises:
            PluginError: it is not installed.
        """
        if all(implementation.wrapper for implementation in self.hook.materializer.get_hookimpls()):
            self._manager.add(default("callback", "deferred_init", "a model is built without values").plugin)

    def ask(self, hook: str, **arguments: Any) -> Any:
        """Call an answer hook and require an answer."""
        return self.answered(hook, getattr(self.hook, hook)(**arguments, run=self._run))

    def enter_all(self, stack: contextlib.ExitStack, hook: str, **arguments: Any) -> None:
        """Enter the contexts that the implementations of `hook` return."""
        for context in getattr(self.hook, hook)(**arguments, run=self._run):
            try:
                stack.enter_context(context)
            except TypeError as error:
                if hasattr(type(context), "__enter__"):
                    raise
                who = " or ".join(str(c) for c in self._stack.active() if hook in hook_implementations(c.plugin))
                raise PluginError(
                    f"{who} returned a {type(context).__name__} from {hook}", expected="a context manager, or None",
                    do="return what docs/hooks.md says for this hook",
                ) from error  # fmt: skip

    def implemented(self, hook: str) -> Any:
        """Return the caller of `hook`, or None if no plugin implements it."""
        caller = getattr(self.hook, hook, None)
        return caller if caller is not None and caller.get_hookimpls() else None

    def by_plugin(self, hook: str) -> dict[Any, Any]:
        """Return pluggy's implementations of `hook`, by the plugins that have them."""
        found: list[Any] = getattr(self.hook, hook).get_hookimpls()
        return {each.plugin.of: each for each in found}

    def answered(self, hook: str, answer: Any) -> Any:
        if not isinstance(answer, _ANSWERS.get(hook, object)) or answer is None:
            found = "None" if answer is None else with_article(type(answer))
            wanted = " or ".join(map(with_article, _ANSWERS.get(hook, ()))) or "an answer"
            raise PluginError(
                f"{self.answering_plugin(hook)} returned {found} from {hook}", expected=wanted,
                do="return what docs/hooks.md says for this hook",
            )  # fmt: skip
        return answer

    def answering_plugin(self, hook: str) -> str:
        for choice in self._stack.active():
            marker = hook_implementations(choice.plugin).get(hook)
            if marker is not None and not marker["wrapper"]:
                return str(choice)
        wrappers = [str(c) for c in self._stack.active() if hook in hook_implementations(c.plugin)]
        return f"a wrapper of it ({', '.join(wrappers)})" if wrappers else "nobody answers:"

    def bind(self) -> None:
        """Look up the hooks of the inner loop once. None: no plugin implements it."""
        for name in type(self).__annotations__:
            caller = self.implemented(name)
            plain = caller is not None and [*self.by_plugin(name)] == [self._manager.defaults]
            if plain and name == "transfer_batch":
                caller = default_hooks.transfer_batch  # called for every batch: without the cost of pluggy
            keep = not plain or name in ("clip_gradients", "transfer_batch")
            setattr(self, name, caller if keep else None)


class _Marked:
    """The marked methods of a plugin: pluggy looks at each attribute that it finds, half of the time to start."""

    def __init__(self, plugin: Any, implementations: Iterable[str]) -> None:
        self.of = plugin
        for name in implementations:
            setattr(self, name, getattr(plugin, name))

    def __dir__(self) -> Iterable[str]:
        return vars(self).keys() - {"of"}


class _PluginManager(pluggy.PluginManager):
    """Knows which of its plugins answers for nobody."""

    defaults: Any = None

    def add(self, plugin: Any) -> dict[str, dict[str, Any]]:
        """Register `plugin`; return its implementations."""
        found = hook_implementations(plugin)
        self.register(_Marked(plugin, found), str(id(plugin)))
        return found

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        return getattr(plugin, name).stratagem_impl


def _hook_manager(stack: Stack) -> _PluginManager:
    manager = _PluginManager("stratagem")
    for module in hook_modules():
        manager.add_hookspecs(module)
    answered, bases = set(), {object, *map(attrgetter("base"), registry.kinds().values())}
    specified = hook_functions()
    # pluggy calls the last registered first.
    for choice in reversed(stack.active()):
        try:
            implementations = manager.add(choice.plugin)
        except (pluggy.PluginValidationError, ValueError) as error:
            check_hook_arguments(choice)
            raise PluginError(
                f"{choice} does not fit the hook contract ({error})", do="see docs/hooks.md for the signature"
            ) from error
        _check_marked(choice, implementations, bases, specified)
        for hook, marker in implementations.items():
            if not marker["wrapper"]:
                answered.add(hook)
    unanswered = [hook for hook in default_hooks.DEFAULTS if hook not in answered]
    manager.defaults = default_hooks.plugin_with(unanswered)
    manager.add(manager.defaults)
    return manager


def _check_marked(
    choice: Any, implementations: Mapping[str, Any], bases: set[Any], specified: Mapping[str, Any]
) -> None:
    """Refuse methods with the name of a hook that are not marked: they would never be called.

    Args:
        bases: classes whose methods are not meant, such as those of kinds.
        specified: the functions that specify hooks, by name.
    """
    for base in type(choice.plugin).__mro__:
        if base in bases:
            break
    for name, specification in specified.items():
        method = getattr(choice.plugin, name, None)
        inherited = hasattr(base, name) and name not in getattr(choice.plugin, "__dict__", {})
        if name in implementations or not callable(method) or inherited:
            continue
        arguments = ", ".join(inspect.signature(specification).parameters)
        raise PluginError(
            f"{choice} has a method {name} that is not marked as a hook",
            expected=f"@hookimpl above it, and arguments out of ({arguments})",
            do="add it (`from stratagem import hookimpl`), or choose another name for the method",
        )
