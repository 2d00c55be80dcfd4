"""DeepSpeed begins quietly, forgets one run before the next, and compiles what a run uses, once on a machine."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_deepspeed import builds, ops, start
from stratagem_testing import run_in_processes
from stratagem_testing.processes import LAUNCH_VARIABLES
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_plainly
from stratagem_testing.training import QUIET, share, weights_of, weights_on_all_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


def forget_deepspeed():
    logging.getLogger("DeepSpeed").handlers.clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]


@pytest.fixture(autouse=True, scope="module")
def imported():
    """deepspeed is there in the process that these tests, and those of the files that follow, fork from."""
    start.load("cpu")


def connected(strategy="deepspeed_stage_2", devices=2):
    """A run that has joined the others, as far as `wrap_model` takes it."""
    run = sg.Run(strategy=strategy, devices=devices, accelerator="cpu")
    run.connect()
    start.join(run)
    return run


def error_of(act):
    with pytest.raises(ConfigError) as caught:
        act()
    return str(caught.value)


# --- Quietness ---------------------------------------------------------------------------------------------------

PROGRAM = """
import logging, sys, torch
import torch.distributed as dist
import stratagem as sg
from stratagem.strategies import DeepSpeedStrategy
from stratagem_testing.reference import Net, joined_batches

class FromConfig(Net):
    def configure_optimizers(self):
        return None

class Own(Net):
    def configure_optimizers(self):
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        return DeepSpeedCPUAdam(self.parameters(), lr=1e-3)

class Warns(Net):
    def training_step(self, batch, batch_idx):
        whole = torch.empty(2)
        if batch_idx == 0:
            dist.all_gather_into_tensor(whole, torch.ones(1))
        return super().training_step(batch, batch_idx)

WARMUP = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 4}}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
CASES = {
    "configuration": (FromConfig, {"config": {"zero_optimization": {"stage": 2}, "optimizer": ADAM, "scheduler": WARMUP}}),
    "3_offload": (Own, "deepspeed_stage_3_offload"),
    "warning of the user's": (Warns, "deepspeed_stage_3"),
    "at level INFO": (Net, {"stage": 1, "logging_level": "INFO"}),
}

if __name__ == "__main__":
    make, strategy = CASES[sys.argv[1]]
    strategy = DeepSpeedStrategy(**strategy) if isinstance(strategy, dict) else strategy
    trainer = sg.Trainer(
        strategy=strategy, devices=2, accelerator="cpu", logger=False, enable_progress_bar=False, max_epochs=1
    )
    trainer.fit(make(), joined_batches(4, 8))
    trainer.save_checkpoint("last.ckpt")
    trainer.close()
"""


def heard_of(case, folder):
    """What a script of a user's prints while two ranks train and save."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, case], cwd=folder, text=True, capture_output=True, timeout=900, env=unlaunched()
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "last.ckpt").exists()
    return done.stdout + done.stderr


def heard_of_ranks(case, folder):
    """What the same program prints in ranks that are forked from this process, which has imported DeepSpeed."""
    told = run_in_processes(_run_program, 2, case, folder)
    assert (folder / "last.ckpt").exists()
    return "".join(told)


def _run_program(rank, world_size, case, folder):
    os.chdir(folder)
    sys.argv = ["program.py", case]
    said = Path(f"said_by_{rank}")
    with said.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        for handler in logging.getLogger("DeepSpeed").handlers:
            handler.stream = file  # setStream flushes the one before, which another test may have closed
        _warn_as_python_does()
        exec(PROGRAM, {"__name__": "__main__"})
    return said.read_text()


def _warn_as_python_does():
    """pytest shows and keeps more."""
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)


#: A new program, in two processes that import DeepSpeed, takes 14 CPU seconds; a fork of this process does not import it.
HEARD = [
    pytest.param(heard_of_ranks, id="ranks"),
    pytest.param(heard_of, id="new program", marks=pytest.mark.sweep),
]
WHERE_IT_CHANGED = pytest.mark.when_changed("plugins/deepspeed/")


