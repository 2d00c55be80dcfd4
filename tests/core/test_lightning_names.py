"""Every name that Lightning's API lets a module, a data module or a callback define is called, or refused by name."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError, PluginError
from stratagem.stack.plugins import hook_functions, hook_specifications
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data, joined_batches, relative_difference
from stratagem_trainer import module_checks

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}

#: Methods of LightningModule 2.6 that a user may define, with what each is called with.
MODULE_API = {
    # ModelHooks
    "on_fit_start": (), "on_fit_end": (), "on_train_start": (), "on_train_end": (), "on_validation_start": (),
    "on_validation_end": (), "on_test_start": (), "on_test_end": (), "on_predict_start": (), "on_predict_end": (),
    "on_train_batch_start": ("batch", "batch_idx"), "on_train_batch_end": ("outputs", "batch", "batch_idx"),
    "on_validation_batch_start": ("batch", "batch_idx", "dataloader_idx"),
    "on_validation_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx"),
    "on_test_batch_start": ("batch", "batch_idx", "dataloader_idx"),
    "on_test_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx"),
    "on_predict_batch_start": ("batch", "batch_idx", "dataloader_idx"),
    "on_predict_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx"),
    "on_validation_model_zero_grad": (), "on_validation_model_eval": (), "on_validation_model_train": (),
    "on_test_model_eval": (), "on_test_model_train": (), "on_predict_model_eval": (), "on_predict_model_train": (),
    "on_train_epoch_start": (), "on_train_epoch_end": (), "on_validation_epoch_start": (),
    "on_validation_epoch_end": (), "on_test_epoch_start": (), "on_test_epoch_end": (), "on_predict_epoch_start": (),
    "on_predict_epoch_end": (), "on_before_zero_grad": ("optimizer",), "on_before_backward": ("loss",),
    "on_after_backward": (), "on_before_optimizer_step": ("optimizer",), "configure_sharded_model": (),
    "configure_model": (),
    # DataHooks, CheckpointHooks
    "prepare_data": (), "setup": ("stage",), "teardown": ("stage",), "train_dataloader": (), "val_dataloader": (),
    "test_dataloader": (), "predict_dataloader": (), "transfer_batch_to_device": ("batch", "device", "dataloader_idx"),
    "on_before_batch_transfer": ("batch", "dataloader_idx"), "on_after_batch_transfer": ("batch", "dataloader_idx"),
    "on_load_checkpoint": ("checkpoint",), "on_save_checkpoint": ("checkpoint",),
    # LightningModule
    "forward": ("x",), "training_step": ("batch", "batch_idx"), "validation_step": ("batch", "batch_idx"),
    "test_step": ("batch", "batch_idx"), "predict_step": ("batch", "batch_idx"), "configure_callbacks": (),
    "configure_optimizers": (), "backward": ("loss",),
    "configure_gradient_clipping": ("optimizer", "gradient_clip_val", "gradient_clip_algorithm"),
    "lr_scheduler_step": ("scheduler", "metric"),
    "optimizer_step": ("epoch", "batch_idx", "optimizer", "optimizer_closure"),
    "optimizer_zero_grad": ("epoch", "batch_idx", "optimizer"),
}  # fmt: skip

#: Methods of LightningModule before 2.0 (some of them of 0.x).
OLD_MODULE_API = (
    "training_epoch_end", "validation_epoch_end", "test_epoch_end", "training_step_end", "validation_step_end",
    "test_step_end", "training_end", "validation_end", "test_end", "on_epoch_start", "on_epoch_end", "on_batch_start",
    "on_batch_end", "on_pretrain_routine_start", "on_pretrain_routine_end", "on_train_dataloader", "on_val_dataloader",
    "on_test_dataloader", "on_predict_dataloader", "tng_dataloader", "get_progress_bar_dict", "tbptt_split_batch",
    "on_hpc_save", "on_hpc_load", "on_post_move_to_device", "log_grad_norm", "configure_apex", "amp_scale_loss",
    "configure_ddp", "init_ddp_connection", "get_from_queue", "add_to_queue",
)  # fmt: skip

#: Methods of Callback 2.6 with what each is called with, besides trainer and pl_module.
CALLBACK_API = {
    "setup": ("stage",), "teardown": ("stage",), "on_fit_start": (), "on_fit_end": (), "on_sanity_check_start": (),
    "on_sanity_check_end": (), "on_train_batch_start": ("batch", "batch_idx"),
    "on_train_batch_end": ("outputs", "batch", "batch_idx"), "on_train_epoch_start": (), "on_train_epoch_end": (),
    "on_validation_epoch_start": (), "on_validation_epoch_end": (), "on_test_epoch_start": (), "on_test_epoch_end": (),
    "on_predict_epoch_start": (), "on_predict_epoch_end": (),
    "on_validation_batch_start": ("batch", "batch_idx", "dataloader_idx"),
    "on_validation_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx"),
    "on_test_batch_start": ("batch", "batch_idx", "dataloader_idx"),
    "on_test_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx"),
    "on_predict_batch_start": ("batch", "batch_idx", "dataloader_idx"),
    "on_predict_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx"), "on_train_start": (),
    "on_train_end": (), "on_validation_start": (), "on_validation_end": (), "on_test_start": (), "on_test_end": (),
    "on_predict_start": (), "on_predict_end": (), "on_exception": ("exception",), "state_dict": (),
    "load_state_dict": ("state_dict",), "on_save_checkpoint": ("checkpoint",), "on_load_checkpoint": ("checkpoint",),
    "on_before_backward": ("loss",), "on_after_backward": (), "on_before_optimizer_step": ("optimizer",),
    "on_before_zero_grad": ("optimizer",),
}  # fmt: skip  # `state_key` is a property: see tests/matrix/test_state_identity.py

#: Methods of Callback before 2.0.
OLD_CALLBACK_API = (
    "on_init_start", "on_init_end", "on_configure_sharded_model", "on_before_accelerator_backend_setup",
    "on_pretrain_routine_start", "on_pretrain_routine_end", "on_epoch_start", "on_epoch_end", "on_batch_start",
    "on_batch_end", "on_keyboard_interrupt",
)  # fmt: skip

#: Methods of LightningDataModule 2.6 that a user may define.
DATA_API = (
    "prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
    "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer", "state_dict", "load_state_dict",
    "on_exception",
)  # fmt: skip

#: Methods of LightningDataModule before 2.0, and events that it is not told of.
OLD_DATA_API = (
    "on_save_checkpoint", "on_load_checkpoint", "on_train_dataloader", "on_val_dataloader", "on_test_dataloader",
    "on_predict_dataloader", "on_fit_start", "on_train_epoch_end", "configure_optimizers", "training_epoch_end",
)  # fmt: skip

#: Of two names for one thing a class may define one.
EARLIER_NAMES = {"configure_sharded_model"}


# --- A life in which everything happens --------------------------------------------------------------------------


class Base(Net):
    """Has a scheduler, loaders and metrics of its own."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    def setup(self, stage):
        pass

    def teardown(self, stage):
        pass

    def prepare_data(self):
        pass

    def train_dataloader(self):
        return DataLoader(TensorDataset(*data(16)), 8)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Data(sg.DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*data(16)), 8)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def recording(base, names, seen):
    """Return a class derived from `base` that defines every one of `names`, and remembers what each was called with."""

    def define(name):
        inherited = getattr(base, name, None)

        def method(self, *arguments, **options):
            seen.setdefault(name, []).append((arguments, options))
            if name.endswith("_step_end"):
                return arguments[0]
            return None if inherited is None else inherited(self, *arguments, **options)

        return method

    return type(f"Recording{base.__name__}", (base,), {name: define(name) for name in names})


