"""What processes leave behind, and which rank is found at fault by it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce

import stratagem as sg
from stratagem.distributed.default_group import trace_calls
from stratagem.errors import LaunchError
from stratagem_evidence import (
    EVIDENCE_VARIABLE,
    RankEvidence,
    Recorder,
    as_text,
    from_text,
    judged,
    keep,
    rank_evidence,
    read_all,
    read_kept,
    rules,
    verdict,
)  # fmt: skip
from stratagem_evidence.kept import tell
from stratagem_evidence.ring import LAST, Phase, Record, Ring, Site, read_ring
from stratagem_evidence.torch_calls import read_calls
from stratagem_testing import run_in_processes

# --- The files ---------------------------------------------------------------------------------------------------


def site(op="all_reduce", size=7, place="train.py:3", group="0,1,2", dtype="float32"):
    return Site(op, group, tuple(map(int, group.partition("#")[0].split(","))), size, dtype, place)


def test_a_ring_keeps_the_last_collectives_and_the_phase(tmp_path):
    ring = Ring(tmp_path, 3, ("next batch", "backward"))
    assert not ring.begin("a")
    ring.add_site("a", site())
    ring.add_site("b", site(group="0,1"))
    for _ in range(LAST + 10):
        ring.begin("a")
    ring.begin("b")
    ring.enter(2, step=5, batch=9)
    ring.mark("echo")
    content = read_ring(tmp_path / "3.ring")

    assert (content.process, content.end) == (os.getpid(), "echo")
    assert (content.phase.name, content.phase.step, content.phase.batch) == ("backward", 5, 9)
    assert len(content.records) == LAST - 1  # the writer may be replacing the oldest
    assert [(record.number, record.site.group) for record in content.records[-2:]] == [(LAST + 9, "0,1,2"), (0, "0,1")]


def test_a_half_written_file_is_read_as_far_as_it_is_complete(tmp_path):
    ring = Ring(tmp_path, 0, ("next batch",))
    ring.add_site("a", site())
    ring.begin("a")
    ring.add_site("b", site(op="broadcast"))
    ring.begin("b")
    sites = tmp_path / "0.sites"
    sites.write_bytes(sites.read_bytes()[:-4])

    assert [record.site.op for record in read_ring(tmp_path / "0.ring").records] == ["all_reduce"]
    (tmp_path / "1.ring").write_bytes(b"something else")
    assert list(read_all(tmp_path)) == [0]


def _record(rank, world_size, folder):
    with sg.Run(strategy="ddp", devices=world_size, accelerator="cpu"):
        group, again = (dist.new_group([0, 1], timeout=timedelta(seconds=60)) for _ in range(2))
        recorder = Recorder.start(folder, rank, ("next batch",))
        all_reduce(torch.ones(3, 2))  # a name that was imported before
        dist.broadcast(torch.ones(5, dtype=torch.float64), 0, group=group)
        dist.all_reduce(torch.ones(1), async_op=True, group=again).wait()
        for _ in range(2):
            dist.barrier()
        dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4))
        dist.group.WORLD.allreduce(torch.ones(()), dist.ReduceOp.SUM).wait()
        with pytest.raises(RuntimeError, match="invalid root rank: 7"):
            dist.broadcast(torch.ones(1), 7)
        own = dist.ProcessGroup(dist.HashStore(), 0, 1)  # as a library makes it whose ranks are in several runs
        backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
        own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        own.allreduce([torch.ones(1)]).wait()
        recorder.stop(keep=True)
        dist.all_reduce(torch.ones(1))


def test_collectives_are_recorded_however_they_are_called(tmp_path):
    run_in_processes(_record, 2, tmp_path)
    known = read_all(tmp_path)
    records = known[1].records
    number = int(records[1].site.group.partition("#")[2])  # the run made groups before

    assert [(r.site.op, r.site.size, r.site.dtype, r.site.group, r.number) for r in records] == [
        ("all_reduce", 6, "float32", "0,1#1", 0), ("broadcast(src=0)", 5, "float64", f"0,1#{number}", 0),
        ("all_reduce", 1, "float32", f"0,1#{number + 1}", 0), ("barrier", None, "", "0,1#1", 1), ("barrier", None, "", "0,1#1", 2),
        ("all_gather", 4, "float32", "0,1#1", 3), ("all_reduce", 1, "float32", "0,1#1", 4),
        ("broadcast(src=7)", 1, "float32", "0,1#1", 5),
    ]  # fmt: skip
    assert records[0].site.place.startswith("test_evidence.py:")
    assert [r.site for r in known[0].records] == [r.site for r in records]
    assert known[0].runs is False


@pytest.mark.slow
def test_a_recorder_that_nobody_stops_leaves_no_file_and_a_forked_child_does_not_delete_it(tmp_path):
    program = """