def unlaunched():
    return {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "PYTHONWARNINGS")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "case"),
    [
        pytest.param(heard_of_ranks, "configuration", id="ranks, configuration"),
        pytest.param(heard_of, "configuration", id="new program, configuration", marks=WHERE_IT_CHANGED),
        pytest.param(heard_of, "3_offload", id="new program, 3_offload", marks=WHERE_IT_CHANGED),
    ],
)
def test_nothing_is_said_from_import_to_checkpoint(how, case, tmp_path):
    lines = how(case, tmp_path).splitlines()
    slow = ("building deepspeed's cpu_adam", "stratagem: waiting for rank")  # what a slow machine is told
    said = [line for line in lines if not any(each in line for each in slow)]

    assert [line.split(" ")[0] for line in said] == ["training", "checkpoint:"], said  # how the fit ended


@pytest.mark.when_changed(
    "plugins/deepspeed/", guard="tests/plugins/test_deepspeed_start.py::test_nothing_is_said_from_import_to_checkpoint"
)
@pytest.mark.slow
@pytest.mark.parametrize("how", HEARD)
def test_the_users_own_warnings_are_heard(how, tmp_path):
    heard = how("warning of the user's", tmp_path)

    assert heard.count("all_gather_into_tensor` is deprecated") == 2, heard  # one each rank


@pytest.mark.when_changed(
    "plugins/deepspeed/", guard="tests/plugins/test_deepspeed_start.py::test_nothing_is_said_from_import_to_checkpoint"
)
@pytest.mark.slow
@pytest.mark.parametrize("how", HEARD)
def test_a_level_turns_deepspeeds_log_on_again(how, tmp_path):
    assert "[INFO]" in how("at level INFO", tmp_path)


# --- Importing it ------------------------------------------------------------------------------------------------


def _without_deepspeed(rank, world_size):
    forget_deepspeed()
    sys.modules["deepspeed"] = None  # what Python makes of a package that is not there
    return error_of(lambda: start.load("cpu"))


def test_without_deepspeed_it_says_what_to_install():
    assert run_in_processes(_without_deepspeed, 1) == [
        'the strategy needs the package deepspeed, which is not installed; pip install "deepspeed>=0.19.8".'
    ]


def _contradicted(rank, world_size):
    forget_deepspeed()
    os.environ["DS_ACCELERATOR"] = "xpu"
    return error_of(lambda: start.load("cpu"))


def test_a_contradicting_accelerator_in_the_environment_is_refused():
    assert run_in_processes(_contradicted, 1) == [
        "DS_ACCELERATOR is 'xpu' and this run trains on 'cpu'; expected the same; unset it, or set another accelerator."
    ]


def _imported_while_training(rank, world_size):
    before = set(sys.modules)
    trainer = sg.Trainer(strategy="deepspeed_stage_3", devices=world_size, accelerator="cpu", **QUIET)
    trainer.fit(Net(), joined_batches(2, 8))
    return {name.split(".")[1] for name in set(sys.modules) - before if name.startswith("torch.")}


def test_preloading_leaves_no_compiler_to_be_imported_by_each_copy():
    sg.Run(strategy="deepspeed_stage_3", accelerator="cpu").stack.preload()

    [imported] = run_in_processes(_imported_while_training, 1)

    assert not imported & {"_dynamo", "_export", "_functorch", "_inductor"}


def _imported_for_another(rank, world_size):
    start.load("cpu")
    said = error_of(lambda: start.load("cuda"))
    return said, "DS_ACCELERATOR" in os.environ


def test_what_was_imported_for_other_devices_is_refused():
    ((said, left),) = run_in_processes(_imported_for_another, 1)

    assert "imported for 'cpu' devices and this run trains on 'cuda'" in said
    assert not left


def test_an_unknown_level_is_refused():
    assert "logging_level is 'LOUD'" in error_of(lambda: start.load("cpu", "LOUD"))


# --- One run after the other -------------------------------------------------------------------------------------


def _one_after_the_other(rank, world_size):
    weights = []
    for strategy in ("deepspeed_stage_3", "deepspeed_stage_2"):
        trainer = sg.Trainer(strategy=strategy, devices=world_size, accelerator="cpu", **QUIET)
        trainer.fit(Net(), share(trainer, joined_batches(6, 8)))
        weights.append({"weights": weights_of(trainer)})
        trainer.close()
        assert not torch.distributed.is_initialized()
    return weights


@pytest.mark.slow
def test_a_second_run_of_a_process_talks_over_a_new_group():
    results = run_in_processes(_one_after_the_other, 2)

    reference, norms = train_plainly(joined_batches(6, 8))
    assert max(norms) > 1
    for number in (0, 1):
        weights = weights_on_all_ranks([result[number] for result in results])
        assert relative_difference(weights, reference) < 1e-6


