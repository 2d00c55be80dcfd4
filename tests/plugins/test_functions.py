"""Functions of a user's own run on the events they are named for."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing.reference import Net, joined_batches

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def test_functions_are_called_with_the_arguments_of_their_hook():
    seen = []
    functions = {
        "on_fit_start": lambda trainer, module: seen.append(type(module).__name__),
        "on_train_batch_end": lambda trainer, module, outputs, batch, batch_idx: seen.append(batch_idx),
    }
    trainer = sg.Trainer(max_epochs=1, callbacks={"name": "lambda", "on": functions}, **QUIET)

    trainer.fit(Net(), joined_batches(2, 8))

    assert seen == ["Net", 0, 1]


def test_a_misspelt_event_is_refused():
    with pytest.raises(ConfigError, match="'on_fit_strat'.*did you mean 'on_fit_start'"):
        sg.Trainer(callbacks={"name": "lambda", "on": {"on_fit_strat": print}}, **QUIET)
