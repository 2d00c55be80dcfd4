"""`stratagem migrate` says what changes in a script for Lightning, and only that; it never runs the script."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import pytest

import stratagem as sg
from programs import scripts
from stratagem.api.world import Collectives
from stratagem.cli import main
from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError
from stratagem.runtime.context import Context
from stratagem_migrate import arguments, examine, installed, names, own, trainers, translations
from stratagem_migrate.rewriting import rewrite
from stratagem_migrate.source import Source
from stratagem_testing.reference import Net, joined_batches

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-lightning.md"


def found(script, certainty="change"):
    """What is said about a script, as (line, old, new)."""
    findings = examine(Source(Path("train.py"), script.encode()))
    return [(each.line, each.old, each.new) for each in findings if each.certainty == certainty]


def in_a_module(body):
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"import lightning as L\nclass Net(L.LightningModule):\n{lines}\n"


def in_a_trainer(arguments):
    return f"from lightning.pytorch import Trainer\nTrainer({arguments}, logger=False)"


def news(script, certainty="change"):
    """The new side of everything but the imports and the names of classes."""
    return [new for line, old, new in found(script, certainty) if line > 1 and "Lightning" not in old]


# --- Names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning", "lightning.pytorch"])
def test_every_name_of_the_package_is_known(package):
    script = (
        f"import {package} as pl\nfrom {package} import LightningModule\nclass Net(LightningModule): pass\npl.Trainer"
    )

    assert found(script) == [
        (1, f"import {package} as pl", "import stratagem as sg"),
        (2, f"from {package} import LightningModule", "from stratagem import Module"),
        (3, "LightningModule", "stratagem.Module"),
        (4, "pl.Trainer", "stratagem.Trainer"),
    ]


def test_names_from_deep_inside_and_renamed_ones_are_known():
    script = (
        "from pytorch_lightning.core.lightning import LightningModule as Base\n"
        "from pytorch_lightning.callbacks.early_stopping import EarlyStopping as Stop\n"
        "class Net(Base): pass\nStop(monitor='loss')\n"
    )

    assert [new for _, _, new in found(script)] == [
        "from stratagem import Module as Base",
        "from stratagem.callbacks import EarlyStopping as Stop",
    ]


def test_a_star_import_hides_nothing():
    assert [new for _, _, new in found("from pytorch_lightning import *\nTrainer(gpus=1, logger=False)")] == [
        "import stratagem as sg", "stratagem.Trainer", 'accelerator="gpu", devices=1',
    ]  # fmt: skip


def test_what_does_not_exist_is_said_to_be_missing():
    (finding,) = examine(Source(Path("a.py"), b"from lightning.pytorch.strategies import HPUParallelStrategy"))

    assert finding.new == ""
    assert "not available" in str(finding)


@pytest.mark.parametrize(
    ("module", "name", "new"),
    [
        (
            "plugins.ddp_sequential_plugin",
            "DDPSequentialPlugin",
            'strategy={"name": "ddp_sequential", "balance": [...]}',
        ),
        ("strategies", "HivemindStrategy", 'strategy={"name": "hivemind", ...} (of stratagem-hivemind)'),
        ("strategies", "HorovodStrategy", 'strategy="horovod" (of stratagem-horovod)'),
        ("plugins", "BitsandbytesPrecision", 'precision={"name": "nf4", ...} (of stratagem-bitsandbytes)'),
    ],
)
def test_classes_of_engines_lead_to_the_names_of_their_packages(module, name, new):
    (finding,) = examine(Source(Path("a.py"), f"from pytorch_lightning.{module} import {name}".encode()))

    assert new in finding.new


@pytest.mark.parametrize(
    ("statement", "new"),
    [
        (
            "from pytorch_lightning.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict as convert",
            "`stratagem checkpoint consolidate`",
        ),
        ("from pytorch_lightning.core.lightning import LightningModule", "from stratagem import Module"),
        ("from pytorch_lightning.core import LightningDataModule", "from stratagem import DataModule"),
        ("from lightning import Fabric", "from stratagem import Run"),
        ("from lightning.fabric.fabric import Fabric as F", "from stratagem import Run as F"),
        ("from lightning.fabric.strategies import FSDPStrategy", "from stratagem.strategies import FSDPStrategy"),
        (
            "from lightning.pytorch.demos import Transformer",
            "demos are not part of stratagem: copy it into your project",
        ),
        (
            "from lightning.pytorch.utilities.memory import is_oom_error\nis_oom_error(1)",
            "stratagem has no is_oom_error",
        ),
    ],
)
def test_old_import_paths_lead_to_the_new_name(statement, new):
    first = min(examine(Source(Path("a.py"), statement.encode())))

    assert (first.new or first.note) == new


def test_a_strategy_of_the_script_is_told_once():
    script = (
        "from pytorch_lightning.strategies import DDPStrategy\n"
        "class Own(DDPStrategy):\n    def configure_ddp(self):\n        pass\n"
    )

    (_, finding) = examine(Source(Path("a.py"), script.encode()))

    assert finding.old == "class Own(DDPStrategy)"
    assert "find_unused_parameters, static_graph" in finding.note
    assert set(re.findall(r"\w+_\w+(?=,)", finding.note)) <= installed.plugin_options("strategy", "ddp")


LITERALS = (
    "[1]",
    "['full']",
    "{'a': 1}",
    "{1}",
    "(1, [2])",
    "1.5",
    "'x'",
    "b'x'",
    "...",
    "[]",
    "{}",
    "-1",
    "f(x)",
    "1j",
)


@pytest.mark.when_changed("plugins/migrate/", reason="advice changes with its package alone")
@pytest.mark.parametrize("name", sorted({*installed.trainer_arguments(), *arguments.MOVED, *translations.RENAMED}))
def test_any_value_of_an_argument_gets_advice_or_stays(name):
    """The advice never reads "-> nothing"."""
    for value in LITERALS:
        script = f"import pytorch_lightning as pl\nt = pl.Trainer({name}={value})\nt.tune(m)\nt.fit(m)\n"
        source = Source(Path("a.py"), script.encode())

        rewrite(source)

        assert not [each for each in examine(source) if each.new.startswith("nothing")]
        assert all(each.new or each.note for each in examine(source) if each.certainty != "same")


def test_the_device_of_a_module_is_asked_for():
    assert news(in_a_module("def train_dataloader(self): return self.on_tpu")) == ['self.device.type == "xla"']


def test_a_name_of_another_package_is_left_alone():
    script = "from transformers import Trainer, EarlyStopping\ntrainer = Trainer(gpus=1)\ntrainer.tune()\n"

    assert examine(Source(Path("a.py"), script.encode())) == []


def test_counterparts_can_be_imported():
    """A name in the table is one in stratagem."""
    for counterpart in names.NAMES.values():
        if counterpart.imported_from is not None:
            module, name = counterpart.imported_from
            assert getattr(importlib.import_module(module), name) is not None


def test_what_is_recommended_exists():
    """Whatever the tables send a reader to is there, looked up in the classes themselves."""
    tables = [
        own.SELF,
        own._DATA,
        trainers.TRAINER,
        installed.uncalled_methods(),
        installed.uncalled_by_data_modules(),
    ]
    advice = [text for table in [*tables, installed.uncalled_by_callbacks()] for row in table.values() for text in row]
    advice += trainers.STRATEGY.values()
    text = "\n".join(advice)

    assert set(re.findall(r"trainer\.(\w+)", text)) <= installed.trainer_attributes()
    assert set(re.findall(r"\brun\.(\w+)", text)) <= set(dir(Context)) | installed._assigned(Context)
    assert set(re.findall(r"collectives\.(\w+)", text)) <= set(dir(Collectives))
    known = installed.module_attributes() | installed.data_attributes() | set(installed.hooks())
    assert set(re.findall(r"def (\w+)\(self", text)) <= known
    assert set(re.findall(r"@hookimpl def (on_\w+)\(self", text)) <= set(installed.hooks())


def test_what_the_tables_replace_is_not_there():
    """A row about something that stratagem has too would never be read."""
    assert not arguments.MOVED.keys() & installed.trainer_arguments()
    assert not trainers.TRAINER.keys() & installed.trainer_attributes()
    assert not own.SELF.keys() & installed.module_attributes() - moved_names("exports").keys()  # they are refused
    assert not own._DATA.keys() & installed.data_attributes()
    for theirs, replaced in names.OPTIONS.items():
        assert not replaced.keys() & installed.plugin_options(*names.NAMES[theirs].plugin)


def test_named_plugins_are_known_or_said_to_be_missing():
    unknown = {c.plugin for c in names.NAMES.values() if c.plugin and not installed.has_plugin(*c.plugin)}

    assert {kind for kind, _ in unknown} <= {"environment"}
    assert all(c.is_missing for c in names.NAMES.values() if c.plugin in unknown)


# --- The Trainer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gpus=2", 'accelerator="gpu", devices=2'),
        ("gpus=0", 'accelerator="cpu"'),
        ("gpus=None", 'accelerator="cpu"'),
        ("gpus=-1", 'accelerator="gpu", devices=-1'),
        ("gpus=[1, 3]", 'accelerator="gpu", devices=[1, 3]'),
        ("gpus=args.gpus", 'accelerator="gpu", devices=args.gpus'),
        ("num_processes=4", 'accelerator="cpu", devices=4'),
        ('accelerator="ddp_cpu"', 'accelerator="cpu", strategy="ddp_spawn"'),
        ('distributed_backend="ddp"', 'strategy="ddp"'),
        ('plugins="ddp_sharded"', 'strategy="ddp_sharded"'),
        ('plugins=["native_amp"]', 'precision="16-mixed"'),
        ('resume_from_checkpoint="a.ckpt"', "trainer.fit(..., ckpt_path='a.ckpt')"),
        ("resume_from_checkpoint=None", "leave it out"),
        ("auto_lr_find=False", "leave it out"),
        ("checkpoint_callback=mine", "callbacks=[mine]"),
        ("weights_summary=None", "enable_model_summary=False"),
        ("progress_bar_refresh_rate=0", "enable_progress_bar=False"),
        ("devices=0", 'accelerator="cpu"'),
        ("profiler=True", 'profiler="simple"'),
        ('max_time={"hours": 2}', "datetime.timedelta(hours=2)"),
        ("gradient_clip_val=0.0", "leave it out"),
        ("tpu_cores=8", 'accelerator="tpu", devices=8 (of stratagem-xla)'),
        ("tpu_cores=[1]", 'accelerator="tpu", devices=[1] (of stratagem-xla)'),
        ("tpu_cores=None", "leave it out"),
    ],
)
def test_arguments_that_moved(old, new):
    assert news(in_a_trainer(old)) == [new]


def test_a_digit_string_has_meant_two_things():
    (new,) = news(in_a_trainer('gpus="3"'))

    assert "devices=3" in new
    assert "devices=[3]" in new


def test_strategies_by_name():
    assert news(in_a_trainer('strategy="ddp_find_unused_parameters_true", precision="bf16-mixed"')) == []
    assert news(in_a_trainer('strategy="deepspeed_stage_3"')) == []
    assert news(in_a_trainer('strategy="hpu_parallel"')) != []
    assert news(in_a_trainer('accelerator="tpu", strategy="xla"')) == []
    assert news(in_a_trainer('strategy="tpu_spawn"')) == ['accelerator="tpu", strategy="xla" (of stratagem-xla)']
    assert news(in_a_trainer('strategy="dp"')) == []
    assert news(in_a_trainer('accelerator="ddp2"')) == ['strategy="ddp2"']


def test_a_value_that_today_refuses_is_a_change():
    (finding,) = [f for f in examine(Source(Path("a.py"), in_a_trainer("num_nodes=0").encode())) if f.line == 2
                  and f.certainty == "change"]  # fmt: skip

    assert finding.old == "num_nodes=0"
    assert "at least 1" in finding.note


def test_every_argument_of_today_is_the_same():
    """Independent of the table: give each argument its default, and nothing must change."""
    defaults = {name: default for name, default in defaults_of_trainer().items() if name not in ("plugins", "max_time")}
    script = in_a_trainer(", ".join(f"{name}={value!r}" for name, value in defaults.items() if name != "logger"))

    assert news(script) == []
    assert len(found(script, "same")) >= len(defaults)


def defaults_of_trainer():
    parameters = inspect.signature(sg.Trainer.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name not in ("self", "layers")}


def test_what_the_trainer_refuses_is_found():
    """Independent of the table: stratagem itself says which of Lightning's arguments it does not take."""
    for argument in ("gpus", "tpu_cores", "ipus", "num_processes", "auto_select_gpus", "replace_sampler_ddp",
                     "resume_from_checkpoint", "checkpoint_callback", "weights_summary", "progress_bar_refresh_rate",
                     "process_position", "amp_backend", "amp_level", "auto_lr_find", "auto_scale_batch_size",
                     "track_grad_norm", "terminate_on_nan", "truncated_bptt_steps", "flush_logs_every_n_steps",
                     "log_gpu_memory", "weights_save_path", "stochastic_weight_avg", "move_metrics_to_cpu",
                     "multiple_trainloader_mode", "reload_dataloaders_every_epoch", "distributed_backend",
                     "prepare_data_per_node", "benchmark", "model_registry",
                     "enable_autolog_hparams", "not_even_of_lightning"):  # fmt: skip
        with pytest.raises(ConfigError):
            sg.Trainer(**{argument: 1})
        assert len(found(in_a_trainer(f"{argument}=1"))) == 2, argument