def _not_closed(rank, world_size):
    from deepspeed import comm

    first = connected(devices=1)
    torch.distributed.destroy_process_group()
    second = connected(devices=1)
    start.leave(second)
    return first.connected, comm.is_initialized()


def test_a_run_that_was_not_closed_does_not_keep_the_group_of_the_next():
    assert run_in_processes(_not_closed, 1) == [(True, False)]


def _closed_after_the_next(rank, world_size, strategy):
    _forget_launcher()
    first, second = (sg.Trainer(strategy=strategy, devices=1, accelerator="cpu", **QUIET) for _ in range(2))
    first.fit(Net(), joined_batches(4, 8))
    torch.distributed.destroy_process_group()
    second.fit(Net(), joined_batches(4, 8))
    second.close()
    first.close()
    return torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("deepspeed_stage_1", marks=WHERE_IT_CHANGED), "deepspeed_stage_3"])
def test_a_run_whose_group_has_gone_can_be_closed_after_the_next(strategy):
    assert run_in_processes(_closed_after_the_next, 1, strategy) == [False]


class Failing(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise ConfigError("mine")
        return super().training_step(batch, batch_idx)


def _forks_after_an_error(rank, world_size, strategy, destroys):
    _forget_launcher()
    failed = sg.Trainer(strategy=strategy, devices=1, accelerator="cpu", **QUIET)
    with pytest.raises(ConfigError, match="mine"):
        failed.fit(Failing(), joined_batches(4, 8))
    if destroys:
        torch.distributed.destroy_process_group()
    trainer = sg.Trainer(strategy=strategy, devices=2, accelerator="cpu", launcher="fork", **QUIET)
    x, y = (torch.cat(parts) for parts in zip(*joined_batches(4, 16), strict=True))
    trainer.fit(Net(), DataLoader(TensorDataset(x, y), 8))
    return weights_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "destroys"),
    [("deepspeed_stage_2", True), pytest.param("deepspeed_stage_3", False, marks=WHERE_IT_CHANGED)],
)
def test_forks_train_after_a_fit_of_one_process_that_failed(strategy, destroys):
    [weights] = run_in_processes(_forks_after_an_error, 1, strategy, destroys, limit_s=60)

    reference, norms = train_plainly(joined_batches(4, 16))
    assert max(norms) > 1
    assert relative_difference(weights, reference) < 1e-6


def _forget_launcher():
    for name in [*LAUNCH_VARIABLES, *(name for name in os.environ if name.startswith("STRATAGEM_"))]:
        os.environ.pop(name, None)


def _leaves_an_engine_behind(rank, world_size):
    trainer = sg.Trainer(strategy="deepspeed_stage_1", devices=1, accelerator="cpu", **QUIET)
    trainer.fit(Net(), joined_batches(2, 8))
    torch.distributed.destroy_process_group()
    trainer.close()


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_start.py::test_a_second_run_of_a_process_talks_over_a_new_group",
)
@pytest.mark.slow
def test_a_script_may_destroy_the_group_before_the_run_is_closed():
    run_in_processes(_leaves_an_engine_behind, 1)


def _alone(rank, world_size):
    _forget_launcher()
    trainer = sg.Trainer(strategy="deepspeed_stage_3", devices=1, accelerator="cpu", **QUIET)
    trainer.fit(Net(), joined_batches(6, 8))
    weights = weights_of(trainer)
    left = {name for name in os.environ if name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "WORLD_SIZE", "DS_ACCELERATOR")}
    trainer.close()
    return weights, left


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_start.py::test_a_second_run_of_a_process_talks_over_a_new_group",
)
@pytest.mark.slow
def test_one_process_that_nobody_launched_trains_and_keeps_its_environment():
    ((weights, left),) = run_in_processes(_alone, 1)

    assert relative_difference(weights, train_plainly(joined_batches(6, 8))[0]) < 1e-6
    assert left == set()


def _place(rank, world_size):
    import deepspeed
    import deepspeed.runtime.zero.partition_parameters as theirs

    run = connected()
    seen = theirs.os.environ["LOCAL_RANK"], theirs.os.getenv("LOCAL_SIZE"), theirs.os.path is os.path
    start.leave(run)
    start.leave(run)
    return seen, theirs.os is os, deepspeed.comm.is_initialized()


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_start.py::test_a_second_run_of_a_process_talks_over_a_new_group",
)
def test_deepspeed_sees_the_place_of_the_process_until_it_leaves():
    assert run_in_processes(_place, 2) == [(("0", "2", True), True, False), (("1", "2", True), True, False)]


