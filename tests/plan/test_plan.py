"""`stratagem plan`: what it counts, against runs of the same script with values, and against a GPU's own counter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plan.evaluation import measured_rows
from stratagem_plan.result import LIBRARY_BYTES

SCRIPT = Path(__file__).with_name("train_gpt.py")


def plan(folder, *options, script=SCRIPT, **given):
    """Return the exit code, the plan file (None if there is none) and what was printed."""
    path = folder / "plan.json"
    words = [*map(str, options), "--json", str(path), str(script), json.dumps(given)]
    done = subprocess.run(
        [sys.executable, "-m", "stratagem", "plan", *words], capture_output=True, text=True, cwd=folder
    )  # fmt: skip
    tree = json.loads(path.read_text()) if path.exists() else None
    path.unlink(missing_ok=True)
    return done.returncode, tree, done.stdout + done.stderr


def write(folder, text):
    path = folder / "train.py"
    path.write_text("import torch, stratagem as sg\nfrom torch import nn\n" + text)
    return path


# --- Against runs with values -------------------------------------------------------------------------------------------

UNITS = {"auto_wrap_policy": True}
STRATEGIES = {
    "ddp": "ddp",
    "ddp_sharded": "ddp_sharded",
    "fsdp": "fsdp",
    "fsdp with units": {"name": "fsdp"} | UNITS,
    "fsdp HYBRID_SHARD": {"name": "fsdp", "sharding_strategy": "HYBRID_SHARD"} | UNITS,
    "ddp, fp16 hook": "ddp",
}


def sent_for_real(folder, strategy, devices, **given):
    """Return the payloads of a second step on rank 0, by collective, of what is sent for gradients and parameters."""
    given |= {"strategy": strategy, "devices": devices, "count_to": str(folder)}
    given["options"] = given.get("options", {}) | {"accelerator": "cpu"}
    subprocess.run([sys.executable, SCRIPT, json.dumps(given)], check=True, capture_output=True, cwd=folder)
    first, second = (json.loads((folder / f"0-{step}.json").read_text()) for step in (0, 1))
    found = {}
    for name, (_, payload) in second.items():
        operation, _, sender = name.partition(" ")
        if sender in ("gradients", "parameters"):
            found[operation] = found.get(operation, 0) + payload - first.get(name, [0, 0])[1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(("name", "devices"), [(name, 2) for name in STRATEGIES] + [("fsdp with units", 4), ("ddp", 4)])
def test_a_plan_sends_the_bytes_that_a_run_sends(tmp_path, name, devices, precision):
    options = {"comm_hook": "fp16"} if "hook" in name else {}
    given = {"precision": precision, "options": options}
    code, tree, said = plan(tmp_path, "--devices", devices, strategy=STRATEGIES[name], **given)
    assert code == 0, said
    found = {}
    for each in tree["classes"][0]["collectives"]:
        # Of an all-gather the run counts this rank's part, the plan the whole result.
        size = each["payload"] / (each["ranks"] if each["op"] == "all_gather" else 1)
        found[each["op"]] = found.get(each["op"], 0) + size * each["calls"]
    found.pop("broadcast", None) if name.startswith("ddp,") or name == "ddp" else None

    assert found == sent_for_real(tmp_path, STRATEGIES[name], devices, **given)
