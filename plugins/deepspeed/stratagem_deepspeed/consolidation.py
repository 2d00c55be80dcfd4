"""Consolidate the partitions that DeepSpeed's ranks wrote into whole fp32 weights."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stratagem.api.json_tree import encode
from stratagem.api.paths import as_path
from stratagem.checkpoint.background_save import SingleProcessRun
from stratagem.errors import CheckpointError
from stratagem_deepspeed import folder, start

#: The key of the run's state besides weights and optimizer.
REST = "stratagem"
#: Keys that DeepSpeed itself writes.
_DEEPSPEEDS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "universal_checkpoint_info", "num_experts", "ds_autoep_layers",
}  # fmt: skip
#: The prefix that some trainers add to every name.
_PREFIX = "_forward_module."
_NARROW = (torch.float16, torch.bfloat16)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path, output_file: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, Any]:
    """Write one file of fp32 weights, and the trainer's other state, from a checkpoint folder of DeepSpeed's.

    The folder has pickles, which are executed: call it only for folders that you trust. ``torch.load(output_file,
    weights_only=True)["state_dict"]`` are the weights, which every strategy reads; the optimizer is not included.

    Args:
        checkpoint_dir: the folder with the file ``latest``, of any stage, by any program; or a file of the format
            "full", which is the default and whole under every strategy and at every stage.
        output_file: where to write.
        tag: the name of the subfolder; by default the one in ``latest``.
        exclude_frozen_parameters: leave out parameters that are not trained.

    Returns:
        The contents of the file.

    Raises:
        CheckpointError: it is not such a folder, or not complete.
    """
    from stratagem.checkpoints import FullCheckpoint

    path = as_path(checkpoint_dir)
    state = _whole_already(path, tag, exclude_frozen_parameters) or consolidate(path, tag, exclude_frozen_parameters)
    FullCheckpoint().save_checkpoint(state=state, path=as_path(output_file), run=SingleProcessRun())
    return state


def _whole_already(path: Path, tag: str | None, exclude_frozen: bool) -> dict[str, Any] | None:
    """Return what is to be written of `path`, if it is a checkpoint that has whole weights; None if it is not."""
    from stratagem.checkpoints import FullCheckpoint

    if not FullCheckpoint().recognises(path):
        return None
    state = FullCheckpoint().load_checkpoint(path=path, run=SingleProcessRun())
    if tag is not None or exclude_frozen:
        option = "tag" if tag is not None else "exclude_frozen_parameters"
        raise CheckpointError(f"{path} is not a folder of DeepSpeed's, and {option} was given", expected="neither",
                              do="leave it out: the checkpoint has whole weights already")  # fmt: skip
    kept = ("state_dict", "hyper_parameters", "hparams_name", "hparams_left_out", "format")
    whole = {n: value.float() if value.is_floating_point() else value for n, value in state["state_dict"].items()}
    return {name: state[name] for name in kept if name in state} | {"state_dict": whole}


def consolidate(path: Path, tag: str | None = None, exclude_frozen: bool = False) -> dict[str, Any]:
    """Return the weights and the trainer's other state. Executes the pickles' code.

    Raises:
        CheckpointError: it is not a folder of DeepSpeed's, or not complete.
    """
    facts = None
    if folder.is_ours(path):
        facts = folder.read_manifest(path)
        folder.verify(path, facts)
    elif tag is None or not (path / tag).is_dir():
        folder.check_place(path)
    tag = folder.tag_in(path) if tag is None else tag
    if "deepspeed" not in sys.modules:
        start.load("cuda" if torch.cuda.is_available() else "cpu")
    saved = _load(folder.model_file(path, tag))
    whole = weights(path, tag, facts, exclude_frozen, saved)
    return _beside(saved, path) | {"state_dict": whole}


def weights(
    path: Path,
    tag: str,
    facts: Mapping[str, Any] | None,
    exclude_frozen: bool = False,
    saved: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the whole weights by the names of the user's module, as far as `facts` has them.

    Raises:
        CheckpointError: a file is missing or damaged, or has objects that `folder.as_data` refuses.
    """
    saved = _load(folder.model_file(path, tag)) if saved is None else saved
    found: dict[str, Any] = _collated(path, tag, exclude_frozen) if folder.has_shards(path, tag) else {}
    prefix = "" if facts is None else facts["prefix"]
    for alias, name in ({} if facts is None else facts["tied"]).items():
        if prefix + name in found:
            found.setdefault(prefix + alias, found[prefix + name])
    found |= _not_sharded(saved, set(found), exclude_frozen, folder.has_placeholders(path, tag), path)
    order = [name for name in saved["module"] if name in found]
    whole = {name: _widened(found[name]) for name in dict.fromkeys([*order, *found])}
    if facts is None and all(name.startswith(_PREFIX) for name in whole):
        prefix = _PREFIX
    return {name.removeprefix(prefix): value for name, value in whole.items()}


def _not_sharded(
    saved: Mapping[str, Any], found: set[str], exclude_frozen: bool, has_placeholders: bool, path: Path
) -> dict[str, Any]:
    """Return the whole tensors of rank 0's file: buffers in their own dtype, and parameters in no optimizer."""
    buffers = set(saved.get("buffer_names") or ())
    own = {
        name: value for name, value in saved["module"].items() if name in buffers or not isinstance(value, torch.Tensor)
    }
    rest = {name: value for name, value in saved["module"].items() if name not in own and name not in found}
    if exclude_frozen:
        return own
    if rest and has_placeholders:
        warnings.warn(
            f"{path} lacks {', '.join(rest)}: at stage 3 DeepSpeed saves only trained or frozen parameters",
            stacklevel=2,
        )
        return own
    return own | rest


def _collated(path: Path, tag: str, exclude_frozen: bool) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    quiet = io.StringIO()
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            return dict(get_fp32_state_dict_from_zero_checkpoint(str(path), tag, exclude_frozen))
    except Exception as error:
        raise unreadable(path, error) from error


def _load(file: Path) -> dict[str, Any]:
    try:
        mapped = zipfile.is_zipfile(file)
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", mmap=mapped, weights_only=False)
    except Exception as error:
        raise unreadable(file, error) from error
    return loaded


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error to raise after DeepSpeed or torch failed to read `path`."""
    text = str(error).strip().splitlines()
    return CheckpointError(
        f"{path} cannot be read ({type(error).__name__}: {text[0][:160] if text else 'no reason given'})",
        expected="all files that DeepSpeed wrote, undamaged", do="use another checkpoint",
    )  # fmt: skip


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _NARROW else value


def _beside(saved: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the trainer's state beside the weights, as far as it can be saved without pickles."""
    if REST in saved:
        rest: dict[str, Any] = dict(saved[REST])
        return rest
    kept, dropped = {}, []
    for key, value in saved.items():
        if key in _DEEPSPEEDS:
            continue
        try:
            encode(value, lambda *_: 0, key)
            kept[key] = value
        except CheckpointError as error:
            dropped.append(error.found)
    if dropped:
        warnings.warn(f"{path}: {'; '.join(dropped)}, which a file without pickles cannot store", stacklevel=2)
    return kept
