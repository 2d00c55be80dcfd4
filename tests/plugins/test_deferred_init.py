"""A model built without values gets the same ones under every strategy and at every number of processes."""

from __future__ import annotations

import ctypes
import pickle
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_deferred_init import Materializer, has_no_values, meta_init
from stratagem_testing import ProcessesFailed, run_in_processes
from stratagem_testing.reference import Net, joined_batches, loss_of, relative_difference
from stratagem_testing.training import outcome, share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Late(sg.Module):
    """Built in configure_model, once processes exist."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(
                nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
            )
            self.seen_meta = self.net[0].weight.is_meta
            self.register_buffer("scale", torch.arange(1.0, 3.0))

    def forward(self, x):
        return self.net(x) * self.scale[0]

    def training_step(self, batch, batch_idx):
        return loss_of(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=5e-3, momentum=0.9)


def _train_late(rank, world_size, strategy, batches, empty):
    torch.manual_seed(21)
    trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, **QUIET)
    module = Late()
    if empty:
        with trainer.init_module(empty_init=True):
            module.configure_model()
    trainer.fit(module, share(trainer, batches))
    return weights_of(trainer), module.seen_meta


@pytest.mark.every_push("fsdp-1")
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ({"name": "fsdp", "auto_wrap_policy": {nn.Linear}}, 2)],
    ids=str,
)
def test_the_same_values_under_every_strategy_at_every_number_of_processes(strategy, world_size):
    batches = joined_batches(4, 24)
    reference, was_empty = run_in_processes(_train_late, 1, "single_device", batches, True)[0]

    assert was_empty
    for weights, was_empty in run_in_processes(_train_late, world_size, strategy, batches, True):
        assert was_empty
        assert relative_difference(weights, reference) < 1e-6


@pytest.mark.slow
def test_configure_model_builds_without_values_where_parameters_are_sharded():
    batches = joined_batches(4, 24)
    reference, _ = run_in_processes(_train_late, 1, "single_device", batches, True)[0]

    for weights, was_empty in run_in_processes(_train_late, 2, "fsdp", batches, False):
        assert was_empty
        assert relative_difference(weights, reference) < 1e-6
    assert not run_in_processes(_train_late, 2, "ddp", batches, False)[0][1]


# --- Without processes -------------------------------------------------------------------------------------------


def test_parameters_have_no_memory_and_buffers_have():
    with meta_init():
        module = nn.BatchNorm1d(4)

    assert module.weight.is_meta
    assert module.running_mean.tolist() == [0.0] * 4
    assert has_no_values(module)
    assert not nn.Linear(2, 2).weight.is_meta


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_parameters_stay_tied_and_the_first_decides():
    with meta_init():
        module, other = Tied(), nn.ModuleDict({"embedding": nn.Embedding(5, 3)})
    Materializer(module, 3, torch.device("cpu")).fill(module)
    Materializer(other, 3, torch.device("cpu")).fill(other)

    assert module.head.weight is module.embedding.weight
    assert torch.equal(module.embedding.weight, other["embedding"].weight)


def test_values_depend_on_the_seed_and_the_name_alone():
    def filled(seed, parts):
        with meta_init():
            module = nn.ModuleDict({name: nn.Linear(3, 3) for name in parts})
        torch.manual_seed(0)
        filler = Materializer(module, seed, torch.device("cpu"))
        for name in sorted(parts, reverse=True):
            filler.fill(module[name])
        return module["a"].weight

    assert torch.equal(filled(1, ["a"]), filled(1, ["b", "a"]))
    assert not torch.equal(filled(1, ["a"]), filled(2, ["a"]))


def test_the_streams_of_random_numbers_are_left_alone(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    with meta_init():
        module = nn.Linear(3, 3)
    before = torch.get_rng_state()
    Materializer(module, 1, torch.device("cpu")).fill(module)

    assert torch.equal(before, torch.get_rng_state())
    assert not seeded


def test_what_is_computed_from_parameters_is_named():
    with meta_init():
        module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="has a parameter 'original0' without values"):
        Materializer(module, 1, torch.device("cpu")).fill(module)


class Bare(nn.Module):
    """Leaves its parameter as it comes."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))


def test_parameters_that_nobody_can_fill_are_named():
    with meta_init():
        module = nn.Sequential(nn.Linear(3, 3), Bare())

    with pytest.raises(ConfigError, match="Bare has a parameter 'gain' without values and no reset_parameters"):
        Materializer(module, 1, torch.device("cpu")).fill(module)


# --- What is done while a model is built -------------------------------------------------------------------------


