"""DeepSpeed's own checkpoint folder as a checkpoint format.

[Note: state in the engine]
The engine itself writes weights, the optimizer, its scheduler and the loss scale, each rank its partition. So the
strategy returns an `EngineState` as the state of model and optimizer: names and shapes, and the engine that has the
values. A checkpoint is read before there is an engine: then an `EngineState` refers to the folder, and the strategy
passes it to the engine that it makes. The rest of the run's state is in rank 0's file, as DeepSpeed's client state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define

from stratagem.api import Capabilities, CheckpointFormat, hookimpl
from stratagem.api.json_tree import decode, encode
from stratagem.api.paths import is_remote, modified_at
from stratagem.checkpoint.atomic import StagedFolder, explained, remove_folder, writing
from stratagem.checkpoint.background_save import SingleProcessRun
from stratagem.checkpoint.rank_rows import gathered
from stratagem.checkpoint.state_checks import from_first, together
from stratagem.errors import CheckpointError
from stratagem_deepspeed import consolidation, engine_state, folder
from stratagem_deepspeed.engine_state import EngineState
from stratagem_deepspeed.options import DeepSpeedOptions

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: The capability of strategies whose checkpoints DeepSpeed can write.
ENGINE = "deepspeed-engine"


@define(eq=False, kw_only=True)
class DeepSpeedFormat(CheckpointFormat):
    """The folder that DeepSpeed's engine writes, for runs of this strategy only.

    See [Note: state in the engine]. It is resumed with the stage, precision and number of processes that wrote it.
    ``stratagem checkpoint consolidate --trust`` makes a file of its weights that every strategy reads.
    """

    suffix: ClassVar[str] = ".ds"
    takes_shards: ClassVar[bool] = True
    reads_pickles: ClassVar[bool] = True
    capabilities: ClassVar[Capabilities] = Capabilities(requires={ENGINE})

    @hookimpl
    def save_checkpoint(self, state: dict[str, Any], path: Path, run: RunContext) -> bool:
        staged = StagedFolder(path)
        if "ranks" in state:
            state = state | {"ranks": gathered(state["ranks"], run)}

        @writing(path)
        def begun() -> tuple[EngineState, dict[str, Any]]:
            held = _held(state, path)
            rest = _plain({key: value for key, value in state.items() if key not in ("state_dict", "optimizers")})
            if run.is_global_zero:
                staged.begin(folder.is_ours, folder.files_at)
            return held, rest

        try:
            _write(*together(run.collectives, begun), staged, run)
        finally:
            staged.clear_away()
        return True

    @hookimpl
    def load_checkpoint(self, path: Path, run: RunContext) -> dict[str, Any]:
        def fitting() -> dict[str, Any]:
            facts = folder.read_manifest(path)
            _check_fits(facts, path, run)
            return facts

        def verified() -> dict[str, Any] | None:
            folder.verify(path, facts, run.rank, run.world_size)
            return _read_rest(path) if run.is_global_zero else None

        facts = from_first(run.collectives, fitting)
        rest: dict[str, Any] = run.collectives.broadcast_object(together(run.collectives, verified))
        held = EngineState(engine_state.without_values(facts["tensors"]), facts, path=path)
        return rest | {"state_dict": held, "optimizers": [held]}

    def consolidate(self, path: Path) -> dict[str, Any]:
        return consolidation.consolidate(path)

    def recognises(self, path: Path) -> bool:
        return folder.looks_like_one(path)

    def is_whole(self, path: Path) -> bool:
        return folder.is_whole(path)

    def saved_at(self, path: Path) -> float:
        return modified_at(path / (folder.MANIFEST if folder.is_ours(path) else folder.LATEST))

    def remove(self, path: Path) -> None:
        if not folder.is_ours(path):
            raise CheckpointError(f"{path} was not written by stratagem", do="nothing was deleted")
        others = sorted(set(folder.files_in(path)) - set(folder.read_manifest(path)["files"]))
        if others:
            raise CheckpointError(f"{path} has files that are not part of the checkpoint: {', '.join(others)}",
                                  do="nothing was deleted")  # fmt: skip
        remove_folder(path, folder.files_at(path))


def takes_over(run: RunContext) -> bool:
    """Whether the engine writes the checkpoint, and no caller needs whole tensors."""
    return isinstance(run.checkpoint_format, DeepSpeedFormat) and not run.whole_state


# --- Writing -----------------------------------------------------------------------------------------------------


def _held(state: Mapping[str, Any], path: Path) -> EngineState:
    """Return the `EngineState` of the model in `state`, checked.

    Raises:
        CheckpointError: DeepSpeed cannot write it.
    """
    held = state["state_dict"]
    if is_remote(path):
        raise CheckpointError(f"{path} is a URL", expected="a local folder, the only place to which DeepSpeed writes",
                              do="save to a folder, or in another format")  # fmt: skip
    if not isinstance(held, EngineState) or held.engine is None:
        raise CheckpointError(
            "there is no engine that can write the state", expected="a run of the strategy deepspeed that trains",
            do="save in another format",
        )  # fmt: skip
    given = [name for name, value in held.items() if isinstance(value, torch.Tensor) and not value.is_meta]
    if given or held.keys() != held.facts["tensors"].keys():
        raise CheckpointError(
            f"on_save_checkpoint changed the weights ({', '.join(given) or 'their names'}), which the engine writes",
            expected="changes of other keys only", do="save in another format",
        )  # fmt: skip
    if "optimizers" not in state:
        raise CheckpointError(
            "weights_only=True was passed, and DeepSpeed writes weights together with the optimizer",
            expected="weights_only=False", do="save in another format, or consolidate the checkpoint",
        )  # fmt: skip
    _check_engine(held)
    return held


def _check_engine(held: EngineState) -> None:
    writer, stage, untrained = held.engine.checkpoint_engine, held.facts["stage"], held.facts["untrained"]
    if not getattr(writer, "zipfile_serialization", False):
        raise CheckpointError(
            f"DeepSpeed is configured to write with {type(writer).__name__}, in another serialization than torch's",
            expected="torch's serialization",
            do='drop "datastates_ckpt", and "writer" and "checkpoint_serialization" of "checkpoint"',
        )  # fmt: skip
    if held.engine.use_node_local_storage():
        raise CheckpointError(
            "use_node_local_storage is true in the configuration",
            expected="a folder that all ranks share",
            do="drop it",
        )
    if stage == 3 and untrained:
        raise CheckpointError(
            f"{', '.join(untrained)} is in no optimizer, and at stage 3 DeepSpeed saves only trained or frozen ones",
            expected="requires_grad=False for it, or an optimizer", do="save in another format",
        )  # fmt: skip


def _plain(rest: dict[str, Any]) -> dict[str, Any]:
    """Return `rest` as it will be read back, without pickles.

    Raises:
        CheckpointError: a value is not a tensor, number, text or container; names its path.
    """
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor, _: str) -> int:
        tensors.append(tensor.cpu())
        return len(tensors) - 1

    plain: dict[str, Any] = decode(encode(rest, keep), tensors)
    return plain


def _write(held: EngineState, rest: dict[str, Any], staged: StagedFolder, run: RunContext) -> None:
    """Write with the engine into the staged folder, and publish it. Collective."""
    error, facts = None, held.facts
    try:
        held.engine.save_checkpoint(
            str(staged.path), tag=folder.TAG, exclude_frozen_parameters=facts["without_frozen"],
            client_state={consolidation.REST: rest} if run.is_global_zero else {},
        )  # fmt: skip
    except Exception as caught:  # noqa: BLE001 - torch raises various errors when a disk is full
        error = _unwritable(caught, staged.target)
        torch.distributed.barrier()  # the other ranks wait in the engine's last barrier
    run.collectives.fail_together(error)

    @writing(staged.target)
    def sealed() -> dict[str, Any]:
        names = folder.files_in(staged.path)
        return folder.seal(staged.path, names[run.rank :: run.world_size])

    @writing(staged.target)
    def publish() -> None:
        files = {name: entry for each in everybody for name, entry in each.items()}
        folder.write_manifest(staged.path, facts | {"files": files})
        staged.publish()

    everybody = run.collectives.all_gather_object(together(run.collectives, sealed))
    together(run.collectives, lambda: publish() if run.is_global_zero else None)


def _unwritable(error: Exception, path: Path) -> CheckpointError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # torch raises its own error from it
        cause = cause.__cause__ or cause.__context__
    return explained(cause if isinstance(cause, OSError) else error, path)


# --- Reading -----------------------------------------------------------------------------------------------------


def _check_fits(facts: Mapping[str, Any], path: Path, run: RunContext) -> None:
    """Refuse a folder from which the run's strategy cannot resume.

    Raises:
        CheckpointError: another stage, precision or number of processes wrote it, or the strategy is another one.
    """
    if isinstance(run, SingleProcessRun):
        return
    strategy = run.strategy
    if getattr(strategy, "load_full_weights", False):
        raise CheckpointError(
            f"strategy.deepspeed.load_full_weights is True and {path} is sharded", expected="a file of whole weights",
            do=f"`stratagem checkpoint consolidate --trust {path} FILE` makes one, or drop the option",
        )  # fmt: skip
    wrote = (facts["stage"], facts["world_size"], facts["dtype"])
    if isinstance(strategy, DeepSpeedOptions):
        dtype = str(strategy.engine_dtype(run.policy) or torch.float32).removeprefix("torch.")
        here = (strategy.zero_stage, run.world_size, dtype)
        expected = f"{_place(*here)} as in this run"
    else:
        here, expected = None, f"a checkpoint that {run.title_of(run.strategy)} can read"
    if here != wrote:
        raise CheckpointError(
            f"{path} was written by DeepSpeed at {_place(*wrote)}, and its own format requires the same to read it",
            expected=expected,
            do=f"`stratagem checkpoint consolidate --trust {path} FILE` makes a file of its weights for all "
            "strategies; or resume with the settings that wrote it, and save in another format",
        )


def _place(stage: int, world_size: int, dtype: str) -> str:
    return f"stage {stage}, by {world_size} process{'es' * (world_size > 1)}, in {dtype}"


def _read_rest(path: Path) -> dict[str, Any]:
    """Return the run's state besides weights and optimizer; no code of the file is executed."""
    file = folder.model_file(path, folder.TAG)
    try:
        saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        rest: dict[str, Any] = saved[consolidation.REST]
    except Exception as error:
        raise consolidation.unreadable(path, error) from error
    return _plain(rest)  # independent of the mapped file
