"""`stratagem run` builds command lines and jobs, passes arguments on unchanged, and refuses what would have no effect."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from programs import scripts
from stratagem.cli import main

#: What a shell, a scheduler or YAML could change.
HOSTILE = [
    "", " ", "two words", "it's", '"quoted"', "$HOME", "$(date)", "`date`", "$$", "$", "a\\b", "*", "~", "#no", "!!", ";ls", "a\nb",
    "--", "--nodes", "-m", "{}", "%j", "no", "1", "ä", "a=b", "\t", "$(HOME", "&&", "|", "%x-%j", "[1]", "null", ": x", "- y",
]  # fmt: skip

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('VALUE')]))"


@pytest.fixture(autouse=True)
def script():
    Path("train.py").write_text(SHOW)


def dry(capsys, *words):
    """Return what `--dry` prints."""
    at = words.index("--") if "--" in words else len(words)
    code = main(["run", "train.py", *words[:at], "--dry", *words[at:]])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def command(capsys, *words):
    """Return the words of the command that would be run, without the interpreter and the script."""
    return shlex.split(dry(capsys, *words))


def refused(capsys, *words, dry=True):
    """Return the sentence with which a command is refused. A command that is not refused would replace this process."""
    assert main(["run", *(["--dry"] if dry else []), *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    return printed.err.removeprefix("stratagem: ").rstrip()


# --- Launchers ---------------------------------------------------------------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", [sys.executable, "train.py"]),
        ("--devices 2", ["STRATAGEM_TRAINER_DEVICES=2", "WORLD_SIZE=2", sys.executable, "train.py"]),
        (
            "--launcher local --nodes 2 --devices 4 --node-rank 1 --main-address h0 --main-port 1234",
            ["STRATAGEM_TRAINER_DEVICES=4", "WORLD_SIZE=8", "MASTER_ADDR=h0", "MASTER_PORT=1234", "NODE_RANK=1",
             "STRATAGEM_TRAINER_NUM_NODES=2", sys.executable, "train.py"],
        ),
        ("--launcher torchrun --devices 2", [*TORCHRUN, "--standalone", "--nnodes=1", "--nproc-per-node=2", "train.py"]),
        (
            "--nodes 2 --devices 8 --node-rank 0 --main-address h0",
            [*TORCHRUN, "--nnodes=2", "--node-rank=0", "--master-addr=h0", "--master-port=29500", "--nproc-per-node=8",
             "train.py"],
        ),
        (
            "--nodes 2 --devices 8 --rdzv-endpoint h0:29400 --max-restarts 3 --rdzv-id mine --option=--monitor-interval=1",
            [*TORCHRUN, "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h0:29400", "--rdzv-id=mine",
             "--nproc-per-node=8", "--max-restarts=3", "--monitor-interval=1", "train.py"],
        ),
        (
            "--nodes 1:4 --devices 8 --rdzv-backend etcd-v2 --rdzv-endpoint e:2379",
            ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *TORCHRUN, "--nnodes=1:4", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=e:2379", "--rdzv-id=train",
             "--nproc-per-node=8", "train.py"],
        ),
    ],
)  # fmt: skip
def test_the_command(capsys, words, expected):
    assert command(capsys, *words.split()) == expected


def test_torchrun_reads_the_variables_of_a_pod(capsys, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")

    assert command(capsys) == [*TORCHRUN, "train.py"]
    assert command(capsys, "--devices", "2") == [*TORCHRUN, "--nproc-per-node=2", "train.py"]


@pytest.mark.parametrize(
    ("words", "variables", "reason"),
    [
        ("", {}, "local (one node; the script starts its processes)"),
        ("--nodes 2 --rdzv-endpoint h:1", {}, "torchrun (--nodes is 2)"),
        ("--max-restarts 2", {}, "torchrun (--max-restarts is set)"),
        ("--hosts a,b", {}, "mpirun (--hosts is set)"),
        ("", {"SLURM_JOB_ID": "7"}, "srun (SLURM_JOB_ID is 7: this is an allocation of SLURM)"),
        ("--launcher local", {"SLURM_JOB_ID": "7"}, "local (--launcher)"),
    ],
)
def test_auto_chooses_and_tells_why(capsys, monkeypatch, need, words, variables, reason):
    need("srun", "mpirun", package="slurm-wlm openmpi-bin")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert main(["run", "train.py", *words.split(), "--dry"]) == 0
    assert capsys.readouterr().err == f"stratagem run: {reason}\n"


def test_srun(capsys, need, monkeypatch):
    need("srun", package="slurm-wlm")
    options = "--launcher srun --nodes 2 --devices 8 --gpus 8 --cpus 4 --memory 64G --time 90m --partition gpu --option=--qos=high"

    assert command(capsys, *options.split()) == [
        "srun", "--kill-on-bad-exit=1", "--nodes=2", "--ntasks-per-node=8", "--ntasks=16", "--gpus-per-node=8", "--cpus-per-task=4",
        "--mem=64G", "--time=01:30:00", "--partition=gpu", "--qos=high", sys.executable, "train.py",
    ]  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    assert command(capsys) == ["srun", "--kill-on-bad-exit=1", sys.executable, "train.py"]
    monkeypatch.setenv("SLURM_STEP_ID", "0")  # srun --pty bash
    assert command(capsys)[1] == "--overlap"


def mpi(capsys, program, *words):
    return command(capsys, "--launcher", "mpirun", "--mpirun", program, *words)


def test_open_mpi(capsys, need):
    need("mpirun.openmpi", package="openmpi-bin")
    words = ("--nodes", "2", "--devices", "4", "--main-address", "h0", "--env", "A=b c")

    assert mpi(capsys, "mpirun.openmpi", *words) == [
        "MASTER_ADDR=h0", "MASTER_PORT=29500", "A=b c", "mpirun.openmpi", "-np", "8", "--map-by", "ppr:4:node",
        "--bind-to", "none", "-x", "MASTER_ADDR", "-x", "MASTER_PORT", "-x", "A", sys.executable, "train.py",
    ]  # fmt: skip
    words = ("--hosts", "a,b", "--devices", "2", "--cpus", "3", "--oversubscribe")
    assert mpi(capsys, "mpirun.openmpi", *words) == [
        "MASTER_ADDR=a", "MASTER_PORT=29500", "mpirun.openmpi", "-np", "4", "--host", "a:2,b:2", "--map-by",
        "ppr:2:node:PE=3", "--bind-to", "core", "--oversubscribe", "-x", "MASTER_ADDR", "-x", "MASTER_PORT",
        sys.executable, "train.py",
    ]  # fmt: skip


def test_mpich(capsys, need):
    need("mpiexec.hydra", package="mpich")

    assert mpi(capsys, "mpiexec.hydra", "--hosts", "a,b", "--devices", "2", "--cpus", "3")[2:] == [
        "mpiexec.hydra", "-np", "4", "-ppn", "2", "-hosts", "a,b", "-bind-to", "core:3", sys.executable, "train.py",
    ]  # fmt: skip
    said = refused(capsys, "train.py", "--launcher", "mpirun", "--mpirun", "mpiexec.hydra", "--oversubscribe")
    assert said == "--oversubscribe is set and mpirun is that of MPICH, which always allows it; leave it out."


@pytest.mark.parametrize(
    ("version", "first"),
    [
        ("Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619", "-genv"),
        ("HYDRA build details:\n    Version:  4.1.2", "-np"),
        ("mpirun (Open MPI) 5.0.3", "--map-by"),
    ],
)
def test_each_implementation_is_told_by_its_version(capsys, tmp_path, version, first):
    """Of Intel MPI nothing is installed here: this is what its manual shows for `mpirun --version`."""
    program = tmp_path / "mpirun-here"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{version}\nEND\n")
    program.chmod(0o755)

    assert first in mpi(capsys, str(program), "--devices", "2")
    program.write_text("#!/bin/sh\necho something else\n")
    assert "prints 'something else'; expected Open MPI, MPICH or Intel MPI" in refused(
        capsys, "train.py", "--launcher", "mpirun", "--mpirun", str(program)
    )


# --- Arguments and exit codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_the_printed_command_passes_every_argument(capsys, launcher):
    line = dry(capsys, "--launcher", launcher, "--env", f"VALUE={HOSTILE[3]}", "--", *HOSTILE)
    stand_in = Path("stand_in.py")
    stand_in.write_text(SHOW)
    words = shlex.split(line)
    at = words.index("train.py")

    assert words[at + 1 :] == HOSTILE
    shown = subprocess.run(["bash", "-c", line.replace(shlex.join(words[1:at]), sys.executable)] if launcher == "torchrun" else ["bash", "-c", line],
                           capture_output=True, text=True, check=True, timeout=180)  # fmt: skip
    assert json.loads(shown.stdout) == [HOSTILE, HOSTILE[3]]


@pytest.mark.slow
def test_the_script_gets_arguments_variables_and_its_exit_code_is_passed_on():
    Path("train.py").write_text(f"{SHOW}; sys.exit(7)")
    done = stratagem("train.py", "--env", "VALUE=it's", "--", *HOSTILE)

    assert json.loads(done.stdout) == [HOSTILE, "it's"]
    assert done.returncode == 7
    assert done.stderr.splitlines()[1].startswith(f"+ VALUE='it'\"'\"'s' {sys.executable} train.py")


@pytest.mark.slow
def test_signals_reach_the_script():
    Path("train.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")

    assert stratagem("train.py").returncode == -15


@pytest.mark.slow
def test_a_module_runs_with_options_before_and_after_it():
    Path("package").mkdir()
    Path("package/train.py").write_text(SHOW)

    assert json.loads(stratagem("--env", "VALUE=1", "-m", "package.train", "--nodes", "1", "--", "-m").stdout) == [
        ["-m"],
        "1",
    ]


def stratagem(*words):
    return scripts.run(
        [sys.executable, "-m", "stratagem", "run", *words], capture_output=True, text=True, timeout=360, check=False
    )


# --- Bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "no script is named; expected a Python file, or -m and a module; write `stratagem run train.py`."),
        ("trian.py", "script 'trian.py' does not exist; did you mean 'train.py'."),
        ("folder/none.py", "script 'folder/none.py' does not exist; check the path."),
        (".", "'.' is a folder without __main__.py; expected a Python script; check the path."),
        ("train.py -m other", "the script 'train.py' and -m other are set; expected one of them; pass arguments of the program after `--`."),
        ("-m nothing_here.train", "-m is 'nothing_here.train' and there is no module 'nothing_here'; expected a module"),
        ("train.py --dvices 2", "'--dvices' is not an option of stratagem run; expected arguments of the script after `--`; did you mean '--devices'."),
        ("train.py --lr 2", "'--lr' is not an option of stratagem run; expected arguments of the script after `--`; write `stratagem run SCRIPT [options] -- --lr ...`"),
        ("train.py data.csv", "'data.csv' is not an option of stratagem run"),
        ("train.py --node 2", "'--node' is not an option of stratagem run; expected arguments of the script after `--`; did you mean '--nodes'."),
        ("train.py --nodes", "--nodes cannot be read: expected one argument; run `stratagem run --help`."),
        ("train.py --devices two", "--devices is 'two'; expected an integer or None."),
        ("train.py --devices 0", "--devices is 0; expected at least 1."),
        ("train.py --devices 5000", "--devices is 5000; expected at most 1024 processes on one machine."),
        ("train.py --nodes 0", "--nodes is '0'; expected a number of nodes, or MIN:MAX; write for example --nodes 2."),
        ("train.py --nodes 4:2 --rdzv-endpoint h:1", "--nodes is '4:2'; expected a number of nodes, or MIN:MAX"),
        ("train.py --nodes ² --rdzv-endpoint h:1", "--nodes is '²'; expected a number of nodes"),
        ("train.py --env A", "--env is 'A'; expected NAME=VALUE; write --env A=VALUE."),
        ("train.py --env 1A=2", "--env is '1A=2'; expected NAME=VALUE"),
        ("train.py --launcher torchrn", "--launcher is 'torchrn'; expected auto, srun, torchrun, local, mpirun; did you mean 'torchrun'."),
        ("train.py --launcher local --max-restarts 2", "--max-restarts is set, which --launcher local does not use; expected its options: --devices,"),
        ("train.py --image x", "--image is set; expected options of one launcher; add --submit."),
        ("train.py --nodes 2 --devices 8", "--nodes is 2 and --rdzv-endpoint is not set; expected where nodes connect; on every node pass the same --rdzv-endpoint HOST:PORT"),
        ("train.py --nodes 1:2 --devices 8 --main-address h", "--nodes is 1:2 and --rdzv-endpoint is not set"),
        ("train.py --nodes 2 --main-address h", "--nodes is 2 and --node-rank is not set; expected both on every node; add --node-rank."),
        ("train.py --launcher local --nodes 2", "--nodes is 2 and --node-rank and --main-address are not set"),
        ("train.py --nodes 2 --main-address h --node-rank 2", "--node-rank is 2 and --nodes is 2; expected 0 to 1."),
        ("train.py --nodes 2 --main-address h --node-rank 0 --main-port 70000", "--main-port is 70000; expected 1 to 65535."),
        ("train.py --nodes 2 --main-address h --node-rank 0 --rdzv-id x", "--rdzv-id is set and --main-address is set; leave --rdzv-id out."),
        ("train.py --main-address h", "--main-address is set and --nodes is 1; leave --main-address out."),
        ("train.py --nodes 2 --rdzv-endpoint h:1 --node-rank 1", "--node-rank is set and --rdzv-endpoint is set; leave --node-rank out."),
        ("train.py --launcher torchrun --rdzv-backend c10d", "--rdzv-backend is set and --nodes is 1"),
        ("train.py --hosts a,b --nodes 3", "--nodes is 3 and --hosts names 2; expected the same number"),
        ("train.py --hosts a,b --devices 1 --main-port 70000", "--main-port is 70000; expected 1 to 65535."),
        ("train.py --launcher mpirun --nodes 2 --main-port 3", "--main-port is 3 and --main-address is not set"),
        ("train.py --launcher mpirun --mpirun mpirun.none", "mpirun.none is not installed on this machine; expected Open MPI"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_in_one_sentence(capsys, words, sentence):
    said = refused(capsys, *words.split())

    assert said.startswith(sentence)


FOUR = """
from stratagem.api import Accelerator


