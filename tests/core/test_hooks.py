"""Every hook is called, in the order of a run's life, with the arguments its specification names."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
import stratagem.runtime.launching
from stratagem.api.world import Collectives
from stratagem.errors import ConfigError, PluginError
from stratagem.runtime.launching import _ProcessBody, launch
from stratagem.stack.plugins import hook_functions, hook_specifications
from stratagem_testing.reference import Net, data, joined_batches

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}

#: In the order in which a first fit, a checkpoint, a resumed fit, a test and a prediction meet them.
LIFE = [
    "setup_environment", "launch", "connect", "on_connect", "setup", "init_context", "prepare_module", "materializer",
    "wrap_model", "wrap_optimizers", "wrap_dataloader", "log_hyperparams", "on_fit_start", "on_sanity_check_start",
    "on_validation_start", "on_validation_epoch_start", "transfer_batch", "on_validation_batch_start", "step_context",
    "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_sanity_check_end", "on_train_start",
    "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "scale_loss", "backward", "reduce_bucket",
    "on_after_backward", "on_before_optimizer_step", "clip_gradients", "step_optimizers", "on_before_zero_grad",
    "on_train_batch_end", "log_metrics", "optimizer_step", "on_train_epoch_end", "on_train_end", "on_fit_end",
    "model_state", "optimizer_state", "on_save_checkpoint", "save_checkpoint", "load_checkpoint", "on_load_checkpoint",
    "load_model_state", "load_optimizer_state", "on_test_start", "on_test_epoch_start", "on_test_batch_start",
    "on_test_batch_end", "on_test_epoch_end", "on_test_end", "on_predict_start", "on_predict_epoch_start",
    "on_predict_batch_start", "on_predict_batch_end", "on_predict_epoch_end", "on_predict_end", "on_exception",
    "explain_error", "teardown",
]  # fmt: skip

#: Answered by strategies that own the step; the loop asks only them. Tested in test_trainer.py. The others are asked by
#: plugins, and tested in test_compile.py.
NOT_ASKED = {"forward_backward", "units", "wrap_backend"}


def spy(seen):
    """A plugin that wraps every answer hook, acts on every other one, and remembers the first call of each."""
    body = {}
    for name, options in hook_specifications().items():
        if name == "reduce_bucket":
            continue  # called directly, not through pluggy
        arguments = list(inspect.signature(hook_functions()[name]).parameters)
        wraps = options["firstresult"] and name not in NOT_ASKED
        text = f"def {name}(self, {', '.join(arguments)}):\n"
        text += f"    seen.setdefault({name!r}, dict({', '.join(f'{a}={a}' for a in arguments)}))\n"
        text += "    return (yield)\n" if wraps else "    return None\n"
        if name in NOT_ASKED:
            continue
        space = {"seen": seen}
        exec(text, space)
        body[name] = sg.hookimpl(wrapper=wraps)(space[name])
    return type("Spy", (), body)()


class Hook(sg.CommHook):
    def __init__(self, seen):
        self.seen = seen

    @sg.hookimpl
    def reduce_bucket(self, bucket, collectives, run):
        self.seen.setdefault("reduce_bucket", {"bucket": bucket, "collectives": collectives, "run": run})
        return (yield bucket.buffer)


class Parametrised(Net):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.slow
def test_every_hook_is_called_in_the_order_of_a_life(tmp_path, monkeypatch):
    seen = {}
    trainer = sg.Trainer(
        strategy="ddp", launcher="subprocess", accelerator="cpu", comm_hook=[Hook(seen)], plugins=[spy(seen)], max_epochs=1,
        gradient_clip_val=1.0, enable_checkpointing=False, enable_progress_bar=False, log_every_n_steps=1,
        precision="16-mixed", default_root_dir=tmp_path,
    )  # fmt: skip
    # A single process needs no launcher; a launch of one process is still a launch.
    loader = DataLoader(TensorDataset(*data(32)), 8)
    with torch.device("meta"):
        model = Parametrised()
    monkeypatch.setattr(
        stratagem.runtime.launching,
        "launch",
        lambda run, main, module: launch(run, main) if run.connected else _launch(run, main),
    )
    trainer.fit(model, loader, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.max_epochs = 2
    trainer.fit(model, loader, loader, ckpt_path=tmp_path / "a.ckpt")
    trainer.test(model, loader)
    trainer.predict(model, loader)
    try:
        trainer.test(model, "not a loader but iterable")
    except Exception as error:
        assert isinstance(seen["on_exception"]["exception"], type(error))
    trainer.close()

    assert list(seen) == LIFE
    assert set(LIFE) | NOT_ASKED == set(hook_specifications())
    assert seen["transfer_batch"]["run"] is trainer.run
    assert seen["step_context"] == {"stage": "validate", "sync": True, "run": trainer.run}
    assert isinstance(seen["scale_loss"]["loss"], torch.Tensor)


def _launch(run, main):
    run.world = run.ask("setup_environment")
    return run.hooks.hook.launch(main=_ProcessBody(run, main), run=run)


def test_a_plugin_is_passed_only_what_it_names():
    class Modest:
        @sg.hookimpl
        def on_train_batch_end(self, batch_idx):
            self.last = batch_idx

    modest = Modest()
    sg.Trainer(
        max_epochs=1, plugins=[modest], accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    ).fit(Net(), joined_batches(3, 8))  # fmt: skip

    assert modest.last == 2


def test_a_hook_may_be_any_kind_of_method():
    """One of the class, one that needs neither, one that is inherited."""
    called = []

    class Base(sg.Callback):
        @sg.hookimpl
        def on_train_end(self):
            called.append(type(self).__name__)

    class Kinds(Base):
        @classmethod
        @sg.hookimpl
        def on_fit_start(cls):
            called.append(cls.__name__)

        @staticmethod
        @sg.hookimpl
        def on_train_start(run):
            called.append(run.world_size)

        other = property(lambda self: pytest.fail("a property was read"))

    sg.Trainer(callbacks=[Kinds()], max_epochs=1, **QUIET).fit(Net(), joined_batches(1, 4))

    assert called == ["Kinds", 1, "Kinds"]


def test_plugins_act_in_the_order_of_the_stack_and_callbacks_as_listed():
    order = []

    class Acts(sg.Callback):
        def __init__(self, name):
            self.name = name

        @sg.hookimpl
        def on_fit_start(self):
            order.append(self.name)

    trainer = sg.Trainer(
        max_epochs=0, callbacks=[Acts("first"), Acts("second")], plugins=[Acts("third")], accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Net(), joined_batches(1, 8))

    assert order == ["first", "second", "third"]


# --- Answers of the wrong kind -----------------------------------------------------------------------------------


class Wrong(sg.Strategy):
    """Answers everything rightly but one hook."""

    capabilities = sg.Capabilities(provides={"clip-by-norm"})

    def __init__(self, **answers):
        self.answers = answers

    @sg.hookimpl
    def wrap_model(self, module):
        return self.answers.get("wrap_model", module)

    @sg.hookimpl
    def wrap_optimizers(self, optimizers):
        return self.answers.get("wrap_optimizers", optimizers)

    @sg.hookimpl
    def connect(self):
        return self.answers.get("connect", Collectives())

    @sg.hookimpl
    def backward(self, loss):
        loss.backward()
        return self.answers.get("backward", True)

    @sg.hookimpl
    def optimizer_step(self, optimizer):
        optimizer.step()
        return self.answers.get("optimizer_step", True)

    @sg.hookimpl
    def clip_gradients(self):
        return self.answers.get("clip_gradients", 0.0)

    @sg.hookimpl
    def step_context(self):
        return self.answers.get("step_context")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"wrap_model": None}, "strategy 'Wrong' returned None from wrap_model; expected a Module"),
        ({"wrap_model": (1, 2)}, "strategy 'Wrong' returned a tuple from wrap_model; expected a Module"),
        ({"wrap_optimizers": "sgd"}, "returned a str from wrap_optimizers; expected a list or a tuple"),
        ({"connect": "gloo"}, "returned a str from connect; expected a Collectives"),
        ({"backward": None}, "returned None from backward; expected a bool"),
        ({"optimizer_step": 1.5}, "returned a float from optimizer_step; expected a bool"),
        ({"clip_gradients": "much"}, "returned a str from clip_gradients; expected a Tensor or a float or an int"),
        (
            {"step_context": "no context"},
            "strategy 'Wrong' returned a str from step_context; expected a context manager",
        ),
    ],
)
def test_an_answer_of_the_wrong_kind_is_named_at_once(answers, message):
    trainer = sg.Trainer(strategy=Wrong(**answers), max_epochs=1, gradient_clip_val=1.0, **QUIET)

    with pytest.raises(PluginError, match=message):
        trainer.fit(Net(), joined_batches(2, 8))


class SaysItHasBuckets(sg.Strategy):
    capabilities = sg.Capabilities(provides={"gradient-buckets"})

    @sg.hookimpl
    def wrap_model(self, module):
        return module


def test_a_strategy_that_averages_past_the_comm_hooks_is_refused():
    trainer = sg.Trainer(strategy=SaysItHasBuckets(), comm_hook="fp16_compress", max_epochs=1, **QUIET)

    with pytest.raises(
        PluginError, match=r"comm_hook 'fp16_compress' was never applied: .* did not call bucket_reducer\(run\)"
    ):
        trainer.fit(Net(), joined_batches(2, 8))


def test_capabilities_of_the_wrong_type_are_refused():
    class Lists(sg.Strategy):
        capabilities = ["multi-process"]  # noqa: RUF012

        @sg.hookimpl
        def wrap_model(self, module):
            return module

    with pytest.raises(PluginError, match="the capabilities of strategy 'Lists' are a list"):
        sg.Run(strategy=Lists(), accelerator="cpu")


class Left(sg.Callback):
    capabilities = sg.Capabilities(provides={"acme:left"}, conflicts={"acme:right"})

    @sg.hookimpl
    def on_fit_start(self):
        pass


class Right(Left):
    capabilities = sg.Capabilities(provides={"acme:right"})


def test_two_plugins_that_exclude_each_other_are_refused():
    with pytest.raises(ConfigError, match="callback 'Left' cannot be used with callback 'Right'.*drop one of the two"):
        sg.Trainer(callbacks=[Right(), Left()], **QUIET)


class Explains:
    def __init__(self):
        self.asked = []

    @sg.hookimpl(wrapper=True)
    def explain_error(self, error):
        self.asked.append(error)
        answer = yield
        return ValueError("the disk is full") if answer is error else answer


def test_an_error_is_explained_once_and_its_explanation_is_raised():
    plugin, error = Explains(), OSError(28, "write failed")

    def fail(run):
        raise error

    def main(run):
        run.launch(fail)  # within another call of the same run

    with pytest.raises(ValueError, match="the disk is full"):
        sg.Run(accelerator="cpu", plugins=[plugin]).launch(main)
    assert plugin.asked == [error]


def test_an_error_in_a_loop_of_ones_own_is_explained():
    plugin = Explains()
    with pytest.raises(ValueError, match="the disk is full"), sg.Run(accelerator="cpu", plugins=[plugin]):
        raise OSError(28, "write failed")
    assert len(plugin.asked) == 1


class Optional:
    @sg.hookimpl(optionalhook=True)
    def on_validation_ennd(self):
        pass

    @sg.hookimpl(optionalhook=True)
    def of_another_package(self):
        pass


def test_an_optional_hook_that_is_mistyped_is_warned_of():
    with pytest.warns(
        UserWarning, match="implements 'on_validation_ennd', which nothing calls; .*'on_validation_end'"
    ) as told:
        sg.Trainer(plugins=[Optional()], **QUIET)

    assert not [each for each in told if "of_another_package" in str(each.message)]
