"""Realistic bugs, each injected into a correct plugin: what the conformance kit must notice.

A mutant is a subclass with one thing wrong. `first` names the check that is expected to notice; others are tried when it
does not, so that it only saves time. Run this file to see which check caught what, and the share.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

import stratagem as sg
from stratagem import Capabilities, Strategy, hookimpl
from stratagem.api.capabilities import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CLOSURE_OPTIMIZERS,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    FULL_STATE,
    GRADIENT_BUCKETS,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
)
from stratagem.api.kinds import PrecisionPolicy
from stratagem.api.named_state import logical_optimizer_state
from stratagem.api.seeding import sampler_seed
from stratagem.api.world import Collectives
from stratagem.comm_hooks import FP16Compress
from stratagem.distributed.process_group import TorchCollectives
from stratagem.precisions import FullPrecision, MixedPrecision, ScaledPrecision, TruePrecision
from stratagem_buckets import Bucket
from stratagem_buckets.reducer import bucket_reducer
from stratagem_testing import (
    CallbackConformance,
    CommHookConformance,
    Conformance,
    PrecisionConformance,
    StrategyConformance,
)


@define(eq=False, kw_only=True)
class Replicated(Strategy):
    """Data parallelism in plain sight: averages one bucket after backward. Correct; the mutants below are not."""

    capabilities = Capabilities(
        provides={
            CLIP_BY_NORM, CLIP_BY_VALUE, CLOSURE_OPTIMIZERS, FULL_STATE, GRADIENT_BUCKETS, MANUAL_OPTIMIZATION,
            MULTI_PROCESS, MULTIPLE_OPTIMIZERS, NO_SYNC,
        }
    )  # fmt: skip

    @hookimpl
    def wrap_model(self, module, run):
        module = module.to(run.device)
        with torch.no_grad():
            for tensor in self.shared(module):
                run.collectives.broadcast(tensor.data)
        return module

    def shared(self, module):
        return [*module.parameters(), *module.buffers()]

    @hookimpl
    def backward(self, loss, module, run):
        self.differentiate(loss)
        if self.is_due(run):
            self.agree(module, run)
            self.average(self.to_average(module), run)
        return True

    def agree(self, module, run):
        """Zero the gradients that another rank's loss has reached and this one's has not."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        reached = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.uint8)
        anywhere = run.collectives.all_reduce(reached, "max").tolist()
        for parameter, is_reached in zip(trained, anywhere, strict=True):
            if is_reached and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def differentiate(self, loss):
        loss.backward()

    def is_due(self, run):
        return run.sync_gradients

    def to_average(self, module):
        return [parameter for parameter in module.parameters() if parameter.grad is not None]

    def average(self, parameters, run):
        for dtype in {parameter.dtype for parameter in parameters}:
            some = [parameter for parameter in parameters if parameter.dtype == dtype]
            flat = torch.cat([parameter.grad.flatten() for parameter in some])
            averaged = self.reduce(Bucket(buffer=flat, parameters=tuple(some)), run)
            for parameter, part in zip(some, averaged.split([p.numel() for p in some]), strict=True):
                parameter.grad = part.view_as(parameter).clone()

    def reduce(self, bucket, run):
        reducer = bucket_reducer(run)
        return (reducer(bucket) if reducer else run.collectives.average_async(bucket.buffer)).wait()


@frozen
class Mutant:
    name: str
    kit: type[Conformance]
    plugin: Any
    first: str
    tolerances: dict[str, float]

    def conformance(self, limit_s: float = 6) -> type[Conformance]:
        """Return the conformance class of this mutant."""
        return type("Mutated", (self.kit,), {"plugin": self.plugin, "limit_s": limit_s, **self.tolerances})

    def caught_by(self) -> str | None:
        """Return the name of the check that `failure` returns, None if none."""
        found = self.failure()
        return found and found[0]

    def failure(self) -> tuple[str, Exception] | None:
        """Run the check that is expected to notice, then all others; return the one that did, and what it raised."""
        checks = list(self.conformance().checks())
        for name, check in sorted(checks, key=lambda each: not each[0].startswith(self.first)):
            try:
                check()
            except pytest.skip.Exception:
                continue
            except Exception as error:
                return name, error
        return None


