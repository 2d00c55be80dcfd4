"""Run batches through the stages: a schedule of micro-batches in training, one pass in evaluation.

[Note: forms]
What passes between two stages has the same form (containers, shapes, dtypes) for all micro-batches of one shape. It is
found when such a micro-batch is seen first: see [Note: what a stage needs] in `ghosts`. So messages need no headers.
"""

from __future__ import annotations

import contextlib
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from stratagem.errors import ConfigError, StratagemError
from stratagem_parallel.pipeline.boundaries import Form, Messages, assembled, tensors_in
from stratagem_parallel.pipeline.ghosts import Cut, Given
from stratagem_parallel.pipeline.outline import Outline
from stratagem_parallel.pipeline.random_numbers import AROUND, generators_of, seed_of
from stratagem_parallel.pipeline.schedules import Action, actions, rank_of_stage, schedule_named
from stratagem_transforms.forward_state import RecomputedState, unchanged

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
        outline: computes what other ranks would, in a plan.
    """

    def __init__(
        self, cut: Cut, among: Any, device: torch.device, schedule: str, microbatches: int, checkpoint_mode: str,
        whole: Callable[[Any], Any], outline: Outline | None = None,
    ) -> None:  # fmt: skip
        self.cut, self.among, self.device = cut, among, device
        self.schedule, self.microbatches, self.checkpoint_mode = schedule, microbatches, checkpoint_mode
        self.count, self.whole, self.outline = cut.count, whole, outline
        row = schedule_named(schedule)
        self.ranks = [rank_of_stage(row, stage, among.world_size) for stage in range(self.count)]
        self.here = [stage for stage, rank in enumerate(self.ranks) if rank == among.rank]
        self.first_rank, self.last_rank = self.ranks[0], self.ranks[-1]
        self.messages = Messages(among, device)
        #: Drawn for each step; see [Note: equal generators].
        self.seed = 0
        self._forms: dict[Any, list[Form]] = {}

    @property
    def order(self) -> tuple[Action, ...]:
        """What this rank does in a step."""
        return actions(self.schedule, self.among.world_size, self.count, self.microbatches)[self.among.rank]

    def compute(self, stage: int, given: Given, microbatch: int = 0) -> Any:
        """Return the output of `stage`, which is here."""
        with generators_of(self.seed, AROUND, microbatch, self.device):
            return self.whole(self.cut.compute(stage, given))

    # --- One pass, without gradients -----------------------------------------------------------------------------

    def evaluate(self, given: Given, key: Any) -> Any:
        """Return the output of the last stage, on all ranks. Collective.

        Args:
            given: the call of the model.
            key: what decides the forms of outputs; the same on all ranks.
        """
        self.seed = seed_of(0, 0)
        forms = self.learn_forms(key, lambda: given)
        passed: Any = {}
        for stage, rank in enumerate(self.ranks):
            if stage and self.ranks[stage - 1] != rank:
                passed = self._pass_on(passed, stage, forms[stage - 1])
            if rank == self.among.rank:
                passed = self.compute(stage, evolve(given, tensors=passed))
        tensors = tensors_in(passed, forms[-1], self.count - 1) if self.among.rank == self.last_rank else None
        return assembled(self.everywhere(tensors, forms[-1], self.last_rank), forms[-1])

    def everywhere(self, tensors: list[torch.Tensor] | None, form: Form, rank: int) -> list[torch.Tensor]:
        """Return `tensors` of `rank`, which have `form`, on all ranks. Collective."""
        if tensors is None:
            tensors = [torch.empty(f.shape, dtype=f.dtype, device=self.device) for f in form.tensors]
        return [self.among.unchecked.broadcast(each.to(self.device).contiguous(), rank) for each in tensors]

    def _pass_on(self, value: Any, stage: int, form: Form) -> Any:
        if self.ranks[stage - 1] == self.among.rank:
            self.messages.send(tensors_in(value, form, stage - 1), self.ranks[stage])
            self.messages.finish()
        elif self.ranks[stage] == self.among.rank:
            pending = self.messages.receive(form.tensors, self.ranks[stage - 1])
            return assembled(self.messages.received(pending), form)
        return value

    def told(self, found: Any, rank: int) -> Any:
        """Return what `rank` found of a stage, such as the form of its output; raise its error on all. Collective."""
        error = found if isinstance(found, BaseException) else None
        text = None if error is None else f"{type(error).__name__}: {error}"
        message = (found if error is None else None, text, isinstance(error, StratagemError))
        found, text, is_known = self.among.broadcast_object(message, rank)
        if error is not None:
            raise error
        if text is not None and is_known:
            raise ConfigError(text.partition(": ")[2])
        if text is not None:
            stages = " and ".join(str(each) for each, of in enumerate(self.ranks) if of == rank)
            raise StratagemError(f"stage {stages} of the pipeline failed with {text}", do="this rank stops with it")
        return found

    # --- A step --------------------------------------------------------------------------------------------------

    def knows(self, key: Any) -> bool:
        """Whether `learn_forms` need not send micro-batches of `key` through the stages."""
        return key in self._forms

    def learn_forms(self, key: Any, capture: Callable[[], Given]) -> list[Form]:
        """Return the form of each stage's output for micro-batches of `key`; see [Note: forms]. Collective.

        Args:
            key: what decides the forms.
            capture: returns the call of the model.
        """
        if not self.knows(key):
            with torch.no_grad(), unchanged([self.cut.user]):
                given = error = None
                try:
                    given = capture()
                except Exception as raised:  # noqa: BLE001 - raised again on all ranks
                    error = raised
                self.among.fail_together(error)
                assert given is not None, "it was captured"
                self._forms[key] = self.cut.learn(given, self)
            torch.clear_autocast_cache()  # of weights without gradients
        return self._forms[key]

    def recomputed(self) -> dict[int, RecomputedState]:
        """Return the state of each stage that is here, if backward computes stages again."""
        if self.checkpoint_mode == "never":
            return {}
        named = self.cut.user.get_submodule
        return {s: RecomputedState(*map(named, self.cut.stages[s].modules)) for s in self.here}

    def step(
        self, forms: Sequence[Form], capture: Callable[[int], Given],
        loss_of: Callable[[int, Any, Callable[[Any], Any]], torch.Tensor], weights: Callable[[int], list[nn.Parameter]],
    ) -> None:  # fmt: skip
        """Run forward and backward of all micro-batches, in the order of the schedule. Collective.

        Args:
            forms: of the stages' outputs.
            capture: returns the call of the model for a micro-batch.
            loss_of: returns the loss to differentiate, for a micro-batch, what was passed to the last stage, and what
                computes that stage.
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
        passed = self._passed(stage, microbatch)
        if stage == self.runner.count - 1:
            self.roots[key] = [self.loss_of(microbatch, passed, lambda given: self._compute(stage, microbatch, given))]
            return
        output = self._compute(stage, microbatch, evolve(self.capture(microbatch), tensors=passed))
        tensors = tensors_in(output, self.forms[stage], stage)
        self.roots[key] = self.values[key] = tensors

    def _passed(self, stage: int, microbatch: int) -> Any:
        """Return what the stages before pass to `stage`."""
        if stage == 0:
            self.inputs[stage, microbatch] = []
            return {}
        form = self.forms[stage - 1]
        if self._is_here(stage - 1):
            tensors = [each.detach() for each in self.values.pop((stage - 1, microbatch))]
        else:
            tensors = self.runner.messages.received(self.pending.pop(("F", stage, microbatch)))
        for tensor, known in zip(tensors, form.tensors, strict=True):
            tensor.requires_grad_(known.has_gradient)
        self.inputs[stage, microbatch] = tensors
        return assembled(tensors, form)

    def _compute(self, stage: int, microbatch: int, given: Given) -> Any:
        if self._is_recomputed(microbatch):
            contexts = self.states[stage].contexts
            return checkpoint(self.runner.compute, stage, given, microbatch, use_reentrant=False, context_fn=contexts)
        return self.runner.compute(stage, given, microbatch)

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
            forms = self.forms[stage - 1].tensors
            self.gradients[stage, microbatch] = [
                torch.zeros_like(each, requires_grad=False) if each.grad is None else each.grad
                for each, form in zip(inputs, forms, strict=True)
                if form.has_gradient
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


def signature(value: Any) -> Any:
    """Return what decides the forms of outputs for the input or the micro-batch `value`; hashable."""
    leaves, spec = pytree.tree_flatten(value)
    return str(spec), tuple(map(_signature_of_leaf, leaves))


def _signature_of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, UserDict):
        return signature(dict(leaf))
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
