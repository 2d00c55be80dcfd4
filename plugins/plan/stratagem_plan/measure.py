"""Measure the devices of this machine, all at work at once: what a device file says of one of them."""

from __future__ import annotations

import datetime
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812

#: Seconds for which one call is repeated at least.
_LONG_ENOUGH = 0.1
_DTYPES = {"fp32_dense": torch.float32, "bf16_dense": torch.bfloat16}
#: Sizes of multiplications, bytes of elementwise operations and tokens of attention: on a CPU, and on an accelerator.
_SIZES = {
    True: ((64, 128, 256, 512, 1024, 2048), (1 << 16, 1 << 20, 1 << 23, 1 << 26), (256, 512)),
    False: ((1024, 2048, 4096, 8192), (1 << 24, 1 << 27, 1 << 30), (1024, 2048, 4096)),
}
_HEADS, _WIDTH = 8, 64
#: Bytes of messages.
_MESSAGES = (64, 1 << 16, 1 << 20, 1 << 22, 1 << 25)


def measure(num_devices: int) -> str:
    """Return the text of a device file for one of `num_devices` devices of this machine: GPUs if torch sees some, or a
    share of its cores and memory for each."""
    with tempfile.TemporaryDirectory(prefix="stratagem-measure-") as folder:
        spawning = multiprocessing.get_context("spawn")
        answer, question = spawning.Pipe(duplex=False)
        ranks = [
            spawning.Process(target=_rank, args=(rank, num_devices, folder, question)) for rank in range(num_devices)
        ]
        for each in ranks:
            each.start()
        question.close()
        try:
            return str(answer.recv())
        finally:
            for each in ranks:
                each.join()


def _rank(rank: int, num_devices: int, folder: str, question: Any) -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_devices))
    else:
        device = torch.device(device.type, rank)
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(device), init_method=f"file://{folder}/store", rank=rank,
        world_size=num_devices, timeout=timedelta(minutes=5),
    )  # fmt: skip
    text = _Device(device, num_devices).text()
    if rank == 0:
        question.send(text)
    dist.destroy_process_group()


_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
#: Collectives as strategies call them: with what all ranks hold together, and with what one rank holds.
_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "all_reduce": lambda whole, _: dist.all_reduce(whole),
    "all_gather": getattr(dist, "all_gather_single", dist.all_gather_into_tensor),  # its name from torch 2.13 on
    "reduce_scatter": lambda whole, part: _REDUCE_SCATTER(part, whole),
    "broadcast": lambda whole, _: dist.broadcast(whole, 0),
}