MUTANTS: list[Mutant] = []


def mutant(first: str, **tolerances: float) -> Callable[[type[Any]], type[Any]]:
    """Enter a class into `MUTANTS`; its name is the bug."""

    def enter(cls: type[Any]) -> type[Any]:
        kits = {
            Strategy: StrategyConformance, sg.Precision: PrecisionConformance, sg.CommHook: CommHookConformance,
            sg.Callback: CallbackConformance,
        }  # fmt: skip
        kit = next(kit for base, kit in kits.items() if issubclass(cls, base))
        MUTANTS.append(Mutant(cls.__name__, kit, cls(), first, tolerances))
        return cls

    return enter


# --- Strategies: methods of the module ---------------------------------------------------------------------------


@mutant("test_custom_step")
class DifferentiatesPastTheModule(Replicated):
    capabilities = Capabilities(provides=Replicated.capabilities.provides | {CUSTOM_STEP})


@mutant("test_custom_clipping")
class AveragesOnlyWhenItSteps(Replicated):
    capabilities = Capabilities(
        provides=Replicated.capabilities.provides - {CLIP_BY_NORM, CLIP_BY_VALUE} | {CUSTOM_CLIPPING}
    )

    def reduce(self, bucket, run):
        return super().reduce(bucket, run) * run.world_size

    @hookimpl
    def optimizer_step(self, optimizer, run):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= run.world_size
        optimizer.step()
        return True


# --- Strategies: plans -------------------------------------------------------------------------------------------


@mutant("test_a_plan_says_what_a_run_sends_and_holds")
class PlansHalfOfWhatItSends(Replicated):
    def average(self, parameters, run):
        super().average(parameters[::2] if run.environment.simulated else parameters, run)


@mutant("test_a_plan_says_what_a_run_sends_and_holds")
class PlansWithoutTheCopyThatItKeeps(Replicated):
    def average(self, parameters, run):
        super().average(parameters, run)
        if not run.environment.simulated:
            self.__dict__["kept"] = [parameter.grad.clone() for parameter in parameters]


@mutant("test_a_plan_says_what_a_run_sends_and_holds")
class AsksForAValueInAPlan(Replicated):
    def average(self, parameters, run):
        if any(parameter.grad.isnan().any() for parameter in parameters):
            raise ValueError("gradients are not finite")
        super().average(parameters, run)


# --- Strategies: gradients ---------------------------------------------------------------------------------------


@mutant("test_weights_equal_one_process")
class MissingAllReduce(Replicated):
    def average(self, parameters, run):
        pass


@mutant("test_weights_equal_one_process")
class SumForMean(Replicated):
    def reduce(self, bucket, run):
        return super().reduce(bucket, run) * run.world_size


@mutant("test_weights_equal_one_process")
class WorldSizeIsTwo(Replicated):
    def reduce(self, bucket, run):
        return super().reduce(bucket, run) * run.world_size / 2


@mutant("test_weights_equal_one_process")
class LossHalved(Replicated):
    def differentiate(self, loss):
        (loss / 2).backward()


@mutant("test_weights_equal_one_process")
class GradientsOfTheBatchBefore(Replicated):
    def average(self, parameters, run):
        super().average(parameters, run)
        now = [parameter.grad.clone() for parameter in parameters]
        for parameter, old in zip(parameters, getattr(run, "stale", now), strict=False):
            parameter.grad = old
        run.stale = now


@mutant("test_weights_equal_one_process")
class LastParameterForgotten(Replicated):
    def to_average(self, module):
        return super().to_average(module)[:-1]


@mutant("test_weights_equal_one_process")
class OnlyWeightsOfMatricesAveraged(Replicated):
    def to_average(self, module):
        return [parameter for parameter in super().to_average(module) if parameter.dim() > 1]


@mutant("test_weights_equal_one_process")
class GradientsRoundedOnTheirWay(Replicated):
    def reduce(self, bucket, run):
        return super().reduce(bucket, run).bfloat16().to(bucket.buffer.dtype)


