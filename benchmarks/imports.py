"""Time of imports in addition to torch, and of listing plugins: new processes, CPU seconds.

python benchmarks/imports.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys

SNIPPETS = {
    "import torch": ("torch", "import torch"),
    "torch, then stratagem.Trainer": ("stratagem", "import torch; from stratagem import Trainer"),
    "torch, then accelerate.Accelerator": ("accelerate", "import torch; from accelerate import Accelerator"),
    "torch, then lightning.Trainer": ("lightning", "import torch; from lightning import Trainer"),
    "stratagem plugins list": (
        "stratagem",
        "import sys; from stratagem.cli import main; sys.stdout = open('/dev/null', 'w'); main(['plugins', 'list'])",
    ),
}


def measure(code: str) -> tuple[float, float]:
    """Return CPU and wall seconds of `code` in a new process."""
    program = (
        "import time, json; w = time.perf_counter(); c = time.process_time()\n"
        f"{code}\n"
        "import sys; sys.stderr.write(json.dumps([time.process_time() - c, time.perf_counter() - w]))"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    cpu, wall = json.loads(result.stderr[result.stderr.rindex("[") :])
    return cpu, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    snippets = {name: code for name, (package, code) in SNIPPETS.items() if importlib.util.find_spec(package)}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in snippets}
    for _ in range(rounds):
        for name, code in snippets.items():
            seconds[name].append(measure(code))
    base = statistics.median(cpu for cpu, _ in seconds["import torch"])
    print(f"| medians of {rounds} | CPU s | wall s | CPU s over torch |\n|---|---|---|---|")
    for name, values in seconds.items():
        cpu, wall = (statistics.median(column) for column in zip(*values, strict=True))
        over = f"{cpu - base:+.3f}" if name.startswith("torch,") else ""
        print(f"| {name} | {cpu:.3f} | {wall:.3f} | {over} |")


if __name__ == "__main__":
    main()
