"""Write one self-contained HTML page about a run: configuration, curves and outcome."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Report":
        raise AttributeError(name)
    from stratagem_report.callback import Report  # imports torch, which the help of the command must not

    return Report
