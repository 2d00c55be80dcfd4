"""Write one self-contained HTML page about a run: configuration, curves and outcome."""

from stratagem_report.callback import Report

__all__ = ["Report"]
