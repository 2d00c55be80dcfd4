"""DeepSpeed's own checkpoint folders: continued to the bit, refused elsewhere, consolidated behind explicit trust."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from programs import scripts
from stratagem.callbacks import ModelCheckpoint
from stratagem.cli import main
from stratagem.errors import CheckpointError, ConfigError
from stratagem.stack.formats import format_named
from stratagem.strategies import DeepSpeedStrategy
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, loss_of, net, part
from stratagem_testing.training import EveryBatch, outcome, share, weights_of

pytestmark = pytest.mark.usefixtures("deepspeed_preloaded")

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
BATCHES = joined_batches(6, 24)
STAGES = (1, 2, 3)
#: Cases beside the most telling one.
WHERE_IT_CHANGED = pytest.mark.when_changed("plugins/deepspeed/")


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Import deepspeed and what its engine imports once, for the processes to fork with it."""
    from stratagem_deepspeed import start

    start.load("cpu")
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


class Varied(Net):
    """Random numbers, buffers, a frozen layer, one under two names, two parameter groups, AdamW and a schedule."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.net[2].requires_grad_(False)
        self.again = self.net[4]
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("fine", torch.tensor(1 / 3, dtype=torch.float64))

    def forward(self, x):
        self.seen += 1
        return self.net(F.dropout(x, 0.3, training=self.training))

    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters()}, {"params": self.net[4].parameters(), "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Configured(Net):
    """Optimizer and schedule are those of DeepSpeed's configuration."""

    def configure_optimizers(self):
        return None


CONFIG = {
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 3e-3, "warmup_num_steps": 9}},
}


def native(**options):
    return DeepSpeedStrategy(state_dict_type="deepspeed", **options)


def trainer_of(world_size, strategy, **arguments):
    return sg.Trainer(strategy=strategy, devices=world_size, **QUIET | {"max_epochs": 1} | arguments)


def everything(trainer):
    """Return what training has made, whole."""
    run = trainer.run
    with run.gathered_state():
        optimizer = run.ask("optimizer_state", optimizer=run.optimizers[0], module=trainer.module)
    kept = run.stack.strategy.state_dict()
    return {"weights": weights_of(trainer), "optimizer": optimizer, "steps": trainer.global_step, "engine": kept}


