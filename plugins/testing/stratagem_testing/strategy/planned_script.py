"""Train what a check of the kit has pickled: the script that `stratagem plan` plans."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from stratagem_testing.strategy.plans import fit

if __name__ == "__main__":
    fit(*pickle.loads(Path(sys.argv[1]).read_bytes()))  # noqa: S301 - our own bytes
