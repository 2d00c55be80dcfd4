"""Continue from a checkpoint that Lightning 2 wrote: turn its state into what `trainer_state.restore` applies.

[Note: Lightning's checkpoint]
Optimizer states are numbered as in ``optimizer.state_dict()``: the numbers become the names of the parameters that this
run's `configure_optimizers` passes. (Lightning's FSDP numbers the parameters of the model, or uses names.) Progress is
in four counters for each loop: ``ready``, ``started``, ``processed`` and ``completed``. Which of them a save has
counted depends on the hook that saved; ``started`` of the epochs and ``processed`` of the batches are right in all of
them. Schedulers of an epoch have stepped when its last batch is processed, so such an epoch counts as ended.

Lightning saves no random states, no metrics of the epoch so far, and no gradients of an open accumulation window: the
window's batches are trained again.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stratagem.api.seeding import random_state
from stratagem.checkpoint.state_checks import errors_naming
from stratagem.errors import CheckpointError
from stratagem.stack import identity
from stratagem_trainer.combined_loader import CombinedLoader
from stratagem_trainer.module import overrides
from stratagem_trainer.progress import LIGHTNING_VERSION, Position

if TYPE_CHECKING:
    from torch import nn

    from stratagem_trainer.fit_state import FitState

#: A callback's key: its class, and the options that tell it from others of its class.
_KEY = re.compile(r"(?P<name>[\w.]+)(?P<options>\{.*\})?")
#: The options by which two callbacks of a class differ.
_WATCHED = {"monitor", "mode"}
#: Entries of a checkpoint that are read here, or that say nothing beside them.
_KNOWN = {
    LIGHTNING_VERSION, "epoch", "global_step", "state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers",
    "hyper_parameters", "hparams_name", "hparams_type", "hparams_left_out", "datamodule_hyper_parameters",
    "datamodule_hparams_name", "datamodule_hparams_type", "current_model_state", "averaging_state", "datamodule",
}  # fmt: skip


def translated(fit: FitState, state: dict[str, Any], path: Any) -> dict[str, Any]:
    """Return the `state` that Lightning wrote to `path` as this trainer saves one; prints what is taken. Collective.

    Entries are taken out of `state`. Of a checkpoint with weights only, weights are returned.

    Raises:
        CheckpointError: something in it is not what Lightning 2 writes, or fits another optimizer.
    """
    version, weights = state[LIGHTNING_VERSION], state.pop("state_dict")
    average = weights if "current_model_state" in state else None
    result: dict[str, Any] = {"state_dict": state.pop("current_model_state", weights)}
    if "loops" not in state or "optimizer_states" not in state:
        return result
    taken, left = ["weights"], list(state.pop("left_out", ()))
    result["format"] = {"name": "lightning", "lightning": str(version)}
    with errors_naming(f"{path}: loops"):
        position, feed = _position(fit, state)
    with errors_naming(f"{path}: optimizer_states"):
        result["optimizers"] = [
            _by_name(fit, number, saved, f"{path}: optimizer_states[{number}]")
            for number, saved in enumerate(state.pop("optimizer_states"))
        ]
    result["lr_schedulers"] = list(state.get("lr_schedulers", ()))
    result["loop"] = position.state_dict()
    result["ranks"] = [_of_rank(fit, feed)] * fit.run.world_size
    taken += [
        f"optimizer states ({len(result['optimizers'])})", f"scheduler states ({len(result['lr_schedulers'])})",
        f"progress (epoch {position.epoch}, batch {position.batches_done}, step {position.global_step})",
    ]  # fmt: skip
    with errors_naming(f"{path}: callbacks"):
        result["callbacks"], unused = _callbacks(fit, state, average)
    result["plugins"] = _loss_scale(fit, state)
    taken += [f"state of {_title(key)}" for key in (*result["callbacks"], *result["plugins"])]
    left += [f"state of {key}" for key in unused]
    left += [] if result["plugins"] or not _scalers(state) else ["the loss scale"]
    if not overrides(fit.module, "on_load_checkpoint"):  # which may have used them
        left += [key for key in state if key not in _KNOWN and key not in _scalers(state)]
    fit.run.print(
        f"stratagem: {path} was written by Lightning {version}. Taken: {', '.join(taken)}. Not in it: random states"
        + (f". Not taken: {', '.join(left)}" if left else ""),
        flush=True,
    )
    return result


# --- Progress ----------------------------------------------------------------------------------------------------


def _position(fit: FitState, state: Mapping[str, Any]) -> tuple[Position, dict[str, Any]]:
    """Return the progress, and what the batches of the epoch continue from; see [Note: Lightning's checkpoint]."""
    loop = state["loops"]["fit_loop"]
    batches = loop["epoch_loop.batch_progress"]
    processed, total = batches["current"]["processed"], batches["total"]["processed"]
    ended = bool(processed and batches["is_last_batch"])
    position = Position(
        epoch=max(loop["epoch_progress"]["current"]["started"] - 1, 0), global_step=state["global_step"],
        batches_done=processed, batches_of_earlier_epochs=max(total - processed, 0), epoch_done=ended,
        epoch_ended=ended,
    )  # fmt: skip
    if ended:
        return position, {}
    if not fit.run.manual:
        position.batches_done -= processed % fit.accumulation_in(position.epoch)
    loaders = loop["state_dict"].get("combined_loader", [])
    single = len(loaders) == 1 and not isinstance(fit.train_batches and fit.train_batches.loader, CombinedLoader)
    if not single or position.batches_done != processed:
        return position, {}
    return position, {"marks": {processed: {"loader": loaders[0]}}, "accumulate": 1}


def _of_rank(fit: FitState, feed: dict[str, Any]) -> dict[str, Any]:
    """Return what each rank saves, as far as Lightning has it; the random states are those of now."""
    batches = fit.train_batches
    return {
        "mesh": dict(fit.run.mesh.axes), "buffers": {}, "epoch_start": None, "metrics": {}, "callback_metrics": {},
        "random": random_state(fit.run.devices) if batches is None else batches.random_state(),
        "feed": feed, "plugins": {},
    }  # fmt: skip


# --- Optimizers --------------------------------------------------------------------------------------------------


def _by_name(fit: FitState, number: int, saved: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the optimizer state `saved` by the names of parameters. Collective."""
    groups = saved["param_groups"]
    used = [each for group in groups for each in group["params"]]
    if used and all(isinstance(each, str) for each in used):
        return dict(saved)
    names = _names(fit, number, used, where)
    return {
        "state": {names[each]: entry for each, entry in saved["state"].items()},
        "param_groups": [{**group, "params": [names[each] for each in group["params"]]} for group in groups],
    }


def _names(fit: FitState, number: int, used: list[int], where: str) -> list[str]:
    """Return the parameters' names by their numbers `used`; see [Note: Lightning's checkpoint]. Collective."""
    names = [name for name, _ in fit.module.named_parameters()]
    if used == list(range(len(used))) and number < len(fit.run.optimizers):
        own = fit.run.ask("optimizer_state", optimizer=fit.run.optimizers[number], module=fit.module)
        names = [name for group in own["param_groups"] for name in group["params"]]
    if len(used) > len(names):
        raise CheckpointError(
            f"{where} has {len(used)} parameters", expected=f"{len(names)}, as in this run",
            do="resume with the optimizers that wrote it, or load only the weights",
        )  # fmt: skip
    return names


# --- Callbacks and loss scale ------------------------------------------------------------------------------------


def _callbacks(
    fit: FitState, state: Mapping[str, Any], average: Mapping[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the states of this run's callbacks, and Lightning's keys that none of them uses.

    A callback gets the state of the class with its name that watches the same metric. A first-party callback has a
    translation, another one gets the state as it is if it has all that the callback saves.
    """
    saved = {key: value for key, value in state.get("callbacks", {}).items() if value}
    found: dict[str, Any] = {}
    for key, plugin in identity.plugins_by_key(fit.run.stack, "state_dict"):
        if not key.startswith("callback."):
            continue
        classes = [cls.__name__ for cls in type(plugin).__mro__]
        theirs = _of_class(saved, {classes[0], _RENAMED.get(classes[0])}, plugin)
        translation = next((_TRANSLATIONS[name] for name in classes if name in _TRANSLATIONS), _as_it_is)
        value = None if theirs is None else translation(plugin, saved[theirs])
        if "WeightAveraging" in classes:
            value = None if average is None else _average(fit.module, average, state)
        if value is not None:
            found[key] = value
            saved.pop(theirs or "", None)
    return found, list(saved)


def _of_class(saved: Iterable[str], names: set[str | None], plugin: Any) -> str | None:
    """Return the key in `saved` that is the one of `plugin`, or of a class in `names` that watches the same metric."""
    own = getattr(plugin, "state_key", None)
    for key in saved:
        match, options = _KEY.fullmatch(key), _options(key)
        watches_same = all(getattr(plugin, name, None) == options[name] for name in _WATCHED & options.keys())
        if key == own or (match and match["name"] in names and watches_same):
            return key
    return None


def _options(key: str) -> dict[str, Any]:
    match = _KEY.fullmatch(key)
    try:
        options: dict[str, Any] = ast.literal_eval((match and match["options"]) or "{}")
    except (ValueError, SyntaxError):  # a timedelta, for one
        return {}
    return options


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _best_checkpoints(plugin: Any, saved: Any) -> dict[str, Any]:
    return {
        **plugin.state_dict(), "monitor": saved["monitor"], "folder": str(saved["dirpath"]),
        "best_model_path": saved["best_model_path"], "best_model_score": _number(saved["best_model_score"]),
        "best_k_models": {path: float(score) for path, score in saved["best_k_models"].items()},
        "last_model_path": saved["last_model_path"],
    }  # fmt: skip


def _early_stopping(_: Any, saved: Any) -> dict[str, Any]:
    return {
        "wait_count": saved["wait_count"], "stopped_epoch": saved["stopped_epoch"],
        "best_score": _number(saved["best_score"]), "stopping_reason": saved.get("stopping_reason_message") or "",
    }  # fmt: skip


def _timer(plugin: Any, saved: Any) -> dict[str, Any]:
    return {stage: float(saved["time_elapsed"].get(stage, 0.0)) for stage in plugin.state_dict()}


def _as_it_is(plugin: Any, saved: Any) -> Any:
    return saved if isinstance(saved, Mapping) and plugin.state_dict().keys() <= saved.keys() else None


def _average(module: nn.Module, average: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a callback that averages weights; Lightning saves the average in place of the weights."""
    trained = {name: average[name] for name, _ in module.named_parameters()}
    return {"average": trained, "num_averaged": int(state["averaging_state"]["n_averaged"])}


#: Lightning's names of callbacks that have another one here.
_RENAMED = {"EMA": "EMAWeightAveraging"}
_TRANSLATIONS: dict[str, Callable[..., Any]] = {
    "ModelCheckpoint": _best_checkpoints,
    "EarlyStopping": _early_stopping,
    "Timer": _timer,
}


def _scalers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of loss scales: one has the name of Lightning's precision class, or an older one."""
    return {key: v for key, v in state.items() if isinstance(v, Mapping) and {"scale", "growth_factor"} <= v.keys()}


def _loss_scale(fit: FitState, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of this run's precision, if both it and the checkpoint scale losses."""
    scales = {key: plugin.state_dict() for key, plugin in identity.plugins_by_key(fit.run.stack, "state_dict")}
    return {key: saved for saved in _scalers(state).values() for key, own in scales.items() if "scale" in own}


def _title(key: str) -> str:
    """Return the class in a key of this run's plugins; see [Note: state keys]."""
    return key.partition(" ")[0].rpartition(":")[2]
