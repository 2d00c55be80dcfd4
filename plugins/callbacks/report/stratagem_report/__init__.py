"""One self-contained HTML page about a run: what it was, how it went, how it ended."""

from stratagem_report.callback import Report

__all__ = ["Report"]
