"""What a plugin provides and requires: `Capabilities`, and the words that the core or first-party plugins understand.

The vocabulary is open: a plugin may use words of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from attrs import field, frozen

#: Runs in more than one process.
MULTI_PROCESS: Final = "multi-process"
#: Gradients are sent in buckets, which comm hooks may transform.
GRADIENT_BUCKETS: Final = "gradient-buckets"
#: Inner micro-batches of an accumulation window send nothing.
NO_SYNC: Final = "no-sync"
#: Gradients of several batches are summed for one step. A plugin that provides "no-sync" provides this, too.
ACCUMULATION: Final = "accumulation"
#: Every process can build the whole, unsharded state.
FULL_STATE: Final = "full-state"
#: Communicates only over ``run.peers``, so it can run inside an outer strategy.
WITHIN_TEAM: Final = "within-team"
#: Each rank steps all parameters with the gradients that its own comm hooks returned; they may differ between ranks.
LOCAL_STEPS: Final = "local-steps"
#: Groups of ranks (teams) train replicas that diverge between synchronizations.
TEAMS: Final = "teams"
#: Parameters are sharded over ranks.
SHARDED_PARAMETERS: Final = "sharded-parameters"
#: Copies of the weights are stepped: what is written into a module's parameters during a fit is lost.
STEPPED_COPIES: Final = "stepped-copies"
#: `clip_gradients` supports max_norm / max_value.
CLIP_BY_NORM: Final = "clip-by-norm"
CLIP_BY_VALUE: Final = "clip-by-value"
#: `backward` may be called inside `training_step`.
MANUAL_OPTIMIZATION: Final = "manual-optimization"
#: More than one optimizer.
MULTIPLE_OPTIMIZERS: Final = "multiple-optimizers"
#: Optimizers that call a closure several times a step (LBFGS).
CLOSURE_OPTIMIZERS: Final = "closure-optimizers"
#: A module may define `backward`, `optimizer_step` and `optimizer_zero_grad`: the strategy's `backward` hook calls
#: `Run.differentiate`, and gradients stay in ``parameter.grad`` until they are zeroed.
CUSTOM_STEP: Final = "custom-step"
#: A module may define `configure_gradient_clipping`: ``parameter.grad`` holds complete, averaged gradients (shards are
#: DTensors) on every rank, so values computed from them are correct.
CUSTOM_CLIPPING: Final = "custom-clipping"
#: The loss is scaled so that 16-bit gradients do not vanish; overflowing steps are skipped.
LOSS_SCALING: Final = "loss-scaling"
#: A step whose averaged gradients are not finite is skipped, or an error of this plugin's.
CHECKS_GRADIENTS: Final = "checks-gradients"
#: Parameters are stepped in backward, which frees their gradients: what uses gradients after it conflicts with this.
STEPS_IN_BACKWARD: Final = "steps-in-backward"
#: Gradients are computed in 16 bits: compressing them to 16 bits has no effect.
SIXTEEN_BIT_GRADIENTS: Final = "16-bit-gradients"
#: Compiles the model: a strategy that calls the model in a way that cannot be compiled conflicts with it.
COMPILATION: Final = "compilation"
#: The device a stack runs on.
DEVICE_CPU: Final = "device:cpu"
DEVICE_CUDA: Final = "device:cuda"
DEVICE_MPS: Final = "device:mps"


def _words(values: Iterable[str]) -> frozenset[str]:
    return frozenset(values)


def _provided(values: Iterable[str]) -> frozenset[str]:
    return words | {ACCUMULATION} if NO_SYNC in (words := _words(values)) else words


@frozen(kw_only=True)
class Capabilities:
    """What a plugin provides, what it requires of the others, and what it cannot be combined with."""

    #: Words that it provides.
    provides: frozenset[str] = field(default=frozenset(), converter=_provided)
    #: Words that another plugin of the run must provide.
    requires: frozenset[str] = field(default=frozenset(), converter=_words)
    #: Words that no other plugin of the run may provide.
    conflicts: frozenset[str] = field(default=frozenset(), converter=_words)
