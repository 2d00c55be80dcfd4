"""Run the benchmarks, and write their tables with what they were measured on: Markdown, HTML with plots, docs.

    python benchmarks/run.py [--quick] [--only NAME ...] [--out FOLDER] [--docs docs/benchmarks.md]

Each benchmark is a script beside this one that measures stratagem and what it wraps or is compared with in alternation,
and prints Markdown tables. They run one after another. Those for GPUs run where torch finds one; peers (lightning,
accelerate, ...) are measured where they are installed. ``--docs`` replaces the tables between ``<!-- NAME -->`` and
``<!-- end -->`` of a page.
"""

from __future__ import annotations

import argparse
import datetime
import html
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from attrs import field, frozen

HERE = Path(__file__).parent

#: Packages whose versions are recorded, where they are installed.
_PACKAGES = ("torch", "stratagem-core", "pluggy", "deepspeed", "lightning", "accelerate", "safetensors", "fairscale")


class BenchmarkError(Exception):
    """A benchmark did not end normally."""


@frozen
class Benchmark:
    """A script and its arguments."""

    title: str
    arguments: tuple[str, ...] = ()
    #: Arguments that take at most half a minute; None: it needs longer, and is left out.
    quick: tuple[str, ...] | None = ("--quick",)
    #: It needs a GPU.
    gpu: bool = False
    #: Column that is drawn, from 1; None: the last one with numbers.
    column: int | None = None
    #: Environment variables.
    environment: dict[str, str] = field(factory=dict)


BENCHMARKS: dict[str, Benchmark] = {
    "loop": Benchmark("What the loop itself costs", column=1),
    "overhead": Benchmark("What a step costs", quick=("--steps", "500", "--rounds", "3"), column=1),
    "callbacks": Benchmark("What callbacks and options of a step cost", quick=("--steps", "500", "--rounds", "2")),
    "optimizers": Benchmark("Optimizers of torch on a CPU", column=3),
    "learning": Benchmark("What a GPT learns from the same tokens"),
    "packing": Benchmark("Packed sequences", column=1),
    "ddp": Benchmark("Two DDP ranks", quick=("--rounds", "3")),
    "ranks": Benchmark("More ranks"),
    "comm_hooks": Benchmark("Communication hooks"),
    "sharded": Benchmark("Strategies beside the engines that they wrap"),
    "deepspeed_overhead": Benchmark("DeepSpeed", quick=("--rounds", "2", "--stages", "1", "--steps", "10")),
    "finetuning": Benchmark("Fine-tuning", column=3),
    "compile": Benchmark("Compiled steps", quick=None),
    "checkpoints": Benchmark("Saving and loading"),
    "launch": Benchmark("Start and end of a run"),
    "cli": Benchmark("The command line"),
    "imports": Benchmark("Imports", quick=("--rounds", "3")),
    "scale": Benchmark("How costs grow"),
    "gpu": Benchmark("One GPU", gpu=True, quick=("--rounds", "2")),
}


def machine() -> str:
    """Return in a line what the figures were measured on."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines(Path("/proc/cpuinfo")) if "model name" in line),
        platform.processor(),
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    load = f", load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    parts = [f"{datetime.date.today()}: {cores} cores ({cpu}){load}; Python {platform.python_version()}", *versions]
    return ", ".join([*parts, *_gpus()])


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def run(name: str, benchmark: Benchmark, quick: bool) -> str:
    """Run one benchmark; return what it printed, from its first table on.

    Raises:
        BenchmarkError: it failed, with what it said.
    """
    arguments = (benchmark.quick or ()) if quick else benchmark.arguments
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **benchmark.environment}
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise BenchmarkError(f"{name} failed with code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return tables_in(done.stdout)


def tables_in(printed: str) -> str:
    """Return the tables of `printed`, and the lines right above each one that name it."""
    lines, kept, above = printed.splitlines(), [], ""
    for line in lines:
        if line.startswith("|"):
            kept += [*(["", above, ""] if above else [""] if kept and not kept[-1].startswith("|") else []), line]
            above = ""
        elif line.strip():
            above = line
        elif kept and kept[-1].startswith("|"):
            kept.append("")
    return "\n".join(kept).strip()


# --- Output --------------------------------------------------------------------------------------------------------


def markdown(results: dict[str, str], measured_on: str) -> str:
    """Return all tables as a page."""
    parts = ["# Benchmarks", measured_on]
    parts += [f"## {BENCHMARKS[name].title}: `benchmarks/{name}.py`\n\n{text}" for name, text in results.items()]
    return "\n\n".join(parts) + "\n"


def page(results: dict[str, str], measured_on: str) -> str:
    """Return all tables and a plot of each as HTML that needs no other file."""
    body = [f"<h1>Benchmarks</h1><p>{html.escape(measured_on)}</p>"]
    for name, text in results.items():
        body.append(f"<h2>{html.escape(BENCHMARKS[name].title)}</h2>")
        for block in re.split(r"\n\s*\n", text):
            if block.startswith("|"):
                rows = cells(block)
                body += [table(rows), plot(rows, BENCHMARKS[name].column)]
            else:
                body.append(f"<p>{html.escape(block)}</p>")
    style = (
        "body{font:15px system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
        "table{border-collapse:collapse}td,th{padding:.2rem .8rem;border-bottom:1px solid #8884;text-align:right}"
        "td:first-child,th:first-child{text-align:left}svg{max-width:100%}"
    )
    return f"<!doctype html><meta charset=utf-8><title>Benchmarks</title><style>{style}</style>{''.join(body)}\n"


def cells(block: str) -> list[list[str]]:
    """Return the cells of a Markdown table, without the line under its head."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    return [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]


