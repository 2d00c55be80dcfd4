"""What `stratagem plugins new` writes is a working plugin, and what it refuses leaves nothing behind."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from flit_core import buildapi

import stratagem as sg
from ports import free_port
from programs import scripts
from stratagem.api.world import Collectives
from stratagem.cli import main
from stratagem.discovery import registry
from stratagem.errors import CheckpointError, ConfigError
from stratagem_devtools.descriptions import describe
from stratagem_devtools.scaffold import render, write
from stratagem_plugin_checks import check_entry
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    Gan,
    Net,
    joined_batches,
    net,
    part,
    relative_difference,
    train_gan_plainly,
    train_plainly,
)
from stratagem_trainer.checkpoint_files import newest_complete, read_any
from stratagem_trainer.option_texts import option_docs

ROOT = Path(__file__).parents[2]
KINDS = [*registry.kinds(), "command"]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


# --- What is written ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def written_plugins(into):
    """Yield a function that writes a plugin and puts it on the path as an installation would.

    The plugin can be imported, and its entry point is found; at the end neither is possible any more.
    """
    modules = []

    def make(kind, name):
        folder = write(kind, name, into)
        with contextlib.chdir(folder):
            buildapi.prepare_metadata_for_build_wheel(str(folder))
        patch.syspath_prepend(folder)
        registry.refresh()
        modules.append(f"stratagem_{name}")
        return registry.find(kind, name)

    with pytest.MonkeyPatch.context() as patch:
        yield make
        for module in modules:
            sys.modules.pop(module, None)
    registry.refresh()


@pytest.fixture
def made(tmp_path):
    """Return a function that writes a plugin, which is installed until the test ends."""
    with written_plugins(tmp_path) as make:
        yield make


@pytest.mark.parametrize("kind", registry.kinds())
def test_every_kind_is_a_sound_plugin(kind, made):
    entry = made(kind, f"my_{kind}")
    cls = entry.load()

    assert check_entry(entry) is None
    assert issubclass(cls, registry.kinds()[kind].base)
    assert attrs.has(cls)
    assert cls().kind == kind
    assert [f.name for f in attrs.fields(cls) if f.init and f.name not in option_docs(cls)] == []
    assert describe(entry)["summary"]
    assert (entry.distribution, entry.version) == (f"stratagem-my-{kind.replace('_', '-')}", "0.1.0")


def test_a_name_that_means_something_already_gets_another_class(made):
    entry = made("strategy", "strategy")

    assert check_entry(entry) is None
    assert entry.load().__name__ == "StrategyStrategy"


@pytest.mark.parametrize(("name", "cls"), [("quick_strategy", "QuickStrategy"), ("quick", "QuickStrategy")])
def test_the_class_ends_with_the_kind(name, cls):
    assert f'{name} = "stratagem_{name}:{cls}"' in render("strategy", name)["pyproject.toml"]


def test_a_kind_of_another_package_has_a_scaffold(made, tmp_path_factory, monkeypatch):
    evaluators, installed = ROOT / "examples/plugins/evaluators", tmp_path_factory.mktemp("evaluators")
    monkeypatch.chdir(evaluators)
    buildapi.prepare_metadata_for_build_wheel(str(installed))
    for path in (evaluators, installed):
        monkeypatch.syspath_prepend(path)
    registry.refresh()
    entry = made("evaluator", "my_evaluator")

    assert check_entry(entry) is None
    assert entry.load().__mro__[1] is registry.kinds()["evaluator"].base
    required = render("evaluator", "my_other")["pyproject.toml"]
    assert 'dependencies = ["stratagem-core>=0.1,<0.2", "attrs>=24.1", "stratagem-evaluators"]' in required


@pytest.fixture(scope="module")
def linted(tmp_path_factory):
    """Return a folder with the plugins of each kind, and what ruff finds in all of them."""
    folder = tmp_path_factory.mktemp("kinds")
    for kind in KINDS:
        (folder / kind).mkdir()
        write(kind, "my_idea", folder / kind)
    config = ["--no-cache", "--config", str(ROOT / "pyproject.toml"), str(folder)]
    found = []
    for command in (["check", "--output-format", "concise"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, *config]
        result = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, check=False)
        lines = [line for line in result.stdout.splitlines() if str(folder) in line]
        assert result.returncode == bool(lines), result.stdout + result.stderr
        found += lines
    return folder, found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_clean_and_tested(kind, linted):
    folder, found = linted

    assert [line for line in found if str(folder / kind) in line] == []
    if kind == "command":
        return
    conformance = registry.kinds()[kind].conformance.rpartition(":")[2]
    stated = (folder / kind / "stratagem-my-idea" / "stratagem_my_idea" / "conformance.py").read_text()
    assert f"Conformance({conformance}):\n" in stated
    assert 'plugin = "my_idea"' in stated


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["strategy", "none", "path", "exception", "capabilities", "rank2"])
def test_no_name_breaks_the_source(kind, name):
    for path, text in render(kind, name).items():
        assert "$" not in text.replace("${{", "")
        if path.endswith(".py"):
            compile(text, path, "exec")


def test_an_accelerator_and_an_environment_import_no_torch(made):
    for kind in ("accelerator", "environment"):
        made(kind, f"my_{kind}")
    code = "import sys, stratagem_my_accelerator, stratagem_my_environment; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)

    assert result.stdout == "False\n"


def test_contrib_has_what_is_written():
    template = ROOT / "contrib" / "template"
    left_by_tools = {"__pycache__", ".pytest_cache", ".ruff_cache"}
    paths = [path.relative_to(template) for path in template.rglob("*") if path.is_file()]
    found = {path.as_posix(): (template / path).read_text() for path in paths if not left_by_tools & set(path.parts)}

    assert found == render("strategy", "my_idea")


def test_templates_are_in_the_wheel(tmp_path):
    package = ROOT / "plugins/tools"
    build = f"from hatchling import build; build.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=package, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {path.name for path in (package / "stratagem_devtools/templates").iterdir()}

    assert {f"{kind}.py.txt" for kind in KINDS} < templates
    assert {f"stratagem_devtools/templates/{name}" for name in templates} <= names


def test_the_command_says_where_and_what_next(tmp_path, capsys):
    assert main(["plugins", "new", "logger", "my_idea"]) == 0  # tests run in tmp_path
    text = capsys.readouterr().out

    assert text.startswith("wrote stratagem-my-idea; next: cd stratagem-my-idea && pip install")
    assert (tmp_path / "stratagem-my-idea" / "pyproject.toml").exists()

    (tmp_path / "a b").mkdir()
    assert main(["plugins", "new", "logger", "my_idea", "--into", "a b"]) == 0
    assert "cd 'a b/stratagem-my-idea' &&" in capsys.readouterr().out


# --- What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strategies", "my_idea"], "kind 'strategies' is unknown; expected strategy, .*did you mean 'strategy'"),
        (["plugin", "my_idea"], "kind 'plugin' is unknown; expected strategy, .*, command"),
        (["strategy", "My-Idea"], "name 'My-Idea' is not valid .*; expected lower-case .*; write 'my_idea'"),
        (["strategy", "MyIdea"], "write 'my_idea'"),
        (["strategy", "2nd_idea_"], "write 'nd_idea'"),
        (["strategy", "my__idea"], "write 'my_idea'"),
        (["strategy", "class"], "write 'class_strategy'"),
        (["strategy", ""], "choose another name"),
        (["strategy", "../idea"], "write 'idea'"),
        (["strategy", "ddp"], "strategy 'ddp' is installed already, by stratagem-ddp; .*choose another name"),
        (["callback", "ddp"], "a package stratagem-ddp is installed already, with strategy"),
        (["strategy", "my_idea", "--into", "nowhere"], "nowhere does not exist; expected a folder"),
        (["strategy", "my_idea", "--into", "file"], "file is a file; expected a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_sentence_and_writes_nothing(arguments, message, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")

    assert main(["plugins", "new", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("existing", ["folder", "file", "dangling link"])
def test_nothing_is_overwritten(existing, tmp_path):
    there = tmp_path / "stratagem-my-idea"
    if existing == "folder":
        there.mkdir()
    elif existing == "file":
        there.write_text("mine")
    else:
        there.symlink_to("nowhere")

    with pytest.raises(ConfigError, match=r"stratagem-my-idea exists already; .*nothing was written\.$"):
        write("strategy", "my_idea", tmp_path)
    assert list(tmp_path.iterdir()) == [there]
    assert not (existing == "folder" and list(there.iterdir()))


def test_a_disk_that_refuses_leaves_no_half(tmp_path, monkeypatch):
    write_text, written = Path.write_text, []

    def full(self, *arguments, **options):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(self)
        return write_text(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="could not be written .No space left on device.; expected a writable"):
        write("strategy", "my_idea", tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- What it does ------------------------------------------------------------------------------------------------


def _weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def _fit(module, batches, **arguments):
    trainer = sg.Trainer(**({"max_epochs": 1} | QUIET | arguments))
    trainer.fit(module, part(batches, int(os.environ.get("RANK", "0")), trainer.world_size))
    return _weights(module)


#: Cases in which the strategy is compared with one process: whether and how gradients are clipped, and the window.
CLIPS = {
    "unclipped": {},
    "norm": {"gradient_clip_val": 1.0},
    "value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
}
WINDOWS = (1, 3)


class _Skipping(Net):
    """Uses its second layer on rank 0 alone."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        used = self.net if os.environ["RANK"] == "0" else torch.nn.Sequential(*self.net[:2], *self.net[4:])
        return ((used(x) - y) ** 2).mean()


