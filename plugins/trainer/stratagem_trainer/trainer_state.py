"""The whole run as one dictionary: for checkpoints, and for the result of a worker process."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from torch import nn

from stratagem.api.paths import as_path, is_remote
from stratagem.api.seeding import random_state, restore_random_state
from stratagem.api.state_fit import load_weights
from stratagem.checkpoint.background_save import SingleProcessRun
from stratagem.checkpoint.rank_rows import ranks_in, states_of_ranks
from stratagem.checkpoint.state_checks import check_weights_fit, errors_naming, on_all_ranks, on_first_rank
from stratagem.checkpoint.trained_part import trained_part
from stratagem.errors import CheckpointError, ConfigError
from stratagem.runtime import default_hooks, state_io
from stratagem.runtime.state_io import format_tag
from stratagem.stack import identity
from stratagem.stack.formats import format_of, read_with
from stratagem.stack.identity import warn_of_differences
from stratagem_trainer.api import has_role
from stratagem_trainer.checkpoint_files import newest_complete, saved_at
from stratagem_trainer.datamodule import DataModule
from stratagem_trainer.hyperparameters import stored_hyperparameters
from stratagem_trainer.module import BUILT, build, overrides
from stratagem_trainer.optimizer_modes import forget_training_weights, set_mode
from stratagem_trainer.progress import ADDED, LIGHTNING_VERSION
from stratagem_trainer.rank_states import Ranks, check_meshes, mesh_of, restore_buffers, with_the_same_samples
from stratagem_trainer.state_checks import check_batches, check_like, check_numbers, check_scheduler

if TYPE_CHECKING:
    from stratagem_trainer.api import FitOutcome
    from stratagem_trainer.api.published import Published
    from stratagem_trainer.fit_state import FitState


#: Elements up to which a buffer is taken for statistics that may differ between ranks.
_SMALL = 1 << 16
#: What a process that launched others keeps of the state of a fit, beside the weights: all that resuming needs.
_OF_WORKER = ("optimizers", "lr_schedulers", "loop", "ranks", "callbacks", "plugins")


def dump(fit: FitState, weights_only: bool = False, trainable_only: bool = False) -> dict[str, Any]:
    """Return the logical state of the run. Collective: a strategy may need every rank to gather a part.
    `weights_only` leaves out what only resuming needs, `trainable_only` frozen parameters.
    """
    run = fit.run
    # What other processes trained is a plain module here, which no strategy has wrapped.
    trained_elsewhere = not run.connected and not run.stack.launcher.plugin.parent_trains
    ask = functools.partial(run.ask, "model_state") if not trained_elsewhere else default_hooks.model_state
    state: dict[str, Any] = {
        "state_dict": ask(module=fit.module),
        "format": format_tag(run.stack),
        **stored_hyperparameters(fit.module),
    }
    if trainable_only:
        state |= trained_part(state["state_dict"], fit.module)
    if weights_only:
        return state
    if not run.connected and not trained_elsewhere:
        raise ConfigError(
            "save_checkpoint was called after close(), when optimizers are gone", expected="a fit that is open",
            do="save before close(), or pass weights_only=True",
        )  # fmt: skip
    if overrides(fit.datamodule, "state_dict", DataModule):
        state["datamodule"] = fit.datamodule.state_dict()
    if trained_elsewhere and fit.worker_state is not None:
        return state | fit.worker_state
    plugins = {key: plugin.state_dict() for key, plugin in identity.plugins_by_key(fit.run.stack, "state_dict")}
    if (job := run.environment.job()) is not None:
        state["job"] = job
    return (
        state
        | dump_optimizers(fit)
        | {
            "loop": fit.position.state_dict(),
            "ranks": states_of_ranks(run, lambda: _of_this_rank(fit)),
            "callbacks": {key: value for key, value in plugins.items() if key.startswith("callback.")},
            "plugins": {key: value for key, value in plugins.items() if not key.startswith("callback.")},
        }
    )


def _of_this_rank(fit: FitState) -> dict[str, Any]:
    """Return what differs between ranks: random states, the loader's position, the metrics of the epoch so far."""
    position, train_batches = fit.position, fit.train_batches
    # Where a strategy leaves buffers to each rank (running statistics), the model's state is rank 0's.
    others = [(name, buffer) for name, buffer in fit.module.named_buffers() if fit.run.rank and not buffer.is_meta]
    return {
        "mesh": dict(fit.run.mesh.axes),
        "buffers": {name: buffer.cpu() for name, buffer in others if buffer.numel() <= _SMALL},
        "random": random_state(fit.run.devices) if train_batches is None else train_batches.random_state(),
        "epoch_start": position.epoch_random_state,
        "metrics": {} if position.epoch_ended else fit.train_metrics.state_dict(),
        "callback_metrics": {name: float(value) for name, value in fit.published.exact.items()},
        "feed": {} if train_batches is None else train_batches.state_dict(position),
        "plugins": state_io.rank_states(fit.run),
    }


