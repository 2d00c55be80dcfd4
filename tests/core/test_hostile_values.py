"""Hostile values in every argument and every option: each is accepted for a reason listed here, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
import torch

import stratagem as sg
from stratagem.api.options import option_types, options
from stratagem.discovery import registry
from stratagem.errors import ConfigError
from stratagem.stack.construction import make
from stratagem_trainer.settings import TrainerSettings

HOSTILE = {
    "nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "-1": -1, "-0.5": -0.5, "1e400": 10**400,
    "1e5000": 10**5000, "True": True, "''": "", "NUL": "a\0b", "[]": [], "{}": {}, "object": object(), "bytes": b"x",
    "[None]": [None], "{1: 2}": {1: 2}, "1j": 1j,
}  # fmt: skip

#: Switches of the Trainer.
SWITCHES = (
    "use_distributed_sampler", "sync_batchnorm", "deterministic", "enable_progress_bar", "enable_checkpointing",
    "enable_model_summary", "average_short_window", "detect_anomaly", "inference_mode", "barebones", "fast_dev_run",
)  # fmt: skip

#: What an argument of the Trainer accepts of these, and why.
ACCEPTED = {name: {"True"} for name in SWITCHES} | {
    "max_epochs": {"-1"},  # no limit
    "max_steps": {"-1"},
    "num_sanity_val_steps": {"-1"},  # all
    "logger": {"True", "[]"},  # the default one; none
    "callbacks": {"[]"},  # none
    "checks": {"[]"},  # none
    "plugins": {"[]"},
    "comm_hook": {"[]"},
    "profiler": {"[]"},
    "compile": {"True", "{}"},  # with its defaults
}

#: What an option of a plugin accepts although its type alone would not say so, and why.
PLUGINS_ACCEPT = {
    "early_stopping.min_delta": {"-1", "-0.5"},  # numbers of any sign
    "early_stopping.stopping_threshold": {"-1", "-0.5"},
    "early_stopping.divergence_threshold": {"-1", "-0.5"},
    "model_checkpoint.save_top_k": {"-1"},  # all
    "model_summary.max_depth": {"-1"},  # all
    "gradient_accumulation_scheduler.scheduling": {"{1: 2}"},
    "lambda.on": {"{}"},  # functions for no event
    "compile.options": {"{}"},  # inductor's defaults
    "deepspeed.config": {"{}"},  # DeepSpeed's defaults
    "deepspeed.logging_level": {"-1"},  # a level of Python's logging is any integer
}
for logger in ("csv", "tensorboard"):  # this level of folders is left out
    PLUGINS_ACCEPT |= {f"{logger}.name": {"''"}, f"{logger}.version": {"''"}}
for strategy in ("ddp", "ddp_sharded", "fsdp", "deepspeed", "parallel"):  # no options
    PLUGINS_ACCEPT |= {f"{strategy}.nccl": {"{}"}, f"{strategy}.gloo": {"{}"}}


def refusal(build, name: str) -> str | None:
    """Return None if `build` accepts; otherwise check its error, which must name the option, and return it."""
    try:
        build()
    except sg.StratagemError as error:  # a PluginError where it is taken for a name
        said = str(error)
    else:
        return None
    assert name in said, said
    assert "\0" not in said
    assert "\n" not in said
    assert len(said) < 1000, said
    assert not re.search(r"PosixPath\(|datetime\.timedelta\(| at 0x|object at|<class|<function", said), said
    return said


@pytest.mark.parametrize("argument", options(TrainerSettings))
def test_an_argument_of_the_trainer_refuses_what_it_cannot_mean(argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = {"accelerator": "cpu", "logger": False}
    accepted = {
        label
        for label, value in HOSTILE.items()
        if refusal(lambda value=value: sg.Trainer(**(base | {argument: value})), argument.removesuffix("s")) is None
    }

    assert accepted == ACCEPTED.get(argument, set())


def plugin_options() -> list[tuple[str, str, str]]:
    """Return kind, plugin and option for every option of every installed plugin class."""
    found, seen = [], set()
    for entry in registry.entries():
        if entry.kind not in registry.kinds():
            continue
        target = entry.load()
        if isinstance(target, type) and target not in seen:
            seen.add(target)
            found += [(entry.kind, entry.name, option) for option in options(target)]
    return found


#: Values for options without a default.
REQUIRED = {
    "samples": 8,
    "monitor": "loss", "dirpath": "somewhere", "scheduling": {0: 2}, "on": {"on_fit_start": print}, "swa_lrs": 0.1,
    "duration": 1.0, "model_averaging_period": 4, "project": "mine", "policy": "Linear",
}  # fmt: skip


#: Options whose errors name the argument of the Trainer that sets them.
NAMED_BY = dict.fromkeys(
    ("activation_checkpointing.policy", "activation_checkpointing.mode"), "activation_checkpointing"
)  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "option"), plugin_options())
def test_an_option_of_a_plugin_refuses_what_it_cannot_mean(kind, name, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = registry.find(kind, name)
    cls = entry.load()
    needed = {
        other: REQUIRED[other]
        for other, field in options(cls).items()
        if field.default is attrs.NOTHING or (name == "post_localsgd" and other == "model_averaging_period")
    }
    accepted = {
        label
        for label, value in HOSTILE.items()
        if refusal(lambda value=value: make(entry, needed | {option: value}), NAMED_BY.get(f"{name}.{option}", option))
        is None
    }

    may = PLUGINS_ACCEPT.get(f"{name}.{option}", set())
    is_switch = "bool" in str(option_types(cls)[option])
    assert accepted - {"True" if is_switch else ""} == may


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), "", "1:2", "-1:0:0:0", 10**30])
@pytest.mark.parametrize("build", [lambda v: sg.Trainer(accelerator="cpu", max_time=v),
                                   lambda v: make(registry.find("callback", "timer"), {"duration": v})])  # fmt: skip
def test_a_duration_is_not_less_than_nothing(build, value):
    with pytest.raises(ConfigError, match="max_time|duration"):
        build(value)


# --- Files -------------------------------------------------------------------------------------------------------

LAUGHS = "\n".join(
    ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", b"max_epochs: 1\nmax_epochs: 2\n", r"has 'max_epochs' twice \(lines 1 and 2\); expected each name once"),
        ("a.yaml", b"strategy: {name: ddp, name: fsdp}", r"has 'name' twice"),
        ("a.yaml", b"accumulate_grad_batches: {0: 1, 0: 2}", r"has '0' twice"),
        ("a.yaml", b"callbacks: &c\n  - *c\n", "anchor that contains itself"),
        ("a.yaml", b"strategy: &s {name: ddp, again: *s}", "anchor that contains itself"),
        ("a.yaml", LAUGHS.encode(), "has more than 100000 values once its anchors are followed"),
        ("a.yaml", b"max_epochs: " + b"[" * 5000, "is nested too deeply"),
        ("a.toml", b"max_epochs = " + b"[" * 5000, "is nested too deeply"),
        ("a.yaml", "größe: 1".encode("latin-1"), r"is not UTF-8 text \(byte 0xf6 at position 2\)"),
        ("a.toml", "größe = 1".encode("latin-1"), r"is not UTF-8 text"),
        ("a.yaml", b"\xff\xfem\x00a\x00x\x00", "is not UTF-8 text"),
        ("a.yaml", b"", "a.yaml is empty; expected a mapping"),
        ("a.yaml", b"# nothing\n", "a.yaml is empty; expected a mapping"),
        ("a.yaml", b"\tmax_epochs: 1", "is not YAML .*cannot start any token"),
        ("a.yaml", b"- 1\n- 2\n", "has a list at its top level; expected a mapping"),
        ("a.yaml", b"just text", "has a str at its top level"),
        ("a.yaml", b"1: 2", "has the key 1 at its top level; expected names"),
        ("a.yaml", b"[1]: 2", "is not YAML"),
        ("a.yaml", b"max_epochs: !!python/object/apply:os.system ['touch canary']", "is not YAML"),
        ("a.yaml", b"a: 1\n---\nb: 2\n", "is not YAML .*single document"),
        ("a.yaml", b"default_root_dir: \"a\\0b\"", r"default_root_dir .*NUL"),
        ("a.yaml", b"max_epochs: 1" + b"0" * 5000, "max_epochs is|is not YAML"),
        ("a.toml", b"max_epochs = 1" + b"0" * 5000, "max_epochs is|is not TOML"),
        ("a.yaml", b"max_epochs: 2020-01-01", "max_epochs is .*; expected an integer"),
        ("a.yaml", b"gradient_clip_val: .inf", "gradient_clip_val is inf .*; expected a finite number"),
        ("a.yaml", b"gradient_clip_val: .nan", "gradient_clip_val is nan .*; expected a number"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_refused_with_a_sentence(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)

    with pytest.raises(ConfigError, match=message) as caught:
        sg.Trainer.from_config(name, accelerator="cpu")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not Path("canary").exists()


def test_anchors_and_merges_may_be_used(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("max_epochs: &n 3\nmin_epochs: *n\nstrategy: {<<: {name: ddp}, static_graph: true}\ndevices: 2\n")
    trainer = sg.Trainer.from_config(path, accelerator="cpu", logger=False)

    assert (trainer.settings.max_epochs, trainer.settings.min_epochs) == (3, 3)
    assert trainer.run.stack.strategy.static_graph is True


@pytest.mark.parametrize("text", ["[" * 100_000, '{"name": ' + "1" * 5000 + "}"])
def test_hostile_text_of_the_command_line_is_refused_with_a_sentence(capsys, text):
    with pytest.raises(SystemExit):
        sg.Trainer.from_cli(["--callbacks", text, "--accelerator", "cpu"])

    assert capsys.readouterr().err.count("\n") == 1


# --- The home folder ---------------------------------------------------------------------------------------------


class Model(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_tilde_is_the_home_folder_wherever_a_path_is_given(tmp_path, monkeypatch):
    from stratagem.callbacks import ModelCheckpoint, SimpleProfiler
    from stratagem.loggers import CSVLogger

    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(), here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    data = [torch.ones(2, 1)]
    (home / "run.yaml").write_text("default_root_dir: ~/from_file\n")
    base = {"accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False}
    callbacks = [ModelCheckpoint(dirpath="~/instance", save_last=True), {"name": "model_checkpoint", "dirpath": "~/mapping"},
                 SimpleProfiler(dirpath="~/profile")]  # fmt: skip
    trainer = sg.Trainer(**base, default_root_dir=Path("~/root"), callbacks=callbacks, log_every_n_steps=1,
                         logger=[CSVLogger(save_dir="~/logs"), {"name": "csv", "save_dir": "~/more_logs"}])  # fmt: skip
    trainer.fit(Model(), data)
    trainer.save_checkpoint("~/saved.ckpt")
    Model.load_from_checkpoint("~/saved.ckpt")
    sg.Trainer(**base, default_root_dir="~/root2", logger=False).fit(Model(), data, ckpt_path="~/saved.ckpt")
    found = sg.Trainer.from_config("~/run.yaml", **base, logger=False)
    with pytest.raises(ConfigError, match=f"differs from {home / 'root' / 'run.lock'}"):
        sg.Trainer(**base, lock="~/root/run.lock").fit(Model(), data)

    assert {path.name for path in home.iterdir()} >= {
        "root",
        "root2",
        "instance",
        "mapping",
        "profile",
        "logs",
        "more_logs",
        "saved.ckpt",
    }
    assert found.default_root_dir == str(home / "from_file")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("argument", ["default_root_dir", "lock"])
def test_a_home_folder_of_nobody_is_refused(argument):
    with pytest.raises(ConfigError, match=rf"{argument} .*no user of that name.*write '\./~nobody-here/x'"):
        sg.Trainer(accelerator="cpu", **{argument: "~nobody-here/x"})
