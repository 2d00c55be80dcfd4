"""Names that this repository's packages provide pass the kit, as `stratagem plugins check NAME` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.discovery import registry
from stratagem_testing.command import check

ROOT = Path(__file__).parents[2]
OURS = "\n".join(path.read_text() for path in ROOT.glob("plugins/*/pyproject.toml"))
#: Cannot be made from a name alone, or needs a device, or a model with experts (test_parallel.py has one).
NOT_BY_NAME = {"lambda", "gpu", "expert_parallel"}
#: Need options, a logger, another number of processes or a tolerance, which only their classes in this folder state.
NOT_YET_BY_NAME = {
    "checkpoint-deepspeed", "callback-activation_checkpointing", "callback-backbone_finetuning",
    "callback-batch_size_finder", "callback-comm_stats", "callback-device_stats", "callback-early_stopping",
    "callback-ema", "callback-global_batch_size", "callback-gradient_accumulation_scheduler",
    "callback-gradient_norms", "callback-learning_rate_monitor", "callback-prediction_writer",
    "callback-pytorch_profiler", "callback-report", "callback-stochastic_weight_averaging", "callback-stragglers",
    "callback-sync_batchnorm", "callback-throughput", "callback-timer", "comm_hook-int8", "comm_hook-noop",
    "comm_hook-post_localsgd", "comm_hook-topk", "strategy-deepspeed_stage_3_offload_nvme", "strategy-ddp2",
    "strategy-ddp_find_unused_parameters_false", "strategy-ddp_fork_find_unused_parameters_false",
    "strategy-ddp_notebook_find_unused_parameters_false", "strategy-ddp_sequential",
    "strategy-ddp_spawn_find_unused_parameters_false", "strategy-dp",
}  # fmt: skip

ENTRIES = [
    entry
    for entry in registry.entries()
    if entry.kind in registry.kinds()
    and f'name = "{entry.distribution}"' in OURS
    and entry.name not in NOT_BY_NAME
    and f"{entry.kind}-{entry.name}" not in NOT_YET_BY_NAME
]


@pytest.mark.sweep(
    reason="The kit runs as a program of its own for each of these names, which takes minutes; make test runs it for one or"
    " more classes of most kinds, in tests/conformance."
)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_it_passes(entry):
    """A strategy's name stands for a class and options; test_strategies.py has each class in one process too."""
    rows = check(entry, (2,) if entry.kind == "strategy" else (1, 2), quiet=True)

    assert len(rows) >= 5
    assert [row for row in rows if row["outcome"] == "failed"] == []


@pytest.mark.slow
def test_each_check_is_that_of_the_plugin_that_is_named():
    by_kind = {entry.kind: entry for entry in ENTRIES if entry.kind in ("accelerator", "environment")}
    accelerator, environment = (
        {row["check"] for row in check(by_kind[kind], (1,), quiet=True)} for kind in ("accelerator", "environment")
    )

    assert accelerator
    assert environment
    assert accelerator != environment