def dump_optimizers(fit: FitState) -> dict[str, Any]:
    """Return the states of optimizers, in eval mode if they have it, and of schedulers."""
    run = fit.run
    set_mode(fit, "eval")
    return {
        "optimizers": [run.ask("optimizer_state", optimizer=o, module=fit.module) for o in run.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in fit.lr_scheduler_configs],
    }


def restore(fit: FitState, state: dict[str, Any], path: Any = "the checkpoint") -> None:
    """Apply `state`, which `path` holds. With weights only, training begins at step 0. Collective.

    Weights and states of optimizers are taken out of `state`, so that each is freed once it is applied.

    Raises:
        CheckpointError: something in it is not what a run like this one saves; on all ranks.
    """
    run, position = fit.run, fit.position
    if LIGHTNING_VERSION in state:
        from stratagem_trainer import lightning_checkpoint

        state = lightning_checkpoint.translated(fit, state, path)
    if "format" not in state and run.is_global_zero:
        warnings.warn(
            "the checkpoint was not written by stratagem: its weights are taken, and training begins at step 0",
            stacklevel=2,
        )
    if "loop" not in state and "lr_schedulers" in state:
        raise CheckpointError(f"{path} has no 'loop'", expected="all that a fit saves", do="use another checkpoint")
    resumes = "loop" in state and "optimizers" in state
    if resumes:
        on_all_ranks(run.collectives, lambda: _check(fit, state, path))
    state_io.load_model(run, state["state_dict"], fit.module, fit.module.strict_loading, path, state.get("frozen"))
    state["state_dict"] = state_io.outlines(state["state_dict"])
    if "loop" in state and not resumes and run.is_global_zero:
        warnings.warn(
            "no optimizer comes with the checkpoint: its weights are taken, and training begins at step 0", stacklevel=2
        )
    if not resumes:
        return
    restore_optimizers(fit, state, path)
    position.load_state_dict(state["loop"])
    on_all_ranks(run.collectives, lambda: restore_plugins(fit, state))
    if run.is_global_zero:
        warn_of_differences(run.stack, state)
    ranks = ranks_in(state, path)
    mine = with_the_same_samples(ranks, run.mesh)
    if mine is not None:
        restore_buffers(fit.module, mine["buffers"])
    with errors_naming(f"{path}: ranks"):
        state_io.load_rank_states(run, ranks)
    fit.published.update(ranks[0]["callback_metrics"])
    if mine is None:
        _continue_at_another_size(fit, ranks)
        return
    position.epoch_random_state = mine["epoch_start"]
    fit.published.update(mine["callback_metrics"])

    def load_metrics() -> None:
        with errors_naming(f"{path}: ranks[{run.rank % len(ranks)}].metrics"):
            fit.train_metrics.load_state_dict(mine["metrics"])

    on_all_ranks(run.collectives, load_metrics)
    if fit.train_batches is not None:
        fit.train_batches.resume(mine["feed"], mine["random"], position)


