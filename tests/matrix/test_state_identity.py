"""A plugin's state is resumed under every other name, preset, mapping, instance and subclass of that plugin."""

from __future__ import annotations

import warnings

import attrs
import pytest
import torch

import stratagem as sg
from stratagem.api.json_tree import encode
from stratagem.api.kinds import keeps_state
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem.discovery import registry
from stratagem.errors import ConfigError
from stratagem.stack.construction import make
from stratagem.stack.identity import match_keys, plugins_by_key
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_trainer.checkpoint_files import read_any

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
_METHODS = ("state_dict", "rank_state")
KINDS_WITH_STATE = ("strategy", "precision", "comm_hook", "callback")
#: What a plugin cannot be made without.
NEEDED = {
    "post_localsgd": {"model_averaging_period": 2},
    "early_stopping": {"monitor": "train_loss"},
    "stochastic_weight_averaging": {"swa_lrs": 0.1},
    "activation_checkpointing": {"policy": "Linear"},
}
#: Trains in one process here, and cheaply.
BESIDE = {
    "comm_hook": {"strategy": "ddp"},
    "deepspeed": {"precision": "bf16-mixed"},
    "model_checkpoint": {"enable_checkpointing": True},
}


class Model(Net):
    """Has what each stateful callback asks for."""

    def __init__(self):
        super().__init__()
        self.backbone = self.net[0]
        self.backbone.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


#: Plugins without state that need an option.
NEED_OPTIONS = ("gradient_accumulation_scheduler", "global_batch_size", "lambda", "prediction_writer")


def stateful():
    """Return the entry points of plugins with state, by kind and class."""
    found = {}
    for entry in (entry for kind in KINDS_WITH_STATE for entry in registry.entries(kind)):
        try:
            plugin = make(entry, NEEDED.get(entry.name, {}))
        except ConfigError:  # it needs an option
            assert entry.name in NEED_OPTIONS, "add it to NEEDED"
            continue
        if any(keeps_state(plugin, method) for method in _METHODS):
            found.setdefault((entry.kind, type(plugin)), []).append(entry)
    return found


STATEFUL = stateful()


def spellings(kind, cls, entries):
    """Yield every way to write a plugin of `cls`."""
    for entry in entries:
        options = NEEDED.get(entry.name, {})
        if not options:
            yield entry.name
            yield entry.name.upper()
            yield entry.qualified_name
        yield {"name": entry.name, **options}
        yield make(entry, options)
    yield type(f"My{cls.__name__}", (cls,), {})(**NEEDED.get(entries[0].name, {}))


def argument(kind):
    return f"{kind}s" if kind == "callback" else kind


def keys_of(kind, value, **arguments):
    trainer = sg.Trainer(**(QUIET | arguments | {argument(kind): [value] if kind == "callback" else value}))
    found = {key: plugin for method in _METHODS for key, plugin in plugins_by_key(trainer.run.stack, method)}
    return {key for key in found if key.startswith(f"{kind}.")}


def beside(kind, entries):
    return BESIDE.get(entries[0].name, BESIDE.get(kind, {}))


def test_these_have_state():
    assert {cls.__name__ for _, cls in STATEFUL} >= {
        "EMA", "EarlyStopping", "ModelCheckpoint", "ScaledPrecision", "DeepSpeedStrategy", "DiLoCoStrategy", "PowerSGD",
    }  # fmt: skip


@pytest.mark.every_push("strategy-DeepSpeedStrategy", "callback-EarlyStopping")
@pytest.mark.parametrize(("kind", "cls"), STATEFUL, ids=lambda value: getattr(value, "__name__", value))
def test_every_spelling_has_the_same_key(kind, cls):
    entries = STATEFUL[kind, cls]
    classes = {
        key.split(" ")[0]
        for value in spellings(kind, cls, entries)
        for key in keys_of(kind, value, **beside(kind, entries))
    }

    assert classes == {f"{kind}.{cls.__module__}:{cls.__qualname__}"}


class Look(sg.Callback):
    """Keeps what each plugin remembers when training begins."""

    @sg.hookimpl
    def on_train_start(self, trainer):
        self.seen = states(trainer.run.stack, trainer.run)


def states(stack, run):
    return {key: plain(plugin.state_dict()) for key, plugin in plugins_by_key(stack, "state_dict")} | {
        f"rank {key}": plain(plugin.rank_state(run)) for key, plugin in plugins_by_key(stack, "rank_state")
    }


def plain(state):
    return encode(state, lambda tensor, _: tensor.tolist())


def fit(kind, value, root, ckpt_path=None, **arguments):
    look = Look()
    callbacks = [look, *([value] if kind == "callback" else [])]
    chosen = {"max_epochs": 1, "default_root_dir": root, "callbacks": callbacks} | arguments
    trainer = sg.Trainer(**(QUIET | chosen | ({} if kind == "callback" else {kind: value})))
    try:
        batches = joined_batches(3, 8)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.fit(Model(), batches, ckpt_path=ckpt_path)
        if ckpt_path is None:
            trainer.save_checkpoint(root / "saved.ckpt")
        return look.seen, [str(each.message) for each in told if "the checkpoint" in str(each.message)]
    finally:
        if trainer.world_size == 1:
            trainer.close()