class _Norm(Net):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))

    def on_validation_end(self):
        self.seen = self.net[0].running_mean.clone()


def _fit_each_case(world_size):
    return {
        (clip, window): _fit(
            Net(),
            joined_batches(10, 32),
            devices=world_size,
            strategy="my_idea",
            accumulate_grad_batches=window,
            **CLIPS[clip],
        )
        for clip in CLIPS
        for window in WINDOWS
    }


def _messages_of(world_size, batches, accumulate):
    from stratagem.distributed.process_group import TorchCollectives

    sent, send = [], TorchCollectives.average_async
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            TorchCollectives, "average_async", lambda self, tensor: (sent.append(tensor), send(self, tensor))[1]
        )
        _fit(Net(), batches, strategy="my_idea", devices=world_size, accumulate_grad_batches=accumulate)
    return len(sent)


def _validate(rank, world_size, options):
    trainer = sg.Trainer(
        strategy={"name": "my_idea", **options}, devices=world_size, max_epochs=1, **QUIET, num_sanity_val_steps=0
    )
    model, batches = _Norm(), part(joined_batches(4, 16), rank, world_size)
    trainer.fit(model, batches, batches)
    return model.seen


def _use_strategy(rank, world_size):
    on_two = {"strategy": "my_idea", "devices": world_size}
    return {
        "cases": _fit_each_case(world_size),
        "gan": _fit(Gan(), joined_batches(6, 16), **on_two),
        "messages": _messages_of(world_size, joined_batches(6, 16), 3),
        "skipping": _fit(_Skipping(), joined_batches(4, 16), **on_two),
        "shared": _validate(rank, world_size, {}),
        "own": _validate(rank, world_size, {"broadcast_buffers": False}),
    }


