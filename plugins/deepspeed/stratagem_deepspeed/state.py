"""Convert ZeRO's partitioned state to logical state, whole tensors by parameter names, and back.

[Note: ZeRO's flat tensors]
The fp32 masters of trained parameters are concatenated into a flat tensor for each parameter group (stages 1 and 2) or
each sub-group (stage 3), of which each rank holds a partition. The optimizer has only these flat tensors, so its state
is flat, too. At stages 1 and 2 a partition may begin within a parameter; at stage 3 each rank has an equal partition of
every parameter, the last of them padded. State that is swapped to a disk must be fetched before it is read, one flat
tensor at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import nn

from stratagem.api.named_state import parameter_names
from stratagem.api.state_fit import check_optimizer_state, check_weights
from stratagem.checkpoint.tensor_memory import as_gathered
from stratagem.errors import CheckpointError

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: torch's key for a module's extra state, which is not a tensor.
_EXTRA = nn.modules.module._EXTRA_STATE_KEY_SUFFIX
#: State of torch's optimizers with one value for a parameter instead of one for each element.
_COUNTS = {"step", "mu_product", "eta", "mu"}


@frozen
class Piece:
    """This rank's slice of a parameter: `length` elements, at `at` in a flat tensor and at `start` in the parameter."""

    parameter: nn.Parameter
    at: int
    length: int
    start: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.narrow(0, self.at, self.length)

    def of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(-1).narrow(0, self.start, self.length)


@frozen
class Flat:
    """A flat tensor of masters, with the `pieces` of parameters in it."""

    index: int
    tensor: torch.Tensor
    pieces: tuple[Piece, ...]


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter, partitioned or not."""
    return getattr(parameter, "ds_shape", parameter.shape)


def flats(zero: Any, *, write: bool) -> Iterator[Flat]:
    """Yield the flat tensors of ZeRO's optimizer, each fetched while it is used; if `write`, store them again."""
    groups, pieces = _layout(zero)
    for index, parameters in enumerate(groups):
        with _fetched(zero, index, write):
            tensor = _flat_tensors(zero)[index]
            yield Flat(index, tensor, tuple(pieces(parameter) for parameter in parameters))


def _layout(zero: Any) -> tuple[Any, Callable[[nn.Parameter], Piece]]:
    if hasattr(zero, "fp16_groups"):

        def piece(parameter: Any) -> Piece:
            _, at, share = zero.grad_position[zero.get_param_id(parameter)]
            start = share * zero._get_param_partition_rank(parameter)
            return Piece(parameter, at, max(0, min(share, parameter.ds_numel - start)), min(start, parameter.ds_numel))

        return zero.fp16_groups, piece
    return getattr(zero, "bit16_groups", None) or zero.bf16_groups, _mapped_piece


def _mapped_piece(parameter: Any) -> Piece:
    mapping = parameter._hp_mapping
    if mapping is None:
        return Piece(parameter, 0, 0, 0)
    master, parameter_slice = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Piece(parameter, master.start, master.numel, parameter_slice.start)


def _flat_tensors(zero: Any) -> Any:
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(zero, name):
            return getattr(zero, name)
    raise TypeError(f"{type(zero).__name__} has its masters in no attribute that this version supports")


@contextlib.contextmanager
def _fetched(zero: Any, index: int, write: bool) -> Iterator[None]:
    swaps = getattr(zero, "_swappable_optimizer_subgroup", None)
    if swaps is None or not swaps(index):
        yield
        return
    zero._optimizer_states_and_gradient_swap_in(index)
    yield
    if write:
        zero._optimizer_states_and_gradient_swap_out(index)
    else:
        zero._release_swap_buffers(index)


# --- The model ---------------------------------------------------------------------------------------------------


def model_state(module: nn.Module, zero: Any, keep: Callable[[str], bool], run: RunContext) -> dict[str, torch.Tensor]:
    """Return the whole tensors of `module` whose names `keep` accepts; of parameters, the masters. Collective."""
    own = {name: value for name, value in module.state_dict(keep_vars=True).items() if keep(name)}
    whole: dict[int, torch.Tensor] = {}
    if zero is not None:
        _check_complete(zero, run)
        for flat in flats(zero, write=False):
            for piece in flat.pieces:
                whole[id(piece.parameter)] = _whole(piece, flat.tensor, run)
    for value in own.values():
        if id(value) not in whole and hasattr(value, "ds_id"):
            whole[id(value)] = _wide(nn.Parameter(_gathered(value, run), requires_grad=False))
    return {name: whole[id(v)] if id(v) in whole else _wide(v) for name, v in own.items()}


