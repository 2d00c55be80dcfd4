"""Train as the configuration says: python -m src.train"""

from pathlib import Path
from typing import Any, Dict, List, Optional

import hydra
import lightning as L
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig


def instantiate_callbacks(cfg: Optional[DictConfig]) -> List[Callback]:
    callbacks: List[Callback] = []
    for part in (cfg or {}).values():
        if isinstance(part, DictConfig) and "_target_" in part:
            callbacks.append(hydra.utils.instantiate(part))
    return callbacks


def instantiate_loggers(cfg: Optional[DictConfig]) -> List[Logger]:
    logger: List[Logger] = []
    for part in (cfg or {}).values():
        if isinstance(part, DictConfig) and "_target_" in part:
            logger.append(hydra.utils.instantiate(part))
    return logger


def train(cfg: DictConfig) -> Dict[str, Any]:
    if cfg.get("seed"):
        L.seed_everything(cfg.seed, workers=True)

    datamodule: LightningDataModule = hydra.utils.instantiate(cfg.data)
    model: LightningModule = hydra.utils.instantiate(cfg.model)
    callbacks: List[Callback] = instantiate_callbacks(cfg.get("callbacks"))
    logger: List[Logger] = instantiate_loggers(cfg.get("logger"))
    trainer: Trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=logger)

    if cfg.get("train"):
        trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.get("ckpt_path"))
    train_metrics = trainer.callback_metrics

    if cfg.get("test"):
        ckpt_path = trainer.checkpoint_callback.best_model_path
        if ckpt_path == "":
            ckpt_path = None
        trainer.test(model=model, datamodule=datamodule, ckpt_path=ckpt_path)

    return {**train_metrics, **trainer.callback_metrics}


@hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
def main(cfg: DictConfig) -> None:
    metrics = train(cfg)
    Path("accuracy.txt").write_text(f"{float(metrics['train/acc'])} {float(metrics['test/acc'])}")


if __name__ == "__main__":
    main()
