"""What modules of Lightning users call and inherit: `super().on_...()`, `all_gather`, `freeze`, mixins."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_trainer.api.events import EVENTS, ModuleEvents
from stratagem_trainer.events import arguments_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


# --- Methods of events -------------------------------------------------------------------------------------------


def test_a_module_has_a_method_for_each_event_with_its_arguments():
    import inspect

    own = {name for name in dir(ModuleEvents) if not name.startswith("_")}
    assert own == {*EVENTS, "setup", "teardown", "prepare_data"}
    for event in EVENTS:
        assert tuple(inspect.signature(getattr(ModuleEvents, event)).parameters)[1:] == arguments_of(event), event


def _calls_its_base(name):
    def method(self, *arguments):
        self.called.append(name)
        return getattr(super(CallsBases, self), name)(*arguments)

    return method


class CallsBases(Net):
    """Each of its methods calls the base's."""

    def __init__(self):
        super().__init__()
        self.called = []

    def validation_step(self, batch, batch_idx):
        pass

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


for _name in (*EVENTS, "setup", "teardown", "prepare_data"):
    setattr(CallsBases, _name, _calls_its_base(_name))


def test_methods_may_call_those_of_the_base(tmp_path):
    module = CallsBases()
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    batches = joined_batches(2, 8)

    trainer.fit(module, batches, batches)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.test(dataloaders=batches, ckpt_path=tmp_path / "a.ckpt")
    trainer.predict(dataloaders=batches)

    assert set(module.called) == {*EVENTS, "setup", "teardown", "prepare_data"} - {"on_exception"}


class Counts:
    def on_train_epoch_end(self):
        self.epochs = getattr(self, "epochs", 0) + 1


class MixinFirst(Counts, Net):
    pass


class MixinLast(Net, Counts):
    pass


def test_a_mixin_is_called_before_module_and_refused_after_it():
    module = MixinFirst()
    sg.Trainer(max_epochs=2, **QUIET).fit(module, joined_batches(2, 8))
    assert module.epochs == 2

    with pytest.raises(ConfigError, match="MixinLast inherits on_train_epoch_end from Counts.*expected Counts before"):
        sg.Trainer(max_epochs=2, **QUIET).fit(MixinLast(), joined_batches(2, 8))


# --- What a module asks ------------------------------------------------------------------------------------------


class Gathers(Net):
    def training_step(self, batch, batch_idx):
        rank = self.trainer.global_rank
        self.found = self.all_gather({"rank": rank, "pair": (torch.full((2,), float(rank)), [True])})
        self.ranks = self.global_rank, self.local_rank, len(self.loggers)
        weight = next(self.parameters())
        scaled = weight.sum() * (rank + 1)
        gathered = self.all_gather(scaled, sync_grads=True)
        self.has_gradient = gathered.requires_grad, self.all_gather(scaled).requires_grad
        (self.gradient,) = torch.autograd.grad((gathered * torch.tensor([1.0, 10.0])[: gathered.numel()]).sum(), weight)
        return super().training_step(batch, batch_idx)


def _gather(rank, world_size):
    module = Gathers()
    trainer = sg.Trainer(max_epochs=1, devices=world_size, strategy="ddp", **QUIET)
    trainer.fit(module, joined_batches(1, 8))
    found = module.found
    gradient = module.gradient.unique().tolist()
    return (
        found["rank"].tolist(),
        found["pair"][0].tolist(),
        found["pair"][1][0].tolist(),
        module.ranks,
        gradient,
        (module.has_gradient),
    )


def test_it_gathers_from_all_ranks_with_gradients_on_request():
    """The gradient of rank r's sum: what both ranks compute for it, 1 and 10, times r + 1."""
    expected = [0, 1], [[0.0, 0.0], [1.0, 1.0]], [True, True]
    first, second = run_in_processes(_gather, 2)
    assert first == (*expected, (0, 0, 0), [2.0], (True, False))
    assert second == (*expected, (1, 1, 0), [40.0], (True, False))


def test_in_one_process_it_returns_what_it_was_given():
    class Alone(Net):
        def on_train_start(self):
            value = {"a": torch.ones(2), "b": 3}
            self.same = self.all_gather(value) is value

    module = Alone()
    sg.Trainer(max_epochs=1, **QUIET).fit(module, joined_batches(1, 8))
    assert module.same


def _gathers_text(rank, world_size):
    class Text(Net):
        def on_train_start(self):
            self.all_gather("text")

    try:
        sg.Trainer(max_epochs=1, devices=2, strategy="ddp", **QUIET).fit(Text(), joined_batches(1, 8))
    except ConfigError as error:
        return str(error)


def test_other_values_are_refused():
    for said in run_in_processes(_gathers_text, 2):
        assert said.startswith("all_gather got a str; expected tensors and numbers, in dicts, lists and tuples; use ")


def test_outside_a_trainer_ranks_are_zero_and_loggers_an_error():
    module = Net()
    assert (module.global_rank, module.local_rank) == (0, 0)
    assert not hasattr(dict.fromkeys(dir(module)), "loggers")
    assert "loggers" not in dir(module)
    with pytest.raises(ConfigError, match="was read outside a trainer"):
        module.loggers  # noqa: B018


def test_freeze_and_unfreeze():
    module = Net()
    module.freeze()
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    module.unfreeze()
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_toggled_optimizer_is_toggled_back_after_an_error():
    class TwoOptimizers(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            with pytest.raises(KeyError), self.toggled_optimizer(first):
                self.inside = [parameter.requires_grad for parameter in self.parameters()]
                raise KeyError
            self.after = [parameter.requires_grad for parameter in self.parameters()]

        def configure_optimizers(self):
            parameters = list(self.parameters())
            return [torch.optim.SGD(part, 0.1) for part in (parameters[:1], parameters[1:])]

    module = TwoOptimizers()
    sg.Trainer(max_epochs=1, **QUIET).fit(module, joined_batches(1, 8))
    assert module.inside == [True] + [False] * (len(module.inside) - 1)
    assert all(module.after)
