"""Profile a run by action, by Python function, by operation, or by what holds memory."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

    from stratagem_trainer.api import TrainerView


def _folder(trainer: TrainerView, dirpath: Path | None) -> Path:
    folder = Path(dirpath if dirpath is not None else trainer.default_root_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"a profiler's dirpath is {str(folder)!r} ({error.strerror})", expected="a folder to write to"
        ) from error
    return folder


def _timed(action: str) -> Any:
    """Return a wrapper of a hook that measures it as `action`."""

    def timed(self: SimpleProfiler) -> Generator[None, Any, Any]:
        with self._measuring(action):
            return (yield)

    return hookimpl(wrapper=True)(timed)


def _switch(ends: str, begins: str, *, first: bool) -> Any:
    """Return a hook that ends one action and begins another, before other plugins if `first`; "" stands for none."""

    def switch(self: SimpleProfiler) -> None:
        self._end(ends)
        if begins:
            self._begin(begins)

    return hookimpl(tryfirst=first, trylast=not first)(switch)


@define(eq=False, kw_only=True)
class SimpleProfiler(Callback):
    """Sum the time of each action of the loop on each rank; print rank 0's and write those of all ranks at the end.

    Results of test and predict are written to ``profile-simple-test-rank<r>.txt`` and ``-predict-``. On a GPU the time
    of an action is that of launching its kernels, not of running them: use ``profiler="pytorch"`` there.
    """

    #: Folder of ``profile-simple-rank<r>.txt``; ``default_root_dir`` if not given.
    dirpath: Path | None = None
    #: Write the files; otherwise rank 0 only prints.
    write: bool = True

    #: Seconds and calls by action.
    seconds: dict[str, float] = field(init=False, factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(init=False, factory=lambda: defaultdict(int))
    _open: dict[str, float] = field(init=False, factory=dict)
    #: Seconds and calls before the current test or predict.
    _before: dict[str, tuple[float, int]] = field(init=False, factory=dict)
    _written: Path | None = field(init=False, default=None)

    def written_files(self) -> dict[str, str]:
        """Return this rank's table, once it is written."""
        return {} if self._written is None else {"time of actions": str(self._written)}

    def _begin(self, action: str) -> None:
        self._open[action] = time.perf_counter()

    def _end(self, action: str) -> None:
        began = self._open.pop(action, None)
        if began is not None:
            self.seconds[action] += time.perf_counter() - began
            self.calls[action] += 1

    transfer_batch = _timed("batch to device")
    backward = _timed("backward")
    clip_gradients = _timed("clipping")
    step_optimizers = _timed("optimizer step")
    save_checkpoint = _timed("saving")
    load_checkpoint = _timed("loading")
    wrap_model = _timed("wrapping the model")

    @hookimpl
    def step_context(self, stage: str) -> AbstractContextManager[Any]:
        return self._measuring("forward and backward" if stage == "train" else "forward")

    @contextlib.contextmanager
    def _measuring(self, action: str) -> Iterator[None]:
        self._begin(action)
        try:
            yield
        finally:
            self._end(action)

    on_train_batch_start = _switch("next batch", "training batch", first=True)
    on_train_batch_end = _switch("training batch", "next batch", first=False)
    on_sanity_check_start = _switch("", "sanity check", first=True)
    on_sanity_check_end = _switch("sanity check", "", first=False)
    on_validation_epoch_start = _switch("", "next validation batch", first=False)
    on_validation_batch_start = _switch("next validation batch", "validation batch", first=True)
    on_validation_batch_end = _switch("validation batch", "next validation batch", first=False)
    on_test_epoch_start = _switch("", "next test batch", first=False)
    on_test_batch_start = _switch("next test batch", "test batch", first=True)
    on_test_batch_end = _switch("test batch", "next test batch", first=False)
    on_predict_epoch_start = _switch("", "next predict batch", first=False)
    on_predict_batch_start = _switch("next predict batch", "predict batch", first=True)
    on_predict_batch_end = _switch("predict batch", "next predict batch", first=False)

    @hookimpl(tryfirst=True)
    def on_train_start(self) -> None:
        self._begin("training")
        self._begin("next batch")

    @hookimpl(tryfirst=True)
    def on_validation_start(self, trainer: TrainerView) -> None:
        self._open.pop("next batch", None)
        if not trainer.sanity_checking:
            self._begin("validation")

    @hookimpl(trylast=True)
    def on_validation_end(self) -> None:
        self._open.pop("next validation batch", None)
        self._end("validation")
        self._begin("next batch")

    @hookimpl(tryfirst=True)
    def on_test_start(self) -> None:
        self._start("test")

    @hookimpl(tryfirst=True)
    def on_predict_start(self) -> None:
        self._start("predict")

    @hookimpl(tryfirst=True)
    def on_predict_epoch_end(self) -> None:
        self._open.pop("next predict batch", None)  # what follows does not load a batch

    @hookimpl(trylast=True)
    def on_train_end(self, trainer: TrainerView) -> None:
        self._stop(trainer, "training", "next batch")

    @hookimpl(trylast=True)
    def on_test_end(self, trainer: TrainerView) -> None:
        self._stop(trainer, "test", "next test batch")

    @hookimpl(trylast=True)
    def on_predict_end(self, trainer: TrainerView) -> None:
        self._stop(trainer, "predict")

    def _start(self, stage: str) -> None:
        self._before = {action: (seconds, self.calls[action]) for action, seconds in self.seconds.items()}
        self._begin(stage)

    def _stop(self, trainer: TrainerView, stage: str, unfinished: str = "") -> None:
        self._open.pop(unfinished, None)
        self._end(stage)
        text = self.summary(stage)
        self._before = {}
        trainer.print(text)
        if self.write:
            name = "profile-simple" if stage == "training" else f"profile-simple-{stage}"
            path = _folder(trainer, self.dirpath) / f"{name}-rank{trainer.global_rank}.txt"
            path.write_text(text + "\n", encoding="utf-8")
            self._written = path

    def summary(self, stage: str = "training") -> str:
        """Return a table of the actions, longest first, as fractions of `stage`; some actions include others."""
        totals = {}
        for action, seconds in self.seconds.items():
            before = self._before.get(action, (0.0, 0))
            if self.calls[action] > before[1]:
                totals[action] = seconds - before[0], self.calls[action] - before[1]
        total = totals.get(stage, (1.0, 0))[0]
        width = max(map(len, totals), default=6)
        lines = [f"{'action':<{width}}  {'total s':>10}  {'share':>6}  {'calls':>8}  {'mean ms':>9}"]
        for action, (seconds, calls) in sorted(totals.items(), key=lambda item: -item[1][0]):
            share = f"{seconds / total:.1%}" if seconds <= total else ""  # what came before the stage
            numbers = f"{seconds:>10.3f}  {share:>6}  {calls:>8}  {1e3 * seconds / calls:>9.3f}"
            lines.append(f"{action:<{width}}  {numbers}")
        return "\n".join(lines)


