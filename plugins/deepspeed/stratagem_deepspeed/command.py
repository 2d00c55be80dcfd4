"""``stratagem deepspeed``: build ops ahead of time, and find the fastest settings for a disk."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stratagem.api import Command
from stratagem.errors import ConfigError, StratagemError, nearest

#: A short sweep for deepspeed's tool: a minute instead of ten. Larger blocks are left out, since tensors smaller than a
#: block stay in memory.
_BRIEF_SWEEP = {
    "block_size": ["1M"],
    "queue_depth": [8, 32],
    "sequential_requests": [False],
    "single_submit": [False],
    "io_parallel": [1, 4],
}
#: The sweep's names of its results, by options of the strategy.
_FOUND = {
    "block_size": "block_size", "queue_depth": "queue_depth", "thread_count": "num_threads",
    "single_submit": "single_submit", "overlap_events": "overlap_events",
}  # fmt: skip


class DeepSpeed(Command):
    """Subcommands build-ops and tune-nvme."""

    help = "build the ops that DeepSpeed compiles; find the fastest settings for a disk"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        build = actions.add_parser("build-ops", help="compile ops now instead of in the first run that needs them")
        build.add_argument("names", nargs="*", default=["cpu_adam"], metavar="NAME", help="an op (default cpu_adam)")
        tune = actions.add_parser("tune-nvme", help="measure a disk, and print the options that make it fastest")
        tune.add_argument("path", help="a folder on the disk")
        tune.add_argument("--size", default="64M", help="how much to write and read each time (default 64M)")
        tune.add_argument("--thorough", action="store_true", help="try all settings of DeepSpeed's own sweep")
        tune.add_argument("--json", action="store_true", help="print JSON")
        for action in (build, tune):
            action.add_argument("--accelerator", help="the devices to build for (default: those of this machine)")

    def run(self, arguments: argparse.Namespace) -> int:
        actions = {"build-ops": _build, "tune-nvme": _tune}
        return actions[arguments.action](arguments)


# --- build-ops ---------------------------------------------------------------------------------------------------


def _build(arguments: argparse.Namespace) -> int:
    from stratagem_deepspeed.builds import OPS

    for name in arguments.names:
        if name not in OPS:
            raise ConfigError(
                f"deepspeed has no op {name!r} for training", expected=" or ".join(OPS), do=nearest(name, OPS)
            )
    with _ops(arguments.accelerator) as load:
        for name in arguments.names:
            print(f"{name}: building, unless it exists", flush=True)
            began = time.monotonic()
            library = load(name)
            print(f"{name}: ready after {time.monotonic() - began:.0f} s in {library}")
    return 0


@contextmanager
def _ops(device_type: str | None) -> Iterator[Callable[[str], str]]:
    """Yield a function that builds an op for these devices, and returns the path of its library."""
    from stratagem_deepspeed import builds, start

    start.load(device_type or _device_type())
    builds.take_over(speaks=False)
    try:

        def load(name: str) -> str:
            from deepspeed.accelerator import get_accelerator

            builder = get_accelerator().create_op_builder(builds.OPS[name].builder)
            builds.check_tools(builder)
            return str(builder.load().__file__)

        yield load
    finally:
        builds.give_back()


def _device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# --- tune-nvme ---------------------------------------------------------------------------------------------------


def _tune(arguments: argparse.Namespace) -> int:
    from stratagem_deepspeed.disk import Disk

    if re.fullmatch(r"[1-9]\d*[KMG]?", arguments.size) is None:
        raise ConfigError(f"--size is {arguments.size!r}", expected="a number, optionally followed by K, M or G")
    zero: dict[str, Any] = {"offload_param": {"device": "nvme", "nvme_path": arguments.path}}
    _check_folder(arguments.path)
    disk = Disk(zero, lambda _: "the path to tune")
    try:
        disk.set_paths(zero)
        with _ops(arguments.accelerator) as load:
            built = load("async_io")
        output = _sweep(zero["offload_param"]["nvme_path"], arguments, Path(built).parent.parent)
    finally:
        disk.remove()
    found = _read(output)
    print(json.dumps(found, indent=2) if arguments.json else _render(arguments.path, found))
    return 0


def _check_folder(path: str) -> None:
    if not os.path.isdir(path):
        raise ConfigError(f"the path to tune is {path!r}, which is not a folder", expected="one on the disk to measure")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"the path to tune is {path!r}, which is not writable", expected="a writable folder")


def _sweep(folder: str, arguments: argparse.Namespace, ops: Path) -> str:
    """Run deepspeed's own tool in `folder`; return its output."""
    scripts = Path(sysconfig.get_path("scripts"))
    command = [str(scripts / "ds_nvme_tune"), "--nvme_dir", ".", "--log_dir", "log", "--io_size", arguments.size]
    environment = {
        **os.environ, "TORCH_EXTENSIONS_DIR": str(ops), "DS_ACCELERATOR": arguments.accelerator or _device_type(),
        "PATH": os.pathsep.join([str(scripts), os.environ.get("PATH", os.defpath)]),
    }  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".json") as grid:
        if not arguments.thorough:
            json.dump(_BRIEF_SWEEP, grid)
            grid.flush()
            command += ["--sweep_config", grid.name]
        try:
            ended = subprocess.run(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise StratagemError(
                f"{command[0]}, a part of deepspeed, is missing", do="install deepspeed again"
            ) from error
    if ended.returncode != 0 or "Best performance" not in ended.stdout:
        raise StratagemError(f"deepspeed's sweep ended without a result ({_last_line(ended, folder)})")
    return ended.stdout


def _last_line(ended: subprocess.CompletedProcess[str], folder: str) -> str:
    """Return the last line of the last trial's log, or of the sweep's own output."""
    logs = sorted(Path(folder).glob("log/*/*.txt"), key=lambda path: path.stat().st_mtime)
    texts = [*(log.read_text(errors="replace") for log in logs[-1:]), ended.stderr, ended.stdout]
    lines = [line.strip() for text in texts for line in text.splitlines()[-1:]]
    return next(filter(None, lines), f"exit code {ended.returncode}")


def _read(output: str) -> dict[str, Any]:
    """Return the speeds, and the settings by the strategy's names and by the configuration's."""
    speeds = re.search(r"read =\s*([\d.]+), write =\s*([\d.]+)", output)
    assert speeds is not None, "checked by _sweep"
    best: Mapping[str, Any] = json.loads(output[output.index("{", speeds.end()) :])["aio"]
    options = {name: _value(best[key]) for name, key in _FOUND.items()}
    aio = {"intra_op_parallelism" if name == "thread_count" else name: value for name, value in options.items()}
    return {"read_gb_per_s": float(speeds[1]), "write_gb_per_s": float(speeds[2]), "options": options, "aio": aio}


def _value(text: Any) -> Any:
    return {"true": True, "false": False}.get(text, text)


def _render(path: str, found: Mapping[str, Any]) -> str:
    options = {"name": "deepspeed_stage_3_offload_nvme", "nvme_path": path, **found["options"]}
    return "\n".join(
        [
            f"{path}: reads {found['read_gb_per_s']:.2f} GB/s and writes {found['write_gb_per_s']:.2f} GB/s with",
            f"strategy={options!r}",
            "or, in a configuration for DeepSpeed,",
            f'"aio": {json.dumps(found["aio"])}',
        ]
    )