class Four(Accelerator):
    precedence = 1000

    def count(self):
        return 4
"""


def test_more_devices_than_the_machine_has_are_refused(capsys, install):
    install("four", {"stratagem.accelerator": {"four": "Four"}}, FOUR, requires=["stratagem>=0.1"])

    for launcher in ("local", "torchrun"):
        said = refused(capsys, "train.py", "--launcher", launcher, "--devices", "8")
        assert said.startswith("--devices is 8 and this machine has 4 (four); expected at most 4; pass --devices 4")
    assert "--nproc-per-node=4" in command(capsys, "--launcher", "torchrun")
    accepted = command(capsys, "--launcher", "torchrun", "--devices", "8", "--env", "STRATAGEM_TRAINER_ACCELERATOR=cpu")
    assert "--nproc-per-node=8" in accepted


def test_a_launcher_is_not_started_by_each_of_several_processes(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")

    assert refused(capsys, "train.py").startswith(
        "srun has started this command 4 times (SLURM_STEP_ID and SLURM_STEP_NUM_TASKS are set), and each one would start srun"
    )
    assert command(capsys, "--launcher", "torchrun", "--nodes", "2", "--rdzv-endpoint", "h:1")  # an agent on each node
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert refused(capsys, "train.py", "--launcher", "torchrun").startswith("torchrun has started this command 2 times")


def test_bytes_that_are_not_text_are_refused_where_they_would_be_printed(capsys):
    for words in ((), ("--submit", "slurm")):
        said = refused(capsys, "train.py", *words, "--", "\udcff")
        assert said.startswith("an argument or variable has the byte 0xff; expected text in UTF-8")


def test_programs_that_are_not_installed_are_named(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    for launcher, said in (
        ("srun", "srun is not installed"),
        ("mpirun", "mpirun and mpiexec.hydra and mpiexec are not installed"),
    ):
        assert refused(capsys, "train.py", "--launcher", launcher).startswith(said)
    for target, program in (("slurm", "sbatch"), ("lsf", "bsub"), ("kubernetes", "kubectl")):
        image = ("--image", "x") if target == "kubernetes" else ()
        assert refused(capsys, "train.py", "--submit", target, *image, dry=False).startswith(
            f"{program} is not installed on this machine; expected a machine"
        )


# --- Jobs --------------------------------------------------------------------------------------------------------


def test_a_script_for_sbatch(capsys):
    options = (
        "--submit slurm --nodes 2 --devices 8 --gpus 8 --cpus 4 --memory 512G --time 24:00:00 --partition gpu --account ml "
        "--requeue --name gpt --env NCCL_DEBUG=INFO --option=--qos=high"
    )
    assert (
        dry(capsys, *options.split(), "--", "--lr", "0.1")
        == f"""#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --mem=512G
