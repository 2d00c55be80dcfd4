"""Run the tests or the benchmarks of a bundle with the Python that runs this: it needs torch, and no network.

    gpu-bundle/run test [--seconds 480] [--json FILE] [--cpu-only | --gpu-only] [-- options of pytest]
    gpu-bundle/run bench [--json FILE] [-- options of benchmarks/gpu.py]
    gpu-bundle/run llama [--json FILE] [-- options of benchmarks/llama.py], on all GPUs of the machine

Prints a table and writes JSON: the machine, and each test with its outcome and seconds. The exit status is 1 if a test
failed or was not reached in time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

BUNDLE = Path(__file__).parents[2]
#: Tests that train on the CPU of the GPU machine, which has another torch and another Python than the ones of `make test`.
CPU_PART = (
    "tests/core", "tests/parity/test_ddp.py", "tests/parity/test_resume.py", "tests/plugins/test_accelerators.py",
    "tests/plugins/test_checkpoint_full.py",
)  # fmt: skip
#: Left out there: they look at the repository's sources, need packages that a bundle has not, or count memory that a torch
#: with CUDA takes for itself.
NOT_IN_A_BUNDLE = (
    "tests/core/test_completion.py",
    "tests/core/test_constructors.py",
    "tests/core/test_scaffold.py",
    "tests/core/test_advice.py::test_commands_that_messages_name_exist",
    "tests/core/test_advice.py::test_plugins_that_messages_tell_to_choose_exist",
    "tests/plugins/test_deferred_init.py::test_a_model_larger_than_one_process_may_hold_trains_on_two",
)
SELECTION = "not gpu and not slow and not sweep"
#: Share of the seconds that the GPU part may take; the rest is the CPU part's.
GPU_SHARE = 0.65

_MACHINE = """
import json, os, platform, shutil, sys, sysconfig
import torch

def answer(ask):
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