# --- Which ops ---------------------------------------------------------------------------------------------------


def configuration(optimizer=None, offload=None, offload_param=None, **params):
    zero = {"stage": 3}
    zero |= {} if offload is None else {"offload_optimizer": {"device": offload}}
    zero |= {} if offload_param is None else {"offload_param": {"device": offload_param}}
    named = {} if optimizer is None else {"optimizer": {"type": optimizer, "params": params}}
    return {"zero_optimization": zero, **named}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (configuration(), []),
        (configuration(offload="cpu"), []),
        (configuration("AdamW"), ["fused_adam"]),
        (configuration("AdamW", torch_adam=True), []),
        (configuration("Adam", offload="cpu"), ["cpu_adam"]),
        (configuration("Adam", offload="none"), ["fused_adam"]),
        (configuration("Adagrad"), []),
        (configuration("Adagrad", offload="cpu"), ["cpu_adagrad"]),
        (configuration("Lion", offload="cpu"), ["cpu_lion"]),
        (configuration("SGD", offload="cpu"), []),
        (configuration("AdamW", offload="nvme"), ["cpu_adam", "pin_memory", "async_io"]),
        (configuration(offload_param="nvme"), ["pin_memory", "async_io"]),
    ],
)
def test_only_what_a_configuration_uses_is_built(config, expected):
    assert ops.ops_for(config, None, "cpu") == expected


def test_an_optimizer_without_an_op_for_the_cpu_is_refused():
    assert "'Lion' and this run trains on the CPU" in error_of(lambda: ops.ops_for(configuration("Lion"), None, "cpu"))


def _of_the_users(rank, world_size):
    connected(devices=1)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = [torch.nn.Parameter(torch.ones(2))]
    return [ops.ops_for(configuration(), make(weights), "cpu") for make in (DeepSpeedCPUAdam, torch.optim.AdamW)]


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/parity/test_deepspeed.py::test_every_stage_trains_as_one_process_and_as_ddp",
)
@pytest.mark.slow
def test_the_users_optimizer_decides():
    assert run_in_processes(_of_the_users, 1, limit_s=900) == [[["cpu_adam"], []]]


def _advice(rank, world_size, cases):
    run = connected()
    weights, found = [torch.nn.Parameter(torch.ones(2))], []
    for config, optimizer in cases:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            start.advise(config, optimizer(weights, lr=0.1), run)
        found.append([str(warning.message) for warning in said])
    return found


def test_rank_0_tells_of_a_faster_optimizer_for_offload():
    nothing_is_faster = [(configuration(), torch.optim.AdamW), (configuration(offload="cpu"), torch.optim.SGD)]
    first, second = run_in_processes(_advice, 2, [*nothing_is_faster, (configuration(offload="cpu"), torch.optim.Adam)])

    assert [len(said) for said in first] == [0, 0, 1]
    assert "DeepSpeedCPUAdam(parameters, ..., adamw_mode=False)" in first[2][0]
    assert second == [[], [], []]


# --- Building them -----------------------------------------------------------------------------------------------
# A real op of deepspeed's takes minutes to compile; this one is built by the same code of deepspeed's and torch's.

SOURCE = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", "", -1, methods};
PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&module); }
"""


def tiny(folder, includes="here", name="tiny", source=SOURCE):
    """A builder of an op, as it looks from an environment whose headers are in `includes`."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    file = Path(folder) / f"{name}.cpp"
    if not file.exists():
        file.write_text(source)

    class Tiny(OpBuilder):
        def absolute_name(self):
            return name

        def sources(self):
            return [str(file)]

        def include_paths(self):
            return [str(Path(folder) / includes)]

    return Tiny(name)


def _answer(rank, world_size, folder, path=None, includes="here"):
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    os.environ["PATH"] = os.environ["PATH"] if path is None else str(path)
    connected(devices=world_size)
    return tiny(folder, includes).load().answer()


