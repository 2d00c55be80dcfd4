"""Write these checkpoints with Lightning 2.6, and the weights that Lightning reaches: ``python write.py``, with Lightning.

Each run has 16 optimizer steps and is saved after 8 of them. `reached.pt` has the weights at the end of the run that was not
interrupted. A folder is written as a zip file.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import unittest.mock
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, Timer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).parent))
from net import batches, body, validation

HERE = Path(__file__).parent
Body = body(pl.LightningModule)
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "use_distributed_sampler": False,
}  # fmt: skip


def settle() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class SaveAt(pl.Callback):
    """Save once after `batch` batches of the first epoch, or at its end; `when` is the hook."""

    def __init__(self, path: Path, when: str, batch: int = -1) -> None:
        self.path, self.when, self.batch = path, when, batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.when == "batch" and trainer.current_epoch == 0 and batch_idx + 1 == self.batch:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.when == "epoch" and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.when == "validation" and trainer.current_epoch == 0 and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)


def fit(
    count: int,
    loaders: Any = (),
    callbacks: Any = (),
    ckpt_path: Any = None,
    share: Any = (),
    make: Any = DataLoader,
    model: Any = Body,
    **options: Any,
) -> Any:
    """Train `count` batches an epoch; return the trainer."""
    callbacks = list(callbacks)
    options = {"enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks)} | QUIET | options
    trainer = pl.Trainer(callbacks=callbacks, **options)
    trainer.fit(model(), batches(count, *share, make=make), *loaders, ckpt_path=ckpt_path)
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.lightning_module.state_dict().items()}


def watchers(folder: Path) -> list[Any]:
    return [
        ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", save_top_k=2),
        EarlyStopping("val_loss", patience=5),
        Timer(),
    ]


def one_process(out: Path) -> dict[str, Any]:
    reached = {}
    for when in ("epoch", "validation"):
        saving = SaveAt(out / f"border_{when}.ckpt", when)
        reached["border"] = weights(fit(8, [validation()], [saving], max_epochs=2))
    fit(8, [validation()], watchers(Path("elsewhere")), max_epochs=1).save_checkpoint(out / "border_after.ckpt")
    shutil.rmtree("elsewhere")
    saving = SaveAt(out / "middle_batch.ckpt", "batch", 8)
    reached["middle"] = weights(fit(16, callbacks=[saving], max_epochs=1))
    fit(16, max_steps=8).save_checkpoint(out / "middle_after.ckpt")
    saving = SaveAt(out / "middle_stateful.ckpt", "batch", 8)
    reached["middle_stateful"] = weights(fit(16, callbacks=[saving], make=StatefulDataLoader, max_epochs=1))
    for batch in (16, 17):  # between two windows, and within one
        saving = SaveAt(out / f"accumulated_{batch}.ckpt", "batch", batch)
        run = fit(32, callbacks=[saving], max_epochs=1, accumulate_grad_batches=2)
        reached["accumulated"] = weights(run)
    saving = SaveAt(out / "average.ckpt", "epoch")
    run = fit(8, callbacks=[EMAWeightAveraging(decay=0.9), saving], max_epochs=2)
    reached["average"] = weights(run)
    fit(8, max_epochs=1).save_checkpoint(out / "weights.ckpt", weights_only=True)
    return reached


# --- Two processes -----------------------------------------------------------------------------------------------


class OnCPU(FSDPStrategy):
    """Lightning refuses its own class on a CPU, and torch's FSDP1 needs to be told of it."""

    def _setup_model(self, model: Any) -> Any:
        begin = FullyShardedDataParallel.__init__

        def on_cpu(self: Any, *given: Any, **named: Any) -> None:
            begin(self, *given, **named | {"device_id": torch.device("cpu")})

        with unittest.mock.patch.object(FullyShardedDataParallel, "__init__", on_cpu):
            return super()._setup_model(model)


class Meshed(ModelParallelStrategy):
    """FSDP2 over both processes."""


class Sharded(Body):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.device_mesh is not None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class DeepSpeedOnCPU(DeepSpeedStrategy):
    """Lightning refuses its own class on a CPU."""

    root_device = torch.device("cpu", 0)

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        import deepspeed

        self.set_world_ranks()
        deepspeed.init_distributed("gloo", distributed_port=self.cluster_environment.main_port)


