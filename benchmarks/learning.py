"""What a small GPT learns from the same tokens: losses counted by batches and by tokens; AdamW alone and with Muon.

    python benchmarks/learning.py [--quick]

The text is that of `stratagem demo`. For the first table each sample is a sentence, and each batch has sentences of
similar length, so that the batches of an accumulation window have very different numbers of targets.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem.api.seeding import seed_everything
from stratagem_demo.gpt import CONTEXT, GPT, encode, loaders, manual, words_and_characters

BATCH, ACCUMULATE, IGNORED = 4, 8, -100
#: Steps between two validations.
EVERY = 25
#: Loss on held-out text for which tokens are counted.
GOAL = 4.0


class Learner(GPT):
    """The demo's GPT, which keeps the losses of its validations."""

    def __init__(self, vocabulary: list[str], with_muon: bool = False, steps: int = 250) -> None:
        super().__init__(vocabulary, steps=steps)
        self.with_muon = with_muon
        #: The number of tokens seen and the loss per token, for each validation.
        self.curve: list[tuple[int, float]] = []
        self.seen = self.held_out = 0
        self.total = 0.0

    def loss(self, batch: Any) -> torch.Tensor:
        text, following = batch
        return F.cross_entropy(self(text).flatten(0, 1).float(), following.flatten(), ignore_index=IGNORED)

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen += int((batch[1] != IGNORED).sum())
        return self.loss(batch)

    def validation_step(self, batch: Any) -> None:
        count = int((batch[1] != IGNORED).sum())
        self.total, self.held_out = self.total + count * float(self.loss(batch)), self.held_out + count

    def on_validation_epoch_end(self) -> None:
        self.curve.append((self.seen, self.total / self.held_out))
        self.total, self.held_out = 0.0, 0

    def configure_optimizers(self) -> Any:
        if not self.with_muon:
            return super().configure_optimizers()
        matrices = [p for p in self.blocks.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if all(p is not each for each in matrices)]
        muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
        adamw = torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(
                each, lambda step: min((step + 1) / 50, (100 / max(step, 100)) ** 0.5)
            ) for each in (muon, adamw)
        ]  # fmt: skip
        return [muon, adamw], [{"scheduler": each, "interval": "step"} for each in schedules]


def sentences(vocabulary: list[str]) -> tuple[list[Any], list[Any]]:
    """Return batches of sentences of similar length, in random order, and those that are held out."""
    samples = [torch.tensor(encode(line, vocabulary))[: CONTEXT + 1] for line in manual().splitlines()]
    samples = [each for each in samples if len(each) > 4]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(1)).tolist()
    cut = len(order) * 9 // 10
    train = sorted(order[:cut], key=lambda index: len(samples[index]))
    groups = [train[start : start + BATCH] for start in range(0, len(train), BATCH)]
    mixed = torch.randperm(len(groups), generator=torch.Generator().manual_seed(2)).tolist()
    held_out = [order[start : start + BATCH] for start in range(cut, len(order), BATCH)]
    return [_padded([samples[i] for i in groups[g]]) for g in mixed], [
        _padded([samples[i] for i in each]) for each in held_out
    ]


def _padded(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    text = pad([each[:-1] for each in samples], batch_first=True)
    return text, pad([each[1:] for each in samples], batch_first=True, padding_value=IGNORED)


def learned(model: Learner, train: Any, held_out: Any, **arguments: Any) -> list[tuple[int, float]]:
    """Train `model`, and return its curve."""
    seed_everything(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = sg.Trainer(
            accelerator="cpu", devices=1, max_epochs=-1, gradient_clip_val=1.0, check_val_every_n_epoch=None,
            num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            default_root_dir=folder, **arguments,
        )  # fmt: skip
        trainer.fit(model, train, held_out)
    return model.curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    steps = 50 if parser.parse_args().quick else 250
    vocabulary = words_and_characters(manual())
    train, held_out = sentences(vocabulary)
    counts = torch.tensor([float((targets != IGNORED).sum()) for _, targets in train])
    print(
        f"{len(train)} batches of {BATCH} sentences with {counts.min():.0f} to {counts.max():.0f} targets, "
        f"{ACCUMULATE} batches a step; loss per token on held-out sentences\n"
    )
    curves = {}
    for normalization in ("batches", {"labels": 1}):
        seed_everything(1)
        curves[str(normalization)] = learned(
            Learner(vocabulary, steps=steps), train, held_out, accumulate_grad_batches=ACCUMULATE,
            loss_normalization=normalization, val_check_interval=EVERY * ACCUMULATE,
        )  # fmt: skip
    by_batches, by_tokens = curves.values()
    print("| batches | mean of batches | mean over tokens |\n|---|---|---|")
    for index, ((_, first), (_, second)) in enumerate(zip(by_batches, by_tokens, strict=True), 1):
        print(f"| {index * EVERY * ACCUMULATE} | {first:.3f} | {second:.3f} |", flush=True)

    train, held_out = loaders(manual(), vocabulary, 32)
    print("\nWindows of 64 tokens, 32 a step; loss on held-out text\n")
    curves = {}
    for with_muon in (False, True):
        seed_everything(1)
        model = Learner(vocabulary, with_muon, steps)
        curves["Muon for matrices, AdamW for the rest" if with_muon else "AdamW"] = learned(
            model, train, held_out, val_check_interval=EVERY
        )
    print(f"| | tokens to a loss of {GOAL} | loss at step {steps} |\n|---|---|---|")
    for name, curve in curves.items():
        reached = next((f"{seen:,}" for seen, loss in curve if loss <= GOAL), "not reached")
        print(f"| {name} | {reached} | {curve[-1][1]:.3f} |", flush=True)
    print("\n| tokens | " + " | ".join(curves) + " |\n|---|" + "---|" * len(curves))
    for rows in zip(*curves.values(), strict=True):
        print(f"| {rows[0][0]:,} | " + " | ".join(f"{loss:.3f}" for _, loss in rows) + " |", flush=True)


if __name__ == "__main__":
    main()
