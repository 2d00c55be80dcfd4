"""DeepSpeed with parameters and optimizer state on a disk: trains as DDP does, is saved and loaded, leaves nothing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import outcome, share, weights_of

pytestmark = pytest.mark.usefixtures("deepspeed_preloaded")

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
NEEDS_ASYNC_IO = pytest.mark.sweep(
    reason="Building async_io takes minutes, once on a machine; without it nothing can be trained from a disk."
)
BUILD_LIMIT_S = 1200
BATCHES = joined_batches(20, 24)
#: A rank's share of each of the two large layers is above the megabyte below which nothing goes to the disk, and odd:
#: gradients then begin at addresses that a disk does not take.
WIDTH = 513
SMALL_BUFFERS = {"params_buffer_size": 300_000, "max_in_cpu": 1}
OPTIMIZER = {"name": "deepspeed", "stage": 3, "offload_optimizer": True, "offload_optimizer_device": "nvme"}
PARAMETERS = {
    "name": "deepspeed", "stage": 3, "offload_parameters": True, "offload_params_device": "nvme",
    "remote_device": "nvme", **SMALL_BUFFERS,
}  # fmt: skip
BOTH = {"name": "deepspeed_stage_3_offload_nvme", **SMALL_BUFFERS}


class Wide(Net):
    """AdamW on a network of which two layers are large enough for a disk."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH),
                nn.Tanh(), nn.Linear(WIDTH, 1),
            )  # fmt: skip

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3)


class WithMomentum(Wide):
    """A pair of parameter groups, and an optimizer that keeps one number for each of a parameter's."""

    def configure_optimizers(self):
        parameters = list(self.parameters())
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 1e-4}]
        return torch.optim.SGD(groups, lr=2e-4, momentum=0.9)


class Frozen(Wide):
    """The first of the large layers is not trained."""

    def __init__(self):
        super().__init__()
        self.net[2].requires_grad_(False)


class OnCPUAdam(Wide):
    """AdamW by DeepSpeed's vectorized implementation."""

    def configure_optimizers(self):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(self.parameters(), lr=1e-3, eps=1e-3, weight_decay=1e-2)


@pytest.fixture
def disk(tmp_path):
    """A folder that a user names."""
    path = tmp_path / "disk"
    path.mkdir()
    return path


def files_in(folder, part=""):
    return [path for path in Path(folder).rglob("*.swp") if part in str(path)]


def trainer_of(strategy, folder, world_size, **arguments):
    return sg.Trainer(strategy={**strategy, "nvme_path": str(folder)}, devices=world_size, **QUIET | arguments)


# --- Training ----------------------------------------------------------------------------------------------------


class _Files(sg.Callback):
    """Counts swap files after the third step."""

    def __init__(self, folder):
        self.folder, self.optimizer, self.parameters = folder, 0, 0

    @sg.hookimpl
    def on_train_batch_end(self, batch_idx):
        if batch_idx == 2:
            self.optimizer, self.parameters = (len(files_in(self.folder, p)) for p in ("/optimizer-", "/parameters-"))


def _train(rank, world_size, make, strategy, folder):
    files = _Files(folder)
    trainer = trainer_of(strategy, folder, world_size, callbacks=[files])
    trainer.fit(make(), share(trainer, BATCHES))
    weights = weights_of(trainer)
    trainer.close()
    return weights, files.optimizer, files.parameters


@NEEDS_ASYNC_IO
@pytest.mark.parametrize(
    ("make", "strategy", "on_disk"),
    [
        (Wide, BOTH, {"optimizer", "parameters"}),
        (Wide, OPTIMIZER, {"optimizer"}),
        (Wide, PARAMETERS, {"parameters"}),
        (Wide, BOTH | {"sub_group_size": 1, "thread_count": 3}, {"optimizer", "parameters"}),
        (WithMomentum, BOTH, {"optimizer", "parameters"}),
        (Frozen, BOTH, {"optimizer", "parameters"}),
        (OnCPUAdam, BOTH | {"block_size": 65536, "overlap_events": False}, {"optimizer", "parameters"}),
    ],
    ids=["both", "optimizer", "parameters", "pieces, threads", "momentum, groups", "frozen", "cpu adam"],
)
def test_what_trains_from_a_disk_equals_a_plain_loop(make, strategy, on_disk, disk):
    plain = make if make is not OnCPUAdam else Wide
    reference, norms = train_module_plainly(plain(), BATCHES)
    assert max(norms) > 1

    results = run_in_processes(_train, 2, make, strategy, disk, limit_s=BUILD_LIMIT_S)

    # Its Adam rounds in other places than torch's.
    limit = 1e-5 if make is OnCPUAdam else 1e-6
    for weights, optimizer_files, parameter_files in results:
        assert relative_difference(weights, reference) < limit
        assert (optimizer_files > 0, parameter_files > 0) == ("optimizer" in on_disk, "parameters" in on_disk)
    assert list(disk.iterdir()) == []


