"""An error that says that memory ran out names the rank, what held the memory, and ways out that the trainer accepts."""

from __future__ import annotations

import os
import pickle
import re
import sys
import traceback

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from programs import scripts
from stratagem.callbacks import EMA
from stratagem.errors import PeerError
from stratagem_callbacks import memory_errors, memory_ways
from stratagem_callbacks.memory_errors import OutOfMemoryError, explained, told_by
from stratagem_callbacks.memory_held import Held, Memory, held_by, host_memory
from stratagem_callbacks.memory_ways import BACKWARD, ways_out
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data

GIB = 1 << 30
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 1,
}  # fmt: skip
#: As torch's allocator writes it, for 139.80 GiB.
ON_CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free. "
    "Process 71 has 512.00 MiB memory in use. Including non-PyTorch memory, this process has 138.30 GiB memory in use. "
    "{allowed}Of the allocated memory 130.00 GiB is allocated by PyTorch, and {unused} is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


def absurd():
    return torch.empty(1 << 50)


class AllocatesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * absurd()


class Greedy(torch.optim.Adam):
    def step(self, closure=None):
        super().step(closure)
        if self.param_groups[0].get("greedy"):
            absurd()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Needy(Net):
    """Asks for a tensor that no machine has memory for, in the `place` and from optimizer step 2 on, on `ranks`."""

    def __init__(self, place="training_step", ranks=(0, 1)):
        super().__init__()
        self.place, self.ranks = place, ranks
        self.net = nn.Sequential(Block(), Block(), nn.Linear(16, 1))
        self.register_buffer("mean", torch.zeros(5))

    def parallel_plan(self):
        return {"net.0.linear": "colwise", "net.1.linear": "rowwise"}

    def _is_due(self, place):
        return place == self.place and self.trainer.global_rank in self.ranks and self.trainer.global_step >= 2

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self._is_due("training_step"):
            absurd()
        return AllocatesInBackward.apply(loss) if self._is_due("backward") else loss

    def on_before_optimizer_step(self, optimizer):
        optimizer.param_groups[0]["greedy"] = self._is_due("the optimizer step")

    def validation_step(self, batch, batch_idx):
        if self.place == "validation":
            absurd()

    def predict_step(self, batch, batch_idx):
        absurd()

    def configure_optimizers(self):
        return Greedy(self.parameters(), lr=1e-3)


def loader(size=4):
    return DataLoader(TensorDataset(*data(32)), size)


def error_of(module, call=None, **options):
    trainer = sg.Trainer(**(QUIET | options))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        call(trainer) if call else trainer.fit(module, loader())
    return raised.value


# --- The sentence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["training_step", "backward", "the optimizer step"])
def test_the_part_of_the_step_is_named(place):
    error = error_of(Needy(place))

    assert str(error).startswith(
        f"rank 0 ran out of memory on cpu, in {place} at step 2, batch 2: it asked for 4194304.0 GiB, and all"
    )
    assert " of optimizer state" in str(error)
    assert " of parameters" in str(error)


def test_torchs_error_is_the_cause_and_its_types_still_catch_it():
    error = error_of(Needy())

    assert type(error.__cause__) is RuntimeError
    assert "DefaultCPUAllocator: can't allocate memory" in str(error.__cause__)
    assert isinstance(error, sg.StratagemError | RuntimeError)
    assert isinstance(error, torch.cuda.OutOfMemoryError)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (OutOfMemoryError, str(error))


def test_one_traceback_is_printed():
    error = error_of(Needy())
    printed = "".join(traceback.format_exception(error))

    assert printed.count("Traceback") == 1
    assert printed.count("in absurd") == 1
    assert printed.startswith(f"RuntimeError: {error.__cause__}")


def test_validation_of_a_fit_and_prediction_are_named():
    fit = error_of(Needy("validation"), lambda trainer: trainer.fit(Needy("validation"), loader(), loader()))
    predict = error_of(Needy(), lambda trainer: trainer.predict(Needy(), loader()))

    assert "on cpu, in validation_step at step 0, batch 0: " in str(fit)
    assert "on cpu, in predict_step: " in str(predict)
    assert str(predict).endswith('; use smaller batches, or set precision="bf16-mixed".')


def test_other_errors_are_left_alone():
    class Wrong(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError) as raised:
        sg.Trainer(**QUIET).fit(Wrong(), loader())

    assert type(raised.value) is RuntimeError
    assert not memory_errors.is_out_of_memory(PeerError("rank 1 is gone", do="see the log (out of memory?)"))


PROGRAM = """
import sys
import stratagem as sg
from stratagem_testing.reference import Net, joined_batches

sg.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False).fit(Net(), joined_batches(2, 8))
print([name for name in sys.modules if name.startswith("stratagem_callbacks.memory")])
"""