def table(rows: list[list[str]]) -> str:
    head, *others = rows
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in others]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def number(cell: str) -> float | None:
    """Return the number at the start of a cell; None without one."""
    found = re.match(r"[+-]?[\d,]*\.?\d+", cell.replace("\u2212", "-"))
    return float(found[0].replace(",", "")) if found else None


def plot(rows: list[list[str]], column: int | None) -> str:
    """Return bars of one column of a table as SVG; "" if it has no numbers."""
    head, *others = rows
    of_numbers = [place for place in range(1, len(head)) if any(number(row[place]) is not None for row in others)]
    if not of_numbers:
        return ""
    place = column if column in of_numbers else of_numbers[-1]
    values = [(row[0], number(row[place]), row[place]) for row in others]
    largest = max(abs(value) for _, value, _ in values if value is not None) or 1.0
    bars = []
    for index, (label, value, text) in enumerate((label, value, text) for label, value, text in values):
        y = 22 + 22 * index
        width = 0.0 if value is None else 400 * max(value, 0.0) / largest
        bars.append(
            f'<text x="290" y="{y + 13}" text-anchor="end">{html.escape(label[:46])}</text>'
            f'<rect x="300" y="{y}" width="{width:.1f}" height="16" fill="#4a7bd0"/>'
            f'<text x="{306 + width:.1f}" y="{y + 13}">{html.escape(text)}</text>'
        )
    title = f'<text x="300" y="14">{html.escape(head[place])}</text>'
    size, style = f'width="800" height="{30 + 22 * len(values)}"', "text{font:12px system-ui;fill:#888}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{style}</style>{title}{"".join(bars)}</svg>'
    )


def pictures(results: dict[str, str]) -> dict[str, str]:
    """Return the plot of each benchmark's first table, by name."""
    first = {
        name: next(part for part in re.split(r"\n\s*\n", text) if part[0] == "|") for name, text in results.items()
    }
    return {name: plot(cells(block), BENCHMARKS[name].column) for name, block in first.items()}


def update(text: str, results: dict[str, str], measured_on: str) -> str:
    """Return the page `text` with the tables and pictures of `results` between their marks.

    Raises:
        SystemExit: the page has no place for one of them.
    """
    for name, tables in results.items():
        marks = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marks.search(text):
            raise SystemExit(f"the page has no line <!-- {name} -->: add it and <!-- end --> where the tables belong")
        picture = f"![{BENCHMARKS[name].title}](pictures/benchmark-{name}.svg)"
        new = f"\n{measured_on}.\n\n{tables}\n\n{picture}\n\n"
        text = marks.sub(lambda found, new=new: found[1] + new + found[2], text)
    return text


def _titles() -> str:
    return "; ".join(f"{name} ({each.title})" for name, each in BENCHMARKS.items())


def main() -> None:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: five minutes in all, larger spread")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=_titles())
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmark-results"),
        help="folder of results.md and results.html (%(default)s)",
    )
    parser.add_argument("--docs", type=Path, help="a page, which is overwritten with the new tables")
    arguments = parser.parse_args()
    measured_on, results, failures = machine(), {}, []
    has_gpu = bool(_gpus())
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, benchmark in BENCHMARKS.items():
        if (arguments.only and name not in arguments.only) or not (HERE / f"{name}.py").exists():
            continue
        if arguments.quick and benchmark.quick is None:
            continue
        if benchmark.gpu and not has_gpu:
            print(f"{name}: left out, torch finds no GPU", flush=True)
            continue
        began = time.monotonic()
        try:
            results[name] = run(name, benchmark, arguments.quick)
        except BenchmarkError as error:  # the others are measured
            failures.append(str(error))
            continue
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        (arguments.out / "results.md").write_text(markdown(results, measured_on))
        (arguments.out / "results.html").write_text(page(results, measured_on))
    if arguments.docs is not None:
        arguments.docs.write_text(update(arguments.docs.read_text(), results, measured_on))
        folder = arguments.docs.parent / "pictures"
        folder.mkdir(exist_ok=True)
        for name, picture in pictures(results).items():
            (folder / f"benchmark-{name}.svg").write_text(f"{picture}\n")
    print(f"tables and plots: {arguments.out / 'results.html'}")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
