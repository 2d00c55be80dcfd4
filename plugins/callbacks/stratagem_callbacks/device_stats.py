"""Log memory and load of device and host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem_callbacks.logged_metrics import check_has_logger, is_due
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class DeviceStats(Callback):
    """Log memory and load of rank 0 as ``device/...``, as often as step metrics."""

    #: With an accelerator, log CPU load and memory of the process, too; on the CPU they are always logged.
    cpu_stats: bool = True

    _process: Any = field(init=False, default=None)
    _last_step: int = field(init=False, default=-1)

    @hookimpl
    def setup(self, trainer: TrainerView, stage: str) -> None:
        if stage == "fit":
            check_has_logger(trainer, "device_stats")

    @hookimpl
    def on_train_start(self, trainer: TrainerView) -> None:
        self._last_step = -1
        if trainer.is_global_zero:
            import psutil

            self._process = psutil.Process()
            self._process.cpu_percent()  # the first value is meaningless

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        if self._process is not None and is_due(trainer, self._last_step):
            self._log(trainer)

    def _log(self, trainer: TrainerView) -> None:
        self._last_step = trainer.global_step
        trainer.run.log_metrics(self.read(trainer.run.device), self._last_step)

    def read(self, device: Any) -> dict[str, float]:
        """Return the statistics, in bytes and percent."""
        import torch

        stats: dict[str, float] = {}
        if device.type != "cpu":
            memory = torch.accelerator.memory_stats(device)
            names = {"allocated": "allocated_bytes.all", "reserved": "reserved_bytes.all"}
            for name, key in names.items():
                stats[f"device/{name}_bytes"] = float(memory.get(f"{key}.current", 0))
                stats[f"device/{name}_peak_bytes"] = float(memory.get(f"{key}.peak", 0))
        if self.cpu_stats or device.type == "cpu":
            import psutil

            stats["device/process_rss_bytes"] = float(self._process.memory_info().rss)
            stats["device/process_cpu_percent"] = float(self._process.cpu_percent())
            stats["device/host_memory_percent"] = float(psutil.virtual_memory().percent)
        return stats

    @hookimpl
    def on_train_end(self, trainer: TrainerView) -> None:
        if self._process is not None and trainer.global_step > self._last_step:
            self._log(trainer)
        self._process = None

    @hookimpl
    def on_exception(self) -> None:
        self._process = None
