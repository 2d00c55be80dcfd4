"""What tests for GPUs share: the device under test, stand-ins, training with every plugin, ranks in fresh processes.

With STRATAGEM_TEST_DEVICE=cpu in the environment the tests that need no CUDA of their own run on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import stratagem as sg
from stratagem.api.world import Collectives, ReduceOp
from stratagem_testing.reference import Batch, Net
from stratagem_testing.training import weights_of

DEVICE = os.environ.get("STRATAGEM_TEST_DEVICE", "cuda")
ON_CUDA = DEVICE == "cuda"
QUIET: dict[str, Any] = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": DEVICE, "devices": 1,
}  # fmt: skip
#: Relative difference in fp32 between a CPU and a GPU, which add in another order: 24 bits, a few steps, gradient norm > 1.
OTHER_ORDER = 2e-5


class Both(Collectives):
    """What two ranks with the same batch send each other."""

    world_size = 2

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, tensor]

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "mean") -> torch.Tensor:
        return tensor * 2


class Fused(Net):
    """Stepped by an optimizer that can skip a step on the device."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Noisy(Net):
    """Dropout draws from the device's generator in every step; AdamW and the schedule have state of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(torch.nn.functional.dropout(x, 0.2, self.training))
        return out

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


class AdamW(Net):
    """AdamW whose epsilon keeps small gradients, and their rounding, from being blown up."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-3)


class SaveAt(sg.Callback):
    """Saves after the batch `batch` of the first epoch, and keeps the weights of that moment in `weights`."""

    def __init__(self, path: Any, batch: int, before: Callable[[], None] = lambda: None) -> None:
        self.path, self.batch, self.before, self.weights = path, batch, before, None

    @sg.hookimpl
    def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == self.batch:
            self.before()
            trainer.save_checkpoint(self.path)
            self.weights = weights_of(trainer)


def fit(module: Any, batches: Any, **arguments: Any) -> tuple[dict[str, torch.Tensor], sg.Trainer]:
    """Fit on the device under test, for an epoch unless told otherwise; return the weights on the CPU, and the trainer."""
    resume = arguments.pop("ckpt_path", None)
    trainer = sg.Trainer(**(QUIET | {"max_epochs": 1} | arguments))
    trainer.fit(module, batches, ckpt_path=resume)
    return weights_of(trainer), trainer


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not the same bits."""
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def delay(seconds: float) -> None:
    """Queue work on the GPU that takes about `seconds`; nothing on a CPU."""
    if ON_CUDA:
        torch.cuda._sleep(int(seconds * 1.5e9))


def visible() -> list[str]:
    """Return the devices that CUDA_VISIBLE_DEVICES of a child process may name."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [each for each in given.split(",") if each] if given else [str(i) for i in range(torch.cuda.device_count())]


# --- Ranks in fresh processes ------------------------------------------------------------------------------------


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, one_gpu: bool = True, limit_s: float = 150,
    variables: dict[str, str] | None = None,
) -> list[Any]:  # fmt: skip
    """Call ``function(rank, world_size, *arguments)`` in new processes; return the results in rank order.

    Unlike forked ones they may use CUDA. `function` is one of a test module, and arguments and results are picklable.
    With `one_gpu` all ranks see the first device alone, and share it.
    """
    ranks = Ranks(function, world_size, *arguments, one_gpu=one_gpu, variables=variables)
    try:
        codes = ranks.wait(limit_s)
        assert not any(codes), f"exit codes {codes}\n{ranks.output()}"
        return [pickle.loads(path.read_bytes()) for path in ranks.results]
    finally:
        ranks.close()


class Ranks:
    """Processes that began as an external launcher starts them: RANK and the rest in the environment."""

    def __init__(
        self, function: Callable[..., Any], world_size: int, *arguments: Any, one_gpu: bool = True,
        variables: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        from stratagem.distributed.rendezvous import RendezvousStore

        self.folder = tempfile.TemporaryDirectory(prefix="stratagem-ranks-")
        root = Path(self.folder.name)
        self.store = RendezvousStore()
        work = (function.__code__.co_filename, function.__name__, world_size, arguments)
        (root / "work").write_bytes(pickle.dumps(work))
        self.results = [root / f"{rank}.result" for rank in range(world_size)]
        self.logs = [root / f"{rank}.log" for rank in range(world_size)]
        environment = os.environ | {
            "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port), "STRATAGEM_STORE_HOSTED": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1", "STRATAGEM_TEST_DEVICE": DEVICE, "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        if ON_CUDA and one_gpu:
            environment |= {"CUDA_VISIBLE_DEVICES": visible()[0], "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        environment |= variables or {}
        self.processes = []
        for rank, log in enumerate(self.logs):
            command = [sys.executable, __file__, str(root), str(rank)]
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(command, env=environment | own, stdout=file, stderr=subprocess.STDOUT)
                )
        self.store.serve()

    def wait(self, limit_s: float, ranks: Sequence[int] | None = None) -> list[int | None]:
        """Wait for `ranks` (all of them) to end; return their exit codes, None for one that was still running."""
        deadline = time.monotonic() + limit_s
        chosen = [self.processes[rank] for rank in (range(len(self.processes)) if ranks is None else ranks)]
        while time.monotonic() < deadline and any(process.poll() is None for process in chosen):
            failed = [process for process in chosen if process.poll()]
            if failed and ranks is None:  # the others may wait for it: they get a moment for their own reports
                deadline = min(deadline, time.monotonic() + 15)
                for process in chosen:
                    _wait_until(process, deadline)
                break
            time.sleep(0.05)
        return [process.poll() for process in chosen]

    def output(self) -> str:
        """Return what the ranks printed."""
        return "\n".join(f"--- rank {rank}\n{log.read_text()[-4000:]}" for rank, log in enumerate(self.logs))

    def close(self) -> None:
        """End what is running."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.store.close()
        self.folder.cleanup()


def _wait_until(process: subprocess.Popen[bytes], deadline: float) -> None:
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def _work(root: Path, rank: int) -> None:
    path, name, world_size, arguments = pickle.loads((root / "work").read_bytes())
    specification = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    result = getattr(module, name)(rank, world_size, *arguments)
    (root / f"{rank}.result").write_bytes(pickle.dumps(result))


def share(batches: list[Batch], rank: int, world_size: int) -> list[Batch]:
    """Return a rank's part of every batch."""
    from stratagem_testing.reference import part

    return part(batches, rank, world_size)


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
