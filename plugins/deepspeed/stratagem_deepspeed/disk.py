"""Files that a run offloads to a disk: in its own folder, with checked requests, and removed at the end.

[Note: unchecked disk requests]
deepspeed uses direct I/O, which needs memory that is aligned to the disk's block size, and does not check the result
of a request. On a full disk, or with a tensor that is not aligned, it continues with the values that happen to be in
memory: zeros, or gradients of the previous step. `Disk.watched` adds the missing checks: it reserves space for a file
before the first write, and copies unaligned tensors to aligned buffers.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import lock_descriptor
from torch import nn

from stratagem.errors import ConfigError, StratagemError
from stratagem_deepspeed.zero_section import device_of

SECTIONS = ("offload_optimizer", "offload_param")

#: Prefix of the folders of runs.
_PREFIX = "stratagem-swap-"
#: Lock file in a folder, held by its process until that ends.
_LOCK = "in-use"
#: Block sizes in bytes to which disks may require addresses and sizes to be aligned.
_ALIGNMENTS = (512, 4096)
#: Smaller tensors stay in memory.
_SMALLEST_BYTES = 1024**2
#: Bit of the Linux capability to lock any amount of memory.
_CAP_IPC_LOCK = 14


# --- Folders -----------------------------------------------------------------------------------------------------


class Disk:
    """The folders of this process, one for each `nvme_path` of the configuration; `remove` deletes them."""

    def __init__(self, zero: Mapping[str, Any], called: Callable[[str], str]) -> None:
        """Make the folders, after removing those of runs that were killed.

        Raises:
            ConfigError: the folder is not writable, or its file system does not support direct I/O.
        """
        self._parents = {
            section: str(Path(zero[section]["nvme_path"])) for section in SECTIONS if device_of(zero, section) == "nvme"
        }
        self._locks: list[int] = []
        self._own: dict[str, Path] = {}
        self._models = 0
        self._alignment = _ALIGNMENTS[0]
        for section, parent in self._parents.items():
            if parent not in self._own:
                self._make(Path(parent), called(f"{section}.nvme_path"))

    def _make(self, parent: Path, name: str) -> None:
        try:
            _remove_abandoned(parent)
            path = self._own[str(parent)] = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._locks.append(_lock(path))
            self._alignment = max(self._alignment, _alignment(path))
        except OSError as error:
            self.remove()
            raise ConfigError(
                f"{name} is {str(parent)!r}, which cannot hold what is offloaded ({_reason(error)})",
                expected="a writable folder on a local disk with enough space",
            ) from error

    def begin(self) -> None:
        """Use new folders for the next model; remove the optimizer state of the previous one."""
        for path in self._own.values():
            shutil.rmtree(path / f"optimizer-{self._models}", ignore_errors=True)
        self._models += 1

    def set_paths(self, zero: dict[str, Any]) -> None:
        """Set the `nvme_path` of each section of `zero` to this process's folder."""
        for section, parent in self._parents.items():
            kind = "optimizer" if section == "offload_optimizer" else "parameters"
            path = self._own[parent] / f"{kind}-{self._models}"
            path.mkdir(exist_ok=True)
            zero[section]["nvme_path"] = str(path)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within: handles that deepspeed makes check their requests; see [Note: unchecked disk requests]."""
        import deepspeed.utils
        from deepspeed.ops.op_builder import AsyncIOBuilder

        deepspeed.utils._deepspeed_nvme_write_warning_emitted = True  # the documentation of `nvme_path` warns
        op = AsyncIOBuilder().load()
        before, op.aio_handle = op.aio_handle, _watched(op.aio_handle, self._alignment)
        try:
            yield
        finally:
            op.aio_handle = before

    def remove(self) -> None:
        """Delete the folders. Safe to call twice."""
        for path in self._own.values():
            shutil.rmtree(path, ignore_errors=True)
        for descriptor in self._locks:
            os.close(descriptor)
        self._own, self._locks = {}, []


def _lock(path: Path) -> int:
    """Create a lock file that is held before other processes can see it."""
    hidden = path / f"{_LOCK}.new"
    descriptor = os.open(hidden, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    lock_descriptor(descriptor, blocking=False)
    hidden.rename(path / _LOCK)
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """Remove folders whose processes were killed before they could do so."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                if lock_descriptor(descriptor, blocking=False):
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def _alignment(path: Path) -> int:
    """Return the alignment in bytes that the disk of `path` requires of addresses and sizes.

    Raises:
        OSError: the disk is full, or does not support direct I/O.
    """
    trial = path / "trial"
    descriptor = os.open(trial, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, 2 * _ALIGNMENTS[-1]) as memory, memoryview(memory) as view:
            for size in _ALIGNMENTS[:-1]:
                with contextlib.suppress(OSError), view[size : 2 * size] as block:
                    os.pwrite(descriptor, block, size)
                    return size
            with view[: _ALIGNMENTS[-1]] as block:
                os.pwrite(descriptor, block, 0)
        return _ALIGNMENTS[-1]
    finally:
        os.close(descriptor)
        trial.unlink()