#SBATCH --time=1-00:00:00
#SBATCH --partition=gpu
#SBATCH --account=ml
#SBATCH --signal=SIGUSR1@90
#SBATCH --requeue
#SBATCH --output=gpt-%j.out
#SBATCH --open-mode=append
#SBATCH --qos=high

export PYTHONUNBUFFERED=1
export NCCL_DEBUG=INFO
srun --kill-on-bad-exit=1 --cpus-per-task=4 {sys.executable} train.py --lr 0.1
"""
    )


def test_a_script_for_bsub(capsys):
    options = (
        "--submit lsf --nodes 2 --devices 4 --gpus 4 --cpus 2 --memory 64G --time 90m --partition gpu --account ml "
        "--requeue --signal SIGUSR1@90"
    )
    assert (
        dry(capsys, *options.split(), "--", "a b")
        == f"""#!/bin/bash
#BSUB -n 8
#BSUB -R "span[ptile=4] affinity[core(2)] rusage[mem=64GB]"
#BSUB -gpu "num=4/host"
#BSUB -J train
#BSUB -q gpu
#BSUB -P ml
#BSUB -W 01:30
#BSUB -o train-%J.out
#BSUB -wa USR1
#BSUB -wt 2
#BSUB -r

export PYTHONUNBUFFERED=1
mpirun -np 8 --map-by ppr:4:node --bind-to none -x PYTHONUNBUFFERED {sys.executable} train.py 'a b'
"""
    )


def test_a_script_for_bsub_with_jsrun(capsys):
    lines = dry(
        capsys,
        *["--submit", "lsf", "--launcher", "jsrun", "--nodes", "2", "--devices", "2", "--gpus", "4", "--cpus", "7"],
    ).splitlines()

    assert lines[1] == "#BSUB -nnodes 2"
    assert lines[-1] == (
        "jsrun --nrs=4 --rs_per_host=2 --tasks_per_rs=1 --cpu_per_rs=7 --gpu_per_rs=2 --bind=packed:7 "
        f"{sys.executable} train.py"
    )


@pytest.mark.parametrize(("target", "starter"), [("slurm", "srun"), ("lsf", "mpirun")])
def test_a_rendered_script_passes_every_argument(capsys, tmp_path, target, starter):
    """A program in place of the launcher runs the words after its own options; bash reads the script."""
    text = dry(capsys, "--submit", target, "--env", f"VALUE={HOSTILE[-1]}\n'", "--", *HOSTILE)
    stand_in = tmp_path / "bin" / starter
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/bash\nuntil [ "$1" = "$PYTHON" ]; do shift; done\nexec "$@"\n')
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-s"], input=text, env={**os.environ, "PATH": path, "PYTHON": sys.executable}, capture_output=True,
        text=True, check=True, timeout=180,
    )  # fmt: skip

    assert json.loads(done.stdout) == [HOSTILE, f"{HOSTILE[-1]}\n'"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--submit slurn", "--submit is 'slurn'; expected slurm, kubernetes, lsf; did you mean 'slurm'."),
        ("--submit slurm --image x", "--image is set, which --submit slurm does not use; expected its options: --account,"),
        ("--submit slurm --max-restarts 2", "--max-restarts is set, which --submit slurm does not use"),
        ("--submit slurm --launcher torchrun", "--launcher is 'torchrun'; expected 'srun'."),
        ("--submit kubernetes --partition x", "--partition is set, which --submit kubernetes does not use"),
        ("--submit kubernetes --launcher srun --image x", "--launcher is 'srun'; expected 'torchrun'."),
        ("--submit kubernetes", "--image is not set; expected the image of the pods; add --image NAME."),
        ("--submit kubernetes --image x --name My_Job", "--name is 'My_Job'; expected at most 50 lower-case letters"),
        ("--submit kubernetes --image x --namespace a/b", "--namespace is 'a/b'; expected"),
        ("--submit lsf --launcher jsrun --memory 2G", "--memory is 2G and jsrun is for jobs that have whole nodes"),
        ("--submit lsf --launcher jsrun --gpus 3 --devices 2", "--gpus is 3 and --devices is 2; expected the same number of GPUs"),
        ("--submit slurm --time 90", "--time is '90'; expected hours:minutes:seconds"),
        ("--submit slurm --time 0m", "--time is '0m'; expected"),
        ("--submit slurm --memory 64", "--memory is '64'; expected a whole number and K, M, G or T; write for example --memory 64G."),
        ("--submit slurm --signal SIGFOO@9", "--signal is 'SIGFOO@9'; expected the name of a signal"),
        ("--submit slurm --name x;y", "--name is 'x;y'; expected letters, digits and"),
        ("--submit slurm --gpus 4 --devices 8", "--gpus is 4 and --devices is 8; expected a GPU for each process of a node; pass --gpus 8, or --devices 4."),
        ("--submit slurm --nodes 1:2", "--nodes is '1:2'; expected an integer or None."),
    ],
)  # fmt: skip
def test_jobs_that_cannot_be_are_refused(capsys, words, sentence):
    assert refused(capsys, "train.py", *words.split()).startswith(sentence)


def test_a_line_break_cannot_add_an_option_to_a_job(capsys):
    for target in ("slurm", "lsf"):
        for words in (("--partition", "a\n#SBATCH x"), ("--name", "a b"), ("--option", "a\nrm x")):
            assert "expected" in refused(capsys, "train.py", "--submit", target, *words)


def test_the_script_of_a_job_must_exist(capsys):
    assert refused(capsys, "trian.py", "--submit", "slurm").startswith("script 'trian.py' does not exist")
    assert main(["run", "in_the_image.py", "--submit", "kubernetes", "--image", "x", "--dry"]) == 0


# --- Kubernetes --------------------------------------------------------------------------------------------------


def manifest(capsys, *words):
    return yaml.safe_load(dry(capsys, "--submit", "kubernetes", "--image", "registry/train:1", *words))


def test_a_manifest(capsys):
    words = "--nodes 3 --devices 8 --gpus 8 --cpus 4 --memory 512G --time 36h --namespace team --name gpt --requeue --env A=1"
    found = manifest(capsys, *words.split(), "--", "--lr", "0.1")
    spec = found["spec"]
    roles = spec["pytorchReplicaSpecs"]
    (container,) = roles["Worker"]["template"]["spec"]["containers"]

    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert found["metadata"] == {"name": "gpt", "namespace": "team"}
    assert spec["nprocPerNode"] == "8"
    assert spec["runPolicy"] == {"cleanPodPolicy": "None", "activeDeadlineSeconds": 129600}
    assert {role: each["replicas"] for role, each in roles.items()} == {"Master": 1, "Worker": 2}
    assert roles["Master"]["template"] == roles["Worker"]["template"]
    assert container["command"] == ["python", "-m", "torch.distributed.run", "train.py", "--lr", "0.1"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8", "cpu": "32", "memory": "512Gi"}}
    assert container["env"] == [{"name": "A", "value": "1"}]


@pytest.mark.slow
@pytest.mark.sweep(guard="tests/plugins/test_run_command.py::test_a_manifest")
@pytest.mark.parametrize(
    "words", ["", "--nodes 1 --gpus 2", "--nodes 3 --cpus 2 --memory 3G --time 2h --env A=1 --requeue --namespace n"]
)
def test_a_manifest_fits_the_published_models(capsys, words):
    """The models of the training operator's client, generated from its schema: every key, every type."""
    from kubeflow.training import models

    found = manifest(capsys, *words.split(), "--", *HOSTILE)
    check(found, "KubeflowOrgV1PyTorchJob", models, "job")
    replicas = found["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() <= {"Master", "Worker"}
    assert {each["restartPolicy"] for each in replicas.values()} <= {"Always", "OnFailure", "Never", "ExitCode"}
    assert found["spec"]["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert {each["name"] for spec in replicas.values() for each in spec["template"]["spec"]["containers"]} == {
        "pytorch"
    }
    with pytest.raises(AssertionError, match=r"job.spec.runPolicy has no field 'deadline'"):
        check(found | {"spec": {"runPolicy": {"deadline": 1}}}, "KubeflowOrgV1PyTorchJob", models, "job")
    with pytest.raises(AssertionError, match=r"job.spec.nprocPerNode is 8"):
        check(found | {"spec": {"nprocPerNode": 8}}, "KubeflowOrgV1PyTorchJob", models, "job")


def check(value, kind, models, path):
    """Compare plain data with a model of the client, which converts without complaint what a server would refuse."""
    if kind.startswith("list["):
        assert isinstance(value, list), f"{path} is {value!r}"
        for index, each in enumerate(value):
            check(each, kind[5:-1], models, f"{path}[{index}]")
    elif kind.startswith("dict("):
        assert isinstance(value, dict), f"{path} is {value!r}"
        for name, each in value.items():
            check(each, kind[5:-1].split(", ", 1)[1], models, f"{path}.{name}")
    elif hasattr(models, kind):
        model = getattr(models, kind)
        known = {name: field for field, name in model.attribute_map.items()}
        for name, each in value.items():
            assert name in known, f"{path} has no field {name!r}"
            check(each, model.openapi_types[known[name]], models, f"{path}.{name}")
        model(**{known[name]: each for name, each in value.items()})  # refuses a missing field
    else:
        types = {"str": str, "int": int, "bool": bool, "object": object}
        if kind in types:
            assert isinstance(value, types[kind]), f"{path} is {value!r}"
        else:
            assert "Quantity" in kind, f"{path} is a {kind}"


def test_kubernetes_expands_nothing_in_arguments(capsys):
    found = manifest(capsys, "--env", "VALUE=$(A) $$(B) $C", "--", *HOSTILE)
    (container,) = found["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]

    assert [expand(word) for word in container["command"][4:]] == HOSTILE
    assert expand(container["env"][0]["value"]) == "$(A) $$(B) $C"
    assert expand("$(A)-$$(A)") == "<A>-$(A)"


def expand(text):
    """Expand references as Kubernetes does (third_party/forked/golang/expansion): ``$(A)``; ``$$`` is a dollar."""
    result, at = "", 0
    while at < len(text):
        following = text[at + 1 : at + 2]
        if text[at] != "$" or not following:
            result, at = result + text[at], at + 1
        elif following == "$":
            result, at = result + "$", at + 2
        elif following == "(" and ")" in text[at:]:
            end = text.index(")", at)
            result, at = f"{result}<{text[at + 2 : end]}>", end + 1
        else:
            result, at = result + "$" + following, at + 2
    return result


# --- The page ----------------------------------------------------------------------------------------------------


def test_the_commands_of_the_page(capsys, monkeypatch, need):
    need("srun", package="slurm-wlm")
    Path("project").mkdir()
    Path("project/train.py").write_text(SHOW)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("STRATAGEM_TRAINER_ACCELERATOR", "cpu")  # the page has eight devices
    page = (Path(__file__).parents[2] / "docs" / "run-command.md").read_text()
    lines = [shlex.split(line, comments=True) for line in page.splitlines() if line.startswith("    stratagem run ")]

    for _, _, *words in lines:
        assert main(["run", "--dry", *words]) == 0, capsys.readouterr().err
    assert len(lines) == 9
    assert capsys.readouterr().out.count("\n") > 60
