"""The arguments of a `Trainer`, and the callbacks and loggers that they choose."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal

import attrs
from attrs import define, field

from stratagem.api.capabilities import ACCUMULATION, CLIP_BY_NORM, CLIP_BY_VALUE
from stratagem.api.options import as_list, option_types
from stratagem.api.validators import at_least, more_than
from stratagem.config.settings import RunSettings
from stratagem.discovery import catalog, registry
from stratagem.errors import ConfigError, PluginError, nearest, shown
from stratagem.stack.checks import check_capabilities, check_hooks
from stratagem.stack.construction import default
from stratagem.stack.plugins import Choice, Stack
from stratagem.stack.resolver import Chooser, automatic_callbacks, is_listed
from stratagem_trainer.api import has_role
from stratagem_trainer.api.validators import accumulation, at_least_or_unlimited, batch_limit, duration_or_text
from stratagem_trainer.moved_methods import prepare_methods
from stratagem_trainer.targets import normalization


def _interval(instance: Any, attribute: Any, value: Any) -> None:
    """Accept a number of batches, a fraction of them, or a time."""
    (batch_limit if isinstance(value, int | float) else duration_or_text)(instance, attribute, value)


def _limit(value: float | None) -> float | None:
    return value or None


@define(eq=False, repr=False, kw_only=True)
class TrainerSettings(RunSettings):
    """The arguments of a `Trainer`: those of a run, and those of its loops."""

    for_trainer: ClassVar[bool] = True
    #: Callbacks, called in this order.
    callbacks: Any = ()
    #: The loggers, one or several; True is the default logger, False means none.
    logger: Any = True
    #: The number of epochs; -1 trains until max_steps, max_time or should_stop.
    max_epochs: int | None = field(default=None, validator=at_least_or_unlimited(0))
    #: Epochs before which only max_epochs and max_steps end training.
    min_epochs: int | None = field(default=None, validator=at_least(0))
    #: Optimizer steps before which only max_epochs and max_steps end training.
    min_steps: int | None = field(default=None, validator=at_least(0))
    #: The most optimizer steps; -1 means no limit.
    max_steps: int = field(default=-1, validator=at_least_or_unlimited(0))
    #: The longest time to train: seconds, a timedelta, or "DD:HH:MM:SS".
    max_time: timedelta | dict[str, float] | str | None = field(default=None, validator=duration_or_text)
    #: Batches per optimizer step; ``{0: 8, 5: 4}`` accumulates 8 until epoch 5, and 4 from then on.
    accumulate_grad_batches: int | dict[int, int] = field(default=1, validator=accumulation)
    #: Divide the gradients of an epoch's last batches, if fewer than `accumulate_grad_batches`, by their own number.
    average_short_window: bool = True
    #: "batches": the loss of a step is the mean over its batches; "tokens": over the class targets in
    #: ``batch["labels"]`` of the accumulation window, on all ranks. A dictionary names other targets:
    #: ``{"labels": 1, "ignore_index": 0, "shifted": True}``.
    loss_normalization: str | dict[str, Any] = field(default="batches", validator=normalization)
    #: Largest gradient norm (or value), see `gradient_clip_algorithm`; None and 0 limit nothing.
    gradient_clip_val: float | None = field(default=None, converter=_limit, validator=more_than(0))
    #: "norm" limits the norm of all gradients together, "value" limits each number.
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    #: Training batches per epoch: a count (int), or a share of the loader (float).
    limit_train_batches: int | float | None = field(default=None, validator=batch_limit)
    #: Validation batches of each loader: a count (int), or a share of the loader (float).
    limit_val_batches: int | float | None = field(default=None, validator=batch_limit)
    #: Test batches of each loader: a count (int), or a share of the loader (float).
    limit_test_batches: int | float | None = field(default=None, validator=batch_limit)
    #: Prediction batches of each loader: a count (int), or a share of the loader (float).
    limit_predict_batches: int | float | None = field(default=None, validator=batch_limit)
    #: Validate every n batches (int), after each such share of an epoch (float), or after each such time: a timedelta,
    #: ``{"minutes": 30}``, or "DD:HH:MM:SS".
    val_check_interval: int | float | timedelta | dict[str, float] | str = field(default=1.0, validator=_interval)
    #: Validate in every nth epoch; None counts the batches of `val_check_interval` over epochs.
    check_val_every_n_epoch: int | None = field(default=1, validator=at_least(1))
    #: Make the loaders of the module or the data module again for every nth epoch; 0 makes them once.
    reload_dataloaders_every_n_epochs: int = field(default=0, validator=at_least(0))
    #: Validation batches that run before training, to find errors early; -1 means all.
    num_sanity_val_steps: int = field(default=2, validator=at_least_or_unlimited(0))
    #: Optimizer steps between two rows of step metrics; the first and the last step of a fit have a row, too.
    log_every_n_steps: int = field(default=50, validator=at_least(1))
    #: Add a callback that shows progress, and metrics logged with ``prog_bar=True``, unless `callbacks` has one.
    enable_progress_bar: bool = True
    #: Add a callback that saves a checkpoint after each epoch, or after validation, unless `callbacks` has one.
    enable_checkpointing: bool = True
    #: Print the layers and their parameters when a fit begins; by default if the output is a terminal.
    enable_model_summary: bool | None = None
    #: Measure time: ``"simple"`` selects the callback with that name and the suffix ``_profiler``.
    profiler: Any = None
    #: Run this many batches of training, validation, test and prediction, and write no files.
    fast_dev_run: bool | int = field(default=False, validator=at_least(0))
    #: Train on this many batches (int), or this share (float); the same batches in every epoch.
    overfit_batches: int | float = field(default=0, validator=batch_limit)
    #: Callbacks that end a fit which has gone wrong; None trains on. "finite" is left out where it is not installed.
    checks: Any | None = "finite"
    #: Raise an error at the operation that makes a gradient NaN; slow.
    detect_anomaly: bool = False
    #: Validate, test and predict under `torch.inference_mode` instead of `torch.no_grad`; not within a fit, nor with
    #: sharded strategies.
    inference_mode: bool = True
    #: Run the loop only: no logger, progress bar, checkpoints, lock file or sanity check.
    barebones: bool = False

    @property
    def writes_files(self) -> bool:
        return not (self.barebones or self.fast_dev_run)

    def add_to(self, stack: Stack, chooser: Chooser) -> None:
        listed = chooser.many("callback", self.callbacks)
        chosen = [*listed, *_profiler(self, chooser), *stack.callbacks, *_standard_callbacks(self)]
        # What others log at the end of an epoch is there when it is checked.
        stack.callbacks = sorted(chosen, key=lambda choice: has_role(choice.plugin, "early-stopping"))
        stack.loggers = _loggers(self, chooser)
        prepare_methods(stack.choices())
        if not self.barebones:
            stack.automatic = [
                *automatic_callbacks(self, "trainer_callback"), *_checks(self, chooser), *stack.automatic,
                *_environment_callbacks(self, stack.environment, chooser),
            ]  # fmt: skip
        check_switches(self, stack, listed)

    def listed(self) -> list[Any]:
        return [*as_list(self.callbacks), *as_list(self.plugins)]

    def needs(self) -> dict[str, str]:
        needs = {}
        if self.gradient_clip_val is not None:
            word = CLIP_BY_NORM if self.gradient_clip_algorithm == "norm" else CLIP_BY_VALUE
            needs[word] = f"gradient_clip_val={self.gradient_clip_val!r} by {self.gradient_clip_algorithm}"
        if self.accumulate_grad_batches != 1:
            needs[ACCUMULATION] = f"accumulate_grad_batches={self.accumulate_grad_batches}"
        return needs


registry.reserve(option_types(TrainerSettings), "stratagem-trainer")


# --- Callbacks and loggers ----------------------------------------------------------------------------------------


#: Roles of callbacks that act after all others: of two, the first role acts last.
_LAST: Final = ("best-checkpoint", "early-stopping")


def with_callbacks(stack: Stack, settings: TrainerSettings, values: Any) -> list[Choice]:
    """Return the callbacks of `stack` with `values` (one or a list, as for ``callbacks=``) added.

    One of `values` replaces those of its class, and of classes that its class derives from. Callbacks that keep
    checkpoints stay last, after those that check what others log.

    Raises:
        ConfigError, PluginError: no such callback, or one that cannot be combined with the stack.
    """
    chooser = Chooser(settings)
    chooser.extras, chooser.options = {kind: [] for kind in chooser.extras}, {}
    added = chooser.many("callback", values)
    kept = [each for each in stack.callbacks if not any(isinstance(a.plugin, type(each.plugin)) for a in added)]
    callbacks = sorted([*kept, *added], key=lambda choice: [has_role(choice.plugin, role) for role in _LAST])
    changed = attrs.evolve(stack, callbacks=callbacks)
    prepare_methods(added)
    check_switches(settings, changed, added)
    check_capabilities(changed, {})
    check_hooks(changed)
    return callbacks


def _standard_callbacks(settings: TrainerSettings) -> list[Choice]:
    choices, listed = [], settings.listed()
    for switch, role in SWITCHES.items():
        value = getattr(settings, switch)
        if not (sys.stdout.isatty() if value is None else value) or settings.barebones:
            continue
        if role == "checkpointing" and settings.fast_dev_run:
            continue
        entry = registry.find("callback", catalog.default(role))
        if not is_listed(entry, listed):
            choices.append(default("callback", role, f"{switch}=True"))
    return choices


def _environment_callbacks(settings: TrainerSettings, environment: Choice, chooser: Chooser) -> list[Choice]:
    """Return the callbacks that `environment` adds, but for those that the user lists."""
    choices: list[Choice] = []
    for value in environment.plugin.default_callbacks():
        try:
            choice = chooser.default_callback(value)
        except PluginError as error:  # the user did not ask for it
            warnings.warn(f"{environment} adds a callback, and the run goes on without it: {error}", stacklevel=2)
            continue
        if choice.entry is None or not is_listed(choice.entry, settings.listed()):
            choices.append(attrs.evolve(choice, reason=f"{environment} adds it"))
    return choices


def _checks(settings: TrainerSettings, chooser: Chooser) -> list[Choice]:
    """Return the callbacks that ``checks=`` selects, but for those that the user lists."""
    if settings.checks == "auto" or "checks" not in settings.origins:
        return automatic_callbacks(settings, "check")
    chosen = chooser.many("callback", settings.checks, "checks")
    return [each for each in chosen if each.entry is None or not is_listed(each.entry, settings.listed())]


def _profiler(settings: TrainerSettings, chooser: Chooser) -> list[Choice]:
    """Return the callback that ``profiler=`` selects."""
    value = settings.profiler
    if value is None or value is False:
        return []
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping):
        known = [entry.name.removesuffix("_profiler") for entry in registry.entries("callback")
                 if entry.name.endswith("_profiler")]  # fmt: skip
        name = value.get("name")
        if not isinstance(name, str) or name.lower() not in known:
            raise ConfigError(
                f"profiler is {shown(name if isinstance(name, str) else value)}",
                expected=f"{' or '.join(map(repr, known)) or 'an installed one'}, or an instance of stratagem.Callback",
                do=nearest(str(name), known),
            )
        value = {**value, "name": f"{name}_profiler"}
    return chooser.many("callback", value, "profiler")


def _loggers(settings: TrainerSettings, chooser: Chooser) -> list[Choice]:
    value = settings.logger
    if settings.fast_dev_run or (settings.barebones and isinstance(value, bool)):
        value = False
    if isinstance(value, bool):
        extras = chooser.extras["logger"]
        return extras if extras or not value else [chooser.refine(default("logger", "logger", "logger=True"))]
    return chooser.many("logger", value)


# --- Arguments that switch callbacks off ---------------------------------------------------------------------------

#: Arguments that add a callback, and the role of that callback in the catalog.
SWITCHES = {
    "enable_progress_bar": "progress", "enable_checkpointing": "checkpointing", "enable_model_summary": "summary",
}  # fmt: skip


def check_switches(settings: TrainerSettings, stack: Stack, listed: Sequence[Choice]) -> None:
    """Refuse a callback or a logger of `listed`, or an argument for one, that another argument switches off."""
    bare = settings.barebones
    for switch in SWITCHES:
        if bare and getattr(settings, switch) and switch in settings.origins:
            raise _contradiction(settings, "barebones", f"{switch} is True ({settings.origins[switch]})")
        if listed and (bare or getattr(settings, switch) is False):
            left_out = switched_off(switch)
            for choice in listed:
                if choice.kind == "callback" and isinstance(choice.plugin, left_out):
                    raise _contradiction(settings, "barebones" if bare else switch, f"{choice} is listed")
    for name in ("logger", "checks"):
        value = getattr(settings, name)
        if bare and name in settings.origins and value not in (None, False):
            raise _contradiction(settings, "barebones", f"{name} is {shown(value)} ({settings.origins[name]})")
    if stack.loggers and (bare or settings.logger is False):
        raise _contradiction(settings, "barebones" if bare else "logger", f"{stack.loggers[0]} is listed")


def switched_off(switch: str) -> tuple[type[Any], ...]:
    """Return the class of callbacks that argument `switch` leaves out; () for other arguments."""
    name = catalog.default(SWITCHES[switch]) if switch in SWITCHES else None
    return tuple(entry.load() for entry in registry.entries("callback") if entry.name == name)[:1]


def _contradiction(settings: TrainerSettings, switch: str, other: str) -> ConfigError:
    """Return the error for argument `switch`, which excludes what `other` states."""
    origin = f" ({settings.origins[switch]})" if switch in settings.origins else ""
    return ConfigError(
        f"{switch} is {getattr(settings, switch)}{origin}, and {other}",
        expected="one of the two",
        do=f"drop {switch}, or the other",
    )