class _Device:
    """One of the devices."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device, self.count, self.is_cpu = device, count, device.type == "cpu"
        self.sizes, self.bytes, self.tokens = _SIZES[self.is_cpu]

    def text(self) -> str:
        """Return what was measured, as a device file."""
        matmul = {name: [self._matmul(size, dtype) for size in self.sizes] for name, dtype in _DTYPES.items()}
        vector = [self._vector(size) for size in self.bytes]
        attention = [self._attention(tokens) for tokens in self.tokens]
        kernel, host = self._kernel()
        today = datetime.date.today()
        lines = [
            f"memory_bytes = {self._memory():.4g}",
            f"memory_bytes_per_s = {max(vector):.4g}",
            'source = "measured by stratagem plan --measure"',
            f"read_on = {today}", "vendor = false",
            "[flops]", *(f"{name} = {max(rates):.4g}" for name, rates in matmul.items()),
            *self._link(),
            "[curve]", 'source = "this machine"', f"measured_on = {today}", f'torch = "{torch.__version__}"',
            f"kernel_s = {kernel:.3g}", f"host_forward_s = {host:.3g}", f"host_backward_s = {host:.3g}",
        ]  # fmt: skip
        for name, rates in matmul.items():
            lines += _rates(f"curve.matmul.{name}", self.sizes, rates)
        for position, name in enumerate(("forward", "backward")):
            flops = [each[position][0] for each in attention]
            lines += _rates(f"curve.attention.{name}", flops, [each[position][1] for each in attention])
        return "\n".join([*lines, *_rates("curve.vector", self.bytes, vector)]) + "\n"

    # --- One figure each ---------------------------------------------------------------------------------------------

    def _matmul(self, size: int, dtype: torch.dtype) -> float:
        """Return FLOP/s."""
        one, other = (torch.randn(size, size, dtype=dtype, device=self.device) for _ in range(2))
        return 2 * size**3 / self._seconds(lambda: one @ other)

    def _vector(self, num_bytes: int) -> float:
        """Return bytes/s of an operation that reads and writes so many, in memory that it asks for."""
        tensor = torch.randn(num_bytes // 8, device=self.device)
        return num_bytes / self._seconds(lambda: tensor * 2)

    def _attention(self, tokens: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return FLOPs and FLOP/s of causal attention in bf16, forward and backward."""
        shape = (4, _HEADS, tokens, _WIDTH)
        q, k, v = (
            torch.randn(shape, dtype=torch.bfloat16, device=self.device, requires_grad=True) for _ in range(3)
        )  # fmt: skip
        forward = self._seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        backward = self._seconds(lambda: torch.autograd.grad(out, (q, k, v), out.detach(), retain_graph=True))
        flops = 4.0 * math.prod(shape) * tokens
        return (flops, flops / forward), (2.5 * flops, 2.5 * flops / backward)

    def _kernel(self) -> tuple[float, float]:
        """Return the seconds of the shortest operation, and those of the host to start one: 0 if it computes."""
        tensor = torch.ones(8, device=self.device)
        start = time.perf_counter()
        for _ in range(1000):
            tensor + 1
        started = (time.perf_counter() - start) / 1000
        self._wait()
        return (time.perf_counter() - start) / 1000, 0.0 if self.is_cpu else started

    def _link(self) -> list[str]:
        """Return the lines of the link between the devices, by the times of messages to all of them."""
        if self.count == 1:
            return []
        taken = {op: [self._message(op, size) for size in _MESSAGES] for op in _OPS}
        rates = {op: [size / each for size, each in zip(_MESSAGES, times, strict=True)] for op, times in taken.items()}
        fastest = max(rate for each in rates.values() for rate in each)
        shortest = min(times[0] for times in taken.values())
        lines = ["[intra]", f"bytes_per_s_per_direction = {fastest:.4g}", f"latency_s = {shortest:.3g}"]
        return lines + [line for op, each in rates.items() for line in _rates(f"intra.measured.{op}", _MESSAGES, each)]

    def _message(self, op: str, num_bytes: int) -> float:
        whole = torch.zeros(num_bytes // 4 // self.count * self.count, device=self.device)
        part = torch.zeros(len(whole) // self.count, device=self.device)
        return self._seconds(lambda: _OPS[op](whole, part), times=20)

    def _memory(self) -> float:
        if not self.is_cpu:
            return float(torch.accelerator.get_memory_info(self.device.index)[1])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self.count

    # --- Time --------------------------------------------------------------------------------------------------------

    def _seconds(self, call: Callable[[], Any], times: int | None = None) -> float:
        """Return the median of the times of a call, while all devices make it."""
        call()
        self._wait()
        dist.barrier()
        taken: list[float] = []
        while len(taken) < (times or 3) or (times is None and sum(taken) < _LONG_ENOUGH):
            start = time.perf_counter()
            call()
            self._wait()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    def _wait(self) -> None:
        if not self.is_cpu:
            torch.accelerator.synchronize(self.device)


def _rates(name: str, sizes: Sequence[float], rates: Sequence[float]) -> list[str]:
    return [
        f"[{name}]",
        f"size = [{', '.join(f'{each:.4g}' for each in sizes)}]",
        f"per_s = [{', '.join(f'{each:.4g}' for each in rates)}]",
    ]