def filled(make, seed=1):
    with meta_init():
        module = make()
    Materializer(module, seed, torch.device("cpu")).fill(module)
    assert not has_no_values(module)
    return module


def test_values_that_a_parameter_is_made_of_stay():
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))
            self.places = nn.Parameter(torch.arange(6.0).view(2, 3) * 0.5)
            orthogonal = torch.empty(4, 4)
            nn.init.orthogonal_(orthogonal)
            self.orthogonal = nn.Parameter(orthogonal)

    module = filled(Gain)
    assert module.gain.tolist() == [1, 1, 1]
    assert module.places.tolist() == [[0, 0.5, 1], [1.5, 2, 2.5]]
    assert torch.allclose(module.orthogonal @ module.orthogonal.T, torch.eye(4), atol=1e-5)


def by_function(part):
    if isinstance(part, nn.Linear):
        nn.init.constant_(part.weight, 2.0)
        part.bias.data.fill_(3.0)
    elif isinstance(part, nn.Embedding):
        part.weight.data.normal_(mean=100.0, std=0.02)


class Initialized(nn.Module):
    """As large language models do it: a function for all parts, then a loop over some parameters."""

    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(5, 3), nn.Linear(3, 6), nn.Linear(6, 3)
        self.apply(by_function)
        for name, parameter in self.named_parameters():
            if name == "down.weight":
                nn.init.normal_(parameter, mean=-100.0, std=0.1)
        with torch.no_grad():
            self.down.bias.mul_(2).add_(1)
            self.up.bias += 1


def test_a_models_own_initialization_is_kept():
    module = filled(Initialized)
    assert module.up.weight.unique().tolist() == [2.0]
    assert module.up.bias.unique().tolist() == [4.0]
    assert module.down.bias.unique().tolist() == [7.0]
    assert 99.9 < module.embedding.weight.min() < module.embedding.weight.max() < 100.1
    assert -101 < module.down.weight.min() < module.down.weight.max() < -99


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.LSTM(4, 3),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2),
        lambda: nn.Embedding(5, 3, padding_idx=1),
        lambda: nn.Conv2d(3, 4, 3),
        lambda: nn.Bilinear(3, 4, 5),
        lambda: nn.PReLU(),
    ],
)
def test_torchs_own_modules_get_values_of_the_right_size(make):
    torch.manual_seed(0)
    module, plain = filled(make), make()
    for (name, mine), (other, theirs) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert mine.isfinite().all(), name
        constant = theirs.std(unbiased=False) == 0
        if constant:
            assert torch.equal(mine, theirs), name
        else:
            assert 0.5 < mine.std() / theirs.std() < 2, name
    if isinstance(module, nn.LSTM):
        assert torch.equal(module(torch.ones(1, 4))[0], module(torch.ones(1, 4))[0])
    if isinstance(module, nn.Embedding):
        assert module.weight[1].tolist() == [0, 0, 0]


def test_orthogonal_weights_are_orthogonal():
    def make():
        module = nn.Linear(4, 4)
        nn.init.orthogonal_(module.weight, gain=2.0)
        return module

    weight = filled(make).weight
    assert torch.allclose(weight @ weight.T, 4 * torch.eye(4), atol=1e-4)


def test_loaded_weights_are_kept():
    state = nn.Linear(3, 3).state_dict()

    def make():
        module = nn.Linear(3, 3)
        module.load_state_dict(state)
        return module

    assert torch.equal(filled(make).weight, state["weight"])


def test_a_parameter_known_by_two_names_stays_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            weight = nn.Parameter(torch.empty(3))
            self.a, self.b = weight, weight
            nn.init.constant_(weight, 5.0)

    module = filled(Twice)
    assert module.a is module.b
    assert module.a.tolist() == [5, 5, 5]


def test_attributes_and_requires_grad_stay():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3), requires_grad=False)
            self.weight.expert = 7
            self.weight.zero_()

    module = filled(Frozen)
    assert (module.weight.requires_grad, module.weight.expert) == (False, 7)


def test_memory_that_was_used_before_is_not_taken_for_empty():
    class Reuses(nn.Module):
        def __init__(self):
            super().__init__()
            for _ in range(50):
                torch.empty(3)  # freed at once: its place may come again
                self.gain = nn.Parameter(torch.full((3,), 4.0))

    assert filled(Reuses).gain.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    "write",
    [
        lambda part: part.weight.data[0].fill_(1),
        lambda part: part.weight.data.copy_(part.weight * 2),
    ],
)
def test_what_cannot_be_put_off_is_refused(write):
    with meta_init():
        part = nn.Linear(3, 3)
        with pytest.raises(ConfigError, match="of shape \\(3, 3\\) is written to in a way that cannot be recorded"):
            write(part)


