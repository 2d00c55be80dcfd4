"""Each way of starting processes trains alike, brings everything home, and ends cleanly when something dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from programs import scripts
from stratagem.accelerators import CPUAccelerator
from stratagem.api.capabilities import Capabilities
from stratagem.api.json_tree import encode
from stratagem.errors import ConfigError, LaunchError
from stratagem_testing.reference import Net, Scheduled, Tied, joined_batches, relative_difference, train_plainly
from stratagem_trainer.checkpoint_files import read_any

TESTS = Path(__file__).parents[1]

SCRIPT = """
    import os, sys, time
    sys.path.insert(0, {tests!r})
    import torch
    import stratagem as sg
    from stratagem_launchers_local import supervision
    from stratagem_testing.reference import Net, joined_batches, relative_difference, train_plainly
    from torch.utils.data import DataLoader, TensorDataset

    supervision.NOTICE_S = {notice_s}

    def loader(batches):
        x, y = (torch.cat(parts) for parts in zip(*batches))
        return DataLoader(TensorDataset(x, y), 8)

    class Module(Net):
        def training_step(self, batch, batch_idx):
            {step}
            return super().training_step(batch, batch_idx)

    if __name__ == "__main__" or not {guard}:
        batches = joined_batches(20, 16)
        for accumulate, clip in {options!r}:
            trainer = sg.Trainer(
                strategy={strategy!r}, devices={devices!r}, accelerator="cpu", max_epochs=1, logger=False,
                enable_progress_bar=False, enable_checkpointing=False, accumulate_grad_batches=accumulate,
                gradient_clip_val=clip,
            )
            model = Module()
            trainer.fit(model, loader(batches))
            reference, norms = train_plainly(batches, accumulate, max_norm=clip)
            difference = relative_difference(model.state_dict(), reference)
            tested = trainer.test(model, loader(batches))[0]["test_loss"]
            if trainer.is_global_zero:
                result = trainer.world_size, difference < 1e-6, trainer.global_step, max(norms) > 1, tested > 0
                print("RESULT", *result, flush=True)
        {after}
"""

#: How soon a process that does not notice the end of another one is interrupted here.
NOTICE_S = 0.2

ONCE = [(1, None)]
#: Accumulation and clipping, off and on.
ALL = [(1, None), (1, 1.0), (3, None), (3, 1.0)]
EXPECTED = [f"RESULT 2 True {steps} True True" for steps in (20, 20, 7, 7)]


def script(tmp_path, strategy, devices=2, step="pass", after="pass", guard=True, options=ONCE, notice_s=4.0):
    path = tmp_path / "train.py"
    text = SCRIPT.format(
        tests=str(TESTS), strategy=strategy, devices=devices, step=step, after=after, guard=guard, options=options,
        notice_s=notice_s,
    )  # fmt: skip
    path.write_text(textwrap.dedent(text))
    return path


def run(command, limit_s=360):
    return scripts.run([str(part) for part in command], capture_output=True, text=True, timeout=limit_s, check=False)


def processes_with(marker):
    """Processes whose command line or environment names `marker`, this one aside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marker.encode() in text and int(folder.name) != os.getpid() and state != "Z":
            found.append(int(folder.name))
    return found


def assert_gone(marker, limit_s=45):
    deadline = time.monotonic() + limit_s
    while processes_with(marker):
        assert time.monotonic() < deadline, f"processes {processes_with(marker)} survived"
        time.sleep(0.05)


# --- Training ----------------------------------------------------------------------------------------------------


@pytest.mark.every_push("ddp")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_every_launcher_trains_as_one_process_and_tests_in_the_same_script(tmp_path, strategy):
    result = run([sys.executable, script(tmp_path, strategy, options=ALL)])

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == EXPECTED


@pytest.mark.slow
def test_torchrun_decides_and_the_script_starts_nothing_itself(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    result = run([*torchrun, script(tmp_path, "ddp", devices="auto", options=ALL)])

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == EXPECTED


@pytest.mark.sweep(
    guard="tests/plugins/test_launchers.py::test_every_launcher_trains_as_one_process_and_tests_in_the_same_script"
)
@pytest.mark.slow
def test_a_module_run_with_m_is_run_again_with_m(tmp_path):
    script(tmp_path, "ddp")
    result = subprocess.run(
        [sys.executable, "-m", "train"], cwd=tmp_path, capture_output=True, text=True, timeout=360, check=False
    )

    assert result.stdout.splitlines() == EXPECTED[:1], result.stderr


def forked(batches, callbacks=(), **arguments):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    arguments = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 1} | arguments
    trainer = sg.Trainer(callbacks=callbacks, **(quiet | arguments))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return trainer, DataLoader(TensorDataset(x, y), 8)