import os, sys
from pathlib import Path
from stratagem_evidence import Recorder
Recorder.start(Path(sys.argv[1]), 0, ("next batch",))
if os.fork() == 0:
    sys.exit()
os.wait()
print(len(os.listdir(sys.argv[1])))
"""
    folder = tmp_path / "evidence"
    folder.mkdir()
    words = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    assert (done.stdout, folder.exists()) == ("3\n", False)


@pytest.mark.slow
def test_a_request_for_the_stack_of_a_process_that_has_stopped_recording_does_not_end_it(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from stratagem_evidence import Recorder; "
        "from stratagem_evidence.recorder import ASK_FOR_STACK; "
        "Recorder.start(Path(sys.argv[1]), 0, ('next batch',)).stop(keep=True); os.kill(os.getpid(), ASK_FOR_STACK)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)

    assert done.returncode == 0


def test_a_program_that_ends_between_two_calls_of_the_trainer_is_over(tmp_path):
    ring = Ring(tmp_path, 0, ("backward",))
    ring.enter(1, step=1, batch=1)
    ring.mark("over")
    assert read_all(tmp_path)[0].is_over
    ring.mark("")

    assert not read_all(tmp_path)[0].is_over


@pytest.mark.slow
def test_a_faulthandler_of_somebody_else_stays_as_it_is(tmp_path):
    program = (
        "import faulthandler, sys; from pathlib import Path; from stratagem_evidence import Recorder; "
        "Recorder.start(Path(sys.argv[1]), 0, ('next batch',)).stop(keep=False); print(faulthandler.is_enabled())"
    )
    words = [sys.executable, "-X", "faulthandler", "-c", program, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    assert done.stdout == "True\n"


def _buckets(rank, world_size, folder):
    sg.seed_everything(0)
    trace_calls()
    recorder = Recorder.start(folder, rank, ("next batch",))
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=pair)
    model(torch.ones(2, 8)).sum().backward()
    recorder.write_calls()
    dist.destroy_process_group()


def test_torch_tells_of_the_collectives_that_its_c_code_begins(tmp_path):
    """Fails where a version of torch writes its recorder in another way."""
    run_in_processes(_buckets, 2, tmp_path)
    for told in read_all(tmp_path).values():
        *_, last = [call for call in told.calls if call.site.group.startswith("0,1#0")]
        assert (last.site.op, last.site.size, last.site.dtype) == ("all_reduce", 72, "float")
        assert "test_evidence.py" in last.site.place
        assert [call.site.size for call in told.calls if not call.site.group.startswith("0,1#0")] == [3]


def test_a_dump_of_nccls_watchdog_is_read_and_nothing_else(tmp_path):
    entry = {
        "process_group": ("0", "default_pg"), "collective_seq_id": 7, "is_p2p": False, "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 2]], "input_dtypes": ["Float"], "time_created_ns": 2_000_000_000, "frames": [],
    }  # fmt: skip
    dump = {"entries": [entry], "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}}
    (tmp_path / "torch_calls_0").write_bytes(pickle.dumps(dump))
    (tmp_path / "torch_calls_1").write_bytes(pickle.dumps(os.system))

    assert read_calls(tmp_path, 0) == [Record(7, 2.0, Site("all_reduce", "0,1#0 (torch)", (0, 1), 8, "float", ""))]
    assert read_calls(tmp_path, 1) == read_calls(tmp_path, 2) == []


EATING = """
import sys
from pathlib import Path
from stratagem_evidence import Recorder

recorder = Recorder.start(Path(sys.argv[1]), 1, ("next batch",))
recorder.enter(1, 3, 4)
eaten = []
while True:
    eaten.append(b"x" * (10 << 20))