def test_arguments_in_a_dict_are_looked_at():
    script = "import pytorch_lightning as pl\noptions = dict(gpus=1)\npl.Trainer(logger=False, **options)\n"
    assert (2, "gpus=1", 'accelerator="gpu", devices=1') in found(script)

    script = "import pytorch_lightning as pl\npl.Trainer(logger=False, **vars(args))\n"
    assert [old for _, old, _ in found(script, "check")] == ["Trainer(**vars(args))"]


def test_a_constant_is_followed():
    script = 'from pytorch_lightning import Trainer\nKIND = "ddp_cpu"\nTrainer(strategy=KIND, logger=False)\n'

    assert news(script) == ['accelerator="cpu", strategy="ddp_spawn"']


def test_fp16_on_a_cpu_and_the_default_logger_are_to_be_checked():
    checks = found("import pytorch_lightning as pl\npl.Trainer(precision=16)", "check")

    assert [old for _, old, _ in checks] == ["Trainer() without logger=", "precision=16"]


# --- Callbacks, loggers, strategies ------------------------------------------------------------------------------


def test_options_without_a_name_get_one_where_the_plugin_needs_it():
    head = "from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint\n"

    assert news(head + 'EarlyStopping("val_loss", 0.1)\n') == []
    assert news(head + 'ModelCheckpoint("folder", "{epoch}", "val_loss", True)\n') == []
    more = 'ModelCheckpoint("folder", "{epoch}", "val_loss", True, True, 1, False)\n'
    assert news(head + more) == ["ModelCheckpoint(name=value, ...)"]