def resume_all(kind, cls, root):
    """Save under the first spelling, resume under every other one; return what differed."""
    entries = STATEFUL[kind, cls]
    around = beside(kind, entries)
    first, *others = spellings(kind, cls, entries)
    fit(kind, first, root, **around)
    saved = read_any(root / "saved.ckpt")
    rank = saved["ranks"][torch.distributed.get_rank() if torch.distributed.is_initialized() else 0]
    wanted = {key: plain(value) for group in ("callbacks", "plugins") for key, value in saved[group].items()}
    wanted |= {f"rank {key}": plain(value) for key, value in rank["plugins"].items()}
    wanted = {key.split(" {")[0]: value for key, value in wanted.items() if kind in key}
    assert wanted
    found = []
    for other in others:
        seen, told = fit(kind, other, root, root / "saved.ckpt", **around)
        seen = {key.split(" {")[0]: value for key, value in seen.items() if kind in key}
        found += [*told, *(f"{other}: {key}" for key in wanted if forgetting(seen[key]) != forgetting(wanted[key]))]
    return found


#: DeepSpeed has parity tests of its own; an outer strategy needs teams; sizes are not found again.
ALONE = [
    pair for pair in STATEFUL if pair[0] != "strategy" and pair[1].__name__ not in ("BatchSizeFinder", "PostLocalSGD")
]
TEAMS = [pair for pair in STATEFUL if "stratagem_outer" in pair[1].__module__]


@pytest.mark.every_push("callback-StochasticWeightAveraging")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cls"), ALONE, ids=lambda value: getattr(value, "__name__", value))
def test_every_spelling_resumes_the_state(tmp_path, kind, cls):
    assert resume_all(kind, cls, tmp_path) == []


def _resume_all_of_teams(rank, world_size, root):
    BESIDE.update({name: {"devices": 2} for name in OUTER} | {"comm_hook": {"strategy": "ddp", "devices": 2}})
    return {cls.__name__: resume_all(kind, cls, root / cls.__name__) for kind, cls in TEAMS}


OUTER = [entry.name for kind, cls in TEAMS if kind == "strategy" for entry in STATEFUL[kind, cls]]


@pytest.mark.slow
def test_every_spelling_of_an_outer_strategy_resumes_the_state(tmp_path):
    [found, _] = run_in_processes(_resume_all_of_teams, 2, tmp_path)

    assert found == {cls.__name__: [] for _, cls in TEAMS}


def forgetting(states):
    """Leave out what goes on with time alone."""
    moving = ("seconds", "elapsed", "outcome")
    if isinstance(states, dict):
        return {key: forgetting(value) for key, value in states.items() if not any(word in key for word in moving)}
    return states


# --- Several of one class, changed options, and what does not fit ---------------------------------------------------


def stopping(*monitors, **options):
    return [EarlyStopping(monitor=monitor, patience=9, **options) for monitor in monitors]


class Falls(Net):
    def training_step(self, batch, batch_idx):
        self.log("a", 3.0 - self.global_step)
        self.log("b", 30.0 - self.global_step)
        return super().training_step(batch, batch_idx)


def fit_with(root, callbacks, ckpt_path=None, **arguments):
    trainer = sg.Trainer(callbacks=callbacks, default_root_dir=root, **(QUIET | {"max_epochs": 1} | arguments))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(Falls(), joined_batches(3, 8), ckpt_path=ckpt_path)
    trainer.save_checkpoint(root / "saved.ckpt")
    return [str(each.message) for each in told if "the checkpoint" in str(each.message)]


@pytest.mark.parametrize("changed", [{}, {"min_delta": 0.5}], ids=["same options", "changed options"])
def test_two_of_one_class_keep_their_states_in_another_order(tmp_path, changed):
    fit_with(tmp_path, stopping("a", "b"))
    b, a = stopping("b", "a", **changed)
    told = fit_with(tmp_path, [b, a], tmp_path / "saved.ckpt")

    assert (a.best_score, b.best_score) == (1.0, 28.0)
    assert told == []


def test_what_is_left_over_and_what_is_missing_are_named(tmp_path):
    fit_with(tmp_path, stopping("a", "b"), precision="16-mixed")
    [a] = stopping("a")
    told = fit_with(tmp_path, [a, ModelCheckpoint()], tmp_path / "saved.ckpt", enable_checkpointing=True)

    assert a.best_score == 1.0
    [message] = told
    assert message.startswith(
        "the checkpoint has no state of callback 'model_checkpoint', which starts without it, and"
    )
    assert 'EarlyStopping {"monitor": "b", "patience": 9}' in message
    assert "precision.stratagem_precision:ScaledPrecision" in message
    assert message.endswith("which no plugin of this run uses: it is dropped")


