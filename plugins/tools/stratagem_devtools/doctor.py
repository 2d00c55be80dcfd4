"""``stratagem doctor``: check the installation: versions, devices, plugins, and a two-process gloo run.

Each check is isolated: a package that cannot be imported is reported, and the other checks continue.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stratagem import __version__
from stratagem.api.options import redact
from stratagem.cli import GROUPS
from stratagem.discovery import registry
from stratagem.errors import PluginError
from stratagem_devtools.environments import examine_environments, render_environments
from stratagem_plugin_checks import check_entry
from stratagem_process_group.remarks import remarks

#: Prefixes of the variables that affect a run.
_PREFIXES = (
    "STRATAGEM_", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "OMP_",
    "MKL_", "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "I_MPI_",
    "MV2_", "LSB_", "JSM_", "PET_", "KUBERNETES_SERVICE_HOST", "FI_", "UCX_",
)  # fmt: skip
_BACKENDS = ("gloo", "nccl", "mpi", "ucc")
#: Time limit of the two-process run, including the import of torch.
_SMOKE_S = 60.0

#: Time limit of torch.utils.collect_env, which runs tools such as nvidia-smi.
_MACHINE_S = 120.0

_MACHINE = """
import json
from torch.utils.collect_env import get_env_info
print(json.dumps(get_env_info()._asdict()))
"""

_SMOKE = """
import os, sys
from stratagem.distributed.launched import die_with
die_with(int(os.environ["STRATAGEM_DOCTOR_PID"]))
import torch, torch.distributed as dist
rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=2)
number = torch.tensor(float(rank + 1))
dist.all_reduce(number)
assert number.item() == 3.0, f"1 + 2 resulted in {number.item()}"
dist.destroy_process_group()
"""


def examine(machine: bool = False) -> dict[str, Any]:
    """Return the report as plain data; ``problems`` lists each problem as a sentence.

    Args:
        machine: add torch's information about drivers, GPUs, compilers and the CPU, which takes seconds.
    """
    packages = _packages()
    smoke = _smoke_run()
    found = remarks(os.environ)
    environments = examine_environments()
    problems = [f"{p['distribution']} is {p['status']}: {reason}" for p in packages for reason in p["reasons"]]
    problems += [f"{name} is set and {remark.text}" for name, remark in found.items() if remark.is_mistake]
    problems += registry.list_remarks()
    problems += environments["problems"]
    if smoke["status"] != "ok":
        problems.append(f"two gloo processes could not communicate: {smoke['reason']}")
    return {
        "stratagem": __version__,
        "python": {
            "version": platform.python_version(), "executable": sys.executable, "platform": platform.platform(),
        },
        "torch": _torch(),
        "devices": _devices(),
        "backends": _backends(),
        "packages": packages,
        **({"machine": _machine()} if machine else {}),
        "environments": environments,
        "environment": _variables(),
        "remarks": {name: remark.text for name, remark in found.items()},
        "smoke run": smoke,
        "problems": problems,
    }  # fmt: skip


def render(report: dict[str, Any]) -> str:
    """Return `report` as text."""
    python, torch, smoke = report["python"], report["torch"], report["smoke run"]
    lines = [
        f"stratagem {report['stratagem']}, Python {python['version']} ({python['executable']}) on {python['platform']}",
        f"torch {torch['version']} ({torch['build']})" if torch["version"] else f"torch: {torch['reason']}",
        "",
        "devices:",
        *(f"  {name}: {found}" for name, found in report["devices"].items()),
        "torch.distributed backends:",
        *(f"  {name}: {'available' if there else 'not in this build'}" for name, there in report["backends"].items()),
        "packages with plugins:",
    ]
    for package in report["packages"]:
        counts = ", ".join(f"{count} {kind}" for kind, count in package["plugins"].items())
        lines.append(f"  {package['distribution']} {package['version']}: {package['status']} ({counts})")
        lines += [f"    {reason}" for reason in [*package["reasons"], *package["notes"]]]
    lines += render_environments(report["environments"])
    lines.append("environment variables:")
    for name, value in report["environment"].items():
        remark = report["remarks"].get(name)
        lines.append(f"  {name}={value}" + (f" ({remark})" if remark else ""))
    lines += [] if report["environment"] else ["  none"]
    lines.append(
        f"two gloo processes: {smoke['status']} in {smoke['seconds']} s"
        + (f" ({smoke['reason']})" if smoke["reason"] else "")
    )
    if "machine" in report:
        lines += ["machine:", *(f"  {line}".rstrip() for line in _machine_lines(report["machine"]))]
    problems = [f"  {problem}" for problem in report["problems"]]
    lines += ["", *(["problems:", *problems] if problems else ["no problems found"])]
    return "\n".join(lines)


# --- The machine -------------------------------------------------------------------------------------------------


def _torch() -> dict[str, Any]:
    try:
        import torch
    except BaseException as error:  # noqa: BLE001 - an import may raise anything
        return {"version": None, "build": None, "reason": f"cannot be imported ({_describe(error)})"}
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return {"version": torch.__version__, "build": build, "reason": ""}


def _devices() -> dict[str, Any]:
    """Return the device count of each installed accelerator, without presets."""
    found: dict[str, Any] = {}
    for entry in registry.entries("accelerator"):
        try:
            target = entry.load()
            if isinstance(target, type):
                found[entry.name] = target().count()
        except BaseException as error:  # noqa: BLE001 - plugin code
            found[entry.name] = f"cannot be counted ({_describe(error)})"
    return found


def _backends() -> dict[str, bool]:
    try:
        import torch.distributed as dist
    except BaseException:  # noqa: BLE001 - reported under "torch"
        return {}
    return {name: dist.is_available() and dist.is_backend_available(name) for name in _BACKENDS}


def _machine() -> dict[str, Any]:
    """Return the output of `torch.utils.collect_env`, or under "reason" why there is none."""
    try:
        command = [sys.executable, "-c", _MACHINE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MACHINE_S, check=True)
        found: dict[str, Any] = redact("machine", json.loads(done.stdout))
        return found
    except subprocess.TimeoutExpired:
        return {"reason": f"torch.utils.collect_env did not finish within {_MACHINE_S:.0f} s"}
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        return {"reason": f"torch.utils.collect_env ended with {error.returncode}: {''.join(last) or 'no message'}"}
    except (OSError, ValueError) as error:
        return {"reason": f"torch.utils.collect_env cannot be run ({_describe(error)})"}


def _machine_lines(machine: dict[str, Any]) -> list[str]:
    if "reason" in machine:
        return [machine["reason"]]
    from torch.utils.collect_env import SystemEnv, pretty_str

    return [*pretty_str(SystemEnv(**machine)).strip().splitlines()]


def _variables() -> dict[str, str]:
    return {name: redact(name, value) for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


# --- Packages ----------------------------------------------------------------------------------------------------


def _packages() -> list[dict[str, Any]]:
    """Return a row for each distribution that provides plugins."""
    shown, everything = registry.entries(), registry.entries(hidden=True)
    rows: dict[str, dict[str, Any]] = {}
    for entry in everything:
        row = rows.setdefault(
            entry.distribution,
            {"distribution": entry.distribution, "version": entry.version, "status": "ok", "plugins": {}, "reasons": [],
             "notes": []},
        )  # fmt: skip
        row["plugins"][entry.kind] = row["plugins"].get(entry.kind, 0) + 1
        if entry not in shown:
            row["notes"].append(f"{entry.kind} {entry.name!r} is hidden by {registry.hidden_by(entry)}")
            continue
        status, reason = _examine(entry, everything)
        if reason and reason not in row["reasons"]:
            row["reasons"].append(reason)
            row["status"] = status
    return list(rows.values())


def _examine(entry: registry.Entry, everything: list[registry.Entry]) -> tuple[str, str]:
    """Return status and reason for one plugin; ("ok", "") without problems."""
    if entry.kind not in (*registry.kinds(), "command"):
        return "broken", f"{entry.name!r} is in the entry-point group stratagem.{entry.kind}, which is not a kind"
    group = entry.name.rpartition(".")[0] if entry.kind == "command" else ""
    if group and group not in GROUPS:
        return "broken", f"command {entry.name!r} is in the group {group!r}; the groups are {', '.join(GROUPS)}"
    duplicates = [e for e in everything if (e.kind, e.name.lower()) == (entry.kind, entry.name.lower()) and e != entry]
    if duplicates:
        return "duplicate", (
            f"{entry.kind} {entry.name!r} is also in {duplicates[0].distribution}; use {entry.qualified_name!r}, or "
            f"uninstall one of them"
        )
    try:
        registry.check_core_version(entry)
    except PluginError as error:
        return "for another version of the core", str(error)
    try:
        problem = check_entry(entry)
    except BaseException as error:  # noqa: BLE001 - plugin code, which may raise SystemExit, too
        problem = f"it cannot be loaded ({_describe(error)})"
    return ("broken", f"{entry.kind} {entry.name!r}: {problem}") if problem else ("ok", "")


# --- Two processes -----------------------------------------------------------------------------------------------


def _smoke_run() -> dict[str, Any]:
    """Start two processes that all-reduce 1 + 2 over gloo."""
    began = time.monotonic()
    reason = _run_two_processes()
    return {
        "status": "failed" if reason else "ok", "reason": reason, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _run_two_processes() -> str:
    """Return the problem; an empty string if there is none."""
    try:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    except BaseException as error:  # noqa: BLE001 - no torch, no gloo, no loopback
        return _describe(error)
    environment = os.environ | {"STRATAGEM_DOCTOR_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="stratagem-doctor-") as folder:
        children = []
        for rank in range(2):
            log = Path(folder) / str(rank)
            with log.open("w") as errors:
                command = [sys.executable, "-c", _SMOKE, str(rank), str(store.port)]
                child = subprocess.Popen(command, env=environment, stdout=errors, stderr=errors)
            children.append((rank, child, log))
        return _wait(children)


def _wait(children: list[tuple[int, subprocess.Popen[bytes], Path]]) -> str:
    deadline = time.monotonic() + _SMOKE_S
    try:
        while time.monotonic() < deadline:
            codes = [child.poll() for _, child, _ in children]
            for (rank, _, log), code in zip(children, codes, strict=True):
                if code:
                    output = log.read_text().strip().splitlines()
                    return f"rank {rank} ended with {code}: {output[-1] if output else 'no output'}"
            if all(code == 0 for code in codes):
                return ""
            time.sleep(0.05)
        return f"they did not finish within {_SMOKE_S:.0f} s"
    finally:
        for _, child, _ in children:
            child.kill()
            child.wait()


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
