"""The counterparts of the public names of Lightning 1.x and 2.x."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from stratagem_migrate import installed


@frozen
class Counterpart:
    """The replacement of a name of Lightning."""

    #: A name in stratagem, such as ``Module`` or ``find_usable_cuda_devices``; empty if there is none.
    name: str = ""
    #: The plugin with this feature: kind and name.
    plugin: tuple[str, str] | None = None
    #: Text, if it is neither.
    text: str = ""
    note: str = ""

    @property
    def is_missing(self) -> bool:
        return not (self.name or self.text or (self.plugin and installed.has_plugin(*self.plugin)))

    @property
    def imported_from(self) -> tuple[str, str] | None:
        """The module and the name to import; None if it is not imported."""
        if self.name:
            module, _, name = f"stratagem.{self.name}".rpartition(".")
            return module, name
        if self.plugin and (cls := installed.plugin_class(*self.plugin)) is not None:
            return f"stratagem.{installed.MODULES[self.plugin[0]]}", cls.__name__
        return None

    def __str__(self) -> str:
        if self.name:
            return f"stratagem.{self.name}"
        if self.plugin and not self.is_missing:
            return installed.expression(*self.plugin)
        return self.text


def _plugins(kind: str, **names: str) -> dict[str, Counterpart]:
    return {theirs: Counterpart(plugin=(kind, ours)) for theirs, ours in names.items()}


def _missing(*names: str, note: str) -> dict[str, Counterpart]:
    return dict.fromkeys(names, Counterpart(note=note))


_BY_HAND = "write it as a strategy plugin, docs/strategy-in-60-lines.md"

NAMES: Final[dict[str, Counterpart]] = {
    "Trainer": Counterpart("Trainer"),
    "LightningModule": Counterpart("Module"),
    "LightningDataModule": Counterpart("DataModule"),
    "Callback": Counterpart("Callback"),
    "Logger": Counterpart("Logger"),
    "LightningLoggerBase": Counterpart("Logger"),
    "LightningLoggerBaseExperiment": Counterpart(note="a logger gets numbers in log_metrics"),
    "seed_everything": Counterpart("seed_everything"),
    "Fabric": Counterpart("Run", note="Run.launch(main), then run.setup, run.backward, run.optimizer_step, run.save"),
    "LightningLite": Counterpart("Run", note="Run.launch(main), then run.setup, run.backward, run.optimizer_step"),
    "LightningCLI": Counterpart(
        text="`stratagem fit run.yaml`", note="or stratagem.Trainer.from_cli() in your own script"
    ),
    "LightningArgumentParser": Counterpart(text="stratagem.Trainer.from_cli()"),
    "MisconfigurationException": Counterpart("errors.ConfigError"),
    "find_usable_cuda_devices": Counterpart("find_usable_cuda_devices"),
    "Tuner": Counterpart(
        text='callbacks=["learning_rate_finder"] or ["batch_size_finder"]', note="they run when fit starts"
    ),
    # --- Callbacks
    **_plugins(
        "callback",
        ModelCheckpoint="model_checkpoint", EarlyStopping="early_stopping",
        LearningRateMonitor="learning_rate_monitor", LearningRateLogger="learning_rate_monitor",
        GradientAccumulationScheduler="gradient_accumulation_scheduler", Timer="timer",
        EMAWeightAveraging="ema", StochasticWeightAveraging="stochastic_weight_averaging",
        ModelSummary="model_summary", RichModelSummary="model_summary", DeviceStatsMonitor="device_stats",
        GPUStatsMonitor="device_stats", XLAStatsMonitor="device_stats", ThroughputMonitor="throughput",
        BatchSizeFinder="batch_size_finder", LearningRateFinder="learning_rate_finder",
        BackboneFinetuning="backbone_finetuning", OnExceptionCheckpoint="on_exception_checkpoint",
        SpikeDetection="spike_detection", TQDMProgressBar="tqdm",
        RichProgressBar="progress", ProgressBar="progress", ProgressBarBase="progress", LambdaCallback="lambda",
    ),
    "WeightAveraging": Counterpart("callbacks.WeightAveraging"),
    "BasePredictionWriter": Counterpart("callbacks.BasePredictionWriter"),
    "BaseFinetuning": Counterpart("callbacks.BaseFinetuning"),
    "Checkpoint": Counterpart("Callback"),
    "ModelPruning": Counterpart(note="call torch.nn.utils.prune from a callback"),
    "QuantizationAwareTraining": Counterpart(text='callbacks=["int8_qat"] (of stratagem-torchao)'),
    # --- Loggers
    **_plugins(
        "logger", CSVLogger="csv", TensorBoardLogger="tensorboard", WandbLogger="wandb", MLFlowLogger="mlflow"
    ),
    **_missing(
        "CometLogger", "NeptuneLogger", "TestTubeLogger", "LitLogger",
        note="a logger is a class with one method, log_metrics: docs/writing-a-plugin.md",
    ),
    # --- Strategies
    **_plugins(
        "strategy", DDPStrategy="ddp", FSDPStrategy="fsdp", SingleDeviceStrategy="single_device",
        DDPShardedStrategy="ddp_sharded", DDPFullyShardedNativeStrategy="fsdp", DDPFullyShardedStrategy="fsdp",
        DDPPlugin="ddp", DDPShardedPlugin="ddp_sharded", DDPFullyShardedPlugin="fsdp",
        SingleDevicePlugin="single_device", DeepSpeedStrategy="deepspeed", DeepSpeedPlugin="deepspeed",
    ),
    **dict.fromkeys(
        ("DDPSpawnStrategy", "DDPSpawnPlugin"),
        Counterpart(text='stratagem.strategies.DDPStrategy(start_method="spawn")'),
    ),
    **dict.fromkeys(
        ("DDPSpawnShardedStrategy", "DDPSpawnShardedPlugin"),
        Counterpart(text='strategy="ddp_sharded", launcher="spawn"'),
    ),
    **dict.fromkeys(
        ("DataParallelStrategy", "DataParallelPlugin", "DDP2Plugin"),
        Counterpart(text='strategy="ddp"', note="one process for each device; the batch size is each process's"),
    ),
    **dict.fromkeys(
        ("HorovodStrategy", "HorovodPlugin"),
        Counterpart(text='strategy="horovod" (of stratagem-horovod)', note='strategy="ddp" needs no engine'),
    ),
    "HivemindStrategy": Counterpart(text='strategy={"name": "hivemind", ...} (of stratagem-hivemind)'),
    "BaguaStrategy": Counterpart(text='strategy="async_averaging" (or "decentralized")'),
    "DDPSequentialPlugin": Counterpart(
        text='strategy={"name": "ddp_sequential", "balance": [...]}', note="docs/parallelism.md"
    ),
    "ModelParallelStrategy": Counterpart(
        text="stratagem.strategies.ParallelStrategy(shard=data_parallel_size, tensor=tensor_parallel_size)",
        note='where Lightning\'s sizes are "auto": shard is num_nodes, tensor is "auto"; docs/parallelism.md',
    ),
    **_missing(
        "XLAStrategy", "SingleDeviceXLAStrategy", "SingleTPUStrategy", "TPUSpawnStrategy", "XLAEnvironment",
        "XLAProfiler", "XLAAccelerator", "TPUAccelerator", "XLACheckpointIO", "XLAPrecision", "TPUSpawnPlugin",
        note='`pip install stratagem-xla`, and choose accelerator="tpu" and a strategy of it by name',
    ),
    **_missing(
        "IPUStrategy", "HPUParallelStrategy", "SingleHPUStrategy", note="not available",
    ),
    "ColossalAIStrategy": Counterpart(
        text='strategy="fsdp"',
        note='it shards as Gemini did; `pip install stratagem-colossalai` has Gemini itself, as plugin="gemini"',
    ),
    "Strategy": Counterpart("Strategy", note=_BY_HAND),
    "ParallelStrategy": Counterpart("Strategy", note=_BY_HAND),
    "TrainingTypePlugin": Counterpart("Strategy", note=_BY_HAND),
    "StrategyRegistry": Counterpart(text='an entry point in the group "stratagem.strategy"', note=_BY_HAND),
    # --- Precision, environments, checkpoints, accelerators
    **dict.fromkeys(
        ("MixedPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "ApexMixedPrecisionPlugin",
         "ShardedNativeMixedPrecisionPlugin", "FSDPPrecision", "FullyShardedNativeMixedPrecisionPlugin"),
        Counterpart(text='precision="16-mixed" or "bf16-mixed"'),
    ),
    "HalfPrecision": Counterpart(text='precision="16-true" or "bf16-true"'),
    "DoublePrecision": Counterpart(text='precision="64-true"'),
    "DoublePrecisionPlugin": Counterpart(text='precision="64-true"'),
    "BitsandbytesPrecision": Counterpart(text='precision={"name": "nf4", ...} (of stratagem-bitsandbytes)'),
    "TransformerEnginePrecision": Counterpart(
        text='precision="transformer-engine" (of stratagem-transformer-engine)',
        note='"fp8" with emulate=True runs without CUDA, too',
    ),
    "DeepSpeedPrecision": Counterpart(text='precision="bf16-mixed" or "16-mixed"', note="the engine applies it"),
    "PrecisionPlugin": Counterpart("Precision"),
    "Precision": Counterpart("Precision"),
    **_plugins(
        "environment", TorchElasticEnvironment="torchelastic", LightningEnvironment="local",
        SLURMEnvironment="slurm", KubeflowEnvironment="kubeflow", LSFEnvironment="lsf", MPIEnvironment="mpi",
    ),
    "ClusterEnvironment": Counterpart("Environment"),
    "CheckpointIO": Counterpart("CheckpointFormat"),
    "TorchCheckpointIO": Counterpart(text='checkpoint="full"'),
    "AsyncCheckpointIO": Counterpart(text='checkpoint={"name": "full", "async_save": True}'),
    "TorchSyncBatchNorm": Counterpart(text="Trainer(sync_batchnorm=True)"),
    "NativeSyncBatchNorm": Counterpart(text="Trainer(sync_batchnorm=True)"),
    "LayerSync": Counterpart(text="Trainer(sync_batchnorm=True)"),
    "CPUAccelerator": Counterpart(text='accelerator="cpu"'),
    "CUDAAccelerator": Counterpart(text='accelerator="cuda"'),
    "GPUAccelerator": Counterpart(text='accelerator="gpu"'),
    "MPSAccelerator": Counterpart(text='accelerator="mps"'),
    "Accelerator": Counterpart("Accelerator"),
    # --- Profilers
    "SimpleProfiler": Counterpart(text='profiler="simple"'),
    "AdvancedProfiler": Counterpart(text='profiler="advanced"'),
    "PyTorchProfiler": Counterpart(text='profiler="pytorch"'),
    "PassThroughProfiler": Counterpart(text="no profiler="),
    # --- Utilities
    "rank_zero_only": Counterpart("rank_zero_only"),
    "rank_zero_info": Counterpart("rank_zero_info"),
    "rank_zero_warn": Counterpart("rank_zero_warn"),
    **dict.fromkeys(
        ("rank_zero_debug", "rank_zero_deprecation"),
        Counterpart(text="if trainer.is_global_zero:", note="or trainer.print, which prints only on rank 0"),
    ),
    "CombinedLoader": Counterpart("CombinedLoader"),
    **dict.fromkeys(
        ("convert_zero_checkpoint_to_fp32_state_dict", "get_fp32_state_dict_from_zero_checkpoint"),
        Counterpart(text="`stratagem checkpoint consolidate`", note="it writes one file for torch.load"),
    ),
    "isolate_rng": Counterpart(text="torch.random.fork_rng()"),
    "grad_norm": Counterpart(plugin=("callback", "gradient_norms")),
    "move_data_to_device": Counterpart("api.batches.move_batch"),
    "AttributeDict": Counterpart(text="a dict"),
    "STEP_OUTPUT": Counterpart(text="typing.Any"),
    "EPOCH_OUTPUT": Counterpart(text="list"),
    "TRAIN_DATALOADERS": Counterpart(text="torch.utils.data.DataLoader"),
    "EVAL_DATALOADERS": Counterpart(text="torch.utils.data.DataLoader"),
    "OptimizerLRScheduler": Counterpart(text="typing.Any"),
    "LightningOptimizer": Counterpart(text="torch.optim.Optimizer"),
    "TrainResult": Counterpart(text="self.log"),
    "EvalResult": Counterpart(text="self.log"),
    "__version__": Counterpart("__version__"),
    **_missing("LightningDistributedModule", "LightningParallelModule", note="not part of stratagem"),
}  # fmt: skip

#: Names whose counterpart takes their place as it is, in a call or an annotation; `imports` tells how others differ.
DROP_IN: Final = frozenset({
    "Trainer", "LightningModule", "LightningDataModule", "Callback", "seed_everything", "MisconfigurationException",
    "find_usable_cuda_devices", "rank_zero_only", "rank_zero_info", "rank_zero_warn", "move_data_to_device",
    "Logger", "LightningLoggerBase", "Strategy", "Accelerator", "CombinedLoader",
    "ModelCheckpoint", "EarlyStopping", "LearningRateMonitor", "LearningRateLogger", "GradientAccumulationScheduler",
    "Timer", "StochasticWeightAveraging", "ModelSummary", "RichModelSummary", "DeviceStatsMonitor", "BatchSizeFinder",
    "LearningRateFinder", "BackboneFinetuning", "WeightAveraging", "BasePredictionWriter", "BaseFinetuning",
    "OnExceptionCheckpoint", "TQDMProgressBar", "RichProgressBar", "ProgressBar",
    "CSVLogger", "TensorBoardLogger", "WandbLogger", "MLFlowLogger",
    "DDPStrategy", "DDPPlugin", "FSDPStrategy", "DDPFullyShardedNativeStrategy", "SingleDeviceStrategy",
    "SingleDevicePlugin", "DeepSpeedStrategy", "DeepSpeedPlugin", "DDPShardedStrategy", "DDPShardedPlugin",
    "TorchElasticEnvironment", "LightningEnvironment", "SLURMEnvironment", "KubeflowEnvironment", "LSFEnvironment",
    "MPIEnvironment",
})  # fmt: skip
#: Names of Lightning's utilities that other packages have: module and name.
ELSEWHERE: Final[dict[str, tuple[str, str]]] = {
    **dict.fromkeys(
        ("STEP_OUTPUT", "OptimizerLRScheduler", "TRAIN_DATALOADERS", "EVAL_DATALOADERS", "EPOCH_OUTPUT",
         "LRSchedulerType", "LRSchedulerTypeUnion"),
        ("typing", "Any"),
    ),
    "apply_to_collection": ("lightning_utilities.core.apply_func", "apply_to_collection"),
    "AttributeDict": ("stratagem_trainer.hyperparameters", "Hyperparameters"),
}  # fmt: skip

#: Positional arguments of Lightning's classes, in order.
POSITIONS: Final = {
    "EarlyStopping": ("monitor", "min_delta", "patience", "verbose", "mode"),
    "ModelCheckpoint": ("dirpath", "filename", "monitor", "verbose", "save_last", "save_top_k"),
    "LearningRateMonitor": ("logging_interval", "log_momentum"),
    "GradientAccumulationScheduler": ("scheduling",),
    "Timer": ("duration", "interval"),
    "StochasticWeightAveraging": ("swa_lrs", "swa_epoch_start"),
    "BackboneFinetuning": (
        "unfreeze_backbone_at_epoch",
        "lambda_func",
        "backbone_initial_ratio_lr",
        "backbone_initial_lr",
        "should_align",
        "initial_denom_lr",
        "train_bn",
        "verbose",
    ),
    "ModelSummary": ("max_depth",),
    "RichModelSummary": ("max_depth",),
    "DeviceStatsMonitor": ("cpu_stats",),
    "OnExceptionCheckpoint": ("dirpath", "filename"),
    "TQDMProgressBar": ("refresh_rate", "process_position", "leave"),
    "RichProgressBar": ("refresh_rate", "leave"),
    "CSVLogger": ("save_dir", "name", "version"),
    "TensorBoardLogger": ("save_dir", "name", "version"),
    "WandbLogger": ("name", "save_dir", "version"),
    "MLFlowLogger": ("experiment_name", "run_name", "tracking_uri"),
}

_TO_TRAINER: Final = {
    "accelerator": "Trainer(accelerator=)",
    "parallel_devices": "Trainer(devices=)",
    "cluster_environment": "Trainer(environment=)",
    "checkpoint_io": "Trainer(checkpoint=)",
    "precision_plugin": "Trainer(precision=)",
}
_LEAVE_OUT: Final = "leave it out"
_REFRESH_RATE: Final = f"{_LEAVE_OUT}, the bar is updated by time; for 0 use Trainer(enable_progress_bar=False)"

#: Replacements of options that a plugin of stratagem does not have under that name.
OPTIONS: Final[dict[str, dict[str, str]]] = {
    "ModelCheckpoint": {
        "filepath": "dirpath= and filename=", "period": "every_n_epochs=", "every_n_val_epochs": "every_n_epochs=",
        "prefix": "filename=",
    },
    "EarlyStopping": {"log_rank_zero_only": f"{_LEAVE_OUT}, only rank 0 prints"},
    "CSVLogger": {"flush_logs_every_n_steps": "flush_every_n_steps=", "prefix": _LEAVE_OUT},
    "TQDMProgressBar": {"process_position": _LEAVE_OUT, "leave": _LEAVE_OUT, "refresh_rate": _REFRESH_RATE},
    "RichProgressBar": {
        "refresh_rate": _REFRESH_RATE, "theme": _LEAVE_OUT, "leave": _LEAVE_OUT, "console_kwargs": _LEAVE_OUT,
    },
    "BackboneFinetuning": {"lambda_func": "multiplier=, its factor", "verbose": _LEAVE_OUT, "rounding": _LEAVE_OUT},
    "StochasticWeightAveraging": {"device": _LEAVE_OUT},
    "EMAWeightAveraging": {
        "device": _LEAVE_OUT, "update_every_n_steps": "every_n_steps=", "update_starting_at_step": "start_step=",
        "update_starting_at_epoch": "a class that derives from EMA, with should_update(step_idx, epoch_idx)",
    },
    "DDPStrategy": _TO_TRAINER,
    "FSDPStrategy": _TO_TRAINER | {
        "activation_checkpointing": "activation_checkpointing_policy=", "process_group": "device_mesh=",
        "backward_prefetch": _LEAVE_OUT, "forward_prefetch": _LEAVE_OUT, "sync_module_states": _LEAVE_OUT,
    },
    "DeepSpeedStrategy": _TO_TRAINER | {"save_full_weights": _LEAVE_OUT},
}  # fmt: skip
OPTIONS["ProgressBar"] = OPTIONS["TQDMProgressBar"]
OPTIONS["DDPPlugin"] = OPTIONS["DDPStrategy"]
OPTIONS["DeepSpeedPlugin"] = OPTIONS["DeepSpeedStrategy"]