def live(tmp_path, module, datamodule=None, **arguments):
    """Fit with validation, save, resume, validate, test, predict, and fail."""
    trainer = sg.Trainer(**({"max_epochs": 1, "gradient_clip_val": 1.0} | QUIET | arguments))
    trainer.fit(module, datamodule=datamodule)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.max_epochs = 2
    trainer.fit(module, datamodule=datamodule, ckpt_path=tmp_path / "a.ckpt")
    for call in (trainer.validate, trainer.test, trainer.predict):
        call(module, datamodule=datamodule)
    with pytest.raises(ValueError, match="unpack"):
        trainer.test(module, "no loader, but an iterable")
    if datamodule is not None:
        datamodule.test_dataloader = lambda: "also here"
        with pytest.raises(ValueError, match="unpack"):
            trainer.test(module, datamodule=datamodule)
    return trainer


@pytest.mark.slow
def test_every_method_of_a_module_is_called_or_refused(tmp_path):
    seen = {}
    refused = {name for name in OLD_MODULE_API if name in moved_names("module_methods")}
    called = ({*MODULE_API, *OLD_MODULE_API} - refused) - EARLIER_NAMES
    live(tmp_path, recording(Base, called, seen)())

    assert set(seen) == called
    for name, arguments in MODULE_API.items():
        if name not in EARLIER_NAMES:
            given, options = seen[name][0]
            assert len(given) + len(options) == len(arguments), name


