"""What somebody with a part of the packages is told: all that is missing at once, in one command."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

#: Hides all packages of this repository but the engine and those that the arguments name.
PARTIAL = """
import importlib.metadata, sys

kept, distributions = {"stratagem-core", *sys.argv[1:]}, importlib.metadata.distributions
found = [each for each in distributions() if each.name.startswith("stratagem-") and each.name in kept]
importlib.metadata.distributions = lambda: found
modules = {f"stratagem_{name.removeprefix('stratagem-').replace('-', '_')}" for name in kept}

class Absent:
    def find_spec(name, *_):
        if name == "stratagem_trainer" and name not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent)
"""

#: What somebody may try first.
TRIED = {
    "Trainer": "import stratagem as sg; sg.Trainer",
    "Run": "import stratagem as sg; sg.Run(strategy='ddp', devices=2)",
    "class": "from stratagem.strategies import DDPStrategy",
    "command": "from stratagem.cli import main; sys.exit(main(['fit', 'run.yaml']))",
}
WORKS = """
import stratagem as sg
if "stratagem-trainer" in kept:
    sg.Trainer(max_epochs=1, devices=2, accelerator="cpu", enable_model_summary=True, compile=True)
    sg.Trainer(max_epochs=1, accelerator="cpu")
sg.Run(strategy="ddp", devices=2, accelerator="cpu")
"""


def said(code, *kept):
    command = [sys.executable, "-c", PARTIAL + code, *kept]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.rstrip()


@pytest.mark.parametrize("tried", TRIED)
def test_one_command_installs_all_that_is_missing(tried):
    whole, only = re.findall("`pip install ([^`]*)`", said(TRIED[tried]).splitlines()[-1])

    assert whole == "stratagem"
    assert said(WORKS, *only.split()) == ""


def test_what_is_installed_is_not_named():
    parts = ["stratagem-basics", "stratagem-ddp", "stratagem-checkpoints", "stratagem-libraries", "stratagem-trainer"]
    code = "import stratagem as sg; sg.Trainer(accelerator='cpu')"

    assert said(code, *parts).endswith("run `pip install stratagem-callbacks`.")
    assert said(code, *parts[1:]).endswith(
        "run `pip install stratagem`, or only `pip install stratagem-basics stratagem-callbacks`."
    )


def test_a_package_that_the_distribution_lacks_is_named_with_it():
    code = "import stratagem as sg; sg.Run(accelerator='tpu')"

    assert "run `pip install stratagem stratagem-xla`, or only `pip install stratagem-xla stratagem-" in said(code)