@pytest.mark.slow
def test_weights_optimizer_position_and_metrics_come_home():
    batches = joined_batches(10, 16)
    trainer, loader = forked(batches)
    model = Net()

    trainer.fit(model, loader, loader)
    assert relative_difference(model.state_dict(), train_plainly(batches)[0]) < 1e-6
    assert (trainer.global_step, trainer.current_epoch) == (10, 1)
    assert "val_loss" in trainer.callback_metrics

    trainer.max_epochs = 2
    trainer.fit(model, loader)
    assert relative_difference(model.state_dict(), train_plainly(batches * 2)[0]) < 1e-6
    assert trainer.global_step == 20


#: A group that outlives the run that made it.
HELD = []


class Holding(Net):
    """Replaces the group that is held, and raises `error` in its second step."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def configure_optimizers(self):
        HELD[:] = [torch.distributed.new_group()]
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        if self.error is not None and batch_idx == 1:
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.when_changed(
    "plugins/basics/stratagem_launchers_local",
    cases=(
        "ddp-error1-False",
        "ddp-error1-True",
        "parallel-error3-False",
        "parallel-error3-True",
    ),
)
@pytest.mark.slow
@pytest.mark.parametrize("destroys", [False, True])
@pytest.mark.parametrize(
    ("strategy", "error"),
    [("ddp", None), ("ddp", KeyboardInterrupt()), ("fsdp", ConfigError("mine")), ("parallel", ValueError())],
)
def test_forks_train_after_a_run_of_one_process_that_was_not_closed(strategy, error, destroys):
    """Its groups exist in this process, or are held; to free one in a fork would wait for threads of this process."""
    batches = joined_batches(4, 16)
    open_run, loader = forked(batches, strategy=strategy, launcher="subprocess", devices=1)
    with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
        open_run.fit(Holding(error), loader)
    if destroys:
        torch.distributed.destroy_process_group()
    trainer, loader = forked(batches, strategy=strategy, launcher="fork")
    model = Holding()

    trainer.fit(model, loader)

    reference, norms = train_plainly(batches)
    assert max(norms) > 1
    assert relative_difference(model.state_dict(), reference) < 1e-6


class BuiltInSetup(Net):
    """Makes its layers in `setup`, or lets a callback or a data module do so."""

    def setup(self, stage):
        if not hasattr(self, "more"):
            self.more = torch.nn.Linear(1, 1).requires_grad_(False)


class BuildsIt(sg.Callback):
    def setup(self, trainer, pl_module, stage):
        BuiltInSetup.setup(pl_module, stage)


class BuildsItToo(sg.DataModule):
    def setup(self, stage):
        BuiltInSetup.setup(self.trainer.lightning_module, stage)

    def train_dataloader(self):
        return joined_batches(2, 16)


@pytest.mark.slow
def test_layers_that_setup_makes_in_a_fork_are_refused_before_training():
    said = "setup made 'more.bias', which the process that launched this one lacks .*__init__ or configure_model"
    for model, callbacks, data in (
        (BuiltInSetup(), [], None), (BuiltInSetup(), [BuildsIt()], None), (BuiltInSetup(), [], BuildsItToo()),
    ):  # fmt: skip
        model.setup = (lambda stage: None) if callbacks or data else model.setup
        trainer, loader = forked(joined_batches(2, 16), callbacks, launcher="fork")
        with pytest.raises(ConfigError, match=said):
            trainer.fit(model, **({"datamodule": data} if data else {"train_dataloaders": loader}))

    trainer, loader = forked(joined_batches(2, 16), launcher="fork")
    (model := BuiltInSetup()).setup("fit")
    trainer.fit(model, loader)
    assert trainer.global_step


class Preloading(sg.Callback):
    def __init__(self):
        self.asked = []

    def preload(self, device_type):
        self.asked.append((device_type, os.getpid()))

    @sg.hookimpl
    def on_fit_start(self):
        assert len(self.asked) == 1, "a copy was made before its original had imported what is late"


def test_what_is_imported_late_is_imported_once():
    look = Preloading()
    trainer, loader = forked(joined_batches(2, 16), [look])
    trainer.fit(Net(), loader)

    assert look.asked == [("cpu", os.getpid())]


def test_callbacks_bring_their_state_home(tmp_path):
    trainer, loader = forked(joined_batches(4, 16), enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(Net(), loader)

    assert Path(trainer.callbacks[0].best_model_path).exists()


class Seeing(Net):
    """Writes down which samples it has trained on."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def training_step(self, batch, batch_idx):
        with Path(f"{self.path}.{self.trainer.global_rank}").open("a") as file:
            file.writelines(f"{float(first)}\n" for first in batch[0][:, 0])
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.every_push("1")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_fit_goes_on_with_the_rest_of_the_epoch(tmp_path, devices):
    batches = joined_batches(6, 8)
    trainer, _ = forked(batches, devices=devices)
    loader = DataLoader(TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True))), 4, shuffle=True)
    model = Seeing(tmp_path / "seen")

    trainer.max_steps = 3
    trainer.fit(model, loader)
    trainer.max_steps = -1
    torch.manual_seed(5)
    trainer.fit(model, loader)

    seen = [line for path in tmp_path.glob("seen.*") for line in path.read_text().split()]
    assert (len(seen), len(set(seen))) == (48, 48)