def fit(rank, world_size, make, strategy, max_steps=-1, ckpt_path=None, save_to=None, **arguments):
    losses = EveryBatch(lambda trainer: trainer.callback_metrics["train_loss"].item())
    trainer = trainer_of(world_size, strategy(), max_steps=max_steps, callbacks=[losses], **arguments)
    trainer.fit(make(), share(trainer, BATCHES), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    result = everything(trainer) | {"losses": losses.results}
    trainer.run.close()
    return result


def whole_and_half(rank, world_size, make, strategy, path, **arguments):
    """Train without interruption; train half of it, and save."""
    torch.manual_seed(7)
    whole = fit(rank, world_size, make, strategy, **arguments)
    torch.manual_seed(7)
    half = fit(rank, world_size, make, strategy, max_steps=3, save_to=path, **arguments)
    return whole, half


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, check_dtype=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of each stage that half a training left, with what the whole training ended with."""
    folder, made = tmp_path_factory.mktemp("written"), {}

    def give(stage):
        if stage not in made:
            path = folder / f"stage-{stage}.ds"
            made[stage] = (
                path,
                run_in_processes(whole_and_half, 2, Varied, lambda: native(stage=stage), path, limit_s=360),
            )
        return made[stage]

    return give


# --- Continuing --------------------------------------------------------------------------------------------------


@pytest.mark.every_push("3")
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_new_process_continues_to_the_bit(written, stage):
    path, results = written(stage)
    resume = functools.partial(fit, ckpt_path=path)
    continued = run_in_processes(resume, 2, lambda: Varied(seed=3), lambda: native(stage=stage))

    for (whole, half), after in zip(results, continued, strict=True):
        assert half["steps"] == 3
        assert half["losses"] + after["losses"] == whole["losses"]
        assert_same(after["weights"], whole["weights"])
        assert after["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]
        assert_same(after["optimizer"]["state"], whole["optimizer"]["state"])


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_native.py::test_a_new_process_continues_to_the_bit",
)
@pytest.mark.slow
def test_the_engine_s_own_scheduler_and_masters_continue(tmp_path):
    """The schedule of a configuration, in bf16: the fp32 masters come back, not the 16-bit weights."""
    path, options = tmp_path / "x.ds", {"config": CONFIG}
    begin = functools.partial(whole_and_half, precision="bf16-mixed")
    results = run_in_processes(begin, 2, Configured, lambda: native(**options), path)
    resume = functools.partial(fit, ckpt_path=path, precision="bf16-mixed")
    continued = run_in_processes(resume, 2, lambda: Configured(seed=3), lambda: native(**options))

    for (whole, half), after in zip(results, continued, strict=True):
        assert half["engine"]["scheduler"]["last_batch_iteration"] == 2
        assert after["engine"] == whole["engine"]
        assert_same(after["weights"], whole["weights"])
        assert_same(after["optimizer"]["state"], whole["optimizer"]["state"])


def _evaluate(rank, world_size, path, stage):
    """Test in a process that never trained; then train, and test what was saved before; then save over it, resume."""
    trainer = trainer_of(world_size, native(stage=stage))
    fresh = trainer.test(Varied(seed=3), share(trainer, BATCHES), ckpt_path=path)
    weights = weights_of(trainer)
    trainer.fit(Varied(seed=4), share(trainer, BATCHES))
    again = trainer.test(trainer.module, share(trainer, BATCHES), ckpt_path=path)
    trained = weights_of(trainer)
    trainer.fit(trainer.module, share(trainer, BATCHES), ckpt_path=path)
    steps = trainer.global_step
    trainer.run.close()
    return fresh, weights, again, trained, steps


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_native.py::test_a_new_process_continues_to_the_bit",
)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_alone_are_read_with_and_without_an_engine(written, stage):
    path, results = written(stage)
    found = run_in_processes(_evaluate, 2, path, stage)

    for (_, half), (fresh, weights, again, trained, steps) in zip(results, found, strict=True):
        expected = half["weights"] | {"seen": weights["seen"]}  # testing counts, too
        assert int(weights["seen"]) > int(half["weights"]["seen"])
        assert_same(weights, expected)
        assert_same(trained, expected)
        assert fresh == again
        assert steps == 6


def _keep_best(rank, world_size, folder):
    """Fit with a callback that keeps the best, then go on from the last, then test the best in a new trainer."""
    said, steps = [], []
    for ckpt_path in (None, "last"):
        callback = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_last=True)
        arguments = {"enable_checkpointing": True, "max_epochs": 2 if ckpt_path else 1}
        trainer = trainer_of(world_size, native(stage=2), callbacks=[callback], **arguments)
        mine = share(trainer, BATCHES)
        trainer.fit(Varied(), mine, val_dataloaders=mine, ckpt_path=ckpt_path)
        steps.append(trainer.global_step)
        trainer.run.close()
    trainer = trainer_of(world_size, native(stage=2), callbacks=[ModelCheckpoint(dirpath=folder, monitor="val_loss")],
                         enable_checkpointing=True)  # fmt: skip
    said = trainer.test(Varied(seed=5), share(trainer, BATCHES), ckpt_path="best")
    trainer.run.close()
    return steps, float(callback.best_model_score), said[0]["test_loss"]


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_native.py::test_a_new_process_continues_to_the_bit",
)
@pytest.mark.slow
def test_last_and_best_are_found(tmp_path):
    for steps, best, found in run_in_processes(_keep_best, 2, tmp_path):
        assert steps == [6, 12]
        assert found == pytest.approx(best, rel=1e-6)
    assert len(list(tmp_path.glob("*.ds"))) == 2


def _own_loop(rank, world_size, path, stage):
    """Train three batches and save; train three more; go back, in the same engine; train these again."""
    run = sg.Run(strategy=native(stage=stage), devices=world_size, accelerator="cpu")
    module = net()
    model, optimizer = run.setup(module, torch.optim.AdamW(module.parameters(), lr=3e-3))
    losses = []
    batches = part(BATCHES, rank, world_size)
    for index in (0, 1, 2, 3, 4, 5, 3, 4, 5):
        if index == 3 and len(losses) == 3:
            run.save(path, model=model, optimizer=optimizer, step=3)
        elif index == 3:
            assert run.load(path, model=model, optimizer=optimizer) == {"step": 3}
        x, y = batches[index]
        loss = loss_of(model(x), y)
        run.backward(loss)
        run.optimizer_step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    run.close()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(2, marks=WHERE_IT_CHANGED), 3])
def test_a_loop_of_ones_own_goes_back(stage, tmp_path):
    for losses in run_in_processes(_own_loop, 2, tmp_path / "x.ds", stage):
        assert losses[3:6] == losses[6:9]
        assert losses[2] != losses[3]


# --- Refusals: on all ranks, and nobody waits --------------------------------------------------------------------


def _resume(rank, world_size, strategy, path, **arguments):
    trainer = trainer_of(world_size, strategy(), **arguments)
    said = outcome(lambda: trainer.fit(Varied(), share(trainer, BATCHES), ckpt_path=path))
    trainer.run.close()
    return said


def _attempts(rank, world_size, path, foreign):
    """Give the folder of stage 2 to what cannot continue from it; return what each rank was told."""
    shutil.copytree(path, renamed := Path(f"renamed-{rank}.ds"))
    attempts = {
        "another stage": (lambda: native(stage=3), path, {}),
        "another strategy": (lambda: "ddp", path, {}),
        "another precision": (lambda: native(stage=2), path, {"precision": "bf16-mixed"}),
        "the folder inside": (lambda: native(stage=2), path / "checkpoint", {}),
        "a file inside": (lambda: native(stage=2), path / "checkpoint" / "mp_rank_00_model_states.pt", {}),
        "a URL": (lambda: native(stage=2), "memory://run/x.ds", {}),
        "another program's": (lambda: native(stage=2), foreign, {}),
        "the folder itself": (lambda: DeepSpeedStrategy(stage=2), path, {}),
    }
    said = {name: _resume(rank, world_size, *given[:2], **given[2]) for name, given in attempts.items()}
    shutil.rmtree(renamed)
    return said


def _bare(rank, world_size, stage, path, prefix="", config=None):
    """Train with DeepSpeed alone, as its users do, and save as other trainers do; return the weights."""
    import deepspeed

    from stratagem_deepspeed import start

    run = sg.Run(strategy=DeepSpeedStrategy(stage=stage), devices=world_size, accelerator="cpu")
    run.connect()
    start.join(run)
    wrapper = torch.nn.Module()
    wrapper.add_module(prefix.rstrip(".") or "net", net())
    model = getattr(wrapper, prefix.rstrip(".") or "net")
    model.register_buffer("seen", torch.ones((), dtype=torch.bfloat16))
    wrapper.forward = model.forward
    settings = {"train_micro_batch_size_per_gpu": 12, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=wrapper, optimizer=optimizer, config=settings)
    for x, y in part(BATCHES, rank, world_size):
        engine.backward(loss_of(engine(x), y))
        engine.step()
    kept = {"epoch": 3, "global_step": 6, "hyper_parameters": {"lr": 1e-3}, "callbacks": {"C": {"best": 1.5}},
            "pytorch-lightning_version": "2.5", "arguments": argparse.Namespace(lr=1e-3)}  # fmt: skip
    engine.save_checkpoint(str(path), client_state=kept)
    weights = {}
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    for name, value in wrapper.state_dict(keep_vars=True).items():
        with GatheredParameters([value], enabled=hasattr(value, "ds_id")):
            weights[name] = value.detach().float().clone()
    engine.destroy()
    run.close()
    return weights


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A folder that a plain script wrote at stage 2, with the weights that it ended with."""
    path = tmp_path_factory.mktemp("foreign")
    return path, run_in_processes(_bare, 2, 2, path)[0]


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_native.py::test_a_new_process_continues_to_the_bit",
)
@pytest.mark.slow
def test_what_cannot_continue_is_told_so_on_all_ranks(written, foreign):
    path, _ = written(2)
    first, second = run_in_processes(_attempts, 2, path, foreign[0])
    (alone,) = run_in_processes(_resume, 1, lambda: native(stage=2), path)

    assert first.pop("the folder itself") == second.pop("the folder itself") == "nothing"
    way_out = f"`stratagem checkpoint consolidate --trust {path} FILE` makes a file"
    wrote = "by DeepSpeed at stage 2, by 2 processes, in float32"
    for name in first:
        assert first[name].startswith("refused: "), f"{name}: {first[name]}"
        assert second[name].startswith("refused: "), f"{name}: {second[name]}"
    for name in ("another stage", "another strategy", "another precision"):
        assert wrote in first[name]
        assert way_out in first[name]
    assert "stage 3, by 2 processes, in float32 as in this run" in first["another stage"]
    assert "ddp" in first["another strategy"]
    assert "in bfloat16 as in this run" in first["another precision"]
    assert f"use {path}." in first["the folder inside"]
    assert f"use {path}." in first["a file inside"]
    assert "URL" in first["a URL"]
    assert "another program" in first["another program's"]
    assert wrote in alone
    assert "stage 2, by 1 process, in float32 as in this run" in alone


