"""`stratagem migrate --diff` and `--write` change what is certain, keep everything else, and tell what is left."""

from __future__ import annotations

import importlib
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from programs import scripts
from stratagem.cli import main
from stratagem_migrate import examine
from stratagem_migrate.rewriting import references, rewrite
from stratagem_migrate.source import Elsewhere, Source


def rewritten(script):
    """Return the rewritten script; a second rewriting must change nothing."""
    once = rewrite(Source(Path("train.py"), script.encode()))
    assert rewrite(Source(Path("train.py"), once.encode())) == once
    return once


def trainer_with(arguments, before="", after=""):
    """Return the arguments of a rewritten Trainer, and what stands around it."""
    script = f"import torch\nimport pytorch_lightning as pl\n{before}trainer = pl.Trainer({arguments})\n{after}"
    return rewritten(script).partition("sg.Trainer(")[2].removesuffix("\n").removesuffix(")")


def in_a_module(body):
    return "import lightning as L\n\n\nclass Net(L.LightningModule):\n" + textwrap.indent(body, "    ")


def class_body(script):
    return textwrap.dedent(rewritten(script).partition("(sg.Module):\n")[2])


# --- Imports -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import lightning as L\nL.Trainer()", "import stratagem as sg\nsg.Trainer()"),
        ("import lightning.pytorch as pl\npl.Trainer()", "import stratagem as sg\nsg.Trainer()"),
        ("from lightning import pytorch as pl\npl.Trainer()", "import stratagem as sg\nsg.Trainer()"),
        ("import pytorch_lightning\npytorch_lightning.Trainer()", "import stratagem\nstratagem.Trainer()"),
        ("import pytorch_lightning as pl, os\npl.Trainer()", "import stratagem as sg\nimport os\nsg.Trainer()"),
        (
            "from pytorch_lightning import Trainer, LightningModule as M",
            "from stratagem import Trainer, Module as M",
        ),
        (
            "from pytorch_lightning import LightningModule\nclass A(LightningModule): pass",
            "from stratagem import Module\nclass A(Module): pass",
        ),
        (
            "from torch.nn import Module\nfrom pytorch_lightning import LightningModule\nclass A(LightningModule): pass",
            "from torch.nn import Module\nfrom stratagem import Module as LightningModule\nclass A(LightningModule): pass",
        ),
        (
            "from lightning.pytorch.callbacks.early_stopping import EarlyStopping as Stop",
            "from stratagem.callbacks import EarlyStopping as Stop",
        ),
        (
            "import pytorch_lightning as pl\npl.callbacks.ModelCheckpoint()",
            "from stratagem.callbacks import ModelCheckpoint\nModelCheckpoint()",
        ),
        (
            "from pytorch_lightning import callbacks as cb\ncb.Timer()",
            "from stratagem.callbacks import Timer\nTimer()",
        ),
        (
            "import pytorch_lightning as pl\nTimer = 1\npl.callbacks.Timer()",
            "import stratagem.callbacks\nTimer = 1\nstratagem.callbacks.Timer()",
        ),
        (
            "import pytorch_lightning as pl\nsg = 1\npl.Trainer()",
            "import stratagem\nsg = 1\nstratagem.Trainer()",
        ),
        ("from pytorch_lightning import *\nTrainer()", "from stratagem import Trainer\nTrainer()"),
        (
            "try:\n    import lightning.pytorch as pl\nexcept ImportError:\n    import pytorch_lightning as pl\npl.Trainer()",
            "import stratagem as sg\ntry:\n    pass\nexcept ImportError:\n    pass\nsg.Trainer()",
        ),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightning.pytorch import Trainer\n"
            "def run(trainer: 'Trainer'): pass",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from stratagem import Trainer\n"
            "def run(trainer: 'Trainer'): pass",
        ),
        (
            "import pytorch_lightning as pl\ndef run(trainer: 'pl.Trainer', other: 'list[pl.LightningModule]'): pass",
            "import stratagem as sg\ndef run(trainer: 'sg.Trainer', other: 'list[sg.Module]'): pass",
        ),
        (
            "from pytorch_lightning.utilities.types import STEP_OUTPUT\ndef f() -> STEP_OUTPUT: pass",
            "from typing import Any\ndef f() -> Any: pass",
        ),
        (
            "def main():\n    from pytorch_lightning import Trainer\n    Trainer()",
            "def main():\n    from stratagem import Trainer\n    Trainer()",
        ),
    ],
)  # fmt: skip
def test_imports(old, new):
    assert rewritten(old) == new


@pytest.mark.parametrize(
    "script",
    [
        "from lightning.pytorch.utilities import GradClipAlgorithmType\nGradClipAlgorithmType()",
        "import pytorch_lightning as pl\npl.utilities.GradClipAlgorithmType()",
        "from pytorch_lightning.loggers import CometLogger",
        "from pytorch_lightning.callbacks import ModelCheckpoint\nclass Mine(ModelCheckpoint): pass",
        "from pytorch_lightning.loggers import Logger\nclass Mine(Logger): pass",
        "import pytorch_lightning as pl\nprint(pl.__version__)",
        "import pytorch_lightning as pl\npl = None",
        "from pytorch_lightning.metrics import Accuracy\nAccuracy()",
        "from transformers import Trainer\nTrainer(gpus=1)",
    ],
)
def test_what_has_no_counterpart_is_left_alone(script):
    assert rewritten(script) == script


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "import pytorch_lightning as pl; import torch  # both\npl.Trainer()\n",
            "import stratagem as sg\nimport torch  # both\nsg.Trainer()\n",
        ),
        (
            "if True:\n    from pytorch_lightning import Trainer; x = 1; y = 2\n    Trainer()\n",
            "if True:\n    from stratagem import Trainer\n    x = 1; y = 2\n    Trainer()\n",
        ),
        (
            "import stratagem as sg\nimport torch\nt = sg.Trainer(benchmark=True); t.fit(m)\n",
            "import stratagem as sg\nimport torch\ntorch.backends.cudnn.benchmark = True\nt = sg.Trainer()\nt.fit(m)\n",
        ),
    ],
    ids=["imports", "in a block", "added line"],
)
def test_statements_of_the_same_line_stay(old, new):
    assert rewritten(old) == new


def test_an_import_stays_for_what_is_left_of_it():
    script = "import pytorch_lightning as pl\npl.Trainer()\npl.utilities.GradClipAlgorithmType()\n"

    assert rewritten(script) == (
        "import pytorch_lightning as pl\nimport stratagem as sg\nsg.Trainer()\npl.utilities.GradClipAlgorithmType()\n"
    )


def test_comments_and_blank_lines_stay():
    script = (
        "#!/usr/bin/env python\n# a licence\n\n'''Docs.'''\n\n# why\nfrom pytorch_lightning import (  # all\n"
        "    Trainer,  # one\n)  # end\nx = 1   # odd   spaces\n\n\n\nTrainer( max_epochs = 1 )\n"
    )

    new = rewritten(script)

    assert all(comment in new for comment in ("# a licence", "# why", "# all", "# one", "# end", "1   # odd   spaces"))
    assert new.endswith("\n\n\n\nTrainer( max_epochs = 1 )\n")


# --- The Trainer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gpus=2", 'accelerator="gpu", devices=2'),
        ("gpus=0", 'accelerator="cpu"'),
        ("gpus=[0, 1], max_epochs=1", 'accelerator="gpu", devices=[0, 1], max_epochs=1'),
        ("gpus=1 if torch.cuda.is_available() else 0",
         'accelerator="gpu" if torch.cuda.is_available() else "cpu", devices=1'),
        ('gpus=2, accelerator="ddp"', 'accelerator="gpu", devices=2, strategy="ddp"'),
        ('gpus=2, distributed_backend="ddp"', 'accelerator="gpu", devices=2, strategy="ddp"'),
        ('accelerator="ddp_cpu", num_processes=2', 'accelerator="cpu", strategy="ddp_spawn", devices=2'),
        ("num_processes=1", ""),
        ("tpu_cores=None, gpus=None", 'accelerator="cpu"'),
        ('strategy="fsdp_native"', 'strategy="fsdp"'),
        ("replace_sampler_ddp=False", "use_distributed_sampler=False"),
        ("checkpoint_callback=False", "enable_checkpointing=False"),
        ('checkpoint_callback=pl.callbacks.ModelCheckpoint(monitor="a")', 'callbacks=[ModelCheckpoint(monitor="a")]'),
        ('callbacks=[mine], checkpoint_callback=pl.callbacks.ModelCheckpoint()', "callbacks=[mine, ModelCheckpoint()]"),
        ("early_stop_callback=True", 'callbacks=[{"name": "early_stopping", "monitor": "val_loss"}]'),
        ('weights_summary="full"', 'callbacks=[{"name": "model_summary", "max_depth": -1}]'),
        ("weights_summary=None", "enable_model_summary=False"),
        ("progress_bar_refresh_rate=0", "enable_progress_bar=False"),
        ("progress_bar_refresh_rate=20, max_epochs=2", "max_epochs=2"),
        ("track_grad_norm=2, log_gpu_memory='all'", 'callbacks=["device_stats", "gradient_norms"]'),
        ("terminate_on_nan=False, amp_backend='native'", ""),
        ('plugins=["native_amp"], precision=16', "precision=16"),
        ('plugins="ddp_sharded"', 'strategy="ddp_sharded"'),
        ("plugins=pl.plugins.DDPPlugin(static_graph=True), accelerator='ddp'",
         "strategy=DDPStrategy(static_graph=True)"),
        ("strategy=pl.strategies.DDPSpawnStrategy(static_graph=True)",
         'strategy=DDPStrategy(static_graph=True, start_method="spawn")'),
        ("strategy=pl.strategies.DDPStrategy(find_unused_parameters=True)",
         "strategy=DDPStrategy(find_unused_parameters=True)"),
        ("profiler=pl.profiler.SimpleProfiler()", 'profiler="simple"'),
        ("accelerator=pl.accelerators.CPUAccelerator()", 'accelerator="cpu"'),
        ("profiler=True, gradient_clip_val=0", 'profiler="simple"'),
        ("max_time={'hours': 2}", "max_time=timedelta(hours=2)"),
        ("max_nb_epochs=3", "max_epochs=3"),
    ],
)  # fmt: skip
def test_arguments(old, new):
    assert trainer_with(old) == new


@pytest.mark.parametrize(
    "arguments",
    [
        "gpus=args.gpus", 'gpus="2"', 'gpus=2, accelerator="cpu"', "num_processes=n", "**options", "gpus=2, **options",
        "checkpoint_callback=mine", "early_stop_callback=mine", "weights_save_path='a'", "amp_level='O2'",
        "auto_lr_find=True", "reload_dataloaders_every_n_epochs=1", "plugins=[MyPlugin()]", "plugins='unknown'",
        "truncated_bptt_steps=2", "resume_from_checkpoint='a.ckpt'", "logger=mine", "strategy='unknown'",
    ],
)  # fmt: skip
def test_arguments_that_only_their_author_can_decide_stay(arguments):
    assert trainer_with(arguments) == arguments


def test_a_checkpoint_to_resume_from_goes_to_fit():
    after = "trainer.fit(model, loader)\n\n\ndef report(trainer):\n    pass\n"

    assert trainer_with('max_epochs=2, resume_from_checkpoint="a.ckpt"', after=after) == (
        "max_epochs=2)\ntrainer.fit(model, loader, ckpt_path='a.ckpt')\n\n\ndef report(trainer):\n    pass"
    )


def test_tuning_becomes_callbacks():
    after = "# find them\ntrainer.tune(model)  # now\ntrainer.fit(model)\n"

    assert trainer_with("auto_lr_find=True, auto_scale_batch_size='binsearch'", after=after) == (
        'callbacks=[{"name": "batch_size_finder", "mode": \'binsearch\'}, "learning_rate_finder"])\n'
        "# find them\n# now\ntrainer.fit(model"
    )


def test_a_setting_of_torch_is_set_before_the_trainer_is_made():
    script = "import pytorch_lightning as pl\n# fast\ntrainer = pl.Trainer(benchmark=True)\n"

    assert rewritten(script) == (
        "import torch\nimport stratagem as sg\n# fast\ntorch.backends.cudnn.benchmark = True\ntrainer = sg.Trainer()\n"
    )


def test_arguments_keep_their_lines_and_comments():
    script = textwrap.dedent("""\
        import pytorch_lightning as pl

        trainer = pl.Trainer(
            gpus=-1,  # all of them
            max_epochs=3,
            progress_bar_refresh_rate=0,
            track_grad_norm=2,
        )
        """)

    assert rewritten(script) == textwrap.dedent("""\
        import stratagem as sg

        trainer = sg.Trainer(
            accelerator="gpu",
            devices=-1,  # all of them
            max_epochs=3,
            enable_progress_bar=False,
            callbacks=["gradient_norms"],
        )
        """)


# --- Callbacks, loggers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("DeviceStatsMonitor(True)", "DeviceStats(cpu_stats=True)"),
        ("ModelCheckpoint(period=2)", "ModelCheckpoint(every_n_epochs=2)"),
        ("ModelCheckpoint(period=2, every_n_epochs=3)", "ModelCheckpoint(period=2, every_n_epochs=3)"),
        ("ModelCheckpoint(filepath='a/b')", "ModelCheckpoint(filepath='a/b')"),
        ("ModelCheckpoint(train_time_interval=None)", "ModelCheckpoint("),
        ('EarlyStopping("val_loss", 0.1)', 'EarlyStopping("val_loss", 0.1)'),
    ],
)
def test_options_of_callbacks(old, new):
    script = f"from pytorch_lightning.callbacks import DeviceStatsMonitor, EarlyStopping, ModelCheckpoint\nx = {old}\n"

    assert rewritten(script).partition("x = ")[2].startswith(new)


def test_hooks_of_callbacks_stay():
    script = textwrap.dedent("""\
        import lightning as L


        class Mine(L.Callback):
            def on_train_start(self, trainer: "L.Trainer", pl_module) -> None:  # first
                super().on_train_start(trainer, pl_module)
                pl_module.pl_module = f"{pl_module.x}"

            def on_train_batch_end(self, trainer, net, outputs, batch, batch_idx, unused=0):
                net.log("a", 1.0, pl_module=1)

            def on_train_epoch_end(self, trainer, pl_module):
                super().on_train_epoch_end(trainer, pl_module)

            def helper(self, pl_module):
                return pl_module
        """)

    assert rewritten(script) == script.replace("import lightning as L", "import stratagem as sg").replace("L.", "sg.")


@pytest.mark.parametrize(
    "method",
    [
        "def on_train_start(self, *args): pass",
        "def on_train_batch_start(self, trainer, pl_module, batch, batch_idx): return -1",
        "def on_save_checkpoint(self, trainer, pl_module, checkpoint): return {'a': 1}",
        "def on_train_end(self, trainer, pl_module):\n        module = 1\n        pl_module.x = module",
        "def teardown(self, trainer, pl_module, stage): pass",
        "def on_epoch_end(self, trainer, pl_module): pass",
        "def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx):\n"
        "        print(dataloader_idx)",
    ],
)
def test_hooks_that_would_do_something_else_stay(method):
    script = f"from stratagem import Callback\n\n\nclass Mine(Callback):\n    {method}\n"

    assert rewritten(script) == script


# --- Modules -----------------------------------------------------------------------------------------------------


def test_outputs_of_validation_are_collected():
    body = textwrap.dedent("""\
        def validation_step(self, batch, batch_idx):
            return batch.sum()

        # at the end
        def validation_epoch_end(self, outs):
            self.log("worst", max(outs))
        """)

    assert class_body(in_a_module(body)) == textwrap.dedent("""\
        def validation_step(self, batch, batch_idx):
            return batch.sum()

        def on_validation_epoch_start(self):
            self.validation_step_outputs = []

        def on_validation_batch_end(self, outputs, batch, batch_idx):
            if outputs is not None:
                self.validation_step_outputs.append(outputs)

        # at the end
        def on_validation_epoch_end(self):
            outs, self.validation_step_outputs = self.validation_step_outputs, []
            self.log("worst", max(outs))
        """)


def test_a_hook_that_exists_collects_the_outputs():
    body = textwrap.dedent("""\
        def test_step(self, batch, batch_idx):
            return batch.sum()

        def on_test_epoch_start(self):
            '''Docs.'''
            self.seen = 0

        def on_test_batch_end(self, result, batch, batch_idx, dataloader_idx=0):
            self.seen += 1

        def test_epoch_end(self, outputs):
            print(outputs)
        """)

    new = class_body(in_a_module(body))

    assert "    '''Docs.'''\n    self.test_step_outputs = []\n    self.seen = 0\n" in new
    assert "    if result is not None:\n        self.test_step_outputs.append(result)\n    self.seen += 1\n" in new


@pytest.mark.parametrize(
    "body",
    [
        "def validation_epoch_end(self, outputs):\n    pass\n",
        "def validation_step(self, b, i, dataloader_idx):\n    return b\n\ndef validation_epoch_end(self, outputs):\n    pass\n",
        "def validation_step(self, b, i):\n    return b\n\ndef validation_epoch_end(self, outputs):\n    return {'log': 1}\n",
        "def validation_step(self, b, i):\n    return b\n\ndef validation_epoch_end(self, outputs):\n    pass\n\n"
        "test_epoch_end = validation_epoch_end\n",
        "def validation_step(self, b, i):\n    return b\n\ndef validation_epoch_end(self, outputs):\n    pass\n\n"
        "def on_validation_epoch_end(self):\n    pass\n",
        "def on_epoch_end(self):\n    pass\n",
        "def training_step(self, batch, batch_idx, optimizer_idx):\n    pass\n",
        "def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_idx, closure):\n    print(optimizer_idx)\n",
    ],
)
def test_methods_that_need_their_author_stay(body):
    assert class_body(in_a_module(body)) == body


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_idx, optimizer_closure, on_tpu, "
         "using_native_amp, using_lbfgs): optimizer.step(optimizer_closure)",
         "def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure): optimizer.step(optimizer_closure)"),
        ("def lr_scheduler_step(self, scheduler, optimizer_idx, metric): scheduler.step()",
         "def lr_scheduler_step(self, scheduler, metric): scheduler.step()"),
        ("def on_train_batch_end(self, outputs, batch, batch_idx, dataloader_idx): pass",
         "def on_train_batch_end(self, outputs, batch, batch_idx): pass"),
        ("def training_end(self, output): return output", "def training_step_end(self, output): return output"),
        ("def f(self): self.log('a', 1, True, False)", "def f(self): self.log('a', 1, prog_bar=True, logger=False)"),
        ("def f(self): self.log('a', 1, tbptt_pad_token=0)", "def f(self): self.log('a', 1)"),
        ("def f(self): return self.datamodule", "def f(self): return self.trainer.datamodule"),
        ("def f(self): return not self.on_gpu", 'def f(self): return not (self.device.type == "cuda")'),
        ("def __init__(self, hparams):\n    self.hparams = hparams",
         "def __init__(self, hparams):\n    self.save_hyperparameters(hparams)"),
        ("def f(self): self.trainer.strategy.barrier('x')", "def f(self): self.trainer.run.collectives.barrier()"),
        ("def f(self): return self.optimizers(use_pl_optimizer=True)", "def f(self): return self.optimizers()"),
        ("def on_fit_start(self): super().on_fit_start()", "def on_fit_start(self): super().on_fit_start()"),
    ],
)  # fmt: skip
def test_methods_and_attributes(old, new):
    assert class_body(in_a_module(old)) == new


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("trainer.fit(model, train_dataloader=a)", "trainer.fit(model, train_dataloaders=a)"),
        ("trainer.test(model, test_dataloaders=a)", "trainer.test(model, dataloaders=a)"),
        ("Net.load_from_checkpoint(checkpoint_path=p, weights_only=True)", "Net.load_from_checkpoint(checkpoint_path=p)"),
        ("Net.load_from_checkpoint(p, map_location=d)", "Net.load_from_checkpoint(p, map_location=d)"),
        ("pl.seed_everything(1, True)", "sg.seed_everything(1, workers=True)"),
        ("os.environ['PL_GLOBAL_SEED']", "os.environ['STRATAGEM_SEED']"),
        ("if trainer.is_global_zero:  # once\n    trainer.save_checkpoint('a')",
         "# once\ntrainer.save_checkpoint('a')"),
        ("if trainer.is_global_zero:\n    print(1)\n    trainer.save_checkpoint('a')",
         "if trainer.is_global_zero:\n    print(1)\n    trainer.save_checkpoint('a')"),
        ("trainer.get_model()", "trainer.module"),
    ],
)  # fmt: skip
def test_calls(old, new):
    assert rewritten(f"import pytorch_lightning as pl\npl.Trainer()\n{old}\n").endswith(f"sg.Trainer()\n{new}\n")


def test_keys_of_hydra_are_not_attributes_of_a_trainer():
    script = "import stratagem as sg\nprint(cfg.trainer._target_)\n"

    assert examine(Source(Path("a.py"), script.encode())) == []


# --- The command -------------------------------------------------------------------------------------------------

OLD = "import pytorch_lightning as pl\n\ntrainer = pl.Trainer(gpus=0, logger=False)\ntrainer.fit(model)\n"
NEW = 'import stratagem as sg\n\ntrainer = sg.Trainer(accelerator="cpu", logger=False)\ntrainer.fit(model)\n'


@pytest.fixture
def project(tmp_path):
    """A folder under git, and a function that commits everything in it."""
    run = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*run, "init", "-q"], check=True)

    def commit():
        subprocess.run([*run, "add", "-A"], check=True)
        subprocess.run([*run, "commit", "-q", "-m", "all"], check=True)

    return tmp_path, commit


def test_a_diff_can_be_applied_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(OLD)

    assert main(["migrate", "--diff", "train.py"]) == 0
    said = capsys.readouterr().out
    assert Path("train.py").read_text() == OLD
    assert said.endswith("\nnothing left to change, nothing to check\n")
    diff = said.rpartition("\n\n")[0] + "\n"
    subprocess.run(["git", "apply", "-p0", "-"], input=diff, text=True, check=True)
    assert Path("train.py").read_text() == NEW


def test_files_are_written_and_a_second_time_nothing_changes(project, capsys):
    folder, commit = project
    (folder / "inner").mkdir()
    script = folder / "inner" / "train.py"
    script.write_text(OLD)
    commit()

    assert main(["migrate", "--write", str(folder)]) == 0
    assert capsys.readouterr().out == f"rewrote {script}\nnothing left to change, nothing to check\n"
    assert script.read_text() == NEW
    assert main(["migrate", "--write", str(folder)]) == 0  # not committed, but there is nothing to write
    assert capsys.readouterr().out == "nothing left to change, nothing to check\n"
    assert main(["migrate", str(folder)]) == 0


def test_what_git_cannot_restore_is_not_written(project, capsys):
    folder, commit = project
    first, second = folder / "a.py", folder / "b.py"
    first.write_text(OLD)
    second.write_text(OLD)
    commit()
    second.write_text(OLD + "# new\n")

    assert main(["migrate", "--write", str(folder)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stratagem: --write would change {second}, which has uncommitted changes; ")
    assert first.read_text() == OLD
    assert main(["migrate", "--write", "--force", str(folder)]) == 0
    assert second.read_text() == NEW + "# new\n"


def test_files_outside_a_repository_are_not_written(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(OLD)

    assert main(["migrate", "--write", str(script)]) == 1
    assert "which is not in a git repository; " in capsys.readouterr().err
    assert script.read_text() == OLD


def test_mode_line_endings_and_encoding_stay(tmp_path):
    script, link = tmp_path / "train.py", tmp_path / "link.py"
    content = ("# -*- coding: latin-1 -*-\n# café\n" + OLD + "x = 1").replace("\n", "\r\n")
    script.write_bytes(content.encode("latin-1"))
    script.chmod(0o750)
    link.symlink_to(script)

    assert main(["migrate", "--write", "--force", str(link)]) == 0
    assert script.read_bytes().decode("latin-1") == content.replace(
        OLD.replace("\n", "\r\n"), NEW.replace("\n", "\r\n")
    )
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.py", "train.py"]


def test_a_byte_order_mark_stays(tmp_path):
    script = tmp_path / "train.py"
    script.write_bytes(b"\xef\xbb\xbf" + OLD.encode())

    main(["migrate", "--write", "--force", str(script)])

    assert script.read_bytes() == b"\xef\xbb\xbf" + NEW.encode()


def test_a_file_that_cannot_be_read_is_reported_and_stays(tmp_path, capsys):
    broken, bytes_, good = tmp_path / "broken.py", tmp_path / "bytes.py", tmp_path / "good.py"
    broken.write_text("import lightning\nprint 'x'\n")
    bytes_.write_bytes(b"import lightning\nx = '\xff'\n")
    good.write_text(OLD)

    assert main(["migrate", "--write", "--force", str(tmp_path)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition(" is not Python")[0] for line in errors] == [f"stratagem: {broken}", f"stratagem: {bytes_}"]
    assert broken.read_text() == "import lightning\nprint 'x'\n"
    assert bytes_.read_bytes() == b"import lightning\nx = '\xff'\n"
    assert good.read_text() == NEW


def test_what_is_left_is_listed_with_the_lines_of_the_file(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import pytorch_lightning as pl\n\n\nclass Net(pl.LightningModule):\n"
        "    def validation_step(self, batch, batch_idx):\n        return batch\n\n"
        "    def validation_epoch_end(self, outputs):\n        pass\n\n\ntrainer = pl.Trainer(gpus=args.gpus)\n"
    )

    assert main(["migrate", "--diff", str(script)]) == 1
    said = capsys.readouterr().out
    assert f"left for you:\n  {script}:12: gpus=args.gpus -> " in said
    assert f"{script}:12: Trainer() without logger=" in said
    assert main(["migrate", "--write", "--force", str(script)]) == 1
    (line,) = [number for number, text in enumerate(script.read_text().splitlines(), 1) if "gpus" in text]
    said = capsys.readouterr().out
    assert line != 12
    assert f"left for you:\n  {script}:{line}: gpus=args.gpus -> " in said
    assert f"{script}:{line}: Trainer() without logger=" in said


def test_environments_and_hidden_folders_are_not_touched(tmp_path):
    for folder in (".venv", "env", "node_modules"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(OLD)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "train.py").write_text(OLD)

    main(["migrate", "--write", "--force", str(tmp_path)])

    assert (tmp_path / "train.py").read_text() == NEW
    assert all((tmp_path / each / "a.py").read_text() == OLD for each in (".venv", "env", "node_modules"))


def test_a_class_of_another_file_is_known_by_its_base(tmp_path):
    (tmp_path / "base.py").write_text("import lightning as L\n\n\nclass Base(L.LightningModule):\n    pass\n")
    net = tmp_path / "net.py"
    net.write_text("from base import Base\n\n\nclass Net(Base):\n    def f(self):\n        self.log('a', 1, True)\n")

    main(["migrate", "--write", "--force", str(tmp_path)])

    assert "self.log('a', 1, prog_bar=True)" in net.read_text()


def test_an_attribute_that_a_base_may_set_stays():
    script = "from base import Base\n\n\nclass Net(Base):\n    def f(self):\n        return self.on_gpu\n"
    source = Source(Path("a.py"), script.encode(), Elsewhere(roles={"Base": "module"}))

    assert rewrite(source) == script


@pytest.mark.parametrize("number", ["2", "{0: 4, 5: 2}", "steps"])
def test_accumulated_gradients_are_divided_as_in_lightning(number):
    assert trainer_with(f"accumulate_grad_batches={number}, max_epochs=1") == (
        f"accumulate_grad_batches={number}, max_epochs=1, average_short_window=False"
    )


@pytest.mark.parametrize(
    "script",
    [
        "import lightning as L\nL.Trainer(accumulate_grad_batches=1)",
        "import lightning as L\nL.Trainer(accumulate_grad_batches=2, average_short_window=True)",
        "import stratagem as sg\nsg.Trainer(accumulate_grad_batches=2)",
    ],
)
def test_a_trainer_that_is_not_lightnings_or_does_not_accumulate_stays(script):
    assert rewritten(script) == script.replace("lightning as L", "stratagem as sg").replace("L.T", "sg.T")


def test_private_attributes_of_a_logger_go():
    script = (
        "import lightning as L\ntrainer = L.Trainer()\ntrainer.logger._log_graph = True  # a graph\ntrainer.fit(m)\n"
    )

    assert rewritten(script) == "import stratagem as sg\ntrainer = sg.Trainer()\n# a graph\ntrainer.fit(m)\n"


def test_outputs_of_a_callback_are_a_dictionary_or_a_tensor():
    script = (
        "import lightning as L\n\n\nclass Losses(L.Callback):\n"
        "    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):\n        print({})\n"
    )

    new = rewritten(script.format('outputs["loss"]'))

    assert '(outputs["loss"] if isinstance(outputs, dict) else outputs).detach()' in new
    assert rewritten(script.format('outputs.get("loss")')) == new


def test_a_name_that_another_file_imports_keeps_its_name(tmp_path, monkeypatch):
    """Else the other file could no longer be imported."""
    (tmp_path / "its_base.py").write_text("from lightning import LightningModule\nclass Base(LightningModule): pass\n")
    (tmp_path / "its_stars.py").write_text(
        "from lightning import LightningDataModule as Data\nfrom lightning import Trainer\n"
    )
    (tmp_path / "its_net.py").write_text(
        "from its_base import Base, LightningModule\nfrom its_stars import *\n"
        "class Net(LightningModule): pass\nclass Own(Data): pass\nclass Other(Base): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    assert main(["migrate", "--write", "--force", str(tmp_path)]) == 0

    assert importlib.import_module("its_net").Trainer is importlib.import_module("stratagem").Trainer
    assert "Module as LightningModule" in (tmp_path / "its_base.py").read_text()


def test_a_package_that_another_file_imports_from_the_script_is_left(tmp_path, capsys):
    (tmp_path / "base.py").write_text("import lightning as L\nL.Trainer()\n")
    (tmp_path / "net.py").write_text("from base import L\n")

    assert main(["migrate", "--write", "--force", str(tmp_path)]) == 1

    assert f"{tmp_path / 'base.py'}:1: import lightning as L -> import stratagem as sg" in capsys.readouterr().out
    assert (tmp_path / "base.py").read_text() == "import lightning as L\nimport stratagem as sg\nsg.Trainer()\n"


@pytest.mark.parametrize(
    ("script", "name", "reason"),
    [
        ("from lightning import Trainer\nreturn", "Trainer", "would not compile ('return' outside function"),
        ("from lightning import Trainer", "Absent", "would use stratagem.Absent, which is not installed"),
        ("import lightning as L\nL.Trainer()", "Absent", "would use stratagem.Absent, which is not installed"),
    ],
)
def test_a_result_that_would_not_import_is_not_written(tmp_path, capsys, monkeypatch, script, name, reason):
    path = tmp_path / "a.py"
    path.write_text(script)
    monkeypatch.setattr(references, "target_of", lambda qualified: references.Target("stratagem", name))

    assert main(["migrate", "--write", "--force", str(path)]) == 1

    assert f"{path} cannot be rewritten: the result {reason}" in capsys.readouterr().err
    assert path.read_text() == script


def test_a_name_with_two_meanings_is_refused(tmp_path, capsys):
    script = tmp_path / "a.py"
    text = (
        "def one():\n    from transformers import Trainer\n    Trainer(gpus=1)\n\n\n"
        "def two():\n    from lightning import Trainer\n    Trainer(gpus=1)\n"
    )
    script.write_text(text)

    assert main(["migrate", "--write", "--force", str(script)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be rewritten: Trainer is lightning.Trainer and transformers.Trainer; " in line
    assert script.read_text() == text


@pytest.mark.slow
def test_libcst_is_imported_only_to_rewrite(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(OLD)
    program = (
        "import sys\nimport stratagem\nfrom stratagem.cli import main\n"
        f"main(['migrate', {str(script)!r}])\nassert 'libcst' not in sys.modules\n"
        f"main(['migrate', '--diff', {str(script)!r}])\nassert 'libcst' in sys.modules\n"
    )

    done = scripts.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "options", [["--force"], ["--diff", "--write"], ["--json", "--write"]], ids=["force", "both", "json"]
)
def test_options_that_contradict_each_other_are_refused(tmp_path, capsys, options):
    script = tmp_path / "train.py"
    script.write_text(OLD)

    try:
        code = main(["migrate", *options, str(script)])
    except SystemExit as exit_:
        code = exit_.code

    assert code != 0
    assert script.read_text() == OLD
