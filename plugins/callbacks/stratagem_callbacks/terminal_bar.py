"""Draw progress in a terminal with rich: one line for training, a second one during an evaluation."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from stratagem_callbacks.pace import Pace, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions
    from rich.text import Text

#: Columns of the bar itself.
_SHORTEST, _LONGEST = 8, 40
#: Seconds between two redraws of an evaluation.
_REDRAW_S = 0.25


class TerminalBar:
    """Lines that are drawn again and again at the bottom of the terminal; what is printed meanwhile goes above them."""

    evaluating = False

    def __init__(self, training: bool) -> None:
        from rich.live import Live

        self.trains = training
        self.progress: Progress | None = None
        self.numbers: list[str] = []
        self.title, self.done, self.total, self.pace, self.due = "", 0, 0.0, Pace(), 0.0
        #: Columns of the bar by the width of the terminal: it gets shorter, never longer, so that it does not flicker.
        self.lengths: dict[int, int] = {}
        self.live = Live(self, auto_refresh=False)
        self.live.start()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines, for rich."""
        if self.progress is not None:
            yield self._line(self.progress, self.numbers, options.max_width)
        if self.evaluating:
            now = self.pace.progress(self.title, self.done, max(0, self.total - self.done), math.inf)
            yield self._line(now, [], options.max_width)

    def print_line(self, text: str) -> None:
        self.live.console.print(text, highlight=False, markup=False)

    def show(self, progress: Progress, numbers: list[str], final: bool) -> None:
        self.progress, self.numbers = progress, numbers
        self.live.refresh()

    def start_pass(self, title: str, total: float) -> None:
        self.title, self.done, self.total, self.pace, self.evaluating = title, 0, total, Pace(), True
        self.pace.start_epoch(0)
        self.live.refresh()

    def advance(self) -> None:
        self.done += 1
        if (now := time.perf_counter()) >= self.due:
            self.due = now + _REDRAW_S
            self.live.refresh()

    def end_pass(self) -> None:
        if self.evaluating:  # a sanity check shows nothing
            self.evaluating = not self.trains  # a call of its own leaves its line
            self.live.refresh()

    def close(self) -> None:
        self.live.stop()

    def _line(self, progress: Progress, numbers: list[str], width: int) -> Text:
        """Return title, batches, bar and time, and of the rest what fits."""
        from rich.text import Text

        head, time_left = f"{progress.title}  {_count(progress)}", _time(progress.seconds_left)
        free = width - len(head) - len(time_left) - 2 - _SHORTEST
        rest = []
        for text in [*_of_run(progress), f"{progress.rate:.1f} it/s", *numbers]:
            if len(text) + 2 <= free:
                rest.append(text)
                free -= len(text) + 2
        length = max(0, min(_LONGEST, _SHORTEST + free, self.lengths.get(width, _LONGEST)))
        self.lengths[width] = length
        share = 0.0 if math.isinf(progress.total) else progress.done / progress.total if progress.total else 1.0
        filled = min(length, int(share * length))
        line = Text(no_wrap=True, overflow="crop", end="")
        line.append(f"{head} ").append("━" * filled, "bar.complete").append("─" * (length - filled), "bar.back")
        line.append(f" {time_left}", "progress.remaining").append("".join(f"  {text}" for text in rest))
        line.truncate(width)
        return line.append("\n")


def _count(progress: Progress) -> str:
    if math.isinf(progress.total):
        return str(progress.done)
    total = str(int(progress.total))
    return f"{progress.done:>{len(total)}}/{total}"


def _of_run(progress: Progress) -> list[str]:
    """Return how much of the run is done, and the time that it still takes, unless it ends with this epoch."""
    if progress.share_of_run is None:
        return []
    share = f"run {int(progress.share_of_run * 100)} %"
    return [share if progress.ends_run else f"{share} {_time(progress.run_seconds_left)} left"]


def _time(seconds: float | None) -> str:
    """Return a remaining time."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}:{minutes:02}" if hours else str(minutes)) + f":{rest:02}"
