"""`preemption` under a scheduler that can start the job again, and what a job that was started again continues from."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
import torch
from attrs import define, evolve, field

import stratagem as sg
from stratagem.api import World, hookimpl
from stratagem.callbacks import ModelCheckpoint, Preemption
from stratagem.environments import LocalEnvironment
from stratagem.errors import CheckpointError, ConfigError, LaunchError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_trainer.checkpoint_files import read_any

BATCHES = joined_batches(8, 4)
PREEMPTION = {"name": "preemption", "signals": ["SIGUSR1"], "look_every_s": 0.01}


@define(eq=False, kw_only=True)
class Scheduled(LocalEnvironment):
    """A batch job of a scheduler: `command` starts it again, and `restarts` counts how often that was done."""

    command: list[str] | None = field(factory=lambda: ["touch", "requeued"])
    restarts: int = 0
    name: str = "job 1"
    adds: list = field(factory=lambda: [PREEMPTION])

    def default_callbacks(self):
        return self.adds

    def job(self):
        return self.name

    def requeue_command(self):
        return self.command

    @hookimpl
    def setup_environment(self, run) -> World:
        return evolve(super().setup_environment(run), generation=str(self.restarts))


class Signalled(Net):
    """Gets `signals` in the event `where`: at once, or before the last batch that the run trains."""

    def __init__(self, where="training_step", signals=(signal.SIGUSR1,), at_step=2):
        super().__init__()
        self.where, self.signals, self.at_step = where, signals, at_step

    def get(self, where):
        if where == self.where and self.trainer.global_step >= self.at_step:
            self.where = ""
            for each in self.signals:
                signal.raise_signal(each)

    def setup(self, stage):
        self.get("setup")

    def training_step(self, batch, batch_idx):
        if not self.where:
            import time

            time.sleep(0.03)  # the thread that looks for signals needs a moment
        self.get("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.get("validation_step")

    def on_save_checkpoint(self, checkpoint):
        self.get("on_save_checkpoint")

    def on_train_end(self):
        self.get("on_train_end")


@pytest.fixture(autouse=True)
def handlers_restored():
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def trainer(environment=None, **arguments):
    quiet = {"enable_progress_bar": False, "logger": False, "accelerator": "cpu", "max_epochs": 60}
    return sg.Trainer(environment=environment or Scheduled(), **(quiet | {"default_root_dir": "."} | arguments))


def end(made, module, code=75, **arguments):
    with pytest.raises(SystemExit) as stop:
        made.fit(module, BATCHES, BATCHES[:1], **arguments)
    assert stop.value.code == code


# --- Requeue -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["setup", "training_step", "validation_step", "on_save_checkpoint"])
def test_the_environments_callback_saves_and_requeues_wherever_the_signal_comes(tmp_path, capsys, where):
    at_step = 0 if where == "setup" else 2
    made = trainer(callbacks=[ModelCheckpoint(every_n_train_steps=1)])

    end(made, Signalled(where, at_step=at_step))

    saved = read_any(tmp_path / "checkpoints/preempted.ckpt")
    assert (tmp_path / "requeued").exists()
    assert saved["loop"]["global_step"] == made.global_step >= 1
    assert saved["job"] == "job 1"
    told = capsys.readouterr().out
    assert "SIGUSR1 to rank 0: saved" in told
    assert "`touch requeued`: the job starts again; leaving with code 75" in told
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # which the scheduler sends now


def test_sigterm_neither_disturbs_the_save_nor_asks_for_a_requeue(tmp_path, capsys):
    end(trainer(), Signalled(signals=(signal.SIGUSR1, signal.SIGTERM)))

    assert (tmp_path / "checkpoints/preempted.ckpt").exists()
    assert not (tmp_path / "requeued").exists()
    assert "SIGTERM followed; not requeued, since SIGTERM ends a job that is cancelled" in capsys.readouterr().out


def test_the_users_callback_takes_the_place_of_the_environments(tmp_path, capsys):
    end(trainer(callbacks=[Preemption(look_every_s=0.01)]), Signalled(signals=(signal.SIGTERM,)))

    assert not (tmp_path / "requeued").exists()
    assert "SIGTERM to rank 0: saved" in capsys.readouterr().out

    end(trainer(callbacks=[Preemption(look_every_s=0.01)]), Signalled())
    assert (tmp_path / "requeued").exists()


def test_without_sigterm_among_the_signals_it_ends_the_program_as_before():
    before = []
    signal.signal(signal.SIGTERM, lambda *_: before.append("called"))
    trainer(max_epochs=1).fit(Signalled(signals=(signal.SIGTERM,)), BATCHES)

    assert before == ["called"]


@pytest.mark.parametrize("requeue", [False, None])
def test_where_it_must_not_or_cannot_requeue_it_only_saves(tmp_path, capsys, requeue):
    callback = Preemption(requeue=False) if requeue is False else Preemption()
    environment = Scheduled() if requeue is False else Scheduled(command=None)
    callback.look_every_s = 0.01

    end(trainer(environment, callbacks=[callback]), Signalled())

    assert not (tmp_path / "requeued").exists()
    assert "saved" in (told := capsys.readouterr().out)
    assert "requeued" not in told


def test_requeue_true_where_nothing_can_is_an_error_at_start():
    made = trainer(Scheduled(command=None), callbacks=[Preemption(requeue=True)])

    with pytest.raises(ConfigError, match="preemption.requeue is True, and Scheduled has no command that starts"):
        made.fit(Net(), BATCHES)


@pytest.mark.parametrize(
    ("command", "problem"),
    [([sys.executable, "-c", "print('not allowed'); raise SystemExit(3)"], "code 3: not allowed"),
     (["no-such-program"], "No such file")],
    ids=["refused", "missing"],
)  # fmt: skip
def test_a_scheduler_that_refuses_is_an_error_and_the_checkpoint_stays(tmp_path, command, problem):
    with pytest.raises(LaunchError, match=rf"(?s)saved .*preempted.ckpt after step .*{problem}.*submit it again"):
        trainer(Scheduled(command=command)).fit(Signalled(), BATCHES)

    assert read_any(tmp_path / "checkpoints/preempted.ckpt")["loop"]["global_step"] > 0
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN


def test_a_signal_after_the_last_step_neither_requeues_nor_kills(tmp_path, capfd):
    made = trainer(max_epochs=1)

    made.fit(Signalled("on_train_end"), BATCHES)
    signal.raise_signal(signal.SIGUSR1)  # during what follows the fit

    assert made.global_step == len(BATCHES)
    assert not (tmp_path / "requeued").exists()
    assert capfd.readouterr().err.count("SIGUSR1 came outside of a fit: the program goes on") == 2


def _refused_on_both(rank, world_size):
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    made = trainer(Scheduled(command=command), devices=world_size)
    try:
        made.fit(Signalled("training_step" if rank else "nowhere"), BATCHES)
    except BaseException as error:
        return f"{type(error).__name__} {error}"


def test_a_refusal_reaches_all_ranks():
    first, second = run_in_processes(_refused_on_both, 2)

    assert first.startswith("LaunchError SIGUSR1 to rank 1: saved")
    assert second.startswith("StratagemError rank 0 failed with LaunchError: SIGUSR1 to rank 1: saved")


def _requeued_once(rank, world_size):
    command = [sys.executable, "-c", "open('requeued', 'a').write('x')"]
    made = trainer(Scheduled(command=command), devices=world_size)
    try:
        made.fit(Signalled("training_step" if rank else "nowhere"), BATCHES)
    except SystemExit as stop:
        return stop.code, made.global_step, signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_one_rank_asks_for_all(tmp_path):
    first, second = run_in_processes(_requeued_once, 2)

    assert first == second
    assert (first[0], first[2]) == (75, True)
    assert (tmp_path / "requeued").read_text() == "x"


def test_no_environments_callback_where_the_user_switches_it_off_or_it_is_not_installed(monkeypatch):
    of_every_fit = ["ending", "hints", "interruption", "finite", "peer_diagnosis"]
    assert [choice.name for choice in trainer(Scheduled(adds=[])).run.stack.automatic] == of_every_fit
    assert [choice.name for choice in trainer().run.stack.automatic] == [*of_every_fit, "preemption"]
    assert [choice.name for choice in trainer(callbacks=["preemption"]).run.stack.automatic] == of_every_fit
    assert [choice.name for choice in trainer(barebones=True).run.stack.automatic] == ["peer_diagnosis"]
    assert sg.Run(environment=Scheduled()).stack.automatic[1:] == []

    with pytest.warns(UserWarning, match="adds a callback, and the run goes on without it: .*no_such_callback"):
        trainer(Scheduled(adds=["no_such_callback"]))


def test_outside_the_main_thread_the_environments_callback_only_warns():
    made = trainer(max_epochs=1)

    def fit_in_a_thread():
        thread = threading.Thread(target=made.fit, args=(Net(), BATCHES))
        thread.start()
        thread.join()

    with pytest.warns(UserWarning, match="fit was called outside the main thread, so no signal saves or requeues"):
        fit_in_a_thread()
    assert made.global_step == len(BATCHES)


# --- What a job that was started again continues from -------------------------------------------------------------


def weights(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


@define(eq=False, kw_only=True)
class Unnumbered(LocalEnvironment):
    """Processes of an agent: no variable numbers its restarts, if there are any."""

    may_restart: bool = False

    @hookimpl
    def setup_environment(self, run) -> World:
        return evolve(super().setup_environment(run), generation=None, may_restart=self.may_restart)


def test_last_without_a_checkpoint_is_an_error_where_nothing_restarts_the_program():
    with pytest.raises(CheckpointError, match='ckpt_path is "last"; expected a whole checkpoint in'):
        trainer(Unnumbered()).fit(Net(), BATCHES, ckpt_path="last")

    made = trainer(Unnumbered(may_restart=True), max_epochs=1)
    made.fit(Net(), BATCHES, ckpt_path="last")
    assert made.global_step == len(BATCHES)


def test_a_restarted_job_continues_bit_for_bit_without_being_told_to(tmp_path, capsys):
    reference = Net()
    trainer(max_epochs=3).fit(reference, BATCHES, BATCHES[:1])
    (tmp_path / "checkpoints").rename(tmp_path / "of-the-reference")
    capsys.readouterr()

    end(trainer(max_epochs=3), Signalled(at_step=5))
    module = Net()
    again = trainer(Scheduled(restarts=1), max_epochs=3)
    again.fit(module, BATCHES, BATCHES[:1])

    assert again.global_step == 3 * len(BATCHES)
    assert all(torch.equal(one, other) for one, other in zip(weights(module), weights(reference), strict=True))
    assert "(restart 1): training continues from " in (told := capsys.readouterr().out)
    assert "preempted.ckpt" in told


def test_a_restarted_job_leaves_checkpoints_of_other_jobs_alone(capsys):
    trainer(Scheduled(name="job 2"), max_epochs=2).fit(Net(), BATCHES)

    made = trainer(Scheduled(restarts=1), max_epochs=1)
    made.fit(Net(), BATCHES)

    assert made.global_step == len(BATCHES)
    told = "(restart 1), and it has no checkpoint yet: training begins at step 0; 1 of other jobs"
    assert told in capsys.readouterr().out


def test_a_restarted_job_finds_its_checkpoint_behind_newer_ones_of_other_jobs(tmp_path, capsys):
    end(trainer(max_epochs=3), Signalled(at_step=5))
    for number in (2, 3):
        trainer(Scheduled(name=f"job {number}"), max_epochs=1).fit(Net(), BATCHES)
    begun = []

    trainer(Scheduled(restarts=1), max_epochs=3).fit(
        type("Begun", (Net,), {"on_train_start": lambda self: begun.append(self.global_step)})(), BATCHES
    )

    assert begun == [read_any(tmp_path / "checkpoints/preempted.ckpt")["loop"]["global_step"]]


def test_a_job_that_was_killed_before_its_first_checkpoint_says_that_it_begins_at_step_0(capsys):
    made = trainer(Scheduled(restarts=2), max_epochs=1)

    made.fit(Net(), BATCHES)

    assert "(restart 2), and it has no checkpoint yet: training begins at step 0" in capsys.readouterr().out
    made.settings.max_epochs = 2
    made.fit(made.module, BATCHES)  # a second fit of the process continues, as ever
    assert made.global_step == 2 * len(BATCHES)
    assert "restart" not in capsys.readouterr().out


def test_a_restarted_job_does_not_begin_again_from_the_path_that_it_was_given(tmp_path, capsys):
    trainer(Scheduled(name="job 2"), max_epochs=1, default_root_dir="other").fit(Net(), BATCHES)
    [pretrained] = [path for path in (tmp_path / "other/checkpoints").iterdir() if path.suffix == ".ckpt"]
    end(trainer(max_epochs=3), Signalled(at_step=12), ckpt_path=pretrained)
    begun = []
    module = type("Begun", (Net,), {"on_train_start": lambda self: begun.append(self.global_step)})

    trainer(Scheduled(restarts=1), max_epochs=3).fit(module(), BATCHES, ckpt_path=pretrained)
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    trainer(Scheduled(restarts=1), max_epochs=2).fit(module(), BATCHES, ckpt_path=pretrained)

    assert begun == [read_any(tmp_path / "elsewhere/preempted.ckpt")["loop"]["global_step"], len(BATCHES)]
    assert "no checkpoint yet: training begins from ckpt_path 'other" in capsys.readouterr().out.replace(
        f"{tmp_path}/", ""
    )


@pytest.mark.slow
def test_hpc_is_the_newest_checkpoint_that_was_saved_on_a_signal(tmp_path):
    end(trainer(max_epochs=3, callbacks=[ModelCheckpoint(every_n_train_steps=1)]), Signalled(at_step=5))
    preempted = tmp_path / "checkpoints/preempted.ckpt"
    saved_at = preempted.stat().st_mtime
    (tmp_path / "checkpoints/preempted-mine.ckpt").write_bytes(preempted.read_bytes())
    later = trainer(max_epochs=3, callbacks=[ModelCheckpoint(every_n_train_steps=1, filename="later")])
    later.fit(Net(), BATCHES, ckpt_path="hpc")
    for path in (tmp_path / "checkpoints").iterdir():
        os.utime(path, (saved_at, saved_at + (path.name != "preempted.ckpt")))

    made = trainer(max_epochs=3)
    begun = []
    made.fit(type("Begun", (Net,), {"on_train_start": lambda self: begun.append(self.global_step)})(), BATCHES,
             ckpt_path="hpc")  # fmt: skip

    assert begun == [read_any(preempted)["loop"]["global_step"]]
    assert later.global_step == 3 * len(BATCHES)


def test_hpc_without_such_a_checkpoint_is_as_last():
    trainer(max_epochs=1).fit(Net(), BATCHES)
    with pytest.raises(CheckpointError, match='ckpt_path is "hpc"; expected a whole checkpoint that a run saved on a'):
        trainer().fit(Net(), BATCHES, ckpt_path="hpc")
    with pytest.raises(CheckpointError, match="expected a callback that saves on a signal"):
        trainer(Scheduled(adds=[])).fit(Net(), BATCHES, ckpt_path="hpc")

    made = trainer(Scheduled(restarts=1), max_epochs=1)
    made.fit(Net(), BATCHES, ckpt_path="hpc")  # restarted before the first one

    assert made.global_step == len(BATCHES)