def _continue_at_another_size(fit: FitState, ranks: Ranks) -> None:
    """Continue after as many samples as `ranks`, which are more or fewer, have used."""
    shards, saved = mesh_of(ranks).num_data_shards, ranks[0]["epoch_start"] or ranks[0]["random"]
    if fit.train_batches is not None:
        fit.train_batches.resume_at_another_size(ranks[0]["feed"], saved, fit.position, shards)
    if fit.run.is_global_zero:
        warnings.warn(
            f"the checkpoint holds the random states of {len(ranks)} processes and this run has {fit.run.world_size}: "
            "training continues with new ones",
            stacklevel=2,
        )


def _check(fit: FitState, state: dict[str, Any], path: Any) -> None:
    """Check what this rank is about to apply, before anything is changed."""
    if "ranks" not in state:
        raise CheckpointError(
            f"{path} has no 'ranks'", expected="what this version of stratagem saves",
            do="load its weights with load_from_checkpoint, and fit without ckpt_path",
        )  # fmt: skip
    for key in ("lr_schedulers", "callbacks", "plugins"):
        if key not in state:
            raise CheckpointError(f"{path} has no {key!r}", expected="all that a fit saves", do="use another one")
    check_like(ADDED | state["loop"], fit.position.state_dict(), f"{path}: loop")
    check_weights_fit(state["state_dict"], fit.module, path)
    _check_optimizers(fit, state, path)
    ranks = ranks_in(state, path)
    if not ranks:
        raise CheckpointError(f"{path}: ranks is empty", expected="what each rank saved", do="use another checkpoint")
    # Each rank checks some of them: there may be thousands.
    numbers = range(fit.run.rank % len(ranks), len(ranks), fit.run.world_size)
    check_meshes(ranks, numbers, path)
    now = random_state(fit.run.devices) if fit.train_batches is None else fit.train_batches.random_state()
    for number in numbers:
        rank, where = ranks[number], f"{path}: ranks[{number}]"
        # What was added later is read with a default: see `progress.ADDED`.
        for key in ("buffers", "random", "epoch_start", "metrics", "callback_metrics", "feed", "plugins"):
            if key not in rank:
                raise CheckpointError(f"{where} has no {key!r}", expected="what each rank saved", do="use another one")
        check_numbers(rank["callback_metrics"], f"{where}.callback_metrics")
        check_batches(rank["feed"], f"{where}.feed")
        listed = [*rank["feed"].get("batch_sizes", ()), *rank["random"].get("sampler_seeds", ())]
        check_numbers({str(index): each for index, each in enumerate(listed)}, f"{where}: batch_sizes, sampler_seeds")
    mine, where = ranks[numbers[0]], f"{path}: ranks[{numbers[0]}]"
    restore = functools.partial(restore_random_state, devices=fit.run.devices)
    restore_random = restore if fit.train_batches is None else fit.train_batches.restore_random_state
    try:
        for key in ("random", "epoch_start"):
            if mine[key] is not None:
                with errors_naming(f"{where}.{key}"):
                    restore_random(mine[key])
    finally:
        restore_random(now)


def _check_optimizers(fit: FitState, state: dict[str, Any], path: Any) -> None:
    state_io.check_optimizers(state["optimizers"], fit.run.optimizers, state.get("state_dict"), path)
    schedulers, configs = state["lr_schedulers"], fit.lr_scheduler_configs
    if len(schedulers) != len(configs):
        raise CheckpointError(
            f"the checkpoint holds {len(schedulers)} scheduler states",
            expected=f"{len(configs)} as in this run",
            do="resume with the schedulers that wrote it",
        )
    for number, (config, scheduler) in enumerate(zip(configs, schedulers, strict=True)):
        check_scheduler(scheduler, config.scheduler, f"{path}: lr_schedulers[{number}]")


def restore_optimizers(fit: FitState, state: dict[str, Any], path: Any = "the checkpoint") -> None:
    """Apply the states of optimizers and schedulers; those of optimizers are taken out of `state`."""
    _check_optimizers(fit, state, path)
    weights, optimizers = state.get("state_dict"), list(state.pop("optimizers"))
    state_io.load_optimizers(fit.run, optimizers, fit.run.optimizers, fit.module, weights, path)
    for number, (config, scheduler) in enumerate(zip(fit.lr_scheduler_configs, state["lr_schedulers"], strict=True)):
        with errors_naming(f"{path}: lr_schedulers[{number}]"):
            config.scheduler.load_state_dict(scheduler)


