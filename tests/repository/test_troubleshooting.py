"""Each message of docs/troubleshooting.md is one that a program prints in the situation that the page describes."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from ports import free_port
from programs import scripts

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()

#: The beginning of every program.
PROGRAM = '''
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
import stratagem as sg


class Net(sg.Module):
    def __init__(self, width=8):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Samples(Dataset):
    """Samples that are made one at a time, by `make`."""

    def __init__(self, number, make):
        self.number, self.make = number, make

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        self.make(index)
        return torch.ones(8), torch.ones(1)


def loader(samples=32, **options):
    x = torch.randn(samples, 8)
    return DataLoader(TensorDataset(x, x[:, :1].sin()), 8, **options)


def trainer(**options):
    return sg.Trainer(**({"accelerator": "cpu", "max_epochs": 1} | options))


def saved():
    first = trainer()
    first.fit(Net(), loader())
    first.save_checkpoint("a.ckpt")


'''

UNUSED = """
class Unused(Net):
    def __init__(self):
        super().__init__()
        self.extra = torch.nn.Linear(2, 2)
"""
#: By heading of the page: programs that have these messages, in the order of the page, and how many of them each has.
SITUATIONS: dict[str, list[tuple[int, str]]] = {
    "Training hangs at the start": [
        (2, 'trainer(strategy={"name": "ddp", "start_timeout": 11}, devices=2).fit(Net(), loader())'),
    ],
    "The second process does not start: port in use": [
        (1, 'trainer(strategy="ddp", devices=2).fit(Net(), loader())'),
    ],
    "The script starts itself again": [
        (1, 'trainer(strategy="ddp_spawn", devices=2).fit(Net(), loader())'),
    ],
    "An option differs on ranks": [
        (1, """
rank = int(os.environ.get("RANK", 0))
trainer(strategy={"name": "ddp", "bucket_cap_mb": 25.0 + rank}, devices=2).fit(Net(), loader())
"""),
    ],
    "Training hangs in the middle": [
        (1, """
class Slow(Net):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1:
            time.sleep(60)
        return super().training_step(batch, batch_idx)

trainer(strategy={"name": "ddp", "timeout": 5}, devices=2).fit(Slow(), loader())
"""),
        (1, """
class Logs(Net):
    def training_step(self, batch, batch_idx):
        self.log("cat" if self.trainer.global_rank else "dog", 1.0, sync_dist=True)
        return super().training_step(batch, batch_idx)

trainer(strategy={"name": "ddp", "timeout": 20}, devices=2).fit(Logs(), loader())
"""),
    ],
    "Training hangs at the end": [
        (1, """
from stratagem_trainer import fit_state

fit_state.BARRIER_TIMEOUT_S = 3  # instead of 60
first = trainer(strategy="ddp", devices=2)
first.fit(Net(), loader())
if first.is_global_zero:
    first.save_checkpoint("a.ckpt")
"""),
        (1, """
first, model = trainer(strategy={"name": "ddp", "timeout": 8}, devices=2), Net()
first.fit(model, loader())
if first.is_global_zero:
    first.validate(model, loader())
"""),
    ],
    "A rank is killed: out of memory": [
        (1, """
class Killed(Net):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

trainer(strategy="ddp", devices=2).fit(Killed(), loader())
"""),
    ],
    "Out of memory": [
        (1, """
class Large(Net):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 1:
            torch.empty(10**15)
        return super().training_step(batch, batch_idx)

trainer(strategy="ddp", devices=2).fit(Large(), loader())
"""),
    ],
    "The loss is nan": [
        (1, """
class Diverges(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e30)

trainer(max_epochs=3).fit(Diverges(), loader())
"""),
        (2, """
