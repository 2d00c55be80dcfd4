"""DeepSpeed's configuration: every word of it is checked before anything starts, and the engine gets all of it."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import re
from pathlib import Path

import pytest
import torch

import stratagem as sg
from stratagem.api.options import option_types, structure
from stratagem.errors import ConfigError
from stratagem_deepspeed import ds_config
from stratagem_deepspeed.engine_config import engine_config, micro_batch_size
from stratagem_deepspeed.options import DeepSpeedOptions
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import train, weights_on_all_ranks

pytestmark = pytest.mark.usefixtures("deepspeed_preloaded")

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}

#: Cases beside the most telling one.
WHERE_IT_CHANGED = pytest.mark.when_changed("plugins/deepspeed/")
#: What Lightning's guide shows, with an optimizer that DeepSpeed still has.
CUSTOM = {
    "zero_allow_untested_optimizer": True,
    "optimizer": {
        "type": "AdamW", "params": {"lr": 3e-5, "betas": [0.998, 0.999], "eps": 1e-5, "weight_decay": 1e-9}
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"last_batch_iteration": -1, "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 100},
    },
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True,
        "allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8,
    },
}  # fmt: skip
#: What is passed around for Hugging Face's trainer.
OFFLOADING = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e8, "stage3_param_persistence_threshold": 1e6,
    },
    "bf16": {"enabled": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def nobody_names_a_configuration(monkeypatch):
    for variable in ("STRATAGEM_DEEPSPEED_CONFIG_PATH", "PL_DEEPSPEED_CONFIG_PATH"):
        monkeypatch.delenv(variable, raising=False)


def a_run(device="cpu", **arguments):
    run = sg.Trainer(**QUIET, strategy="ddp", devices=1, **arguments).run
    run.device = torch.device(device)
    return run


def told(options, device="cpu", **arguments):
    """Return what the engine is told under these options and arguments of a trainer."""
    return engine_config(options, a_run(device, **arguments))


def configured(**config):
    return DeepSpeedOptions(config={"zero_optimization": {"stage": 2}} | config)


def refusal(act, *arguments, **options):
    with pytest.raises(ConfigError) as caught:
        act(*arguments, **options)
    return str(caught.value)


# --- The user's configuration ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("guide", [CUSTOM, OFFLOADING])
def test_what_the_guides_show_is_accepted_from_code_and_from_a_file(guide, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(guide))

    from_code, from_file = DeepSpeedOptions(config=guide), DeepSpeedOptions(config=str(path))

    assert from_code.user_config == from_file.user_config
    assert from_code.zero["reduce_bucket_size"] == guide["zero_optimization"]["reduce_bucket_size"]
    assert type(from_code.zero["reduce_bucket_size"]) is int
    assert from_file.origin == f"{path} (strategy.deepspeed.config)"


def test_a_configuration_is_read_once_and_never_changed(tmp_path):
    path, config = tmp_path / "ds.json", copy.deepcopy(CUSTOM)
    path.write_text(json.dumps(CUSTOM))
    options = DeepSpeedOptions(config=path)
    path.unlink()

    told(DeepSpeedOptions(config=config))["zero_optimization"]["stage"] = 7
    told(options)["optimizer"]["params"].clear()

    assert config == CUSTOM
    of_code = DeepSpeedOptions(config=config)
    config["optimizer"]["params"]["betas"].clear()
    assert of_code.user_config["optimizer"] == CUSTOM["optimizer"]
    assert options.user_config["optimizer"] == CUSTOM["optimizer"]
    assert pickle.loads(pickle.dumps(options)).user_config == options.user_config


WITHOUT_EFFECT = [
    ({"gradient_cliping": 1.0}, "gradient_cliping of strategy.deepspeed.config is unknown to deepspeed .*; did you mean 'gradient_clipping'"),
    ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge of .* unknown .*did you mean 'stage'"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}},
     "zero_optimization.offload_optimizer.devise of .* unknown .*did you mean 'device'"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"buffers": 5}}}, "zero_optimization.offload_param.buffers of"),
    ({"fp16": {"enable": True}}, "fp16.enable of .* unknown .*did you mean 'enabled'"),
    ({"bf16": {"loss_scale": 0}}, "bf16.loss_scale of .* unknown"),
    ({"optimizer": {"typ": "AdamW"}}, "optimizer.typ of .* unknown .*did you mean 'type'"),
    ({"optimizer": {"params": {"lr": 1.0}}}, "optimizer of .* has no type"),
    ({"optimizer": {"type": "AdamW", "params": {"cuda_aware": True}}}, "optimizer.params.cuda_aware of .* unknown"),
    ({"optimizer": {"type": "AdamWW"}}, "optimizer.type of .* is 'AdamWW'; expected Adam, .* did you mean 'AdamW'"),
    ({"optimizer": {"type": "SGD", "params": {"max_grad_norm": 1.0}}}, "max_grad_norm of .*write gradient_clipping"),
    ({"scheduler": {"type": "StepLR"}}, "scheduler.type of .* is 'StepLR'; expected one that works with ZeRO: .*WarmupLR"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}}, "did you mean 'warmup_num_steps'"),
    ({"aio": {"thread_count": 2}}, "aio.thread_count of .* write intra_op_parallelism"),
    ({"elasticity": {"enabled": True}}, "elasticity of .* has removed elastic training; drop it"),
    ({"compression_training": {}}, "compression_training of .* has removed"),
    ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload of .* another name now; write \"offload_optimizer\""),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "has removed MiCS"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last of .* set drop_last of your DataLoader"),
    ({"managed_gradient_accumulation": True}, "managed_gradient_accumulation of .* is true; expected false"),
    ({"train_batch_size": 0}, "train_batch_size of .* is 0; expected a whole number, at least 1"),
    ({"gradient_clipping": math.nan}, "gradient_clipping of .* is nan; expected a number, at least 0"),
    ({"gradient_clipping": -1}, "gradient_clipping of .* is -1; expected a number, at least 0"),
    ({"communication_data_type": ["fp16"]}, "communication_data_type of .* is .'fp16'.; expected 'fp32' or"),
    ({"zero_optimization": True}, "zero_optimization of .* is True; expected a mapping"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage of .* is 4; expected 0 or 1 or 2 or 3"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage of .* is True; expected 0 or"),
    ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "reduce_bucket_size of .* is '5e8'; expected a whole number"),
    ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "reduce_bucket_size of .* is 0.5; expected a whole number"),
    ({"zero_optimization": {"overlap_comm": "true"}}, "overlap_comm of .* is 'true'; expected true or false"),
    ({"zero_optimization": {"stage": "auto"}}, "stage of .* is \"auto\", which nothing here determines"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr of .* is \"auto\", which nothing"),
    ({"zero_allow_untested_optimizer": "auto"}, "zero_allow_untested_optimizer of .* is \"auto\", which nothing"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled of .* are both true"),
    ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bf16 and bfloat16 of .* are both set"),
]  # fmt: skip


def test_a_word_without_effect_is_refused_by_its_path():
    for config, said in WITHOUT_EFFECT:
        assert re.search(said, refusal(DeepSpeedOptions, config=config))


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb", "onebitadam"])
def test_optimizers_of_one_bit_are_said_to_be_gone_and_what_to_use(name):
    said = refusal(configured, optimizer={"type": name, "params": {"lr": 3e-5, "cuda_aware": True}})

    assert f"is {name!r}, which deepspeed has removed by 0.19.8 (0.19.0 still had it)" in said
    assert "AdamW" in said
    assert 'comm_hook="one_bit"' in said


def test_a_path_that_leads_to_no_configuration_is_refused(tmp_path):
    broken, listed, twice, binary = (tmp_path / name for name in ("broken", "listed", "twice", "binary"))
    broken.write_text('{\n  "fp16": {"enabled": true,}\n}')
    listed.write_text("[1, 2]")
    twice.write_text('{"steps_per_print": 1, "steps_per_print": 2}')
    binary.write_bytes(b"\xff\xfe\x00")

    assert "nowhere.json', which does not exist; expected a JSON file" in refusal(
        DeepSpeedOptions, config="nowhere.json"
    )
    assert "a folder; expected a JSON file" in refusal(DeepSpeedOptions, config=tmp_path)
    assert re.search("is not JSON .line 2, column ", refusal(DeepSpeedOptions, config=broken))
    assert "holds [1, 2]; expected a mapping" in refusal(DeepSpeedOptions, config=listed)
    assert "has 'steps_per_print' twice" in refusal(DeepSpeedOptions, config=twice)
    assert "not text in UTF-8" in refusal(DeepSpeedOptions, config=binary)


def test_the_environment_names_a_configuration_where_nothing_else_does(tmp_path, monkeypatch):
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    ours.write_text('{"zero_optimization": {"stage": 1}}')
    theirs.write_text('{"zero_optimization": {"stage": 3}}')

    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(theirs))
    assert DeepSpeedOptions().zero_stage == 3
    monkeypatch.setenv("STRATAGEM_DEEPSPEED_CONFIG_PATH", str(ours))
    assert DeepSpeedOptions().zero_stage == 1
    assert DeepSpeedOptions().origin == f"{ours} (STRATAGEM_DEEPSPEED_CONFIG_PATH)"
    assert configured().zero_stage == 2

    said = refusal(DeepSpeedOptions, stage=3, offload_optimizer=True)
    assert "strategy.deepspeed.stage and STRATAGEM_DEEPSPEED_CONFIG_PATH are both set" in said
    assert "drop stage, offload_optimizer" in said


def test_options_of_the_engine_stand_in_for_a_configuration_never_beside_one():
    said = refusal(DeepSpeedOptions, config=CUSTOM, reduce_bucket_size=5e8)

    assert "strategy.deepspeed.reduce_bucket_size and strategy.deepspeed.config are both set" in said
    assert DeepSpeedOptions(config=CUSTOM, timeout=5, logging_level=20, exclude_frozen_parameters=True).user_config


# --- The installed DeepSpeed -------------------------------------------------------------------------------------


def words_of_deepspeed(rank, world_size):
    """Return the keys that the installed DeepSpeed has in each section, by what it calls them in a file."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime import lr_schedules, precision_config
    from deepspeed.runtime.activation_checkpointing import config as layers
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS, DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.swap_tensor import aio_config
    from deepspeed.runtime.zero import config, offload_config

    def words(model):
        fields = model.model_fields.items()
        return {name for name, _ in fields} | {field.alias for _, field in fields if field.alias}

    return {
        "zero": words(config.DeepSpeedZeroConfig),
        "offload_optimizer": words(offload_config.DeepSpeedZeroOffloadOptimizerConfig),
        "offload_param": words(offload_config.DeepSpeedZeroOffloadParamConfig),
        "fp16": words(precision_config.DeepSpeedFP16Config),
        "bf16": words(precision_config.DeepSpeedBF16Config),
        "activation_checkpointing": set(layers.ACT_CHKPT_DEFAULT),
        "aio": set(aio_config.AIO_DEFAULT_DICT),
        "optimizers": set(DEEPSPEED_OPTIMIZERS),
        "schedulers": set(lr_schedules.VALID_LR_SCHEDULES),
        "gone": {*_REMOVED_TOP_LEVEL_CONFIG_KEYS, *(f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS)},
    }


