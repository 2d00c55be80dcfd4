"""Hooks as torch's documentation passes them to DDP: they work here too, on a CPU and with several buckets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

import stratagem as sg
from stratagem.errors import ConfigError, PluginError
from stratagem.strategies import DDPStrategy
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_plainly
from stratagem_testing.training import train, weights_on_all_ranks


def power_state(**options):
    wanted = {"process_group": None, "matrix_approximation_rank": 2, "start_powerSGD_iter": 5} | options
    return powerSGD_hook.PowerSGDState(**wanted)


def local_state():
    return post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=8)


def stack_of(**options):
    run = sg.Run(strategy=DDPStrategy(**options), accelerator="cpu")
    return [(choice.name, choice.plugin) for choice in run.stack.of("comm_hook")]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"ddp_comm_hook": default_hooks.allreduce_hook}, ["allreduce"]),
        ({"ddp_comm_hook": default_hooks.fp16_compress_hook}, ["fp16_compress"]),
        ({"ddp_comm_hook": default_hooks.bf16_compress_hook}, ["bf16_compress"]),
        ({"ddp_comm_hook": debugging_hooks.noop_hook}, ["noop"]),
        ({"ddp_comm_hook": powerSGD_hook.powerSGD_hook, "ddp_comm_state": power_state()}, ["powersgd"]),
        ({"ddp_comm_hook": powerSGD_hook.batched_powerSGD_hook, "ddp_comm_state": power_state()}, ["batched_powersgd"]),
        (
            {
                "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
                "ddp_comm_state": power_state(),
                "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
            },
            ["powersgd", "fp16_compress"],
        ),
        (
            {
                "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
                "ddp_comm_state": local_state(),
                "model_averaging_period": 4,
            },
            ["post_localsgd"],
        ),
    ],
)
def test_a_hook_of_torchs_becomes_the_plugin_that_does_the_same(options, names):
    assert [name for name, _ in stack_of(**options)] == names


def test_its_state_becomes_options():
    ((_, power),) = stack_of(
        ddp_comm_hook=powerSGD_hook.powerSGD_hook,
        ddp_comm_state=power_state(min_compression_rate=3, use_error_feedback=False, warm_start=False),
    )
    ((_, local),) = stack_of(
        ddp_comm_hook=post_localSGD_hook.post_localSGD_hook, ddp_comm_state=local_state(), model_averaging_period=4
    )

    assert (power.rank, power.start_powerSGD_iter, power.min_compression_rate) == (2, 5, 3)
    assert (power.use_error_feedback, power.warm_start) == (False, False)
    assert (local.start_localSGD_iter, local.model_averaging_period) == (8, 4)


def _fit(rank, world_size, options):
    strategy = DDPStrategy(bucket_cap_mb=0.002, **options)
    return train(rank, world_size, Net, joined_batches(12, 24), {"strategy": strategy, "accelerator": "cpu"})


@pytest.mark.slow
@pytest.mark.every_push("powersgd in 16 bits")
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"ddp_comm_hook": default_hooks.allreduce_hook}, 1e-6),
        ({"ddp_comm_hook": default_hooks.bf16_compress_hook}, 1e-2),
        (
            {
                "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
                "ddp_comm_state": power_state(),
                "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
            },
            0.2,
        ),
    ],
    ids=["allreduce", "bf16_compress", "powersgd in 16 bits"],
)
def test_it_trains_with_several_buckets_on_gloo(options, tolerance):
    results = run_in_processes(_fit, 2, options)

    assert relative_difference(weights_on_all_ranks(results), train_plainly(joined_batches(12, 24))[0]) < tolerance


# --- Hooks of one's own ------------------------------------------------------------------------------------------


def own_average(state, bucket):
    state["calls"] += 1
    tensor = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])


def twice(hook):
    """A wrapper that sends gradients of double size and halves what comes back."""

    def wrapped(state, bucket):
        bucket.set_buffer(bucket.buffer() * 2)
        return hook(state, bucket).then(lambda future: future.value() / 2)

    return wrapped


def cuts(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer()[:-1])
    return future


def no_future(state, bucket):
    return bucket.buffer()


def _own(rank, world_size, wrapper):
    state = {"calls": 0}
    strategy = DDPStrategy(
        ddp_comm_hook=own_average, ddp_comm_state=state, ddp_comm_wrapper=wrapper, bucket_cap_mb=0.002
    )
    result = train(rank, world_size, Net, joined_batches(4, 24), {"strategy": strategy, "accelerator": "cpu"})
    return result | {"calls": state["calls"]}


@pytest.mark.parametrize("wrapper", [None, twice])
def test_a_callable_is_registered_as_it_is(wrapper):
    results = run_in_processes(_own, 2, wrapper)

    assert relative_difference(weights_on_all_ranks(results), train_plainly(joined_batches(4, 24))[0]) < 1e-6
    assert all(result["calls"] > 4 for result in results), "not called for each of several buckets"


def _broken(rank, world_size, hook):
    try:
        train(rank, world_size, Net, joined_batches(1, 24), {"strategy": DDPStrategy(ddp_comm_hook=hook)})
    except PluginError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            cuts,
            r"comm_hook 'TorchHook' returned a float32 tensor of shape \(1632,\).*expected a float32 tensor of shape",
        ),
        (no_future, "ddp_comm_hook no_future returned a Tensor.*expected a torch.futures.Future"),
    ],
)
def test_what_it_returns_is_checked_on_every_rank(hook, message):
    for said in run_in_processes(_broken, 2, hook):
        with pytest.raises(PluginError, match=message):
            raise PluginError(said)


POWER, LOCAL = powerSGD_hook.powerSGD_hook, post_localSGD_hook.post_localSGD_hook


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ddp_comm_wrapper": default_hooks.fp16_compress_wrapper},
            "ddp_comm_wrapper is fp16_compress_wrapper without a",
        ),
        ({"ddp_comm_state": power_state()}, "ddp_comm_state is .* without a ddp_comm_hook"),
        ({"model_averaging_period": 4}, "model_averaging_period is 4 without a ddp_comm_hook"),
        ({"ddp_comm_hook": LOCAL, "ddp_comm_state": local_state()}, "without a model_averaging_period"),
        (
            {"ddp_comm_hook": own_average, "model_averaging_period": 4},
            "model_averaging_period is 4 and ddp_comm_hook is own",
        ),
        ({"ddp_comm_hook": POWER}, "ddp_comm_state is None; expected torch's state"),
        ({"ddp_comm_hook": default_hooks.fp16_compress_hook, "ddp_comm_state": 3}, "ddp_comm_state is 3, which"),
        ({"ddp_comm_hook": lambda bucket: bucket}, r"ddp_comm_hook is <lambda>\(bucket\); expected a callable of"),
        ({"ddp_comm_hook": "fp16"}, "ddp_comm_hook is 'fp16'; expected a callable"),
        ({"ddp_comm_hook": own_average, "ddp_comm_wrapper": lambda: None}, r"ddp_comm_wrapper is <lambda>\(\)"),
        ({"ddp_comm_hook": own_average, "ddp_comm_wrapper": lambda hook: 3}, r"ddp_comm_wrapper\(ddp_comm_hook\) is 3"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(options, message):
    with pytest.raises(ConfigError, match=message):
        stack_of(**options)


@pytest.mark.parametrize("hook", [own_average, default_hooks.fp16_compress_hook])
def test_hooks_in_both_places_are_refused(hook):
    with pytest.raises(ConfigError, match="comm_hook"):
        sg.Run(strategy=DDPStrategy(ddp_comm_hook=hook), comm_hook="bf16_compress", accelerator="cpu")
