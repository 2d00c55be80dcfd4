"""Methods of callbacks and loggers that nothing calls: old names of Lightning, and hooks that are misspelled."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Final

from attrs import frozen

from stratagem.errors import ConfigError, mistyped
from stratagem.stack.plugin_hooks import hook_functions, hook_implementations
from stratagem.stack.plugins import Choice
from stratagem_trainer.api.kinds import Callback, Logger


@frozen(eq=False, repr=False)
class Instead:
    """The replacement of a method that is not called."""

    #: The method or argument to use.
    expected: str
    #: What to do, in the imperative.
    do: str = "move the code there"


#: Methods that are not called on a callback or another plugin.
CALLBACK: Final[dict[str, Instead]] = {
    "on_init_start": Instead("__init__(self)"),
    "on_init_end": Instead("setup(self, trainer, module, stage)"),
    "on_before_accelerator_backend_setup": Instead("setup(self, trainer, module, stage)"),
    "on_configure_sharded_model": Instead("prepare_module(self, module)"),
    "on_pretrain_routine_start": Instead("on_fit_start(self, trainer, module)"),
    "on_pretrain_routine_end": Instead("on_fit_start(self, trainer, module)"),
    "on_epoch_start": Instead("on_train_epoch_start(self, trainer, module)"),
    "on_epoch_end": Instead("on_train_epoch_end(self, trainer, module)"),
    "on_batch_start": Instead("on_train_batch_start(self, trainer, module, batch, batch_idx)"),
    "on_batch_end": Instead("on_train_batch_end(self, trainer, module, outputs, batch, batch_idx)"),
    "on_keyboard_interrupt": Instead("on_exception(self, trainer, module, exception)"),
}

#: How the names of the methods begin that are hooks without a mark.
_PREFIXES: Final = ("on_", "log_")


def check_methods(choices: Iterable[Choice]) -> None:
    """Refuse methods of callbacks that Lightning called, and warn of names that are almost those of hooks.

    Raises:
        ConfigError: names the method, and what to define instead.
    """
    hooks = {name for name in hook_functions() if name.startswith(_PREFIXES)}
    for choice in choices:
        for name, instead in CALLBACK.items():
            if choice.kind in ("callback", "plugin") and hasattr(choice.plugin, name):
                raise refuse(str(choice), name, instead)
        if isinstance(choice.plugin, Callback | Logger):
            _warn_of_misspelled(choice, hooks)


def _warn_of_misspelled(choice: Choice, hooks: set[str]) -> None:
    lacking = hooks - hook_implementations(choice.plugin).keys()
    for name in dir(type(choice.plugin)):
        is_own = name.startswith(_PREFIXES) and name not in hooks
        if is_own and (hint := mistyped(name, sorted(lacking))):
            warnings.warn(f"{choice} defines {name}, which nothing calls; {hint}", stacklevel=2)


def refuse(owner: str, name: str, instead: Instead) -> ConfigError:
    """Return the error for `name`, which `owner` defines."""
    return ConfigError(f"{owner} defines {name}, which is never called", expected=instead.expected, do=instead.do)