def fit_alone(root, strategy, ckpt_path=None, **arguments):
    return fit("strategy", strategy, root, ckpt_path, precision="bf16-mixed", **arguments)[1]


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [("ddp", "deepspeed"), ("deepspeed", "ddp"), ("ddp", "fsdp")])
def test_moving_to_another_strategy_is_not_warned_about(tmp_path, one, other):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_alone(tmp_path, one)
        assert fit_alone(tmp_path, other, tmp_path / "saved.ckpt", max_epochs=2) == []


def _move_to_teams(rank, world_size, root):
    path = root / "saved.ckpt"
    fit("strategy", "ddp", root, devices=world_size)
    return [
        fit("strategy", each, root, path, devices=world_size, max_epochs=2)[1]
        for each in ("diloco", "local_sgd", "async_averaging", "decentralized")
    ]


def test_moving_to_an_outer_strategy_is_not_warned_about(tmp_path):
    assert run_in_processes(_move_to_teams, 2, tmp_path) == [[[]] * 4] * 2


def test_a_plugin_that_is_new_to_the_run_is_not_warned_about(tmp_path):
    fit_with(tmp_path, [])
    assert fit_with(tmp_path, [*stopping("a"), "preemption"], tmp_path / "saved.ckpt", precision="16-mixed") == []


def test_nothing_is_guessed():
    wanted = ['callback.m:C {"x": 1}', 'callback.m:C {"x": 2}']

    assert match_keys(wanted, ['callback.m:C {"x": 3}']) == {}
    assert match_keys(wanted[:1], ['callback.m:C {"x": 3}']) == {wanted[0]: 'callback.m:C {"x": 3}'}
    assert match_keys(wanted[:1], ['callback.m:D {"x": 1}', "callback.m:C {", "nonsense"]) == {}
    assert match_keys(["callback.m:C", "callback.m:C #1"], ["callback.m:C", "callback.m:C #1"]) == {
        "callback.m:C": "callback.m:C", "callback.m:C #1": "callback.m:C #1",
    }  # fmt: skip


def test_a_subclass_with_state_of_its_own_is_another_plugin(tmp_path):
    class Counting(EarlyStopping):
        def state_dict(self):
            return super().state_dict() | {"mine": 1}

    fit_with(tmp_path, stopping("a"))
    [message] = fit_with(tmp_path, [Counting(monitor="a")], tmp_path / "saved.ckpt")

    assert "has no state of callback" in message


def test_a_plugin_may_keep_the_key_of_a_class_that_was_renamed(tmp_path):
    class Renamed(sg.Callback):
        state_key = "old.module:Name"
        count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"] + 1

    fit_with(tmp_path, [Renamed()])
    assert list(read_any(tmp_path / "saved.ckpt")["callbacks"]) == ["callback.old.module:Name"]
    again = Renamed()
    assert fit_with(tmp_path, [again], tmp_path / "saved.ckpt") == []
    assert again.count == 1


def test_a_key_that_is_a_method_is_refused(tmp_path):
    class Keyed(sg.Callback):
        def state_key(self):
            return "mine"

        def state_dict(self):
            return {"count": 1}

    with pytest.raises(ConfigError, match="a method state_key; expected a property"):
        fit_with(tmp_path, [Keyed()])


def test_plain_callbacks_of_one_class_are_told_apart_by_a_key_or_there_is_a_warning(tmp_path):
    class Plain(sg.Callback):
        def __init__(self, name):
            self.name = self.found = name

        def state_dict(self):
            return {"name": self.name}

        def load_state_dict(self, state):
            self.found = state["name"]

    class Keyed(Plain):
        @property
        def state_key(self):
            return f"plain.{self.name}"

    fit_with(tmp_path, [Plain("x"), Plain("y")])
    [message] = fit_with(tmp_path, [Plain("y"), Plain("x")], tmp_path / "saved.ckpt")
    assert "only by their order" in message

    fit_with(tmp_path, [Keyed("x"), Keyed("y")])
    swapped = [Keyed("y"), Keyed("x")]
    assert fit_with(tmp_path, swapped, tmp_path / "saved.ckpt") == []
    assert [callback.found for callback in swapped] == ["y", "x"]


def test_an_option_that_is_an_array_is_left_out_of_the_key(tmp_path):
    numpy = pytest.importorskip("numpy")

    @attrs.define(eq=False, kw_only=True)
    class Weighted(sg.Callback):
        weights: object = None

        def state_dict(self):
            return {"count": 1}

        def load_state_dict(self, state):
            pass

    fit_with(tmp_path, [Weighted(weights=numpy.array([1.0, 2.0]))])

    assert any("Weighted" in key for key in read_any(tmp_path / "saved.ckpt")["callbacks"])