class Gradient(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            loss = loss + 0 * sum((0 * parameter).sqrt().sum() for parameter in self.parameters())
        return loss

for checks in ("finite", {"name": "finite", "gradients": True}):
    try:
        trainer(checks=checks).fit(Gradient(), loader())
    except sg.StratagemError as error:
        print(error)
"""),
        (1, """
class Root(Net):
    def training_step(self, batch, batch_idx):
        return (super().training_step(batch, batch_idx) - 100).sqrt()

trainer(detect_anomaly=True).fit(Root(), loader())
"""),
        (1, """
class Diverges(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e30)

options = {"callbacks": {"name": "early_stopping", "monitor": "train_loss"}, "checks": None}
trainer(max_epochs=3, **options).fit(Diverges(), loader())
"""),
    ],
    "Ranks train different models": [
        (1, """
class Writes(Net):
    def on_before_zero_grad(self, optimizer):
        if self.trainer.global_rank == 1 and self.trainer.global_step == 1:
            with torch.no_grad():
                next(self.parameters()).add_(1.0)

trainer(strategy="ddp", devices=2, checks={"name": "replicas", "every_n_steps": 1}).fit(Writes(), loader())
"""),
    ],
    "The loss differs between strategies": [
        (1, 'trainer(strategy="ddp", devices=2).fit(Net(), loader())'),
    ],
    "Training is slow": [
        (1, 'trainer(profiler="simple").fit(Net(), DataLoader(Samples(64, lambda _: time.sleep(0.02)), 8))'),
    ],
    "A parameter gets no gradient under ddp": [
        (1, UNUSED + """
trainer(strategy={"name": "ddp", "find_unused_parameters": False}, devices=2).fit(Unused(), loader())
"""),
        (1, UNUSED + 'trainer(strategy="ddp", devices=2).fit(Unused(), loader())'),
    ],
    "No gradient at all: nothing is trained": [
        (2, """
class M(Net):
    def configure_optimizers(self):
        return None

class Forgets(Net):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)

trainer().fit(M(), loader())
trainer().fit(Forgets(), loader())
"""),
        (1, "trainer().fit(Net(), loader(4, drop_last=True))"),
    ],
    "A checkpoint does not load": [
        (1, """
saved()
trainer(max_epochs=2).fit(Net(16), loader(), ckpt_path=os.path.abspath("a.ckpt"))
"""),
        (1, """
class Other(Net):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(1, 1)

saved()
Other.load_from_checkpoint("a.ckpt")
"""),
        (1, """
torch.save({f"model.{name}": value for name, value in Net().state_dict().items()}, "a.pt")
trainer().fit(Net(), loader(), ckpt_path="a.pt")
"""),
        (1, """