def restore_worker_state(fit: FitState, worker_state: dict[str, Any]) -> None:
    """Apply what the workers of an earlier fit of this module sent back. Collective."""
    restore_optimizers(fit, dict(worker_state))
    if fit.run.is_worker:
        forget_training_weights(fit.run)
    # If this process trained, its plugins have their state.
    identity.restore(fit.run.stack, worker_state.get("plugins", {}))
    ranks, position = worker_state.get("ranks", []), fit.position
    state_io.load_rank_states(fit.run, ranks)
    within_an_epoch = position.batches_done and not position.epoch_done
    if within_an_epoch and len(ranks) == fit.run.world_size and fit.train_batches is not None:
        mine = ranks[fit.run.rank]
        position.epoch_random_state = mine["epoch_start"]
        fit.train_batches.resume(mine["feed"], mine["random"], position)


def restore_plugins(fit: FitState, state: dict[str, Any]) -> None:
    """Apply the states of the plugins that both this run and the saved one have."""
    identity.restore(fit.run.stack, state.get("callbacks", {}) | state.get("plugins", {}))


# --- Finding a checkpoint ----------------------------------------------------------------------------------------


def find(fit: FitState, path: str | Path | None) -> Path | None:
    """Turn "last", "best" and "hpc" into a path, the same on all ranks; None means a fresh start. Collective."""
    fit.run.saver.wait()  # what is being saved may be what is looked for
    look = None if path is None else {"last": _last, "best": _best, "hpc": _preempted}.get(str(path))
    if look is None:
        return None if path is None else as_path(path)
    return on_first_rank(fit.run.collectives, lambda: look(fit))


def _best(fit: FitState) -> Path:
    if best := getattr(fit.trainer.checkpoint_callback, "best_model_path", ""):
        return as_path(best)
    for folder in _folders(fit):  # the callback of an earlier process has saved its path
        newest = newest_complete(folder, fit.run.checkpoint_format)
        if newest is None:
            continue
        states = read_with(format_of(newest, fit.run.checkpoint_format), newest, SingleProcessRun()).get(
            "callbacks", {}
        )
        for state in states.values():
            named = as_path((state.get("best_model_path") if isinstance(state, dict) else "") or ".")
            found = [path for path in (named, folder / named.name) if named.name and path.exists()]
            if found:
                return found[0]
    raise CheckpointError(
        'ckpt_path is "best"', expected="a callback that has saved a best checkpoint", do="fit first, with a monitor"
    )


def _folders(fit: FitState) -> list[Path]:
    """Return where checkpoints of this run may be."""
    folders = [as_path(each.folder(fit.trainer)) for each in _callbacks(fit) if has_role(each, "checkpoint-folder")]
    return list(dict.fromkeys([*folders, as_path(fit.settings.default_root_dir)]))


def _callbacks(fit: FitState) -> list[Any]:
    """Return the callbacks of this run, with those that no user listed."""
    return [*fit.trainer.callbacks, *(choice.plugin for choice in fit.run.stack.automatic)]


def _last(fit: FitState) -> Path | None:
    folders = _folders(fit)
    if (newest := newest_in(fit, folders)) is not None:
        return newest
    places = " or ".join(map(str, folders))
    if _begins_without(fit, "last", places):
        return None
    raise CheckpointError(
        'ckpt_path is "last"', expected=f"a whole checkpoint in {places}, in a format that is installed",
        do="check default_root_dir, or fit without ckpt_path to begin at step 0",
    )  # fmt: skip