@pytest.mark.slow
def test_the_explanation_is_imported_when_it_is_needed(tmp_path):
    done = scripts.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


LIMITED = """
import resource
import torch
import stratagem as sg
from stratagem_testing.reference import Net, joined_batches


class Hoards(Net):
    def __init__(self):
        super().__init__()
        self.lazy = torch.nn.LazyLinear(3)  # without values until it is called

    def training_step(self, batch, batch_idx):
        kept = []
        while True:
            kept.append(torch.zeros(1 << 22))


resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    sg.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).fit(Hoards(), joined_batches(2, 8))
except torch.OutOfMemoryError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_process_whose_memory_is_really_full_says_so(tmp_path):
    done = scripts.run([sys.executable, "-c", LIMITED], cwd=tmp_path, capture_output=True, text=True, check=True)

    held = re.search(r"and `ulimit -v` allows addresses of 4.0 GiB; it held ([\d.]+) GiB of activations", done.stdout)
    assert held, done.stdout + done.stderr
    assert 1 < float(held[1]) < 4
    assert "it asked for 16.0 MiB, and " in done.stdout
    assert "PYTORCH_ALLOC_CONF" not in done.stdout


def test_an_error_that_cannot_be_explained_is_not_lost(monkeypatch):
    monkeypatch.setattr(memory_errors, "explained", None)
    with pytest.raises(RuntimeError) as raised:
        sg.Trainer(**QUIET).fit(Needy(), loader())

    assert type(raised.value) is RuntimeError


# --- Several ranks -----------------------------------------------------------------------------------------------


def _fit_on_one(rank, world_size):
    with pytest.raises(Exception) as raised:
        sg.Trainer(strategy="ddp", devices=world_size, **QUIET).fit(Needy(ranks=(1,)), loader())
    return type(raised.value).__name__, str(raised.value)


def test_all_ranks_end_and_name_the_one_without_memory():
    (other, echo), (own, sentence) = run_in_processes(_fit_on_one, 2)

    assert own == "OutOfMemoryError"
    assert sentence.startswith("rank 1 ran out of memory on cpu, in training_step at step 2, batch 2: ")
    assert other == "PeerError"
    assert "rank 1 failed with RuntimeError: " in echo
    assert "you tried to allocate 4503599627370496 bytes" in echo


# --- What held the memory ----------------------------------------------------------------------------------------


class Measures(sg.Callback):
    @sg.hookimpl
    def on_before_zero_grad(self, trainer):
        self.held = held_by(trainer, torch.device("cpu"), 1 << 20)


def test_each_kind_is_counted_once():
    module, callback = Needy("nothing"), Measures()
    module.tied = module.net[2]
    sg.Trainer(callbacks=[callback, EMA(decay=0.9)], **QUIET).fit(module, loader())

    held, numbers = callback.held, 2 * (16 * 16 + 16) + 16 + 1
    assert (held.parameters, held.gradients, held.averages) == (4 * numbers,) * 3
    assert held.optimizer == 8 * numbers + 4 * 6  # Adam's two moments, and the steps of six parameters
    assert held.buffers == 4 * 5
    assert held.rest == (1 << 20) - 4 * (5 * numbers + 6 + 5)
    assert sum(held.amounts().values()) == 1 << 20


def _hold(rank, world_size, strategy):
    callback = Measures()
    options = QUIET | {"strategy": strategy, "devices": world_size, "callbacks": callback}
    sg.Trainer(**options).fit(Needy("nothing"), loader())
    return callback.held


@pytest.mark.slow
def test_of_shards_a_rank_counts_its_own():
    held = run_in_processes(_hold, 2, "fsdp")

    # Rows are divided, so that a matrix of one row is on rank 0; FSDP pads it on rank 1.
    numbers = 2 * (16 * 16 + 16) + 16 + 1
    assert [each.parameters for each in held] == [each.gradients for each in held]
    assert sum(each.parameters for each in held) in range(4 * numbers, 4 * numbers + 100)
    assert sum(each.optimizer for each in held) in range(8 * numbers, 8 * numbers + 300)


def test_the_memory_of_the_machine_is_that_of_its_group_or_less():
    memory = host_memory()

    assert 50 << 20 < memory.allocated < memory.total
    assert memory.total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- Figures of a GPU --------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_moment_of_the_error():
    told = told_by(ON_CUDA.format(allowed="27.96 GiB allowed; ", unused="768.00 MiB"))

    assert told == {
        "asked": 5 * GIB // 2, "total": int(139.8 * GIB), "free": GIB, "limit": int(27.96 * GIB),
        "allocated": 130 * GIB, "unused": 768 << 20,
    }  # fmt: skip
    assert told_by("[enforce fail] you tried to allocate 4000 bytes. Error code 12") == {"asked": 4000}


class OnGPU(sg.Callback):
    """Explains an error as if the device were a GPU with `memory`."""

    def __init__(self, text):
        self.text = text

    @sg.hookimpl
    def on_train_batch_end(self, trainer):
        if trainer.global_step == 2:
            self.sentence = str(explained(torch.OutOfMemoryError(self.text), trainer))


@pytest.mark.parametrize(("others", "unused"), [(GIB, "7.50 GiB"), (40 * GIB, "768.00 MiB")])
def test_pieces_and_other_processes_come_first(others, unused, monkeypatch):
    now = Memory(total=139 * GIB, free=2 * GIB, allocated=90 * GIB, unused=9 * GIB, others=others)
    monkeypatch.setattr("stratagem_callbacks.memory_held.cuda_memory", lambda device: now)
    callback = OnGPU(ON_CUDA.format(allowed="", unused=unused))
    sg.Trainer(callbacks=callback, **QUIET).fit(Needy("nothing"), loader())

    found, *_, do = callback.sentence.split("; ")
    size = "1.0 GiB of 139.8 GiB were free"
    held = f"; it held 130.0 GiB of activations, temporary tensors and messages, and {unused.replace('.50', '.5')} reserved"
    if others == GIB:
        assert found.endswith(
            f"rank 0 ran out of memory on cuda:0, in fit at step 2, batch 2: it asked for 2.5 GiB, and {size}"
        )
        assert held in callback.sentence
        assert "; libraries and other processes held 1.0 GiB; " in callback.sentence
        assert do.startswith("set PYTORCH_ALLOC_CONF=expandable_segments:True: what is free is in pieces, or set act")
    else:
        assert found == "other processes hold 40.0 GiB of cuda:0"
        assert do.startswith("end the other processes on cuda:0 (nvidia-smi lists them), or set activation_checkpoin")


def test_an_allocator_that_expands_segments_is_not_told_to(monkeypatch):
    memory = Memory(total=8, free=2, allocated=2, unused=4, asked=5)
    assert memory.is_in_pieces
    assert [*memory_ways._with_one_piece(memory)]

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert not [*memory_ways._with_one_piece(memory)]


def test_what_a_limit_forbids_is_not_free():
    assert not Memory(total=80, free=70, limit=10, allocated=8, unused=1, asked=4).is_in_pieces
    assert Memory(total=80, free=70, limit=10, allocated=5, unused=2, asked=4).is_in_pieces


# --- Ways out ----------------------------------------------------------------------------------------------------


class Collects(sg.Callback):
    """Keeps all ways, by what is largest: activations, then the states."""

    @sg.hookimpl
    def on_train_batch_end(self, trainer, batch_idx):
        if batch_idx == 1:
            memory = Memory(total=9, free=1, allocated=8)
            held = [held_by(trainer, torch.device("cpu"), allocated) for allocated in (1 << 20, 0)]
            self.ways = [ways_out(trainer, each, memory, "backward") for each in held]


def _ways(rank, world_size, options):
    memory_ways._MOST, memory_ways._SHARE, callback = 99, 0.0, Collects()
    given = QUIET | {"devices": world_size or 1} | options
    sg.Trainer(**given | {"callbacks": [callback, *given.get("callbacks", [])]}).fit(Needy("nothing"), loader())
    return [[(way.text, way.arguments) for way in ways] for ways in callback.ways]


def _fits(rank, world_size, options):
    trainer = sg.Trainer(**(QUIET | {"devices": world_size, "limit_train_batches": 4} | options))
    trainer.fit(Needy("nothing"), loader(2 if "accumulate_grad_batches" in options else 4))
    return trainer.global_step


def texts(options, which=0):
    return [text.partition(",")[0] for text, _ in _ways(0, 1, options)[which]]


CHECKPOINTING, SMALLER = 'set activation_checkpointing="blocks"', "use batches of 2 with accumulate_grad_batches=2"
BATCHES = f'{SMALLER} (callbacks="auto_microbatch" does so)'
MIXED, TRUE = 'set precision="bf16-mixed"', 'set precision="bf16-true"'


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [CHECKPOINTING, BATCHES, MIXED, TRUE]),
        ({"activation_checkpointing": {"Block"}}, [BATCHES, MIXED, TRUE]),
        ({"accumulate_grad_batches": 2}, [CHECKPOINTING, BATCHES.replace("=2", "=4"), MIXED, TRUE]),
        ({"precision": "bf16-mixed"}, [CHECKPOINTING, BATCHES, TRUE]),
        ({"precision": "bf16-true"}, [CHECKPOINTING, BATCHES]),
        ({"strategy": "dp", "devices": 2}, [BATCHES, MIXED, TRUE]),
        ({"callbacks": ["auto_microbatch"]}, [CHECKPOINTING, MIXED, TRUE]),
        (
            {"callbacks": [{"name": "auto_microbatch", "smallest": 2}]},
            [CHECKPOINTING, "lower auto_microbatch.smallest", MIXED, TRUE],
        ),
    ],
    ids=["none", "checkpointing", "accumulation", "bf16-mixed", "bf16-true", "dp", "divided", "in pairs"],
)
def test_what_is_used_already_is_not_proposed(options, expected, monkeypatch):
    monkeypatch.setattr(memory_ways, "_MOST", 99)
    monkeypatch.setattr(memory_ways, "_SHARE", 0.0)
    assert texts(options) == expected


def test_what_is_largest_comes_first_and_what_is_small_is_left_out(monkeypatch):
    memory, callback = Memory(total=9, free=1, allocated=8), Collects()
    assert memory.asked < 0
    sg.Trainer(callbacks=callback, **QUIET).fit(Needy("nothing"), loader())

    assert [[way.text for way in ways] for ways in callback.ways] == [[CHECKPOINTING, BATCHES, MIXED], [TRUE]]


@pytest.mark.parametrize(("options", "named"), [
    ({}, True), ({"gradient_clip_val": 1.0}, False), ({"accumulate_grad_batches": 2}, False),
    ({"callbacks": ["optimizer_in_backward"]}, False),
])  # fmt: skip
def test_gradients_are_to_be_freed_in_backward_where_that_trains(options, named):
    class Frees(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            states = Held(parameters=9, gradients=9, optimizer=18, buffers=0, averages=0, rest=1, on_cpu=True)
            self.ways = ways_out(self.trainer, states, Memory(total=9, free=1, allocated=8), BACKWARD)

    module = Frees()
    sg.Trainer(**QUIET | options).fit(module, loader())

    text = 'add callbacks="optimizer_in_backward", which frees each gradient in backward'
    found = [way for way in module.ways if way.text == text]
    assert bool(found) == named
    for way in found:
        sg.Trainer(**QUIET | way.arguments).fit(Net(), loader())


def _ways_of(strategy, **options):
    return run_in_processes(_ways, 2, {"strategy": strategy} | options)[0]


STRATEGIES = [
    "ddp", "ddp_sharded", "fsdp", {"name": "fsdp", "activation_checkpointing_policy": {"Block"}}, "parallel",
    {"name": "parallel", "shard": 2}, "tensor_parallel", "pipeline_parallel", "local_sgd", "deepspeed_stage_1", "deepspeed_stage_2",
    "deepspeed_stage_3",
]  # fmt: skip
OTHERS = [
    {"strategy": "ddp", "comm_hook": "fp16_compress"}, {"strategy": "ddp", "gradient_clip_val": 1.0},
    {"strategy": "ddp", "gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
    {"strategy": "ddp", "callbacks": ["ema"]}, {"strategy": {"name": "ddp", "bucket_cap_mb": 1.0}},
    {"strategy": "ddp", "precision": "bf16-mixed", "accumulate_grad_batches": 2}, {"strategy": "ddp", "checkpoint": "sharded"},
    {"strategy": "ddp", "compile": {"backend": "eager"}},
]  # fmt: skip


def name_of(options):
    return "-".join(
        str(value if isinstance(value, str) else [*value.values()] if isinstance(value, dict) else value)
        for value in options.values()
    )


def accepted(options):
    ways = run_in_processes(_ways, 2, options)
    activations, states = ways[0]
    assert {text for text, _ in activations} == {text for text, _ in states}
    for text, arguments in activations:
        assert run_in_processes(_fits, 2, options | arguments), text
    return [text.partition(",")[0] for text, _ in states]


@pytest.mark.slow
def test_each_way_out_of_ddp_trains():
    assert accepted({"strategy": "ddp"}) == [
        'choose strategy="ddp_sharded"', 'choose strategy="fsdp"', TRUE, CHECKPOINTING, BATCHES, MIXED,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.sweep(guard="tests/plugins/test_memory_errors.py::test_each_way_out_of_ddp_trains")
@pytest.mark.parametrize("options", [{"strategy": each} for each in STRATEGIES[1:]] + OTHERS, ids=name_of)
def test_each_way_out_of_a_strategy_trains(options):
    assert accepted(options)


def test_a_strategy_that_refuses_another_argument_is_not_proposed():
    options = {"strategy": "ddp", "comm_hook": "fp16_compress"}
    activations, _ = run_in_processes(_ways, 2, options)[0]

    assert 'choose strategy="ddp_sharded"' in [text.partition(",")[0] for text, _ in activations]
    assert not [text for text, _ in activations if "fsdp" in text]