@mutant("test_what_is_attached_to_parameters_holds")
class ReplacesParameters(Replicated):
    """As a strategy that shards does, but nothing is kept of what users attached."""

    @hookimpl
    def wrap_model(self, module, run):
        module = super().wrap_model(module, run)
        made = {parameter: torch.nn.Parameter(parameter.detach().clone()) for parameter in module.parameters()}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                part._parameters[name] = made.get(parameter)
        return module


@mutant("test_double_precision_is_kept")
class SinglePrecisionOnTheWire(Replicated):
    def reduce(self, bucket, run):
        return super().reduce(Bucket(buffer=bucket.buffer.float()), run).to(bucket.buffer.dtype)


@mutant("test_unusual_models")
class ScalarsCannotBeSplit(Replicated):
    def to_average(self, module):
        return [parameter for parameter in super().to_average(module) if len(parameter)]


@mutant("test_unusual_models")
class FrozenParametersThawed(Replicated):
    @hookimpl
    def wrap_model(self, module, run):
        return super().wrap_model(module.requires_grad_(True), run)


@mutant("test_weights_equal_one_process")
class TrainsACopy(Replicated):
    @hookimpl
    def wrap_model(self, module, run):
        return super().wrap_model(copy.deepcopy(module), run)


@mutant("test_unused_parameters")
class UnusedParametersCrash(Replicated):
    def to_average(self, module):
        return [parameter for parameter in module.parameters() if parameter.requires_grad]


@mutant("test_branching_models")
class GradientsOfDifferentLayersAdded(Replicated):
    """Each rank sends the gradients that it has, and nobody asks which ones these are."""

    def agree(self, module, run):
        pass


@mutant("test_branching_models[2-BranchingLater]")
class AgreesInTheFirstStepAlone(Replicated):
    """What the ranks' losses reached in the first step is taken to be what they reach in all of them."""

    def agree(self, module, run):
        if getattr(run, "agreed", None) is not run.model:
            super().agree(module, run)
            run.agreed = run.model


# --- Strategies: accumulation ------------------------------------------------------------------------------------


@mutant("test_inner_micro_batches_send_no_gradients")
class SendsOnInnerMicroBatches(Replicated):
    def is_due(self, run):
        return True


@mutant("test_accumulation")
class NoSyncOnTheLastMicroBatch(Replicated):
    def is_due(self, run):
        return not run.sync_gradients or run.trainer is None or run.settings.accumulate_grad_batches == 1


@mutant("test_accumulation")
class ForgetsInnerMicroBatches(Replicated):
    @hookimpl
    def backward(self, loss, module, run):
        if not run.sync_gradients:
            return True
        return super().backward(loss, module, run)


# --- Strategies: clipping ----------------------------------------------------------------------------------------


class _Clips(Replicated):
    def parameters(self, optimizer):
        return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    @hookimpl
    def clip_gradients(self, optimizer, max_norm, max_value):
        return self.clip(self.parameters(optimizer), max_norm, max_value)

    def clip(self, parameters, max_norm, max_value):
        if max_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, max_value)
            return 0.0
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


@mutant("test_clip_by_norm")
class ClipsEachParameterAlone(_Clips):
    def clip(self, parameters, max_norm, max_value):
        return max([super(ClipsEachParameterAlone, self).clip([p], max_norm, max_value) for p in parameters])


@mutant("test_clip_by_value")
class ClipsByNormForValue(_Clips):
    def clip(self, parameters, max_norm, max_value):
        return super().clip(parameters, max_norm or max_value, None)


@mutant("test_clip_by_norm")
class ClipsToTheSquareRoot(_Clips):
    def clip(self, parameters, max_norm, max_value):
        return super().clip(parameters, max_norm and max_norm**0.5, max_value)


@mutant("test_a_loop_of_your_own")
class ReturnsTheNormAfterClipping(_Clips):
    def clip(self, parameters, max_norm, max_value):
        norm = super().clip(parameters, max_norm, max_value)
        return 0.0 if max_norm is None else norm.clamp(max=max_norm)