def test_events_of_a_module_get_the_arguments_they_name_or_all_in_order():
    class Named(Net):
        def on_train_batch_end(self, batch_idx):
            assert batch_idx == 0

    class InOrder(Net):
        seen = None

        def on_train_batch_end(self, result, data, number):
            self.seen = (type(result), type(data), number)

    module = InOrder()
    for each in (Named(), module):
        sg.Trainer(max_epochs=1, **QUIET).fit(each, joined_batches(1, 8))

    assert module.seen == (torch.Tensor, tuple, 0)


@pytest.mark.parametrize("name", [n for n in OLD_MODULE_API if n in moved_names("module_methods")])
@pytest.mark.parametrize("on_instance", [False, True])
def test_a_method_of_a_module_that_is_not_called_is_refused_with_what_to_define(name, on_instance):
    module = Net() if on_instance else type("Model", (Net,), {name: lambda self, *_: None})()
    if on_instance:
        setattr(module, name, lambda *_: None)
    trainer = sg.Trainer(max_epochs=1, **QUIET)

    for call in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        with pytest.raises(ConfigError) as refusal:
            call(module, joined_batches(1, 8))
        assert f"defines {name}, which is never called; expected " in str(refusal.value)
        assert refusal.value.do
    assert trainer.run.world is None  # nothing was started


def test_a_method_that_comes_into_being_in_setup_is_refused():
    class Late(Net):
        def setup(self, stage):
            self.validation_epoch_end = lambda outputs: None

    with pytest.raises(ConfigError, match="Late defines validation_epoch_end"):
        sg.Trainer(max_epochs=1, **QUIET).fit(Late(), joined_batches(1, 8))


SIGNATURES = {
    "training_step": "self, batch, batch_idx, optimizer_idx",
    "validation_step": "self, dataloader_iter",
    "optimizer_step": "self, epoch, batch_idx, optimizer, optimizer_idx, optimizer_closure, on_tpu, using_lbfgs",
    "optimizer_zero_grad": "self, epoch, batch_idx, optimizer, optimizer_idx",
    "backward": "self, loss, optimizer, optimizer_idx",
    "configure_gradient_clipping": "self, optimizer, optimizer_idx, gradient_clip_val, gradient_clip_algorithm",
    "lr_scheduler_step": "self, scheduler, optimizer_idx, metric",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_of_earlier_versions_are_refused_with_what_to_do(name):
    space = {}
    exec(f"def {name}({SIGNATURES[name]}): pass", space)
    module = type("Model", (Net,), {name: space[name]})()

    with pytest.raises(
        ConfigError, match=rf"Model.{name} takes (optimizer_idx|dataloader_iter), which is not passed; "
    ):
        sg.Trainer(max_epochs=1, **QUIET).fit(module, joined_batches(1, 8))


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("on_train_epoch_end", "self, outputs", "(self)"),
        ("on_train_batch_end", "self, outputs, batch, batch_idx, dataloader_idx", "(self, outputs, batch, batch_idx)"),
        ("optimizer_step", "self, optimizer", "(self, epoch, batch_idx, optimizer, optimizer_closure)"),
        ("transfer_batch_to_device", "self, batch, device", "(self, batch, device, dataloader_idx)"),
        ("configure_gradient_clipping", "self, optimizer", "(self, optimizer, gradient_clip_val, gradient_clip_algo"),
        ("setup", "self", "(self, stage)"),
    ],
)
def test_methods_that_take_other_arguments_are_refused(name, arguments, expected):
    space = {}
    exec(f"def {name}({arguments}): pass", space)
    module = type("Model", (Net,), {name: space[name]})()

    with pytest.raises(ConfigError) as refusal:
        sg.Trainer(max_epochs=1, **QUIET).fit(module, joined_batches(1, 8))
    assert f"Model.{name} takes ({arguments.removeprefix('self').removeprefix(', ')}); expected {expected}" in str(
        refusal.value
    )


