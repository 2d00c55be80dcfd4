"""Log memory and load of device and host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem_callbacks.logged_metrics import check_has_logger
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
        if trainer.is_global_zero:
            import psutil

            self._process = psutil.Process()
            self._process.cpu_percent()  # the first value is meaningless

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        step = trainer.global_step
        if self._process is None or step == self._last_step or step % trainer.settings.log_every_n_steps:
            return
        self._last_step = step
        trainer.run.log_metrics(self.read(trainer.run.device), step)

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
    def on_train_end(self) -> None:
        self._process = None

    on_exception = on_train_end
