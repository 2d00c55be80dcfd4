"""CPU and wall time of the `stratagem` program: the help of every command, and the list of plugins with many packages.

python benchmarks/cli.py [--rounds 5] [--packages 60] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: Prints whether the program imported torch, as the last line of stderr.
PROGRAM = (
    "import sys\n"
    "from stratagem.cli import main\n"
    "try: code = main(sys.argv[1:])\n"
    "except SystemExit as stop: code = stop.code\n"
    "sys.stderr.write('\\n%d' % ('torch' in sys.modules))\n"
    "sys.exit(code)"
)


def measure(words: list[str], folder: str = "") -> tuple[float, float, bool]:
    """Return CPU and wall seconds of the program with `words`, and whether it imported torch; [] starts Python only."""
    command = [sys.executable, "-c", PROGRAM, *words] if words else [sys.executable, "-c", "pass"]
    environment = os.environ | {"PYTHONPATH": folder} if folder else dict(os.environ)
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        output.seek(0)
        said = output.read()
    if status:
        raise SystemExit(f"{words} ended with status {status}: {said.decode()}")
    return usage.ru_utime + usage.ru_stime, wall, said.endswith(b"1")


def commands() -> list[list[str]]:
    """Return every `--help` of the program: its own, those of commands, and those of their subcommands."""
    from stratagem.cli import parser

    found = [["--help"]]
    waiting = [([], parser())]
    while waiting:
        path, current = waiting.pop(0)
        for action in current._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, below in action.choices.items():
                    found.append([*path, word, "--help"])
                    waiting.append(([*path, word], below))
    return found


def fake_packages(folder: Path, number: int) -> None:
    """Write the metadata of `number` packages with a plugin each."""
    for index in range(number):
        metadata = folder / f"stratagem_fake{index}-1.0.dist-info"
        metadata.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: stratagem-fake{index}",
            "Version: 1.0",
            "Requires-Dist: stratagem-core>=0.1",
        ]
        (metadata / "METADATA").write_text("\n".join(lines) + "\n")
        (metadata / "entry_points.txt").write_text(f"[stratagem.callback]\nfake{index} = stratagem_fake{index}:Fake\n")
        (folder / f"stratagem_fake{index}.py").write_text('class Fake:\n    """Do nothing."""\n')


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--packages", type=int, default=60)
    arguments.add_argument("--quick", action="store_true", help="one round")
    parsed = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fake_packages(Path(folder), parsed.packages)
        more = f"plugins list, {parsed.packages} packages more"
        rows: dict[str, tuple[list[str], str]] = {
            "Python alone": ([], ""), "--version": (["--version"], ""),
            **{" ".join(words): (words, "") for words in commands()},
            "plugins list": (["plugins", "list"], ""), more: (["plugins", "list"], folder),
        }  # fmt: skip
        measured: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in rows}
        for _ in range(1 if parsed.quick else parsed.rounds):
            for name, (words, path) in rows.items():
                measured[name].append(measure(words, path))
    base = statistics.median(cpu for cpu, _, _ in measured["Python alone"])
    print("| `stratagem ...` | CPU s, median | over Python | wall s, min | imports torch |\n|---|---|---|---|---|")
    for name, values in measured.items():
        cpu = statistics.median(value[0] for value in values)
        wall = min(value[1] for value in values)
        print(f"| {name} | {cpu:.3f} | {cpu - base:+.3f} | {wall:.3f} | {'yes' if values[0][2] else ''} |")


if __name__ == "__main__":
    main()