def test_options_are_compared_with_the_plugin_that_is_installed():
    script = (
        "from pytorch_lightning.callbacks import ModelCheckpoint\n"
        "ModelCheckpoint(monitor='a', save_top_k=2, mode='max', period=3, no_such=1)\n"
    )

    assert news(script) == ["every_n_epochs=", ""]
    assert sum("ModelCheckpoint(" in old for _, old, _ in found(script, "same")) == 3


def test_comm_hooks_of_torchs_may_stay():
    script = (
        "from lightning.pytorch.strategies import DDPStrategy\nDDPStrategy(static_graph=True, ddp_comm_hook=hook)\n"
    )

    assert news(script) == []


def test_a_callback_of_ones_own_stays():
    script = (
        "import lightning as L\nclass Mine(L.Callback):\n"
        "    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, unused=0): pass\n"
        "    def on_validation_epoch_start(self, trainer, pl_module): pass\n"
        "    def helper(self): pass\n"
    )

    assert [new for line, _, new in found(script) if line > 2] == []


# --- Modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def validation_epoch_end(self, outputs): pass", "def on_validation_epoch_end(self)"),
        ("def training_epoch_end(self, outs): pass", "def on_train_epoch_end(self)"),
        ("def training_step(self, batch, batch_idx, optimizer_idx): pass", "automatic_optimization = False"),
        ("def on_train_batch_end(self, o, b, i, d): pass", "def on_train_batch_end(self, outputs, batch, batch_idx)"),
        ("def training_end(self, output): pass", "def training_step_end(self, output)"),
        ("def get_progress_bar_dict(self): pass", "self.log(name, value, prog_bar=True)"),
    ],
)
def test_methods_that_nobody_would_call(old, new):
    assert news(in_a_module(old)) == [new]


