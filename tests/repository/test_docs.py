"""What the documentation shows runs."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

import stratagem as sg
from ports import free_port
from programs import scripts
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, part, relative_difference, train_plainly

ROOT = Path(__file__).parents[2]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def snippets(name: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_readme_script_runs(tmp_path):
    (script,) = snippets("README.md")
    (tmp_path / "train.py").write_text(script)
    result = scripts.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=360, check=False
    )

    assert result.returncode == 0, result.stderr
    assert "effective batch size 64" in result.stdout
    assert len(script.splitlines()) <= 35


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path):
    source = "\n".join(snippets("docs/tutorial.md"))
    (tmp_path / "tutorial.py").write_text(source)
    result = scripts.run(
        [sys.executable, "tutorial.py"], cwd=tmp_path, capture_output=True, text=True, timeout=360, check=False
    )

    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "stratagem_logs" / "version_0" / "metrics.csv").exists()


def test_the_snippets_about_devices_run():
    names = {"sg": sg, "model": Net(), "batches": joined_batches(2, 8)}
    before = torch.get_float32_matmul_precision()
    for source, deterministic, precision in zip(
        snippets("docs/devices.md"), (True, False), (before, "high"), strict=True
    ):
        exec(
            source.replace("sg.Trainer(", 'sg.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, '),
            names,
        )
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert torch.get_float32_matmul_precision() == precision
        names["trainer"].close()
    assert torch.get_float32_matmul_precision() == before


def plugins() -> dict[str, type]:
    """The plugins of docs/writing-a-plugin.md."""
    found: dict[str, type] = {}
    for source in snippets("docs/writing-a-plugin.md"):
        module = types.ModuleType("snippet")
        sys.modules["snippet"] = module
        exec(source, module.__dict__)
        found |= {n: v for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == "snippet"}
    return found


def test_plugins_of_the_docs_are_short():
    *plugins, kind = [len(source.splitlines()) for source in snippets("docs/writing-a-plugin.md")]

    assert len(plugins) == 3
    assert max(plugins) <= 35
    assert kind <= 2 * 35  # and two plugins of it


def _train(rank, world_size, batches):
    model = Net()
    strategy = plugins()["PlainAveraging"]()
    trainer = sg.Trainer(max_epochs=1, devices=world_size, gradient_clip_val=1.0, strategy=strategy, **QUIET)
    trainer.fit(model, part(batches, int(os.environ["RANK"]), world_size))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_strategy_of_the_docs_trains_as_plain_pytorch():
    batches = joined_batches(10, 16)
    first, second = run_in_processes(_train, 2, batches)

    assert relative_difference(first, train_plainly(batches, max_norm=1.0)[0]) < 1e-6
    assert relative_difference(first, second) == 0


def test_the_precision_of_the_docs_rounds():
    batches = joined_batches(4, 16)
    rounded = [((x * 2).round() / 2, y) for x, y in batches]
    model = Net()
    sg.Trainer(max_epochs=1, precision=plugins()["RoundedInputs"](), **QUIET).fit(model, batches)

    assert relative_difference(model.state_dict(), train_plainly(rounded)[0]) < 1e-7


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


# --- The pages for plugin authors --------------------------------------------------------------------------------


def test_the_strategy_of_the_docs_is_the_one_in_contrib_and_short():
    source = (ROOT / "contrib" / "central" / "stratagem_central.py").read_text()

    assert source in (ROOT / "docs" / "strategy-in-60-lines.md").read_text()
    assert len(source.splitlines()) == 55


@pytest.fixture
def environment(tmp_path):
    """A virtual environment that sees what is installed here, and in which anything can be installed."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = sysconfig.get_paths()["purelib"]
    (packages / "outer.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    for name in ("stratagem", "pytest", "pip"):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m {name} "$@"\n')
        script.chmod(0o755)
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return variables | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PIP_NO_BUILD_ISOLATION": "0"}


@pytest.mark.sweep(guard="tests/repository/test_docs.py::test_the_comm_hook_of_the_docs_is_short_and_passes_the_kit")
@pytest.mark.slow
def test_a_new_author_follows_the_page_alone(tmp_path, environment):
    """Every shell block is run and every file written, in the order of the page."""
    page = (ROOT / "docs" / "strategy-in-60-lines.md").read_text().partition("## All of one")[0]
    place, output = tmp_path, ""
    for language, block in re.findall(r"^```(shell|python)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "shell":
            for line in block.splitlines():
                if line.startswith("cd "):
                    place = place / line.removeprefix("cd ")
                    continue
                done = subprocess.run(
                    line,
                    shell=True,
                    cwd=place,
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=900,
                )
                output = done.stdout
                assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        else:
            name, _, source = block.removeprefix("# ").partition("\n")
            path = place / name
            path.write_text(with_function_replaced(path.read_text(), source) if path.exists() else source)

    assert "trained by MyIdeaStrategy in 2 processes" in output


def with_function_replaced(module: str, function: str) -> str:
    """Return the source `module` with its function of that name replaced, as a person would edit it."""
    (new,) = ast.parse(function).body
    (old,) = [node for node in ast.parse(module).body if getattr(node, "name", "") == new.name]
    lines = module.splitlines(keepends=True)
    assert len(function.splitlines()) <= 10
    return "".join([*lines[: old.lineno - 1], function, *lines[old.end_lineno :]])


@pytest.mark.slow
def test_the_comm_hook_of_the_docs_is_short_and_passes_the_kit(tmp_path, monkeypatch):
    source, test = snippets("docs/comm-hook-in-25-lines.md")
    (tmp_path / "scaled.py").write_text(source + test)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("scaled")

    assert len(source.splitlines()) <= 25
    for _, check in module.TestScaledFP16.checks():
        with contextlib.suppress(pytest.skip.Exception):
            check()


@pytest.mark.slow
def test_the_snippets_about_testing_run():
    for source in snippets("docs/testing-a-plugin.md"):
        exec(source, {"__name__": "snippet"})


@pytest.mark.slow
def test_the_snippets_about_waiting_run():
    for source in snippets("docs/synchronization.md"):
        exec(source, {"__name__": "snippet"})


def test_the_snippets_about_checkpoints_run(tmp_path):
    from stratagem.callbacks import ModelCheckpoint

    names = {
        "sg": sg, "folder": tmp_path, "model": Net(), "batches": joined_batches(2, 8), "ModelCheckpoint": ModelCheckpoint,
    }  # fmt: skip
    for source in snippets("docs/checkpoints.md"):
        exec(source, names)
    assert names["trainer"].global_step == 4


def test_the_snippets_about_slurm_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"sg": sg, "folder": tmp_path, "model": Net(), "batches": joined_batches(2, 8)}
    for source in snippets("docs/slurm.md"):
        exec(source.replace("sg.Trainer(", "trainer = sg.Trainer(").replace("trainer = trainer =", "trainer ="), names)
        assert names["trainer"].run.num_processes == 1


@pytest.mark.slow
def test_the_snippets_about_training_run(tmp_path, capsys):
    names = {"sg": sg, "torch": torch, "folder": tmp_path, "batches": joined_batches(4, 8)}
    steps = []
    for source in snippets("docs/training.md"):
        exec(source, names)
        steps.append(names["trainer"].global_step)
    assert steps == [2 + 4, 4, 4, 4, 4, 12, 4]
    assert {path.name for path in (tmp_path / "look").iterdir()} >= {"report.html", "profile-simple-rank0.txt"}
    output = capsys.readouterr().out
    assert "Classifier: " in output
    assert "optimizer step" in output
    assert "val_loss" in output


@pytest.mark.slow
def test_the_snippets_about_sharding_run(tmp_path):
    for result in run_in_processes(_sharding_snippets, 2, tmp_path):
        assert result == [2, 2]


def _sharding_snippets(rank, world_size, folder):
    from stratagem.strategies import FSDPStrategy

    class Block(torch.nn.Linear):
        def __init__(self):
            super().__init__(32, 32)

    names = {"sg": sg, "torch": torch, "nn": torch.nn, "FSDPStrategy": FSDPStrategy, "Block": Block, "folder": folder}
    steps = []
    first, second = snippets("docs/sharded-training.md")
    exec(first, names)
    exec(second, names)
    for cls in ("GPT", "ByHand"):
        trainer = names["trainer"]
        trainer.fit(names[cls](), [(torch.randn(4, 32), torch.randn(4, 1)) for _ in range(2)])
        steps.append(trainer.global_step)
    return steps


@pytest.mark.slow
def test_the_snippets_about_parallelism_run(tmp_path):
    assert run_in_processes(_parallel_snippets, 4, tmp_path, limit_s=540) == [2] * 4


def _parallel_snippets(rank, world_size, folder):
    names = {"sg": sg, "torch": torch, "nn": torch.nn, "folder": folder}
    first, *strategies = snippets("docs/parallelism.md")
    exec(first.replace("sg.Trainer(", 'sg.Trainer(accelerator="cpu", '), names)
    trainer = names["trainer"]
    trainer.fit(names["Regression"](), [(torch.randn(8, 32), torch.randn(8, 1)) for _ in range(2)])
    assert trainer.run.mesh.num_data_shards == 1
    for source in strategies:
        exec(source, names)
        sg.Run(strategy=names["strategy"], devices=2, accelerator="cpu")
    return trainer.global_step


@pytest.mark.slow
def test_the_snippets_about_deepspeed_run(tmp_path):
    for steps in run_in_processes(_deepspeed_snippets, 2, tmp_path, limit_s=540):
        assert steps == [2, 2, 4]


def _deepspeed_snippets(rank, world_size, folder):
    from stratagem.strategies import DeepSpeedStrategy

    class Block(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Linear(32, 32), torch.nn.Tanh())

    loader = [(torch.randn(4, 32), torch.randn(4, 1)) for _ in range(2)]
    names = {
        "sg": sg, "torch": torch, "nn": torch.nn, "DeepSpeedStrategy": DeepSpeedStrategy, "Block": Block,
        "folder": folder, "loader": loader,
    }  # fmt: skip
    stage_3, with_config, moved, *_ = snippets("docs/deepspeed.md")
    exec(stage_3, names)
    exec(moved, names)
    exec(with_config, names)
    names["GPT"].configure_optimizers = sg.Module.configure_optimizers
    names["configured"].fit(names["GPT"](), loader)
    return [names[trainer].global_step for trainer in ("trainer", "configured", "elsewhere")]


@pytest.mark.slow
def test_the_snippets_about_deepspeeds_own_folder_run(tmp_path):
    ((steps, weights, trained),) = run_in_processes(_folder_snippets, 1, tmp_path, limit_s=540)
    assert steps == 4
    assert relative_difference({name: weights[name] for name in trained}, trained) == 0


def _folder_snippets(rank, world_size, folder):
    from stratagem.strategies import DeepSpeedStrategy

    names = {
        "sg": sg, "torch": torch, "DeepSpeedStrategy": DeepSpeedStrategy, "folder": folder, "model": Net(),
        "batches": joined_batches(4, 8),
    }  # fmt: skip
    writing, converting = snippets("docs/deepspeed.md")[3:]
    exec(writing, names)
    exec(converting, names)
    trained = {name: tensor.clone() for name, tensor in names["model"].state_dict().items()}
    return names["trainer"].global_step, names["weights"], trained


@pytest.mark.slow
def test_the_snippets_about_tuning_run():
    for steps, strategy in run_in_processes(_tuning_snippets, 2):
        assert steps == [4, 4]
        assert strategy.nccl["min_nchannels"] == 8


def _tuning_snippets(rank, world_size):
    names = {"sg": sg, "model": Net(), "batches": joined_batches(4, 8), "interface": "lo"}
    buckets, nccl, timeouts = snippets("docs/tuning.md")
    exec(nccl, names)
    steps = []
    for source in (buckets, timeouts):
        exec(source, names)
        steps.append(names["trainer"].global_step)
        names["trainer"].close()
    return steps, names["strategy"]


@pytest.mark.slow
def test_the_snippets_about_communication_run():
    for ratio, hooks in run_in_processes(_communication_snippets, 2):
        assert ratio == 2.0
        assert hooks == ["powersgd", "fp16_compress"]


def _communication_snippets(rank, world_size):
    from stratagem.strategies import DDPStrategy

    names = {"sg": sg, "DDPStrategy": DDPStrategy}
    first, second = snippets("docs/communication.md")
    exec(first, names)
    exec(second, names)
    trainer = names["trainer"]
    trainer.fit(Net(), part(joined_batches(50, 8), rank, world_size))
    run = sg.Run(strategy=names["strategy"], accelerator="cpu")
    return trainer.callback_metrics["comm/compression_ratio"], [choice.name for choice in run.stack.of("comm_hook")]


@pytest.mark.slow
def test_the_variables_for_other_engines_make_a_run(tmp_path):
    names = {}
    exec(snippets("docs/ray.md")[2], names)
    path = tmp_path / "train.py"
    path.write_text(
        "import stratagem as sg\n"
        "run = sg.Run(devices=2, accelerator='cpu', strategy='ddp')\n"
        "run.launch(lambda run: print(run.collectives.all_gather_object(run.rank)))\n"
    )
    port = free_port()
    environments = [os.environ | names["variables"](rank, 2, "127.0.0.1", port) for rank in range(2)]
    processes = [
        scripts.Popen([sys.executable, str(path)], env=environment, stdout=subprocess.PIPE, text=True)
        for environment in environments
    ]

    assert [process.communicate(timeout=360)[0] for process in processes] == ["[0, 1]\n"] * 2
