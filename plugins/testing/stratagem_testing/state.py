"""Checks of a plugin's state: the functions that run in each process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import stratagem as sg
from stratagem_testing.reference import joined_batches
from stratagem_testing.training import in_empty_folder, share, shared_loader

_BATCH = 24
_LOADERS = {"state_dict": "load_state_dict", "rank_state": "load_rank_states"}


def resume_each(
    rank: int, size: int, choose: dict[str, Any], make: Any, cls: type[Any], wanted: list[str],
    others: list[tuple[str, dict[str, Any]]], folder: Path,
) -> list[str]:  # fmt: skip
    """Save a run with `choose`, and resume it with each of `others`; return which state of a `cls` was not restored.

    `wanted` are the methods with which it saves. Patches `cls`: call it in a process that ends afterwards.
    """
    loaded: list[str] = []
    for method in wanted:
        load = _LOADERS[method]
        assert callable(getattr(cls, load, None)), f"{cls.__name__} has {method} and not {load}"
        setattr(cls, load, _recording(getattr(cls, load), method, loaded))
    dropped, path = list[str](), folder / "saved.ckpt"
    with in_empty_folder():
        kept = [_fit(choose | {"default_root_dir": folder}, make, None, path)]  # so that no other object gets its id
        for name, other in others:
            loaded.clear()
            kept.append(_fit(other | {"default_root_dir": folder}, make, path, None))
            dropped += [f"{method} when selected as {name}" for method in wanted if method not in loaded]
    return dropped


def _recording(load: Any, method: str, loaded: list[str]) -> Any:
    @functools.wraps(load)
    def recording(self: Any, *arguments: Any, **named: Any) -> Any:
        loaded.append(method)
        return load(self, *arguments, **named)

    return recording


def _fit(arguments: dict[str, Any], make: Any, resumed: Any, saved: Any) -> sg.Trainer:
    """Train an epoch, or resume one that has ended; save it as `saved` if that is a path."""
    trainer = sg.Trainer(**arguments)
    batches = joined_batches(2, _BATCH)
    mine = (
        share(trainer, batches) if arguments.get("use_distributed_sampler", True) else shared_loader(trainer, batches)
    )
    trainer.fit(make(), mine, mine, ckpt_path=resumed)
    if saved is not None:
        trainer.save_checkpoint(saved)
    trainer.close()
    return trainer