#: One worker of pytest-xdist runs what one pair of ranks has trained.
ONE_PAIR = pytest.mark.xdist_group("scaffold strategy")


@pytest.fixture(scope="module")
def strategy_on_two(tmp_path_factory):
    """Return what each of two ranks got from the strategy: they train one model after the other."""
    with written_plugins(tmp_path_factory.mktemp("strategy")) as make:
        make("strategy", "my_idea")
        return run_in_processes(_use_strategy, 2)


@pytest.mark.slow
@pytest.mark.every_push("value-3")
@ONE_PAIR
@pytest.mark.parametrize("accumulate", WINDOWS)
@pytest.mark.parametrize("clip", CLIPS)
def test_strategy_equals_one_process_on_the_joined_batch(made, strategy_on_two, accumulate, clip):
    made("strategy", "my_idea")
    batches, options = joined_batches(10, 32), CLIPS[clip]
    by_value = "gradient_clip_algorithm" in options
    limits = {"max_value" if by_value else "max_norm": options.get("gradient_clip_val")}
    reference, _ = train_plainly(batches, accumulate, **limits)
    alone = _fit(Net(), batches, strategy="my_idea", accumulate_grad_batches=accumulate, **options)
    first, second = (rank["cases"][clip, accumulate] for rank in strategy_on_two)

    assert relative_difference(first, reference) < 1e-6
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert relative_difference(alone, reference) < 1e-6


