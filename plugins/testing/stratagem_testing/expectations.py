"""Assertions whose sentence tells a plugin's author what was found, what was expected, and where to look."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stratagem_testing.reference import differences


def expect_equal(what: str, found: Any, expected: Any, look: str = "") -> None:
    """Fail unless `found` equals `expected`.

    Args:
        what: what was compared, such as "steps on each rank", with the method that it comes from.
        look: what in the plugin or in its class of checks must be otherwise.
    """
    __tracebackhide__ = True
    if found != expected:
        raise AssertionError(f"{what}: found {found!r}, expected {expected!r}{'; ' * bool(look)}{look}")


def expect_refused(what: str, outcome: str, word: str = "", look: str = "look at `capabilities`") -> None:
    """Fail unless `outcome`, of `stratagem_testing.training.outcome`, is an error of stratagem that has `word`."""
    __tracebackhide__ = True
    if not outcome.startswith("refused: ") or word not in outcome:
        naming = f" that names {word}" if word else ""
        raise AssertionError(f"{what} must be refused with an error of stratagem{naming}: found {outcome!r}; {look}")


def expect_weights(
    weights: dict[str, Tensor], reference: dict[str, Tensor], other: str, tolerance: float, look: str, knob: str = ""
) -> float:
    """Fail unless the relative difference of each tensor from `reference` is below `tolerance`; return the largest.

    Args:
        other: how `reference` was trained, such as "one process".
        knob: the attribute of the class of checks that `tolerance` comes from.
    """
    __tracebackhide__ = True
    found = differences(weights, reference)
    worst, far = max(found.values()), [name for name, difference in found.items() if not difference < tolerance]
    if far:
        names = "all tensors" if len(far) == len(found) else ", ".join(far)
        limit = f"{tolerance:.1e} (`{knob}`)" if knob else f"{tolerance:.1e}"
        said = f"weights differ from those of {other} by {worst:.1e} in {names}, expected less than {limit}"
        raise AssertionError(f"{said}; {look}")
    return worst