# --- Callbacks ---------------------------------------------------------------------------------------------------


def callback_with(names, seen=None, marked=True):
    """Return a callback that defines every one of `names`, as Lightning does but for the name of the module."""
    body = {}
    for name in names:
        trainer = () if name in ("state_dict", "load_state_dict") else ("trainer", "module")
        if name == "teardown" and marked:
            arguments = ["self", "run"]
        else:
            arguments = ["self", *trainer, *CALLBACK_API.get(name, ())]
        space = {"seen": seen if seen is not None else {}}
        given = ", ".join(f"{argument!r}: {argument}" for argument in arguments[1:])
        text = f"def {name}({', '.join(arguments)}):\n    seen.setdefault({name!r}, {{{given}}})\n"
        exec(f"{text}    return {{}}" if name == "state_dict" else text, space)
        body[name] = sg.hookimpl(space[name]) if marked and name in hook_specifications() else space[name]
    return type("Recorder", (sg.Callback,), body)()


def test_every_method_of_a_callback_is_called_or_refused(tmp_path):
    seen, refused = {}, set(moved_names("callback_methods"))
    called = {*CALLBACK_API, *OLD_CALLBACK_API} - refused
    trainer = live(tmp_path, Base(), callbacks=[callback_with(called, seen)])
    trainer.close()

    assert set(seen) == called
    assert all(found["trainer"] is trainer for found in seen.values() if "trainer" in found)
    assert seen["setup"]["stage"] == "fit"


UNMARKED = [name for name in CALLBACK_API if name not in ("state_dict", "load_state_dict", "teardown")]


def test_every_unmarked_method_of_a_callback_is_called(tmp_path):
    seen = []
    methods = {name: lambda self, *given, name=name: seen.append((name, len(given))) for name in UNMARKED}
    trainer = live(tmp_path, Base(), callbacks=[type("Recorder", (sg.Callback,), methods)()])
    trainer.close()

    assert {name for name, _ in seen} == {*UNMARKED}
    for name, count in seen:
        assert count == len(inspect.signature(hook_functions()[name]).parameters) - 1, name  # all but `run`


@pytest.mark.parametrize("name", [*UNMARKED, "teardown"])
def test_an_unmarked_attribute_of_a_callback_is_refused_with_what_to_add(name):
    callback = callback_with([], marked=False)
    setattr(callback, name, lambda *_: None)

    with pytest.raises(PluginError) as refusal:
        sg.Trainer(callbacks=[callback], plugins=[Acts()], **QUIET)
    assert name in str(refusal.value)
    assert "@hookimpl above it, and arguments out of (" in str(refusal.value)


def test_an_unmarked_teardown_is_refused():
    with pytest.raises(PluginError, match="teardown that is not marked as a hook; expected @hookimpl above it"):
        sg.Trainer(callbacks=[callback_with(["teardown"], marked=False)], plugins=[Acts()], **QUIET)


class Acts:
    @sg.hookimpl
    def on_fit_start(self):
        pass


@pytest.mark.parametrize("name", OLD_CALLBACK_API)
def test_a_method_of_earlier_callbacks_is_refused_with_what_to_define(name):
    callback = type("Recorder", (sg.Callback,), {name: lambda self, *_: None})()

    with pytest.raises(ConfigError, match=f"callback 'Recorder' defines {name}, which is never called; expected \\w+"):
        sg.Trainer(callbacks=[callback], **QUIET)