@define(eq=False, kw_only=True)
class AdvancedProfiler(Callback):
    """Run cProfile during training on each rank: calls and time of each Python function."""

    #: Folder of ``profile-advanced-rank<r>.prof`` and ``.txt``; ``default_root_dir`` if not given.
    dirpath: Path | None = None
    #: Functions to print on rank 0.
    top: int = field(default=20, validator=at_least(1))
    #: Sort order of the table.
    sort_by: Literal["cumulative", "tottime", "ncalls"] = "cumulative"

    _profile: Any = field(init=False, default=None)
    _written: Path | None = field(init=False, default=None)

    def written_files(self) -> dict[str, str]:
        """Return this rank's profile, once it is written."""
        return {} if self._written is None else {"time of functions": str(self._written)}

    @hookimpl(tryfirst=True)
    def on_train_start(self) -> None:
        import cProfile

        self._profile = cProfile.Profile()
        self._profile.enable()

    @hookimpl(trylast=True)
    def on_train_end(self, trainer: TrainerView) -> None:
        import io
        import pstats

        profile, self._profile = self._profile, None
        profile.disable()
        path = _folder(trainer, self.dirpath) / f"profile-advanced-rank{trainer.global_rank}.prof"
        profile.dump_stats(path)
        stream = io.StringIO()
        pstats.Stats(profile, stream=stream).strip_dirs().sort_stats(self.sort_by).print_stats(self.top)
        path.with_suffix(".txt").write_text(stream.getvalue(), encoding="utf-8")
        self._written = path
        trainer.print(stream.getvalue())

    @hookimpl
    def on_exception(self) -> None:
        if self._profile is not None:
            self._profile.disable()
            self._profile = None


