"""Check the state of a checkpoint before any of it is applied: files may be edited, or written by other programs.

Every check gets the same content on all ranks, so either all ranks refuse it or none. No value is converted to another
kind (integers to floats, complex numbers to real ones), because that would change it without a message.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from stratagem.api.state_fit import check_weights
from stratagem.errors import CheckpointError, StratagemError, is_echo

if TYPE_CHECKING:
    from torch import nn

#: State of torch's optimizers that has the shape of its parameter.
_LIKE_PARAMETERS = {
    "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg", "acc_delta", "sum",
    "exp_inf",
}  # fmt: skip
_MAPPINGS = ("hyper_parameters", "loop", "callbacks", "plugins", "values", "format")
_LISTS = ("optimizers", "lr_schedulers")
#: Errors that code raises when it gets data that it does not expect.
_DATA_ERRORS = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, AssertionError,
    RuntimeError,
)  # fmt: skip
_T = TypeVar("_T")
#: What to do about a checkpoint that does not fit.
DO = "nothing was changed; use another checkpoint, or load only the weights"


def check_structure(state: Any, path: Any) -> None:
    """Check that `state` has the structure of a checkpoint; the other functions check its values.

    Raises:
        CheckpointError: names `path` and the key.
    """
    if not isinstance(state, Mapping):
        raise wrong(path, "the checkpoint", state, "a mapping")
    if "state_dict" not in state:
        raise CheckpointError(f"{path} has no 'state_dict'", expected="a checkpoint with a model", do=DO)
    _check(path, "state_dict", state["state_dict"], Mapping, "a mapping of tensors by name")
    for key in (key for key in _MAPPINGS if key in state):
        _check(path, key, state[key], Mapping, "a mapping")
    if "hparams_left_out" in state:
        _check(path, "hparams_left_out", state["hparams_left_out"], list | tuple, "a list of names")
    for key in (key for key in _LISTS if key in state):
        _check(path, key, state[key], list | tuple, "a list of mappings")
        for number, item in enumerate(state[key]):
            _check(path, f"{key}[{number}]", item, Mapping, "a mapping")
    ranks = state.get("ranks", ())
    if isinstance(ranks, Tensor) and ranks.dtype == torch.uint8 and ranks.dim() == 2:
        return  # each is checked when it is decoded
    _check(path, "ranks", ranks, list | tuple, "a list of mappings")
    for number, rank in enumerate(ranks):
        check_rank(rank, path, number)


def check_rank(rank: Any, path: Any, number: int) -> None:
    """Check the structure of what rank `number` saved."""
    _check(path, f"ranks[{number}]", rank, Mapping, "a mapping")
    for key in ("plugins", "buffers", "random", "feed", "metrics", "callback_metrics"):
        if key in rank:
            _check(path, f"ranks[{number}].{key}", rank[key], Mapping, "a mapping")


def check_weights_fit(weights: Mapping[str, Any], module: nn.Module, path: Any = "the checkpoint") -> None:
    """Check that each tensor of `weights` has the kind of dtype and the shape of the tensor of that name in `module`.

    Tensors that a part of `module` names in its attribute ``loads_converted`` are left to what answers the hook
    `load_model_state`: the part holds them in another form, such as packed integers.

    Raises:
        CheckpointError: names the tensor.
    """
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    converted = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in getattr(part, "loads_converted", ())
    }
    for name, value in weights.items():
        if name not in own or name in converted:
            continue
        mine = own[name].dtype
        if not hasattr(value, "dtype") or not hasattr(value, "shape"):
            raise wrong(path, f"state_dict[{name!r}]", value, "a tensor")
        if not _holds(mine, value.dtype):
            raise CheckpointError(
                f"{path}: state_dict[{name!r}] has dtype {value.dtype}",
                expected=f"one that {mine}, which the model has, can hold", do="load it into the model that wrote it",
            )  # fmt: skip
        if not is_lazy(own[name]) and own[name].numel():  # an engine may hold it elsewhere
            check_weights({name: own[name].shape}, {name: value}, strict=False)


def check_optimizer(state: Mapping[str, Any], weights: Mapping[str, Any], optimizer: Any, where: str) -> None:
    """Check the logical `state` of an optimizer: its structure, options like those of `optimizer`, its tensors.

    Tensors are checked for optimizers of torch only. Others may keep them in other shapes, as integers, or for some
    parameters only.

    Args:
        weights: the weights in the same checkpoint.
        optimizer: the optimizer that the state will be loaded into.
        where: the name of the state in messages.

    Raises:
        CheckpointError: names the entry.
    """
    entries, saved = state.get("state"), state.get("param_groups")
    groups, is_torchs = getattr(optimizer, "param_groups", ()), type(optimizer).__module__.startswith("torch.optim")
    # Options that every group has. Options that a user added to one group may be missing; if this is None, none may be.
    defaults = getattr(optimizer, "defaults", None)
    _check(where, "state", entries, Mapping, "a mapping by the names of parameters")
    _check(where, "param_groups", saved, list | tuple, "a list of mappings")
    assert isinstance(entries, Mapping)
    assert isinstance(saved, Sequence)
    for name, entry in entries.items():
        _check(where, f"state[{name!r}]", entry, Mapping, "a mapping")
        for key in _LIKE_PARAMETERS & entry.keys() if is_torchs else ():
            _check_like(weights.get(name), entry[key], f"{where}.state[{name!r}].{key}")
        if "step" in entry and not is_number(entry["step"]):
            raise wrong(where, f"state[{name!r}].step", entry["step"], "a number")
    for number, group in enumerate(saved):
        place = f"param_groups[{number}]"
        _check(where, place, group, Mapping, "a mapping")
        _check(where, f"{place}.params", group.get("params"), list | tuple, "a list of names")
        for name in group["params"]:
            _check(where, f"{place}.params", name, str, "a list of names")
        own = groups[number] if number < len(groups) else {}
        for key in own.keys() - {"params", "initial_lr"}:
            if key in group:
                _check_similar(own[key], group[key], f"{where}.{place}.{key}")
                if is_number(own[key]) and (defaults is None or key in defaults):
                    _check_usable(group[key], f"{where}.{place}.{key}")
            # Others stay, by `with_new_options`.
            elif (defaults is None or key in defaults) and type(own[key]) in (int, float, tuple):
                raise CheckpointError(f"{where}.{place} has no {key!r}", expected=f"one like {own[key]!r}", do=DO)
        if is_torchs:
            _check_same_keys({name: entries[name] for name in group["params"] if name in entries}, where)


def _check_usable(value: Any, where: str) -> None:
    if value is None or math.isnan(value):
        raise CheckpointError(f"{where} is {value}", expected="a number", do=DO)


def with_new_options(state: Mapping[str, Any], optimizer: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return `state` plus the options that only groups of `optimizer` have, and a message for each added option."""
    own, defaults = getattr(optimizer, "param_groups", ()), getattr(optimizer, "defaults", None)
    groups, added = [dict(group) for group in state["param_groups"]], []
    for number, (mine, group) in enumerate(zip(own, groups, strict=False)):
        for key in () if defaults is None else mine.keys() - group.keys() - defaults.keys() - {"params", "initial_lr"}:
            group[key] = mine[key]
            added.append(f"{where}.param_groups[{number}] has no {key!r}: it stays {mine[key]!r}")
    return {**state, "param_groups": groups}, added


