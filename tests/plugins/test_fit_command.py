"""A run file runs as a script would, says what is wrong with it in one sentence, and prints itself in full."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import yaml

import stratagem as sg
from programs.scripts import run as run_script
from stratagem.cli import main
from stratagem.config.settings import Source, gather, option_names
from stratagem_trainer.checkpoint_files import read_any
from stratagem_trainer.settings import TrainerSettings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "run-files.md"

NET = '''
from __future__ import annotations

import enum
import os
import pathlib
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg

if TYPE_CHECKING:
    from nowhere import Unknown


class Net(sg.Module):
    def __init__(self, width: int = 8, lr: float = 0.05):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def loss(self, batch):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_fit_start(self):
        pathlib.Path(f"rank{self.global_rank}.txt").write_text(str(os.getpid()))


class Data(sg.DataModule):
    def __init__(self, batch_size: int = 8, shuffle: bool = False):
        self.batch_size, self.shuffle = batch_size, shuffle
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
        self.data = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.data, self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self):
        return DataLoader(self.data, self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Sizes:
    width: int
    depth: int = 2
    ratio: float = 0.5


class Demanding(Net):
    """Takes what annotations can say."""

    def __init__(
        self,
        needed: int,
        sizes: Sizes | None = None,
        block: nn.Module | None = None,
        blocks: list[nn.Module] = (),
        named: dict[str, nn.Module] | pathlib.Path | None = None,
        pair: tuple[nn.Module, Data] | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
        dtype: torch.dtype = torch.float32,
        kind: type[nn.Module] = nn.Linear,
        color: Color = Color.RED,
        shape: tuple[int, int] = (1, 2),
        path: pathlib.Path = pathlib.Path("here"),
        unknown: Unknown = None,
        bare=3,
        small=0.5,
        options: dict | None = None,
    ):
        super().__init__()
        self.got = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        GOT.append(self.got)


GOT = []


def made(width: int = 3) -> Net:
    return Net(width)


def with_any_options(**options) -> Net:
    return Net(**options)


def unannotated(**options):
    return Net(**options)


def returns_data() -> Data:
    return Data()


def lies() -> Net:
    return nn.Linear(1, 1)


class Failing(Net):
    def __init__(self, how: str = "error", rank: int = 0):
        super().__init__()
        self.how, self.rank = how, rank

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == self.rank:
            if self.how == "error":
                raise ValueError("my own mistake")
            if self.how == "known":
                raise sg.StratagemError("a known mistake", do="fix it")
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().training_step(batch, batch_idx)


def leaves_a_canary(**arguments):
    pathlib.Path("canary").touch()


class LeavesACanary:
    def __init__(self):
        pathlib.Path("canary").touch()


class Tokenizer:
    pass


def makes_a_tokenizer() -> Tokenizer:
    return Tokenizer()


def makes_an_optimizer(parameters, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def doubled(x):
    return 2 * x


class Refuses(Net):
    def __init__(self):
        raise ValueError("not today")
'''

RUN = {
    "seed": 3,
    "model": {"class_path": "net.Net", "init_args": {"width": 6}},
    "data": "net.Data",
    "trainer": {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "enable_progress_bar": False, "logger": False,
        "callbacks": [{"name": "model_checkpoint", "save_last": True}],
    },
}  # fmt: skip


def write(**sections):
    """Write run.yaml: `RUN` with `sections` in place of its own."""
    content = {name: value for name, value in (RUN | sections).items() if value is not None}
    Path("run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with net.py and run.yaml, and an interpreter that knows no `net` of an earlier test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("STRATAGEM_SEED", raising=False)
    (tmp_path / "net.py").write_text(NET)
    write()
    sys.modules.pop("net", None)
    yield tmp_path
    for name in ("net", "elsewhere"):
        sys.modules.pop(name, None)
    for variable in ("STRATAGEM_SEED", "STRATAGEM_SEED_WORKERS"):
        os.environ.pop(variable, None)


def program(*words, **options):
    """Run the program in a process of its own."""
    command = [sys.executable, "-m", "stratagem", *map(str, words)]
    return run_script(command, capture_output=True, text=True, timeout=360, check=False, **options)


def refused(capsys, *words):
    """Return the one sentence with which the program refuses."""
    assert main(["fit", "run.yaml", *words]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def built(capsys, arguments, *words):
    """Return what the constructor of `Demanding` got."""
    write(
        model={"class_path": "net.Demanding", "init_args": arguments}, trainer=RUN["trainer"] | {"fast_dev_run": True}
    )
    code = main(["fit", "run.yaml", *words])
    assert code == 0, capsys.readouterr().err
    return sys.modules["net"].GOT[-1]


def weights(path="checkpoints/last.ckpt"):
    return read_any(path)["state_dict"]


def trained_by_a_script(batch_size=8, shuffle=False, width=6):
    from net import Data, Net

    sg.seed_everything(3)
    model, data = Net(width), Data(batch_size, shuffle)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "num_sanity_val_steps": 2}
    sg.Trainer(accelerator="cpu", devices=1, max_epochs=2, **quiet).fit(model, datamodule=data)
    return model.state_dict()


def difference(one, other):
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# --- It runs -----------------------------------------------------------------------------------------------------


def test_a_run_file_trains_as_a_script_bit_for_bit(capsys):
    write(data={"class_path": "net.Data", "init_args": {"shuffle": True}})
    assert main(["fit", "run.yaml"]) == 0

    assert capsys.readouterr().out == ""
    assert difference(weights(), trained_by_a_script(shuffle=True)) == 0


def test_toml_says_the_same():
    Path("run.toml").write_text(
        textwrap.dedent("""
        seed = 3
        data = "net.Data"
        [model]
        class_path = "net.Net"
        init_args = {width = 6}
        [trainer]
        accelerator = "cpu"
        devices = 1
        max_epochs = 2
        enable_progress_bar = false
        logger = false
        callbacks = [{name = "model_checkpoint", save_last = true}]
        """)
    )
    assert main(["fit", "run.toml"]) == 0

    assert difference(weights(), trained_by_a_script()) == 0


def test_the_command_line_overrides_the_file():
    words = [
        "--model.width",
        "5",
        "--data.batch-size=16",
        "--trainer.max_epochs",
        "1",
        "--trainer.default_root_dir=here",
    ]
    assert main(["fit", "run.yaml", *words, "--seed", "4"]) == 0
    state = read_any("here/checkpoints/last.ckpt")

    assert state["state_dict"]["layers.0.weight"].shape == (5, 4)
    assert state["loop"]["global_step"] == 4
    assert os.environ["STRATAGEM_SEED"] == "4"


def test_ckpt_path_resumes():
    assert main(["fit", "run.yaml", "--trainer.max_epochs", "1"]) == 0
    halfway = weights()
    assert main(["fit", "run.yaml", "--ckpt_path", "last"]) == 0
    resumed = read_any("checkpoints/last.ckpt")

    assert resumed["loop"]["global_step"] == 16
    assert difference(halfway, resumed["state_dict"]) > 0
    assert difference(resumed["state_dict"], trained_by_a_script()) == 0


def test_the_environment_is_stronger_than_the_file_and_weaker_than_the_line(monkeypatch):
    monkeypatch.setenv("STRATAGEM_TRAINER_MAX_EPOCHS", "1")
    assert main(["fit", "run.yaml"]) == 0
    assert read_any("checkpoints/last.ckpt")["loop"]["global_step"] == 8
    assert main(["fit", "run.yaml", "--trainer.max_epochs", "3"]) == 0

    assert read_any("checkpoints/last-v1.ckpt")["loop"]["global_step"] == 24


@pytest.mark.slow
def test_modules_are_found_beside_the_file_before_the_current_directory(tmp_path):
    folder = tmp_path / "configs"
    folder.mkdir()
    shutil.move("run.yaml", folder)
    (folder / "net.py").write_text(NET.replace('"val_loss"', '"other_loss"'))
    (tmp_path / "elsewhere.py").write_text("from net import Data as Elsewhere\n")
    result = program("validate", "configs/run.yaml", "--data", "elsewhere.Elsewhere")

    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[0] == "other_loss"


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_measuring_prints_a_table(capsys, stage):
    assert main([stage, "run.yaml"]) == 0
    name, value = capsys.readouterr().out.split()
    model, data = sys.modules["net"].Net, sys.modules["net"].Data
    sg.seed_everything(3)
    module, batch = model(6), data().data.tensors

    assert name == "val_loss"
    assert float(value) == pytest.approx(module.loss(batch).item(), rel=1e-4)


def test_predict_says_where_predictions_could_go(capsys):
    assert main(["predict", "run.yaml"]) == 1
    error = capsys.readouterr().err

    assert "prediction_writer" in error
    assert "trainer.callbacks" in error


def test_predict_writes_with_the_callback(capsys):
    writer = json.dumps({"name": "prediction_writer", "dirpath": "out", "write_interval": "epoch"})
    assert main(["predict", "run.yaml", "--trainer.callbacks", writer]) == 0
    (batches,) = torch.load("out/rank0.pt")

    assert torch.cat(batches).shape == (64, 1)


@pytest.mark.every_push("ddp")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_measuring_in_two_processes_prints_one_table(strategy):
    result = program("validate", "run.yaml", "--trainer.strategy", strategy, "--trainer.devices", 2)

    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"val_loss +\d+\.\d+\n", result.stdout)


@pytest.mark.every_push("ddp")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_two_processes_train_as_one_with_twice_the_batch(strategy):
    words = ["--trainer.strategy", strategy, "--trainer.devices", 2, "--data.batch_size", 4]
    result = program("fit", "run.yaml", *words)

    assert result.returncode == 0, result.stderr
    assert Path("rank0.txt").read_text() != Path("rank1.txt").read_text()
    sys.path.insert(0, os.getcwd())
    assert difference(weights(), trained_by_a_script(batch_size=8)) < 1e-6


# --- Exit codes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_errors_of_user_code_show_their_traceback():
    result = program("fit", "run.yaml", "--model", "net.Failing")

    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert result.stderr.rstrip().endswith("ValueError: my own mistake")


@pytest.mark.slow
def test_an_error_while_building_says_what_was_being_built():
    result = program("fit", "run.yaml", "--model", "net.Refuses")

    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("ValueError: not today\nwhile building model (command line)")


@pytest.mark.every_push("error-my own mistake-ddp")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
@pytest.mark.parametrize(("how", "said"), [("error", "my own mistake"), ("known", "a known mistake")])
def test_an_error_of_the_other_process_comes_home_with_its_traceback(strategy, how, said):
    words = ["--trainer.strategy", strategy, "--trainer.devices", 2]
    result = program("fit", "run.yaml", "--model", "net.Failing", "--model.how", how, "--model.rank", 1, *words)
    lines = result.stderr.splitlines()
    first, *rest = lines[[line.startswith("stratagem: ") for line in lines].index(True) :]

    assert result.returncode == 1
    assert said in first
    assert "on rank 1:" in rest
    assert any(line.strip().startswith("File ") and "net.py" in line for line in rest)


@pytest.mark.every_push("1-SIGINT-130")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_and_preemption_have_their_codes(name, code, processes):
    callbacks = json.dumps([{"name": "preemption", "signals": ["SIGTERM"], "look_every_s": 0.01}])
    words = ["--trainer.callbacks", callbacks, "--trainer.max_epochs", 500, "--trainer.devices", processes]
    result = program("fit", "run.yaml", "--model", "net.Failing", "--model.how", name, *words)

    assert result.returncode == code, result.stderr
    assert Path("checkpoints/preempted.ckpt").exists() == (name == "SIGTERM")
    assert "Traceback" not in result.stderr


# --- What is wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"modell": "net.Net"}, r"file run.yaml has 'modell' at its top level; .*did you mean 'model'"),
        ({"max_epochs": 3}, r"'max_epochs' at its top level; .*did you mean 'trainer.max_epochs'"),
        ({"model": None}, r"file run.yaml has no model; expected model: package.module.Class"),
        ({"model": {"class": "net.Net"}}, r"model is .*\(file run.yaml\); expected .*; did you mean 'class_path'"),
        ({"model": {"class_path": "net.Net", "init_arg": {}}}, r"the key 'init_arg' .*did you mean 'init_args'"),
        ({"model": {"class_path": 3}}, r"model.class_path is 3"),
        ({"model": "Net"}, r"model is 'Net' \(file run.yaml\); expected package.module.Class"),
        ({"model": "missing.Net"}, r"there is no module 'missing'"),
        ({"model": "net.Nett"}, r"net has no 'Nett'; .*did you mean 'Net'"),
        (
            {"model": "torch.nn.Linear"},
            r"model is torch.nn.Linear \(file run.yaml\), a class; expected a stratagem.Module",
        ),
        ({"model": "net.Data"}, r"model is net.Data .*expected a stratagem.Module"),
        ({"model": "net.returns_data"}, r"model is net.returns_data .*a function; expected a stratagem.Module"),
        ({"model": "net.GOT"}, r"model is net.GOT .*an object; expected a stratagem.Module"),
        ({"model": "net.unannotated"}, r"annotate it: `def unannotated\(\.\.\.\) -> stratagem.Module:`"),
        ({"model": "net.lies"}, r"model is net.lies .*returned a Linear; expected a stratagem.Module"),
        ({"data": "net.Net"}, r"data is net.Net .*expected a stratagem.DataModule"),
        ({"data": {"class_path": "net.Data", "init_args": {"batchsize": 3}}}, r"data sets 'batchsize' .*'batch_size'"),
        (
            {"data": {"class_path": "net.Data", "init_args": {"shuffle": "no"}}},
            r"data.shuffle is 'no' \(file run.yaml\)",
        ),
        ({"trainer": {"max_epoch": 3}}, r"file run.yaml sets 'max_epoch', .*did you mean 'max_epochs'"),
        ({"trainer": {"max_epochs": "3"}}, r"max_epochs is '3' \(file run.yaml\); expected an integer"),
        ({"trainer": {"strategy": {"name": "ddp", "statik_graph": True}}}, r"static_graph"),
        ({"trainer": [1]}, r"trainer is \[1\] \(file run.yaml\); expected a mapping"),
        ({"seed": "one"}, r"seed is 'one' \(file run.yaml\); expected an integer"),
        ({"seed": -1}, r"seed is -1; expected an integer from 0"),
        ({"ckpt_path": 3}, r"ckpt_path is 3 \(file run.yaml\); expected text"),
    ],
)
def test_mistakes_in_the_file_are_one_sentence(capsys, sections, message):
    write(**sections)

    assert re.search(message, refused(capsys))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.widht", "3"], r"model sets 'widht' \(command line\), .*did you mean 'width'"),
        (["--model.width", "wide"], r"model.width is 'wide' \(command line\); expected an integer"),
        (["--model.width.depth", "3"], r"command line sets model.width.depth and model.width has no arguments"),
        (["--model", "net.Demanding"], r"model lacks 'needed' \(command line\)"),
        (["--trainer.max_epochs", "x"], r"max_epochs is 'x' \(command line\); expected an integer"),
        (["--trainer.max_epoch", "3"], r"command line sets 'max_epoch', .*did you mean 'max_epochs'"),
        (["--trainer.strategy.x", "3", "--trainer.strategy", "ddp"], r"option strategy.ddp.x is unknown"),
        (["--max_epochs", "3"], r"command line sets 'max_epochs'; .*did you mean 'trainer.max_epochs'"),
        (["--trainr.max_epochs", "3"], r"did you mean 'trainer.max_epochs'"),
        (["--print-confg"], r"did you mean 'print-config'"),
        (["--print-config=no"], r"command line sets 'print_config'"),
        (["--trainer", "3"], r"command line sets 'trainer'"),
        (["--seed"], r"--seed has no value"),
        (["3"], r"command line argument '3'; expected --name value"),
        (["--ckpt_path", "nothing.ckpt"], r"nothing.ckpt"),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence(capsys, words, message):
    assert re.search(message, refused(capsys, *words))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.yaml", None, r"'gone.yaml' does not exist"),
        ("run.json", "{}", r"expected a name that ends in .yaml, .yml or .toml"),
        ("list.yaml", "[1]", r"has a list at its top level; expected a mapping with seed, model, data"),
        ("broken.yaml", "a: [", r"is not YAML"),
    ],
)
def test_a_file_that_is_none_is_refused(capsys, name, content, message):
    if content is not None:
        Path(name).write_text(content)
    assert main(["fit", name]) == 1

    assert re.search(message, capsys.readouterr().err)


def test_data_that_the_file_does_not_have_cannot_get_arguments(capsys):
    write(data=None)

    assert "add --data CLASS" in refused(capsys, "--data.batch_size", "3")


def test_what_the_users_module_imports_is_the_users_error(tmp_path):
    (tmp_path / "elsewhere.py").write_text("import not_there\n")
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        main(["fit", "run.yaml", "--model", "elsewhere.Net"])


def test_nothing_is_built_before_all_is_checked(capsys):
    write(data={"class_path": "net.Data", "init_args": {"shuffle": 3}})
    refused(capsys, "--model", "net.Demanding", "--model.needed", "1")

    assert sys.modules["net"].GOT == []


def test_a_checkpoint_names_no_class_that_is_imported(tmp_path):
    assert main(["fit", "run.yaml"]) == 0
    (tmp_path / "elsewhere.py").write_text("raise SystemExit('imported')\n")
    state = read_any("checkpoints/last.ckpt")
    state["hyper_parameters"] = {"class_path": "elsewhere.Net", "model": {"class_path": "elsewhere.Net"}}
    from stratagem.checkpoint.background_save import SingleProcessRun
    from stratagem.stack.formats import format_named, write_with

    write_with(format_named("full"), state, tmp_path / "evil.ckpt", SingleProcessRun())
    assert main(["validate", "run.yaml", "--ckpt_path", "evil.ckpt"]) == 0

    assert "elsewhere" not in sys.modules


# --- Arguments ---------------------------------------------------------------------------------------------------


def test_inner_objects_are_built_wherever_they_stand(capsys):
    relu, linear = {"class_path": "torch.nn.ReLU"}, {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2}}
    linear["init_args"]["out_features"] = 3
    inner = {
        "block": linear,
        "blocks": [relu, linear],
        "named": {"a": relu},
        "pair": [relu, {"class_path": "net.Data"}],
    }
    got = built(capsys, {"needed": 1} | inner)

    assert got["block"].weight.shape == (3, 2)
    assert [type(each) for each in got["blocks"]] == [torch.nn.ReLU, torch.nn.Linear]
    assert type(got["named"]["a"]) is torch.nn.ReLU
    assert [type(each).__name__ for each in got["pair"]] == ["ReLU", "Data"]


def test_a_data_class_is_filled_from_the_command_line(capsys):
    got = built(capsys, {"needed": 1}, "--model.sizes.width", "3", "--model.sizes.ratio", "2")

    assert got["sizes"] == sys.modules["net"].Sizes(3, 2, 2.0)


def test_arguments_without_a_class_are_refused(capsys):
    message = r"model.block is \{'width': 3\} \(command line\); .*add --model.block.class_path package.module.Class"
    write(model={"class_path": "net.Demanding", "init_args": {"needed": 1}})
    assert re.search(message, refused(capsys, "--model.block.width", "3"))


def test_values_become_what_annotations_say(capsys):
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.25}}
    got = built(
        capsys,
        {
            "needed": 1, "sizes": {"width": 3, "ratio": 1}, "optimizer": optimizer, "act": "torch.relu",
            "dtype": "torch.bfloat16", "kind": "torch.nn.Bilinear", "color": "blue", "shape": [3, 4], "path": "there",
            "unknown": "anything",
        },
    )  # fmt: skip
    parameter = torch.nn.Parameter(torch.zeros(1))

    assert got["sizes"] == sys.modules["net"].Sizes(3, 2, 1.0)
    assert got["optimizer"]([parameter]).param_groups[0]["lr"] == 0.25
    assert got["act"] is torch.relu
    assert got["optimizer"].func is torch.optim.AdamW
    assert got["dtype"] is torch.bfloat16
    assert got["kind"] is torch.nn.Bilinear
    assert got["color"] is sys.modules["net"].Color.BLUE
    assert got["shape"] == (3, 4)
    assert got["path"] == Path("there")
    assert got["unknown"] == "anything"


def test_text_of_the_line_is_parsed_by_the_annotation(capsys):
    got = built(
        capsys,
        {"needed": 1, "sizes": {"width": 3}, "options": {"a": 1}, "block": {"class_path": "torch.nn.ReLU"}},
        *["--model.needed", "-2", "--model.sizes.width", "7", "--model.bare", "2.5", "--model.shape", "3,4"],
        *["--model.options.b", "[1, 2]", "--model.small", "1e-3", "--model.path", "5", "--model.color", "blue"],
        *["--model.block.negative_slope", "0.5", "--model.block.class_path", "torch.nn.LeakyReLU"],
        *["--model.named", '{"x": {"class_path": "torch.nn.ELU"}}', "--model.kind", "torch.nn.Bilinear"],
    )

    assert (got["needed"], got["sizes"].width, got["bare"], got["shape"]) == (-2, 7, 2.5, (3, 4))
    assert (got["options"], got["small"], got["path"]) == ({"a": 1, "b": [1, 2]}, 0.001, Path("5"))
    assert got["color"] is sys.modules["net"].Color.BLUE
    assert (type(got["block"]), got["block"].negative_slope) == (torch.nn.LeakyReLU, 0.5)
    assert type(got["named"]["x"]) is torch.nn.ELU
    assert got["kind"] is torch.nn.Bilinear


@pytest.mark.parametrize(
    ("act", "value"),
    [
        ({"class_path": "torch.nn.LeakyReLU", "init_args": {"negative_slope": 0.5}}, -0.5),
        ({"class_path": "torch.nn.functional.leaky_relu", "init_args": {"negative_slope": 0.25}}, -0.25),
    ],
)
def test_something_to_call_is_an_object_or_a_function_with_its_arguments(capsys, act, value):
    got = built(capsys, {"needed": 1, "act": act})

    assert float(got["act"](torch.tensor(-1.0))) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"block": {"class_path": "torch.nn.ReLU", "init_args": {"inplce": True}}},
            r"model.block sets 'inplce' .*'inplace'",
        ),
        (
            {"block": {"class_path": "torch.nn.ReLU", "inplace": True}},
            r"'inplace' next to class_path .*under init_args",
        ),
        ({"block": {"class_path": "net.Data"}}, r"model.block is net.Data \(file run.yaml\); expected a Module"),
        (
            {"block": {"class_path": "net.returns_data"}},
            r"model.block is net.returns_data \(file run.yaml\); expected a Module",
        ),
        ({"block": 3}, r"model.block is 3 \(file run.yaml\); expected a Module or None"),
        ({"block": {"class_path": "torch.pi"}}, r"which cannot be called"),
        (
            {"blocks": [{"class_path": "torch.nn.Nope"}]},
            r"model.blocks\[0\] is 'torch.nn.Nope' .*torch.nn has no 'Nope'",
        ),
        (
            {"named": {"a": {"class_path": "net.Data"}}},
            r"model.named.a is net.Data \(file run.yaml\); expected a Module",
        ),
        (
            {"pair": [{"class_path": "net.Data"}] * 2},
            r"model.pair\[0\] is net.Data \(file run.yaml\); expected a Module",
        ),
        ({"sizes": {"width": 3, "dept": 3}}, r"model.sizes sets 'dept' .*did you mean 'depth'"),
        ({"sizes": {"depth": 3}}, r"model.sizes lacks 'width'"),
        ({"sizes": {"width": "3"}}, r"model.sizes.width is '3'"),
        (
            {"sizes": {"width": 3, "ratio": "1e-3"}},
            r"model.sizes.ratio is '1e-3' .*write 0.001, as YAML reads 1e-3 as text",
        ),
        ({"small": "1e-5"}, r"model.small is '1e-5' .*write 1.0e-05"),
        ({"needed": "8"}, r"model.needed is '8' .*expected an integer; write 8 without quotes"),
        ({"needed": "1e3"}, r"model.needed is '1e3' .*expected an integer; write 1000, as YAML reads 1e3 as text"),
        ({"needed": "8.0"}, r"model.needed is '8.0' .*expected an integer; write 8 without quotes"),
        ({"needed": "1.5"}, r"model.needed is '1.5' .*expected an integer\.$"),
        ({"needed": "inf"}, r"model.needed is 'inf' .*expected an integer\.$"),
        ({"small": "0.25"}, r"model.small is '0.25' .*write 0.25 without quotes"),
        ({"color": "green"}, r"model.color is 'green' .*'red' or 'blue'"),
        ({"dtype": "torch.bfloat17"}, r"torch has no 'bfloat17'"),
        ({"dtype": "torch.nn"}, r"expected a dtype"),
        ({"shape": [1]}, r"model.shape is \[1\]"),
        ({"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lrr": 1}}}, r"'lrr' .*did you mean 'lr'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(capsys, arguments, message):
    write(model={"class_path": "net.Demanding", "init_args": {"needed": 1} | arguments})

    assert re.search(message, refused(capsys))


#: What leaves a file called "canary" behind when it is called, with the arguments for that.
CANARIES = {
    "os.system": {"command": "touch canary"},
    "os.mkdir": {"path": "canary"},
    "builtins.open": {"file": "canary", "mode": "w"},
    "subprocess.Popen": {"args": ["touch", "canary"]},
    "subprocess.run": {"args": ["touch", "canary"]},
    "net.leaves_a_canary": {},
    "net.os.system": {"command": "touch canary"},
}


@pytest.mark.parametrize("class_path", CANARIES)
@pytest.mark.parametrize(
    "where",
    ["model", "data", "block", "blocks", "named", "pair", "optimizer", "act", "dtype", "bare", "unknown", "options"],
)
def test_what_is_not_wanted_is_refused_and_not_called(capsys, where, class_path):
    spec = {"class_path": class_path, "init_args": CANARIES[class_path]}
    value = {"blocks": [spec], "named": {"a": spec}, "pair": [spec, "net.Data"], "options": {"a": spec}}.get(
        where, spec
    )
    trainer = RUN["trainer"] | {"fast_dev_run": True}
    if where in ("model", "data"):
        write(**{where: spec}, trainer=trainer)
    else:
        write(model={"class_path": "net.Demanding", "init_args": {"needed": 1, where: value}}, trainer=trainer)
    if class_path == "net.leaves_a_canary" and where in ("optimizer", "act"):  # the model may call what is its own
        assert main(["fit", "run.yaml"]) == 0
        assert not Path("canary").exists()
        return
    error = refused(capsys)

    assert not Path("canary").exists()
    assert where in error
    assert class_path in error
    assert "; expected " in error


@pytest.mark.parametrize(
    ("name", "class_path"), [("optimizer", "os.system"), ("act", "os.system"), ("kind", "subprocess.Popen")]
)
def test_the_path_of_something_to_call_is_checked_too(capsys, name, class_path):
    write(model={"class_path": "net.Demanding", "init_args": {"needed": 1, name: class_path}})

    assert re.search(f"model.{name} is {class_path} .*; expected ", refused(capsys))


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in ("path", "needed", "color", "block", "dtype") for form in ("list", "nested")]
    + [(name, "mapping") for name in ("path", "needed", "color")],  # a mapping may fill a class
)
def test_a_container_for_an_argument_that_holds_none_is_refused_before_its_items_are_built(capsys, name, form):
    spec = {"class_path": "net.LeavesACanary"}
    value = {"list": [spec], "nested": [[3, {"a": spec}]], "mapping": {"a": spec}}[form]
    write(model={"class_path": "net.Demanding", "init_args": {"needed": 1, name: value}})

    assert re.search(rf"model.{name} is a (list|mapping) \(file run.yaml\); expected ", refused(capsys))
    assert not Path("canary").exists()


def test_each_place_of_a_tuple_takes_its_own_type(capsys):
    pair = [{"class_path": "torch.nn.ReLU"}, {"class_path": "net.LeavesACanary"}]
    write(model={"class_path": "net.Demanding", "init_args": {"needed": 1, "pair": pair}})

    assert "model.pair[1] is net.LeavesACanary" in refused(capsys)
    assert not Path("canary").exists()


@pytest.mark.parametrize(
    ("name", "spec", "kind"),
    [
        ("bare", {"class_path": "torch.nn.ReLU"}, "torch.nn.ReLU"),
        ("bare", {"class_path": "net.Tokenizer"}, "net.Tokenizer"),
        ("bare", {"class_path": "net.makes_a_tokenizer"}, "net.Tokenizer"),
        ("block", {"class_path": "net.made", "init_args": {"width": 2}}, "net.Net"),
        ("options", {"a": {"class_path": "net.Tokenizer"}}, "builtins.dict"),
        ("optimizer", {"class_path": "net.makes_an_optimizer", "init_args": {"lr": 0.5}}, "functools.partial"),
        ("act", "net.doubled", "builtins.function"),
        ("act", {"class_path": "torch.nn.init.zeros_"}, "functools.partial"),
        ("kind", "net.Net", "builtins.type"),
    ],
)
def test_what_is_wanted_is_built(capsys, name, spec, kind):
    got = type(built(capsys, {"needed": 1, name: spec})[name])

    assert f"{got.__module__}.{got.__name__}".replace("torch.nn.modules.activation", "torch.nn") == kind


def test_another_class_drops_the_arguments_of_the_first():
    words = ["--model.how", "error", "--model", "net.Failing", "--model.rank", "7"]
    assert main(["fit", "run.yaml", *words]) == 0

    assert weights()["layers.0.weight"].shape == (8, 4)  # the default width, and no complaint about 6


@pytest.mark.parametrize("function", ["net.made", "net.with_any_options"])
def test_a_function_may_make_the_model(function):
    assert main(["fit", "run.yaml", "--model", function, "--model.width", "5"]) == 0

    assert weights()["layers.0.weight"].shape == (5, 4)


# --- Printing ----------------------------------------------------------------------------------------------------


def printed(capsys, *words):
    assert main(["fit", "run.yaml", *words, "--print-config"]) == 0
    return capsys.readouterr().out


def test_the_printed_configuration_is_complete_and_runs_nothing(capsys):
    content = yaml.safe_load(printed(capsys, "--model.lr", "0.5"))

    assert content["model"] == {"class_path": "net.Net", "init_args": {"width": 6, "lr": 0.5}}
    assert content["data"] == {"class_path": "net.Data", "init_args": {"batch_size": 8, "shuffle": False}}
    assert set(content["trainer"]) == set(option_names(TrainerSettings))
    assert content["trainer"]["max_epochs"] == 2
    assert content["trainer"]["log_every_n_steps"] == 50
    assert sorted(path.name for path in Path.cwd().iterdir() if path.name != "__pycache__") == ["net.py", "run.yaml"]


@pytest.mark.slow
def test_the_printed_configuration_can_be_fed_back(capsys, monkeypatch):
    monkeypatch.setenv("STRATAGEM_TRAINER_MIN_EPOCHS", "1")
    inner = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 3}}
    arguments = {"needed": 1, "block": inner, "blocks": [inner], "sizes": {"width": 3}, "dtype": "torch.float64"}
    write(model={"class_path": "net.Demanding", "init_args": arguments})
    strategy = ["--trainer.strategy", "ddp", "--trainer.strategy.timeout", "60", "--trainer.max_time", "90"]
    first = printed(capsys, *strategy)
    monkeypatch.delenv("STRATAGEM_TRAINER_MIN_EPOCHS")
    Path("run.yaml").write_text(first)
    second = printed(capsys)
    before, after = (
        gather(TrainerSettings, {}, [Source("file", values=yaml.safe_load(text)["trainer"])])
        for text in (first, second)
    )

    assert first == second
    assert yaml.safe_load(first)["trainer"]["strategy"] == {"name": "ddp", "timeout": 60.0}
    assert yaml.safe_load(first)["model"]["init_args"]["blocks"][0]["init_args"]["bias"] is True
    assert (before.min_epochs, before.max_time) == (1, after.max_time)
    assert main(["fit", "run.yaml", "--trainer.strategy", "auto", "--trainer.max_time", "none"]) == 0
    assert sys.modules["net"].GOT[-1]["dtype"] is torch.float64


def test_the_printed_configuration_leaves_secrets_out(capsys):
    write(trainer=RUN["trainer"] | {"logger": {"name": "remote", "api_key": "hush", "project": "mine"}})
    text = printed(capsys)

    assert "hush" not in text
    assert text.startswith("# trainer.logger.api_key is left out")
    assert yaml.safe_load(text)["trainer"]["logger"] == {"name": "remote", "project": "mine"}


def test_explain_shows_the_stack_and_where_values_are_from(capsys):
    assert main(["fit", "run.yaml", "--model.lr", "0.5", "--explain"]) == 0
    text = capsys.readouterr().out

    assert "model net.Net  (file run.yaml)\n|   width: 6  (file run.yaml)\n|   lr: 0.5  (command line)" in text
    assert "max_epochs: 2  (file run.yaml)" in text
    assert "+ callback model_checkpoint" in text
    assert not Path("checkpoints").exists()


def test_explain_writes_values_as_a_run_file_does(capsys):
    """What is printed after the colon can be pasted into the file."""
    trainer = RUN["trainer"] | {"max_time": "00:00:01:00", "default_root_dir": "null", "limit_val_batches": 0.5}
    write(trainer=trainer | {"callbacks": [{"name": "model_checkpoint", "monitor": "val: loss", "save_last": True}]})
    assert main(["fit", "run.yaml", "--explain"]) == 0
    text = capsys.readouterr().out
    found = {
        name: yaml.safe_load(value)
        for name, value in re.findall(r"^[| ]\s+(\w+): (.*?)  \([^()]+\)$", text, re.MULTILINE)
    }

    assert [found[name] for name in ("monitor", "save_last", "dirpath", "limit_val_batches")] == [
        "val: loss", True, None, 0.5,
    ]  # fmt: skip
    assert found["default_root_dir"] == "null"
    assert "|   mode: min  (default)\n" in text
    assert "|   filename: '{epoch}-{step}'  (default)\n" in text
    assert not re.search(r": (None|True|False)  \(", text)
    assert text.count("1 process on 1 node\n") == 1


# --- Schema ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def validator():
    import jsonschema

    from stratagem_fit.schema import schema

    return jsonschema.Draft202012Validator(json.loads(json.dumps(schema())))


@pytest.mark.slow
def test_the_schema_takes_what_the_program_takes(capsys, validator):
    validator.check_schema(validator.schema)
    validator.validate(RUN)
    validator.validate(yaml.safe_load(printed(capsys)))
    (page,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    validator.validate(yaml.safe_load(page))


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [
        {"strategy": "ddp"},
        {"strategy": {"name": "ddp", "bucket_cap_mb": 5, "timeout": 60}},
        {"strategy": {"name": "stratagem-ddp:ddp", "static_graph": True}},
        {"strategy": "auto", "strategy.timeout": 60},
        {"precision": 16},
        {"precision": "bf16-mixed"},
        {"comm_hook": ["fp16_compress", {"name": "bf16_compress"}]},
        {"callbacks": {"name": "early_stopping", "monitor": "val_loss"}},
        {"plugins": ["fp16_compress"]},
        {"logger": False},
        {"devices": [0, 1]},
        {"accumulate_grad_batches": {0: 8, 5: 4}},
        {"limit_train_batches": 0.5},
        None,
    ],
)
def test_the_schema_takes_choices_of_plugins(validator, trainer):
    validator.validate(RUN | {"trainer": trainer})
    gather(TrainerSettings, {}, [Source("file", values={k: v for k, v in (trainer or {}).items() if "." not in k})])


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"modell": "net.Net"}, []),
        ({"seed": "1"}, ["seed"]),
        ({"model": "Net"}, ["model"]),
        ({"model": {"class_path": "net.Net", "init_arg": {}}}, ["model"]),
        ({"data": 3}, ["data"]),
        ({"trainer": {"max_epoch": 3}}, ["trainer"]),
        ({"trainer": {"max_epochs": "3"}}, ["trainer", "max_epochs"]),
        ({"trainer": {"gradient_clip_algorithm": "norms"}}, ["trainer", "gradient_clip_algorithm"]),
        ({"trainer": {"strategy": "dpd"}}, ["trainer", "strategy"]),
        ({"trainer": {"strategy": {"name": "ddp", "bucket_cap_mb": "x"}}}, ["trainer", "strategy", "bucket_cap_mb"]),
        ({"trainer": {"callbacks": [{"name": "early_stopping", "monitr": "x"}]}}, ["trainer", "callbacks", 0]),
        ({"trainer": {"callbacks": [{"name": "prediction_writer"}]}}, ["trainer", "callbacks", 0]),
    ],
)
def test_the_schema_points_at_what_is_wrong(validator, sections, where):
    errors = list(validator.iter_errors(RUN | sections))

    assert where in [list(error.absolute_path) for error in errors]


def test_the_schema_describes_options_with_their_comments(validator):
    trainer = validator.schema["$defs"]["trainer"]["properties"]
    strategies = json.dumps(validator.schema["$defs"]["strategy"])

    assert trainer["num_nodes"]["description"].startswith("The number of machines")
    assert trainer["max_steps"]["default"] == -1
    assert "Larger buckets mean fewer messages" in strategies


# --- Completion --------------------------------------------------------------------------------------------------


#: One worker of pytest-xdist runs what one shell completes.
SHELLS = pytest.mark.xdist_group("completion in shells")


@pytest.fixture(scope="module")
def scripts():
    from stratagem_fit.completion import SHELLS, script

    return {shell: script(shell) for shell in SHELLS}


def answered(shell, script, questions, folder):
    """Return the words that `shell` prints for each of `questions`: commands that one program runs after `script`."""
    (folder / "script").write_text(script)
    (folder / "run.yaml").touch()
    asked = "\necho @@@\n".join(["source ./script", *questions])
    result = subprocess.run([*shell, asked], cwd=folder, capture_output=True, text=True, check=True, timeout=180)
    _, *answers = result.stdout.split("@@@\n")
    return answers


#: Options of the plugin that is chosen, in each spelling; of a preset; of all where the choice is not known.
CHOSEN = [
    (["fit", "run.yaml", "--trainer.strategy", "ddp", "--trainer.strategy.stat"], {"--trainer.strategy.static_graph"}),
    (["fit", "run.yaml", "--trainer.strategy=fsdp", "--trainer.strategy.cpu"], {"--trainer.strategy.cpu_offload"}),
    (["test", "run.yaml", "--trainer.strategy", "ddp", "--trainer.strategy.cpu"], set()),
    (["fit", "run.yaml", "--trainer.strategy", "ddp_fork", "--trainer.strategy.cpu"], set()),
    (
        ["fit", "run.yaml", "--trainer.strategy", "mine", "--trainer.strategy.static"],
        {"--trainer.strategy.static_graph"},
    ),
    (["fit", "run.yaml", "--trainer.comm_hook", "fp16_compress", "--trainer.comm_hook.ra"], set()),
    (["fit", "run.yaml", "--trainer.comm_hook", "topk", "--trainer.comm_hook.ra"], {"--trainer.comm_hook.ratio"}),
]
CHOSEN_IDS = [" ".join(words) for words, _ in CHOSEN]

#: What bash completes: words, and what it offers for the last of them.
BASH = [
    (["fi"], {"fit"}),
    (["plugins", "show", "early"], {"early_stopping"}),
    (["plugins", "list", "--kind", "l"], {"launcher", "logger"}),
    (["fit", "run."], {"run.yaml"}),
    (["fit", "run.yaml", "--trainer.max_ep"], {"--trainer.max_epochs"}),
    (["fit", "run.yaml", "--trainer.max_epochs", "3", "--trainer.comm_hook", "fp"], {"fp16_compress"}),
    (["validate", "run.yaml", "--print"], {"--print-config"}),
    (["fit", "run.yaml", "--trainer.strategy.bucket"], {"--trainer.strategy.bucket_cap_mb"}),
    (["fit", "run.yaml", "--trainer.strategy.static_graph", "t"], {"true"}),
    *CHOSEN,
    (["completion", ""], {"bash", "zsh", "fish"}),
    (["run", "run.yaml", "--launcher", "t"], {"torchrun"}),
    (["run", "run.yaml", "--submit", "s"], {"slurm"}),
    (["run", "run.yaml", "--rdzv-e"], {"--rdzv-endpoint"}),
]


@pytest.fixture(scope="module")
def offered_by_bash(scripts, tmp_path_factory):
    """Return what bash offers for each case of `BASH`."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    questions = [
        f"COMP_WORDS=(stratagem {shlex.join(words)}); COMP_CWORD={len(words)}; "
        '(_stratagem_of_chosen; printf "%s\\n" "${COMPREPLY[@]}")'
        for words, _ in BASH
    ]
    return answered(["bash", "-c"], scripts["bash"], questions, tmp_path_factory.mktemp("bash"))