@mutant("test_clip_by_norm")
class ClipsBeforeAveraging(Replicated):
    """The norm of this rank's gradients, not of their average."""

    def average(self, parameters, run):
        limit = getattr(run.settings, "gradient_clip_val", None)
        if limit and run.settings.gradient_clip_algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        super().average(parameters, run)


@mutant("test_clipping_with_accumulation")
class ClipsEveryMicroBatch(Replicated):
    def differentiate(self, loss):
        super().differentiate(loss)

    @hookimpl
    def backward(self, loss, module, run):
        super().backward(loss, module, run)
        limit = getattr(run.settings, "gradient_clip_val", None)
        if limit and not run.sync_gradients:
            torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
        return True


# --- Strategies: optimizers --------------------------------------------------------------------------------------


class _Steps(Replicated):
    @hookimpl
    def optimizer_step(self, optimizer, closure, run):
        return self.step(optimizer, closure, run)

    def step(self, optimizer, closure, run):
        optimizer.step(closure) if closure else optimizer.step()
        return True


@mutant("test_weights_equal_one_process")
class StepsTwice(_Steps):
    def step(self, optimizer, closure, run):
        super().step(optimizer, closure, run)
        return super().step(optimizer, closure, run)


@mutant("test_several_optimizers_in_one_step")
class DividesAllGradientsWithEachOptimizer(AveragesOnlyWhenItSteps):
    @hookimpl
    def optimizer_step(self, optimizer, run):
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= run.world_size
        optimizer.step()
        return True


@mutant("test_closure_optimizers")
class IgnoresTheClosure(_Steps):
    def step(self, optimizer, closure, run):
        if closure:
            closure()
            closure = None
        with contextlib.suppress(TypeError):
            optimizer.step()
        return True


@mutant("test_weights_equal_one_process")
class ReturnsNothingFromStep(_Steps):
    def step(self, optimizer, closure, run):
        super().step(optimizer, closure, run)


@mutant("test_weights_equal_one_process")
class CallsEveryStepSkipped(_Steps):
    def step(self, optimizer, closure, run):
        super().step(optimizer, closure, run)
        return False


@mutant("test_several_optimizers")
class StepsAllOptimizersTogether(_Steps):
    def step(self, optimizer, closure, run):
        for each in run.optimizers:
            super().step(each, closure, run)
        return True


@mutant("test_unusual_models")
class ForgetsTheSchedule(Replicated):
    @hookimpl
    def wrap_optimizers(self, optimizers):
        """New optimizers, of which the schedulers know nothing."""
        return [
            type(o)(o.param_groups[0]["params"], lr=o.defaults["lr"], **{k: o.defaults[k] for k in ("momentum",) if k in o.defaults})
            for o in optimizers
        ]  # fmt: skip


# --- Strategies: where training starts, and randomness -----------------------------------------------------------


@mutant("test_training_starts_from_the_weights_of_rank_0")
class NoBroadcast(Replicated):
    def shared(self, module):
        return []


@mutant("test_training_starts_from_the_weights_of_rank_0")
class BuffersNotBroadcast(Replicated):
    def shared(self, module):
        return list(module.parameters())


@mutant("test_random_numbers_are_left_alone")
class SeedsAtTheStart(Replicated):
    @hookimpl
    def wrap_model(self, module, run):
        torch.manual_seed(0)
        return super().wrap_model(module, run)


@mutant("test_random_numbers_are_left_alone")
class StaleRandomNumbers(Replicated):
    @hookimpl
    def step_context(self):
        torch.manual_seed(0)


# --- Strategies: data --------------------------------------------------------------------------------------------


@mutant("test_every_sample_is_read_once")
class EveryRankReadsEverything(Replicated):
    @hookimpl
    def wrap_dataloader(self, loader):
        return loader


class _Shards(Replicated):
    """Correct, apart from what a mutant does to the indices of one rank."""

    @hookimpl
    def wrap_dataloader(self, loader, stage, run):
        indices = list(range(len(loader.dataset)))[run.rank :: run.world_size]
        return DataLoader(
            torch.utils.data.Subset(loader.dataset, self.change(indices, stage)), batch_size=loader.batch_size
        )

    def change(self, indices, stage):
        return indices


