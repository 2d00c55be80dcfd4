"""Strategies of engine packages beside the plugin of stratagem that does the same job: time, bytes sent, memory.

    python benchmarks/engine_packages.py fairscale|torchft|hivemind|horovod [--rounds 3] [--width 1024]

Run it as root, in an environment with that package and its engine. Two processes train an MLP with AdamW. Each run is
in a network namespace of its own; what the loopback device of that namespace sent is divided by two processes and by
the steps, so it has the messages of engines that count none. Runs alternate. A time is the median over windows of eight
steps of all rounds. Memory is the peak of a process that trains, and the sum of those that it started to communicate.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import stratagem as sg

LENGTH, WINDOWS, WARM_UP = 8, 6, 2
TORCHFT = {"hostname": "localhost", "timeout": 60}
HIVEMIND = {"name": "hivemind", "host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "min_peers": 2}
#: By package: pairs of a strategy of the package and one of stratagem; "peers" are runs of one process each.
PAIRS = {
    "fairscale": [("fairscale_sharded", "ddp_sharded")],
    "horovod": [("horovod", "ddp"), ({"name": "horovod", "compression": "fp16"}, "ddp with fp16_compress")],
    "torchft": [
        ({"name": "torchft_ddp"} | TORCHFT, "ddp"),
        (
            {"name": "torchft_local_sgd", "sync_every": 8} | TORCHFT,
            [{"name": "local_sgd", "period": 8, "team_size": 1}, "ddp"],
        ),
        (
            {"name": "torchft_diloco", "sync_every": 8} | TORCHFT,
            [{"name": "diloco", "period": 8, "team_size": 1}, "ddp"],
        ),
    ],
    "hivemind": [
        (HIVEMIND, "ddp"),
        (
            HIVEMIND | {"target_batch_size": 16 * LENGTH * 2},
            [{"name": "local_sgd", "period": 8, "team_size": 1}, "ddp"],
        ),
    ],
}
CLONE_NEWNET = 0x40000000


class MLP(sg.Module):
    """Notes the time, and the bytes that the namespace has sent, after each window of steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        self.seen: list[tuple[float, int]] = []

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (batch_idx + 1) % LENGTH == 0:
            self.seen.append((time.perf_counter(), sent_bytes()))


def sent_bytes() -> int:
    """Return the bytes that the loopback device of this namespace has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def peak_bytes(pid: int | str) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return 0


def helpers_of(pid: int) -> list[int]:
    """Return the processes that `pid` started, and those that these started."""
    children = [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]
    return children + [each for child in children for each in helpers_of(child)]


def train(strategy, width: int, devices: int, result: str) -> None:
    """Train in this process, or in `devices` of them; rank 0 writes what it has seen."""
    torch.manual_seed(0)
    module = MLP(width)
    batches = list(torch.randn(LENGTH * (WINDOWS + WARM_UP), 16, width))
    more = {}
    if isinstance(strategy, str) and " with " in strategy:
        strategy, more["comm_hook"] = strategy.split(" with ")
    trainer = sg.Trainer(
        strategy=strategy, devices=devices, max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.cat(batches * devices), batch_size=16)
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        helpers = helpers_of(os.getpid()) if devices == 1 else []
        found = {"seen": module.seen, "peak": peak_bytes("self"), "helpers": sum(map(peak_bytes, helpers))}
        Path(result).write_text(json.dumps(found))


def measure(strategy, width: int, folder: Path) -> dict:
    """Return what one run in a network namespace has seen."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    process = multiprocessing.get_context("spawn").Process(target=run_alone, args=(strategy, width, str(result)))
    process.start()
    process.join()
    if not result.exists():
        raise SystemExit(f"the run of {strategy} failed")
    return json.loads(result.read_text())


