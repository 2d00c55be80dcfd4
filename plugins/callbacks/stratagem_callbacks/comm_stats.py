"""Log how many bytes training communicates, and how many comm hooks save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from stratagem.api import hookimpl
from stratagem.api.traffic import Count
from stratagem.errors import ConfigError
from stratagem_callbacks.logged_metrics import is_due, log
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class CommStats(Callback):
    """Log the bytes that this rank passes to collectives, and the bytes that they send, for each optimizer step.

    ``comm/bytes_per_step`` is the size of the input of collectives, ``comm/wire_bytes_per_step`` what an optimal
    algorithm sends for it. ``comm/<collective>/<sender>`` is the first number by sender: a comm hook, the strategy's
    ``gradients`` or ``parameters``, or ``other``. With comm hooks, ``comm/compression_ratio`` is the bytes of an
    all-reduce of the same gradients, divided by the bytes that were sent, and ``comm/<hook>/<number>`` a statistic of
    the hook, such as ``error_norm``, the norm of the residuals of error feedback. The numbers are those of rank 0,
    averaged over the steps since they were last logged.
    """

    #: Show the megabytes per step and the compression ratio in the progress bar, too.
    show_in_progress_bar: bool = True

    #: Counts since training began, by collective and sender; complete when training has ended.
    totals: dict[tuple[str, str], Count] = field(init=False, factory=dict)
    _start: dict[tuple[str, str], Count] = field(init=False, factory=dict)
    _before: dict[tuple[str, str], Count] = field(init=False, factory=dict)
    _buckets_before: dict[str, Count] = field(init=False, factory=dict)
    _step_before: int = field(init=False, default=0)
    _last_step: int = field(init=False, default=-1)

    @hookimpl
    def on_train_start(self, trainer: TrainerView, run: RunContext) -> None:
        if run.world_size == 1:
            raise ConfigError(
                "comm_stats is chosen and the run has one process", expected="several processes", do="drop it"
            )
        self._start = self._before = _copy(run.collectives.traffic.counts)
        self._buckets_before, self._step_before = _copy(run.collectives.traffic.buckets), trainer.global_step
        self._last_step = -1

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView, run: RunContext) -> None:
        if is_due(trainer, self._last_step):
            self._log(trainer, run)

    def _log(self, trainer: TrainerView, run: RunContext) -> None:
        step = self._last_step = trainer.global_step
        metrics = self._metrics(run, step - self._step_before)
        log(trainer, metrics, step)
        if self.show_in_progress_bar:
            shown = {"comm_mb": metrics["comm/bytes_per_step"] / 1e6}
            if "comm/compression_ratio" in metrics:
                shown["comm_ratio"] = metrics["comm/compression_ratio"]
            trainer.published.bar.update(shown)
        self._before, self._step_before = _copy(run.collectives.traffic.counts), step
        self._buckets_before = _copy(run.collectives.traffic.buckets)

    @hookimpl
    def on_train_end(self, trainer: TrainerView, run: RunContext) -> None:
        if trainer.global_step > max(self._last_step, self._step_before):
            self._log(trainer, run)
        self.totals = _since(run.collectives.traffic.counts, self._start)

    def _metrics(self, run: RunContext, num_steps: int) -> dict[str, float]:
        """Return the averages of the last `num_steps` steps."""
        counts = _since(run.collectives.traffic.counts, self._before)
        total = _since(run.collectives.traffic.counts, self._start)
        metrics = {
            "comm/bytes_per_step": sum(count.payload for count in counts.values()) / num_steps,
            "comm/wire_bytes_per_step": sum(count.wire for count in counts.values()) / num_steps,
        }
        for (collective, sender), count in counts.items():
            if total[collective, sender].calls:
                metrics[f"comm/{collective}/{sender or 'other'}"] = count.payload / num_steps
        hooks = [run.name_of(plugin) for plugin in run.plugins_of("comm_hook")]
        if hooks:
            buckets = _since(run.collectives.traffic.buckets, self._buckets_before)
            sent = sum(count.wire for (_, sender), count in counts.items() if sender in hooks)
            uncompressed = buckets[hooks[0]].wire if hooks[0] in buckets else 0.0
            if sent:
                metrics["comm/compression_ratio"] = uncompressed / sent
        for hook, plugin in zip(hooks, run.plugins_of("comm_hook"), strict=True):
            statistics = plugin.statistics(run) if hasattr(plugin, "statistics") else {}
            metrics |= {f"comm/{hook}/{name}": value for name, value in statistics.items()}
        return metrics


def _copy(counts: dict[Any, Count]) -> dict[Any, Count]:
    return {key: evolve(count) for key, count in counts.items()}


def _since(now: dict[Any, Count], before: dict[Any, Count]) -> dict[Any, Count]:
    """Return the difference of two counts."""
    zero = Count()
    return {
        key: Count(
            count.calls - before.get(key, zero).calls,
            count.payload - before.get(key, zero).payload,
            count.wire - before.get(key, zero).wire,
        )
        for key, count in list(now.items())
    }
