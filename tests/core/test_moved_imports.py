"""What another trainer's packages have, and stratagem does not, is told in one sentence where it is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stratagem as sg
from stratagem.discovery.catalog import moved_names


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("from stratagem.utilities import rank_zero_only", "use stratagem.rank_zero_only"),
        ("from stratagem.utilities.rank_zero import rank_zero_only", "use stratagem.rank_zero_only"),
        ("import stratagem.plugins", 'Trainer(precision="bf16-mixed"'),
        ("from stratagem import plugins", 'Trainer(precision="bf16-mixed"'),
        ("from stratagem.profilers import SimpleProfiler", 'Trainer(profiler="simple")'),
        ("from stratagem.tuner import Tuner", 'callbacks=["learning_rate_finder"]'),
        ("from stratagem import Trainer, Fabric", "stratagem has no 'Fabric'; use stratagem.Run; Run.launch(main)"),
        ("from stratagem import LightningModule", "use stratagem.Module"),
        ("from stratagem import ModelCheckpoint", "use the callback 'model_checkpoint'"),
        ("from stratagem import XLAStrategy", "pip install stratagem-xla"),
    ],
)
def test_an_import_tells_the_counterpart(code, told):
    with pytest.raises(ImportError) as error:
        exec(code, {})
    assert told in str(error.value)


def test_each_name_and_module_is_told_and_no_attribute():
    for name in [*moved_names("names"), *moved_names("modules")]:
        if name not in sg.__all__:
            with pytest.raises(ImportError, match=f"stratagem has no '{name}'; ..."):
                exec(f"from stratagem import {name}", {})
            assert not hasattr(sg, name)


def test_others_are_pythons_own_errors():
    with pytest.raises(ModuleNotFoundError, match="No module named 'stratagem.nothing'"):
        exec("import stratagem.nothing", {})
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from stratagem import Nothing", {})
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sg.nothing
    from stratagem import callbacks

    assert callbacks.__name__ == "stratagem.callbacks"


def test_importing_modules_of_ours_reads_no_table():
    code = "import sys; import stratagem; from stratagem import errors; print('tomllib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