@pytest.mark.slow
def test_the_words_are_those_of_the_installed_deepspeed():
    (theirs,) = run_in_processes(words_of_deepspeed, 1)
    refused = {path.removeprefix("zero_optimization.") for path in ds_config._REFUSED}

    assert set(ds_config._ZERO) == theirs["zero"] - refused
    assert set(ds_config._OFFLOAD_OPTIMIZER) == theirs["offload_optimizer"]
    assert set(ds_config._OFFLOAD_PARAM) == theirs["offload_param"]
    assert set(ds_config._FP16) == theirs["fp16"]
    assert set(ds_config._BF16) == theirs["bf16"]
    assert set(ds_config._ACTIVATION_CHECKPOINTING) == theirs["activation_checkpointing"]
    assert set(ds_config._TOP["aio"]) == theirs["aio"]
    assert {name.lower() for name in ds_config._OPTIMIZERS} == theirs["optimizers"]
    assert set(ds_config._SCHEDULERS) == theirs["schedulers"]
    assert theirs["gone"] <= set(ds_config._REFUSED)


# --- Options -----------------------------------------------------------------------------------------------------

NVME = {
    "stage": 3, "offload_optimizer": True, "offload_parameters": True, "offload_params_device": "nvme",
    "offload_optimizer_device": "nvme", "nvme_path": Path("."),
}  # fmt: skip
THE_LOSS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
PLUMBING = (
    "logging_level", "load_full_weights", "exclude_frozen_parameters", "state_dict_type", "timeout", "start_timeout",
    "process_group_backend", "nccl", "gloo",
)  # fmt: skip


