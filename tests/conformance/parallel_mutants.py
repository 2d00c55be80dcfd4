"""Realistic bugs of strategies that cut the model, each put into `parallel`: what the conformance kit must notice.

Each mutant replaces one function of the package while the kit runs; processes inherit it, since they are forked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import frozen

from stratagem.api import world
from stratagem.runtime import connection
from stratagem_parallel import gradients, parts, strategy
from stratagem_parallel.conformance import ExpertsConformance
from stratagem_parallel.context.attention import SequenceAttention
from stratagem_parallel.exchange import gather
from stratagem_parallel.expert import dispatch
from stratagem_parallel.pipeline import pipeline
from stratagem_parallel_unchanged.tensor import moves, rules
from stratagem_testing import StrategyConformance

TENSOR = {"name": "parallel", "tensor": 2}
PIPELINE = {"name": "parallel", "pipeline": 2}
CONTEXT = {"name": "parallel", "context": 2, "context_method": "all_gather"}
EXPERT = {"name": "parallel", "expert": 2}


@frozen
class Mutant:
    """A bug: what replaces `name` of `owner`, under the strategy `plugin`; `check` is to notice it."""

    plugin: dict[str, Any]
    owner: Any
    name: str
    replacement: Any
    check: str
    kit: type[StrategyConformance] = StrategyConformance

    def caught(self) -> bool:
        """Whether the check fails with the bug."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.owner, self.name, self.replacement)
            return not self.passes()

    def passes(self) -> bool:
        """Whether the check passes; it must not be skipped."""
        cls = type("Mutated", (self.kit,), {"plugin": self.plugin, "world_sizes": (2,), "limit_s": 20})
        checks = [check for name, check in cls.checks() if name == self.check]
        assert len(checks) == 1, f"no check {self.check!r}"
        try:
            checks[0]()
        except pytest.skip.Exception as skip:
            raise AssertionError(f"{self.check} was skipped: {skip}") from skip
        except Exception:
            return False
        return True


MUTANTS: dict[str, Mutant] = {}
WEIGHTS = "test_weights_equal_one_process[2]"


def mutant(plugin: dict[str, Any], owner: Any, name: str, check: str = WEIGHTS, **options: Any) -> Any:
    """Enter a function into `MUTANTS`; it replaces `name` of `owner`, and its own name is the bug."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        MUTANTS[function.__name__] = Mutant(plugin, owner, name, function, check, **options)
        return function

    return enter


# --- tensor ------------------------------------------------------------------------------------------------------


@mutant(TENSOR, moves._Sum, "backward")
def gradients_doubled_by_the_axis(ctx, gradient):
    return 2 * gradient, None


@mutant(TENSOR, moves._SumOfGradients, "backward", "test_unusual_models[2-Tied]")
def gradients_of_parts_not_summed(ctx, gradient):
    return gradient, None


@mutant(TENSOR, rules, "of_this_part", "test_parts_of_a_layer_draw_differently[2]")
def same_dropout_on_all_slices(line, device):
    return contextlib.nullcontext()


@mutant(TENSOR, strategy.ParallelStrategy, "_share_random_numbers", "test_parts_of_a_layer_draw_differently[2]")
def other_dropout_on_what_all_hold(self, run):
    pass


MUTANTS["data_not_shared_along_tensor"] = Mutant(
    TENSOR, world, "DATA_AXES", (*world.DATA_AXES, "tensor"), "test_weights_equal_one_process[2]"
)


@mutant(TENSOR, connection, "split_readers", "test_metrics_are_those_of_all_samples[2]")
def metrics_counted_once_a_rank(collectives, mesh):
    return collectives


@mutant(TENSOR, strategy, "copies", "test_clip_by_norm[2]")
def copies_counted_twice_in_the_norm(parameter, mesh, stages=1):
    return 1


# --- pipeline ----------------------------------------------------------------------------------------------------

_begin = pipeline._TrainingStep.__init__


@mutant(PIPELINE, pipeline._TrainingStep, "__init__")
def losses_of_micro_batches_added(self, pipeline, parts, batch_idx, divisor):
    _begin(self, pipeline, parts, batch_idx, divisor)
    self.factor = 1 / divisor


@mutant(PIPELINE, pipeline._TrainingStep, "__init__", "test_accumulation[2]")
def loss_not_divided_by_the_window(self, pipeline, parts, batch_idx, divisor):
    _begin(self, pipeline, parts, batch_idx, 1)


@mutant(PIPELINE, pipeline.Pipeline, "sum_shared_gradients", "test_unusual_models[2-Scalar]")
def gradients_of_two_stages_not_summed(self):
    pass


_optimizer_state = strategy.optimizer_state


@mutant(PIPELINE, strategy, "optimizer_state", "test_save_load_and_continue[2-2]")
def optimizer_state_of_a_stage_lost(*arguments):
    state = _optimizer_state(*arguments)
    return state | {"state": {name: entry for name, entry in state["state"].items() if not name.startswith("net.4")}}


# --- context -----------------------------------------------------------------------------------------------------


@mutant(CONTEXT, SequenceAttention, "_gathered")
def causal_mask_without_offset(self, query, key, value, mask, is_causal, options):
    key, value = gather(key, -2, self.over), gather(value, -2, self.over)
    return self.attend(query, key, value, attn_mask=mask, is_causal=is_causal, **options)


_averaged = gradients.averaged


@mutant(CONTEXT, gradients, "averaged")
def gradients_summed_over_parts_of_a_sequence(flat, index, groups, like, over, reduce):
    future = torch.futures.Future()
    future.set_result(_averaged(flat, index, groups, like, over, reduce).wait() * over.world_size)
    return future


@mutant(CONTEXT, parts, "_different_metrics", "test_metrics_are_those_of_all_samples[2]")
def metrics_of_parts_not_compared(expected, logged, tolerance):
    return {}


# --- expert ------------------------------------------------------------------------------------------------------


@mutant(EXPERT, dispatch._ScaleGradient, "backward", kit=ExpertsConformance)
def gradients_of_experts_not_divided(ctx, gradient):
    return gradient, None


@mutant(EXPERT, dispatch.DispatchedExperts, "_compute", kit=ExpertsConformance)
def tokens_of_other_ranks_ignored(self, rows, numbers):
    first = torch.arange(len(rows)) < len(rows) // 2
    return _compute(self, rows * first[:, None], numbers)


_compute = dispatch.DispatchedExperts._compute