"""


@pytest.fixture
def small_group(tmp_path):
    """A control group with 700 MB of memory."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"stratagem-{tmp_path.name}-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                if (group / limit).exists():
                    (group / limit).write_text(str(700 << 20))
                    yield group
                    return
            finally:
                group.rmdir()
    pytest.skip("this container may not make control groups")


@pytest.mark.slow
def test_a_process_that_the_kernel_killed_for_lack_of_memory_is_told_apart(tmp_path, small_group):
    words = ["sh", "-c", f'echo $$ > {small_group}/cgroup.procs && exec "$@"', "sh", sys.executable, "-c", EATING]
    done = subprocess.run([*words, str(tmp_path)], check=False)
    known = read_all(tmp_path)

    assert done.returncode == -signal.SIGKILL
    found = verdict(known)
    assert (found.rule, found.ranks) == ("ended", (1,))
    assert found.found == "rank 1 was killed by SIGKILL for lack of memory in next batch at step 3, batch 4"


# --- The rules ---------------------------------------------------------------------------------------------------


def told(rank, *sites, ending=None, place="", phase="backward", **facts):
    counts, records = {}, []
    for index, each in enumerate(sites):
        number = counts[each.group] = counts.get(each.group, -1) + 1
        records.append(Record(number, 100.0 + index, each))
    return RankEvidence(
        rank=rank, process=100 + rank, phase=Phase(3, 4, phase, 50.0), records=records, ending=ending, place=place,
        **facts,
    )  # fmt: skip


def of(*testimonies):
    return {each.rank: each for each in testimonies}


A, B, C = site(), site(op="broadcast", place="train.py:5"), site(op="barrier", size=None, dtype="", place="train.py:7")
#: What torch recorded.
CALLS = [
    Record(number, 100.0 + number, site(size=72, dtype="float", place="backward", group="0,1")) for number in (1, 2)
]
LEFT, RIGHT = site(group="0,1"), site(group="0,1#2", place="train.py:9")

