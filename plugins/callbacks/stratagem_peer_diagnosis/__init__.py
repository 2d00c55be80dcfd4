"""`PeerDiagnosis`: which rank died, is unreachable, or hangs, once a collective has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import RunContext
    from stratagem_peer_diagnosis.endpoints import Endpoints
    from stratagem_peer_diagnosis.watchdog import Watchdog

__all__ = ["PeerDiagnosis"]


@define(eq=False, kw_only=True)
class PeerDiagnosis(Callback):
    """Names the rank that died, is unreachable, or hangs, once a collective has failed."""

    #: Where the other ranks can be probed; None in a run of one process.
    endpoints: Endpoints | None = field(init=False, default=None, repr=False)
    #: Ends this process if it waits for a rank that is gone; None where collectives raise then.
    watchdog: Watchdog | None = field(init=False, default=None, repr=False)

    @hookimpl
    def on_connect(self, run: RunContext) -> None:
        self.endpoints = self.watchdog = None
        if run.collectives.world_size == 1:
            return
        self.preload(run.device.type)
        from stratagem_peer_diagnosis.endpoints import Endpoints

        assert run.world is not None, "connected"
        self.endpoints = Endpoints.exchange(run.world, run.collectives)
        if not run.collectives.reports_lost_ranks:
            from stratagem_peer_diagnosis.watchdog import Watchdog

            self.watchdog = Watchdog(run, self.endpoints).start()

    @hookimpl
    def explain_error(self, error: BaseException, run: RunContext) -> BaseException:
        if self.watchdog is not None:
            self.watchdog.failed = True
        if run.world_size == 1:
            return error
        from stratagem_peer_diagnosis.diagnosis import explain

        return explain(error, run, self.endpoints)

    @hookimpl(wrapper=True)
    def teardown(self) -> Generator[None, Any, Any]:
        try:
            return (yield)  # the other plugins still communicate
        finally:
            if self.watchdog is not None:
                self.watchdog.close()
            if self.endpoints is not None:
                self.endpoints.close()

    def preload(self, device_type: str) -> None:
        """Import the diagnosis before anything fails: afterwards a process may be unable to."""
        import stratagem_peer_diagnosis.diagnosis
        import stratagem_peer_diagnosis.endpoints  # noqa: F401

    def __getstate__(self) -> dict[str, Any]:
        return {}  # ports and threads belong to one process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.endpoints = self.watchdog = None