count = torch.cuda.device_count()
facts = {
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "nccl": answer(lambda: ".".join(map(str, torch.cuda.nccl.version()))) if torch.version.cuda else None,
    "cudnn": answer(torch.backends.cudnn.version) if count else None,
    "devices": [answer(lambda: torch.cuda.get_device_name(index)) for index in range(count)],
    # What compiles operations of DeepSpeed, and kernels of triton: without it tests of these fail.
    "tools": {name: shutil.which(name) for name in ("nvcc", "g++", "gcc", "ninja")} | {
        "Python.h": os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
    },
    "memory_bytes": [answer(lambda: torch.cuda.get_device_properties(index).total_memory) for index in range(count)],
}
json.dump(facts, sys.stdout)
"""


def main() -> int:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    own, passed_on = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["test", "bench", "llama"], nargs="?", default="test")
    parser.add_argument("--seconds", type=float, default=480, help="for all tests; what is not reached is listed")
    parser.add_argument(
        "--json", type=Path, help="by default gpu-test.json, gpu-bench.json or gpu-llama.json in the working folder"
    )
    parser.add_argument("--workers", type=int, help="processes of the CPU part; by default one a core, 8 at most")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--gpu-only", action="store_true")
    parts.add_argument("--cpu-only", action="store_true")
    arguments = parser.parse_args(own)
    path = (arguments.json or Path(f"gpu-{arguments.what}.json")).absolute()
    environment = prepare()
    machine = describe(environment)
    print("\n".join(f"{name:>14}: {value}" for name, value in machine.items()), flush=True)
    if arguments.what == "bench":
        return bench("gpu.py", environment, path, passed_on)
    if arguments.what == "llama":
        return bench("llama.py", environment, path, passed_on, len(machine["devices"]))
    return test(arguments, environment, machine, path, passed_on)


# --- Packages ----------------------------------------------------------------------------------------------------


def prepare() -> dict[str, str]:
    """Unpack the wheels for this Python; return the environment in which they are found."""
    wheels = BUNDLE / "wheels"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {
        "PYTHONUNBUFFERED": "1",
        # Products of matrices give the same bits each time; read when CUDA starts.
        "CUBLAS_WORKSPACE_CONFIG": environment.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    }  # fmt: skip
    if not wheels.is_dir():  # in a checkout, whose environment has the packages
        return environment
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if not (wheels / tag).is_dir():
        made_for = ", ".join(path.name for path in sorted(wheels.glob("cp*")))
        raise SystemExit(f"this Python is {tag} and the bundle is for {made_for}: make gpu-bundle with --python for it")
    site = BUNDLE / f".site-{tag}"
    if not os.access(BUNDLE, os.W_OK):
        site = Path(tempfile.mkdtemp(prefix="stratagem-site-")) / tag
    if not site.exists():
        unpack([*(wheels / "any").glob("*.whl"), *(wheels / tag).glob("*.whl")], site)
    path = [str(site), str(BUNDLE / "tests" / "gpu"), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {
        "PYTHONPATH": os.pathsep.join(path),
        "PATH": os.pathsep.join([str(site / "bin"), environment.get("PATH", os.defpath)]),
    }


def unpack(wheels: list[Path], site: Path) -> None:
    """Write what `wheels` hold into the folder `site`, all or nothing. numpy stays the machine's, if it has one."""
    has_numpy = subprocess.run([sys.executable, "-c", "import numpy"], capture_output=True, check=False).returncode == 0
    partial = Path(tempfile.mkdtemp(prefix=".site-", dir=site.parent if site.parent.exists() else None))
    for wheel in wheels:
        if wheel.name.startswith("numpy-") and has_numpy:
            continue
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                _extract(archive, member, partial)
    site.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(site)


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, site: Path) -> None:
    name = member.filename
    top, _, rest = name.partition("/")
    if top.endswith(".data"):
        kind, _, rest = rest.partition("/")
        name = {"purelib": rest, "platlib": rest, "scripts": f"bin/{rest}"}.get(kind, "")
    if not name or name.endswith("/"):
        return
    path = site / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = archive.read(member)
    if name.startswith("bin/") and data.startswith(b"#!python"):
        data = b"#!" + sys.executable.encode() + data[len(b"#!python") :]
    path.write_bytes(data)
    if name.startswith("bin/") or member.external_attr >> 16 & 0o100:
        path.chmod(0o755)


# --- The machine -------------------------------------------------------------------------------------------------


def describe(environment: dict[str, str]) -> dict[str, Any]:
    """Return what the results depend on."""
    done = subprocess.run(
        [sys.executable, "-c", _MACHINE], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"{sys.executable} cannot import torch; set PYTHON to one that can:\n{done.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(done.stdout)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **facts, "driver": _driver(), "cores": os.cpu_count(), "bundle": _commit(),
    }  # fmt: skip


def _driver() -> str | None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return done.stdout.split("\n")[0].strip()
    return None


def _commit() -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads((BUNDLE / "manifest.json").read_text())["commit"])
    return None


# --- Tests -------------------------------------------------------------------------------------------------------