@define(eq=False, kw_only=True)
class PyTorchProfiler(Callback):
    """Run torch.profiler on each rank: a trace of all operations and kernels, for Perfetto (ui.perfetto.dev).

    Records `active` batches once, after `wait` and `warmup` ones. The phases of a step (forward, backward, optimizer
    step, zero gradients) are regions of the trace.
    """

    #: Folder of ``trace-rank<r>.json``; ``default_root_dir`` if not given.
    dirpath: Path | None = None
    #: Batches to skip first.
    wait: int = field(default=1, validator=at_least(0))
    #: Batches to record and discard, as the first ones are slower.
    warmup: int = field(default=1, validator=at_least(0))
    #: Batches to record.
    active: int = field(default=3, validator=at_least(1))
    #: Record input shapes: slower.
    record_shapes: bool = False
    #: Record memory allocated and freed by each operation.
    profile_memory: bool = False
    #: Record source lines: much slower.
    with_stack: bool = False
    #: Operations to print on rank 0.
    top: int = field(default=10, validator=at_least(1))

    #: Path of the trace of this rank.
    trace: Path | None = field(init=False, default=None)
    _profile: Any = field(init=False, default=None)
    #: The current region of the trace.
    _region: Any = field(init=False, default=None)

    def written_files(self) -> dict[str, str]:
        """Return this rank's trace; it exists once `active` batches were recorded."""
        return {} if self.trace is None else {"trace": str(self.trace)}

    @hookimpl(tryfirst=True)
    def on_train_start(self, trainer: TrainerView) -> None:
        import torch

        self.trace = _folder(trainer, self.dirpath) / f"trace-rank{trainer.global_rank}.json"
        trace, wanted = self.trace, self.wait + self.warmup + self.active
        if trainer.fast_dev_run:
            return
        if trainer.num_training_batches * max(trainer.max_epochs, 1) < wanted and trainer.max_epochs > 0:
            raise ConfigError(
                f"the pytorch profiler needs {wanted} batches, and training has "
                f"{int(trainer.num_training_batches * trainer.max_epochs)}",
                do="lower its wait, warmup or active",
            )

        def finished(profile: Any) -> None:
            profile.export_chrome_trace(str(trace))
            by = "self_cpu_time_total" if trainer.run.device.type == "cpu" else "self_device_time_total"
            trainer.print(profile.key_averages().table(sort_by=by, row_limit=self.top, max_name_column_width=60))

        self._profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=finished, record_shapes=self.record_shapes, profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )  # fmt: skip
        self._profile.start()

    def _begin_region(self, phase: str | None) -> None:
        """End the current region of the trace, and begin `phase` if the profiler runs."""
        region, self._region = self._region, None
        if region is not None:
            region.__exit__(None, None, None)
        if self._profile is not None and phase is not None:
            import torch

            self._region = torch.profiler.record_function(phase)
            self._region.__enter__()

    @hookimpl(trylast=True)
    def on_train_batch_start(self) -> None:
        self._begin_region("forward")

    @hookimpl
    def on_before_backward(self) -> None:
        self._begin_region("backward")

    @hookimpl
    def on_after_backward(self) -> None:
        self._begin_region(None)

    @hookimpl(trylast=True)
    def on_before_optimizer_step(self) -> None:
        self._begin_region("optimizer step")

    @hookimpl
    def on_before_zero_grad(self) -> None:
        self._begin_region("zero gradients")

    @hookimpl(trylast=True)
    def on_train_batch_end(self) -> None:
        self._begin_region(None)
        if self._profile is not None:
            self._profile.step()

    @hookimpl
    def on_train_end(self) -> None:
        self._begin_region(None)
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    on_exception = on_train_end


