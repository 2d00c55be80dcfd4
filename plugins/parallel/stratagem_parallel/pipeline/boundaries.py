"""What passes from stage to stage: tensors of known shapes, in containers, and messages that carry them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch.utils import _pytree as pytree

from stratagem.distributed.process_group import MESSAGE_TAG
from stratagem.errors import ConfigError
from stratagem_parallel.exchange import ACTIVATIONS

if TYPE_CHECKING:
    from stratagem.api import Collectives

#: Types of values that may pass from stage to stage, besides tensors, where they are the same for each micro-batch.
_NUMBERS = (str, int, float, bool, torch.Size, torch.dtype, torch.device, type(None))


@frozen
class TensorForm:
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def has_gradient(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


@frozen
class Elsewhere:
    """Stands for a value of a class that does not pass from stage to stage, such as a cache."""

    kind: str

    def _refuse(self, *_: Any) -> Any:
        raise ConfigError(
            f"a {self.kind} that a stage of the pipeline made is used on another one", expected="tensors and numbers",
            do="leave it out of what the model returns (such as use_cache=False)",
        )  # fmt: skip

    __getitem__ = __iter__ = __len__ = __bool__ = __call__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()


@frozen(slots=False)
class Form:
    """What a stage sends: its containers, and for each leaf a `TensorForm`, or a value that is always the same."""

    #: The containers with numbers for their leaves: torch's own description of a tree cannot be pickled silently.
    template: Any
    leaves: tuple[Any, ...]

    @functools.cached_property
    def spec(self) -> Any:
        register(self.template)
        return pytree.tree_structure(self.template)

    @property
    def tensors(self) -> list[TensorForm]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]


def register(value: Any) -> None:
    """Tell torch how values of users' classes in `value` are taken apart: dataclasses, and dictionaries."""
    for leaf in pytree.tree_leaves(value):
        kind = type(leaf)
        is_own = issubclass(kind, dict) or dataclasses.is_dataclass(kind)
        if is_own and kind not in pytree.SUPPORTED_NODES and not isinstance(leaf, Elsewhere):
            pytree.register_pytree_node(
                kind, lambda value: (list(_fields(value).values()), list(_fields(value))),
                lambda values, names, kind=kind: kind(**dict(zip(names, values, strict=True))),  # type: ignore[misc]
            )  # fmt: skip
            register(leaf)


def _fields(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else vars(value)


def tensors_within(value: Any) -> list[torch.Tensor]:
    """Return the tensors in `value`, also those that objects of other classes hold."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, str | bytes | int | float | type | torch.nn.Module | None) or id(each) in seen:
            continue
        else:
            seen.add(id(each))
            rest += each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple | set) else ()
            rest += getattr(each, "__dict__", {}).values()
    return found


def form_of(value: Any) -> Form:
    """Return the form of `value`; what is neither a tensor nor a number is left out, see `Elsewhere`."""
    leaves, spec = pytree.tree_flatten(value)
    found = [
        TensorForm(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor)
        else leaf if isinstance(leaf, _NUMBERS) else Elsewhere(type(leaf).__name__)
        for leaf in leaves
    ]  # fmt: skip
    return Form(pytree.tree_unflatten(list(range(len(found))), spec), tuple(found))


def tensors_in(value: Any, form: Form, stage: int) -> list[torch.Tensor]:
    """Return the tensors of `value`, which must have `form`.

    Raises:
        ConfigError: its form differs.
    """
    leaves, spec = pytree.tree_flatten(value)
    same = spec == form.spec and all(
        (tuple(leaf.shape), leaf.dtype) == (known.shape, known.dtype)
        if isinstance(leaf, torch.Tensor) and isinstance(known, TensorForm)
        else not isinstance(leaf, torch.Tensor) and (isinstance(known, Elsewhere) or leaf == known)
        for leaf, known in zip(leaves, form.leaves, strict=False)
    )
    if not same:
        raise ConfigError(
            f"stage {stage} of the pipeline returned {_shown(leaves)} for one micro-batch and {_shown(form.leaves)} "
            "for another of the same shape",
            expected="shapes that depend on the shapes of inputs alone", do="pad what differs",
        )  # fmt: skip
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _shown(leaves: Any) -> str:
    return ", ".join(str(tuple(each.shape)) if hasattr(each, "shape") else repr(each) for each in leaves)


def assembled(tensors: list[torch.Tensor], form: Form) -> Any:
    """Return `tensors` in the containers of `form`."""
    rest = iter(tensors)
    leaves = [next(rest) if isinstance(leaf, TensorForm) else leaf for leaf in form.leaves]
    return pytree.tree_unflatten(leaves, form.spec)


class Messages:
    """Sends tensors to ranks of the pipeline, and receives them. Both sides call in the same order."""

    def __init__(self, among: Collectives, device: torch.device) -> None:
        self.among, self.device = among, device
        self._sent: list[tuple[Any, Any]] = []

    def send(self, tensors: list[torch.Tensor], to: int) -> None:
        """Start to send `tensors` to rank `to` of the pipeline; they must not change until `finish`."""
        import torch.distributed as dist

        local = [each.detach().to(self.among.message_device).contiguous() for each in tensors]
        num_bytes, size = sum(each.nbytes for each in local), self.among.world_size
        self.among.traffic.add("send", num_bytes, size, len(local), sender=ACTIVATIONS)
        messages = [self._message(dist.isend, each, to) for each in local]
        self._sent = [each for each in self._sent if not each[0].is_completed()]
        self._sent += [(work, local) for work in dist.batch_isend_irecv(messages)] if messages else []

    def receive(self, forms: list[TensorForm], source: int) -> tuple[list[Any], list[torch.Tensor]]:
        """Start to receive tensors of `forms` from rank `source`; return what to wait for, and the tensors."""
        import torch.distributed as dist

        tensors = [torch.empty(form.shape, dtype=form.dtype, device=self.among.message_device) for form in forms]
        messages = [self._message(dist.irecv, each, source) for each in tensors]
        return (dist.batch_isend_irecv(messages) if messages else []), tensors

    def _message(self, direction: Any, tensor: torch.Tensor, peer: int) -> Any:
        import torch.distributed as dist

        return dist.P2POp(direction, tensor, group=self.among.group, group_peer=peer, tag=MESSAGE_TAG)

    def received(self, pending: tuple[list[Any], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Wait for what `receive` returned, and return the tensors on the device."""
        for work in pending[0]:
            work.wait()
        return [each.to(self.device) for each in pending[1]]

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []
