"""`stratagem migrate` reads and rewrites YAML files of LightningCLI and of hydra."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import yaml

import stratagem as sg
from stratagem.cli import main
from stratagem_migrate import examine_file, yaml_files
from stratagem_migrate.yaml_files import YamlFile


def rewritten(text):
    once = yaml_files.rewrite(YamlFile(Path("a.yaml"), textwrap.dedent(text).encode()))
    assert yaml_files.rewrite(YamlFile(Path("a.yaml"), once.encode())) == once
    return once


def found(text):
    findings = examine_file(YamlFile(Path("a.yaml"), textwrap.dedent(text).encode()))
    return [(each.line, each.old, each.new) for each in findings if each.certainty == "change"]


CLI = """\
    # lightning.pytorch==2.4
    seed_everything: 7  # reproducible
    trainer:
      gpus: 0   # none
      progress_bar_refresh_rate: 0
      benchmark: null
      strategy:
        class_path: lightning.pytorch.strategies.SingleDeviceStrategy
      callbacks:
        # the best
        - class_path: lightning.pytorch.callbacks.ModelCheckpoint
          init_args:
            monitor: val_loss   # watched
            save_top_k: 2
            period: 2
        - class_path: pytorch_lightning.callbacks.EarlyStopping
          init_args: {monitor: val_loss, patience: 2}
        - {class_path: pytorch_lightning.callbacks.EarlyStopping, init_args: {monitor: loss}}
        - class_path: lightning.pytorch.callbacks.LearningRateMonitor
      logger:
        class_path: lightning.pytorch.loggers.CSVLogger
        init_args:
          save_dir: logs
    model:
      class_path: nets.Net
      init_args:
        width: 3
    """


def test_a_file_of_lightnings_command_line_becomes_a_run_file():
    assert rewritten(CLI) == textwrap.dedent("""\
        # lightning.pytorch==2.4
        seed: 7  # reproducible
        trainer:
          accelerator: cpu   # none
          enable_progress_bar: false
          strategy:
            name: single_device
          callbacks:
            # the best
            - name: model_checkpoint
              monitor: val_loss   # watched
              save_top_k: 2
              every_n_epochs: 2
            - name: early_stopping
              monitor: val_loss
              patience: 2
            - {name: early_stopping, monitor: loss}
            - name: learning_rate_monitor
          logger:
            name: csv
            save_dir: logs
        model:
          class_path: nets.Net
          init_args:
            width: 3
        """)


def test_the_trainer_of_a_rewritten_file_can_be_built():
    trainer = sg.Trainer(**yaml.safe_load(rewritten(CLI))["trainer"])

    names = [type(each).__name__ for each in trainer.callbacks]
    assert names[0] == "ModelCheckpoint"
    assert names[-2:] == ["EarlyStopping", "EarlyStopping"]  # after what others log at the end of an epoch


@pytest.mark.parametrize(
    "arguments", ["{save_dir: logs, name: digits}", "\n              name: digits\n              save_dir: logs"]
)
def test_the_option_name_of_a_logger_stays_in_its_arguments(arguments, tmp_path):
    text = f"""\
        seed_everything: 1
        model:
          class_path: nets.Net
        trainer:
          logger:
            class_path: lightning.pytorch.loggers.CSVLogger
            init_args: {arguments}
        """
    trainer = sg.Trainer(accelerator="cpu", **yaml.safe_load(rewritten(text))["trainer"])

    assert (trainer.loggers[0].name, str(trainer.loggers[0].save_dir)) == ("digits", "logs")


def test_targets_of_hydra_are_rewritten():
    text = """\
        trainer:
          _target_: lightning.pytorch.Trainer # ours
          default_root_dir: ${paths.output_dir}
          gpus: 2
          max_epochs: ${epochs}
        ckpt:
          _target_: pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint
          dirpath: "a"
          train_time_interval: null # never
          monitor: val_loss
        early: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: a, log_rank_zero_only: false}
        """

    assert rewritten(text) == textwrap.dedent("""\
        trainer:
          _target_: stratagem.Trainer # ours
          default_root_dir: ${paths.output_dir}
          accelerator: gpu
          devices: 2
          max_epochs: ${epochs}
        ckpt:
          _target_: stratagem.callbacks.ModelCheckpoint
          dirpath: "a"
        KEPT
          monitor: val_loss
        early: {_target_: stratagem.callbacks.EarlyStopping, monitor: a}
        """).replace("KEPT\n", _kept("train_time_interval: null # never"))


def _kept(line):
    """Return the line of an option if the installed plugin has it."""
    from stratagem_migrate import installed

    name = line.partition(":")[0]
    return f"  {line}\n" if name in (installed.plugin_options("callback", "model_checkpoint") or ()) else ""


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("_target_: lightning.pytorch.loggers.CometLogger\n", (1, "lightning.pytorch.loggers.CometLogger", "")),
        ("_target_: lightning.pytorch.Trainer\nlogger: false\ntpu_cores: ${n}\n",
         (3, "tpu_cores=value", 'accelerator="tpu", devices=value (of stratagem-xla)')),
        ("_target_: stratagem.callbacks.ModelCheckpoint\nfilepath: a\n",
         (2, "ModelCheckpoint(filepath='a')", "dirpath= and filename=")),
        ("seed_everything: true\ntrainer: {}\nmodel:\n  width: 3\n",
         (3, "model: without class_path", "class_path: and init_args:")),
        ("trainer: {}\nmodel: nets.Net\noptimizer:\n  class_path: torch.optim.Adam\n",
         (3, "optimizer:", yaml_files._SECTIONS["optimizer"])),
    ],
)  # fmt: skip
def test_what_only_the_author_can_decide_is_found_and_stays(text, finding):
    assert finding in found(rewritten(text))


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\ngpus: 2\n",
        "model: x\n",
        "- 1\n",
        "",
        "{{ helm }}: [\n",
        "a: &x 1\nb: *x\n",
        "# @package _global_\ntrainer:\n  max_epochs: 1\nmodel:\n  width: 2\n",
        "defaults:\n  - a\ntrainer:\n  max_epochs: 1\ndata:\n  size: 2\n",
    ],
)
def test_other_files_are_left_alone(text):
    assert rewritten(text) == text
    assert found(text) == []


def test_a_broken_file_that_names_lightning_is_reported(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("_target_: lightning.Trainer\nb: [\n")
    (tmp_path / "b.yaml").write_text("_target_: lightning.Trainer\r\nlogger: false\r\n", newline="")

    assert main(["migrate", "--write", "--force", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stratagem: {tmp_path / 'a.yaml'} is not YAML (")
    assert (tmp_path / "a.yaml").read_text() == "_target_: lightning.Trainer\nb: [\n"
    assert (tmp_path / "b.yaml").read_bytes() == b"_target_: stratagem.Trainer\r\nlogger: false\r\n"


def test_hydra_gives_objects_to_the_trainer_itself():
    """OmegaConf copies instances of attrs classes, and a callback of stratagem is one."""
    from stratagem_migrate.rewriting import rewrite
    from stratagem_migrate.source import Source

    def after(line):
        script = f"import hydra\nfrom hydra.utils import instantiate\n{line}\n"
        return rewrite(Source(Path("a.py"), script.encode())).splitlines()[2]

    assert after("t = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=logger)") == (
        "t = hydra.utils.instantiate(cfg.trainer, _partial_=True)(callbacks=callbacks, logger=logger)"
    )
    for kept in (
        "instantiate(cfg.trainer, callbacks=cfg.callbacks)",
        "instantiate(cfg.trainer)",
        "instantiate(cfg.x, logger=a)",
    ):
        assert after(kept) == kept