@pytest.mark.slow
@pytest.mark.every_push("fork-ddp")
@pytest.mark.parametrize(
    ("launcher", "strategy"), [("fork", "ddp"), ("fork", "ddp_sharded"), ("fork", "fsdp"), ("spawn", "ddp")]
)
def test_a_model_built_on_the_meta_device_is_returned_with_values(strategy, launcher):
    batches = joined_batches(2, 16)
    trainer, loader = forked(batches, strategy=strategy, launcher=launcher)
    with trainer.init_module(empty_init=True):
        model = Net()

    trainer.fit(model, loader)
    returned = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = parameters_to_vector(returned.values())
    assert not any(tensor.is_meta or tensor.isnan().any() for tensor in returned.values())

    trainer.max_epochs = 2
    trainer.fit(model, loader)  # training continues from these weights
    # All values together: the initial values are random, and a bias of one element may be near 0.
    assert 0 < (parameters_to_vector(model.state_dict().values()) - first).norm() < first.norm()


def test_tied_parameters_and_buffers_on_the_meta_device_are_returned_with_values():
    class Both(Tied):
        def __init__(self):
            super().__init__()
            self.register_buffer("aside", torch.full((3,), 2.0), persistent=False)
            self.net[0].weight.note = "mine"

    trainer, loader = forked(joined_batches(2, 16))
    with trainer.init_module(empty_init=True):
        model = Both()
    trainer.fit(model, loader)

    assert model.net[2][0].weight is model.net[4][0].weight
    assert model.aside.tolist() == [2.0] * 3
    assert model.net[0].weight.note == "mine"


