"""Read and write the state of a run: weights, optimizers, plugins. Warn of a ``state_dict()`` that lacks weights."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from stratagem.api.context import RunContext
from stratagem.api.paths import as_path
from stratagem.checkpoint.files import STATE_VERSION, check_version
from stratagem.checkpoint.rank_rows import ranks_in, states_of_ranks
from stratagem.checkpoint.state_checks import (
    check_optimizer,
    check_weights_fit,
    errors_naming,
    on_all_ranks,
    on_first_rank,
    with_new_options,
)  # fmt: skip
from stratagem.checkpoint.tensor_memory import collecting, with_own_extras, with_own_memory
from stratagem.checkpoint.trained_part import check_part
from stratagem.errors import CheckpointError
from stratagem.runtime.handles import ModelHandle
from stratagem.runtime.hook_caller import HookCaller
from stratagem.stack import identity
from stratagem.stack.formats import check_is_not_folder, format_named, name_of_format, read_with
from stratagem.stack.identity import match_keys, warn_of_differences

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stratagem.stack.plugins import Stack


class StatefulRun(RunContext, Protocol):
    """What reading and writing use of a run."""

    stack: Stack


def save(run: StatefulRun, path: str | Path, *, model: Any, optimizer: Any = (), **values: Any) -> None:
    """Write a checkpoint that any strategy can read: weights, optimizers, states of plugins, and `values`.

    All ranks call it.
    """
    module = model.module if isinstance(model, ModelHandle) else model
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    with collecting():
        weights = run.ask("model_state", module=module)
        of_optimizers = [run.ask("optimizer_state", optimizer=each, module=module) for each in optimizers]
    state = {
        "state_dict": weights,
        "optimizers": of_optimizers,
        "plugins": {key: plugin.state_dict() for key, plugin in identity.plugins_by_key(run.stack, "state_dict")},
        "ranks": states_of_ranks(run, lambda: {"plugins": rank_states(run)}),
        "values": values,
        "format": format_tag(run.stack),
    }
    run.ask("save_checkpoint", state=state, path=as_path(path))


def load(run: StatefulRun, path: str | Path, *, model: Any, optimizer: Any = (), strict: bool = True) -> dict[str, Any]:
    """Read what `save` (or a Trainer) wrote into `model` and `optimizer`; return the extra values."""
    module = model.module if isinstance(model, ModelHandle) else model
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    state = read_checkpoint(run, as_path(path))
    load_model(run, state["state_dict"], module, strict, path, state.get("frozen"))
    state["state_dict"] = outlines(state["state_dict"])
    load_optimizers(run, list(state.pop("optimizers", [])), optimizers, module, state["state_dict"], path)
    identity.restore(run.stack, state.get("callbacks", {}) | state.get("plugins", {}))
    ranks = ranks_in(state, path)
    on_all_ranks(run.collectives, lambda: [ranks[number] for number in range(run.rank, len(ranks), run.world_size)])
    if run.is_global_zero:
        warn_of_differences(run.stack, state)
    load_rank_states(run, ranks)
    values: dict[str, Any] = state.get("values", {})
    return values


def rank_states(run: StatefulRun) -> dict[str, Any]:
    """Return the states of plugins that differ between ranks: those of this rank."""
    return {key: plugin.rank_state(run) for key, plugin in identity.plugins_by_key(run.stack, "rank_state")}


def load_rank_states(run: StatefulRun, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Give plugins their states on each of `ranks`, the ranks that saved. Collective."""
    plugins = dict(identity.plugins_by_key(run.stack, "rank_state"))
    if not plugins:
        return
    saved = [rank.get("plugins", {}) for rank in ranks]
    on_all = [key for key in saved[0] if all(key in each for each in saved)] if saved else []
    for key, saved_as in match_keys(plugins, on_all).items():
        plugins[key].load_rank_states([each[saved_as] for each in saved], run)


def read_checkpoint(run: StatefulRun, path: Path) -> dict[str, Any]:
    """Return the logical state at `path`, whichever installed format it is in. Collective.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer stratagem wrote it; on all ranks.
    """
    run.saver.wait()

    def other_format() -> str | None:
        if run.checkpoint_format.recognises(path):
            return None
        if (name := name_of_format(path)) is None:
            check_is_not_folder(path)
        return name

    other = on_first_rank(run.collectives, other_format)  # so that all ranks do the same
    state = run.ask("load_checkpoint", path=path) if other is None else read_with(format_named(other), path, run)
    check_version(state, path)
    return with_own_memory(state)


