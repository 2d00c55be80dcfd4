"""The examples of docs/data.md on litdata and MosaicML Streaming: two ranks share the data, and resume within an epoch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
#: Without their dependencies: both ask for torchvision, which belongs to one release of torch.
PACKAGES = ("litdata==0.2.76", "lightning-utilities==0.15.*", "mosaicml-streaming==0.13.0", "brotli==1.*", "zstd==1.*",
            "python-snappy==0.7.*", "cramjam==2.*", "xxhash==4.*", "catalogue==2.*")  # fmt: skip
SAMPLES = 64

PROGRAM = """
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy
import torch

import stratagem as sg

import transformers.feature_extraction_utils  # streaming uses it, and it looks for torchvision
for name in ("", ".datasets", ".transforms", ".transforms.functional"):
    sys.modules[f"torchvision{name}"] = MagicMock()
sys.modules["torchvision.datasets"].VisionDataset = type("VisionDataset", (), {})
folder = Path(sys.argv[1])


def write_litdata():
    from litdata.streaming.cache import Cache

    cache = Cache(str(folder / "litdata"), chunk_size=8)
    for number in range(SAMPLES):
        cache[number] = torch.tensor([float(number)])
    cache.done()
    cache.merge()


def write_mosaic():
    with streaming.MDSWriter(out=str(folder / "mds"), columns={"x": "float32"}, size_limit=64) as out:
        for number in range(SAMPLES):
            out.write({"x": numpy.float32(number)})


class Seeing(sg.Module):
    def __init__(self, name):
        super().__init__()
        self.layer, self.name = torch.nn.Linear(1, 1), name

    def training_step(self, batch):
        x = batch["x"] if isinstance(batch, dict) else batch
        with open(folder / f"{self.name}.{self.global_rank}", "a") as file:
            print(self.current_epoch, *map(int, x.flatten()), file=file)
        return self.layer(x.reshape(-1, 1) / 100).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


BLOCK

if __name__ == "__main__":
    options = dict(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False, max_epochs=2)
    WRITE()
    trainer = sg.Trainer(**options)
    trainer.fit(Seeing("whole"), datamodule=Streamed())
    trainer = sg.Trainer(max_steps=5, **options)
    trainer.fit(Seeing("parts"), datamodule=Streamed())
    trainer.save_checkpoint(folder / "within.ckpt")
    sg.Trainer(**options).fit(Seeing("parts"), datamodule=Streamed(), ckpt_path=folder / "within.ckpt")
"""


def packages(cache):
    """Return a folder with the libraries, filled once."""
    folder = cache / "streaming-libraries"
    if not (folder / "made").exists():
        pip = (
            [sys.executable, "-m", "pip"]
            if subprocess.call([sys.executable, "-m", "pip", "-V"]) == 0
            else ["uv", "pip"]
        )
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES], check=True)
        (folder / "made").touch()
    return folder


@pytest.mark.when_changed(
    "docs/data.md", "tests/parity/test_streaming_libraries.py", "plugins/trainer/stratagem_trainer/batches.py",
    guard="tests/parity/test_resume.py::test_every_kind_of_loader",
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.xdist_group("streaming-libraries")
@pytest.mark.parametrize(("library", "write"), [("litdata", "write_litdata"), ("streaming", "write_mosaic")])
def test_two_ranks_share_the_data_and_resume_within_an_epoch(tmp_path, library, write):
    (block,) = (
        each
        for each in re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)
        if f"import {library}\n" in each
    )
    program = PROGRAM.replace("BLOCK", block).replace("WRITE()", f"os.environ.get('LOCAL_RANK') or {write}()")
    (tmp_path / "train.py").write_text("import os\n" + program.replace("SAMPLES", str(SAMPLES)))
    added = packages(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "stratagem")
    environment = os.environ | {"PYTHONPATH": str(added), "HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "train.py", tmp_path], cwd=tmp_path, capture_output=True, text=True,
                            timeout=300, check=False, env=environment)  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]

    whole = [(tmp_path / f"whole.{rank}").read_text().splitlines() for rank in range(2)]
    assert whole == [(tmp_path / f"parts.{rank}").read_text().splitlines() for rank in range(2)]
    first_epoch = [int(word) for lines in whole for line in lines if line[0] == "0" for word in line.split()[1:]]
    assert sorted(first_epoch) == list(range(SAMPLES))