saved()
content = open("a.ckpt", "rb").read()
open("a.ckpt", "wb").write(content[: len(content) // 2])
trainer(max_epochs=2).fit(Net(), loader(), ckpt_path=os.path.abspath("a.ckpt"))
"""),
        (1, """
class Thing:
    pass

torch.save({"state_dict": Net().state_dict(), "thing": Thing()}, "a.ckpt")
trainer(max_epochs=2).fit(Net(), loader(), ckpt_path="a.ckpt")
"""),
        (1, 'trainer().fit(Net(), loader(), ckpt_path=os.path.abspath("b.ckpt"))'),
    ],
    "Resuming starts at step 0": [
        (1, """
torch.save({"state_dict": Net().state_dict(), "epoch": 3, "global_step": 12}, "a.ckpt")
trainer().fit(Net(), loader(), ckpt_path="a.ckpt")
"""),
        (1, 'trainer().fit(Net(), loader(), ckpt_path="last")'),
        (1, """
saved()
trainer().fit(Net(), loader(), ckpt_path=os.path.abspath("a.ckpt"))
"""),
    ],
    "A job of SLURM that was requeued starts at step 0": [
        (1, "trainer().fit(Net(), loader())"),
    ],
    "Metrics are missing in the CSV file": [
        (1, 'trainer(callbacks={"name": "early_stopping", "monitor": "loss"}).fit(Net(), loader())'),
    ],
    "Nothing is printed until the end": [
        (1, "trainer(enable_progress_bar=False).fit(Net(), loader())"),
    ],
    "Workers of a loader are killed": [
        (1, """
def make(index):
    if index == 16:
        os.kill(os.getpid(), signal.SIGKILL)

trainer().fit(Net(), DataLoader(Samples(32, make), 8, num_workers=1))
"""),
    ],
    "Pickling errors with ddp_spawn": [
        (1, """
if __name__ == "__main__":
    model = Net()
    model.activation = lambda x: x.relu()
    trainer(strategy="ddp_spawn", devices=2).fit(model, loader())
"""),
    ],
    "Several processes in a notebook": [
        (1, 'trainer(strategy="ddp", devices=2).fit(Net(), loader())'),
    ],
    "A plugin is not found": [
        (1, 'trainer(strategy="horovod")'),
        (1, 'trainer(strategy="dpp")'),
    ],
    "An argument or an option is refused": [
        (1, "sg.Trainer(gpus=2)"),
        (1, 'trainer(strategy={"name": "ddp", "bucket_cap": 3})'),
        (1, 'trainer(strategy="fsdp", comm_hook="powersgd", devices=2)'),
    ],
    "No GPU is found": [
        (1, 'sg.Trainer(accelerator="gpu")'),
    ],
}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "train", "SLURM_RESTART_COUNT": "1"} | {
    f"SLURM_{name}": value
    for name, value in {"NNODES": "1", "NODEID": "0", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}.items()
}
#: Situations that take more than some seconds: several processes, or a timeout.
SLOW = {
    "Training hangs at the start", "The script starts itself again", "Training hangs in the middle",
    "Training hangs at the end", "A rank is killed: out of memory", "Out of memory", "A checkpoint does not load",
    "Resuming starts at step 0", "An argument or an option is refused", "The second process does not start: port in use",
    "Several processes in a notebook", "An option differs on ranks",
}  # fmt: skip


def sections() -> dict[str, list[str]]:
    """Return the messages of the page by heading: each indented paragraph is one."""
    found = {}
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        found[heading] = re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    return found


def compared(text: str, folder: str = "/home/me") -> str:
    """Return `text` without what differs between runs and machines: numbers, names of machines, folders, line breaks."""
    text = re.sub(r"^\[rank\d\]: ", "", text, flags=re.MULTILINE)
    text = text.replace(folder, "/home/me").replace(socket.gethostname(), "node1").replace("node2", "node1")
    text = re.sub(r"\b\d+(\.\d+){3}\b", "node1", text)
    text = re.sub(r"0x[0-9a-f]+", "0x0", text)
    text = re.sub(r"(?<![\w.])\d[\d.]*\d|(?<![\w.])\d", "0", text)
    return " ".join(text.split()).replace("0%", "0 %")


def variables(heading: str, port: int) -> dict[str, str]:
    """Return the environment variables that the situation needs."""
    if heading == "Training hangs at the start":
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **ranks}
    if heading == "The second process does not start: port in use":
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return SLURM if "SLURM" in heading else {}


@pytest.mark.every_push("Training hangs at the start", "A job of SLURM that was requeued starts at step 0")
@pytest.mark.parametrize(
    "heading", [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in SITUATIONS]
)
def test_the_messages_of_the_page_are_those_of_a_program(heading, tmp_path):
    expected = list(sections()[heading])
    with socket.create_server(("127.0.0.1", 0)) as other:
        env = os.environ | {"OMP_NUM_THREADS": "1"} | variables(heading, other.getsockname()[1])
        for number, (count, body) in enumerate(SITUATIONS[heading]):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "train.py").write_text(PROGRAM + body)
            command = ["-c", PROGRAM + body] if "notebook" in heading else ["train.py"]
            done = scripts.run(
                [sys.executable, *command],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=180,
                env=env,
                check=False,
            )
            output = compared(done.stdout + done.stderr, str(folder))
            for message in (expected.pop(0) for _ in range(count)):
                assert compared(message) in output, output

    assert not expected


def test_each_section_with_a_message_has_a_situation():
    assert [heading for heading, messages in sections().items() if messages] == list(SITUATIONS)


@pytest.mark.slow
def test_an_epoch_ends_where_the_first_rank_has_no_more_batches(tmp_path):
    (tmp_path / "train.py").write_text(
        PROGRAM
        + """
class Uneven(IterableDataset):
    def __iter__(self):
        for _ in range(3 + 2 * int(os.environ["RANK"])):
            yield torch.ones(8, 8), torch.ones(8, 1)

made = trainer(strategy="ddp", devices=2)
made.fit(Net(), DataLoader(Uneven(), batch_size=None))
print(f"steps {made.global_step}")
"""
    )
    done = scripts.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180)

    assert done.stdout.count("steps 3") == 2, done.stdout + done.stderr