def test_methods_that_are_called_stay():
    body = "\n".join(
        [
            "def training_step(self, batch, batch_idx): self.log('a', 1, prog_bar=True, sync_dist=True)",
            "def validation_step(self, batch, batch_idx, dataloader_idx=0): return self.hparams.width",
            "def training_step_end(self, output): return output",
            "def configure_sharded_model(self): pass",
            "def on_before_backward(self, loss): pass",
            "def on_train_batch_start(self, a, b): return -1",
            "def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None): optimizer.step(optimizer_closure)",
            "def configure_callbacks(self): return self.clip_gradients(None)",
            "def on_train_epoch_end(self): print(self.current_epoch, self.global_step, self.trainer.callback_metrics)",
            "def on_train_batch_end(self, outputs, batch, batch_idx): self.toggle_optimizer(self.optimizers())",
            "def train_dataloader(self): return self.trainer.world_size",
            "def configure_optimizers(self): return [opt], [{'scheduler': s, 'interval': 'step'}]",
        ]
    )

    assert news(in_a_module(body)) == []


@pytest.mark.parametrize(
    "returned", ["[a, b]", "a, b", "[a, b], [s]", "[{'optimizer': a}, {'optimizer': b, 'frequency': 2}]"]
)
def test_several_optimizers_are_stepped_by_hand(returned):
    news_of = news(in_a_module(f"def configure_optimizers(self):\n    return {returned}"))
    assert "automatic_optimization = False" in news_of

    by_hand = f"automatic_optimization = False\ndef configure_optimizers(self):\n    return {returned}"
    assert not [old for _, old, _ in found(in_a_module(by_hand)) if "optimizers" in old.split()]


