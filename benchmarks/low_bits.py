"""Fewer bits, nearly the same loss: fp8 beside bf16, and AdamW with 8-bit state beside AdamW, on a small GPT.

    python benchmarks/low_bits.py [--steps 200] [--width 128]

Needs stratagem-torchao. The GPT is that of `stratagem demo`, on the same text. All runs have the same weights and
batches to begin with. fp8 is emulated: it rounds as a GPU does, and takes longer. About three minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings

import stratagem_torchao
import torch

import stratagem as sg
from stratagem.api.seeding import seed_everything
from stratagem_demo.gpt import CharGPT, loaders, manual

FP8 = {"name": "fp8", "emulate": True}
RUNS = {
    "bf16": ({"precision": "bf16-mixed"}, "AdamW"),
    "fp8 tensorwise": ({"precision": FP8}, "AdamW"),
    "fp8 rowwise": ({"precision": FP8 | {"recipe_name": "rowwise"}}, "AdamW"),
    "fp8 rowwise_with_gw_hp": ({"precision": FP8 | {"recipe_name": "rowwise_with_gw_hp"}}, "AdamW"),
    "32": ({"precision": "32-true"}, "AdamW"),
    "AdamW8bit": ({"precision": "32-true"}, "AdamW8bit"),
    "AdamW4bit": ({"precision": "32-true"}, "AdamW4bit"),
    "AdamWFp8": ({"precision": "32-true"}, "AdamWFp8"),
}
BESIDE = {name: "bf16" if name.startswith("fp8") else "32" for name in RUNS if name not in ("bf16", "32")}


class GPT(CharGPT):
    """The GPT of the demo with another optimizer, which keeps the losses of its last steps."""

    def __init__(self, vocabulary: str, width: int, optimizer: str) -> None:
        super().__init__(vocabulary, width=width, depth=2)
        self.optimizer, self.losses = optimizer, []

    def training_step(self, batch):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        kind = getattr(torch.optim if self.optimizer == "AdamW" else stratagem_torchao, self.optimizer)
        return kind(self.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.05)

    def on_fit_start(self) -> None:
        pass


def state_bytes(optimizer) -> int:
    """Return the bytes of the moments, including scales and tables of quantized ones."""
    total = 0
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if key != "step":
                parts = value.__tensor_flatten__()[0] if hasattr(value, "codes") else ()
                total += sum(getattr(value, part).nbytes for part in parts) or value.nbytes
    return total


def measure(name: str, steps: int, width: int, batch_size: int) -> dict:
    chosen, optimizer = RUNS[name]
    seed_everything(1)
    text = manual()
    vocabulary = "".join(sorted(set(text)))
    model = GPT(vocabulary, width, optimizer)
    train, _ = loaders(text, vocabulary, batch_size)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = sg.Trainer(**quiet, **chosen, devices=1, max_steps=steps, gradient_clip_val=1.0)
    start = time.perf_counter()
    trainer.fit(model, train)
    seconds = time.perf_counter() - start
    last = [float(loss) for loss in model.losses[-20:]]
    return {
        "loss": statistics.mean(last),
        "ms_per_step": round(1000 * seconds / steps, 1),
        "state_bytes": state_bytes(trainer.optimizers[0]),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*num_workers.*")
    found = {}
    for name in RUNS:
        found[name] = row = measure(name, options.steps, options.width, options.batch_size)
        other = found.get(BESIDE.get(name, ""), row)
        row["loss_beside"] = round(row["loss"] / other["loss"] - 1, 5)
        row["state_beside"] = round(row["state_bytes"] / other["state_bytes"], 4)
        print(
            f"{name:24} loss {row['loss']:.4f} ({row['loss_beside']:+.2%})   state {row['state_bytes']:>9,} bytes "
            f"({row['state_beside']:.3f})   {row['ms_per_step']:.0f} ms a step",
            flush=True,
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