TOLD = [
    ({"stage": 1}, "zero_optimization.stage", 1),
    ({"zero_optimization": False}, "zero_optimization", {"stage": 0, "overlap_comm": False}),
    ({"offload_optimizer": True}, "zero_optimization.offload_optimizer.device", "cpu"),
    ({"stage": 3, "offload_parameters": True}, "zero_optimization.offload_param.device", "cpu"),
    ({"offload_optimizer": True, "pin_memory": True}, "zero_optimization.offload_optimizer.pin_memory", True),
    (NVME, "zero_optimization.offload_param.device", "nvme"),
    (NVME, "zero_optimization.offload_param.nvme_path", "."),
    (NVME, "zero_optimization.offload_optimizer.nvme_path", "."),
    (NVME, "zero_optimization.offload_optimizer.device", "nvme"),
    (NVME, "zero_optimization.offload_param.buffer_count", 5),
    (NVME | {"params_buffer_count": 7}, "zero_optimization.offload_param.buffer_count", 7),
    (NVME | {"params_buffer_size": 1e6}, "zero_optimization.offload_param.buffer_size", 1_000_000),
    (NVME | {"max_in_cpu": 5}, "zero_optimization.offload_param.max_in_cpu", 5),
    (NVME | {"optimizer_buffer_count": 6}, "zero_optimization.offload_optimizer.buffer_count", 6),
    (NVME | {"block_size": 4096}, "aio.block_size", 4096),
    (NVME | {"queue_depth": 16}, "aio.queue_depth", 16),
    (NVME | {"single_submit": True}, "aio.single_submit", True),
    (NVME | {"overlap_events": False}, "aio.overlap_events", False),
    (NVME | {"thread_count": 2}, "aio.intra_op_parallelism", 2),
    ({"stage": 3, "sub_group_size": 1e9}, "zero_optimization.sub_group_size", 1_000_000_000),
    ({"contiguous_gradients": False}, "zero_optimization.contiguous_gradients", False),
    ({"overlap_comm": False}, "zero_optimization.overlap_comm", False),
    ({"reduce_scatter": False}, "zero_optimization.reduce_scatter", False),
    ({"allgather_bucket_size": 5e8}, "zero_optimization.allgather_bucket_size", 500_000_000),
    ({"reduce_bucket_size": 5e8}, "zero_optimization.reduce_bucket_size", 500_000_000),
    ({}, "zero_optimization.reduce_bucket_size", 200_000_000),
    ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer", False),
    ({"logging_batch_size_per_gpu": 3}, "train_micro_batch_size_per_gpu", 3),
    ({"partition_activations": True}, "activation_checkpointing.partition_activations", True),
    ({"cpu_checkpointing": True}, "activation_checkpointing.cpu_checkpointing", True),
    ({"synchronize_checkpoint_boundary": True}, "activation_checkpointing.synchronize_checkpoint_boundary", True),
    ({"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 4},
     "activation_checkpointing.number_checkpoints", 4),
]  # fmt: skip


def test_every_option_of_the_engine_reaches_it():
    run = a_run("cuda")
    for options, path, value in TOLD:
        found = engine_config(DeepSpeedOptions(**options), run)
        for key in path.split("."):
            found = found[key]

        assert found == value, path
        assert type(found) is type(value), path

    spoken_of = {name for options, _, _ in TOLD for name in options}
    beside = {"config", "remote_device", "allgather_partitions", *THE_LOSS, *PLUMBING}
    assert spoken_of | beside == set(option_types(DeepSpeedOptions))


def test_numbers_of_elements_may_be_written_as_people_write_them():
    from_text = structure(DeepSpeedOptions, {"reduce_bucket_size": "5e8", "stage": "1"}, "strategy", text=True)
    from_code = structure(DeepSpeedOptions, {"reduce_bucket_size": 5e8, "stage": 1}, "strategy")

    for options in (from_text, from_code):
        assert type(options.reduce_bucket_size) is int
        assert options.reduce_bucket_size == 500_000_000


IMPOSSIBLE = [
    ({"stage": 4}, "strategy.deepspeed.stage is 4; expected 0 or 1 or 2 or 3"),
    ({"stage": 2, "offload_parameters": True}, "offload_parameters is set and strategy.deepspeed.stage is 2; expected stage 3"),
    ({"offload_optimizer": True, "offload_optimizer_device": "nvme"}, "offload_optimizer_device is 'nvme' and .*stage is 2"),
    ({"offload_optimizer_device": "nvme"}, "offload_optimizer_device is 'nvme', which has no effect; expected offload_optimizer=True"),
    ({"stage": 3, "offload_params_device": "nvme"}, "offload_params_device is 'nvme', which has no effect"),
    ({"zero_optimization": False, "stage": 3}, "stage is 3, which has no effect; expected zero_optimization=True"),
    ({"stage": 0, "offload_optimizer": True}, "offload_optimizer is set and .*stage is 0"),
    ({"nvme_path": "/tmp"}, "nvme_path is '/tmp', which has no effect"),
    ({"queue_depth": 3}, "queue_depth is 3, which has no effect; expected offloading to"),
    ({"pin_memory": True}, "pin_memory is True, which has no effect"),
    ({"sub_group_size": 5}, "sub_group_size is 5, which has no effect; expected stage 3"),
    ({"stage": 1, "overlap_comm": True}, "overlap_comm is True and .*stage is 1; expected stage 2 or 3"),
    ({"allgather_partitions": False}, "allgather_partitions is False, which DeepSpeed has removed"),
    ({"logging_batch_size_per_gpu": 0}, "logging_batch_size_per_gpu is 0; expected at least 1"),
    ({"config": {"zero_optimization": {"allgather_partitions": False}}}, "allgather_partitions of .* is False"),
    ({"contiguous_memory_optimization": True}, "without partition_activations and number_checkpoints; expected both"),
    ({"number_checkpoints": 4}, "number_checkpoints is 4, which has no effect"),
    ({"remote_device": "cpu"}, "remote_device is 'cpu' and strategy.deepspeed.stage is 2"),
    ({"stage": 3, "remote_device": "nvme"}, "remote_device is 'nvme' and parameters are offloaded to None"),
    (NVME | {"remote_device": "cpu"}, "remote_device is 'cpu' and parameters are offloaded to 'nvme'"),
    ({"reduce_bucket_size": 0.5}, "reduce_bucket_size is 0.5; expected a whole number"),
    ({"reduce_bucket_size": "5e8"}, "reduce_bucket_size is '5e8'"),
    ({"hysteresis": 0}, "hysteresis is 0; expected at least 1"),
    ({"state_dict_type": "full"}, "state_dict_type is 'full'; expected 'deepspeed'"),
    ({"config": {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}},
     "zero_optimization.offload_param of strategy.deepspeed.config is set and zero_optimization.stage of"),
    ({"config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}},
     "offload_optimizer.device of .* is 'nvme' .*where DeepSpeed would use the CPU"),
    ({"config": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}}, "has no nvme_path"),
    ({"config": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pipeline_read": True}}}},
     "offload_optimizer.pipeline_read of .* is True, with which DeepSpeed fails"),
    ({"config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}},
     "offload_optimizer.ratio of .* is 0.5 and"),
]  # fmt: skip


def test_options_that_cannot_take_effect_together_are_refused():
    for options, said in IMPOSSIBLE:
        assert re.search(said, refusal(DeepSpeedOptions, **options))


def test_a_folder_for_offloading_must_be_there(tmp_path):
    missing = DeepSpeedOptions(**NVME | {"nvme_path": tmp_path / "missing"})

    assert re.search("strategy.deepspeed.nvme_path is '.*missing', which is not a folder", refusal(told, missing))
    assert not (tmp_path / "missing").exists()


# --- Arguments of the trainer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fp16", "bf16", "precision", "dtype"),
    [
        (None, None, None, None),
        (None, None, "bf16-mixed", torch.bfloat16),
        (None, None, "16-mixed", torch.float16),
        (None, None, "bf16-true", torch.bfloat16),
        (None, True, None, torch.bfloat16),
        (True, None, None, torch.float16),
        (False, None, "bf16-mixed", torch.bfloat16),
        ("auto", "auto", "16-mixed", torch.float16),
        ("auto", "auto", "bf16-mixed", torch.bfloat16),
        ("auto", "auto", None, None),
        (None, True, "bf16-mixed", torch.bfloat16),
    ],
)
def test_one_precision_is_switched_on_and_the_other_off(fp16, bf16, precision, dtype):
    config = {name: {"enabled": said} for name, said in (("fp16", fp16), ("bf16", bf16)) if said is not None}
    options, run = configured(**config), a_run(precision=precision)

    assert options.engine_dtype(run.policy) is dtype
    assert engine_config(options, run)["fp16"]["enabled"] is (dtype is torch.float16)
    assert engine_config(options, run)["bf16"]["enabled"] is (dtype is torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({"bf16": {"enabled": True}}, "16-mixed"),
        ({"bf16": {"enabled": True}}, "32-true"),
        ({"bf16": {"enabled": False}}, "bf16-mixed"),
        ({"fp16": {"enabled": True}}, "bf16-mixed"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "bf16-mixed"),
    ],
)
def test_two_precisions_are_an_error_that_names_both(config, precision):
    said = refusal(told, configured(**config), precision=precision)

    assert f"{next(iter(config))}.enabled of strategy.deepspeed.config is" in said
    assert f"precision is {precision!r}" in said


def test_stage_0_computes_in_32_bits_only():
    for options in (DeepSpeedOptions(stage=0), DeepSpeedOptions(config={})):
        assert "with which DeepSpeed trains wrongly" in refusal(told, options, precision="bf16-mixed")
        assert told(options)["zero_optimization"]["stage"] == 0


def test_the_loss_is_scaled_as_the_options_say_also_beside_a_configuration():
    options = DeepSpeedOptions(
        initial_scale_power=8, config={"zero_optimization": {"stage": 2}, "fp16": {"hysteresis": 3}}
    )

    fp16 = told(options, precision="16-mixed")["fp16"]

    assert fp16 == {
        "enabled": True, "loss_scale": 0.0, "initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 3,
        "min_loss_scale": 1,
    }  # fmt: skip
    assert "initial_scale_power is 8 and the precision is not fp16" in refusal(told, options, precision="bf16-mixed")
    both = DeepSpeedOptions(hysteresis=4, config=dict(options.user_config))
    assert "hysteresis is 4 and fp16.hysteresis of" in refusal(told, both, precision="16-mixed")


@pytest.mark.parametrize(
    ("said", "asked", "expected"), [(None, None, 0.0), ("auto", None, 0.0), (None, 0.5, 0.5), ("auto", 0.5, 0.5), (0.5, None, 0.5), (1, 1.0, 1.0)]
)  # fmt: skip
def test_clipping_is_always_said(said, asked, expected):
    options = configured() if said is None else configured(gradient_clipping=said)

    assert told(options, gradient_clip_val=asked)["gradient_clipping"] == expected
    assert told(DeepSpeedOptions(), gradient_clip_val=asked)["gradient_clipping"] == (asked or 0.0)


def test_two_clippings_are_an_error_that_names_both():
    said = refusal(told, configured(gradient_clipping=1.0), gradient_clip_val=0.5)

    assert (
        "gradient_clipping of strategy.deepspeed.config is 1.0 and gradient_clip_val is 0.5; expected the same" in said
    )


@pytest.mark.parametrize(
    ("config", "accumulate", "micro"),
    [
        ({}, 4, None),
        ({"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}, 4, None),
        ({"gradient_accumulation_steps": 4}, 4, None),
        ({"train_micro_batch_size_per_gpu": 8}, {0: 4, 2: 1}, 8),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8}, 4, 8),
        ({"train_batch_size": 32}, 4, 8),
    ],
)
def test_the_engine_steps_on_one_batch_however_many_the_trainer_adds_up(config, accumulate, micro):
    options, run = configured(**config), a_run(accumulate_grad_batches=accumulate)

    engine = engine_config(options, run)

    assert micro_batch_size(options, run) == micro
    assert engine["train_micro_batch_size_per_gpu"] == (micro or 1)
    assert engine["gradient_accumulation_steps"] == 1
    assert engine["managed_gradient_accumulation"] is False
    assert "train_batch_size" not in engine


@pytest.mark.parametrize(
    ("config", "accumulate", "said"),
    [
        ({"gradient_accumulation_steps": 4}, 1, "gradient_accumulation_steps of .* is 4 and accumulate_grad_batches is 1; .*set accumulate_grad_batches=4"),
        ({"gradient_accumulation_steps": 4}, {0: 4, 1: 2}, "is 4 and accumulate_grad_batches is {0: 4, 1: 2}"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8}, 2, "train_batch_size of .* is 32, which is not 8 a batch x 2 batches a step x 1 processes"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8}, {0: 4, 1: 2}, "is 32, which is not"),
        ({"train_batch_size": 1}, 2, "train_batch_size of .* is 1, which is not samples a batch x 2"),
        ({"train_batch_size": 7}, 2, "train_batch_size of .* is 7, which is not"),
    ],
)  # fmt: skip
def test_windows_and_batch_sizes_that_disagree_are_an_error_that_names_both(config, accumulate, said):
    assert re.search(said, refusal(told, configured(**config), accumulate_grad_batches=accumulate))


