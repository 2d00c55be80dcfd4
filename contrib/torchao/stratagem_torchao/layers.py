"""Choose linear layers of a module by patterns of their names, and replace what they compute."""

from __future__ import annotations

import fnmatch
import importlib
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from stratagem.errors import ConfigError, nearest, shown

#: Attribute of a layer that was replaced: its class then, the names of its new attributes and modules.
_REPLACED = "_stratagem_replaced"


def load(found: str, instead: str, *modules: str) -> None:
    """Import torchao and `modules` of it, without its warnings about CUDA libraries on a machine without CUDA.

    Raises:
        ConfigError: it is not installed.
    """
    logger = logging.getLogger("torchao")
    before = logger.level
    if not torch.cuda.is_available():
        logger.setLevel(logging.ERROR)
        logging.getLogger("torch.utils._pytree").addFilter(_says_no_enum)
    try:
        for name in ("torchao", *modules):
            importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{found} needs torchao, which cannot be imported ({error})",
            expected="torchao 0.18",
            do=f"pip install torchao==0.18.0, or {instead}",
        ) from None
    finally:
        logger.setLevel(before)
        logging.getLogger("torch.utils._pytree").removeFilter(_says_no_enum)


def _says_no_enum(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()


def linear_layers(module: nn.Module, replaced: type[nn.Linear] | None = None) -> dict[str, nn.Linear]:
    """Return the layers of `module` that are plain ``nn.Linear``, or `replaced`, by their names.

    A subclass of ``nn.Linear`` is none of them: its own forward would be lost.
    """
    return {
        name: part
        for name, part in module.named_modules()
        if type(part) is nn.Linear or (replaced is not None and isinstance(part, replaced))
    }


def select(
    layers: dict[str, nn.Linear], modules: Sequence[str], skip: Sequence[str], option: str, skip_key: str = "skip"
) -> list[str]:
    """Return the names of `layers` that a pattern of `modules` matches (all if there is none) and none of `skip` does.

    A pattern such as ``blocks.*.feed`` also matches what lies within such modules.

    Raises:
        ConfigError: a pattern matches no layer.
    """
    for key, patterns in (("modules", modules), (skip_key, skip)):
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in layers):
                raise ConfigError(
                    f"{option}.{key} has {shown(pattern)}, which matches no linear layer",
                    expected=_some(list(layers)) if layers else "a module with linear layers",
                    do=nearest(pattern, _ends(layers)),
                )
    return [
        name
        for name in layers
        if (not modules or any(_matches(name, pattern) for pattern in modules))
        and not any(_matches(name, pattern) for pattern in skip)
    ]


def replace(layer: nn.Linear, new: nn.Linear) -> None:
    """Let `layer` compute what `new` does, which was made from it.

    The layer stays the same object with the same parameters: its hooks, and references to it, stay valid.
    """
    restore(layer)
    added = [name for name in new.__dict__ if name not in layer.__dict__]
    layer.__dict__.update({name: new.__dict__[name] for name in added})
    layer._modules.update(new._modules)
    layer.__dict__[_REPLACED] = (type(new), added, list(new._modules))
    layer.__class__ = type(new)


def restore(module: nn.Module) -> nn.Module:
    """Make the layers of `module` that were replaced plain ``nn.Linear`` again; return `module`."""
    for layer in list(module.modules()):
        made, added, parts = layer.__dict__.get(_REPLACED, (None, [], []))
        if type(layer) is made:  # FSDP changes the class of a layer that it shards alone
            for name in (*added, _REPLACED):
                del layer.__dict__[name]
            for name in parts:
                del layer._modules[name]
            layer.__class__ = nn.Linear
    return module


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")


def _ends(layers: dict[str, nn.Linear]) -> Iterator[str]:
    """Yield the names of `layers` and of what they lie in."""
    for name in layers:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            yield ".".join(parts[:length])


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"one of {', '.join(names[:limit])}{more}"