def _wide(value: Any) -> Any:
    """Return 16-bit parameters that are not trained as fp32, like the masters of those that are."""
    if not isinstance(value, torch.Tensor):
        return value
    narrow = isinstance(value, nn.Parameter) and value.dtype in (torch.float16, torch.bfloat16)
    return value.detach().cpu().float() if narrow else value.detach()  # converted copies are on the CPU


def _check_complete(zero: Any, run: RunContext) -> None:
    """Check that the ranks' pieces cover every parameter: missing elements would be saved as zeros. Collective."""
    groups, pieces = _layout(zero)
    stepped = [parameter for parameters in groups for parameter in parameters]
    lengths = torch.tensor([pieces(parameter).length for parameter in stepped])
    found = run.collectives.all_reduce(lengths, "sum").tolist()
    holes = sum(1 for length, each in zip(found, stepped, strict=True) if length != shape_of(each).numel())
    if holes:
        raise CheckpointError(
            f"DeepSpeed no longer has the masters of {holes} parameters",
            expected="an engine that is still in use",
            do="save before another run uses the model",
        )


def _whole(piece: Piece, flat: torch.Tensor, run: RunContext) -> torch.Tensor:
    """Return the whole tensor of which each rank has a piece in `flat`; on ranks without need on meta. Collective."""
    whole = torch.zeros(shape_of(piece.parameter), dtype=flat.dtype, device=run.device)
    piece.of_whole(whole).copy_(piece.of(flat))
    # Elements of other ranks are zero bytes, so that the sum of bytes is exact.
    whole = run.collectives.all_reduce(whole.reshape(-1).view(torch.uint8), "sum").view(whole.dtype).view(whole.shape)
    return as_gathered(whole.cpu()) if run.needs_values else whole.to("meta")


def _gathered(parameter: Any, run: RunContext) -> torch.Tensor:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters([parameter]):
        whole: torch.Tensor = parameter.data.detach()
        return as_gathered(whole.to("cpu", copy=True)) if run.needs_values else whole.to("meta")


@torch.no_grad()
def load_model_state(
    state: Mapping[str, Any], module: nn.Module, zero: Any, strict: bool, optional: AbstractSet[str] = frozenset()
) -> None:
    """Load whole tensors into `module` and into the masters; those that are `optional` may be missing. Collective.

    Raises:
        CheckpointError: names or shapes differ (names: only if `strict`).
    """
    own = module.state_dict(keep_vars=True)
    shapes = {name: shape_of(value) if isinstance(value, torch.Tensor) else None for name, value in own.items()}
    missing = optional - set(state)
    check_weights({name: shape for name, shape in shapes.items() if name not in missing}, state, strict)
    given = {id(own[name]): value for name, value in state.items() if name in own}
    if zero is not None:
        for flat in flats(zero, write=True):
            for piece in flat.pieces:
                if id(piece.parameter) in given:
                    piece.of(flat.tensor).copy_(piece.of_whole(given[id(piece.parameter)]))
            if hasattr(zero, "_reassign_or_swap_out_partitioned_parameters"):
                zero._reassign_or_swap_out_partitioned_parameters(flat.index)
    stepped = set() if zero is None else {id(parameter) for group in _layout(zero)[0] for parameter in group}
    with torch.no_grad():
        for value in own.values():
            if not isinstance(value, torch.Tensor) or id(value) not in given:
                continue
            if not hasattr(value, "ds_id"):
                value.data.copy_(given[id(value)])
            elif id(value) not in stepped:
                _scatter(value, given[id(value)])
    _gather_persistent(zero)
    for name, part in module.named_modules():  # extra state, which is not a tensor
        key = f"{name}.{_EXTRA}" if name else _EXTRA
        if key in state:
            part.set_extra_state(state[key])


def _scatter(parameter: Any, whole: torch.Tensor) -> None:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(whole)


def _gather_persistent(zero: Any) -> None:
    """Update stage 3's persistent parameters, small ones that stay gathered on each rank."""
    persistent = getattr(zero, "persistent_parameters", ())
    if persistent:
        persistent[0].partition(persistent, has_been_updated=False)
        persistent[0].all_gather(persistent)