def test_a_loop_of_the_user_accumulates():
    run = sg.Run(strategy="ddp", accelerator="cpu", devices=1)

    assert engine_config(configured(gradient_accumulation_steps=1), run)["gradient_clipping"] == 0.0
    assert "a loop of your own accumulates itself" in refusal(
        engine_config, configured(gradient_accumulation_steps=2), run
    )


def test_auto_is_resolved_from_the_trainer_the_optimizer_and_deepspeed():
    options = configured(
        optimizer={"type": "AdamW", "params": {"lr": 0.1}},
        scheduler={"type": "WarmupDecayLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "total_num_steps"), "auto")},
        zero_optimization={"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    )  # fmt: skip

    engine = told(options, max_steps=50)

    assert engine["scheduler"]["params"] == {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "total_num_steps": 50}
    assert engine["zero_optimization"] == {"stage": 3, "overlap_comm": False}
    assert "auto" not in json.dumps(engine)
    assert 'total_num_steps of strategy.deepspeed.config is "auto"; expected a number, or max_steps' in refusal(
        told, options
    )


def test_what_only_a_gpu_has_use_for_is_left_out_on_a_cpu():
    offloading, adam = (
        DeepSpeedOptions(config=OFFLOADING),
        configured(optimizer={"type": "adam", "params": {"lr": 0.1}}),
    )
    layers = DeepSpeedOptions(cpu_checkpointing=True)

    assert told(offloading)["zero_optimization"]["offload_param"]["pin_memory"] is False
    assert told(offloading, "cuda")["zero_optimization"]["offload_param"]["pin_memory"] is True
    assert told(DeepSpeedOptions())["zero_optimization"]["overlap_comm"] is False
    assert told(DeepSpeedOptions(), "cuda")["zero_optimization"]["overlap_comm"] is True
    assert told(DeepSpeedOptions(stage=1), "cuda")["zero_optimization"]["overlap_comm"] is False
    assert told(layers)["activation_checkpointing"]["cpu_checkpointing"] is False
    assert told(layers, "cuda")["activation_checkpointing"]["cpu_checkpointing"] is True
    assert told(adam)["optimizer"]["params"] == {"lr": 0.1, "torch_adam": True, "weight_decay": 0.0}
    assert told(adam, "cuda")["optimizer"]["params"] == {"lr": 0.1}


# --- Training ----------------------------------------------------------------------------------------------------

BATCHES = joined_batches(6, 8)


class WithoutOptimizer(Net):
    """The configuration has one."""

    def configure_optimizers(self):
        return None


class WithAdamW(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train_with(rank, world_size, make, config, **arguments):
    from stratagem_deepspeed import DeepSpeedStrategy

    strategy = DeepSpeedStrategy(config=config)
    return train(rank, world_size, make, BATCHES, {"strategy": strategy, "accelerator": "cpu", **arguments})


def train_by_hand(optimizer_of, factor_at=lambda step: 1.0, max_norm=None):
    """Train on the joined batches in plain PyTorch; return the weights before and after."""
    module = Net()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    optimizer = optimizer_of(module.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor_at)
    for x, y in BATCHES:
        optimizer.zero_grad()
        module.criterion(module(x), y).backward()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            assert norm > max_norm
        optimizer.step()
        schedule.step()
    return before, module.state_dict()


def moved_differently(weights, before, reference):
    """Return how far training went elsewhere than the reference's, relative to how far that went."""
    distance = sum(float((weights[name].double() - reference[name].double()).norm() ** 2) for name in reference)
    length = sum(float((reference[name].double() - before[name].double()).norm() ** 2) for name in reference)
    return math.sqrt(distance / length)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"torch_adam": True}, pytest.param({}, marks=WHERE_IT_CHANGED)],
    ids=["Adam of torch", "Adam that is compiled"],
)
def test_the_custom_configuration_trains_by_its_own_optimizer_and_scheduler(more):
    params = CUSTOM["optimizer"]["params"]
    config = CUSTOM | {"optimizer": {"type": "AdamW", "params": params | more}}
    before, reference = train_by_hand(
        lambda parameters: torch.optim.AdamW(parameters, **params),
        lambda step: math.log(max(step, 1)) / math.log(100),  # no step is 0: the first two have a rate of 0
    )

    results = run_in_processes(train_with, 2, WithoutOptimizer, config, limit_s=600)  # may compile CPUAdam

    assert moved_differently(weights_on_all_ranks(results), before, reference) < 1e-2


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_config.py::test_the_custom_configuration_trains_by_its_own_optimizer_and_scheduler",
)
@pytest.mark.slow
def test_the_offloading_configuration_trains_in_bf16():
    before, reference = train_by_hand(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))

    results = run_in_processes(train_with, 2, WithAdamW, OFFLOADING)

    difference = moved_differently(weights_on_all_ranks(results), before, reference)
    assert 1e-5 < difference < 0.2, "16 bits round"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*(pytest.param(each, marks=WHERE_IT_CHANGED) for each in (1, 2)), 3])