def test(
    arguments: argparse.Namespace, environment: dict[str, str], machine: dict[str, Any], path: Path, more: list[str]
) -> int:
    """Run both parts; print a table, write `path`, and return the exit status."""
    environment = {"OMP_NUM_THREADS": "1", **environment}  # several tests at a time; a benchmark has all cores
    end = time.monotonic() + arguments.seconds
    parts: dict[str, Any] = {}
    tests: list[dict[str, Any]] = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    both = not (arguments.gpu_only or arguments.cpu_only)
    if not arguments.cpu_only:
        limit = arguments.seconds * (GPU_SHARE if both else 1)
        workers = max(1, min(8, cores // 2)) if machine["devices"] else 1
        options = ["tests/gpu", f"-n{workers}", "--dist=loadgroup", *more]
        results, parts["gpu"] = pytest("gpu", options, environment, limit)
        tests += results
    if not arguments.gpu_only:
        workers = arguments.workers or min(8, cores)
        left_out = [f"--{'deselect' if '::' in name else 'ignore'}={name}" for name in NOT_IN_A_BUNDLE]
        options = [*CPU_PART, *left_out, "-m", SELECTION, f"-n{workers}", "--dist=loadgroup", *more]
        hidden = environment | {"CUDA_VISIBLE_DEVICES": ""}
        results, parts["cpu"] = pytest("cpu", options, hidden, end - time.monotonic())
        tests += results
    print(table(tests))
    for name, part in parts.items():
        print(f"{name} part: {part['summary']} in {part['seconds']:.0f} s{part['note']}")
    path.write_text(json.dumps({"machine": machine, "parts": parts, "tests": tests}, indent=1) + "\n")
    print(f"written: {path}")
    return int(any(part["failed"] for part in parts.values()))


def pytest(
    name: str, options: list[str], environment: dict[str, str], limit: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run pytest in a process group of its own, for `limit` seconds at most; return its tests, and a summary."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stratagem-gpu-") as folder:
        record = Path(folder) / "outcomes.jsonl"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "outcomes", f"--outcomes={record}",
            f"--basetemp={folder}/tests", "--continue-on-collection-errors", "--rootdir", str(BUNDLE),
            "-c", str(BUNDLE / "pyproject.toml"), *options,
        ]  # fmt: skip
        child = subprocess.Popen(command, cwd=BUNDLE, env=environment, start_new_session=True)
        in_time = True
        try:
            status = child.wait(max(1, limit))
        except subprocess.TimeoutExpired:
            status, in_time = 1, False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    planned = next((line["planned"] for line in lines if "planned" in line), 0)
    tests = [{"part": name, **line} for line in lines if "test" in line]
    counts: dict[str, int] = {}
    for each in tests:
        counts[each["outcome"]] = counts.get(each["outcome"], 0) + 1
    note = "" if in_time else f"; ended after {limit:.0f} s, {planned - len(tests)} of {planned} tests were not reached"
    if status and in_time and not counts.get("failed"):
        note = f"; pytest ended with status {status}"
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "nothing ran"
    failed = bool(counts.get("failed")) or not in_time or status not in (0,)
    return tests, {
        "seconds": round(time.monotonic() - start, 1), "summary": summary, "counts": counts, "planned": planned,
        "failed": failed, "note": note,
    }  # fmt: skip


def table(tests: list[dict[str, Any]]) -> str:
    """Return a line for each test of the GPU part and for each file of the CPU part, and why tests were skipped."""
    rows = [
        f"{each['outcome']:>8} {each['seconds']:7.1f} s  {each['test'].removeprefix('tests/gpu/')}"
        for each in sorted((each for each in tests if each["part"] == "gpu"), key=lambda each: each["test"])
    ]
    files: dict[str, list[dict[str, Any]]] = {}
    for each in tests:
        if each["part"] == "cpu":
            files.setdefault(each["test"].partition("::")[0], []).append(each)
    for name, group in sorted(files.items()):
        outcomes = [each["outcome"] for each in group]
        text = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
        rows.append(f"{'cpu':>8} {sum(each['seconds'] for each in group):7.1f} s  {name}: {text}")
    reasons: dict[tuple[str, str], int] = {}
    for each in tests:
        if each["outcome"] == "skipped":
            key = each["part"], each["reason"]
            reasons[key] = reasons.get(key, 0) + 1
    rows += [f"{part} part: {count} skipped: {reason}" for (part, reason), count in sorted(reasons.items())]
    for each in tests:
        if each["outcome"] == "failed":
            rows.append(f"\nFAILED {each['test']}\n{each['reason']}")
    return "\n".join(rows)


# --- Benchmarks --------------------------------------------------------------------------------------------------


def bench(name: str, environment: dict[str, str], path: Path, more: list[str], processes: int = 1) -> int:
    """Run the benchmark `name`, which prints a table and writes `path`."""
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *start, str(BUNDLE / "benchmarks" / name), "--json", str(path), *more]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
