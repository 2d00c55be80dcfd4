"""A temporary file that the processes of a node fill together and map."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem.checkpoint.state_checks import on_all_ranks
from stratagem.errors import CheckpointError

if TYPE_CHECKING:
    from stratagem.api import RunContext


@contextlib.contextmanager
def shared_file(path: Path, size: int, run: RunContext) -> Iterator[Path]:
    """Within: a file of `size` bytes for tensors of `path`, which the processes of a node share. Collective.

    Raises:
        CheckpointError: there is no space for it; on all ranks.
    """
    assert run.world is not None, "set before collectives exist"
    node, is_first = run.world.node_rank, run.world.local_rank == 0
    with contextlib.ExitStack() as at_end:

        def create() -> str:
            with enough_space(path, size):
                descriptor, name = tempfile.mkstemp(prefix="stratagem-", suffix=".bin")
                at_end.callback(os.unlink, name)
                with open(descriptor, "wb") as file:
                    file.truncate(size)
            return name

        name = on_all_ranks(run.collectives, lambda: create() if is_first else None)
        names = {node: each for node, each in run.collectives.all_gather_object((node, name)) if each}
        yield Path(names[node])


@contextlib.contextmanager
def enough_space(path: Path, size: int) -> Iterator[None]:
    """Within: the file is created or written; explain an error of the file system."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{tempfile.gettempdir()} is too small for the {size} bytes of {path} ({error.strerror or error})",
            do="set TMPDIR to a folder with enough free space",
        ) from error