def test_the_names_of_lightnings_arguments_are_translated():
    class Theirs(sg.Callback):
        @sg.hookimpl
        def on_fit_start(self, trainer, pl_module):
            pass

    class AtTheEnd(sg.Callback):
        @sg.hookimpl
        def teardown(self, trainer, module, stage):
            pass

    with pytest.raises(PluginError, match="takes pl_module in on_fit_start; .*; name it `module`"):
        sg.Trainer(callbacks=[Theirs()], **QUIET)
    with pytest.raises(PluginError, match="takes trainer in teardown; .*take `run` alone.*on_fit_end"):
        sg.Trainer(callbacks=[AtTheEnd()], **QUIET)


# --- Data modules ------------------------------------------------------------------------------------------------


def test_every_method_of_a_data_module_is_called(tmp_path):
    seen = {}
    datamodule = recording(Data, DATA_API, seen)()
    trainer = live(tmp_path, Base(), datamodule)

    assert set(seen) == set(DATA_API)
    assert trainer.datamodule is datamodule.trainer.datamodule is datamodule
    assert isinstance(seen["on_exception"][0][0][0], ValueError)
    assert pickle.loads(pickle.dumps(Data())).trainer is None


@pytest.mark.parametrize("name", OLD_DATA_API)
def test_a_method_of_a_data_module_that_is_not_called_is_refused(name):
    datamodule = type("Loaders", (Data,), {name: lambda self, *_: None})()

    with pytest.raises(ConfigError, match=f"Loaders defines {name}, which is never called; expected \\w+"):
        sg.Trainer(max_epochs=1, **QUIET).fit(Base(), datamodule=datamodule)


class Counting(Data):
    """Counts the loaders it made; the count survives a restart."""

    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()
        self.made = 0

    def train_dataloader(self):
        self.made += 1
        return super().train_dataloader()

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state_dict):
        self.made = state_dict["made"]


def test_a_data_modules_state_is_saved_and_restored_before_its_loaders_are_made(tmp_path):
    first, second = Counting(), Counting()
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Base(), datamodule=first)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    sg.Trainer(max_epochs=2, **QUIET).fit(Base(), datamodule=second, ckpt_path=tmp_path / "a.ckpt")

    assert (first.made, second.made) == (1, 2)


@pytest.mark.every_push("fork")
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fork", "spawn"])
def test_a_data_modules_state_comes_back_from_other_processes(launcher):
    datamodule = Counting()

    sg.Trainer(max_epochs=1, strategy="ddp", devices=2, launcher=launcher, **QUIET).fit(Base(), datamodule=datamodule)

    assert datamodule.made == 1


def test_loggers_get_the_hyperparameters_of_a_data_module():
    class Logs:
        @sg.hookimpl
        def log_hyperparams(self, params):
            self.params = params

    class Wide(Base):
        def __init__(self, width=4):
            super().__init__()
            self.save_hyperparameters()

    logs = Logs()
    sg.Trainer(max_epochs=1, plugins=[logs], **QUIET).fit(Base(), datamodule=Counting(width=5))

    assert logs.params == {"width": 5}
    with pytest.raises(ConfigError, match="hyper-parameter 'width' is 4 in Wide and 3 in Counting"):
        sg.Trainer(max_epochs=1, **QUIET).fit(Wide(), datamodule=Counting())


@pytest.mark.slow
def test_data_is_prepared_once_in_the_run_if_a_data_module_wants_that(tmp_path):
    def prepare(rank, world_size, per_node):
        import os

        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=str(rank), GROUP_RANK=str(rank))  # two nodes
        seen = []

        class Prepared(Data):
            prepare_data_per_node = per_node

            def prepare_data(self):
                seen.append(rank)

        trainer = sg.Trainer(max_epochs=1, strategy="ddp", devices=1, num_nodes=2, **QUIET)
        trainer.fit(Base(), datamodule=Prepared())
        return seen

    assert run_in_processes(prepare, 2, True) == [[0], [1]]
    assert run_in_processes(prepare, 2, False) == [[0], []]