@pytest.mark.slow
def test_two_ranks_that_want_an_op_at_once_build_it_once(tmp_path, capfd):
    assert run_in_processes(_answer, 2, tmp_path) == [42, 42]
    assert capfd.readouterr().err.count("building deepspeed's tiny") == 1
    assert not (tmp_path / "tiny" / "lock").exists()


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_start.py::test_two_ranks_that_want_an_op_at_once_build_it_once",
)
@pytest.mark.slow
def test_a_built_op_needs_no_compiler_in_another_environment(tmp_path):
    run_in_processes(_answer, 1, tmp_path)

    assert run_in_processes(_answer, 2, tmp_path, tmp_path / "empty", "elsewhere") == [42, 42]


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_start.py::test_two_ranks_that_want_an_op_at_once_build_it_once",
)
@pytest.mark.slow
def test_an_op_of_other_versions_is_built_again(tmp_path, capfd):
    run_in_processes(_answer, 1, tmp_path)
    (tmp_path / "tiny" / "built-by-stratagem").write_text("torch-1.0")
    capfd.readouterr()

    assert run_in_processes(_answer, 1, tmp_path) == [42]
    assert "building deepspeed's tiny" in capfd.readouterr().err


def _broken(rank, world_size, folder):
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    connected(devices=world_size)
    return error_of(tiny(folder, source="#include <nowhere.h>").load)


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_start.py::test_a_rank_without_a_compiler_makes_all_say_how_to_do_without",
)
def test_what_the_compiler_says_is_passed_on(tmp_path):
    (said,) = run_in_processes(_broken, 1, tmp_path)

    assert "deepspeed's tiny could not be built" in said
    assert "fatal error: nowhere.h: No such file or directory" in said
    assert said.count("\n") == 0


#: Stands for a compiler that is at work when its build is killed: it says that it began, and waits.
COMPILER = """#!/bin/sh
echo began > {folder}/began
read line < {folder}/never
"""


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_start.py::test_two_ranks_that_want_an_op_at_once_build_it_once",
)
@pytest.mark.slow
def test_a_build_that_was_killed_is_begun_again(tmp_path, capfd):
    for name in ("began", "never"):
        os.mkfifo(tmp_path / name)
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from {Path(__file__).stem} import _answer\n"
        f"_answer(0, 1, {str(tmp_path)!r})\n"
    )
    build = subprocess.Popen(
        [sys.executable, program], env=unlaunched() | {"CXX": str(compiler)}, start_new_session=True
    )
    with open(tmp_path / "began") as began:
        began.read()
    os.killpg(build.pid, signal.SIGKILL)
    build.wait()
    assert (tmp_path / "tiny" / "lock").exists()

    assert run_in_processes(_answer, 2, tmp_path) == [42, 42]
    assert capfd.readouterr().err.count("that was killed") == 1


def test_architectures_with_letters_are_built_for(monkeypatch, tmp_path):
    """deepspeed reads them as numbers: "invalid literal for int() with base 10: '0a'"."""
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    class Tiny(CUDAOpBuilder):
        def absolute_name(self):
            return "tiny"

        sources = absolute_name

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6 9.0a;12.0f+PTX")
    builder = Tiny("tiny")
    builder.jit_mode = True
    monkeypatch.setattr(builds, "_original_jit_load", lambda builder, verbose: builder.compute_capability_args())

    builds._compiled(builder, builds._Library("tiny", tmp_path), verbose=False)
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.6 9.0a;12.0f+PTX"


def test_one_process_at_a_time_builds(tmp_path):
    library = builds._Library("tiny", tmp_path)

    with library.locked(), open(tmp_path / "stratagem.lock") as another, pytest.raises(BlockingIOError):
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_in_which_a_compiler_works_is_not_free(tmp_path):
    assert not builds._is_worked_in(tmp_path)

    (tmp_path / "ninja").symlink_to(shutil.which("cat"))
    for name, works in (("ninja", True), ("cat", False)):  # a shell may well be there
        command = shutil.which(name, path=f"{tmp_path}:{os.environ['PATH']}")
        with subprocess.Popen([command], cwd=tmp_path, stdin=subprocess.PIPE) as process:
            assert builds._is_worked_in(tmp_path) is works
            process.communicate(b"")
    with open(tmp_path / "lock", "w"):
        assert builds._is_worked_in(tmp_path)
    assert not builds._is_worked_in(tmp_path)


# --- deepspeed's own ---------------------------------------------------------------------------------------------


