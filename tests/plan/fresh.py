"""Plans variants from a process in which torch has computed nothing: it cannot be given another type of device later."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from stratagem_plan.variants import Variant, plan_all


def plans(*variants: Variant) -> list:
    """Return the plan of each variant, or why it has none."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        return processes.submit(_plans, variants).result()


def _plans(variants):
    found = dict(plan_all(variants, quiet=True))
    return [found[position] for position in range(len(variants))]