def test_in_reset_parameters_everything_may_be_done():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))
            self.reset_parameters()
            self.weight.data.mul_(3)

        def reset_parameters(self):
            nn.init.orthogonal_(self.weight)

    weight = filled(Own).weight
    assert torch.allclose(weight @ weight.T, 9 * torch.eye(4), atol=1e-4)


def test_an_empty_model_travels():
    with meta_init():
        module = Initialized()
    module = pickle.loads(pickle.dumps(module))
    Materializer(module, 1, torch.device("cpu")).fill(module)
    assert module.up.weight.unique().tolist() == [2.0]


def test_an_error_while_building_leaves_modules_as_they_were():
    with pytest.raises(RuntimeError, match="on purpose"), meta_init():
        raise RuntimeError("on purpose")

    assert not nn.Linear(2, 2).weight.is_meta


# --- A model that does not fit -----------------------------------------------------------------------------------

LAYERS, WIDTH = 48, 1024  # 4 MiB a layer


class Large(Net):
    def __init__(self):
        sg.Module.__init__(self)
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(16, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)),
                                     nn.Linear(WIDTH, 1))  # fmt: skip

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def _train_within(rank, world_size, strategy, spare_bytes):
    status = Path("/proc/self/status").read_text()
    used = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + spare_bytes, used + spare_bytes))

    def act():
        trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, **QUIET)
        trainer.fit(Large(), share(trainer, joined_batches(2, 12)))

    return outcome(act)


#: Every second layer is cut by its outputs, the others by their inputs.
CUT = {f"net.{number}": "colwise" if number % 2 else "rowwise" for number in range(1, LAYERS + 1)}


@pytest.mark.sweep(guard="tests/plugins/test_deferred_init.py::test_a_rank_holds_its_part_of_the_model_in_every_phase")
@pytest.mark.slow
def test_a_model_larger_than_one_process_may_hold_trains_on_two():
    """Parameters and gradients are 400 MB; a process may use 360 MB more than it has at the start."""
    try:
        alone = run_in_processes(_train_within, 1, "single_device", 360 << 20)
    except ProcessesFailed as error:
        alone = [str(error)]
    assert "memory" in alone[0], alone
    for strategy in (
        {"name": "fsdp", "auto_wrap_policy": {nn.Linear}},
        {"name": "parallel", "tensor": 2, "plan": CUT},
        {"name": "parallel", "pipeline": 2},
    ):
        assert run_in_processes(_train_within, 2, strategy, 360 << 20) == ["nothing", "nothing"], strategy


class Peaks(sg.Callback):
    """The largest resident memory of each phase, in MiB above what the process had at the start of the fit."""

    def begin(self):
        self.found = {}
        ctypes.CDLL(None).malloc_trim(
            0
        )  # what earlier tests freed before the fork would be used again, and not counted
        self._largest()
        self.before = self._largest()

    def _largest(self):
        largest = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
        Path("/proc/self/clear_refs").write_text("5")  # counts from zero again
        return largest

    def end(self, phase):
        self.found[phase] = max(self._largest() - self.before, self.found.get(phase, 0))

    @sg.hookimpl
    def on_train_start(self):
        self.end("build")

    @sg.hookimpl
    def on_train_batch_end(self):
        self.end("train")


def _peaks(rank, world_size, strategy, path):
    peaks = Peaks()
    trainer = sg.Trainer(
        max_epochs=1, strategy=strategy, devices=world_size, checkpoint="sharded", callbacks=[peaks], **QUIET
    )
    batches = share(trainer, joined_batches(2, 12))
    peaks.begin()
    trainer.fit(Large(), batches)
    peaks.end("train")
    trainer.save_checkpoint(path)
    peaks.end("save")
    return peaks.found


@pytest.mark.every_push("pipeline")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{"tensor": 2, "plan": CUT}, {"pipeline": 2}], ids=["tensor", "pipeline"])
def test_a_rank_holds_its_part_of_the_model_in_every_phase(strategy, tmp_path):
    """Of 192 MiB it holds 96, and as much of gradients; a layer has 4."""
    half, slack = LAYERS * 4 // 2, 32
    for peaks in run_in_processes(_peaks, 2, {"name": "parallel", **strategy}, tmp_path / "a.ckpt"):
        assert half <= peaks["build"] < half + slack
        assert 2 * half <= peaks["train"] < 2 * half + slack
        assert peaks["save"] < 2 * half + slack  # weights, and slices of columns by rows until they are written