@pytest.mark.slow
@pytest.mark.every_push("sharded-ddp")
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded", "fsdp"])
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_a_checkpoint_saved_at_home_holds_all_that_resuming_needs(tmp_path, strategy, checkpoint):
    batches = joined_batches(4, 16)
    trainer, loader = forked(batches, strategy=strategy, launcher="fork", checkpoint=checkpoint)
    model = Net()
    trainer.fit(model, loader, loader)
    trainer.validate(model, loader)
    trainer.save_checkpoint(tmp_path / "home.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    resumed, _ = forked(batches, strategy=strategy, launcher="fork", max_epochs=2)
    other = Net(seed=5)
    resumed.fit(other, loader, ckpt_path=tmp_path / "home.ckpt")
    assert resumed.global_step == 8
    assert relative_difference(other.state_dict(), train_plainly([*batches, *batches])[0]) < 1e-6
    assert "optimizers" not in read_any(tmp_path / "weights.ckpt")


@pytest.mark.slow
def test_a_checkpoint_saved_at_home_equals_the_one_saved_abroad(tmp_path):
    class SaveAtEnd(sg.Callback):
        @sg.hookimpl
        def on_fit_end(self, trainer):
            trainer.save_checkpoint(tmp_path / "abroad.ckpt")

    trainer, loader = forked(joined_batches(4, 16), [SaveAtEnd()], precision="bf16-mixed")
    trainer.fit(Scheduled(), loader)
    trainer.save_checkpoint(tmp_path / "home.ckpt")

    home, abroad = (encode(read_any(tmp_path / f"{name}.ckpt"), lambda t, _: t.tolist()) for name in ("home", "abroad"))
    assert home.keys() == abroad.keys()
    assert [name for name in home if home[name] != abroad[name]] == []


@pytest.mark.slow
def test_another_module_does_not_get_the_optimizer_that_came_home(tmp_path):
    trainer, loader = forked(joined_batches(2, 16))
    trainer.fit(Net(), loader)
    trainer.test(Net(seed=3), loader)
    trainer.save_checkpoint(tmp_path / "other.ckpt")

    assert not read_any(tmp_path / "other.ckpt").get("optimizers")


def test_predictions_come_home():
    trainer, loader = forked(joined_batches(4, 16))

    assert len(trainer.predict(Net(), loader)) == 4


# --- Dying -------------------------------------------------------------------------------------------------------


class Failing(Net):
    def __init__(self, rank, how):
        super().__init__()
        self.bad_rank, self.how = rank, how

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == self.bad_rank:
            self.how()
        return super().training_step(batch, batch_idx)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def raise_value_error():
    raise ValueError("out of order")


def raise_config_error():
    raise ConfigError("this is 1", expected="2")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_root_error_and_its_rank_are_raised_not_the_broken_connections(rank):
    trainer, loader = forked(joined_batches(10, 16))

    with pytest.raises(LaunchError, match=f"rank {rank} failed with ValueError: out of order") as caught:
        trainer.fit(Failing(rank, raise_value_error), loader)
    assert "raise_value_error" in caught.value.__notes__[0]
    assert "Connection" not in str(caught.value)


def test_an_error_of_ours_keeps_its_class():
    trainer, loader = forked(joined_batches(10, 16))

    with pytest.raises(ConfigError, match="this is 1; expected 2"):
        trainer.fit(Failing(1, raise_config_error), loader)


@pytest.mark.slow
def test_a_killed_process_is_named():
    trainer, loader = forked(joined_batches(10, 16))

    with pytest.raises(
        LaunchError, match="rank 1 was killed by SIGKILL in training_step at step 2, batch 2; check the kernel log"
    ):
        trainer.fit(Failing(1, kill_self), loader)


@pytest.mark.slow
def test_a_hanging_sibling_is_ended():
    class Hanging(Failing):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and self.global_rank == 0:
                time.sleep(600)
            return super().training_step(batch, batch_idx)

    trainer, loader = forked(joined_batches(10, 16))

    with pytest.raises(LaunchError, match="rank 1 failed with ValueError"):
        trainer.fit(Hanging(1, raise_value_error), loader)


@pytest.mark.slow
@pytest.mark.every_push("0")
@pytest.mark.parametrize("rank", [0, 1])
def test_subprocess_shows_the_root_traceback_once_and_exits_with_1(tmp_path, rank):
    step = f"if batch_idx == 2 and self.global_rank == {rank}: raise ValueError('out of order')"
    result = run([sys.executable, script(tmp_path, "ddp", step=step)])

    assert result.returncode == 1
    assert result.stderr.count("ValueError: out of order") >= 1
    assert result.stderr.count("Connection") == 0
    assert ("rank 1 failed" in result.stderr) == (rank == 1)
    assert_gone(str(tmp_path))


@pytest.mark.slow
def test_subprocess_notices_a_killed_rank(tmp_path):
    step = "if batch_idx == 2 and self.global_rank == 1: os.kill(os.getpid(), 9)"
    result = run([sys.executable, script(tmp_path, "ddp", step=step)])

    assert result.returncode == 1
    assert "rank 1 was killed by SIGKILL" in result.stderr
    assert_gone(str(tmp_path))


@pytest.mark.slow
def test_subprocess_ends_a_rank_0_that_is_stuck(tmp_path):
    step = (
        "if batch_idx == 2 and self.global_rank == 1: raise ValueError('out of order')\n"
        "            if batch_idx == 2: time.sleep(600)"
    )
    result = run([sys.executable, script(tmp_path, "ddp", step=step, notice_s=NOTICE_S)])

    assert result.returncode != 0
    assert "out of order" in result.stderr
    assert_gone(str(tmp_path))


@pytest.mark.slow
def test_an_error_after_fit_on_one_rank_is_reported_too(tmp_path):
    after = "assert trainer.global_rank == 0, 'after the fit'"
    result = run([sys.executable, script(tmp_path, "ddp", after=after)])

    assert result.returncode == 1
    assert "after the fit" in result.stderr


@pytest.mark.every_push("9-ddp")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", "ddp_spawn"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_die_with_their_parent(tmp_path, strategy, number):
    step = "os.write(1, b'training\\n'); time.sleep(0.2)"
    process = scripts.Popen(
        [sys.executable, str(script(tmp_path, strategy, step=step))], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    assert process.stdout.readline().strip() == "training"
    assert process.stdout.readline().strip() == "training"

    os.kill(process.pid, number)
    process.wait(timeout=60)

    assert process.returncode != 0
    assert_gone(str(tmp_path))


# --- Dying, without a trainer ------------------------------------------------------------------------------------

BARE = """
    import os, signal, subprocess, sys, threading, time, types
    from stratagem import World
    from stratagem.accelerators import CPUAccelerator
    from stratagem_launchers_local.supervision import report_to_launcher
    from stratagem.launchers import {launcher}
    from stratagem_launchers_local import supervision

    supervision.NOTICE_S, supervision.END_S = {notice_s}, 0.5
    {first}

    def rank():
        return int(os.environ["RANK"])

    def body():
        report_to_launcher()
        {body}

    def launch():
        world = World(world_size=2, local_world_size=2)
        run = types.SimpleNamespace(
            num_processes=2, world=world, settings=types.SimpleNamespace(num_nodes=1), stack=types.SimpleNamespace(preload=lambda: None),
            accelerator=CPUAccelerator(),
        )
        return {launcher}().launch(main=body, run=run)

    if __name__ == "__main__":
        if "LOCAL_RANK" in os.environ:
            body()
        else:
            {parent}
"""


def bare(tmp_path, body, launcher="SubprocessLauncher", parent="launch()", first=""):
    path = tmp_path / "bare.py"
    text = textwrap.dedent(BARE)
    places = (("body", body, 4), ("parent", parent, 8), ("launcher", launcher, 0), ("first", first, 0))
    for name, lines, indent in (*places, ("notice_s", str(NOTICE_S), 0)):
        text = text.replace(f"{{{name}}}", textwrap.indent(textwrap.dedent(lines).strip(), " " * indent).strip())
    path.write_text(text)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return scripts.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(process, tmp_path, limit_s=180):
    output, errors = process.communicate(timeout=limit_s)
    assert_gone(str(tmp_path))
    assert not list((tmp_path / "temporary").glob("stratagem-*")), "the folder of the reports is left behind"
    return process.returncode, output, errors


@pytest.mark.slow
def test_signals_wait_while_a_process_is_spawned(tmp_path):
    parent = """
        class Bytes:
            def __init__(self, content):
                self.content = content

            def __reduce__(self):  # called while the process starts
                print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
                return bytes, (self.content,)

        pack = SpawnLauncher._pack
        SpawnLauncher._pack = lambda self, main: Bytes(pack(self, main))
        launch()
    """

    code, output, errors = finish(bare(tmp_path, "pass", "SpawnLauncher", parent), tmp_path)

    assert code == 0, errors
    assert output.split() == ["True", "True"]


@pytest.mark.every_push("os.kill(os.getpid(), 9)-rank 1 was killed by SIGKILL")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "message"),
    [
        ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
        ("raise RuntimeError('cannot restore')", "rank 1 failed with RuntimeError: cannot restore"),
        ("raise ConnectionError('data host down')", "rank 1 failed with ConnectionError: data host down"),
        ("sys.exit(3)", "rank 1 failed with SystemExit: 3"),
    ],
)
def test_a_sibling_that_hangs_is_ended_and_not_blamed(tmp_path, death, message):
    process = bare(tmp_path, f"if rank() == 1: {death}\ntime.sleep(600)", "ForkLauncher")
    code, _, errors = finish(process, tmp_path)

    assert code == 1
    assert message in errors
    assert "SIGTERM" not in errors