# --- Checkpoints, and several stages -----------------------------------------------------------------------------


def _move(rank, world_size, source, target, folder, tmp_path):
    """Train with `source` and save; continue from there with both; return both ends, and what `target` loaded."""
    ends = []
    checkpoint = tmp_path / "first.ckpt"
    first = _trainer(source, folder, world_size, max_epochs=1)
    first.fit(Wide(), share(first, BATCHES[:3]))
    first.save_checkpoint(checkpoint)
    first.close()
    for strategy in (source, target):
        trainer = _trainer(strategy, folder, world_size, max_epochs=2)
        module = Wide()
        trainer.fit(module, share(trainer, BATCHES[:3]), ckpt_path=checkpoint)
        ends.append(weights_of(trainer))
        assert trainer.global_step == 6
        trainer.close()
    return ends


def _trainer(strategy, folder, world_size, **arguments):
    if isinstance(strategy, str):
        return sg.Trainer(strategy=strategy, devices=world_size, **QUIET | arguments)
    return trainer_of(strategy, folder, world_size, **arguments)


@NEEDS_ASYNC_IO
@pytest.mark.parametrize(
    ("source", "target"),
    [(BOTH, "ddp"), ("ddp", BOTH), ("ddp", PARAMETERS), ("ddp", OPTIMIZER), (PARAMETERS, OPTIMIZER)],
    ids=["to ddp", "from ddp", "from ddp, parameters", "from ddp, optimizer", "between"],
)
def test_a_checkpoint_moves_to_and_from_a_disk(source, target, disk, tmp_path):
    reference, _ = train_module_plainly(Wide(), BATCHES[:3] * 2)

    ends = run_in_processes(_move, 2, source, target, disk, tmp_path, limit_s=BUILD_LIMIT_S)

    for stayed, moved in ends:
        assert relative_difference(stayed, reference) < 1e-6
        assert relative_difference(moved, reference) < 1e-6
    assert list(disk.iterdir()) == []


def _stages(rank, world_size, folder):
    """Train, evaluate and train again with one trainer; put other weights in between."""
    trainer = trainer_of(BOTH, folder, world_size)
    module = Wide()
    batches = share(trainer, BATCHES[:3])
    trainer.fit(module, batches)
    [metrics] = trainer.validate(module, batches)
    trained = weights_of(trainer)
    trainer.run.ask("load_model_state", state=Wide().state_dict(), module=module, strict=True)
    [after] = trainer.validate(module, batches)
    trainer.close()
    return trained, metrics, after


@NEEDS_ASYNC_IO
def test_one_trainer_trains_evaluates_and_loads(disk):
    reference, _ = train_module_plainly(Wide(), BATCHES[:3])
    trained, metrics, after = run_in_processes(_stages, 2, disk, limit_s=BUILD_LIMIT_S)[0]

    assert relative_difference(trained, reference) < 1e-6
    for weights, found in ((reference, metrics), (Wide().state_dict(), after)):
        module = Wide()
        module.load_state_dict(weights)
        with torch.no_grad():
            losses = [module.criterion(module(x), y) for x, y in BATCHES[:3]]
        assert found["val_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert list(disk.iterdir()) == []


def _again(rank, world_size, folder):
    """Train one module with two trainers, the first of which is closed."""
    module, ended = Wide(), []
    for strategy in (BOTH, BOTH, {"name": "deepspeed", "stage": 3, "nvme_path": "/local_nvme"}):
        trainer = trainer_of(strategy, strategy.get("nvme_path", folder), world_size)
        batches = share(trainer, BATCHES[:1])
        ended.append(outcome(lambda trainer=trainer, batches=batches: trainer.fit(module, batches)))
        trainer.close()
    return ended


@NEEDS_ASYNC_IO
def test_a_module_whose_values_went_with_the_disk_is_refused(disk):
    for first, second, elsewhere in run_in_processes(_again, 2, disk, limit_s=BUILD_LIMIT_S):
        assert first == "nothing"
        for ended in (second, elsewhere):
            assert ended.startswith("refused: the model's net.2.weight was on a disk, and was deleted with the run")


# --- What cannot work --------------------------------------------------------------------------------------------


class Recurrent(Wide):
    """Has a part that computes with six large parameters at a time."""

    def __init__(self):
        super().__init__()
        self.net = nn.LSTM(16, 600, num_layers=4, bias=False)


class Amsgrad(Wide):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), amsgrad=True)