@define(eq=False, kw_only=True)
class MemoryProfiler(Callback):
    """Print and write what holds the memory of each rank's device, and on CUDA write a snapshot of its allocator.

    The snapshot, for pytorch.org/memory_viz, has each allocation of `active` batches with its stack. It is also written
    when memory runs out in one of them. The table has what is held before gradients are zeroed, and the peak.
    """

    #: Folder of ``memory-rank<r>.txt`` and ``memory-rank<r>.pickle``; ``default_root_dir`` if not given.
    dirpath: Path | None = None
    #: Batches to skip first: 1 leaves out what the first batch prepares, 0 is for memory that runs out in it.
    wait: int = field(default=0, validator=at_least(0))
    #: Batches to record; None records until training ends.
    active: int | None = field(default=3, validator=at_least(1))
    #: Allocations and frees that a snapshot has at most, the latest ones.
    max_entries: int = field(default=100_000, validator=at_least(1))

    _batches: int = field(init=False, default=0)
    _recording: bool = field(init=False, default=False)
    #: What is held, by its name.
    _amounts: dict[str, int] = field(init=False, factory=dict)
    _written: dict[str, str] = field(init=False, factory=dict)

    def written_files(self) -> dict[str, str]:
        """Return this rank's table and snapshot, once they are written."""
        return self._written

    @hookimpl(tryfirst=True)
    def on_train_start(self) -> None:
        self._batches, self._recording, self._amounts, self._written = 0, False, {}, {}

    @hookimpl(tryfirst=True)
    def on_train_batch_start(self, trainer: TrainerView) -> None:
        if self._batches == self.wait and not trainer.fast_dev_run:
            self._recording = True
            self._record_history(trainer, self.max_entries)
        self._batches += 1

    @hookimpl
    def on_before_zero_grad(self, trainer: TrainerView) -> None:
        if self._recording:
            from stratagem_callbacks.memory_held import held_by, peak_memory

            device = trainer.run.device
            self._amounts = held_by(trainer, device, peak_memory(device)).amounts()

    @hookimpl(trylast=True)
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        if self.active is not None and self._batches == self.wait + self.active:
            self._end(trainer)

    @hookimpl
    def on_train_end(self, trainer: TrainerView) -> None:
        self._end(trainer)

    @hookimpl
    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        from stratagem_callbacks.memory_errors import is_out_of_memory

        if self._recording and is_out_of_memory(exception):
            self._end(trainer)
        elif self._recording:
            self._recording = False
            self._record_history(trainer, 0)

    def _record_history(self, trainer: TrainerView, entries: int) -> None:
        """Have CUDA's allocator record its last `entries` events; 0 ends that."""
        if trainer.run.device.type != "cuda":
            return
        import torch

        if entries:
            torch.accelerator.reset_peak_memory_stats(trainer.run.device)
            torch.cuda.memory._record_memory_history(max_entries=entries)
        else:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _end(self, trainer: TrainerView) -> None:
        if not self._recording:
            return
        self._recording = False
        path = _folder(trainer, self.dirpath) / f"memory-rank{trainer.global_rank}.txt"
        if trainer.run.device.type == "cuda":
            import torch

            snapshot = path.with_suffix(".pickle")
            torch.cuda.memory._dump_snapshot(str(snapshot))
            self._record_history(trainer, 0)
            self._written["memory snapshot"] = str(snapshot)
        if self._amounts:
            text = self.summary()
            path.write_text(text + "\n", encoding="utf-8")
            self._written["what holds memory"] = str(path)
            trainer.print(text)

    def summary(self) -> str:
        """Return a table of what is held, largest first, as fractions of the peak."""
        rows = sorted(self._amounts.items(), key=lambda row: -row[1])
        peak, width = sum(self._amounts.values()), max(map(len, self._amounts))
        lines = [f"{'memory':<{width}}  {'MiB':>10}  {'share':>6}"]
        lines += [f"{name:<{width}}  {size / 2**20:>10.1f}  {size / peak:>6.1%}" for name, size in rows if size]
        return "\n".join([*lines, f"{'peak':<{width}}  {peak / 2**20:>10.1f}  {1:>6.1%}"])
