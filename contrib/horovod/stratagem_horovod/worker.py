"""One process that the launcher started with horovodrun: ``python -m stratagem_horovod.worker FOLDER``."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

from stratagem.distributed.launched import report
from stratagem.distributed.process_variables import process_variables
from stratagem_horovod.address import with_address
from stratagem_horovod.variables import RANK, number, read_place

#: Seconds in which rank 0 must have imported its modules.
_START_S = 300.0


def work(folder: Path) -> None:
    """Call the function that the launcher packed, with the variables of this process set; save rank 0's result."""
    world = with_address(read_place(os.environ), os.environ, _START_S)
    os.environ.update(process_variables(world))
    main = pickle.loads((folder / "main.pickle").read_bytes())  # noqa: S301 - the launcher wrote it
    result = main()
    if world.rank == 0:
        import cloudpickle
        import torch

        torch.save(result, folder / "result.pt", pickle_module=cloudpickle)


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        sys.path += [path for path in json.loads((folder / "path.json").read_text()) if path not in sys.path]
        work(folder)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            report(stop, number(os.environ, RANK), folder)
            raise
    except BaseException as error:  # the launcher raises it
        if not folder.exists():  # on a host that does not share the folder
            raise
        report(error, number(os.environ, RANK), folder)
        sys.exit(1)


if __name__ == "__main__":
    main()