@pytest.mark.slow
@SHELLS
@pytest.mark.parametrize("case", range(len(BASH)), ids=[" ".join(words) for words, _ in BASH])
def test_bash_completes(offered_by_bash, case):
    assert set(offered_by_bash[case].split()) == BASH[case][1]


@pytest.fixture(scope="module")
def offered_by_fish(scripts, tmp_path_factory, need):
    """Return what fish offers for each case of `CHOSEN`."""
    need("fish", package="fish")
    questions = [f"complete -C '{' '.join(['stratagem', *words])}'" for words, _ in CHOSEN]
    return answered(["fish", "-c"], scripts["fish"], questions, tmp_path_factory.mktemp("fish"))


@pytest.mark.slow
@pytest.mark.every_push(
    "fit run.yaml --trainer.strategy=fsdp --trainer.strategy.cpu",
    "test run.yaml --trainer.strategy ddp --trainer.strategy.cpu",
    "fit run.yaml --trainer.strategy ddp_fork --trainer.strategy.cpu",
    "fit run.yaml --trainer.strategy mine --trainer.strategy.static",
    "fit run.yaml --trainer.comm_hook fp16_compress --trainer.comm_hook.ra",
    "fit run.yaml --trainer.comm_hook topk --trainer.comm_hook.ra",
)
@SHELLS
@pytest.mark.parametrize("case", range(len(CHOSEN)), ids=CHOSEN_IDS)
def test_fish_offers_the_options_of_the_chosen_plugin(offered_by_fish, case):
    assert {each.split("\t")[0] for each in offered_by_fish[case].splitlines()} == CHOSEN[case][1]