def _build_in(folder):
    """Have this process build ops in `folder`, whatever is built or loaded already."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    OpBuilder._loaded_ops.clear()


def _without_a_compiler(rank, world_size, folder):
    if rank == 0:
        os.environ["PATH"] = str(folder)
    _build_in(folder)
    run = connected()
    return error_of(lambda: start.prepare_ops(["cpu_adam"], run))


def _an_optimizer_without_a_compiler(rank, world_size, folder):
    os.environ["PATH"] = str(folder)
    _build_in(folder)
    connected(devices=1)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    with pytest.raises(RuntimeError) as caught:
        DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(2))])
    return str(caught.value.__cause__)


def test_a_rank_without_a_compiler_makes_all_say_how_to_do_without(tmp_path):
    first, second = run_in_processes(_without_a_compiler, 2, tmp_path)

    assert first == second
    assert first.startswith("deepspeed's cpu_adam is built on the machine that uses it, and c++ is missing on ")
    assert "install it (apt-get install g++), or use an optimizer of torch's" in first


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_start.py::test_a_rank_without_a_compiler_makes_all_say_how_to_do_without",
)
@pytest.mark.slow
def test_an_optimizer_that_a_user_makes_says_the_same(tmp_path):
    (said,) = run_in_processes(_an_optimizer_without_a_compiler, 1, tmp_path)

    assert said.startswith("deepspeed's cpu_adam is built on the machine that uses it, and c++ is missing on ")


def _without_libaio(rank, world_size, folder):
    os.environ["CC"] = str(folder / "cc")
    _build_in(folder)
    run = connected()
    return error_of(lambda: start.prepare_ops(["async_io"], run))


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_start.py::test_a_rank_without_a_compiler_makes_all_say_how_to_do_without",
)
def test_without_libaio_all_ranks_say_how_to_do_without(tmp_path):
    (tmp_path / "cc").write_text('#!/bin/sh\ncase "$*" in *-laio*) exit 1;; esac\nexec gcc "$@"\n')
    (tmp_path / "cc").chmod(0o755)
    first, second = run_in_processes(_without_libaio, 2, tmp_path)

    assert first == second
    assert "deepspeed's async_io" in first
    assert "libaio is missing" in first
    assert "apt-get install libaio-dev" in first
    assert "offload to the CPU" in first


def _unwritable(rank, world_size, file):
    _build_in(file)
    run = connected()
    return error_of(lambda: start.prepare_ops(["cpu_adam"], run))


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_start.py::test_a_rank_without_a_compiler_makes_all_say_how_to_do_without",
)
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    first, second = run_in_processes(_unwritable, 2, tmp_path / "file")

    assert first == second
    assert f"cpu_adam cannot be stored in {tmp_path}/file" in first


def _updated(rank, world_size):
    run = connected()
    start.prepare_ops(["cpu_adam"], run)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = DeepSpeedCPUAdam([weight], lr=0.1, weight_decay=0.01)
    weight.grad = torch.tensor([0.5, 0.25])
    optimizer.step()
    return weight.detach()


def updated_by_torch():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.01)
    weight.grad = torch.tensor([0.5, 0.25])
    optimizer.step()
    return weight.detach()


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_start.py::test_a_rank_without_a_compiler_makes_all_say_how_to_do_without",
)
@pytest.mark.slow
def test_both_ranks_load_the_op_that_this_machine_has():
    for weight in run_in_processes(_updated, 2, limit_s=900):  # it may have to be built
        torch.testing.assert_close(weight, updated_by_torch())


def _in_own_cache(rank, world_size, folder, path=None):
    _build_in(folder)
    del os.environ["TORCH_EXTENSIONS_DIR"]
    os.environ["XDG_CACHE_HOME"] = str(folder)
    os.environ["PATH"] = os.environ["PATH"] if path is None else path
    weight = _updated(rank, world_size)
    return weight, "TORCH_EXTENSIONS_DIR" in os.environ


@pytest.mark.sweep(guard="tests/plugins/test_deepspeed_start.py::test_two_ranks_that_want_an_op_at_once_build_it_once")
def test_a_fresh_machine_builds_once_in_the_users_cache(tmp_path, capfd):
    first = run_in_processes(_in_own_cache, 2, tmp_path, limit_s=1200)
    again = run_in_processes(_in_own_cache, 2, tmp_path, "/nonexistent")

    for weight, chosen in (*first, *again):
        torch.testing.assert_close(weight, updated_by_torch())
        assert not chosen
    assert capfd.readouterr().err.count("building deepspeed's cpu_adam") == 1
    assert len(list(tmp_path.glob("stratagem/deepspeed/torch-*/cpu_adam/cpu_adam.so"))) == 1