@pytest.mark.slow
def test_subprocess_wakes_a_rank_0_that_sleeps_and_shows_the_cause_once(tmp_path):
    process = bare(tmp_path, "if rank() == 1: raise ValueError('out of order')\ntime.sleep(600)")
    code, _, errors = finish(process, tmp_path)

    assert code == 1
    assert errors.count("rank 1 failed with ValueError: out of order") == 1


@pytest.mark.slow
def test_subprocess_wakes_a_rank_0_that_sleeps_after_the_launch_and_exits_with_1(tmp_path):
    body = "if rank() == 1: time.sleep(1); raise ValueError('out of order')"
    code, _, errors = finish(bare(tmp_path, body, parent="launch(); time.sleep(600)"), tmp_path, limit_s=60)

    assert code == 1
    assert errors.count("rank 1 failed with ValueError: out of order") == 1


@pytest.mark.slow
def test_subprocess_ends_a_rank_0_that_swallows_the_interrupt(tmp_path):
    body = """
        if rank() == 1: raise ValueError('out of order')
        while True:
            try: time.sleep(600)
            except KeyboardInterrupt: pass
    """
    code, _, errors = finish(bare(tmp_path, body), tmp_path)

    assert code == 1
    assert errors.count("rank 1 failed with ValueError: out of order") == 1