@mutant("test_predictions_are_complete_and_in_order")
class PredictsBackwards(_Shards):
    def change(self, indices, stage):
        return indices[::-1] if stage == "predict" else indices


@mutant("test_predictions_are_complete_and_in_order")
class PredictsPaddedSamples(_Shards):
    def change(self, indices, stage):
        return [*indices, indices[-1]] if stage == "predict" else indices


@mutant("test_an_uneven_last_batch")
class DropsTheLastBatch(Replicated):
    @hookimpl
    def wrap_dataloader(self, loader, run):
        indices = list(range(len(loader.dataset)))[run.rank :: run.world_size]
        part = torch.utils.data.Subset(loader.dataset, indices)
        return DataLoader(part, batch_sampler=BatchSampler(SequentialSampler(part), loader.batch_size, drop_last=True))


# --- Strategies: state -------------------------------------------------------------------------------------------


@mutant("test_save_load_and_continue")
class WrappedNamesInTheCheckpoint(Replicated):
    @hookimpl
    def model_state(self, module):
        return {f"module.{name}": tensor for name, tensor in module.state_dict().items()}


@mutant("test_weights_equal_one_process")
class StateOnRank0Alone(Replicated):
    @hookimpl
    def model_state(self, module, run):
        return module.state_dict() if run.rank == 0 else {}


@mutant("test_save_load_and_continue")
class ForgottenMomentum(Replicated):
    @hookimpl
    def optimizer_state(self, optimizer, module):
        return logical_optimizer_state(optimizer, module) | {"state": {}}


@mutant("test_save_load_and_continue")
class OptimizerStateByNumber(Replicated):
    @hookimpl
    def optimizer_state(self, optimizer):
        return optimizer.state_dict()


@mutant("test_save_load_and_continue")
class OptimizerNotRestored(Replicated):
    @hookimpl
    def load_optimizer_state(self):
        return True


@mutant("test_weights_of_another_model_are_refused_on_all_ranks")
class LoadsLoosely(Replicated):
    @hookimpl
    def load_model_state(self, state, module):
        module.load_state_dict(state, strict=False)
        return True


@mutant("test_save_load_and_continue")
class WeightsNotRestored(Replicated):
    @hookimpl
    def load_model_state(self):
        return True


class _Counts(Replicated):
    """Has a number of its own on each rank."""

    count = 0

    def rank_state(self, run):
        return {"count": self.count}

    def load_rank_states(self, states, run):
        self.count = states[run.rank % len(states)]["count"]


@mutant("test_its_state_comes_back_under_every_spelling[2]")
class StateUnderTheRank(_Counts):
    """What a checkpoint has of rank 0 has another name than what it has of rank 1."""

    @property
    def state_key(self):
        return f"count of rank {os.environ.get('RANK', 0)}"


@mutant("test_its_state_comes_back_under_every_spelling")
class StateUnderTheObject(_Counts):
    @property
    def state_key(self):
        return f"count {id(self)}"


@mutant("test_resuming_within_an_epoch_under_another_seed")
class ShufflesByTheSeedOfNow(Replicated):
    """With a sampler of its own, whose seed no checkpoint has."""

    @hookimpl
    def wrap_dataloader(self, loader, stage, run):
        if not isinstance(loader.sampler, RandomSampler):
            return None
        sampler = _Shuffled(len(loader.dataset), run.rank, run.world_size, sampler_seed())
        return DataLoader(loader.dataset, loader.batch_size, sampler=sampler)


class _Shuffled(Sampler):
    def __init__(self, size, rank, world_size, seed):
        self.size, self.rank, self.world_size, self.seed = size, rank, world_size, seed

    def __len__(self):
        return len(range(self.rank, self.size, self.world_size))

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed))
        return iter(order.tolist()[self.rank :: self.world_size])


# --- Strategies: processes ---------------------------------------------------------------------------------------


@mutant("test_weights_equal_one_process")
class RankDependentBranchAroundACollective(Replicated):
    def average(self, parameters, run):
        super().average(parameters, run)
        if run.rank == 0:
            run.collectives.all_reduce(torch.ones(1))


