"""Memory of a rank under DeepSpeed's ZeRO compared with the paper, and which strategies train under a memory limit.

    MALLOC_MMAP_THRESHOLD_=1048576 python benchmarks/zero_memory.py peak [processes]
    MALLOC_MMAP_THRESHOLD_=1048576 python benchmarks/zero_memory.py limit [MB]

The model and the measurement are those of memory.py. A parameter in fp32 needs 4 bytes for the weight, 4 for the
gradient and 8 for AdamW's state; a stage of ZeRO divides the last, the last two, or all of these by the number of
processes (Rajbhandari et al., 2020, figure 1). DeepSpeed also keeps a copy of each rank's partition of the weights
(stages 1 and 2), and buckets for gradients and weights, made small here: their default size is 800 MB each. torch's
optimizers allocate two temporary tensors of the size of what they step at a time, which at stages 1 and 2 is the whole
partition.

`limit` limits the memory of each process (RLIMIT_DATA) to that much above its memory before the model is built.
Offloading to the CPU saves nothing if the CPU is the device; offloading to a disk does.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile

import torch

import stratagem as sg
from memory import GPT, resident
from stratagem_testing import run_in_processes
from stratagem_testing.processes import ProcessesFailed

BATCH, LENGTH, VOCABULARY, STEPS = 2, 128, 8192, 4
BUCKETS = {"allgather_bucket_size": 5_000_000, "reduce_bucket_size": 5_000_000}
#: For models with fewer than a billion parameters, stage 3 keeps gathered parameters, and steps all of them at a time.
IN_PIECES = {
    "sub_group_size": 3_000_000,
    "stage3_max_live_parameters": 5_000_000, "stage3_max_reuse_distance": 5_000_000,
    "stage3_prefetch_bucket_size": 5_000_000,
}  # fmt: skip
#: Parts and buffers of the size of the largest layers.
PARAMETERS_ON_DISK = {"device": "nvme", "buffer_size": 3_200_000, "buffer_count": 6, "max_in_cpu": 1}


def at_stage(stage: int, **sections):
    zero = {"stage": stage, **BUCKETS, **(IN_PIECES if stage == 3 else {}), **sections}
    return {"name": "deepspeed", "config": {"zero_optimization": zero, "zero_allow_untested_optimizer": True}}


def on_disk(folder: str):
    return at_stage(
        3, offload_optimizer={"device": "nvme", "nvme_path": folder},
        offload_param=PARAMETERS_ON_DISK | {"nvme_path": folder},
    ) | {"remote_device": "nvme"}  # fmt: skip


STAGES = {"ddp": "ddp", **{f"deepspeed stage {stage}": at_stage(stage) for stage in (1, 2, 3)}}
ON_CPU = at_stage(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})


def bytes_per_parameter(stage: int, processes: int) -> float:
    """Return the bytes per parameter in the paper for fp32 and AdamW: weights, gradients and optimizer state."""
    divided = {0: 0, 1: 8, 2: 12, 3: 16}[stage]
    return 16 - divided + divided / processes


def train(rank, world_size, strategy, limit=None):
    from pathlib import Path

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of the parent
    before = resident("VmRSS")
    if limit is not None:
        allowed = (resident("VmData") + limit) * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    trainer = sg.Trainer(strategy=strategy, max_epochs=1, devices=world_size, accelerator="cpu", barebones=True)
    trainer.fit(GPT(), [torch.randint(VOCABULARY, (BATCH, LENGTH)) for _ in range(STEPS)])
    peak = resident("VmHWM") - before
    trainer.close()
    return peak


def peaks(processes: int, size: int) -> None:
    print(f"| strategy | peak of a rank above the start, MB | of ddp | the paper, MB | of ddp |\n{'|---' * 5}|")
    ddp = 0
    for stage, (name, strategy) in enumerate(STAGES.items()):
        peak = max(run_in_processes(train, processes, strategy, limit_s=600))
        ddp = ddp or peak
        paper = bytes_per_parameter(stage, processes)
        print(f"| {name} | {peak} | {peak / ddp:.2f} | {paper * size / 2**20:.0f} | {paper / 16:.2f} |", flush=True)


def limits(limit: int) -> None:
    print(f"| two processes, {limit} MB more than before the model | |\n|---|---|")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        offloaded = {"stage 3, all on the CPU": ON_CPU, "stage 3, all on a disk": on_disk(folder)}
        for name, strategy in {**STAGES, **offloaded}.items():
            print(f"| {name} | {_outcome(strategy, limit)} |", flush=True)


def _outcome(strategy, limit: int) -> str:
    try:
        return f"trains, {max(run_in_processes(train, 2, strategy, limit, limit_s=600))} MB"
    except ProcessesFailed as error:
        refused = any(words in str(error) for words in ("MemoryError", "not enough memory", "Cannot allocate memory"))
        return "out of memory" if refused else f"failed: {str(error).splitlines()[-1]}"


if __name__ == "__main__":
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        raise SystemExit("set MALLOC_MMAP_THRESHOLD_=1048576, see the top of this file")
    mode, number = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None
    model = GPT()
    model.configure_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    print(f"{parameters / 1e6:.0f} million parameters, {STEPS} steps of {BATCH} x {LENGTH} tokens each\n")
    if mode == "peak":
        peaks(number or 2, parameters)
    else:
        limits(number or 1000)