@pytest.mark.slow
@ONE_PAIR
def test_strategy_trains_with_two_optimizers_by_hand(strategy_on_two):
    first, second = (rank["gan"] for rank in strategy_on_two)

    assert relative_difference(first, train_gan_plainly(joined_batches(6, 16))) < 1e-6
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@ONE_PAIR
def test_strategy_is_silent_inside_an_accumulation_window(strategy_on_two):
    parameters = len(list(net().parameters()))

    assert [rank["messages"] for rank in strategy_on_two] == [2 * parameters] * 2


@ONE_PAIR
def test_strategy_bears_a_parameter_without_gradient_on_one_rank(strategy_on_two):
    first, second = (rank["skipping"] for rank in strategy_on_two)

    assert all(torch.equal(first[name], second[name]) for name in first)


@ONE_PAIR
def test_strategy_shares_buffers_unless_told_otherwise(strategy_on_two):
    first, second = strategy_on_two

    assert torch.equal(first["shared"], second["shared"])
    assert not torch.equal(first["own"], second["own"])


class _Watching(Net):
    def forward(self, x):
        out = self.net(x)
        self.dtypes = (out.dtype, self.net[0].weight.dtype)
        return out


def test_precision_computes_in_bf16(made):
    cls = made("precision", "my_idea").load()
    model = _Watching()

    weights = _fit(model, joined_batches(5, 16), precision=cls())

    assert model.dtypes == (torch.bfloat16, torch.float32)
    assert 0 < relative_difference(weights, train_plainly(joined_batches(5, 16))[0]) < 0.02


def _fit_with_hook(rank, world_size, batches):
    hook = importlib.import_module("stratagem_my_idea").MyIdeaCommHook
    on_two = {"strategy": "ddp", "devices": world_size}
    return [_fit(Net(), batches, comm_hook=hook(**options), **on_two) for options in ({}, {"min_elements": 10**6})]


@pytest.mark.slow
def test_comm_hook_rounds_what_it_sends(made):
    made("comm_hook", "my_idea")
    batches = joined_batches(5, 16)
    reference, _ = train_plainly(batches)

    (rounded, exact), (same, _) = run_in_processes(_fit_with_hook, 2, batches)

    assert all(torch.equal(rounded[name], same[name]) for name in rounded)
    assert 1e-6 < relative_difference(rounded, reference) < 0.02
    assert relative_difference(exact, reference) < 1e-6


def _variables(**values):
    names = {
        "RANK": 3,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 2,
        "MAIN_ADDRESS": "node7",
        "MAIN_PORT": 5,
    }
    return {f"MY_IDEA_{name}": str(value) for name, value in {**names, **values}.items()}