def _check_same_keys(entries: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Check that all parameters of one group have the same entries, except those that never had a gradient."""
    for key in {key for entry in entries.values() for key in entry if key == "step" or key in _LIKE_PARAMETERS}:
        lacking = [name for name, entry in entries.items() if entry and key not in entry]
        if lacking:
            raise CheckpointError(
                f"{where}.state[{lacking[0]!r}] has no {key!r}", expected="one, as other parameters have", do=DO
            )


def check_similar(now: Any, state: Any, where: str) -> None:
    """Check that the values of `state` are of the same kind as those of `now` under the same keys.

    Raises:
        CheckpointError: names the key.
    """
    _check_similar(now, state, where)
    if isinstance(now, Mapping):
        for key in (key for key in now if key in state):
            _check_similar(now[key], state[key], f"{where}.{key}")


@contextlib.contextmanager
def errors_naming(where: str) -> Iterator[None]:
    """Turn errors of code that applies a state it does not expect into a `CheckpointError` that names `where`."""
    try:
        yield
    except (StratagemError, torch.OutOfMemoryError):
        raise
    except _DATA_ERRORS as error:
        if is_echo(error):
            raise
        text = str(error).strip().splitlines()
        raise CheckpointError(
            f"{where} cannot be applied ({type(error).__name__}: {text[0][:120] if text else 'no reason given'})",
            expected="a value like the one that this run would save there",
            do="use another checkpoint, or load only the weights",
        ) from error  # fmt: skip


def on_all_ranks(collectives: Any, act: Callable[[], _T], errors: type[Exception] = CheckpointError) -> _T:
    """Return what `act` returns, which calls no collectives; where one rank raises one of `errors`, all ranks raise."""
    value, error = cast("_T", None), None
    try:
        value = act()
    except errors as caught:
        error = caught
    collectives.fail_together(error)
    return value


def on_first_rank(collectives: Any, act: Callable[[], _T], errors: type[Exception] = CheckpointError) -> _T:
    """Return what `act` returns on rank 0, which calls no collectives; if it raises one of `errors`, all do."""
    value = on_all_ranks(collectives, lambda: act() if collectives.rank == 0 else None, errors)
    return cast("_T", collectives.broadcast_object(value))


def _holds(mine: torch.dtype, theirs: torch.dtype) -> bool:
    """Whether dtype `mine` can hold values of dtype `theirs`: both of the same kind, and no integer loses bits."""
    if mine == theirs:
        return True
    if mine.is_floating_point or theirs.is_floating_point:
        return bool(mine.is_floating_point and theirs.is_floating_point)
    if mine.is_complex or theirs.is_complex:
        return bool(mine.is_complex and theirs.is_complex)
    if torch.bool in (mine, theirs):
        return False
    return bool(torch.promote_types(mine, theirs) == mine)


def _check_like(weight: Any, value: Any, where: str) -> None:
    if value is None:
        return
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise wrong("", where, value, "a tensor")
    if weight is None or not hasattr(weight, "shape"):
        return
    if tuple(value.shape) != tuple(weight.shape):
        raise CheckpointError(
            f"{where} has shape {tuple(value.shape)}", expected=f"{tuple(weight.shape)}, its parameter's", do=DO
        )
    if not _holds(weight.dtype, value.dtype):
        raise CheckpointError(
            f"{where} has dtype {value.dtype}", expected=f"one that fits {weight.dtype}, as its parameter has", do=DO
        )


def _check_similar(mine: Any, theirs: Any, where: str) -> None:
    """Check that `theirs` is of the same kind as `mine`: a bool, a number, a string, a list or a mapping."""
    if theirs is None:
        return
    if mine is None:
        ok, wanted = not isinstance(theirs, Tensor) or theirs.numel() == 1, "no tensor"
    elif isinstance(mine, bool):
        ok, wanted = isinstance(theirs, bool), "true or false"
    elif isinstance(mine, int | float) or (isinstance(mine, Tensor) and mine.numel() == 1):
        ok, wanted = is_number(theirs), "a number"
    elif isinstance(mine, list | tuple):
        ok, wanted = isinstance(theirs, list | tuple), "a list"
        if ok and mine and all(is_number(each) for each in mine):
            ok, wanted = all(is_number(each) for each in theirs), "a list of numbers"
    elif isinstance(mine, Mapping):
        ok, wanted = isinstance(theirs, Mapping), "a mapping"
    elif isinstance(mine, str):
        ok, wanted = isinstance(theirs, str), "text"
    else:
        return
    if not ok:
        raise wrong("", where, theirs, wanted)


def is_number(value: Any) -> bool:
    """Whether `value` is a number, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(path: Any, key: str, value: Any, kind: Any, wanted: str) -> None:
    if not isinstance(value, kind):
        raise wrong(path, key, value, wanted)


def wrong(path: Any, key: str, value: Any, wanted: str) -> CheckpointError:
    """Return the error for a `value` of another type than `wanted` under `key` in the checkpoint `path`, if any."""
    where = f"{path}: {key}" if str(path) else key
    return CheckpointError(f"{where} is a {type(value).__name__}", expected=wanted, do=DO)