@pytest.mark.parametrize("returned", ["a", "[a]", "[a], [s]", "[a], []", "{'optimizer': a, 'lr_scheduler': s}"])
def test_one_optimizer_stays(returned):
    assert news(in_a_module(f"def configure_optimizers(self):\n    return {returned}")) == []


def test_a_monitor_beside_the_optimizer_stays():
    script = in_a_module(
        "def configure_optimizers(self):\n    return {'optimizer': a, 'lr_scheduler': s, 'monitor': 'x'}"
    )

    assert news(script) == []


def test_what_a_module_has_no_more():
    script = in_a_module(
        "def on_fit_start(self):\n    self.logger.log_metrics({})\n    self.all_gather(self.on_gpu)\n    self.print(1)"
    )

    assert news(script) == ['self.device.type == "cuda"']


def test_an_attribute_that_the_module_makes_is_its_own():
    assert news(in_a_module("def __init__(self):\n    self.on_gpu = 1\ndef forward(self): return self.on_gpu")) == []


def test_devices_by_name_are_to_be_checked():
    body = "def training_step(self, batch):\n    x.cuda(); x.to('cuda:0'); x.to(device); x.to(self.device); x.to(torch.float16)"

    assert [old for _, old, _ in found(in_a_module(body), "check")] == ["x.cuda()", "x.to('cuda:0')", "x.to(device)"]