@mutant("test_predictions_are_complete_and_in_order")
class CollectiveInEveryForward(Replicated):
    """Fine until ranks have different numbers of batches."""

    @hookimpl
    def wrap_model(self, module, run):
        module = super().wrap_model(module, run)
        module.register_forward_hook(lambda *_: run.collectives.barrier())
        return module


@mutant("test_an_error_on_one_rank_ends_all")
class WaitsForTheOthersAfterAnError(Replicated):
    @hookimpl
    def on_exception(self, run):
        run.collectives.barrier()


@mutant("test_leaves_nothing_behind")
class LeakedGroup(Replicated):
    @hookimpl
    def connect(self, world, run):
        if world.world_size == 1:
            return Collectives()
        collectives = TorchCollectives.connect(world, run.device, backend="gloo")
        collectives._owns_group = False
        return collectives


_LEAKS: list[Any] = []


@mutant("test_leaves_nothing_behind")
class LeakedFile(Replicated):
    @hookimpl
    def wrap_model(self, module, run):
        _LEAKS.append(os.open("/dev/null", os.O_RDONLY))
        return super().wrap_model(module, run)


@mutant("test_leaves_nothing_behind")
class LeakedThread(Replicated):
    @hookimpl
    def wrap_model(self, module, run):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().wrap_model(module, run)


@mutant("test_leaves_nothing_behind")
class LeavesFiles(Replicated):
    @hookimpl
    def teardown(self):
        count = len(list(Path.cwd().glob("debug*")))
        Path(f"debug{count}.txt").write_text("")


@mutant("test_a_second_run_is_like_the_first")
class RemembersTheFirstRun(Replicated):
    def reduce(self, bucket, run):
        self.__dict__.setdefault("seen", []).append(run)
        return super().reduce(bucket, run) * (1 if self.__dict__["seen"][0] is run else 0)


@mutant("test_collectives")
class GathersInReverse(Replicated):
    @hookimpl
    def connect(self, world, run):
        if world.world_size == 1:
            return Collectives()

        class Reversed(TorchCollectives):
            def all_gather(self, tensor):
                return super().all_gather(tensor)[::-1]

        return Reversed.connect(world, run.device, backend="gloo")


# --- Strategies: honesty -----------------------------------------------------------------------------------------


@mutant("test_gradient_buckets")
class IgnoresCommHooks(Replicated):
    def reduce(self, bucket, run):
        return run.collectives.average_async(bucket.buffer).wait()


@mutant("test_gradient_buckets")
class NoBucketIsTheLast(Replicated):
    def reduce(self, bucket, run):
        return super().reduce(Bucket(buffer=bucket.buffer, is_last=False), run)


@mutant("test_clip_by_value")
class ClaimsToClipByValue(_Clips):
    def clip(self, parameters, max_norm, max_value):
        return super().clip(parameters, max_norm, None) if max_norm else 0.0


@mutant("test_it_is_a_plugin")
class MisspeltHook(Replicated):
    @hookimpl
    def optimizer_stepp(self, optimizer):
        return True


@mutant("test_it_is_a_plugin")
class OptionsAreNoAttrs(Replicated):
    every: int = 1


@mutant("test_options_are_typed")
@define(eq=False, kw_only=True)
class UndocumentedOption(Replicated):
    every: int = 1


# --- Precisions --------------------------------------------------------------------------------------------------


