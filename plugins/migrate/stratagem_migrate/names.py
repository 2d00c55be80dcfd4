"""The counterparts of the public names of Lightning 1.x and 2.x."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
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


def _read(plugin: Sequence[str] = (), **fields: str) -> Counterpart:
    return Counterpart(plugin=(plugin[0], plugin[1]) if plugin else None, **fields)


TABLES: Final = tomllib.loads(Path(__file__).with_name("moved.toml").read_text(encoding="utf-8"))
NAMES: Final = {name: _read(**fields) for name, fields in TABLES["names"].items()}

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