def test_a_configuration_clips_adam_as_it_says(stage):
    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, eps=1.0, weight_decay=0.0)  # whose steps depend on the norm

    before, reference = train_by_hand(adam, max_norm=0.5)
    config = {
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1.0}},
    }

    results = run_in_processes(train_with, 2, WithoutOptimizer, config)

    assert moved_differently(weights_on_all_ranks(results), before, reference) < 1e-5


# --- Values inside sections --------------------------------------------------------------------------------------


def within(path, value):
    """A configuration with `value` at `path`."""
    config = {
        "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}},
    }  # fmt: skip
    *sections, key = path.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("optimizer.params.lr", "fast", "a number"),
        ("optimizer.params.betas", 0.9, "two numbers"),
        ("optimizer.params.betas", [0.9, "x"], "two numbers"),
        ("optimizer.params.torch_adam", "yes", "true or false"),
        ("optimizer.params", [1], "a mapping"),
        ("scheduler.params.warmup_num_steps", "many", "a whole number"),
        ("scheduler.params.warmup_max_lr", [1e-3], "a number"),
        ("scheduler.params.warmup_type", "cosine", "'log' or 'linear'"),
        ("flops_profiler.profile_step", "first", "a whole number"),
        ("comms_logger.enabled", 1, "true or false"),
        ("comms_logger.prof_ops", "all_reduce", "a list of text"),
        ("torch_autocast.dtype", "int8", "'bf16'"),
        ("zero_optimization.zenflow.topk_ratio", 2, "a number from 0 to 1"),
        ("zero_optimization.zenflow.select_interval", "never", "a whole number"),
    ],
)
def test_a_value_of_the_wrong_type_within_a_section_is_named(path, value, expected):
    said = refusal(DeepSpeedOptions, config=within(path, value))

    assert path in said
    assert f"expected {expected}" in said


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("flops_profiler.profile_stepp", 1),
        ("comms_logger.enable", True),
        ("zero_optimization.zenflow.topk", 0.1),
        ("torch_autocast.type", "bf16"),
    ],
)
def test_an_unknown_word_within_a_section_is_named(path, value):
    assert f"{path} of strategy.deepspeed.config is unknown" in refusal(DeepSpeedOptions, config=within(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_optimization.zero_quantized_gradients", True),
        ("data_types.grad_accum_dtype", "fp32"),
        ("data_types.keep_in_fp32_modules", ["norm"]),
    ],
)
def test_an_option_without_effect_is_refused(path, value):
    assert f"{path} of strategy.deepspeed.config is set, and " in refusal(DeepSpeedOptions, config=within(path, value))
