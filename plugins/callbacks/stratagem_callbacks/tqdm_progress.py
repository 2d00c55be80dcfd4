"""Show progress with tqdm."""

from __future__ import annotations

import math
from typing import Any

from attrs import define

from stratagem.errors import ConfigError
from stratagem_callbacks.pace import Progress
from stratagem_callbacks.progress import ProgressBar


@define(eq=False, kw_only=True)
class TQDMProgressBar(ProgressBar):
    """Show the default progress information with tqdm, which works in all notebooks and terminals."""

    def _bar(self, training: bool) -> Any:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            raise ConfigError("the tqdm progress bar needs tqdm", do="run `pip install tqdm`") from None
        return _TQDM(tqdm, training)

    def _notebook_bar(self, training: bool) -> Any:
        return self._bar(training)


class _TQDM:
    evaluating = False

    def __init__(self, tqdm: Any, training: bool) -> None:
        self.tqdm = tqdm
        self.evaluation: Any = None
        self.training: Any = None
        if training:
            self.training = tqdm(total=0, leave=True, dynamic_ncols=True, unit="it")

    def print_line(self, text: str) -> None:
        self.tqdm.write(text)

    def show(self, progress: Progress, numbers: list[str], final: bool) -> None:
        bar = self.training
        if bar is None:
            return
        if progress.done < bar.n:
            bar.reset()  # a new epoch: restart rate and remaining time
        bar.total, bar.n = None if math.isinf(progress.total) else int(progress.total), progress.done
        bar.set_description(progress.title, refresh=False)
        bar.set_postfix_str("  ".join(numbers), refresh=False)
        bar.refresh()
        if final:
            self.print_line("  ".join([progress.title, *numbers]))

    def start_pass(self, title: str, total: float) -> None:
        self.evaluating = True
        self.evaluation = self.tqdm(total=None if math.isinf(total) else int(total), desc=title, leave=False)

    def advance(self) -> None:
        self.evaluation.update()

    def end_pass(self) -> None:
        if self.evaluating:
            self.evaluating = False
            self.evaluation.close()

    def close(self) -> None:
        for bar in (self.evaluation, self.training):
            if bar is not None:
                bar.close()
