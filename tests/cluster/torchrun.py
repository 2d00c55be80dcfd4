"""Agents of torchrun on this machine, and the script that their workers run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from programs import scripts

#: How long agents may take to restart their workers: two cores may have other work.
LIMIT_S = 270.0

#: Trains on samples that are their own numbers, and writes a line for the start of each process and for each batch.
#: A file named `stop` ends the run after the current batch.
SCRIPT = """
    import os, sys, time
    from pathlib import Path
    import torch
    import stratagem as sg
    from stratagem_testing.reference import Net, net
    from torch.utils.data import DataLoader, TensorDataset

    FOLDER = Path(sys.argv[1])

    def tell(*words):
        with open(FOLDER / "lines.txt", "a") as file:
            file.write(" ".join(map(str, words)) + chr(10))

    def data(size):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(size, 6, generator=generator)
        return TensorDataset(x, torch.randn(size, 1, generator=generator), torch.arange(size))

    class Module(Net):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout({dropout}), torch.nn.Linear(16, 1))

        def training_step(self, batch, batch_idx):
            x, y, numbers = batch
            step, rank = self.trainer.global_step, self.trainer.global_rank
            {step}
            if (FOLDER / "pace").exists():
                time.sleep(float((FOLDER / "pace").read_text()))
            tell("BATCH", rank, self.trainer.world_size, step, os.getpid(), *numbers.tolist())
            return torch.nn.functional.mse_loss(self(x), y)

    def main():
        sg.seed_everything(5)
        tell("START", os.environ.get("RANK", 0), os.environ.get("WORLD_SIZE", 1), os.getpid(), os.getppid())
        {before}
        trainer = sg.Trainer(**({trainer}))
        model = Module()
        trainer.fit(model, DataLoader(data({samples}), {batch_size}, shuffle=True), ckpt_path="last")
        if trainer.is_global_zero:
            torch.save(model.state_dict(), FOLDER / "final.pt")
        tell("DONE", trainer.global_rank, trainer.world_size, trainer.global_step)

    {main}
"""

TRAINER = """dict(
    strategy="ddp", accelerator="cpu", max_epochs={epochs}, logger=False, enable_progress_bar=False,
    default_root_dir=FOLDER, {more}
    callbacks=[{{"name": "model_checkpoint", "every_n_train_steps": 1, "save_last": True, "dirpath": FOLDER / "saved"}},
               *({callbacks})],
)"""


def script(
    folder: Path, *, step: str = "pass", before: str = "pass", samples: int = 96, batch_size: int = 4, epochs: int = 2,
    callbacks: str = "()", more: str = "", main: str = 'if __name__ == "__main__": main()', dropout: float = 0.1,
) -> Path:  # fmt: skip
    path = folder / "train.py"
    trainer = TRAINER.format(epochs=epochs, callbacks=callbacks, more=more)
    text = textwrap.dedent(SCRIPT).format(
        step=step, before=before, trainer=trainer, samples=samples, batch_size=batch_size, main=main, dropout=dropout
    )
    path.write_text(text)
    return path


@frozen
class Batch:
    """A batch that a rank trained on."""

    rank: int
    world_size: int
    step: int
    pid: int
    samples: tuple[int, ...]


def as_batch(row: list[str]) -> Batch:
    rank, world_size, step, pid, *samples = map(int, row)
    return Batch(rank, world_size, step, pid, tuple(samples))


@define
class Job:
    """A run of several agents, with its folder."""

    folder: Path
    program: Path
    options: list[str]
    environment: dict[str, str] = field(factory=dict)
    agents: dict[str, scripts.Popen] = field(factory=dict)

    def start(self, name: str, *options: str) -> scripts.Popen:
        """Start an agent."""
        command = [sys.executable, "-m", "torch.distributed.run", *self.options, *options]
        log = (self.folder / f"agent-{name}.log").open("w")
        with log:
            self.agents[name] = scripts.Popen(
                [*command, str(self.program), str(self.folder)], stdout=log, stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", **self.environment}, start_new_session=True,
            )  # fmt: skip
        return self.agents[name]

    def log(self, name: str) -> str:
        return (self.folder / f"agent-{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in self.agents)

    def rows(self) -> list[list[str]]:
        path = self.folder / "lines.txt"
        text = path.read_text() if path.exists() else ""
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    def lines(self, word: str) -> list[list[str]]:
        return [row[1:] for row in self.rows() if row[0] == word]

    def batches(self) -> list[Batch]:
        return [as_batch(row) for row in self.lines("BATCH")]

    def samples_of_steps(self) -> dict[int, list[int]]:
        """Return the samples of each step; a step that was trained again counts once."""
        steps: dict[int, list[int]] = {}
        again: set[int] = set()
        for word, *rest in self.rows():
            if word == "START":
                again = set(steps)
            elif word == "BATCH":
                batch = as_batch(rest)
                if batch.step in again:
                    again.remove(batch.step)
                    steps[batch.step] = []
                steps.setdefault(batch.step, []).extend(batch.samples)
        return steps

    def agent_of_rank_0(self) -> str:
        parent = next(row[3] for row in reversed(self.lines("START")) if row[0] == "0")
        return next(name for name, agent in self.agents.items() if str(agent.pid) == parent)

    def attempts(self) -> int:
        """How often rank 0 started."""
        return sum(row[0] == "0" for row in self.lines("START"))

    def wait_for(self, what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        deadline = time.monotonic() + limit_s
        while not (result := condition()):
            ended = all(agent.poll() is not None for agent in self.agents.values())
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"waited for {what}\n{self.logs()}")
            time.sleep(0.02)
        return result

    def join(self, limit_s: float = LIMIT_S) -> dict[str, int]:
        """Wait for all agents; return their exit codes."""
        deadline = time.monotonic() + limit_s
        codes = {}
        for name, agent in self.agents.items():
            try:
                codes[name] = agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"agent {name} still runs\n{self.logs()}") from error
        return codes

    def kill_agent(self, name: str) -> None:
        """SIGKILL an agent and its workers, as when a machine is lost."""
        agent = self.agents.pop(name)
        for row in self.lines("START"):
            if int(row[3]) == agent.pid:
                kill(int(row[2]))
        kill(agent.pid)
        agent.wait(20)

    def close(self) -> None:
        pids = [int(row[2]) for row in self.lines("START")]
        for agent in self.agents.values():
            if agent.poll() is None:
                kill(agent.pid)
        marker = str(self.folder).encode()
        for pid in pids:
            try:
                ours = marker in Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if ours:
                kill(pid)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
