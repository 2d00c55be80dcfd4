"""Run batches through the stages: a schedule of micro-batches in training, one pass in evaluation.

[Note: forms]
What passes between two stages has the same form (containers, shapes, dtypes) for all micro-batches of one shape. It is
found when such a micro-batch is seen first: one goes through the stages without gradients, and each stage tells all
ranks of the pipeline the form of its output, or the error that it raised. So messages need no headers, and what cannot
pass is refused on all ranks with the same words.
"""

from __future__ import annotations

import contextlib
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from stratagem.errors import ConfigError, StratagemError
from stratagem_parallel.buffers import unchanged
from stratagem_parallel.pipeline.boundaries import Form, Messages, assembled, form_of, tensors_in
from stratagem_parallel.pipeline.outline import Outline
from stratagem_parallel.pipeline.random_numbers import generators_of, seed_of
from stratagem_parallel.pipeline.schedules import Action, actions, rank_of_stage, schedule_named
from stratagem_parallel.pipeline.stages import Cut
from stratagem_transforms.forward_state import RecomputedState

_NOTHING = contextlib.nullcontext()


class StageRunner:
    """The stages of this rank.

    Args:
        cut: the model's stages.
        among: collectives over the ranks of the pipeline.
        device: on which stages compute.
        schedule: its name.
        microbatches: of a batch.
        checkpoint_mode: "always", "except_last" or "never".
        whole: returns what may be sent of a stage's output, of which this rank may hold a slice.
        outline: tells the forms of outputs on other ranks, in a plan; else these ranks do.
    """

    def __init__(
        self, cut: Cut, among: Any, device: torch.device, schedule: str, microbatches: int, checkpoint_mode: str,
        whole: Callable[[Any], Any], outline: Outline | None = None,
    ) -> None:  # fmt: skip
        self.cut, self.among, self.device = cut, among, device
        self.schedule, self.microbatches, self.checkpoint_mode = schedule, microbatches, checkpoint_mode
        self.count, self._whole, self._outline = len(cut.stages), whole, outline
        row = schedule_named(schedule)
        self.ranks = [rank_of_stage(row, stage, among.world_size) for stage in range(self.count)]
        self.here = [stage for stage, rank in enumerate(self.ranks) if rank == among.rank]
        self.first_rank, self.last_rank = self.ranks[0], self.ranks[-1]
        self.messages = Messages(among, device)
        #: Drawn for each step; see [Note: equal generators].
        self.seed = 0
        self._forms: dict[Any, list[Form]] = {}
        #: Stages that change their input in place; in a step they get a copy, which autograd can differentiate.
        self._changing: set[int] = set()

    @property
    def order(self) -> tuple[Action, ...]:
        """What this rank does in a step."""
        return actions(self.schedule, self.among.world_size, self.count, self.microbatches)[self.among.rank]

    def compute(self, stage: int, value: Any, microbatch: int = 0) -> Any:
        """Return the output of `stage`, which is here."""
        if stage in self._changing:
            value = _copied(value)
        with generators_of(self.seed, stage, microbatch, self.device):
            return self._whole(self.cut.stages[stage].compute(value))

    # --- One pass, without gradients -----------------------------------------------------------------------------

    def evaluate(self, value: Any, key: Any, *, tell_all: bool = True) -> Any:
        """Return the output of the last stage for `value`, on all ranks if `tell_all`. Collective.

        Args:
            value: the input of the first stage; used on its rank.
            key: what decides the forms of outputs; the same on all ranks.
        """
        forms = self._forms.get(key)
        if forms is None:
            forms = self._forms[key] = []
        if tell_all:
            self.seed = seed_of(0, 0)
        known = len(forms) == self.count
        for stage in range(self.count):
            here = self.ranks[stage] == self.among.rank
            if stage and self.ranks[stage - 1] != self.ranks[stage]:
                value = self._pass_on(value, stage, forms[stage - 1])
            if known:
                value = self.compute(stage, value) if here else value
                continue
            form: Form | BaseException | None
            if here:
                value, form = self._first_output(stage, value)
            else:
                form = self._form_elsewhere(stage, value, forms)
            forms.append(self._told(form, stage))
        if not tell_all:
            return value
        is_last = self.among.rank == self.last_rank
        if is_last:
            tensors = [each.contiguous() for each in tensors_in(value, forms[-1], self.count - 1)]
        else:
            tensors = [torch.empty(f.shape, dtype=f.dtype, device=self.device) for f in forms[-1].tensors]
        tensors = [self.among.unchecked.broadcast(each, self.last_rank) for each in tensors]
        return value if is_last else assembled(tensors, forms[-1])

    def _pass_on(self, value: Any, stage: int, form: Form) -> Any:
        if self.ranks[stage - 1] == self.among.rank:
            self.messages.send(tensors_in(value, form, stage - 1), self.ranks[stage])
            self.messages.finish()
        elif self.ranks[stage] == self.among.rank:
            pending = self.messages.receive(form.tensors, self.ranks[stage - 1])
            return assembled(self.messages.received(pending), form)
        return value

    def _first_output(self, stage: int, value: Any) -> tuple[Any, Form | BaseException]:
        try:
            given = value if torch.is_inference_mode_enabled() else _copied(value)
            output = self.compute(stage, given)
            if given is not value and any(each._version for each in _tensors(given)):
                self._changing.add(stage)
            return output, form_of(output, stage, self.cut.passes_numbers)
        except Exception as error:  # noqa: BLE001 - raised again on all ranks
            return None, error

    def _form_elsewhere(self, stage: int, value: Any, forms: list[Form]) -> Form | None:
        """Return the form of the output of another rank's `stage` in a plan, in which that rank does not tell it."""
        if self._outline is None:
            return None
        return self._outline.form_after(stage, forms[-1] if stage else self._whole(value))

    def _told(self, form: Form | BaseException | None, stage: int) -> Form:
        """Return the form of the output of `stage`, which its rank gives; raise its error on all ranks. Collective."""
        error = form if isinstance(form, BaseException) else None
        text = None if error is None else f"{type(error).__name__}: {error}"
        message = (form if error is None else None, text, isinstance(error, StratagemError))
        found, text, is_known = self.among.broadcast_object(message, self.ranks[stage])
        if error is not None:
            raise error
        if text is not None and is_known:
            raise ConfigError(text.partition(": ")[2])
        if text is not None:
            raise StratagemError(f"stage {stage} of the pipeline failed with {text}", do="this rank stops with it")
        return found  # type: ignore[no-any-return]

    # --- A step --------------------------------------------------------------------------------------------------

    def knows(self, key: Any) -> bool:
        """Whether `learn_forms` need not send micro-batches of `key` through the stages."""
        return len(self._forms.get(key, ())) == self.count

    def learn_forms(self, key: Any, capture: Callable[[], Any]) -> list[Form]:
        """Return the form of each stage's output for micro-batches of `key`; see [Note: forms]. Collective.

        Args:
            key: what decides the forms.
            capture: returns the input of the first stage; called on its rank.
        """
        if not self.knows(key):
            with torch.no_grad(), unchanged(self._users()):
                value = error = None
                if self.among.rank == self.first_rank or self._outline is not None:
                    try:
                        value = capture()
                    except Exception as raised:  # noqa: BLE001 - raised again on all ranks
                        error = raised
                self.among.fail_together(error)
                self.evaluate(value, key, tell_all=False)
            torch.clear_autocast_cache()  # of weights without gradients
        return self._forms[key]

    def _users(self) -> list[Any]:
        """Return the module that was cut, as the stages that are here know it."""
        found = [getattr(self.cut.stages[stage].compute, "user", None) for stage in self.here]
        return [each for each in found if each is not None]

    def recomputed(self) -> dict[int, RecomputedState]:
        """Return the state of each stage that is here, if backward computes stages again."""
        if self.checkpoint_mode == "never":
            return {}
        (user,) = set(self._users())
        return {s: RecomputedState(*map(user.get_submodule, self.cut.stages[s].modules)) for s in self.here}

    def step(
        self, forms: Sequence[Form], capture: Callable[[int], Any], loss_of: Callable[[int, Any, Any], torch.Tensor],
        weights: Callable[[int], list[nn.Parameter]],
    ) -> None:  # fmt: skip
        """Run forward and backward of all micro-batches, in the order of the schedule. Collective.

        Args:
            forms: of the stages' outputs.
            capture: returns the input of the first stage for a micro-batch.
            loss_of: returns the loss to differentiate, for a micro-batch, the input and the output of the last stage.
            weights: returns the parameters of a stage, to differentiate apart from its inputs.
        """
        step = _Step(self, forms, capture, loss_of, weights)
        for action in self.order:
            # Backward computes in the dtypes of forward; in autocast it would cast some operations twice.
            backward = torch.autocast(self.device.type, enabled=False) if action.kind in "BIW" else _NOTHING
            with backward:
                getattr(step, action.kind)(action.stage, action.microbatch)
        self.messages.finish()