@pytest.mark.parametrize("strategy", ["ddp", "single_device"])
def test_the_format_needs_the_strategy(strategy):
    with pytest.raises(ConfigError, match="deepspeed"):
        sg.Trainer(strategy=strategy, checkpoint="deepspeed", **QUIET)


def test_the_format_and_the_option_say_the_same():
    chosen = sg.Trainer(strategy="deepspeed_stage_1", checkpoint="deepspeed", **QUIET)
    meant = sg.Trainer(strategy=native(stage=1), **QUIET)

    assert type(chosen.run.checkpoint_format) is type(meant.run.checkpoint_format)
    with pytest.raises(ConfigError, match="needs the checkpoint 'deepspeed'"):
        sg.Trainer(strategy=native(stage=1), checkpoint="full", **QUIET)


# --- Whole, or not there -----------------------------------------------------------------------------------------


class Poison:
    """Would write a file when loaded carelessly."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def _forge(path, name, proof):
    """Replace a file by a pickle that does something, with a checksum to match."""
    from stratagem_deepspeed import folder

    facts = folder.read_manifest(path)
    torch.save({"module": Poison(proof), "optimizer_state_dict": Poison(proof)}, path / name)
    folder.write_manifest(path, facts | {"files": folder.seal(path, folder.files_in(path))})


def _flip(path, name):
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 4
    (path / name).write_bytes(content)


def _resume_each(rank, world_size, paths):
    return [_resume(rank, world_size, lambda: native(stage=2), path) for path in paths]


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_native.py::test_a_new_process_continues_to_the_bit",
)
@pytest.mark.slow
def test_damage_and_forgery_are_noticed_and_nothing_is_executed(written, tmp_path):
    path, _ = written(2)
    proof, said = tmp_path / "executed", {}
    shares, weights = "checkpoint/zero_pp_rank_1_mp_rank_00_optim_states.pt", "checkpoint/mp_rank_00_model_states.pt"
    for damage in (_flip, lambda path, name: (path / name).unlink(), functools.partial(_forge, proof=proof)):
        for name in (shares, weights):
            copy = tmp_path / f"{len(said)}.ds"
            shutil.copytree(path, copy)
            damage(copy, name)
            said[copy] = None
    attempts = run_in_processes(_resume_each, 2, list(said))
    said = dict(zip(said, zip(*attempts, strict=True), strict=True))
    whole = [copy for copy in said if format_named("deepspeed").is_whole(copy)]

    assert not proof.exists()
    assert all(text.startswith("refused: ") for each in said.values() for text in each), said
    assert [copy.name for copy in whole] == ["4.ds", "5.ds"]  # a forger can compute checksums, too


def _fill_up(rank, world_size, path):
    """Save; then let the second save fail on rank 1 alone, as on a full disk; then save something else."""
    import resource

    trainer = trainer_of(world_size, native(stage=2), max_steps=2)
    trainer.fit(Varied(), share(trainer, BATCHES))
    trainer.save_checkpoint(path)
    marked = (path / "stratagem.json").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    said = [outcome(lambda: trainer.save_checkpoint(path))]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said += [outcome(lambda: trainer.save_checkpoint(path, weights_only=True))]
    said += [outcome(lambda: trainer.save_checkpoint("memory://run/x.ds"))]
    left = sorted(each.name for each in path.parent.iterdir() if each.name != "run.lock")
    same = (path / "stratagem.json").read_bytes() == marked and trainer.run.checkpoint_format.is_whole(path)
    trainer.save_checkpoint(path)
    replaced = (path / "stratagem.json").read_bytes() != marked or trainer.run.checkpoint_format.is_whole(path)
    trainer.run.close()
    return said, left, same, replaced


@pytest.mark.slow
def test_a_save_that_fails_leaves_the_old_one(tmp_path):
    for said, left, same, replaced in run_in_processes(_fill_up, 2, tmp_path / "x.ds"):
        assert said[0].startswith(("refused: rank 1 failed", "refused: "))
        assert "could not be written" in said[0]
        assert "weights_only=False" in said[1]
        assert "URL" in said[2]
        assert left == ["x.ds"]
        assert same
        assert replaced


@pytest.mark.when_changed(
    "plugins/deepspeed/", guard="tests/plugins/test_deepspeed_native.py::test_a_save_that_fails_leaves_the_old_one"
)
@pytest.mark.slow
def test_only_its_own_is_removed_or_written_over(written, foreign, tmp_path):
    own, others = tmp_path / "own.ds", tmp_path / "others"
    shutil.copytree(written(2)[0], own)
    shutil.copytree(foreign[0], others)
    formatted = format_named("deepspeed")

    assert formatted.recognises(others)
    assert formatted.is_whole(others)
    assert not formatted.recognises(tmp_path)
    with pytest.raises(CheckpointError, match="nothing was deleted"):
        formatted.remove(others)
    for said in run_in_processes(_save_over, 2, others):
        assert "is not a checkpoint of this format" in said
    (own / "checkpoint" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        formatted.remove(own)
    (own / "checkpoint" / "notes.txt").unlink()
    shutil.copytree(own, tmp_path / "written over")
    (tmp_path / "written over" / "checkpoint" / "notes.txt").write_text("mine")
    assert run_in_processes(_save_over, 2, tmp_path / "written over") == ["nothing", "nothing"]
    assert (tmp_path / "written over" / "checkpoint" / "notes.txt").read_text() == "mine"
    assert formatted.is_whole(tmp_path / "written over")
    formatted.remove(own)
    assert not own.exists()
    assert formatted.is_whole(others)


def _save_over(rank, world_size, path):
    trainer = trainer_of(world_size, native(stage=2), max_steps=1)
    trainer.fit(Net(), share(trainer, BATCHES))
    said = outcome(lambda: trainer.save_checkpoint(path))
    trainer.run.close()
    return said


# --- One file of it ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reading_all_of_it_asks_for_trust(written, foreign, tmp_path, capsys):
    for path in (written(2)[0], foreign[0]):
        target = str(tmp_path / "one.ckpt")
        for action in (["consolidate", str(path), target], ["convert", str(path), target, "--to", "full"],
                       ["inspect", str(path)]):  # fmt: skip
            assert main(["checkpoint", *action]) != 0
            said = capsys.readouterr().err
            assert "contains pickles" in said
            assert "--trust" in said
            assert not Path(target).exists()
        assert main(["checkpoint", "verify", str(path)]) == 0


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_native.py::test_a_new_process_continues_to_the_bit",
)
@pytest.mark.slow
def test_a_program_consolidates(written, tmp_path):
    """In a process of its own, which nobody prepared for deepspeed."""
    command = [sys.executable, "-m", "stratagem", "checkpoint", "consolidate", "--trust"]
    variables = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = scripts.run(
        [*command, str(written(2)[0]), str(tmp_path / "one.ckpt")],
        env=variables, capture_output=True, text=True, check=False, timeout=360,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path / 'one.ckpt'}: ")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(each, marks=() if each == 3 else WHERE_IT_CHANGED) for each in STAGES])
def test_one_file_holds_the_weights_that_training_ended_with(written, stage, tmp_path):
    path, results = written(stage)
    assert main(["checkpoint", "consolidate", "--trust", str(path), str(tmp_path / "one.ckpt")]) == 0
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)

    assert_same(state["state_dict"], results[0][1]["weights"])
    assert list(state["state_dict"]) == list(Varied().state_dict())
    assert state["loop"]["global_step"] == 3
    assert not {"optimizers", "module", "ds_config"} & set(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = sg.Trainer(max_epochs=1, **QUIET)
        trainer.fit(Varied(seed=3), BATCHES, ckpt_path=tmp_path / "one.ckpt")
    assert any("no optimizer comes with" in str(each.message) for each in caught)
    assert trainer.global_step == 6


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "prefix"), [pytest.param(2, "", marks=WHERE_IT_CHANGED), (3, "_forward_module.")])
def test_folders_of_other_programs_are_consolidated(stage, prefix, tmp_path):
    """Stages 2 and 3 by a plain script, with what a trainer keeps beside the weights."""
    from stratagem_deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    trained = run_in_processes(_bare, 2, stage, tmp_path / "theirs", prefix)[0]
    with pytest.warns(UserWarning, match="arguments is a Namespace"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "theirs", tmp_path / "one.ckpt", tag="global_step6")
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)

    assert_same(state["state_dict"], {name.removeprefix(prefix): value for name, value in trained.items()})
    assert ("net.0.weight" if not prefix else "0.weight") in state["state_dict"]
    assert (state["epoch"], state["global_step"], state["hyper_parameters"]) == (3, 6, {"lr": 1e-3})
    assert not {"module", "optimizer", "ds_config", "arguments"} & set(state)


def test_conversion_names_what_is_wrong(foreign, tmp_path):
    from stratagem_deepspeed import convert_zero_checkpoint_to_fp32_state_dict as convert

    broken = tmp_path / "broken"
    shutil.copytree(foreign[0], broken)
    next(broken.glob("*/*rank_1*_optim_states.pt")).unlink()
    for path, match in (
        (tmp_path / "nowhere", "does not exist"), (tmp_path, "not a folder that DeepSpeed wrote"),
        (foreign[0] / "global_step6", f"use {foreign[0]}"), (broken, "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=match):
            convert(path, tmp_path / "one.ckpt")
    assert not (tmp_path / "one.ckpt").exists()


def _without_frozen(rank, world_size, path):
    trainer = trainer_of(world_size, native(stage=1, exclude_frozen_parameters=True), max_steps=1)
    trainer.fit(Varied(), share(trainer, BATCHES))
    trainer.save_checkpoint(path)
    trainer.run.close()
    said = _resume(rank, world_size, lambda: native(stage=1), path)
    model = Varied(seed=0)
    model.strict_loading = False
    trainer = trainer_of(world_size, native(stage=1))
    trainer.fit(model, share(trainer, BATCHES), ckpt_path=path)
    frozen, steps = weights_of(trainer)["net.2.weight"], trainer.global_step
    trainer.run.close()
    return said, torch.equal(frozen, Varied().net[2].weight), steps


@pytest.mark.when_changed(
    "plugins/deepspeed/", guard="tests/plugins/test_deepspeed_native.py::test_a_new_process_continues_to_the_bit"
)
@pytest.mark.slow
def test_what_is_frozen_can_be_left_out(tmp_path):
    from stratagem_deepspeed import convert_zero_checkpoint_to_fp32_state_dict as convert

    for said, kept, steps in run_in_processes(_without_frozen, 2, tmp_path / "x.ds"):
        assert "lacks 'net.2.bias', 'net.2.weight'" in said
        assert kept
        assert steps == 6
    assert "net.2.weight" not in convert(tmp_path / "x.ds", tmp_path / "one.ckpt")["state_dict"]


def _from_whole_weights(rank, world_size, path, shards):
    """Fit and test with `load_full_weights` from a file with everything, and from a plain state dict."""
    found = []
    strategy = functools.partial(DeepSpeedStrategy, stage=3, load_full_weights=True)
    for file in (path, path.with_name("plain.pt")):
        trainer = trainer_of(world_size, strategy(), max_steps=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Varied(seed=3), share(trainer, BATCHES), ckpt_path=file)
        made = everything(trainer)
        found.append(
            (made["weights"], made["optimizer"]["state"], made["steps"], [str(each.message) for each in caught])
        )
        trainer.run.close()
    return found, _resume(rank, world_size, strategy, shards)


@pytest.mark.when_changed(
    "plugins/deepspeed/", guard="tests/plugins/test_deepspeed_native.py::test_a_new_process_continues_to_the_bit"
)
@pytest.mark.slow
def test_whole_weights_alone_are_taken_at_stage_3(written, tmp_path):
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Varied(), BATCHES)
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    torch.save(trainer.module.state_dict(), tmp_path / "plain.pt")
    results = run_in_processes(_from_whole_weights, 2, tmp_path / "all.ckpt", written(3)[0])

    for found, refused in results:
        assert "is sharded" in refused
        for weights, optimizer, steps, _ in found:
            assert_same(weights, trainer.module.state_dict())
            assert not any(float(value.abs().max()) for entry in optimizer.values() for value in entry.values())
            assert steps == 0
    (_, _, _, said), (_, _, _, said_of_plain) = results[0][0]
    assert any("no optimizer comes with the checkpoint" in text for text in said)
    assert any("was not written by stratagem" in text for text in said_of_plain)


# --- What DeepSpeed would lose -----------------------------------------------------------------------------------


class Forgetful(Net):
    """A layer is trained by no optimizer, and not frozen either."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[0].parameters(), lr=1e-3)


class Meddling(sg.Callback):
    @sg.hookimpl
    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["net.0.bias"] = torch.zeros(32)


def _lossy(rank, world_size):
    said = []
    for make, callbacks in ((Forgetful, []), (Net, [Meddling()])):
        trainer = trainer_of(world_size, native(stage=3), max_steps=1, callbacks=callbacks)
        trainer.fit(make(), share(trainer, BATCHES))
        said.append(outcome(lambda: trainer.save_checkpoint("x.ds")))  # noqa: B023
        trainer.run.close()
    said.append(Path("x.ds").exists())
    return said


@pytest.mark.slow
def test_what_would_be_lost_is_refused():
    for forgotten, changed, exists in run_in_processes(_lossy, 2):
        assert "net.2.weight" in forgotten
        assert "is in no optimizer" in forgotten
        assert "on_save_checkpoint changed the weights (net.0.bias)" in changed
        assert not exists
