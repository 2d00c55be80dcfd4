"""`step_time` passes the checks of every callback, and logs two numbers an epoch."""

import stratagem
from stratagem_testing import CallbackConformance
from stratagem_testing.reference import Net, joined_batches


class TestStepTime(CallbackConformance):
    plugin = "step_time"


def test_it_logs_the_median_and_the_quantile() -> None:
    trainer = stratagem.Trainer(
        max_epochs=1, accelerator="cpu", callbacks="step_time", logger=False, enable_checkpointing=False
    )
    trainer.fit(Net(), joined_batches(4, 8))

    metrics = trainer.callback_metrics
    assert 0 < metrics["step_time/median_ms"] <= metrics["step_time/high_ms"]
