"""`PeerDiagnosis`: which rank died, is unreachable, or hangs, once a collective has failed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.run_parts import AFTER, NEXT_BATCH, PHASES, PREDICT, SAVE, SETUP, TEST, VALIDATION
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import RunContext
    from stratagem_evidence import Recorder
    from stratagem_peer_diagnosis.endpoints import Endpoints
    from stratagem_peer_diagnosis.last_words import LastWords
    from stratagem_peer_diagnosis.watchdog import Watchdog
    from stratagem_trainer.api import TrainerView

__all__ = ["PeerDiagnosis"]


@define(eq=False, kw_only=True)
class PeerDiagnosis(Callback):
    """Names the rank that died, is unreachable, or hangs, once a collective has failed."""

    #: Where the other ranks can be probed; None in a run of one process.
    endpoints: Endpoints | None = field(init=False, default=None, repr=False)
    #: Ends this process if it waits for a rank that is gone; None where collectives raise then.
    watchdog: Watchdog | None = field(init=False, default=None, repr=False)
    #: Writes what others read after this process has died; None in a run of one process.
    recorder: Recorder | None = field(init=False, default=None, repr=False)
    #: Says why the run failed if an agent ends this process for that.
    last_words: LastWords | None = field(init=False, default=None, repr=False)
    #: Others will read what this process wrote.
    _keeps: bool = field(init=False, default=False, repr=False)
    _saves_in_fit: bool = field(init=False, default=True, repr=False)

    @hookimpl
    def on_connect(self, run: RunContext) -> None:
        self._stop_recording(run)
        self.endpoints = self.watchdog = None
        if run.collectives.world_size == 1:
            return
        self.preload(run.device.type)
        from stratagem_evidence import evidence_folder
        from stratagem_peer_diagnosis.endpoints import Endpoints
        from stratagem_peer_diagnosis.failure_reports import forget_cause

        assert run.world is not None, "connected"
        folder = evidence_folder(run.world.local_rank == 0)
        if folder and run.world.local_rank == 0:
            forget_cause(Path(folder))
        self.endpoints = Endpoints.exchange(run.world, run.collectives, folder)
        self._record(folder or self.endpoints.evidence_here(), run)
        if not run.collectives.reports_lost_ranks:
            from stratagem_peer_diagnosis.watchdog import Watchdog

            self.watchdog = Watchdog(run, self.endpoints).start()

    def _record(self, folder: str, run: RunContext) -> None:
        from stratagem.distributed.process_variables import REPORTS_VARIABLE
        from stratagem_evidence import Recorder

        self.recorder = Recorder.start(Path(folder), run.rank, PHASES) if folder else None
        if self.recorder is not None:
            run.activity = self.recorder.activity
        self._enter(SETUP)
        if self.recorder is not None and REPORTS_VARIABLE not in os.environ:  # no launcher waits for this process
            from stratagem_peer_diagnosis.failure_reports import FailureReports
            from stratagem_peer_diagnosis.last_words import LastWords

            gather = FailureReports(run.collectives).gather
            self.last_words = LastWords.listen(self.recorder, lambda known: gather(known, run.world))

    # --- What this rank does. What it does with a batch, the loop stores into `run.activity`. -------------------------

    def _enter(self, phase: int) -> None:
        if self.recorder is not None:
            self.recorder.enter(phase)

    def _end(self) -> None:
        """Between two calls of the trainer a script may end in any way: nobody is at fault then."""
        self._enter(AFTER)
        self._mark("over")

    def _mark(self, end: str) -> None:
        if self.recorder is not None:
            self.recorder.mark(end)

    @hookimpl
    def setup(self, run: RunContext) -> None:
        if self.recorder is not None:
            run.activity = self.recorder.activity  # another trainer with this callback may have connected since
        self._enter(SETUP)
        self._mark("")

    @hookimpl
    def on_validation_start(self) -> None:
        self._enter(VALIDATION)

    @hookimpl
    def on_validation_end(self, trainer: TrainerView) -> None:
        if trainer.fitting:
            self._enter(NEXT_BATCH)
        else:
            self._end()

    on_test_end = on_predict_end = on_validation_end

    @hookimpl
    def on_test_start(self) -> None:
        self._enter(TEST)

    @hookimpl
    def on_predict_start(self) -> None:
        self._enter(PREDICT)

    @hookimpl
    def on_save_checkpoint(self, trainer: TrainerView) -> None:
        self._enter(SAVE)
        self._saves_in_fit = trainer.fitting

    @hookimpl(wrapper=True)
    def save_checkpoint(self) -> Generator[None, bool, bool]:
        answer = yield
        self._enter(NEXT_BATCH if self._saves_in_fit else AFTER)
        return answer

    @hookimpl
    def on_train_end(self) -> None:
        self._enter(AFTER)

    @hookimpl
    def on_fit_end(self) -> None:
        self._end()

    # --- The end ------------------------------------------------------------------------------------------------------

    @hookimpl
    def explain_error(self, error: BaseException, run: RunContext) -> BaseException:
        from stratagem.errors import is_echo

        failed, stops = is_echo(error), isinstance(error, SystemExit)
        self._keeps = failed or stops
        if self.recorder is not None:
            self.recorder.mark("echo" if failed else "exit" if stops else "own error")
            if failed:
                self.recorder.write_calls()
        if self.watchdog is not None:
            self.watchdog.failed = True
        if run.world_size == 1:
            return error
        from stratagem_peer_diagnosis.diagnosis import explain

        return explain(error, run, self.endpoints, None if self.recorder is None else self.recorder.folder)

    @hookimpl(wrapper=True)
    def teardown(self, run: RunContext) -> Generator[None, Any, Any]:
        try:
            return (yield)  # the other plugins still communicate
        finally:
            if self.watchdog is not None:
                self.watchdog.close()
            if self.endpoints is not None:
                self.endpoints.close()
            self._stop_recording(run)

    def _stop_recording(self, run: RunContext) -> None:
        if self.last_words is not None:
            self.last_words.close()
        if self.recorder is not None:
            run.activity = [*run.activity]
            self.recorder.stop(keep=self._keeps)
            if self._keeps:
                from stratagem_evidence import delete_if_all_exited

                delete_if_all_exited(self.recorder.folder)
        self.recorder, self.last_words, self._keeps = None, None, False

    def preload(self, device_type: str) -> None:
        """Import the diagnosis before anything fails: afterwards a process may be unable to."""
        import stratagem_peer_diagnosis.diagnosis
        import stratagem_peer_diagnosis.endpoints  # noqa: F401

    def __getstate__(self) -> dict[str, Any]:
        return {}  # ports and threads belong to one process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.endpoints = self.watchdog = self.recorder = self.last_words = None
        self._keeps = False
