"""What the tests run as ``srun python slurm_program.py '{"max_steps": 8}'``: trains, and leaves files that tell how."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import stratagem as sg
from stratagem_testing.reference import Net, joined_batches, part

#: The options of this program; the others are arguments of the Trainer.
OWN = {"batch_size": 24, "batches": 8, "pause_s": 0.0, "checkpoints_every": 0, "ckpt_path": None}


class Recorded(Net):
    """Writes its steps to ``steps-<rank>``, and in a job that was not started again pauses after each one."""

    def __init__(self, pause_s):
        super().__init__()
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        self.pause_s, self.restarts = pause_s if restarts == "0" else 0, restarts

    def training_step(self, batch, batch_idx):
        noise = 0.1 * torch.randn(batch[0].shape)  # resuming is exact only with the same random numbers
        return self.criterion(self(batch[0] + noise if self.pause_s is not None else batch[0]), batch[1])

    def on_train_batch_end(self):
        with open(f"steps-{self.global_rank}", "a") as file:
            file.write(f"{self.restarts} {self.global_step}\n")
        time.sleep(self.pause_s or 0)


def main(options):
    own = {name: options.pop(name, default) for name, default in OWN.items()}
    sg.seed_everything(1)
    callbacks = [*options.pop("callbacks", [])]
    if own["checkpoints_every"]:
        callbacks += [{"name": "model_checkpoint", "every_n_train_steps": own["checkpoints_every"]}]
    quiet = {"enable_progress_bar": False, "logger": False, "accelerator": "cpu"}
    quiet["enable_checkpointing"] = bool(own["checkpoints_every"])
    trainer = sg.Trainer(**({"default_root_dir": "."} | quiet | options), callbacks=callbacks)
    module = Recorded(own["pause_s"])
    batches = joined_batches(own["batches"], own["batch_size"])
    trainer.fit(module, Shared(trainer, batches), ckpt_path=own["ckpt_path"])
    world = trainer.run.world
    place = {name: getattr(world, name) for name in ("rank", "local_rank", "node_rank", "world_size", "num_nodes",
                                                     "local_world_size", "main_address")}  # fmt: skip
    Path(f"place-{world.rank}.json").write_text(json.dumps(place | {"environment": str(trainer.run.stack.environment)}))
    torch.save({"steps": torch.tensor(trainer.global_step), **module.state_dict()}, f"end-{world.rank}.pt")


class Shared:
    """Yields this rank's part of each of `batches`: the number of ranks is known once the run is connected."""

    def __init__(self, trainer, batches):
        self.trainer, self.batches = trainer, batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(part(self.batches, self.trainer.global_rank, self.trainer.world_size))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
