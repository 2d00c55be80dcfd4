"""Time from starting a program to the end of its first step, and from there to its exit: launchers, and raw processes.

python benchmarks/launch.py [--rounds 5] [--devices 2] [--variants ddp,ddp_fork] [--quick]

Each round starts every variant once. "Raw" processes have the environment variables of a launcher, and train with
`DistributedDataParallel` in a plain loop. gloo may end one of them with SIGABRT when another leaves first: such a start
is repeated, and counted in its row.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RAW = """
import os, sys, time
import torch
from torch import nn
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2):
    nn.functional.mse_loss(model(torch.randn(8, 32)), torch.randn(8, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0 and os.environ["RANK"] == "0":
        open(sys.argv[1], "w").write(str(time.time()))
torch.distributed.barrier()  # with eight processes, one may leave before another has its last gradients
torch.distributed.destroy_process_group()
"""

OURS = """
import sys, time
import torch
from torch import nn
import stratagem as sg

class Model(sg.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0 and self.trainer.global_rank == 0:
            open(sys.argv[1], "w").write(str(time.time()))

if __name__ == "__main__":
    torch.manual_seed(0)
    batches = [(torch.randn(8, 32), torch.randn(8, 1)) for _ in range(4)]
    trainer = sg.Trainer(
        strategy=sys.argv[2], devices=int(sys.argv[3]), accelerator="cpu", max_steps=2, barebones=True
    )
    trainer.fit(Model(), batches)
"""

#: Each with the script, its arguments, and whether torchrun or this program starts a process for each rank.
VARIANTS = {
    "raw, processes": (RAW, [], "processes"),
    "stratagem ddp": (OURS, ["ddp"], ""),
    "stratagem ddp_fork": (OURS, ["ddp_fork"], ""),
    "stratagem ddp_spawn": (OURS, ["ddp_spawn"], ""),
    "raw, torchrun": (RAW, [], "torchrun"),
    "stratagem ddp, torchrun": (OURS, ["ddp"], "torchrun"),
}


class AbortedError(Exception):
    """gloo ended a raw process: it lost the connection to one that left."""


def measure(name: str, devices: int, folder: Path) -> tuple[float, float, float]:
    """Return seconds to the first step, seconds from there to the exit, and CPU seconds of all processes.

    Raises:
        AbortedError: a raw process was ended by gloo.
        SystemExit: a process failed; with what it said.
    """
    script, arguments, starter = VARIANTS[name]
    path, mark = folder / "train.py", folder / "first_step"
    path.write_text(script)
    mark.unlink(missing_ok=True)
    words = [str(path), str(mark), *arguments, str(devices)]
    python = [sys.executable, "-W", "ignore"]
    if starter == "torchrun":
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    environments = [{}] if starter != "processes" else [_ranks(rank, devices) for rank in range(devices)]
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    start = time.time()
    said = folder / "stderr"
    with said.open("w") as errors:
        processes = [
            subprocess.Popen(
                [*python, *words], stdout=subprocess.DEVNULL, stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (each | port if each else {}),
            )
            for each in environments
        ]  # fmt: skip
    cpu = 0.0
    for process in processes:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        cpu += usage.ru_utime + usage.ru_stime
    ended = time.time()
    codes = [process.returncode for process in processes]
    if script is RAW and -signal.SIGABRT in codes and not set(codes) - {0, -signal.SIGABRT}:
        raise AbortedError(said.read_text())
    if any(codes):
        raise SystemExit(f"{name} ended with codes {codes}:\n{said.read_text()}")
    first = float(mark.read_text())
    return first - start, ended - first, cpu


def repeated(name: str, devices: int, folder: Path) -> tuple[int, tuple[float, float, float]]:
    """Return how many starts gloo ended, and what the first other one took.

    Raises:
        SystemExit: it ended ten.
    """
    for aborted in range(10):
        try:
            return aborted, measure(name, devices, folder)
        except AbortedError as error:
            reason = error
    raise SystemExit(f"{name}: gloo ended ten starts, the last one with:\n{reason}")


def _ranks(rank: int, size: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--variants", help="parts of names, separated by commas; by default all")
    parser.add_argument("--quick", action="store_true", help="one round of raw processes and ddp")
    arguments = parser.parse_args()
    parts = (arguments.variants or "").split(",")
    chosen = [name for name in VARIANTS if any(part in name for part in parts)]
    if arguments.quick:
        chosen = chosen[:2]
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in chosen}
    aborted = dict.fromkeys(chosen, 0)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 if arguments.quick else arguments.rounds):
            for name in chosen:
                number, took = repeated(name, arguments.devices, Path(folder))
                measured[name].append(took)
                aborted[name] += number
    print(
        f"| {arguments.devices} processes | to the first step, s, min | median | to the exit, s, min | median | CPU s |"
    )
    print("|---|---|---|---|---|---|")
    for name, values in measured.items():
        first, leaving, cpu = zip(*values, strict=True)
        row = [min(first), statistics.median(first), min(leaving), statistics.median(leaving), statistics.median(cpu)]
        label = f"{name}; gloo ended {aborted[name]} more starts" if aborted[name] else name
        print(f"| {label} | {' | '.join(f'{value:.2f}' for value in row)} |")


if __name__ == "__main__":
    main()