def _begins_without(fit: FitState, word: str, places: str) -> bool:
    """Whether there need be no checkpoint for `word`: the same program is started before the first one and after it."""
    place = fit.run.place
    if not place.may_restart and place.generation in (None, "0"):  # None: no variable tells whether it is a restart
        return False
    fit.run.print(f'stratagem: ckpt_path is "{word}" and {places} has no checkpoint yet: training begins at step 0')
    return True


def _preempted(fit: FitState) -> Path | None:
    """Return the newest checkpoint that a callback saved because of a signal."""
    callbacks = [callback for callback in _callbacks(fit) if has_role(callback, "checkpoint-on-signal")]
    found = [newest_in(fit, [as_path(each.folder(fit.trainer))], each.saved_on_signal) for each in callbacks]
    places = " or ".join(str(callback.folder(fit.trainer)) for callback in callbacks)
    if (newest := _newest_of(fit, found)) is not None or (callbacks and _begins_without(fit, "hpc", places)):
        return newest
    raise CheckpointError(
        'ckpt_path is "hpc"',
        expected=f"a whole checkpoint that a run saved on a signal, in {places}"
        if callbacks
        else "a callback that saves on a signal",
        do='use "last" for the newest of all checkpoints, or fit without ckpt_path to begin at step 0',
    )


def newest_in(
    fit: FitState, folders: list[Path] | None = None, accept: Callable[[Path], bool] | None = None
) -> Path | None:
    """Return the newest whole checkpoint in `folders`, by default all of this run; None if there is none."""
    folders = _folders(fit) if folders is None else folders
    return _newest_of(fit, [newest_complete(folder, fit.run.checkpoint_format, accept) for folder in folders])


def _newest_of(fit: FitState, paths: list[Path | None]) -> Path | None:
    found = [path for path in paths if path is not None]
    if any(is_remote(path) for path in found):
        return found[0]
    return max(found, key=lambda path: saved_at(path, fit.run.checkpoint_format), default=None)


# --- From workers --------------------------------------------------------------------------------------------------


@define(eq=False)
class WorkerResult:
    """What a worker sends back to the launching process: the result, and the state of the run."""

    result: Any
    state: dict[str, Any]
    published: Published
    logged: Published
    outcome: FitOutcome

    @classmethod
    def pack(cls, fit: FitState, result: Any, fitted: bool) -> WorkerResult:
        """Collective."""
        with fit.run.gathered_state():  # the parent has no shards
            state = dump(fit, weights_only=not fitted)
        return cls(result, state, fit.published, fit.logged, fit.outcome)

    def unpack(self, fit: FitState) -> Any:
        """Apply the state in the parent, as if it had trained there; return the result."""
        with fit.run.init_context():
            build(fit.module)
        _allocate(fit.module)
        load_weights(fit.module, self.state["state_dict"])
        fit.published, fit.logged = self.published, self.logged
        fit.outcome = self.outcome
        if "loop" in self.state:
            fit.module.__dict__[BUILT] = True
            fit.position.load_state_dict(self.state["loop"])
            fit.position.epoch_random_state = None
            restore_plugins(fit, self.state)
            if "datamodule" in self.state and overrides(fit.datamodule, "load_state_dict", DataModule):
                fit.datamodule.load_state_dict(self.state["datamodule"])
            fit.worker_state = {key: self.state[key] for key in _OF_WORKER}
        return self.result


def _allocate(module: nn.Module) -> None:
    """Give memory on the CPU, and no values, to the parameters and buffers of `module` that are on the meta device.

    For a caller that fills them next. Tied tensors stay tied.
    """
    # The list keeps the tensors alive, so that no id is used twice.
    before = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_meta]
    made = {id(tensor): _with_memory(tensor) for tensor in before}
    for part in module.modules() if made else ():
        for owned in (part._parameters, part._buffers):
            for name, tensor in owned.items():
                if tensor is not None and tensor.is_meta:
                    owned[name] = made[id(tensor)]


def _with_memory(tensor: torch.Tensor) -> Any:
    values = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        values = type(tensor)(values, requires_grad=tensor.requires_grad)
    values.__dict__.update({key: value for key, value in tensor.__dict__.items() if not key.startswith("_stratagem_")})
    return values
