"""Write a model's weights for other programs: a folder of Hugging Face, or a plain file of `torch.save`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stratagem.api.paths import replacing
from stratagem.checkpoint.atomic import StagedFolder
from stratagem.errors import ConfigError

#: Hugging Face's names: of a single file, of one of several, and of the index that tells which tensor is in which.
_ONE, _PART, _INDEX = "model.safetensors", "model-{:05}-of-{:05}.safetensors", "model.safetensors.index.json"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def write_huggingface(target: Path, weights: Mapping[str, Tensor], max_shard_size: str | None = None) -> None:
    """Write `weights` to files of at most `max_shard_size`, such as "5GB" (the default); to several with an index.

    A tensor that is larger gets a file of its own.

    Raises:
        ConfigError: the size is not one, or the library safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        do = 'run `pip install "stratagem-tools[safetensors]"`'
        raise ConfigError("--to huggingface needs the library safetensors", do=do) from error
    shards = _divided(weights, _bytes_in(max_shard_size or "5GB"))
    names = [_PART.format(number, len(shards)) for number in range(1, len(shards) + 1)] if len(shards) > 1 else [_ONE]
    staged = StagedFolder(target)
    try:
        staged.begin(lambda _: False, lambda _: set())
        for name, shard in zip(names, shards, strict=True):
            save_file(_separate(shard), staged.path / name, metadata={"format": "pt"})
        if len(shards) > 1:
            files = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
            index = {"metadata": {"total_size": sum(map(_size, weights.values()))}, "weight_map": files}
            (staged.path / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        staged.publish()
    finally:
        staged.clear_away()


def write_state_dict(target: Path, weights: Mapping[str, Tensor], _: str | None = None) -> None:
    """Write what ``torch.save(model.state_dict(), target)`` writes: one file, whatever its size."""
    with replacing(target) as file:
        torch.save(dict(weights), file)


def _divided(weights: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Return `weights` in their order, in parts of at most `limit` bytes or of one tensor."""
    shards: list[dict[str, Tensor]] = [{}]
    left = limit
    for name, value in weights.items():
        if shards[-1] and _size(value) > left:
            shards.append({})
            left = limit
        shards[-1][name] = value
        left -= _size(value)
    return shards


def _separate(shard: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, as the library wants them: tied ones are written twice."""
    seen: set[int] = set()
    result = {}
    for name, value in shard.items():
        place = value.untyped_storage().data_ptr()
        result[name] = value.clone().contiguous() if place in seen else value.contiguous()
        seen.add(place)
    return result


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes_in(text: str) -> int:
    match = re.fullmatch(r"(\d+) *([A-Z]*)", text.upper())
    if match is None or match[2] not in _UNITS or not int(match[1]):
        raise ConfigError(f"--max-shard-size is {text!r}", expected='a size such as "5GB", "500MB" or "2GiB"')
    return int(match[1]) * _UNITS[match[2]]