def run_alone(strategy, width: int, result: str) -> None:
    """Train `strategy` in two processes that see no other network than the loopback device."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise SystemExit("a network namespace could not be made: run this as root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    name = strategy["name"] if isinstance(strategy, dict) else ""
    if not name.startswith(("torchft", "hivemind")):
        call(strategy, width, 2, result, os.environ).wait()
        return
    variables = os.environ | {"TORCHFT_LIGHTHOUSE": "localhost:29510", "NUM_REPLICA_GROUPS": "2"}
    server = None
    if name.startswith("torchft"):
        program = Path(sys.executable).with_name("torchft_lighthouse")
        server = subprocess.Popen([program, "--min_replicas", "2", "--bind", "[::]:29510"], stderr=subprocess.DEVNULL)
        time.sleep(1)
    try:
        first = call(strategy, width, 1, result, variables | {"REPLICA_GROUP_ID": "0"}, stdout=subprocess.PIPE)
        if name == "hivemind":
            line = next(line for line in first.stdout if "INITIAL_PEERS=" in line)
            variables["INITIAL_PEERS"] = line.split("INITIAL_PEERS=")[1].split()[0]
        second = call(strategy, width, 1, result + ".second", variables | {"REPLICA_GROUP_ID": "1"})
        first.communicate()
        second.wait()
    finally:
        if server is not None:
            server.send_signal(signal.SIGKILL)
            server.wait()


def call(strategy, width: int, devices: int, result: str, variables, **options) -> subprocess.Popen:
    """Start a process that calls `train`."""
    given = json.dumps({"strategy": strategy, "width": width, "devices": devices, "result": result})
    variables = dict(variables) | {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
    return subprocess.Popen([sys.executable, __file__, "--train", given], env=variables, text=True, **options)


def summary(runs: list[dict]) -> dict:
    windows = [
        (later - earlier) / LENGTH
        for run in runs
        for (earlier, _), (later, _) in zip(run["seen"][WARM_UP - 1 :], run["seen"][WARM_UP:], strict=False)
    ]
    sent = [(run["seen"][-1][1] - run["seen"][WARM_UP - 1][1]) / LENGTH / WINDOWS / 2 for run in runs]
    return {
        "ms": 1000 * statistics.median(windows),
        "MB_sent": statistics.median(sent) / 1e6,
        "MB_peak": statistics.median(run["peak"] for run in runs) / 1e6,
        "MB_helpers": statistics.median(run["helpers"] for run in runs) / 1e6,
    }


def shown(strategy) -> str:
    if isinstance(strategy, list):
        return " around ".join(map(shown, strategy))
    if isinstance(strategy, dict):
        options = {"sync_every", "period", "target_batch_size", "compression"} & strategy.keys()
        return f"`{strategy['name']}`" + "".join(f", {name} {strategy[name]}" for name in sorted(options))
    return f"`{strategy}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", nargs="?", choices=PAIRS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(**json.loads(options.train))
        return
    if options.package is None:
        parser.error("name a package")
    folder = Path(os.environ.get("TMPDIR", "/tmp"), f"engine_packages-{os.getpid()}")
    folder.mkdir()
    os.chdir(folder)
    print("| strategy | ms per step | beside | MB sent per step | MB peak memory | MB of helpers |")
    print("|---|---|---|---|---|---|")
    for pair in PAIRS[options.package]:
        runs = [[], []]
        for turn in range(options.rounds):
            for index in (0, 1) if turn % 2 == 0 else (1, 0):
                runs[index].append(measure(pair[index], options.width, folder))
        engine, ours = map(summary, runs)
        for strategy, row in ((pair[0], engine), (pair[1], ours)):
            times = f"{row['ms']:.1f} | {row['ms'] / ours['ms']:.2f}"
            helpers = f"{row['MB_helpers']:.0f}" if row["MB_helpers"] else ""
            memory = f"{row['MB_peak']:.0f} | {helpers}"
            print(f"| {shown(strategy)} | {times} | {row['MB_sent']:.2f} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