def outlines(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return `weights` without values, so that those can be freed: for checks of shapes and dtypes."""
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value
        for name, value in weights.items()
    }


def load_model(
    run: StatefulRun, state: Mapping[str, Any], module: nn.Module, strict: bool, path: Any = "the checkpoint",
    frozen: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Load the weights `state`, of the checkpoint `path`, into `module`. Collective.

    Args:
        frozen: describes the parameters that `state` lacks because they were not trained.

    Raises:
        CheckpointError: they are another model's, or would have to be converted.
    """
    check_weights_fit(state, module, path)
    if frozen is not None:
        whole, run.whole_state = run.whole_state, True
        try:
            own = run.ask("model_state", module=module)
        finally:
            run.whole_state = whole
        # Other ranks than the first may have no values.
        is_first, names = run.is_global_zero, strict
        strict = on_all_ranks(run.collectives, lambda: check_part(state, frozen, own, module, names, path, is_first))
    state = with_own_extras(state, module)
    with errors_naming(f"{path}: state_dict"):
        run.ask("load_model_state", state=state, module=module, strict=strict)


def load_optimizers(run: StatefulRun, states: list[dict[str, Any]], optimizers: list[Optimizer], module: nn.Module,
    weights: Mapping[str, Any] | None = None, path: Any = "the checkpoint",
) -> None:  # fmt: skip
    """Load logical `states` into `optimizers`, one each, and empty `states`, so that they are freed as they are used.

    Args:
        weights: those of the same checkpoint, `path`; only their shapes and dtypes are used.
    """
    check_optimizers(states, optimizers, weights, path)
    states.reverse()
    for number, optimizer in enumerate(optimizers[: len(states)]):
        where = f"{path}: optimizers[{number}]"
        filled = states.pop()
        if _is_logical(filled):
            filled = _with_new_options(run, filled, optimizer, where)
            filled["state"] = dict(filled["state"])  # what answers the hook may take entries out of it
        with errors_naming(where):
            run.ask("load_optimizer_state", state=filled, optimizer=optimizer, module=module)


def check_optimizers(
    states: list[dict[str, Any]], optimizers: list[Optimizer], weights: Mapping[str, Any] | None, path: Any
) -> None:
    """Refuse `states` that do not fit `optimizers`; see `load_optimizers`."""
    if optimizers and len(states) != len(optimizers):
        raise CheckpointError(
            f"the checkpoint holds {len(states)} optimizer states", expected=f"{len(optimizers)} as in this run",
            do="resume with the optimizers that wrote it, or load only the weights",
        )  # fmt: skip
    for number, (state, optimizer) in enumerate(zip(states, optimizers, strict=False)):
        if _is_logical(state):
            check_optimizer(state, weights or {}, optimizer, f"{path}: optimizers[{number}]")


def _with_new_options(run: StatefulRun, state: dict[str, Any], optimizer: Optimizer, where: str) -> dict[str, Any]:
    filled, added = with_new_options(state, optimizer, where)
    for each in added if run.is_global_zero else ():
        warnings.warn(each, stacklevel=2)
    return filled


def _is_logical(state: Any) -> bool:
    """Whether the `state` of an optimizer is a logical one, rather than an engine's own form of it."""
    return isinstance(state, dict) and bool(state.keys() & {"state", "param_groups"})


def format_tag(stack: Stack) -> dict[str, Any]:
    """Return the metadata of a checkpoint: the version of its layout, and the library that wrote it."""
    from stratagem._version import __version__

    entries = [choice.entry for choice in stack.choices() if choice.entry is not None]
    return {
        "name": "stratagem",
        "version": STATE_VERSION,
        "stratagem": __version__,
        "torch": str(torch.__version__),
        "plugins": {f"{e.kind}.{e.name}": f"{e.distribution} {e.version}" for e in entries},
    }


class StateDictWarning:
    """Warns once when the ``state_dict()`` of a module that `strategy` shards, or that of a part, is taken.

    A plugin may take it, since it knows what it reads.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy, self._has_warned = strategy, False

    def watch(self, module: nn.Module) -> None:
        """Watch `module`, unless it is watched since an earlier fit."""
        if module.__dict__.setdefault("_stratagem_parted", self) is self:
            for part in module.modules():
                part.register_state_dict_post_hook(self)

    def __call__(self, module: nn.Module, *state: Any) -> None:
        if self._has_warned:
            return
        codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())]
        if HookCaller.ask.__code__ in codes:
            return
        self._has_warned = True
        inside = (__file__, nn.modules.module.__file__)
        level = next(number for number, code in enumerate(codes, 1) if code.co_filename not in inside)
        warnings.warn(
            f"state_dict() has this rank's part of the weights alone, because {self._strategy} shards them: what "
            "torch.save writes of it lacks the others; for a file with whole weights, call "
            "trainer.save_checkpoint(path, weights_only=True), or run.save, on all ranks",
            stacklevel=level,
        )