@pytest.mark.slow
def test_a_program_that_catches_the_error_may_go_on_but_not_train_on(tmp_path):
    parent = """
        try: launch()
        except Exception as error: print("caught", error)
        try: body()
        except Exception as error: print("then", error)
        for _ in range(12): time.sleep(0.1)  # longer than the limits of supervision
        print("done")
    """
    body = "if rank() == 1: raise ValueError('out of order')\ntime.sleep(600)"
    code, output, _ = finish(bare(tmp_path, body, parent=parent), tmp_path)

    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == ["caught", "then", "done"]
    assert "then the other processes of this program were ended after an error" in output


@pytest.mark.slow
def test_subprocess_may_be_launched_from_a_thread_that_ends(tmp_path):
    parent = "thread = threading.Thread(target=launch); thread.start(); thread.join()"
    body = "if rank() == 1: time.sleep(1); print('trained', flush=True)"
    code, output, errors = finish(bare(tmp_path, body, parent=parent), tmp_path)

    assert (code, output) == (0, "trained\n"), errors


@pytest.mark.slow
@pytest.mark.parametrize(("abort", "expected"), [("while tidying up", 0), ("in the middle", 1)])
def test_an_abort_counts_only_before_python_has_ended_in_order(tmp_path, abort, expected):
    """A library may abort a process that is done; an abort in the middle is a failure like any other."""
    in_the_end = "import atexit\nif os.environ.get('RANK') == '1': atexit.register(os.abort)"  # first, so it runs last
    body, first = ("pass", in_the_end) if expected == 0 else ("if rank() == 1: os.abort()", "")
    process = bare(tmp_path, body, first=first)
    code, _, errors = finish(process, tmp_path)

    assert code == expected, errors
    assert ("SIGABRT" in errors) == (expected == 1)


@pytest.mark.slow
def test_a_fork_of_rank_0_does_not_end_the_other_ranks(tmp_path):
    body = """
        if rank() == 1:
            time.sleep(1)
            print("trained", flush=True)
        elif os.fork() == 0:
            sys.exit(0)
    """
    code, output, errors = finish(bare(tmp_path, body), tmp_path)

    assert (code, output) == (0, "trained\n"), errors


@pytest.mark.slow
def test_a_store_begins_after_the_last_fork(tmp_path):
    """Its thread may hold a lock of the C library, which a process forked then would wait for."""
    parent = """
        import glob
        stores = []
        names = lambda: [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
        os.register_at_fork(before=lambda: stores.append(any("store" in name for name in names())))
        launch()
        print(stores)
    """
    body = """
        import torch.distributed as dist
        dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False).set("here", "1")
    """
    code, output, errors = finish(bare(tmp_path, body, "ForkLauncher", parent), tmp_path)

    assert (code, output) == (0, "[False, False]\n"), errors


@pytest.mark.slow
@pytest.mark.every_push("ForkLauncher")
@pytest.mark.parametrize("launcher", ["ForkLauncher", "SpawnLauncher"])
def test_sigterm_reaches_the_processes_before_the_parent_exits_with_143(tmp_path, launcher):
    body = """
        signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"tidy\\n"), os._exit(143)))
        os.write(1, b"up\\n")
        while True: time.sleep(0.05)  # a signal just before a long sleep would be handled after that sleep
    """
    patient = "from stratagem_launchers_local import children; children.END_S = 300"
    process = bare(tmp_path, body, launcher, first=patient)
    assert [process.stdout.readline(), process.stdout.readline()] == ["up\n", "up\n"]
    process.terminate()
    code, output, errors = finish(process, tmp_path)

    assert (code, output, errors) == (143, "tidy\ntidy\n", "")


