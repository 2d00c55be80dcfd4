"""The code of the guides in docs/ runs, and has the effects that they describe."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from ports import free_port
from programs import scripts
from selection import HEAVY
from stratagem.errors import CheckpointError, ConfigError
from stratagem_testing import run_in_processes

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def run_script(folder: Path, source: str) -> str:
    """Run `source` as a script in `folder`; return what it printed."""
    (folder / "script.py").write_text(source)
    done = scripts.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=360, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Parts(sg.Module):
    """A regression with a backbone and a head."""

    def __init__(self, width=8, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.backbone, self.head = nn.Linear(8, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda parameter: parameter.requires_grad, self.parameters()), lr=self.hparams.lr)


@pytest.fixture
def names(tmp_path) -> dict:
    """What the guides take as given."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    batches = DataLoader(TensorDataset(x, x[:, :1].sin()), 8, shuffle=True)
    return {
        "sg": sg, "torch": torch, "time": time, "DataLoader": DataLoader, "TensorDataset": TensorDataset,
        "folder": tmp_path, "Model": Parts, "model": Parts(), "batches": batches,
    }  # fmt: skip


# --- A custom training loop ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loop_of_your_own_trains_in_two_processes_and_is_resumed_in_one(tmp_path):
    output = run_script(tmp_path, snippets("custom-training-loop.md")[0])
    errors = [float(error) for error in re.findall(r"epoch \d: validation error (\S+)", output)]
    names = {"__name__": "own_loop"}
    exec(snippets("custom-training-loop.md")[0], names)
    path = tmp_path / "own" / "last.ckpt"
    resumed = sg.Run(accelerator="cpu", devices=1, default_root_dir=tmp_path).launch(
        lambda run: names["train"](run, epochs=3, resume_from=path)
    )

    assert len(errors) == 2  # rank 0 alone prints
    assert resumed < errors[1] < errors[0]


def test_the_step_of_the_loop_of_your_own_skips_the_scheduler_where_fp16_overflows():
    names = {}
    exec(snippets("custom-training-loop.md")[1], names)
    with sg.Run(precision={"name": "16-mixed", "init_scale": 64.0}, accelerator="cpu", devices=1) as run:
        model = nn.Linear(2, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        rates = []
        for factor in (float("inf"), 1.0):
            run.backward(model(torch.ones(1, 2)).sum() * factor)
            names["step"](run, optimizer, scheduler)
            rates.append(scheduler.get_last_lr()[0])

    assert rates == [1.0, 0.5]


# --- Callbacks ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_callbacks_of_the_guide_have_the_effects_that_it_describes(names, tmp_path):
    used, function, written, average, lines, later = snippets("callbacks.md")
    exec(used, names)
    assert names["trainer"].checkpoint_callback.best_model_path.endswith(".ckpt")
    assert len(list((tmp_path / "checkpoints").glob("*.ckpt"))) == 2

    exec(function, names)
    assert names["epochs"] == [0, 1]

    exec(written, names)
    assert names["trainer"].current_epoch == 1  # 8 of at most 5
    assert names["trainer"].callback_metrics["slow_batches"] == 8
    again = names["SlowBatches"](limit_s=0.0)
    trainer = sg.Trainer(max_epochs=2, default_root_dir=tmp_path / "slow", callbacks=again)
    trainer.fit(Parts(), names["batches"], ckpt_path="last")
    assert again.count == 16

    exec(average, names)
    assert names["average"].num_averaged == 2

    exec(lines, names)
    assert len((tmp_path / "rank0.txt").read_text().splitlines()) == 64

    names["model"] = Parts()
    before = names["model"].backbone.weight.clone()
    exec(later, names)
    assert len(names["trainer"].optimizers[0].param_groups) == 2
    assert not torch.equal(before, names["model"].backbone.weight)


def test_a_method_that_is_never_called_is_refused():
    class Old(sg.Callback):
        def on_epoch_end(self, trainer, pl_module):
            raise AssertionError("called")

    with pytest.raises(ConfigError, match=r"on_epoch_end, which is never called; expected on_train_epoch_end"):
        sg.Trainer(callbacks=Old(), accelerator="cpu")


# --- Loggers -----------------------------------------------------------------------------------------------------


def test_the_loggers_of_the_guide_write(names, tmp_path):
    pytest.importorskip("tensorboard")
    chosen, by_hand, written = snippets("loggers.md")
    exec(chosen, names)
    names["trainer"].fit(Parts(), names["batches"])
    rows = (tmp_path / "digits" / "version_0" / "metrics.csv").read_text().splitlines()
    assert rows[0].split(",") == ["epoch", "step", "loss"]
    assert len(rows) == 1 + 1 + 16 // 4  # names, the first step, every fourth
    assert list((tmp_path / "stratagem_logs" / "first").glob("events.*"))

    exec(by_hand, names)
    assert scalars(names["trainer"].log_dir, "weights") == [8, 16]
    assert "weights" not in names["trainer"].callback_metrics

    exec(written, names)
    first, *values = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert first == {"width": 8, "lr": 0.05}
    assert [line["step"] for line in values] == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="broken"):
        fit_until_it_breaks(names)
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1]) == {"failed": "broken"}