class OneGroup(Body):
    """DeepSpeed takes one group of parameters and one scheduler."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def strategy(name: str) -> Any:
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if name.startswith("fsdp2"):
        return Meshed(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return OnCPU(process_group_backend="gloo", state_dict_type=name.partition("_")[2], auto_wrap_policy={nn.Linear})


def processes(rank: int, port: int) -> dict[str, str]:
    """Return the variables of a launcher of two processes."""
    return {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "1",
    }  # fmt: skip


def on_rank(rank: int, port: int, name: str, out: Path, results: Any) -> None:
    settle()
    os.environ |= processes(rank, port)
    torch.set_num_threads(1)
    model = Sharded if name == "fsdp2" else Body
    options = {"devices": 2, "share": (rank, 2), "model": model}
    for case, count, half in (("border", 8, {"max_epochs": 1}), ("middle", 16, {"max_steps": 8})):
        saved = fit(count, strategy=strategy(name), **options, **half)
        saved.save_checkpoint(out / f"{name}_{case}.ckpt")
        run = fit(count, strategy=strategy(name), **options, max_epochs=2 if case == "border" else 1)
        run.save_checkpoint(results / f"{name}_{case}.ckpt", weights_only=True)


def deepspeed_on_rank(rank: int, port: int, out: Path) -> None:
    settle()
    os.environ |= processes(rank, port) | {"DS_ACCELERATOR": "cpu"}
    run = fit(
        8,
        strategy=DeepSpeedOnCPU(stage=2, process_group_backend="gloo"),
        devices=2,
        share=(rank, 2),
        model=OneGroup,
        max_epochs=1,
    )
    run.save_checkpoint(out / "deepspeed.ckpt")


def two_processes(out: Path, scratch: Path) -> dict[str, Any]:
    reached = {}
    for number, name in enumerate(("ddp", "fsdp_sharded", "fsdp2")):
        torch.multiprocessing.spawn(on_rank, (29610 + number, name, out, scratch), nprocs=2)
        for case in ("border", "middle"):
            path = scratch / f"{name}_{case}.ckpt"
            if path.is_file():
                reached[f"{name}_{case}"] = torch.load(path)["state_dict"]
            else:
                key = "state_dict" if name == "fsdp2" else "model"
                state = {key: Body().state_dict()}
                dcp.load(state, checkpoint_id=path, no_dist=True)
                reached[f"{name}_{case}"] = state[key]
    return reached


def own_continuations(out: Path, reached: dict[str, Any]) -> None:
    """Print how far Lightning's own continuation is from the run that was not interrupted."""
    for name, count, options in [
        ("border_epoch", 8, {"max_epochs": 2}), ("border_validation", 8, {"max_epochs": 2}),
        ("border_after", 8, {"max_epochs": 2}), ("middle_batch", 16, {"max_epochs": 1}),
        ("middle_after", 16, {"max_epochs": 1}), ("middle_stateful", 16, {"max_epochs": 1, "make": StatefulDataLoader}),
        ("accumulated_16", 32, {"max_epochs": 1, "accumulate_grad_batches": 2}),
        ("accumulated_17", 32, {"max_epochs": 1, "accumulate_grad_batches": 2}),
    ]:  # fmt: skip
        loaders = [validation()] if name in ("border_epoch", "border_validation") else []
        run = fit(count, loaders, ckpt_path=out / f"{name}.ckpt", **options)
        far = max(
            float((value - reached[name.partition("_")[0]][key]).abs().max()) for key, value in weights(run).items()
        )
        print(f"{name}: step {run.global_step}, Lightning's own continuation differs by {far:.1e}")


if __name__ == "__main__":
    settle()
    with tempfile.TemporaryDirectory() as name:
        reached = one_process(HERE)
        reached |= two_processes(HERE, Path(name))
    torch.multiprocessing.spawn(deepspeed_on_rank, (29620, HERE), nprocs=2)
    own_continuations(HERE, reached)
    for folder in [each for each in HERE.glob("*.ckpt") if each.is_dir()]:
        shutil.make_archive(str(folder), "zip", folder)
        shutil.rmtree(folder)
    torch.save(reached, HERE / "reached.pt")