def test_a_class_whose_base_is_elsewhere_is_known_by_its_methods():
    script = (
        "from mine import Base\nclass Net(Base):\n"
        "    def training_step(self, batch): pass\n"
        "    def configure_optimizers(self): pass\n"
        "    def test_epoch_end(self, outputs): pass\n"
    )

    assert found(script) == [(5, "def test_epoch_end(self, outputs)", "def on_test_epoch_end(self)")]


# --- The trainer at work -----------------------------------------------------------------------------------------


def at_work(body):
    return f"import pytorch_lightning as pl\nrunner = pl.Trainer(logger=False)\n{body}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("runner.tune(model)", 'callbacks=["learning_rate_finder", "batch_size_finder"]'),
        ("runner.tuner.lr_find(model)", 'callbacks=["learning_rate_finder", "batch_size_finder"]'),
        ("runner.fit(model, train_dataloader=a)", "train_dataloaders="),
        ("runner.test(model, test_dataloaders=a)", "dataloaders="),
        ("runner.strategy.barrier()", "trainer.run.collectives.barrier()"),
        ("pl.Trainer.from_argparse_args(args)", "stratagem.Trainer.from_cli()"),
        ("os.environ['PL_TRAINER_MAX_EPOCHS'] = '1'", '"STRATAGEM_TRAINER_MAX_EPOCHS"'),
        ("Net.load_from_checkpoint(path, hparams_file='a.yaml')", "arguments of __init__ by name"),
        ("pl.seed_everything(1, True)", "seed_everything(1, workers=...)"),
    ],
)
def test_calls_that_moved(old, new):
    assert new in [n for line, _, n in found(at_work(old)) if line == 3]


def test_calls_that_stay():
    body = "runner.fit(model, datamodule=d, ckpt_path='last')\nrunner.validate(model, loader)\nrunner.mine = 1\nrunner.mine"

    assert [row for row in found(at_work(body)) if row[0] > 2] == []


def test_a_test_without_a_model_uses_other_weights():
    assert [new for _, _, new in found(at_work("runner.test()"), "check")] == ['trainer.test(ckpt_path="best")']
    assert found(at_work("runner.test(ckpt_path='best')\nrunner.test(model)"), "check") == []


def evaluated_after_fit(call):
    """Run `call` after a fit with a data module, as the advice says."""

    class Data(sg.DataModule):
        def train_dataloader(self):
            return joined_batches(2, 8)

        val_dataloader = test_dataloader = train_dataloader

    class Measured(Net):
        def validation_step(self, batch, batch_idx):
            self.log("loss", self(batch[0]).mean())

        test_step = validation_step

    trainer = sg.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit(Measured(), datamodule=Data())
    return eval(call, {"trainer": trainer})