@pytest.mark.slow
def test_leaving_the_program_in_main_leaves_it_in_the_parent(tmp_path):
    process = bare(tmp_path, "sys.exit(0)", "ForkLauncher", parent='launch(); print("not reached")')

    assert finish(process, tmp_path) == (0, "", "")


@pytest.mark.slow
def test_a_process_that_cannot_be_started_ends_those_that_were(tmp_path):
    parent = """
        import multiprocessing.context as context
        start, started = context.ForkProcess.start, []
        def limited(process):
            if started: raise OSError("no more processes")
            started.append(process)
            start(process)
        context.ForkProcess.start = limited
        try: launch()
        except OSError as error: print(error, [process.is_alive() for process in started])
    """
    process = bare(tmp_path, "time.sleep(600)", "ForkLauncher", parent)

    assert finish(process, tmp_path)[:2] == (0, "no more processes [False]\n")


# --- Bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_spawn_without_a_main_guard_is_explained(tmp_path):
    result = run([sys.executable, script(tmp_path, "ddp_spawn", guard=False)])

    assert result.returncode == 1
    assert 'if __name__ == "__main__"' in result.stderr
    assert_gone(str(tmp_path))


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has the device that the test wants absent")
def test_an_accelerator_without_devices_is_refused():
    with pytest.raises(ConfigError, match="accelerator 'cuda' finds no device on this machine"):
        sg.Trainer(accelerator="cuda")


class PretendGPU(CPUAccelerator):
    """One that says it is a GPU, for what is decided before anything runs there."""

    capabilities = Capabilities(provides={"device:cuda"})


@pytest.mark.slow
def test_a_run_on_the_cpu_is_forked_beside_a_gpu(monkeypatch):
    """A fork is possible as long as nothing in the parent has asked the driver, which is_available does."""
    asked = []

    def is_available():
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.partition(".")[0].startswith("stratagem"):
            asked.append(caller)
        return True

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.random, "_lazy_init", lambda: asked.append("_lazy_init"))
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    trainer, loader = forked(joined_batches(2, 16))
    trainer.fit(Net(), loader)

    assert not asked


def test_a_run_on_the_cpu_is_forked_from_a_process_that_uses_cuda(monkeypatch):
    parent = os.getpid()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: os.getpid() == parent)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    trainer, loader = forked(joined_batches(2, 16))
    trainer.fit(Net(), loader)

    assert trainer.global_step == 2


@pytest.mark.parametrize("started", [True, False])
def test_a_run_on_gpus_is_not_forked_from_a_process_that_asked_the_driver(monkeypatch, started):
    parent = os.getpid()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != parent)
    trainer, loader = forked(joined_batches(2, 16), accelerator=PretendGPU())

    with pytest.raises(ConfigError, match="'fork' was chosen and this process already uses CUDA; .*is_available"):
        trainer.fit(Net(), loader)


def test_spawn_refuses_what_does_not_pickle():
    model = Net()
    model.function = lambda: None

    with pytest.raises(ConfigError, match="cannot be sent to a spawned process.*expected everything to pickle"):
        trainer, loader = forked(joined_batches(1, 16))
        sg.Trainer(
            strategy="ddp_spawn", devices=2, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_checkpointing=False, max_epochs=1,
        ).fit(model, loader)  # fmt: skip


@pytest.mark.slow
def test_a_program_without_a_file_cannot_be_run_again():
    code = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(TESTS)!r})
        import stratagem as sg
        from stratagem_testing.reference import Net, joined_batches
        sg.Trainer(strategy="ddp", devices=2, accelerator="cpu").fit(Net(), joined_batches(1, 8))
        """
    )
    result = run([sys.executable, "-c", code])

    assert result.returncode == 1
    assert "no file to run again" in result.stderr


@pytest.mark.slow
def test_what_a_program_without_a_file_is_told_works_for_every_strategy():
    """As in a notebook: the strategy that was asked for stays, and the processes are copies."""
    code = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(TESTS)!r})
        import stratagem as sg
        from stratagem_testing.reference import Net, joined_batches
        quiet = dict(accelerator="cpu", devices=2, max_epochs=1, barebones=True)
        for strategy in ("ddp", "ddp_sharded", "fsdp", "local_sgd"):
            try:
                sg.Trainer(strategy=strategy, **quiet).fit(Net(), joined_batches(1, 8))
            except sg.StratagemError as error:
                assert 'pass launcher="fork"' in str(error), error
            trainer = sg.Trainer(strategy=strategy, launcher="fork", **quiet)
            trainer.fit(Net(), joined_batches(1, 8))
            print(strategy, trainer.global_step)
        """
    )
    result = run([sys.executable, "-c", code])

    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:-1] == ["ddp 1", "ddp_sharded 1", "fsdp 1", "local_sgd 1"]