class _Step:
    """The values of one step. Its methods are the kinds of `Action`."""

    def __init__(self, runner: StageRunner, forms: Any, capture: Any, loss_of: Any, weights: Any) -> None:
        self.runner, self.forms, self.capture = runner, forms, capture
        self.loss_of, self.weights = loss_of, weights
        #: By (stage, micro-batch): inputs that are on the way, inputs of a stage, roots of backward, their gradients.
        self.pending: dict[tuple[str, int, int], Any] = {}
        self.inputs: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.roots: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.gradients: dict[tuple[int, int], list[Any]] = {}
        self.values: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.deferred: dict[tuple[int, int], Any] = {}
        self.states = runner.recomputed()

    def _is_here(self, stage: int) -> bool:
        return stage in self.runner.here

    # --- Forward -------------------------------------------------------------------------------------------------

    def recv_F(self, stage: int, microbatch: int) -> None:  # noqa: N802 - a kind
        source = self.runner.ranks[stage - 1]
        received = self.runner.messages.receive(self.forms[stage - 1].tensors, source)
        self.pending["F", stage, microbatch] = received

    def send_F(self, stage: int, microbatch: int) -> None:  # noqa: N802
        self.runner.messages.send(self.values.pop((stage, microbatch)), self.runner.ranks[stage + 1])

    def F(self, stage: int, microbatch: int) -> None:  # noqa: N802
        key = stage, microbatch
        value = self._input(stage, microbatch)
        output = self._compute(stage, microbatch, value)
        if stage == self.runner.count - 1:
            self.roots[key] = [self.loss_of(microbatch, value, output)]
            return
        tensors = tensors_in(output, self.forms[stage], stage)
        self.roots[key] = self.values[key] = tensors

    def _input(self, stage: int, microbatch: int) -> Any:
        if stage == 0:
            self.inputs[stage, microbatch] = []
            return self.capture(microbatch)
        form = self.forms[stage - 1]
        if self._is_here(stage - 1):
            tensors = [each.detach() for each in self.values.pop((stage - 1, microbatch))]
        else:
            tensors = self.runner.messages.received(self.pending.pop(("F", stage, microbatch)))
        for tensor, known in zip(tensors, form.tensors, strict=True):
            tensor.requires_grad_(known.has_gradient)
        self.inputs[stage, microbatch] = tensors
        return assembled(tensors, form)

    def _compute(self, stage: int, microbatch: int, value: Any) -> Any:
        if self._is_recomputed(microbatch):
            contexts = self.states[stage].contexts
            return checkpoint(self.runner.compute, stage, value, microbatch, use_reentrant=False, context_fn=contexts)
        return self.runner.compute(stage, value, microbatch)

    def _is_recomputed(self, microbatch: int) -> bool:
        mode = self.runner.checkpoint_mode
        return mode == "always" or (mode == "except_last" and microbatch < self.runner.microbatches - 1)

    # --- Backward ------------------------------------------------------------------------------------------------

    def recv_B(self, stage: int, microbatch: int) -> None:  # noqa: N802
        forms = [form for form in self.forms[stage].tensors if form.has_gradient]
        source = self.runner.ranks[stage + 1]
        self.pending["B", stage, microbatch] = self.runner.messages.receive(forms, source)

    def send_B(self, stage: int, microbatch: int) -> None:  # noqa: N802
        self.runner.messages.send(self.gradients.pop((stage, microbatch)), self.runner.ranks[stage - 1])

    def _roots(self, stage: int, microbatch: int) -> tuple[list[torch.Tensor], list[Any]]:
        """Return what to differentiate, and its gradients."""
        roots = self.roots.pop((stage, microbatch))
        if stage == self.runner.count - 1:
            return roots, [None]
        if self._is_here(stage + 1):
            gradients = self.gradients.pop((stage + 1, microbatch))
        else:
            gradients = self.runner.messages.received(self.pending.pop(("B", stage, microbatch)))
        known = self.forms[stage].tensors
        floating = [root for root, form in zip(roots, known, strict=True) if form.has_gradient]
        pairs = [pair for pair in zip(floating, gradients, strict=True) if pair[0].requires_grad]
        return [root for root, _ in pairs], [gradient for _, gradient in pairs]

    def B(self, stage: int, microbatch: int) -> None:  # noqa: N802
        roots, gradients = self._roots(stage, microbatch)
        if roots:
            torch.autograd.backward(roots, gradients)
        self._keep_input_gradients(stage, microbatch)

    def _keep_input_gradients(self, stage: int, microbatch: int) -> None:
        inputs = self.inputs.pop((stage, microbatch))
        if stage:
            floating = [each for each in inputs if each.requires_grad]
            self.gradients[stage, microbatch] = [
                torch.zeros_like(each) if each.grad is None else each.grad for each in floating
            ]

    def I(self, stage: int, microbatch: int) -> None:  # noqa: N802, E743
        from torch.distributed.pipelining._backward import stage_backward_input

        if self._is_recomputed(microbatch):  # apart from each other, both parts would compute forward again
            self.B(stage, microbatch)
            self.deferred[stage, microbatch] = [], []
            return
        roots, gradients = self._roots(stage, microbatch)
        inputs = [each for each in self.inputs[stage, microbatch] if each.requires_grad]
        if not inputs or not roots:  # all of it is backward of weights
            self.deferred[stage, microbatch] = roots, gradients
            self._keep_input_gradients(stage, microbatch)
            return
        # It detaches the roots in place, which views refuse.
        roots = [root.clone() if root._is_view() else root for root in roots]
        last = stage == self.runner.count - 1
        _, groups = stage_backward_input(roots, None if last else gradients, inputs, iter(self.weights(stage)))
        self.deferred[stage, microbatch] = groups
        self._keep_input_gradients(stage, microbatch)

    def W(self, stage: int, microbatch: int) -> None:  # noqa: N802
        from torch.distributed.pipelining._backward import stage_backward_weight

        deferred = self.deferred.pop((stage, microbatch))
        if not isinstance(deferred, tuple):
            stage_backward_weight(iter(self.weights(stage)), deferred)
        elif deferred[0]:
            torch.autograd.backward(*deferred)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _copied(value: Any) -> Any:
    """Return `value` with copies of its tensors."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def signature(value: Any) -> Any:
    """Return what decides the forms of outputs for the input or the micro-batch `value`; hashable."""
    leaves, spec = pytree.tree_flatten(value)
    return str(spec), tuple(map(_signature_of_leaf, leaves))


def _signature_of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, UserDict):
        return signature(dict(leaf))
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