def _reason(error: OSError) -> str:
    if error.errno == errno.EINVAL:
        return "its file system does not support direct I/O"
    return error.strerror or str(error)


# --- Requests ----------------------------------------------------------------------------------------------------


def _watched(handle: Any, alignment: int) -> Any:
    """Return a subclass of `handle` that reserves disk space, and copies unaligned tensors to aligned buffers."""

    class Watched(handle):  # type: ignore[misc] # a class of a compiled module
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._num_threads = options["intra_op_parallelism"]
            self._reserved: dict[str, int] = {}
            #: Aligned buffers of pending requests, and the tensors to which they are copied after a read.
            self._aligned_buffers: list[tuple[torch.Tensor, torch.Tensor | None]] = []
            self._pending = 0

        def __del__(self) -> None:
            if self._pending:  # destroying a handle with pending requests would end the process
                super().wait()

        def async_pwrite(self, tensor: torch.Tensor, path: str, offset: int = 0) -> int:
            buffer = self._aligned(tensor, is_read=False)
            size = offset + buffer.nbytes
            if self._reserved.get(path, 0) < size:
                _reserve(path, size)
                self._reserved[path] = size
            return self._request(super().async_pwrite, buffer, path, offset)

        def async_pread(self, tensor: torch.Tensor, path: str, offset: int = 0) -> int:
            return self._request(super().async_pread, self._aligned(tensor, is_read=True), path, offset)

        def wait(self) -> int:
            done: int = super().wait()
            self._pending = 0
            for buffer, tensor in self._aligned_buffers:
                if tensor is not None:
                    tensor.copy_(buffer[: tensor.numel()])
                self.free_cpu_locked_tensor(buffer)
            self._aligned_buffers = []
            return done

        def _aligned(self, tensor: torch.Tensor, is_read: bool) -> torch.Tensor:
            unit = alignment * self._num_threads
            if tensor.data_ptr() % alignment == 0 and tensor.nbytes % unit == 0:
                return tensor
            padded = -(-tensor.nbytes // unit) * unit
            buffer: torch.Tensor = self.new_cpu_locked_tensor(padded // tensor.itemsize, tensor)
            if not is_read:
                buffer[: tensor.numel()].copy_(tensor)
            self._aligned_buffers.append((buffer, tensor if is_read else None))
            return buffer

        def _request(self, request: Callable[..., int], tensor: torch.Tensor, path: str, offset: int) -> int:
            result = request(tensor, path, offset)
            if result != 0:
                raise StratagemError(
                    f"{path}, which holds offloaded state, cannot be opened", do="find out what removed it"
                )
            self._pending += 1
            return result

    return Watched


def _reserve(path: str, size: int) -> None:
    """Allocate `size` bytes of disk space for the file at `path`.

    Raises:
        StratagemError: the disk does not have them.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        free = shutil.disk_usage(os.path.dirname(path)).free
        raise StratagemError(
            f"{path} needs {size / 1e6:.1f} MB for what is offloaded, and the disk has {free / 1e6:.1f} MB "
            f"({error.strerror})",
            do="free disk space, or set another nvme_path",
        ) from error
    finally:
        os.close(descriptor)


def patch_swapper(swapper: Any) -> None:
    """Make deepspeed's parameter swapper accept a request that has the same parameter twice.

    Its prefetching makes such requests for a layer that is last in forward and first in backward.
    """
    swap_in = swapper.swap_in

    def each_once(parameters: list[Any], *arguments: Any, **options: Any) -> None:
        swap_in(list({id(parameter): parameter for parameter in parameters}.values()), *arguments, **options)

    swapper.swap_in = each_once


# --- Sizes -------------------------------------------------------------------------------------------------------


def check_parameters(
    module: nn.Module, config: Mapping[str, Any], dtype: torch.dtype | None, world_size: int,
    called: Callable[[str], str],
) -> None:  # fmt: skip
    """Refuse buffers that are too small or too few for the parameters of `module` that are on the disk.

    Raises:
        ConfigError: a buffer is too small, there are too few, or the system does not allow them to be locked.
    """
    section = config["zero_optimization"]["offload_param"]
    size, count = section.get("buffer_size", 100_000_000), section.get("buffer_count", 5)  # deepspeed's defaults
    smallest = max(_SMALLEST_BYTES, config.get("aio", {}).get("block_size", 0))
    partitions = {
        name: elements
        for name, parameter in module.named_parameters()
        if (elements := _partition_size(parameter, world_size)) * (dtype or parameter.dtype).itemsize >= smallest
    }
    if partitions and max(partitions.values()) > size:
        name = max(partitions, key=lambda name: partitions[name])
        raise ConfigError(
            f"{called('offload_param.buffer_size')} is {size}, and a rank's partition of {name} has {partitions[name]} "
            "elements",
            expected="a buffer for the largest partition", do=f"set it to {partitions[name]}",
        )  # fmt: skip
    for name, part in module.named_modules():
        own = [key for key, _ in part.named_parameters(name, recurse=False) if key in partitions]
        if len(own) > count:
            raise ConfigError(
                f"{called('offload_param.buffer_count')} is {count}, and {name or type(part).__name__} computes with "
                f"{len(own)} parameters from the disk at a time",
                expected="a buffer for each", do=f"set it to {len(own)}",
            )  # fmt: skip
    check_lockable(size * count * (dtype or torch.float32).itemsize, called("offload_param.buffer_size"))


def _partition_size(parameter: Any, world_size: int) -> int:
    return -(-int(getattr(parameter, "ds_numel", parameter.numel())) // world_size)


def check_lockable(size: int, name: str) -> None:
    """Refuse buffers that the system does not allow this user to lock into memory, with which deepspeed would crash.

    Raises:
        ConfigError: they exceed the limit.
    """
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit in (resource.RLIM_INFINITY, -1) or size <= limit or _may_lock_all():
        return
    raise ConfigError(
        f"{name} asks for {size / 1e6:.0f} MB of buffers, which are locked into memory, and a process of this user may "
        f"lock {limit / 1e6:.0f} MB",
        expected="smaller buffers", do='lower it, or have the limit raised ("ulimit -l unlimited")',
    )  # fmt: skip


def _may_lock_all() -> bool:
    status = Path("/proc/self/status").read_bytes()
    return bool(int(status.partition(b"CapEff:")[2].split()[0], 16) >> _CAP_IPC_LOCK & 1)


def check_optimizer(optimizer: Any, section: Mapping[str, Any], called: Callable[[str], str]) -> None:
    """Refuse fewer buffers than a step of `optimizer` needs: for weights, gradients, and each tensor of its state.

    Raises:
        ConfigError: there are fewer.
    """
    wanted, count = 2 + _tensors_kept(optimizer), section.get("buffer_count", 4)  # deepspeed's default
    if count < wanted:
        raise ConfigError(
            f"{called('offload_optimizer.buffer_count')} is {count}, and a step of {type(optimizer).__name__} needs "
            f"{wanted} buffers",
            expected=f"at least {wanted}", do=f"set it to {wanted}",
        )  # fmt: skip


def _tensors_kept(optimizer: Any) -> int:
    """Return the number of tensors of a parameter's size in the optimizer's state."""
    known = {"DeepSpeedCPUAdam": 2, "DeepSpeedCPUAdagrad": 1, "DeepSpeedCPULion": 1}
    if type(optimizer).__name__ in known:
        return known[type(optimizer).__name__]
    probe = nn.Parameter(torch.zeros(3))
    probe.grad = torch.ones(3)
    trial = _alone_with(optimizer, probe)
    trial.step()
    return sum(isinstance(value, torch.Tensor) and value.shape == probe.shape for value in trial.state[probe].values())


def _alone_with(optimizer: Any, parameter: nn.Parameter) -> Any:
    """Return a copy of the optimizer with `parameter` as its only one."""
    import collections
    import copy

    trial = copy.copy(optimizer)
    trial.__dict__.update(state=collections.defaultdict(dict))
    trial.__dict__["param_groups"] = [{**optimizer.param_groups[0], "params": [parameter]}]
    return trial


def check_not_lost(module: nn.Module) -> None:
    """Refuse a model whose parameters were on a disk in an earlier run, which has deleted them.

    Raises:
        ConfigError: some were.
    """
    for name, parameter in module.named_parameters():
        partition = getattr(parameter, "ds_tensor", None)
        if getattr(partition, "final_location", None) == "nvme" and parameter.nvme_swapper is None:  # type: ignore[attr-defined]
            raise ConfigError(
                f"the model's {name} was on a disk, and was deleted with the run that had offloaded it",
                expected="a model with all its parameters",
                do="save a checkpoint before a run is closed, and load it into a new model",
            )  # fmt: skip


# --- Release ------------------------------------------------------------------------------------------------------


def release(module: nn.Module) -> None:
    """Free the swap buffers of the parameters of `module`; parameters on the disk are deleted with its folder."""
    on_disk = [parameter for parameter in module.parameters() if getattr(parameter, "nvme_swapper", None) is not None]
    swappers = {id(parameter.nvme_swapper): parameter.nvme_swapper for parameter in on_disk}  # type: ignore[attr-defined]
    for swapper in swappers.values():
        with contextlib.suppress(AssertionError):
            swapper.synchronize_reads()
            swapper.synchronize_writes()
    for parameter in on_disk:
        if parameter.ds_tensor.final_location == "nvme":  # type: ignore[attr-defined]
            parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])  # type: ignore[attr-defined]
        parameter.nvme_swapper = None  # type: ignore[attr-defined]
    for swapper in swappers.values():
        for buffer in (swapper.buffers, swapper.partitioned_swap_buffer):
            if buffer is not None:
                swapper.aio_write_handle.free_cpu_locked_tensor(buffer)
        swapper.buffers = swapper.partitioned_swap_buffer = None