def _refusals(rank, world_size, cases, folder):
    found = []
    for make, strategy in cases:
        trainer = trainer_of(strategy, folder, world_size)
        batches = share(trainer, BATCHES[:1])
        found.append(outcome(lambda make=make, trainer=trainer, batches=batches: trainer.fit(make(), batches)))
        trainer.close()
    return found


@pytest.mark.slow
def test_buffers_that_could_not_work_are_refused_before_training(disk):
    cases = [
        (Wide, PARAMETERS | {"params_buffer_size": 262_144}),
        (Recurrent, PARAMETERS | {"params_buffer_size": 10**6}),
        (Wide, OPTIMIZER | {"optimizer_buffer_count": 3}),
        (Amsgrad, OPTIMIZER),
    ]

    for small, few, three, amsgrad in run_in_processes(_refusals, 2, cases, disk):
        assert small == (
            "refused: strategy.deepspeed.params_buffer_size is 262144, and a rank's partition of net.2.weight has 263169 "
            "elements; expected a buffer for the largest partition; set it to 263169."
        )
        assert few.startswith(
            "refused: strategy.deepspeed.params_buffer_count is 5, and net computes with 7 parameters"
        )
        assert three.startswith("refused: strategy.deepspeed.optimizer_buffer_count is 3, and a step of AdamW needs 4")
        assert amsgrad.endswith("and a step of AdamW needs 5 buffers; expected at least 5; set it to 5.")
    assert list(disk.iterdir()) == []


def _alone(rank, world_size, act):
    """Call `act` as a user without rights."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        return outcome(act)
    finally:
        os.seteuid(os.getuid())


def _lock_much():
    from stratagem_deepspeed.disk import check_lockable

    resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**20, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
    check_lockable(2**20, "strategy.deepspeed.params_buffer_size")
    check_lockable(2**21, "strategy.deepspeed.params_buffer_size")


def test_buffers_that_may_not_be_locked_are_refused():
    [ended] = run_in_processes(_alone, 1, _lock_much)

    assert ended.startswith("refused: strategy.deepspeed.params_buffer_size asks for 2 MB of buffers")
    assert "may lock 1 MB" in ended


def place(folder):
    from stratagem_deepspeed.disk import Disk

    return Disk({"offload_param": {"device": "nvme", "nvme_path": str(folder)}}, lambda _: "nvme_path")


@pytest.mark.parametrize("folder", ["/proc", "/sys"])
def test_a_folder_that_cannot_hold_files_is_refused(folder):
    with pytest.raises(ConfigError, match=f"nvme_path is '{folder}', which cannot hold what is offloaded"):
        place(folder)


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_nvme.py::test_buffers_that_could_not_work_are_refused_before_training",
)
@pytest.mark.slow
def test_a_run_clears_away_what_a_killed_one_left_and_nothing_else(disk):
    (disk / "stratagem-swap-notes").mkdir()
    (disk / "mine.swp").write_text("mine")
    code = (
        "import os, signal, sys; from stratagem_deepspeed.disk import Disk; "
        "Disk({'offload_param': {'device': 'nvme', 'nvme_path': sys.argv[1]}}, str); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(disk)], check=False, timeout=180)
    assert ended.returncode == -signal.SIGKILL
    [left] = set(disk.iterdir()) - {disk / "stratagem-swap-notes", disk / "mine.swp"}

    running = place(disk)
    beside = place(disk)
    now = set(disk.iterdir())
    beside.remove()
    running.remove()

    assert left not in now
    assert len(now) == 4
    assert set(disk.iterdir()) == {disk / "stratagem-swap-notes", disk / "mine.swp"}


@pytest.fixture
def small_disk(disk):
    """A disk with space for the files at the start of training, and not for those it adds."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=13M", "tmpfs", disk], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("only a user who may mount has a small disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@NEEDS_ASYNC_IO
def test_a_full_disk_ends_training_on_all_ranks_with_an_error(small_disk):
    ended = [each for [each] in run_in_processes(_refusals, 2, [(Wide, BOTH)], small_disk, limit_s=BUILD_LIMIT_S)]

    assert any("for what is offloaded, and the disk has" in each for each in ended)
    assert all(each.startswith("refused: ") for each in ended)
    assert list(small_disk.iterdir()) == []