def _asking(num_processes=2, num_nodes=1, devices_given=False):
    settings = SimpleNamespace(num_nodes=num_nodes)
    return SimpleNamespace(
        num_processes=num_processes, stack=SimpleNamespace(devices_given=devices_given), settings=settings
    )


def test_environment_reads_its_variables(made, monkeypatch):
    environment = made("environment", "my_idea").load()()
    assert (environment.detect(), environment.local_processes()) == (None, None)

    for name, value in _variables().items():
        monkeypatch.setenv(name, value)

    assert str(environment.detect()) == "MY_IDEA_RANK is '3' (certain)"
    assert environment.local_processes() == 2
    assert environment.setup_environment(run=_asking()) == sg.World(
        rank=3,
        local_rank=1,
        node_rank=1,
        world_size=4,
        local_world_size=2,
        num_nodes=2,
        main_address="node7",
        main_port=5,
    )


@pytest.mark.parametrize(
    ("values", "asked", "message"),
    [
        ({"RANK": "x"}, {}, "MY_IDEA_RANK is 'x'; expected a whole number"),
        ({"LOCAL_RANK": 2}, {}, "process 2 of 2 on its node"),
        ({}, {"devices_given": True}, "devices x num_nodes is 2 and MY_IDEA_WORLD_SIZE is 4"),
        ({}, {"num_nodes": 3}, "num_nodes is 3 and the scheduler has 2"),
    ],
)
def test_environment_refuses_what_does_not_fit(made, monkeypatch, values, asked, message):
    environment = made("environment", "my_idea").load()()
    with pytest.raises(ConfigError, match="MY_IDEA_WORLD_SIZE is not set; expected .*; start the processes"):
        environment.setup_environment(run=_asking())

    for name, value in _variables(**values).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        environment.setup_environment(run=_asking(**asked))


def _fit_where_the_scheduler_says(rank, world_size, batches, port):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update(_variables(**here, MAIN_ADDRESS="127.0.0.1", MAIN_PORT=port))
    trainer, model = sg.Trainer(max_epochs=1, **QUIET), Net()
    trainer.fit(model, part(batches, rank, world_size))
    return trainer.run.stack.environment.name, trainer.world_size, _weights(model)


def test_environment_brings_two_ranks_together(made):
    made("environment", "my_idea")
    batches = joined_batches(4, 16)

    (name, size, first), _ = run_in_processes(_fit_where_the_scheduler_says, 2, batches, free_port())

    assert (name, size) == ("my_idea", 2)
    assert relative_difference(first, train_plainly(batches)[0]) < 1e-6


LAUNCHED = """
import sys
sys.path[:0] = {path!r}
import stratagem as sg
from stratagem_testing.reference import Net, joined_batches

class Frail(Net):
    def training_step(self, batch, batch_idx):
        if {dies} and self.trainer.global_rank == 1:
            raise ValueError("unwell")
        return super().training_step(batch, batch_idx)

trainer = sg.Trainer(launcher="my_idea", devices=2, strategy="ddp", max_epochs=1, logger=False,
                     enable_progress_bar=False, enable_checkpointing=False, accelerator="cpu")
trainer.fit(Frail(), joined_batches(4, 16))
if trainer.is_global_zero:
    print("trained by", trainer.world_size, flush=True)
"""


@pytest.mark.every_push("True")
@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_launcher_runs_the_program_again(made, tmp_path, dies):
    made("launcher", "my_idea")
    path = [str(tmp_path / "stratagem-my-idea"), str(ROOT / "tests"), str(ROOT / "core")]
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED.format(path=path, dies=dies))

    result = scripts.run([sys.executable, str(script)], capture_output=True, text=True, timeout=360, check=False)

    assert (result.returncode == 0) is not dies, result.stderr
    assert result.stdout == ("" if dies else "trained by 2\n")
    assert ("rank 1 failed with ValueError: unwell" in result.stderr) is dies


