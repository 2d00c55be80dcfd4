"""`scripts.run` shows what `subprocess.run` shows, only sooner: a script cannot tell that its interpreter was there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stratagem
from programs import scripts
from programs.terminal import Terminal

WHERE_IT_CHANGED = pytest.mark.when_changed("tests/programs/", reason="it tests how tests run programs")
PROGRAM = """
import atexit, multiprocessing, os, signal, sys, threading

def double(x):
    return 2 * x

def fail():
    raise ValueError("mine")

def hooked():
    sys.excepthook = lambda kind, error, trace: print(kind, trace.tb_frame.f_code.co_filename)
    fail()

def spawned():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))

def late():
    atexit.register(print, "at exit")
    threading.Timer(0.1, print, ["in a thread"]).start()

if __name__ == "__main__":
    print(sorted(globals()), __name__, __file__, __spec__ and __spec__.name)
    print(sys.argv, sys.orig_argv, sys.path, os.getcwd(), sorted(os.environ.items()))
    print(threading.active_count(), os.getpgrp() == os.getpid(), sorted(os.listdir("/proc/self/fd"))[:-1])
    print([(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE)])
    print(sys.stdout.line_buffering, sys.stdout.write_through, sys.stdin.read())
    print("an error", file=sys.stderr)
    ways = {
        "end": int, "fail": fail, "hooked": hooked, "spawned": spawned, "late": late,
        "3": lambda: sys.exit(3), "words": lambda: sys.exit("words"), "interrupt": lambda: signal.raise_signal(2),
        "kill": lambda: (sys.stdout.flush(), os.kill(os.getpid(), 9)),
    }
    ways[sys.argv[1]]()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "broken.py").write_text("def f(:\n")
    return tmp_path


@WHERE_IT_CHANGED
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        *(
            f"program.py {way}"
            for way in ("end", "fail", "hooked", "spawned", "late", "3", "words", "interrupt", "kill")
        ),
        "./program.py end --more x",
        "-u program.py end",
        "-m program end x",
        "-m program fail",
        "-c import(sys);print(sys.argv,sys.path[0],sorted(globals())) -x",
        "-c 1/0",
        "broken.py",
        "missing.py",
        "-m missing",
    ],
)
def test_it_shows_what_subprocess_shows(folder, words):
    command = [sys.executable, *(word.replace("import(sys)", "import sys") for word in words.split())]
    options = {
        "capture_output": True, "text": True, "timeout": 60, "cwd": folder, "input": "typed",
        "env": os.environ | {"STRATAGEM_STORE_HOSTED": "1"},
    }  # fmt: skip

    theirs = subprocess.run(command, check=False, start_new_session=True, **options)
    ours = scripts.run(command, **options)

    assert ours.stdout == theirs.stdout
    assert ours.stderr == theirs.stderr
    assert ours.returncode == theirs.returncode


def _modules(command, **options):
    """Whether torch was there before the program began."""
    code = "import sys; print('torch' in sys.modules)"
    return scripts.run([*command, "-c", code], capture_output=True, text=True, check=True, **options).stdout.strip()


def test_an_interpreter_of_its_own_where_start_up_may_differ():
    python = [sys.executable]
    assert _modules(python) == "True"
    assert _modules(python, env=os.environ | {"RANK": "0", "STRATAGEM_STRATEGY": "ddp"}) == "True"
    assert _modules([sys.executable, "-W", "error"]) == "False"
    assert _modules(python, env=os.environ | {"TORCH_LOGS": "all"}) == "False"
    assert _modules(python, env={name: value for name, value in os.environ.items() if name != "PATH"}) == "False"
    assert _modules(python, pass_fds=[2]) == "False"


@WHERE_IT_CHANGED
def test_folders_of_pythonpath_are_searched_as_by_an_interpreter(tmp_path):
    for name in ("one", "other", "work", "hiding"):
        (tmp_path / name).mkdir()
    for name in ("one", "other"):  # of a name that no other test imports
        (tmp_path / name / "of_this_test.py").write_text(f"print({name!r})\n")
    (tmp_path / "hiding" / "tqdm.py").write_text("print('mine')\n")
    code = "import sys, of_this_test; print([each for each in sys.path], 'torch' in sys.modules)"
    options = {"capture_output": True, "text": True, "check": True, "cwd": tmp_path / "work"}
    searched = {
        "True": (["../other", "../one"], ["../one", *sys.path, "../other"], ["", "../one"]),
        "False": (["../hiding", "../one"], ["../one", "../hiding", *sys.path]),
    }

    for torch_was_there, paths in searched.items():
        for path in paths:
            options["env"] = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
            theirs = subprocess.run([sys.executable, "-c", code], **options).stdout
            assert scripts.run([sys.executable, "-c", code], **options).stdout == theirs.replace(
                "False", torch_was_there
            )


