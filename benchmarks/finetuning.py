"""Fine-tuning of a language model: stratagem beside transformers' Trainer, in new processes that alternate.

    python benchmarks/finetuning.py [--quick] [--rounds 3] [--cases "full" "LoRA"]

Both train the same Llama of 14 million parameters from the same seed on the same batches in the same order: AdamW with
one kernel, gradients clipped by their norm, the loss logged every 10 steps. Losses of one process that differ are an
error. Reported are the ratios of stratagem to transformers in each round: CPU and wall time of a step, and the largest
resident set of the process of rank 0, imports included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

BATCH, LENGTH, VOCABULARY, WARM_UP = 4, 64, 4096, 5
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
#: Name: adapters or not, bf16 or not, processes.
CASES = {
    "full": (False, False, 1),
    "full, bf16": (False, True, 1),
    "LoRA": (True, False, 1),
    "full, 2 processes": (False, False, 2),
    "LoRA, 2 processes": (True, False, 2),
}
TRAINERS = ("stratagem", "transformers")


def model(adapters: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **SIZES))
    if not adapters:
        return llama
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def rows(count: int) -> list[dict[str, Any]]:
    import torch

    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Clock:
    """Takes the time after the steps that warm up, and at the end."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == WARM_UP:
            self.cpu, self.wall = time.process_time(), time.perf_counter()

    def result(self, loss: float) -> dict[str, float]:
        """Return CPU and wall ms of a step, the peak in MB and the loss."""
        counted = self.steps - WARM_UP
        peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
        cpu, wall = (time.process_time() - self.cpu) / counted, (time.perf_counter() - self.wall) / counted
        return {"CPU time": cpu * 1e3, "wall time": wall * 1e3, "peak RSS": peak, "loss": loss}


def with_stratagem(adapters: bool, bf16: bool, processes: int, steps: int) -> dict[str, float]:
    import torch
    from torch.utils.data import DataLoader

    import stratagem as sg

    class Tuned(sg.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.clock, self.losses = model(adapters), Clock(), []

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch).loss
            self.log("loss", loss)
            self.losses.append(loss.detach())
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.clock.step()

        def on_train_end(self):
            self.found = self.clock.result(0.0)

        def configure_optimizers(self):
            trained = [p for p in self.parameters() if p.requires_grad]
            return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0, fused=True)

    tuned = Tuned()
    trainer = sg.Trainer(
        max_epochs=1, accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto",
        precision="bf16-mixed" if bf16 else "32-true", gradient_clip_val=1.0, log_every_n_steps=10, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(tuned, DataLoader(rows(steps * BATCH * processes), batch_size=BATCH))
    return tuned.found | {"loss": float(torch.stack(tuned.losses[-10:]).mean())}  # what transformers logs


def with_transformers(adapters: bool, bf16: bool, processes: int, steps: int) -> dict[str, float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock, found = Clock(), {}

    class Timer(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            clock.step()

        def on_train_end(self, args, state, control, **others):
            found.update(clock.result(0.0))

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), num_train_epochs=1, per_device_train_batch_size=BATCH, learning_rate=1e-3,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused", logging_steps=10,
        save_strategy="no", report_to=[], use_cpu=True, bf16=bf16, disable_tqdm=True, dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    data = rows(steps * BATCH * processes)
    trainer = Trainer(model=model(adapters), args=arguments, train_dataset=data, callbacks=[Timer()])
    trainer.train()
    return found | {"loss": next(row["loss"] for row in reversed(trainer.state.log_history) if "loss" in row)}


def measure(trainer: str, case: str, steps: int) -> dict[str, float]:
    """Run `case` in new processes; return what rank 0 measured."""
    processes = CASES[case][2]
    python = [sys.executable, "-W", "ignore"]
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    command = [*python, *start, __file__, "--case", case, "--trainer", trainer, "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{trainer}, {case}: {done.stderr}")
    return json.loads(done.stdout[done.stdout.index("RESULT") + 6 :].splitlines()[0])


def report(case: str, found: dict[str, list[dict[str, float]]]) -> None:
    """Print the rows of a case; refuse losses that differ."""
    ours, theirs = (found[trainer] for trainer in TRAINERS)
    if CASES[case][2] == 1 and not math.isclose(ours[0]["loss"], theirs[0]["loss"], rel_tol=1e-3):
        raise SystemExit(f"{case}: the last losses are {ours[0]['loss']} and {theirs[0]['loss']}")
    for what, unit in (("CPU time", "ms"), ("wall time", "ms"), ("peak RSS", "MB")):
        ratios = [one[what] / other[what] for one, other in zip(ours, theirs, strict=True)]
        middle = [statistics.median(row[what] for row in rows) for rows in (ours, theirs)]
        print(
            f"| {case}: {what} | {middle[0]:.1f} {unit} | {middle[1]:.1f} {unit} | {statistics.median(ratios):.3f} "
            f"| {min(ratios):.3f} - {max(ratios):.3f} |", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--trainer", choices=TRAINERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        warnings.filterwarnings("ignore")
        train = {"stratagem": with_stratagem, "transformers": with_transformers}[given.trainer]
        found = train(*CASES[given.case], given.steps)
        if os.environ.get("RANK", "0") == "0":
            print(f"RESULT{json.dumps(found)}", flush=True)
        return
    rounds, cases = (2, ["full", "LoRA"]) if given.quick else (given.rounds, given.cases)
    print(f"{rounds} rounds of {given.steps} steps, {BATCH} x {LENGTH} tokens for each process\n")
    print("| | stratagem, median | transformers, median | ratio, median | min - max |\n|---|---|---|---|---|")
    for case in cases:
        found: dict[str, list[dict[str, float]]] = {trainer: [] for trainer in TRAINERS}
        for number in range(rounds):
            for trainer in TRAINERS[:: 1 if number % 2 else -1]:
                found[trainer].append(measure(trainer, case, given.steps))
        report(case, found)


if __name__ == "__main__":
    main()
