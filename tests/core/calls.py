"""Count the calls of this library's functions on four ways through it; print them as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import stratagem as sg

ROOT = Path(sg.__file__).parents[2]
OURS = tuple(f"{ROOT / folder}/" for folder in ("core", "plugins"))
KIT = f"{ROOT / 'plugins' / 'testing'}/"
QUIET = {"accelerator": "cpu", "strategy": "ddp", "logger": False, "enable_model_summary": False, "max_epochs": 1}


class Counting:
    """The calls while it counts."""

    def __init__(self) -> None:
        self.number = 0

    def start(self) -> None:
        sys.setprofile(self._count)

    def stop(self) -> None:
        sys.setprofile(None)

    def _count(self, frame, event, _):
        file = frame.f_code.co_filename
        self.number += event == "call" and file.startswith(OURS) and not file.startswith(KIT)

    def within(self, function) -> int:
        self.number = 0
        self.start()
        try:
            function()
        finally:
            self.stop()
        return self.number


class Logs(sg.Module):
    """Logs a loss; counts from the middle of its fifth step to that of its sixth."""

    counting: Counting | None = None

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        if self.counting is not None and batch_idx in (4, 5):
            self.counting.start() if batch_idx == 4 else self.counting.stop()
        x, y = batch
        loss = (self.layer(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options):
    return sg.Trainer(**QUIET | {"enable_progress_bar": False, "enable_checkpointing": False} | options)


def main() -> dict[str, int]:
    batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(8)]
    counting, module = Counting(), Logs()
    fit = trainer()
    module.counting = counting
    fit.fit(module, batches)
    found = {"a step with one log": counting.number}
    sg.Trainer(strategy="ddp")
    found["a second Trainer"] = counting.within(lambda: sg.Trainer(strategy="ddp"))
    fit.save_checkpoint("first.ckpt")
    found["a second save"] = counting.within(lambda: fit.save_checkpoint("second.ckpt"))
    for _ in range(2):
        resumed = trainer(max_epochs=2)
        found["a second resume, with 8 batches"] = counting.within(
            lambda resumed=resumed: resumed.fit(Logs(), batches, ckpt_path="second.ckpt")
        )
    return found


torch.manual_seed(0)
print(json.dumps(main()))