def test_at_the_limit_all_that_the_script_started_is_ended():
    child = "import signal; print('ready', flush=True); signal.pause()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    read, write = os.pipe()
    with pytest.raises(subprocess.TimeoutExpired):
        scripts.run([sys.executable, "-c", code], timeout=1, stdout=write)
    os.close(write)

    with os.fdopen(read) as rest:
        rest.read()  # until nobody can write any more


def test_a_process_can_be_found_signalled_and_waited_for(tmp_path):
    code = "import signal; print('ready', flush=True); signal.pause()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = os.environ | {"STRATAGEM_MARK": "here"}
    with scripts.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as process:
        process.stdout.readline()
        shown = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGTERM)

        assert process.wait(10) == -signal.SIGTERM
        assert process.poll() == -signal.SIGTERM
    assert str(tmp_path) in shown
    assert "STRATAGEM_MARK=here" in shown


def test_several_run_at_once_and_end_in_any_order():
    code = "import sys; sys.exit(len(sys.stdin.read()))"
    processes = [scripts.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True) for _ in range(3)]
    for number in (2, 0, 1):
        processes[number].communicate("x" * number, timeout=120)

    assert [process.returncode for process in processes] == [0, 1, 2]


def test_other_programs_than_python_run_as_under_subprocess():
    assert scripts.run(["sh", "-c", "exit 5"]).returncode == 5
    with pytest.raises(subprocess.CalledProcessError):
        scripts.run(["false"], check=True)
    with pytest.raises(FileNotFoundError):
        scripts.run(["no-such-program"])


def test_the_program_of_an_entry_point_runs_in_a_fork():
    command = [Path(sys.executable).with_name("stratagem"), "--version"]

    with scripts.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read() == f"stratagem {stratagem.__version__}\n"
        assert process.is_fork


@WHERE_IT_CHANGED
def test_what_a_script_starts_is_its_child_and_a_fork_too(tmp_path):
    (tmp_path / "child.py").write_text("import os, sys; print(os.getppid(), sys.argv[1:], 'torch' in sys.modules)\n")
    code = """if True:
        import os, subprocess, sys, threading
        def show(*command):
            process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
            parent, rest = process.communicate()[0].split(" ", 1)
            print(int(parent) == os.getpid(), process.returncode, rest, end="")
        show("child.py", "1")
        show("-c", "import os, sys; print(os.getppid(), os.getpgrp() == os.getsid(0)); sys.exit(3)")
        show("-W", "error", "child.py")
        thread = threading.Thread(target=show, args=["child.py"])
        thread.start(), thread.join()
    """
    done = scripts.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["True 0 ['1'] True", "True 3 True", "True 0 [] False", "True 0 [] False"]


def test_what_a_script_starts_may_be_told_to_die_with_it():
    code = """if True:
        import functools, os, signal, subprocess, sys
        from stratagem.distributed.launched import die_with
        dying = functools.partial(die_with, os.getpid())
        child = "import signal, sys; print('torch' in sys.modules, flush=True); signal.pause()"
        subprocess.Popen([sys.executable, "-c", child], preexec_fn=dying)
        signal.pause()
    """
    with scripts.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        process.kill()
        assert process.stdout.read() == ""  # nobody can write any more


SPAWNING = """
import multiprocessing, os, signal, sys

def look(queue):
    queue.put((os.getppid(), "torch" in sys.modules, signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())))

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.SimpleQueue()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    process = spawn.Process(target=look, args=(queue,))
    process.start()
    parent, *found = queue.get()
    process.join()
    print(parent == os.getpid(), *found, process.exitcode)
"""


def test_what_multiprocessing_spawns_is_a_fork_too_with_the_signals_held_that_its_parent_holds(tmp_path):
    (tmp_path / "program.py").write_text(SPAWNING)
    command = [sys.executable, tmp_path / "program.py"]

    assert scripts.run(command, capture_output=True, text=True, check=True).stdout == "True True True 0\n"


def test_a_terminal_takes_a_program_that_is_a_fork(tmp_path):
    code = "import os; print(os.tcgetpgrp(0) == os.getpid(), os.ttyname(0) == os.ttyname(1))"
    with Terminal([sys.executable, "-c", code], cwd=tmp_path) as terminal:
        assert terminal.finish() == 0
        assert terminal.process.is_fork

    assert terminal.text == "True True\n"