CASES = {
    "size": (
        "differ", (1,), of(told(0, A, C), told(1, A, site(size=3)), told(2, A, C)),
        "rank 1 called all_reduce() of 3 elements of float32 (train.py:3) where ranks 0 and 2 called barrier() (train.py:7)",
    ),
    "left out": (
        "differ", (1,), of(told(0, A, B, C), told(1, A, C), told(2, A, B)),
        "rank 1 did not call broadcast() of 7 elements of float32 (train.py:5), which ranks 0 and 2 called",
    ),
    "one more": (
        "differ", (1,), of(told(0, A, C), told(1, A, B, C), told(2, A, C)),
        "rank 1 called broadcast() of 7 elements of float32 (train.py:5), which ranks 0 and 2 did not call",
    ),
    "two ranks": (
        "differ", (0, 1), of(told(0, LEFT), told(1, site(group="0,1", size=3))),
        "rank 1 called all_reduce() of 3 elements of float32 (train.py:3) where rank 0 called all_reduce() of 7 elements",
    ),
    "stopped": (
        "stopped", (2,), of(told(0, A), told(1, A), told(2, is_stopped=True)),
        "rank 2 is stopped (process 102) in backward at step 3, batch 4",
    ),
    "killed": (
        "missing", (1,), of(told(0, A, A, ending=-6), told(1, A, ending=-9), told(2, A, A, is_echo=True)),
        "rank 1 did not call all_reduce() of 7 elements of float32 (train.py:3), in which ranks 0 and 2 wait; "
        "rank 1 was killed by SIGKILL in backward at step 3, batch 4, after all_reduce() of 7 elements",
    ),
    "left out, aborted victim": (
        "missing", (1,), of(told(0, A, B, ending=-6), told(1, A, is_echo=True), told(2, A, B, is_echo=True)),
        "rank 1 did not call broadcast() of 7 elements of float32 (train.py:5), in which ranks 0 and 2 wait; "
        "rank 1 was in backward at step 3, batch 4",
    ),
    "alone": (
        "missing", (1,), of(told(0, A, is_echo=True), told(1, A, C, is_echo=True), told(2, A, is_echo=True)),
        "rank 1 called barrier() (train.py:7), which ranks 0 and 2 did not call",
    ),
    "hangs": (
        "missing", (1,), of(told(0, A, A), told(1, A, place="train.py:11 (load)"), told(2, A, A)),
        "in which ranks 0 and 2 wait; rank 1 is in train.py:11 (load) at step 3, batch 4",
    ),
    "deadlock": (
        "deadlock", (0, 1), of(told(0, LEFT), told(1, RIGHT)),
        "rank 0 waits for rank 1 in all_reduce() of 7 elements of float32 (train.py:3); "
        "rank 1 waits for rank 0 in all_reduce() of 7 elements of float32 (train.py:9)",
    ),
    "beneath": (
        "beneath", (1,), of(told(0, is_echo=True, calls=CALLS), told(1, is_echo=True, calls=CALLS[:1])),
        "rank 1 did not call all_reduce() of 72 elements of float (backward), in which rank 0 waits",
    ),
    "ended": (
        "ended", (1,), of(told(0, ending=-6), told(1, ending=-11, place="train.py:2 (f)"), told(2)),
        "rank 1 was killed by SIGSEGV in train.py:2 (f) at step 3, batch 4",
    ),
    "signal without a name": (
        "ended", (1,), of(told(0), told(1, ending=-45)),
        "rank 1 was killed by signal 45 in backward at step 3, batch 4",
    ),
    "exit 0": (
        "ended", (2,), of(told(0, is_echo=True), told(1, is_echo=True), told(2, ending=0)),
        "rank 2 exited with code 0 before its training was over in backward",
    ),
    "killed while it waited": (
        "ended", (0,), of(told(0, A, A, ending=-9), told(1, A), told(2, A, A)),
        "rank 0 was killed by SIGKILL in backward at step 3, batch 4, after all_reduce()",
    ),
    "aborted while it waited for another machine": (
        "aborted", (), of(told(1, A, A, ending=-6), told(2, A, A, is_echo=True)),
        "rank 1 was killed by SIGABRT while it waited for rank 0 in all_reduce() of 7 elements of float32",
    ),
    "gone while it waited": (
        "ended", (0,), of(told(0, A, A, is_gone=True), told(1, A), told(2, A, A)), "rank 0 is gone; it was in backward",
    ),
    "gone": (
        "ended", (2,), of(told(0), told(1), told(2, is_gone=True)), "rank 2 is gone; it was in backward",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_rule_decides_and_no_other_rule_says_the_same(case, monkeypatch):
    rule, ranks, known, words = CASES[case]
    found = verdict(known)

    assert (found.rule, found.ranks) == (rule, ranks)
    assert words in found.found
    monkeypatch.setitem(rules._RULES, rule, lambda known: None)
    assert verdict(known) != found


def test_what_went_well_has_no_verdict():
    everybody = [told(rank, A, B) for rank in range(3)]
    assert verdict(of(*everybody)) is None
    assert verdict(of(*everybody[:2], told(2, A, B, ending=0, is_over=True))) is None
    assert verdict({}) is None


def test_ranks_of_which_some_rings_have_forgotten_the_start_are_compared_from_there_on(tmp_path):
    early, late = told(0, A, A, A), told(1, B, A, A)
    late.records.pop(0)
    whole = told(2, A, A, A)

    assert verdict(of(early, late, whole)) is None


def test_evidence_travels_to_another_machine_as_text():
    known = of(told(0, A, B, ending=-6, place="train.py:3 (f)"), told(1, LEFT, phase="setup", is_echo=True))

    assert from_text(as_text(known)) == known


def test_what_a_launcher_keeps_is_read_again(tmp_path):
    ring = Ring(tmp_path, 0, ("next batch",))
    ring.close()
    cause = LaunchError("rank 1 was killed by SIGKILL", do="look at the kernel log")
    keep(tmp_path, of(told(0, is_echo=True), told(1, ending=-9, place="train.py:3 (f)")), cause)
    sentence, known = read_kept(tmp_path)

    assert sentence == str(cause)
    assert (known[1].ending, known[1].place) == (-9, "train.py:3 (f)")
    assert cause.__notes__ == [f"`stratagem postmortem {tmp_path}` shows what each rank did last"]


def test_a_rank_that_called_exit_is_named_though_its_program_has_come_to_its_end():
    gone = told(1, ending=0, is_over=True, called_exit=True)

    assert "rank 1 exited with code 0 before its training was over" in verdict(of(told(0, is_echo=True), gone)).found


def test_a_ring_keeps_why_its_process_ends_first(tmp_path, monkeypatch):
    monkeypatch.setenv(EVIDENCE_VARIABLE, str(tmp_path))
    recorder = Recorder.start(tmp_path, 1, ("next batch",))
    recorder.mark("exit")
    recorder.stop(keep=False)

    assert read_all(tmp_path)[1].called_exit


def test_ranks_that_the_kernel_ended_with_rank_0_are_told_in_the_past(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rank_evidence, "_state", lambda process: "")
    for rank in (0, 1):
        ring = Ring(tmp_path, rank, ("next batch",))
        ring.enter(1, step=3, batch=4)
        ring.add_site("a", site(group="0,1"))
        if rank == 0:
            ring.begin("a")
            (tmp_path / "0.stack").write_text("Fatal Python error: Aborted\n")
        ring.close()
    tell(str(tmp_path), 0, saw_sigterm=True)

    assert (
        "in which rank 0 waits; rank 1 was in next batch at step 3, batch 4; make the same" in capsys.readouterr().err
    )


@pytest.mark.parametrize("content", ["", '{"found": "rank 1 is'])
def test_a_verdict_that_a_full_disk_cut_off_is_judged_again(tmp_path, content):
    Ring(tmp_path, 0, ("next batch",)).close()
    (tmp_path / "verdict.json").write_text(content)

    assert read_kept(tmp_path)[0] == ""


def test_a_ring_whose_content_was_overwritten_is_not_read(tmp_path):
    Ring(tmp_path, 0, ("next batch",)).close()
    path = tmp_path / "0.ring"
    path.write_bytes(path.read_bytes()[:16].ljust(path.stat().st_size, b"\xff"))

    assert read_all(tmp_path) == {}


def test_of_processes_that_ended_together_none_is_at_fault():
    assert judged(of(told(0, A, A), told(1, A), told(2, A, A))) == ""
    assert judged(of(told(0, A, A, runs=True), told(1, A))).startswith("rank 1 is gone")
    assert judged(of(told(0, A, B), told(1, A, C))).startswith("rank 1 called barrier()")


# --- Last words --------------------------------------------------------------------------------------------------

LISTENING = """
import multiprocessing, os, sys, time
from pathlib import Path
from stratagem_evidence import Recorder
from stratagem_peer_diagnosis.last_words import LastWords

recorder = Recorder.start(Path(sys.argv[1]), 0, ("next batch",))
words = LastWords.listen(recorder)
"""


def _program(tmp_path, text):
    script = tmp_path / "program.py"
    script.write_text(LISTENING + textwrap.dedent(text))
    folder = tmp_path / "evidence"
    folder.mkdir()
    return folder, subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_signal_to_all_ends_a_process_as_before_and_leaves_no_file(tmp_path):
    folder, process = _program(tmp_path, "print('ready', flush=True); time.sleep(100)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)

    assert (process.returncode, said) == (-signal.SIGTERM, "")
    assert not folder.exists()


@pytest.mark.slow
def test_a_process_that_is_ended_because_another_died_tells_of_that(tmp_path):
    dead = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
    dead.start()
    dead.join()
    folder, process = _program(tmp_path, "print('ready', flush=True); time.sleep(100)")
    assert process.stdout.readline() == "ready\n"
    other = Ring(folder, 1, ("next batch", "backward"))
    other.enter(2, step=3, batch=4)
    ring = bytearray((folder / "1.ring").read_bytes())
    ring[20:24] = dead.pid.to_bytes(4, "little")
    (folder / "1.ring").write_bytes(ring)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)

    assert process.returncode == -signal.SIGTERM
    assert said.startswith(
        "stratagem: rank 1 is gone; it was in backward at step 3, batch 4; see how its process ended"
    )
    assert f"`stratagem postmortem {folder}` shows" in said


@pytest.mark.slow
def test_the_end_of_a_forked_child_does_not_reach_its_parent(tmp_path):
    _, process = _program(
        tmp_path,
        """
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
        child.start()
        time.sleep(0.5)
        child.terminate()
        child.join()
        time.sleep(1)
        print(child.exitcode)
        words.close()
        recorder.stop(keep=False)
        """,
    )
    out, said = process.communicate(timeout=60)

    assert (process.returncode, out, said) == (0, "-15\n", "")