def masters(zero: Any) -> list[tuple[nn.Parameter, int, torch.Tensor]]:
    """Return this rank's pieces of the masters: the parameter, the start in it, and the values."""
    return [
        (piece.parameter, piece.start, piece.of(flat.tensor).detach().clone())
        for flat in flats(zero, write=False)
        for piece in flat.pieces
        if piece.length
    ]


@torch.no_grad()
def put_masters(kept: list[tuple[nn.Parameter, int, torch.Tensor]], zero: Any, dtype: torch.dtype) -> None:
    """Load the masters of an earlier engine, where the parameter still equals them when rounded to `dtype`."""
    known = {(id(parameter), start): part for parameter, start, part in kept}
    for flat in flats(zero, write=True):
        for piece in flat.pieces:
            part, mine = known.get((id(piece.parameter), piece.start)), piece.of(flat.tensor)
            if part is not None and part.shape == mine.shape and torch.equal(part.to(dtype), mine.to(dtype)):
                mine.copy_(part)


# --- The optimizer -----------------------------------------------------------------------------------------------


def optimizer_state(zero: Any, module: nn.Module, groups: list[list[str]], run: RunContext) -> dict[str, Any]:
    """Return the state of ZeRO's optimizer by parameter names. Collective."""
    names, state = parameter_names(module), {}
    _check_complete(zero, run)
    for flat in flats(zero, write=False):
        entry = zero.optimizer.state.get(flat.tensor, {})
        for piece in flat.pieces if entry else ():
            state[names[id(piece.parameter)]] = {
                key: _whole(piece, value, run) if _is_flat(value) else _as_torch_counts(key, value)
                for key, value in entry.items()
            }
    order = [name for group in groups for name in group if name in state]
    options = [{key: value for key, value in group.items() if key != "params"} for group in zero.param_groups]
    return {
        "state": {name: state[name] for name in order},
        "param_groups": [{**group, "params": names} for group, names in zip(options, groups, strict=True)],
    }


@torch.no_grad()
def load_optimizer_state(state: dict[str, Any], zero: Any, module: nn.Module, groups: list[list[str]]) -> None:
    """Load logical `state` into ZeRO's optimizer.

    Raises:
        CheckpointError: it belongs to other parameters or other groups.
    """
    check_optimizer_state(state, [name for group in groups for name in group], [len(group) for group in groups])
    names = parameter_names(module)
    for flat in flats(zero, write=True):
        if not any(names[id(piece.parameter)] in state["state"] for piece in flat.pieces):
            _start_over(zero.optimizer.state.get(flat.tensor, {}))
        for piece in flat.pieces:
            saved = state["state"].get(names[id(piece.parameter)], {})
            entry = zero.optimizer.state[flat.tensor] if saved else {}
            for key, value in saved.items():
                if _belongs_to(key, value, piece.parameter):
                    if not _is_flat(entry.get(key)):
                        entry[key] = torch.zeros_like(flat.tensor)
                    piece.of(entry[key]).copy_(piece.of_whole(value))
                else:
                    entry[key] = _as_optimizer_counts(value, zero.optimizer)
    for group, saved_group in zip(zero.param_groups, state["param_groups"], strict=True):
        known = {*group, "initial_lr"} - {"params"}
        group.update({key: value for key, value in saved_group.items() if key in known})


def _start_over(entry: dict[str, Any]) -> None:
    """Reset the state of parameters that had not been stepped when it was saved."""
    for key, value in entry.items():
        if isinstance(value, torch.Tensor):
            value.zero_()
        elif key == "step":
            entry[key] = 0


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _belongs_to(key: str, value: Any, parameter: nn.Parameter) -> bool:
    """Whether `value` has one element for each of the parameter's, which may be a scalar."""
    return isinstance(value, torch.Tensor) and value.shape == shape_of(parameter) and key not in _COUNTS


def _as_torch_counts(key: str, value: Any) -> Any:
    """Return step counts as tensors, as torch's optimizers have them; DeepSpeed's have numbers.

    Each parameter gets its own tensor; parameters of one flat tensor have a common one.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()
    return torch.tensor(float(value)) if key == "step" else value


def _as_optimizer_counts(value: Any, optimizer: Any) -> Any:
    if type(optimizer).__module__.startswith("deepspeed.") and isinstance(value, torch.Tensor) and value.dim() == 0:
        return int(value.item())
    return value.clone() if isinstance(value, torch.Tensor) else value