@pytest.fixture(scope="module")
def offered_by_zsh(scripts, tmp_path_factory, need):
    """Return what zsh's own completion gets for each case of `CHOSEN`, without a terminal to complete in."""
    need("zsh", package="zsh")
    script = f"compdef() {{ }}\neval {shlex.quote(scripts['zsh'])}"
    questions = [
        f"(_shtab_stratagem() {{ print -rl -- $_shtab_stratagem_{words[0]}_options }}; "
        f"words=(stratagem {' '.join(words)}); CURRENT=$#words; _stratagem_of_chosen)"
        for words, _ in CHOSEN
    ]
    return answered(["zsh", "-fc"], script, questions, tmp_path_factory.mktemp("zsh"))


@SHELLS
@pytest.mark.parametrize("case", range(len(CHOSEN)), ids=CHOSEN_IDS)
def test_zsh_offers_the_options_of_the_chosen_plugin(offered_by_zsh, case):
    words, offered = CHOSEN[case]
    names = {each.split("[")[0] for each in offered_by_zsh[case].splitlines()}

    assert {name for name in names if name.startswith(words[-1])} == offered


@SHELLS
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_script(scripts, shell, tmp_path, need):
    need(shell, package=shell)
    (tmp_path / "script").write_text(scripts[shell])
    result = subprocess.run([shell, "-n", "script"], capture_output=True, text=True, check=False, timeout=120)

    assert result.returncode == 0, result.stderr
    assert "early_stopping" in scripts[shell]