@mutant("test_trains_like_fp32")
class ScaleNotRemoved(ScaledPrecision):
    def _unscale(self, optimizer):
        found = super()._unscale(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(2.0)
        return found


@mutant("test_clips_the_unscaled_gradients")
class ClipsScaledGradients(ScaledPrecision):
    @hookimpl(wrapper=True)
    def clip_gradients(self):
        return (yield)


@mutant("test_small_gradients_survive")
class DoesNotScale(MixedPrecision):
    _compute_dtype = torch.float16
    capabilities = ScaledPrecision.capabilities

    def policy(self):
        return PrecisionPolicy(compute_dtype=torch.float16, loss_scaling=True)


@mutant("test_an_overflow_skips_the_step_on_every_rank")
class RanksDoNotAgreeOnOverflow(ScaledPrecision):
    def _all_reduce_overflow(self, found, run):
        pass


@mutant("test_an_overflow_of_one_optimizer_skips_all")
class EachOptimizerDecides(ScaledPrecision):
    @hookimpl
    def step_optimizers(self, optimizers, closure, run):
        stepped = [super(EachOptimizerDecides, self).step_optimizers([each], closure, run) for each in optimizers]
        return all(stepped)


@mutant("test_an_overflow_skips_the_step_on_every_rank")
class ScaleNeverShrinks(ScaledPrecision):
    def _update(self):
        self._found = {}


@mutant("test_save_and_continue")
class ScaleNotSaved(ScaledPrecision):
    def state_dict(self):
        return {}


@mutant("test_trains_like_fp32")
class LossScaledTwice(ScaledPrecision):
    @hookimpl
    def scale_loss(self, loss, run):
        return 2 * super().scale_loss(loss, run)


@mutant("test_dtypes_are_those_of_the_policy")
class EvaluatesInAnotherDtype(MixedPrecision):
    @hookimpl
    def step_context(self, run):
        return super().step_context(run) if run.stage == "train" and run.module.training else None


@mutant("test_dtypes_are_those_of_the_policy")
class PolicyClaimsAnotherDtype(MixedPrecision):
    def policy(self):
        return PrecisionPolicy(compute_dtype=torch.float16)


@mutant("test_dtypes_are_those_of_the_policy")
class ComputesInFullPrecision(FullPrecision):
    def policy(self):
        return PrecisionPolicy(compute_dtype=torch.bfloat16)


@mutant("test_leaves_no_trace")
class DefaultDtypeStays(TruePrecision):
    @hookimpl
    def step_context(self):
        torch.set_default_dtype(torch.bfloat16)


@mutant("test_batches_keep_what_is_not_floating_point")
class ConvertsIntegersToo(TruePrecision):
    @hookimpl(wrapper=True)
    def transfer_batch(self):
        batch = yield
        return {
            key: [v.bfloat16() if isinstance(v, torch.Tensor) else v for v in value] if isinstance(value, list) else value.bfloat16()
            for key, value in batch.items()
        } if isinstance(batch, dict) else [tensor.bfloat16() for tensor in batch]  # fmt: skip


@mutant("test_dtypes_are_those_of_the_policy")
class ParametersNotConverted(MixedPrecision):
    def policy(self):
        return PrecisionPolicy(param_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)


@mutant("test_two_optimizers_by_hand")
class StaleCopiesOfParameters(MixedPrecision):
    """autocast's cache, kept while a module steps by hand within one forward."""

    @hookimpl
    def step_context(self, run):
        return torch.autocast(run.device.type, torch.bfloat16, cache_enabled=True)


@mutant("test_its_state_comes_back_under_every_spelling")
class ScaleUnderTheNameOfTheClass(ScaledPrecision):
    """A subclass that adds nothing begins with another loss scale."""

    @property
    def state_key(self):
        return type(self).__qualname__


# --- Callbacks ---------------------------------------------------------------------------------------------------


@define(eq=False, kw_only=True)
class Counting(sg.Callback):
    """Counts batches. Correct; the mutants below are not."""

    #: Count one of so many batches: fewer numbers.
    every: int = 1
    count: int = field(default=0, init=False)

    @hookimpl
    def on_train_batch_end(self, batch_idx):
        self.count += batch_idx % self.every == 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@mutant("test_its_state_comes_back_where_an_option_changed")
class StateUnderAnOption(Counting):
    @property
    def state_key(self):
        return f"count of every {self.every}"


@mutant("test_states_of_two_are_not_exchanged")
class StateInTheOrderOfTheList(Counting):
    """One key for all of its class: a number follows, which says which of them was listed first."""

    state_key = "count"


@mutant("test_its_state_comes_back_under_every_spelling")
class StateUnderTheObjectOfACallback(Counting):
    @property
    def state_key(self):
        return f"count {id(self)}"


# --- Communication hooks -----------------------------------------------------------------------------------------


@mutant("test_averages_over_the_ranks")
class SumsOverTheRanks(FP16Compress):
    @hookimpl
    def reduce_bucket(self, bucket, run):
        return (yield from super().reduce_bucket(bucket, run)).mul_(run.world_size)


@mutant("test_averages_over_the_ranks")
class KeepsItsOwnGradients(FP16Compress):
    @hookimpl
    def reduce_bucket(self, bucket):
        return bucket.buffer


@mutant("test_does_not_wait")
class WaitsForTheWire(FP16Compress):
    @hookimpl
    def reduce_bucket(self, bucket, collectives):
        arrived = collectives.average_async(bucket.buffer)
        if not arrived.done() and not dist.is_initialized():
            raise RuntimeError("would wait forever")
        return arrived.wait()


@mutant("test_averages_over_the_ranks")
class ReturnsSixteenBits(FP16Compress):
    @hookimpl
    def reduce_bucket(self, bucket):
        return (yield bucket.buffer.half())


@mutant("test_what_is_not_finite_stays_so")
class HidesOverflow(FP16Compress):
    @hookimpl
    def reduce_bucket(self, bucket, run):
        return (yield from super().reduce_bucket(bucket, run)).nan_to_num_(0, 0, 0)


@mutant("test_averages_over_the_ranks")
class OneScratchForAllBuckets(FP16Compress):
    """Kept from the first call; a bucket of another size gets what fits."""

    @hookimpl
    def reduce_bucket(self, bucket):
        scratch = self.__dict__.setdefault("scratch", torch.zeros(64, dtype=torch.float16))
        scratch.resize_(bucket.buffer.numel()).copy_(bucket.buffer)
        yield scratch
        return bucket.buffer.copy_(scratch.resize_(bucket.buffer.numel()))


@mutant("test_resumes_as_if_never_stopped")
class ForgetsResiduals(FP16Compress):
    """Adds what rounding lost to the next step, and keeps it in no checkpoint."""

    @hookimpl
    def reduce_bucket(self, bucket, run):
        kept, key = self.__dict__.setdefault("kept", {}), (id(run), bucket.index)
        corrected = bucket.buffer + kept.get(key, 0.0)
        sent = corrected.bfloat16()
        kept[key] = corrected - sent.float()
        return bucket.buffer.copy_((yield sent))


@mutant("test_averages_over_the_ranks")
class DropsTheLastNumber(FP16Compress):
    @hookimpl
    def reduce_bucket(self, bucket):
        rest = bucket.buffer[:-1].clone()
        return torch.cat([(yield rest), torch.zeros(1, dtype=rest.dtype)])


@mutant("test_averages_over_the_ranks")
class ClampsLargeGradients(FP16Compress):
    @hookimpl
    def reduce_bucket(self, bucket, run):
        return (yield from super().reduce_bucket(Bucket(buffer=bucket.buffer.clamp_(-1, 1)), run))


@mutant("test_averages_over_the_ranks")
class EachRankRoundsForItself(FP16Compress):
    @hookimpl
    def reduce_bucket(self, bucket, run):
        noise = 1e-4 * run.rank
        return (yield from super().reduce_bucket(bucket, run)) * (1 + noise)


@mutant("test_averages_over_the_ranks")
class Rank0SendsOnceMore(FP16Compress):
    @hookimpl
    def reduce_bucket(self, bucket, collectives, run):
        averaged = yield from super().reduce_bucket(bucket, run)
        if run.rank == 0:
            collectives.average_async(torch.zeros(1))
        return averaged


@mutant("test_strategies_without_buckets")
class ForgetsToRequireBuckets(FP16Compress):
    capabilities = Capabilities()


@mutant("test_a_second_run_is_like_the_first")
class WarmsUpOnceForAllRuns(FP16Compress):
    @hookimpl
    def reduce_bucket(self, bucket, run):
        calls = self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        return (yield bucket.buffer) if calls <= 3 else (yield from super().reduce_bucket(bucket, run))


if __name__ == "__main__":
    results = {each.name: each.caught_by() for each in MUTANTS}
    for name, caught in results.items():
        print(f"{name:45} {caught or 'SURVIVED'}")
    share = sum(caught is not None for caught in results.values()) / len(results)
    print(f"{share:.1%} of {len(results)} caught")