# --- Loaders -----------------------------------------------------------------------------------------------------


def test_a_modules_own_validation_loader_is_used_beside_a_training_loader_that_is_given():
    class Counts(Net):
        batches = 0

        def val_dataloader(self):
            return joined_batches(3, 8)

        def validation_step(self, batch, batch_idx):
            self.batches += 1

    class OnlyTraining(sg.DataModule):
        def train_dataloader(self):
            return joined_batches(2, 8)

    given, beside = Counts(), Counts()
    sg.Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET).fit(given, joined_batches(2, 8))
    sg.Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET).fit(beside, datamodule=OnlyTraining())

    assert (given.batches, beside.batches) == (3, 3)


# --- Batches -----------------------------------------------------------------------------------------------------


class Transfers:
    """Shifts inputs on their way to the device, in three steps whose order shows in the result."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.indices.append(dataloader_idx)
        return batch[0] + 1, batch[1]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        assert device == torch.device("cpu")
        x, y = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return x * 2, y

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] - 3, batch[1]


def _transfers_of_module(**arguments):
    class Module(Transfers, Net):
        indices = []  # noqa: RUF012

    module = Module()
    sg.Trainer(max_epochs=1, **QUIET, **arguments).fit(module, joined_batches(3, 8))
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_module_changes_batches_on_their_way_to_the_device(precision):
    module = _transfers_of_module(precision=precision)

    reference = Net()
    shifted = [((x + 1) * 2 - 3, y) for x, y in joined_batches(3, 8)]
    sg.Trainer(max_epochs=1, precision=precision, **QUIET).fit(reference, shifted)
    assert relative_difference(module.state_dict(), reference.state_dict()) < 1e-6


def test_a_data_module_changes_batches_rather_than_the_module(tmp_path):
    class Loaders(Transfers, Data):
        indices = []  # noqa: RUF012

    class Model(Base):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            raise AssertionError("the data module's is called")

    datamodule, module = Loaders(), Model()
    datamodule.val_dataloader = lambda: [data_loader(), data_loader()]
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: None
    with pytest.warns(UserWarning, match="Model and Loaders both define on_before_batch_transfer: the data module's"):
        sg.Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET).fit(module, datamodule=datamodule)

    reference = Base()
    shifted = [((x + 1) * 2 - 3, y) for x, y in Data().train_dataloader()]
    sg.Trainer(max_epochs=1, **QUIET).fit(reference, shifted, joined_batches(1, 8))
    assert relative_difference(module.state_dict(), reference.state_dict()) < 1e-6
    assert datamodule.indices == [0, 0, 0, 0, 1, 1]


def data_loader():
    return DataLoader(TensorDataset(*data(16)), 8)


def test_a_strategy_that_moves_batches_itself_refuses_a_module_that_does():
    class Moves(sg.Strategy):
        @sg.hookimpl
        def wrap_model(self, module):
            return module

        @sg.hookimpl
        def transfer_batch(self, batch):
            return batch

    class Model(Net):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return batch

    with pytest.raises(ConfigError, match="Model defines transfer_batch_to_device, and strategy 'Moves' moves batches"):
        sg.Trainer(strategy=Moves(), max_epochs=1, **QUIET).fit(Model(), joined_batches(1, 8))


# --- Modes, building, callbacks ----------------------------------------------------------------------------------


def test_a_module_switches_its_own_modes():
    class Model(Net):
        modes = ()

        def on_validation_model_eval(self):
            self.net[0].eval()

        def on_validation_model_train(self):
            self.modes += ("back",)
            super().on_validation_model_train()

        def validation_step(self, batch, batch_idx):
            self.modes += ((self.net[0].training, self.net[2].training),)

    module = Model()
    sg.Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET).fit(module, joined_batches(1, 8), joined_batches(1, 8))

    assert module.modes == ((False, True), "back")
    assert module.net[0].training


@pytest.mark.parametrize("strategy", ["single_device", "fsdp"])
def test_configure_sharded_model_builds(strategy, tmp_path):
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_sharded_model(self):
            if self.net is None:
                self.net = Net().net

    trainer = sg.Trainer(max_epochs=1, strategy=strategy, **QUIET)
    module, reference = Model(), Net()
    trainer.fit(module, joined_batches(2, 8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    sg.Trainer(max_epochs=1, strategy=strategy, **QUIET).fit(reference, joined_batches(2, 8))

    assert Model.load_from_checkpoint(tmp_path / "a.ckpt").net is not None
    assert [p.shape for p in module.parameters()] == [p.shape for p in reference.parameters()]

    class Both(Model):
        def configure_model(self):
            pass

    with pytest.raises(ConfigError, match="Both defines configure_model and configure_sharded_model"):
        sg.Trainer(max_epochs=1, **QUIET).fit(Both(), joined_batches(1, 8))


class Counts(sg.Callback):
    def __init__(self, name="", log=None):
        self.name, self.log = name, [] if log is None else log

    @sg.hookimpl
    def on_train_batch_end(self):
        self.log.append(self.name)

    def state_dict(self):
        return {"log": list(self.log)}

    def load_state_dict(self, state):
        self.log[:] = state["log"]


class CountsToo(Counts):
    pass


class Brings(Net):
    def __init__(self, *callbacks):
        super().__init__()
        self.callbacks = callbacks

    def configure_callbacks(self):
        return list(self.callbacks)


@pytest.mark.every_push("None")
@pytest.mark.parametrize("launcher", [None, "fork"])
def test_a_modules_callbacks_join_and_replace_the_trainers(launcher):
    ours, replaced, brought = Counts("ours"), CountsToo("replaced"), CountsToo("brought")
    arguments = {} if launcher is None else {"strategy": "ddp", "devices": 2, "launcher": launcher}
    trainer = sg.Trainer(max_epochs=1, callbacks=[ours, replaced], **QUIET, **arguments)

    trainer.fit(Brings(brought), joined_batches(2, 8))

    # A subclass replaces its base, as in Lightning.
    assert trainer.callbacks == (brought,)
    assert (len(brought.log), len(ours.log), len(replaced.log)) == (2, 0, 0)

    trainer.test(trainer.module, joined_batches(1, 8))
    assert trainer.callbacks == (brought,)
    trainer.fit(Net(), joined_batches(1, 8))
    assert trainer.callbacks == (ours, replaced)
    assert (len(brought.log), len(ours.log)) == (2, 1)


def test_one_callback_of_a_module_may_come_without_a_list_and_must_be_one():
    class One(Net):
        def configure_callbacks(self):
            return Counts("one")

    class NoCallback(Net):
        def configure_callbacks(self):
            return [42]

    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(One(), joined_batches(2, 8))

    assert [len(callback.log) for callback in trainer.callbacks] == [2]
    with pytest.raises(ConfigError, match="callbacks is 42; expected a name, a mapping or an instance"):
        trainer.fit(NoCallback(), joined_batches(1, 8))


def test_an_event_of_a_callback_named_on_a_module_is_called_too():
    class Model(Net):
        seen = ()

        def on_sanity_check_start(self):
            self.seen += ("sanity",)

        def on_exception(self, exception):
            self.seen += (type(exception),)

        def training_step(self, batch, batch_idx):
            raise KeyError("x")

    module = Model()
    with pytest.raises(KeyError):
        sg.Trainer(max_epochs=1, **QUIET).fit(module, joined_batches(1, 8), joined_batches(1, 8))

    assert module.seen == ("sanity", KeyError)


def test_the_tables_name_nothing_that_is_called():
    """Names that are refused on a module are neither methods of `Module` nor events nor hooks."""
    known = {*dir(sg.Module), *module_checks.CALLED_WITH, *module_checks.EVENTS}

    assert not known & set(moved_names("module_methods"))
    assert not set(hook_specifications()) & set(moved_names("callback_methods"))
    for name, arguments in module_checks.CALLED_WITH.items():
        own = getattr(sg.Module, name, None)
        if own is not None:
            inspect.signature(own).bind(None, *arguments)
