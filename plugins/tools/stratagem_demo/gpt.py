"""Train a small GPT on sentences of the Python manual, and generate text: an example to read and run.

A user writes the module, the data and three lines for the Trainer.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from stratagem.api.seeding import seed_everything

#: Tokens, and those that follow each: (batch, length), both int64.
Batch = tuple[Tensor, Tensor]
CONTEXT = 64  # tokens
SAVE_EVERY = 250  # steps
MOST_STEPS = 250  # the text is short: the model would learn it by heart
DROPOUT = 0.25
#: Seconds that training may take unless the number of steps is given.
BUDGET_S = 120.0
#: A step takes longer than the measured part of it: the optimizer, messages between processes, logging, validation.
OVERHEAD = 1.6


# --- The model ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(DROPOUT)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, length, width / heads)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        out: Tensor = x + self.dropout(self.feed(self.norm_2(x)))
        return out


class GPT(sg.Module):
    """Predict the next token; GPT as in Radford et al. 2018, with pre-norm."""

    def __init__(
        self, vocabulary: Sequence[str], width: int = 128, depth: int = 4, num_heads: int = 4, steps: int = MOST_STEPS
    ) -> None:
        super().__init__()
        self.save_hyperparameters("vocabulary", "width", "depth", "num_heads", "steps")
        self.vocabulary, self.steps = vocabulary, steps
        #: The step and the perplexity of each validation: how many tokens the model hesitates between.
        self.perplexities: list[tuple[int, float]] = []
        self.tokens, self.places = nn.Embedding(len(vocabulary), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(vocabulary), bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))  # (batch, length, vocabulary)
        return logits

    def loss(self, batch: Batch) -> Tensor:
        text, following = batch
        return F.cross_entropy(self(text).flatten(0, 1).float(), following.flatten())

    def training_step(self, batch: Batch) -> Tensor:  # type: ignore[override]  # batch_idx may be left out
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=False)
        return loss

    def validation_step(self, batch: Batch) -> None:  # type: ignore[override]  # batch_idx may be left out
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.perplexities.append((self.global_step, math.exp(self.trainer.callback_metrics["val_loss"])))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)
        # 50 steps up, and from step 100 on down with the square root of the steps.
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 50, (100 / max(step, 100)) ** 0.5)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        # Each run trains `steps` more, from the step of the checkpoint.
        self.trainer.max_steps = self.global_step + self.steps

    @torch.no_grad()
    def generate(self, prompt: str, length: int, temperature: float = 0.6) -> str:
        """Return `prompt` continued by `length` tokens, without words that are spelled letter by letter."""
        tokens = encode(prompt, self.vocabulary)
        spells = torch.tensor([len(word) == 1 and (word.isalpha() or word == " ") for word in self.vocabulary])
        for _ in range(length):
            window = torch.tensor([tokens[-CONTEXT:]], device=self.device)
            logits = self(window)[0, -1].float().cpu().masked_fill(spells, -math.inf)
            probabilities = (logits / temperature).softmax(-1)
            tokens.append(int(torch.multinomial(probabilities, 1)))
        return "".join(self.vocabulary[token] for token in tokens)


# --- The data ----------------------------------------------------------------------------------------------------


def manual() -> str:
    """Return sentences of the language reference that CPython includes for ``help()``, without code and grammar."""
    from pydoc_data.topics import topics

    text = " ".join(
        re.sub(r"[*\"\u2018\u2019\u201c\u201d]", "", "\n".join(topics[name] for name in sorted(topics))).split()
    )
    sentence = re.compile(r"[A-Z][a-z]* [^_=|+\[\]{}<>@\\/^%&~]*[.:]")
    return "\n".join(filter(sentence.fullmatch, re.split(r"(?<=[.:]) ", text)))


def pieces(text: str) -> list[str]:
    """Split `text` into words, each with the space before it, and single characters."""
    return re.findall(r" ?[A-Za-z]+|[^A-Za-z]", text)


def words_and_characters(text: str, num_words: int = 1000) -> list[str]:
    """Return the tokens of a model of `text`: its characters, and its most frequent words."""
    words = [piece for piece, _ in Counter(pieces(text)).most_common(num_words) if len(piece) > 1]
    return [*sorted(set(text)), *words]


def encode(text: str, vocabulary: Sequence[str]) -> list[int]:
    """Return the tokens of `text`; a word that is not in `vocabulary` is spelled."""
    token = {word: index for index, word in enumerate(vocabulary)}
    spelled = ([piece] if piece in token else list(piece) for piece in pieces(text))
    return [token[part] for parts in spelled for part in parts]


class Windows(Dataset[Batch]):
    """Windows of tokens, each with the window one token later as target."""

    def __init__(self, tokens: Tensor, stride: int) -> None:
        self.tokens, self.stride = tokens, stride

    def __len__(self) -> int:
        return (len(self.tokens) - CONTEXT - 1) // self.stride + 1

    def __getitem__(self, index: int) -> Batch:
        start = index * self.stride
        return self.tokens[start : start + CONTEXT], self.tokens[start + 1 : start + CONTEXT + 1]


def loaders(
    text: str, vocabulary: Sequence[str], batch_size: int
) -> tuple[DataLoader[Batch], DataLoader[Batch]]:  # fmt: skip
    """Return a training loader for the first 90 % of `text`, and a validation loader for the rest."""
    tokens = torch.tensor(encode(text, vocabulary))
    cut = len(tokens) * 9 // 10
    train, held_out = Windows(tokens[:cut], stride=1), Windows(tokens[cut:], stride=CONTEXT)
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(held_out, batch_size)


# --- The run -----------------------------------------------------------------------------------------------------


def run(
    folder: Path, steps: int | None, batch_size: int, strategy: str, precision: str | None, devices: str | int | None
) -> None:
    """Train `steps` more optimizer steps from the checkpoints in `folder`, if there are any, and print a sample.

    Without `steps`, train as many as a few minutes allow on this machine.
    """
    seed_everything(1)
    text = manual()
    vocabulary = words_and_characters(text)
    is_chosen = steps is not None
    chosen_precision, chosen_steps, seconds = measured(GPT(vocabulary), precision, steps, batch_size)
    model = GPT(vocabulary, steps=chosen_steps)
    train, held_out = loaders(text, vocabulary, batch_size)

    trainer = sg.Trainer(
        strategy=strategy,
        precision=chosen_precision,
        devices=devices or ("auto" if torch.cuda.is_available() else 2),
        default_root_dir=folder,
        max_epochs=-1,
        max_time=None if is_chosen else BUDGET_S,  # the machine may get slower
        gradient_clip_val=1.0,
        val_check_interval=max(1, min(chosen_steps // 3, len(train) // 2)),
        num_sanity_val_steps=0,
        callbacks=[{"name": "model_checkpoint", "every_n_train_steps": SAVE_EVERY, "save_last": True}],
        log_every_n_steps=max(1, min(10, chosen_steps // 50)),
    )
    trainer.outcome.how_to_resume = "`stratagem demo`"
    started = sorted(folder.glob("checkpoints/*.ckpt"))
    if is_first_process():
        limited = not is_chosen
        print(
            plan(model, len(text), chosen_steps, seconds, folder, continues=bool(started), limited=limited), flush=True
        )
    trainer.fit(model, train, held_out, ckpt_path="last" if started else None)
    trainer.validate(model, held_out, verbose=False)
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")
    if trainer.is_global_zero:
        report(model, trainer)
        print(NEXT)


#: Printed at the end.
NEXT = """
next:
    stratagem demo                                     train on from here
    stratagem demo --strategy fsdp --dir demo_fsdp     the same model, sharded over the processes
    stratagem plugins list --kind strategy             what else can train it"""


def plan(model: GPT, characters: int, steps: int, seconds: float, folder: Path, continues: bool, limited: bool) -> str:
    """Say what the demo is about to do, and how long it takes; with `limited`, training ends after `BUDGET_S`."""
    work = f"{'up to ' if limited else ''}{steps} steps, about {minutes(seconds * steps * OVERHEAD)}"
    work += f" and {minutes(BUDGET_S)} at most" if limited else ""
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    often = f"every {SAVE_EVERY} steps, " if steps > SAVE_EVERY else ""
    lines = [
        f"training a GPT with {size:.1f} million parameters on the Python manual ({characters:,} characters)",
        f"{work}; then it generates text",
        f"checkpoints and logs go to {folder}: saved {often}at the end and on Ctrl-C",
    ]
    if continues:
        lines.append(f"continuing from the checkpoints in {folder}; delete that folder to start again")
    return "\n".join(lines)


def minutes(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 50:
        return f"{max(1, round(seconds))} s"
    count = max(1, round(seconds / 60))
    return f"{count} minute{'s' if count > 1 else ''}"


def is_first_process() -> bool:
    """Whether this process is the one that prints, before the trainer has connected the processes."""
    return os.environ.get("RANK", "0") == "0"


def report(model: GPT, trainer: sg.Trainer) -> None:
    """Print how well the model predicts, and a sample."""
    model.eval()
    sample = model.generate("The Python language", length=100)
    print(f"\n{progress(model.perplexities)}\nafter {trainer.global_step} steps; generated text:\n")
    print("    " + sample.replace("\n", "\n    "))


def progress(perplexities: list[tuple[int, float]]) -> str:
    """Return the first, the middle and the last of the `perplexities` as a sentence."""
    steps = sorted({step for step, _ in perplexities})
    chosen = sorted({steps[0], steps[(len(steps) - 1) // 2], steps[-1]})
    return "validation perplexity: " + ", ".join(f"{dict(perplexities)[step]:.0f} at step {step}" for step in chosen)


#: What the first process has measured, for the processes that it starts: precision, steps and seconds of a step.
_MEASURED = "STRATAGEM_DEMO_MEASURED"


def measured(model: GPT, precision: str | None, steps: int | None, batch_size: int) -> tuple[str, int, float]:
    """Return the precision whose steps are faster here, as many steps as fit the budget, and the seconds of one.

    All processes get the same. Both are as given where they are given.
    """
    if _MEASURED not in os.environ:
        times = {name: _seconds(model, name == "bf16-mixed", batch_size) for name in ("32-true", "bf16-mixed")}
        fastest = precision or min(times, key=lambda name: times[name])
        seconds = times.get(fastest, times["32-true"])
        count = steps or max(20, min(MOST_STEPS, int(BUDGET_S / (seconds * OVERHEAD)) // 10 * 10))
        os.environ[_MEASURED] = f"{fastest} {count} {seconds}"
    name, number, text = os.environ[_MEASURED].split()
    return name, int(number), float(text)


def _seconds(model: GPT, mixed: bool, batch_size: int) -> float:
    """Return the time of a step, with as many threads as each of two processes has on a CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    probe = GPT(model.vocabulary).to(device)
    batch = torch.randint(len(model.vocabulary), (2, batch_size, CONTEXT), device=device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            loss = probe.loss(tuple(batch))
        loss.backward()
        loss.item()
        times.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return sorted(times)[2]