def test_completion_knows_no_other_shell(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])

    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


# --- The page ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_runs(tmp_path, capsys, monkeypatch):
    """Every file of docs/run-files.md is written, every shell line is run.

    Two lines are run as a program: that of two processes, and predict, which no other test of this file runs as one.
    """
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    programs = []
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if language != "shell":
            name, _, content = block.partition("\n")
            Path(name.removeprefix("# ")).write_text(content)
            continue
        for line in block.splitlines():
            words, _, target = line.partition(" > ")
            name, *arguments = shlex.split(words)
            assert name == "stratagem"
            if "predict" in arguments or "--trainer.devices" in arguments:
                command = [Path(sys.executable).with_name(name), *arguments]
                done = run_script(command, capture_output=True, text=True, timeout=360)
                code, out, error = done.returncode, done.stdout, done.stderr
                programs.append(line)
            else:
                sys.modules.pop("net", None)
                code, (out, error) = main(arguments), capsys.readouterr()
            if target:
                Path(target).write_text(out)
            assert code == 0, f"{line}\n{error}"

    assert len(programs) == 2
    assert len(list((folder / "predictions").iterdir())) == 8
    assert json.loads((folder / "run.schema.json").read_text())["title"] == "stratagem run file"


def test_the_sentence_of_the_page_is_what_is_printed(capsys):
    sentence = re.search(r"^    (stratagem: model.width .*)$", PAGE.read_text(), re.MULTILINE)

    assert refused(capsys, "--model.width", "wide").rstrip("\n") == sentence[1]
