"""Names of Lightning's callback API that stratagem does not call, and arguments that its hooks do not have."""

from __future__ import annotations

import inspect
from typing import Any, Final

from attrs import frozen

from stratagem.api import hooks
from stratagem.errors import ConfigError, PluginError, nearest
from stratagem.stack.plugin_hooks import hook_implementations, hook_specifications


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

#: Arguments of Lightning's callbacks, and their names here.
CALLBACK_ARGUMENTS: Final[dict[str, str]] = {"pl_module": "name it `module`"}

#: Hooks that are called at another time than Lightning's method of the same name.
HOOKS: Final[dict[str, str]] = {
    "teardown": "take `run` alone: it is called once, when the run closes; for the end of a call define on_fit_end, "
    "on_validation_end, on_test_end or on_predict_end",
}


def check_hook_arguments(choice: Any) -> None:
    """Refuse hooks of a plugin that name an argument which the hook does not have.

    Raises:
        PluginError: names the hook and the argument.
    """
    for hook in hook_implementations(choice.plugin):
        if hook not in hook_specifications():
            continue
        known = list(inspect.signature(getattr(hooks, hook)).parameters)
        for name in inspect.signature(getattr(choice.plugin, hook)).parameters:
            if name not in known:
                do = HOOKS.get(hook) or CALLBACK_ARGUMENTS.get(name) or nearest(name, known) or "leave it out"
                raise PluginError(
                    f"{choice} takes {name} in {hook}", expected=f"arguments out of ({', '.join(known)})", do=do
                )


def refuse(owner: str, name: str, instead: Instead) -> ConfigError:
    """Return the error for `name`, which `owner` defines."""
    return ConfigError(f"{owner} defines {name}, which is never called", expected=instead.expected, do=instead.do)
