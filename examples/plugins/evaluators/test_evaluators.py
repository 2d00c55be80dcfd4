"""Evaluators pass the checks of what observes training, and log the mean over all samples."""

from typing import Any

import pytest
import torch

import stratagem
from stratagem.errors import ConfigError
from stratagem_testing import ObserverConformance, run_in_processes
from stratagem_testing.training import QUIET


class TestAccuracy(ObserverConformance):
    kind = "evaluator"
    plugin = "accuracy"


class TestTopK(ObserverConformance):
    kind = "evaluator"
    plugin = {"name": "top_k", "k": 2}  # noqa: RUF012


class Scored(stratagem.Module):
    """Logits are what the loader gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        logits, targets = batch
        return {"logits": logits, "targets": targets}


LOGITS = torch.tensor([[3.0, 2, 1], [1, 2, 3], [1, 3, 2], [3, 2, 1], [2, 3, 1], [2, 1, 3]])
TARGETS = torch.tensor([0, 0, 1, 1, 2, 2])


def validated(rank: int, size: int, argument: str) -> dict[str, Any]:
    chosen: dict[str, Any] = {argument: ["accuracy", {"name": "top_k", "k": 2}]}
    trainer = stratagem.Trainer(
        **QUIET, **chosen, accelerator="cpu", devices=size, strategy="ddp", use_distributed_sampler=False
    )
    batches = list(zip(LOGITS.split(1), TARGETS.split(1), strict=True))
    trainer.validate(Scored(), batches[:4] if rank == 0 else batches[4:], verbose=False)
    return dict(trainer.callback_metrics)


@pytest.mark.parametrize("argument", ["evaluator", "plugins"])
def test_they_log_the_mean_over_the_samples_of_all_ranks(argument: str) -> None:
    for metrics in run_in_processes(validated, 2, argument):
        assert metrics["evaluators/accuracy"] == pytest.approx(3 / 6)
        assert metrics["evaluators/top_k"] == pytest.approx(4 / 6)


def test_a_wrong_option_and_a_run_without_events_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluator\.top_k\.k is 0"):
        stratagem.Trainer(**QUIET, plugins={"name": "top_k", "k": 0})
    with pytest.raises(ConfigError, match="Run has no argument 'evaluator'"):
        stratagem.Run(evaluator="accuracy")  # type: ignore[call-arg]