def test_a_launcher_that_contradicts_the_strategy_is_refused():
    with pytest.raises(
        ConfigError, match="launcher 'fork' was chosen and strategy 'ddp_spawn' needs the launcher 'spawn'"
    ):
        sg.Trainer(strategy="ddp_spawn", launcher="fork", accelerator="cpu")


def test_another_trainer_with_other_devices_in_a_launched_script_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    trainer, loader = forked(joined_batches(1, 16))
    alone = sg.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)

    with pytest.raises(ConfigError, match="LOCAL_RANK is 1 and the run has 1 processes"):
        alone.test(Net(), loader)


@pytest.mark.slow
def test_a_started_process_knows_its_rank_before_it_trains(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
        import stratagem as sg
        from stratagem.runtime.launching import launch

        trainer = sg.Trainer(strategy="ddp", devices=2, accelerator="cpu", barebones=True)
        early = trainer.is_global_zero, trainer.global_rank, trainer.local_rank, trainer.run.is_global_zero
        trainer.print("once")
        ranks = launch(trainer.run, lambda run: run.collectives.all_gather_object(early))
        if trainer.is_global_zero:
            print(ranks)
        """)
    )
    result = run([sys.executable, path])

    assert result.stdout.splitlines() == ["once", "[(True, 0, 0, True), (False, 1, 1, False)]"], result.stderr


@pytest.mark.slow
def test_spawn_names_what_a_spawned_process_cannot_import(tmp_path):
    """As in a notebook, whose main program has no file either."""
    code = """
import stratagem as sg
from stratagem.accelerators import CPUAccelerator
from stratagem_testing.reference import Net, joined_batches

class Mine(Net):
    pass

trainer = sg.Trainer(strategy="ddp_spawn", devices=2, accelerator="cpu", barebones=True, max_epochs=1)
trainer.fit({model}, joined_batches(1, 8))
print("trained")
"""
    refused = run([sys.executable, "-c", code.format(model="Mine()")])
    imported = run([sys.executable, "-c", code.format(model="Net()")])

    assert refused.returncode == 1
    assert "ConfigError: Mine is defined in a notebook, at a prompt or in `python -c`" in refused.stderr
    assert 'use a strategy that forks (such as "ddp_notebook")' in refused.stderr
    assert imported.stdout == "trained\n", imported.stderr


KEEPS_FILE = """
    import sys
    import stratagem as sg
    from stratagem_testing.reference import Net, joined_batches

    class Keeps(Net):
        def on_fit_start(self):
            self.file = open(f"lines.{self.trainer.global_rank}", "w")

        def training_step(self, batch, batch_idx):
            self.file.write("a line\\n")
            if batch_idx == 3 and sys.argv[2] == "fails":
                raise RuntimeError("stop here")
            return super().training_step(batch, batch_idx)

    if __name__ == "__main__":
        trainer = sg.Trainer(
            strategy="ddp", launcher=None if sys.argv[1] == "default" else sys.argv[1], devices=2, accelerator="cpu",
            max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        )
        trainer.fit(Keeps(), joined_batches(4, 8))
"""


@pytest.mark.slow
@pytest.mark.every_push("ends-fork", "fails-fork")
@pytest.mark.parametrize("launcher", ["fork", "spawn", "default"])
@pytest.mark.parametrize("how", ["ends", "fails"])
def test_files_that_a_rank_keeps_open_are_written(tmp_path, launcher, how):
    (tmp_path / "train.py").write_text(textwrap.dedent(KEEPS_FILE))
    scripts.run(
        [sys.executable, "train.py", launcher, how], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        check=how == "ends",
    )  # fmt: skip

    lines = [len((tmp_path / f"lines.{rank}").read_text().splitlines()) for rank in (0, 1)]
    # The launcher ends the other rank after the first error, wherever it is.
    assert lines == [4, 4] if how == "ends" else max(lines) == 4
