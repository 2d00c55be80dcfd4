"""What somebody with a part of the packages is told: the command that installs all that a run may need."""

from __future__ import annotations

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
    "Run, with a comm hook": """
import stratagem as sg
try:
    sg.Run(strategy='ddp', devices=2)
except sg.StratagemError as error:
    assert "run `pip install stratagem`" in str(error), error
sg.Run(comm_hook='int8')
""",
    "class": "from stratagem.strategies import DDPStrategy",
    "command": "from stratagem.cli import main; sys.exit(main(['fit', 'run.yaml']))",
}


def said(code, *kept):
    command = [sys.executable, "-c", PARTIAL + code, *kept]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.rstrip()


@pytest.mark.parametrize("tried", TRIED)
def test_one_command_installs_all_that_is_missing(tried):
    assert "run `pip install stratagem`" in said(TRIED[tried]).splitlines()[-1]


def test_a_single_package_is_named_too_and_one_that_the_distribution_lacks_alone():
    parts = ["stratagem-basics", "stratagem-ddp", "stratagem-checkpoints", "stratagem-libraries", "stratagem-trainer"]
    trainer, tpu = (
        "import stratagem as sg; sg.Trainer(accelerator='cpu')",
        "import stratagem as sg; sg.Run(comm_hook=None, accelerator='tpu')",
    )

    assert said(trainer, *parts).endswith(
        "run `pip install stratagem`; for this alone, run `pip install stratagem-callbacks`."
    )
    assert said("import stratagem as sg; sg.Trainer(comm_hook='int8')", "stratagem-trainer").endswith(
        "kind 'comm_hook' is not installed; run `pip install stratagem`; for this alone, run `pip install "
        "stratagem-libraries`."
    )
    assert said(tpu).endswith("is not installed; run `pip install stratagem-xla`.")