@pytest.mark.parametrize("method", ["validate", "test"])
def test_the_advice_for_a_test_without_a_model_works_after_a_fit_with_a_data_module(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [new] = [new for _, _, new in found(at_work(f"runner.{method}()"), "check")]

    assert "loss" in evaluated_after_fit(new)[0]


#: What `training_step` returns and the event does with it, and the advice.
OUTPUTS = [
    ("return loss", "self.total += outputs['loss']", ("change", "outputs")),
    ("return loss", "x = outputs.get('loss')", ("change", "outputs")),
    ("return {'loss': loss}", "self.total += outputs['loss']", None),
    ("result = dict(loss=loss)\n        return result", "self.total += outputs['loss']", None),
    ("return loss", "self.total += outputs", None),
    ("return loss", "x = outputs['loss'] if isinstance(outputs, dict) else outputs", None),
]


@pytest.mark.parametrize(("returned", "use", "advice"), OUTPUTS)
def test_the_outputs_of_a_batch_are_what_the_step_returned(returned, use, advice):
    script = (
        "import pytorch_lightning as pl\nclass Net(pl.LightningModule):\n    def training_step(self, batch, batch_idx):\n"
        f"        {returned}\n    def on_train_batch_end(self, outputs, batch, batch_idx):\n        {use}\n"
    )
    rows = [
        (kind, new) for kind in ("change", "check") for _, old, new in found(script, kind) if old.startswith("outputs")
    ]

    assert rows == ([advice] if advice else [])


@pytest.mark.parametrize("name", ["outputs", "out"])
def test_a_callback_does_not_know_what_the_step_returned(name):
    script = (
        "import pytorch_lightning as pl\nclass Watch(pl.Callback):\n"
        f"    def on_train_batch_end(self, trainer, pl_module, {name}, batch, batch_idx):\n        print({name}['loss'])\n"
    )
    [(line, old, new)] = [row for row in found(script, "check") if row[0] == 4]

    assert old == f"{name}['loss']"
    assert new == f'{name}["loss"] if isinstance({name}, dict) else {name}'


@pytest.mark.parametrize(
    "script",
    [
        "if trainer.is_global_zero:\n    trainer.save_checkpoint('a')",
        "if self.trainer.global_rank == 0 and verbose:\n    self.trainer.save_checkpoint('a')",
        "def save(trainer):\n    if trainer.global_rank != 0:\n        return\n    trainer.save_checkpoint('a')",
        "def save(trainer):\n    if not trainer.is_global_zero:\n        return\n    trainer.save_checkpoint('a')",
        "@pl.utilities.rank_zero_only\ndef save(trainer):\n    trainer.save_checkpoint('a')",
        "if trainer.is_global_zero:\n    pass\nelse:\n    trainer.strategy.barrier()",
    ],
)
def test_what_one_rank_does_alone_is_found(script):
    assert [new for _, old, new in found(at_work(script)) if " under " in old] == ["all ranks call it"]


@pytest.mark.parametrize(
    "script",
    [
        "if trainer.is_global_zero:\n    print('done')\ntrainer.save_checkpoint('a')",
        "if epoch == 0:\n    trainer.save_checkpoint('a')",
        "if trainer.is_global_zero:\n    model.test()",
    ],
)
def test_calls_of_all_ranks_are_not_reported_as_a_deadlock(script):
    assert [old for _, old, _ in found(at_work(script)) if " under " in old] == []


# --- The command -------------------------------------------------------------------------------------------------


def test_the_exit_code_tells_whether_something_must_change(tmp_path, capsys):
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text("import lightning as L\n")
    new.write_text("import stratagem as sg\n\n\nclass Net(sg.Module):\n    pass\n")

    assert main(["migrate", str(new)]) == 0
    assert capsys.readouterr().out == "nothing to change, nothing to check\n"
    assert main(["migrate", str(new), str(old)]) == 1
    assert f"  {old}:1: import lightning as L -> import stratagem as sg\n" in capsys.readouterr().out


def test_same_is_shown_on_demand_and_json_is_for_programs(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("from lightning.pytorch import Trainer\nTrainer(max_epochs=3, logger=False)\n")

    main(["migrate", str(script)])
    assert "max_epochs" not in capsys.readouterr().out
    main(["migrate", str(script), "--all"])
    assert f"{script}:2: max_epochs=3\n" in capsys.readouterr().out
    assert main(["migrate", str(script), "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["line"], row["certainty"], row["new"]) == (1, "change", "from stratagem import Trainer")


def test_a_folder_means_the_scripts_in_it(tmp_path, capsys):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("import lightning")

    assert main(["migrate", str(tmp_path)]) == 1
    assert "a.py:1:" in capsys.readouterr().out


def test_the_script_is_not_run(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(f"import lightning\nopen({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(7)\n")

    assert main(["migrate", str(script)]) == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("absent.py", None, "cannot be read (No such file or directory); expected a Python script."),
        ("two.py", b"print 'x'", "is not Python ("),
        ("bytes.py", b"\x00\xff\xfe", "; expected a Python 3 script."),
        ("deep.py", b"(" * 100000, "; expected a Python 3 script."),
        ("book.ipynb", b"{}", "is not a notebook ('cells' is missing); expected version 4, in UTF-8."),
        ("empty", "folder", "is a folder without a .py file"),
    ],
)
def test_other_files_than_scripts_are_an_error(tmp_path, capsys, name, content, sentence):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)

    assert main(["migrate", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stratagem: {path} ")
    assert sentence in line


# --- The page ----------------------------------------------------------------------------------------------------


def block(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]


@pytest.mark.slow
def test_the_old_script_of_the_page_must_change_and_the_new_one_runs(tmp_path, capsys):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(block("py"))
    after.write_text(block("python"))

    assert main(["migrate", str(before)]) == 1
    said = capsys.readouterr().out
    for word in ("LightningModule", "validation_epoch_end", "gpus=-1", "accelerator='ddp'",
                 "progress_bar_refresh_rate=0", "is_global_zero"):  # fmt: skip
        assert word in said
    assert main(["migrate", str(after)]) == 0
    assert capsys.readouterr().out.startswith("nothing to change, nothing to check")
    done = scripts.run(
        [sys.executable, "after.py"], cwd=tmp_path, capture_output=True, text=True, timeout=360, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "last.ckpt").exists()


def test_the_table_of_the_page_says_what_the_command_says():
    rows = re.findall(r"^\| `(Trainer\(\w+=[^|]*\))` \| `([^|]*)` \|$", PAGE.read_text(), re.MULTILINE)

    assert len(rows) > 15
    for old, new in rows:
        assert new in news(f"from pytorch_lightning import Trainer\n{old[:-1]}, logger=False)"), old


def test_what_the_page_calls_the_same_exists():
    same = PAGE.read_text().partition("The same:")[2].partition("\n\n")[0]
    known = {
        *installed.module_attributes(), *installed.data_attributes(), *dir(sg.Trainer), *defaults_of_trainer(),
        "callback_metrics", "seed_everything", "self",
    }  # fmt: skip
    strategies = {"ddp", "ddp_spawn", "ddp_notebook", "fsdp"}
    for name in re.findall(r"`(?:self\.|trainer\.|super\(\)\.)?(\w+)", same):
        assert name in known | strategies or name in ("limit_", "on_"), name
    assert all(installed.has_plugin("strategy", name) for name in strategies)


def test_what_the_page_calls_missing_is():
    missing = PAGE.read_text().partition("## What is missing")[2]

    named = re.findall(r"`(min_steps|reload_dataloaders_every_n_epochs|benchmark|model_registry)`", missing)
    assert named
    for argument in named:
        assert argument not in installed.trainer_arguments()


def test_a_training_loader_that_does_not_shuffle_is_reported():
    head = "import pytorch_lightning as pl\nfrom torch.utils.data import DataLoader\nclass D(pl.LightningDataModule):\n"
    body = "    def {name}(self):\n        return DataLoader(self.data, batch_size=4{more})\n"

    def told(name, more=""):
        return "DataLoader(..., shuffle=True)" in news(head + body.format(name=name, more=more), "check")

    assert told("train_dataloader")
    assert told("train_dataloader", ", shuffle=False")
    assert not told("train_dataloader", ", shuffle=True")
    assert not told("train_dataloader", ", sampler=self.sampler")
    assert not told("train_dataloader", ", **self.options")
    assert not told("val_dataloader")
