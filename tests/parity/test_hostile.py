"""Odd models under random combinations of choices: as plain PyTorch, or refused with an error on all ranks."""

from __future__ import annotations

import pytest
from hostile import MODELS, outcome, trials

#: What each model or strategy may be refused for; anything else that is refused is a defect.
REFUSALS = {
    "TiedAndFrozen": "one parameter in two units",
    "WithoutElements": "got no gradient|without elements",
    "TwoDtypes": "dtype",
    "Complex": "complex",
    "Branching": "got no gradient|none in the first step|different",
    "DynamicDepth": "got no gradient|none in the first step|different",
    "ddp static": "static_graph",
    "local_sgd": "at least two teams",
}


def _check(trial):
    result = outcome(trial)

    if result != "equal":
        allowed = [REFUSALS.get(trial.model), REFUSALS.get(trial.strategy)]
        assert any(words is not None and any(word in result for word in words.split("|")) for words in allowed), result


@pytest.mark.every_push(
    "Complex_fsdp_ranks=2_acc={0:_1,_1:_2}_clip=norm:0.5_32_sgd_schedule=epoch_resume=none",
    "WeightNorm_ddp_sharded_ranks=3_acc=3_clip=value:0.05_32_adamw_schedule=none_resume=within",
    "DynamicDepth_fsdp_ranks=1_acc=3_32_adamw_schedule=none_resume=moved",
)
@pytest.mark.slow
@pytest.mark.parametrize("trial", trials(36, seed=1), ids=str)
def test_trains_as_plain_pytorch_does_or_is_refused(trial):
    _check(trial)


@pytest.mark.sweep(guard="tests/parity/test_hostile.py::test_trains_as_plain_pytorch_does_or_is_refused")
@pytest.mark.parametrize("trial", trials(400), ids=str)
def test_every_pair_of_model_and_strategy(trial):
    _check(trial)


def test_every_model_trains_somewhere():
    drawn = trials(400)

    assert {trial.model for trial in drawn} == set(MODELS)