def test_accelerator_is_chosen_by_name_alone(made):
    made("accelerator", "my_idea")
    threads = torch.get_num_threads()
    try:
        trainer = sg.Trainer(**QUIET | {"accelerator": {"name": "my_idea", "threads": 1}}, max_epochs=1)
        trainer.fit(Net(), joined_batches(2, 16))

        assert torch.get_num_threads() == 1
        assert trainer.run.device == torch.device("cpu")
    finally:
        torch.set_num_threads(threads)
    assert "my_idea" not in sg.Trainer(**QUIET | {"accelerator": "auto"}).run.stack.accelerator.name


def test_checkpoint_brings_a_run_back(made, tmp_path):
    cls = made("checkpoint", "my_idea").load()
    batches, path = joined_batches(4, 16), tmp_path / "half.my_idea"
    whole = _fit(Net(), batches, max_epochs=2)

    trainer = sg.Trainer(max_epochs=1, checkpoint=cls(), **QUIET)
    trainer.fit(Net(), batches)
    trainer.save_checkpoint(path)
    model = Net(seed=9)
    sg.Trainer(max_epochs=2, checkpoint=cls(level=9), **QUIET).fit(model, batches, ckpt_path=path)

    assert relative_difference(_weights(model), whole) == 0
    assert "state_dict" in read_any(path)  # in whichever format recognises it: no other does
    assert newest_complete(tmp_path, cls()) == path


def test_checkpoint_refuses_what_is_damaged_or_could_not_be_read(made, tmp_path):
    fmt, path = made("checkpoint", "my_idea").load()(), tmp_path / "some.my_idea"
    alone = SimpleNamespace(collectives=Collectives(), is_global_zero=True)
    for value, message in ((Path("x"), "holds pathlib"), (lambda: 0, "cannot be written")):
        with pytest.raises(CheckpointError, match=f"{message}.*; convert it in state_dict"):
            fmt.save_checkpoint({"state_dict": {}, "value": value}, path, alone)
    assert not path.exists()

    fmt.save_checkpoint({"state_dict": {"x": torch.ones(3)}}, path, alone)
    assert fmt.is_whole(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert fmt.recognises(path)
    assert not fmt.is_whole(path)
    with pytest.raises(CheckpointError, match="not what was written"):
        fmt.load_checkpoint(path, alone)
    fmt.remove(path)
    assert list(tmp_path.glob("some*")) == []
    with pytest.raises(CheckpointError, match="does not exist"):
        fmt.load_checkpoint(path, alone)


def test_callback_counts_over_a_restart(made, tmp_path, capsys):
    cls = made("callback", "my_idea").load()
    batches, first, second = joined_batches(4, 16), cls(every_n_batches=3), cls(every_n_batches=3)

    trainer = sg.Trainer(max_epochs=1, callbacks=[first], **QUIET)
    trainer.fit(Net(), batches)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    sg.Trainer(max_epochs=2, callbacks=[second], **QUIET).fit(Net(), batches, ckpt_path=tmp_path / "half.ckpt")

    assert (first.count, second.count) == (4, 8)
    assert [line for line in capsys.readouterr().out.splitlines() if "batches" in line] == ["3 batches", "6 batches"]


class _Described(Net):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()


def test_logger_appends_lines_of_json(made, tmp_path):
    cls = made("logger", "my_idea").load()
    root = tmp_path / "run"

    arguments = QUIET | {"logger": cls(), "default_root_dir": root, "log_every_n_steps": 2}
    for _ in range(2):
        sg.Trainer(max_epochs=1, **arguments).fit(_Described(), joined_batches(4, 16))

    rows = [json.loads(line) for line in (root / "my_idea.jsonl").read_text().splitlines()]
    half = len(rows) // 2
    assert rows[0] == rows[half] == {"hyper_parameters": {"width": 3}}
    assert [row["step"] for row in rows[1:half]] == [row["step"] for row in rows[half + 1 :]]
    assert all("train_loss" in row for row in rows[1:half])
