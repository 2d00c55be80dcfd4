"""Refuse a strategy of a package that is missing."""

from __future__ import annotations

import importlib.util

from stratagem.errors import ConfigError


def check_installed(strategy: str, instead: str) -> None:
    """Refuse `strategy` if FairScale is not installed."""
    if importlib.util.find_spec("fairscale") is None:
        raise ConfigError(
            f"strategy is {strategy!r}, and FairScale is not installed",
            expected="fairscale==0.4.13",
            do=f'install it, or choose strategy="{instead}"',
        )
