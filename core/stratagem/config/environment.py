"""Read arguments and plugin options from environment variables."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Collection, Mapping

from stratagem.config.settings import RunSettings, option_names
from stratagem.config.sources import PREFIX, Source
from stratagem.discovery import registry
from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError


def from_environment(settings: type[RunSettings], variables: Mapping[str, str] = os.environ) -> Source:
    """Read ``STRATAGEM_TRAINER_<ARGUMENT>`` and ``STRATAGEM_<KIND>_<OPTION>``.

    Args:
        settings: the class that has the arguments, to tell a name that is misspelt.
    """
    arguments = option_names(settings)
    layer = Source("environment", text=True)
    for variable, text in sorted(variables.items()):
        name = variable.removeprefix(PREFIX)
        if name == variable:
            continue
        if name.startswith("TRAINER_"):
            layer.set(name.removeprefix("TRAINER_").lower(), text)
            continue
        # The longest kind first, in case the name of one kind is a prefix of another's.
        for kind in sorted(registry.dotted(), key=len, reverse=True):
            if name.startswith(f"{kind.upper()}_"):
                layer.set(f"{kind}.{name.removeprefix(f'{kind.upper()}_').lower()}", text)
                break
        else:
            _check_not_misspelt(variable, name, arguments)
    _warn_of_lightning(variables, arguments)
    return layer


def warn_of_trainer_variables(variables: Mapping[str, str] = os.environ) -> None:
    """Warn of variables with arguments of a `Trainer`, which a `Run` does not read."""
    prefix = f"{PREFIX}TRAINER_"
    known = option_names(RunSettings)
    for variable in sorted(variables):
        name = variable.removeprefix(prefix).lower()
        if variable.startswith(prefix) and name in known:
            warnings.warn(
                f"the variable {variable} is set, which a Trainer reads and a Run does not; pass {name}= to Run",
                stacklevel=2,
            )


def _check_not_misspelt(variable: str, name: str, arguments: Collection[str]) -> None:
    """Refuse a variable that looks like a misspelt argument or option."""
    if name.lower() in arguments and name != "PLUGINS":  # the list of allowed plugins
        raise ConfigError(f"the variable {variable} is set, which nothing reads", do=f"use {PREFIX}TRAINER_{name}")
    if name.startswith("CALLBACK_"):
        raise ConfigError(
            f"the variable {variable} is set, and there may be several callbacks", expected="each callback by name",
            do=f"use {PREFIX}TRAINER_CALLBACKS with JSON",
        )  # fmt: skip
    first = {word.partition("_")[0] for word in ("TRAINER", *(kind.upper() for kind in registry.dotted()))}
    word, _, rest = name.partition("_")
    close = difflib.get_close_matches(word, first, n=1, cutoff=0.8)
    if rest and close and word not in first:
        raise ConfigError(
            f"the variable {variable} is set, which nothing reads", do=f"did you mean {PREFIX}{close[0]}_{rest}"
        )


def _warn_of_lightning(variables: Mapping[str, str], arguments: Collection[str]) -> None:
    """Warn of variables that Lightning reads and stratagem does not; only on local rank 0."""
    if variables.get("LOCAL_RANK", "0") != "0":
        return
    for variable in sorted(variables):
        if variable == "PL_GLOBAL_SEED":
            advice = "call stratagem.seed_everything(number), or set STRATAGEM_SEED"
        elif variable.startswith("PL_TRAINER_") or variable in _LIGHTNING_RUN:
            name = variable.removeprefix("PL_TRAINER_").removeprefix("LT_")
            known = name.lower() in arguments
            advice = f"set {PREFIX}TRAINER_{name}" if known else moved_names("arguments").get(name.lower(), "unset it")
        else:
            continue
        warnings.warn(f"the variable {variable} is set, which Lightning reads and stratagem does not; {advice}",
                      stacklevel=2)  # fmt: skip


#: The variables that `lightning run` sets.
_LIGHTNING_RUN = ("LT_ACCELERATOR", "LT_STRATEGY", "LT_DEVICES", "LT_NUM_NODES", "LT_PRECISION")