def scalars(folder: Path, name: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert "head" in events.Tags()["histograms"]
    return [event.step for event in events.Scalars(name)]


def fit_until_it_breaks(names: dict) -> None:
    class Breaks(Parts):
        def on_train_start(self):
            raise ValueError("broken")

    trainer = sg.Trainer(
        max_epochs=1, default_root_dir=names["folder"], logger=names["Lines"](names["folder"] / "log.jsonl")
    )
    trainer.fit(Breaks(), names["batches"])


# --- Data --------------------------------------------------------------------------------------------------------


def write_texts(folder: Path) -> None:
    for number in range(3):
        rows = torch.randn(10, 8, generator=torch.Generator().manual_seed(number)).tolist()
        (folder / f"{number}.txt").write_text("\n".join(" ".join(map(str, row)) for row in rows))


@pytest.mark.slow
def test_the_loaders_of_the_guide_are_read(names, tmp_path):
    write_texts(tmp_path)
    plain, module, stream, both, mixed, several, growing, *_ = snippets("data.md")
    steps = []
    for source in (plain, module, stream, both, growing):
        exec(source, names)
        steps.append(names["trainer"].global_step)
    exec(mixed, names)
    exec(several, names)

    assert steps == [8, 2 * 6, 6, 8, 2 + 4 + 6]
    assert set(names["trainer"].callback_metrics) >= {"error/dataloader_idx_0", "error/dataloader_idx_1"}


@HEAVY
@pytest.mark.slow
def test_the_guide_packs_sequences_and_groups_their_lengths(names, tmp_path):
    transformers = pytest.importorskip("transformers")
    packed, wrapped, grouped = (source for source in snippets("data.md") if "position_ids" in source)
    for source in (packed, grouped):
        exec(source, names)
        assert names["trainer"].global_step == 2 * (4 if source is packed else 16)
    exec(wrapped, names)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    trainer = sg.Trainer(max_steps=2, default_root_dir=tmp_path / "llama", barebones=True, accelerator="cpu")
    trainer.fit(names["Packed"](transformers.LlamaForCausalLM(config)), names["packed"])

    assert trainer.global_step == 2


def test_shares_without_a_length_need_numbers_of_batches(names, tmp_path):
    write_texts(tmp_path)
    exec(snippets("data.md")[2], names)
    for option in ("val_check_interval", "limit_train_batches"):
        trainer = sg.Trainer(max_epochs=1, default_root_dir=tmp_path / option, **{option: 0.5})
        with pytest.raises(ConfigError, match=rf"{option} is 0.5 and the (training )?loader has no length"):
            trainer.fit(Parts(), datamodule=names["Texts"]())


def _files_read(rank, world_size, folder):
    names = {"sg": sg, "torch": torch, "DataLoader": DataLoader, "folder": folder}
    exec(snippets("data.md")[2].partition("\n\n\ntrainer")[0], names)
    trainer = sg.Trainer(
        strategy="ddp", devices=world_size, accelerator="cpu", max_epochs=1, default_root_dir=folder, barebones=True
    )
    data = names["Texts"]()
    trainer.fit(Parts(), datamodule=data)
    return [path.name for path in data.train_dataloader().dataset.paths], trainer.global_step


def test_the_stream_of_the_guide_is_divided_and_ends_with_the_shorter_share(tmp_path):
    write_texts(tmp_path)

    assert run_in_processes(_files_read, 2, tmp_path) == [(["0.txt", "2.txt"], 2), (["1.txt"], 2)]


def test_a_loader_that_fit_got_is_not_made_again(names, tmp_path):
    trainer = sg.Trainer(max_epochs=2, default_root_dir=tmp_path, reload_dataloaders_every_n_epochs=1)
    with pytest.raises(ConfigError, match="fit got a training loader, which cannot be made again"):
        trainer.fit(Parts(), names["batches"])


# --- The run folder ------------------------------------------------------------------------------------------


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_writes_the_files_of_the_guide_and_leaves_those_of_another_run(names, tmp_path):
    first, second = snippets("run-folder.md")
    tree = re.search(r"^writes\n\n```\n(.*?)^```", (DOCS / "run-folder.md").read_text(), re.M | re.S)[1]
    exec(first, names)
    names["trainer"].close()
    written = files_in(tmp_path / "run")

    assert {path.rpartition("/")[2] for path in written} == set(re.findall(r"[\w=.-]+\.(?:\w+)(?=\s)", tree))
    exec(second, names)
    assert written < files_in(tmp_path / "run")
    assert "checkpoints/epoch=2-step=24.ckpt" in files_in(tmp_path / "run")
    assert "stratagem_logs/version_1/metrics.csv" in files_in(tmp_path / "run")


@pytest.mark.parametrize("option", ["barebones", "fast_dev_run"])
def test_a_trial_writes_nothing(names, tmp_path, option):
    trainer = sg.Trainer(max_epochs=1, default_root_dir=tmp_path, **{option: True})
    trainer.fit(Parts(), names["batches"])

    assert files_in(tmp_path) == set()


def test_a_checkpoint_overwrites_a_file_at_its_path_and_no_folder(names, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    for form in ("full", "sharded"):
        trainer = sg.Trainer(max_epochs=1, barebones=True, checkpoint=form, default_root_dir=tmp_path)
        trainer.fit(Parts(), names["batches"])
        if form == "full":
            trainer.save_checkpoint(tmp_path / "notes.txt")
        with pytest.raises(CheckpointError):
            trainer.save_checkpoint(tmp_path / "folder")

    assert (tmp_path / "notes.txt").read_bytes() != b"mine"
    assert files_in(tmp_path / "folder") == {"mine"}


# --- Several machines --------------------------------------------------------------------------------------------


def on_two_nodes(commands: list[list], folder: Path, variables: list[dict[str, str]]) -> list[str]:
    """Run a command for each node at the same time; return what they printed."""
    processes = [
        scripts.Popen(
            command, cwd=folder, env=os.environ | given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, given in zip(commands, variables, strict=True)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.wait() for process in processes] == [0, 0], outputs
    return outputs


@pytest.mark.slow
def test_the_first_check_meets_under_two_agents_of_torchrun(tmp_path):
    (tmp_path / "connect.py").write_text(snippets("several-machines.md")[1])
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    commands = [[*start, "--node-rank", str(node), *where, "connect.py"] for node in range(2)]
    first, second = on_two_nodes(commands, tmp_path, [{}, {}])

    host = socket.gethostname()
    assert f"2 processes on {host}, {host}, this one on " in first
    assert "processes on" not in second


@pytest.mark.slow
def test_the_script_trains_on_two_nodes_by_variables(tmp_path):
    source = snippets("several-machines.md")[0].replace("max_epochs=2", "max_epochs=2, devices=1, num_nodes=2")
    (tmp_path / "train.py").write_text(source)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables = [meeting | {"NODE_RANK": str(node)} for node in range(2)]
    outputs = on_two_nodes([[sys.executable, "train.py"]] * 2, tmp_path, variables)

    assert "2 processes" in outputs[0]
    assert "effective batch size 8" in outputs[0]


# --- Hydra -------------------------------------------------------------------------------------------------------


def hydra_project(folder: Path) -> None:
    """Write the files of the guide, named in their first lines."""
    (folder / "conf").mkdir()
    for source in [*snippets("hydra.md"), *snippets("hydra.md", "yaml")]:
        name, _, content = source.removeprefix("# ").partition("\n")
        (folder / name).write_text(content)


@pytest.mark.sweep(
    guard="tests/plugins/test_migrate_projects.py::test_a_baseline_whose_parent_class_saves_hyper_parameters_trains"
)
@pytest.mark.slow
def test_the_commands_of_the_guide_to_hydra_train(tmp_path):
    pytest.importorskip("hydra")
    hydra_project(tmp_path)
    (commands,) = snippets("hydra.md", "shell")
    for command in commands.splitlines():
        folder = "hydra.sweep.dir" if "--multirun" in command else "hydra.run.dir"
        arguments = [*command.split()[1:], f"{folder}=out/{len(list(tmp_path.glob('out/*')))}"]
        done = scripts.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
    checkpoints = sorted(path.relative_to(tmp_path / "out").as_posix() for path in tmp_path.rglob("*.ckpt"))

    assert checkpoints == [
        "0/checkpoints/epoch=1-step=16.ckpt",
        "1/checkpoints/epoch=2-step=24.ckpt",
        "2/checkpoints/epoch=1-step=8.ckpt",
        "3/0/checkpoints/epoch=1-step=16.ckpt",
        "3/1/checkpoints/epoch=1-step=16.ckpt",
    ]
    assert (tmp_path / "out" / "2" / "train_rank_1.log").exists()


def test_instances_are_passed_beside_instantiate(names):
    hydra_utils = pytest.importorskip("hydra.utils")
    from omegaconf import OmegaConf

    from stratagem.callbacks import EarlyStopping

    config = OmegaConf.create(snippets("hydra.md", "yaml")[0]).trainer
    config.default_root_dir = str(names["folder"])
    callbacks = [EarlyStopping("val_loss")]
    with pytest.raises(Exception, match=r"callbacks(\[\d\])? is"):
        hydra_utils.instantiate(config, callbacks=callbacks)
    plain = OmegaConf.to_container(config)
    with pytest.raises(Exception, match=r"callbacks(\[\d\])? is"):
        hydra_utils.instantiate(OmegaConf.create(plain | {"_convert_": "none"}))

    assert hydra_utils.instantiate(config, _partial_=True)(callbacks=callbacks).callbacks[-1] is callbacks[0]
    *_, named, built = sorted(hydra_utils.instantiate(config).callbacks, key=lambda each: hasattr(each, "monitor"))
    assert (named.monitor, built.monitor) == ("val_loss", "val_loss")


# --- Hyper-parameter search --------------------------------------------------------------------------------------


def test_a_search_without_a_library_finds_the_best_of_three(names):
    """With Optuna and Ray the guide is run by the tests of contrib/optuna and contrib/ray."""
    exec(snippets("hyper-parameter-search.md")[0], names)
    errors = {lr: names["objective"](lr) for lr in (0.3, 0.1, 0.01)}

    assert names["best"] == min(errors, key=errors.get)
    assert len(set(errors.values())) == 3


# --- GPUs -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_steps_on_gpus_train_on_the_cpu_where_there_is_none(names, tmp_path):
    for number, source in enumerate(snippets("gpu.md")):
        alone = source.replace('strategy="ddp", ', 'strategy="ddp", devices=1, accelerator="auto", ')
        exec(alone.replace("max_epochs=1", f"max_epochs=1, default_root_dir=folder / '{number}'"), names)
        assert names["trainer"].global_step == 8


# --- Performance -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_that_finds_out_what_costs_what_prints_the_table_of_the_page(tmp_path):
    printed = run_script(tmp_path, snippets("performance.md")[0])

    head, *rows = snippets("performance.md", "text")[0].splitlines()
    assert head in printed
    assert all(re.search(rf"^{re.escape(row.split('  ')[0])} +[0-9.]+ ", printed, re.MULTILINE) for row in rows)
    columns = (tmp_path / "stratagem_logs" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert {"throughput/samples_per_s", "comm/bytes_per_step"} <= set(columns.split(","))


def test_the_optimizer_of_the_page_is_fused():
    names = {"torch": torch}
    exec(snippets("performance.md")[1], names)
    assert names["optimizer"].defaults["fused"]
