"""Hostile trials: an odd model under a random combination of choices, trained beside one plain PyTorch process.

`trials(count)` draws combinations from a fixed seed: model, strategy, number of ranks, accumulation, clipping, precision,
optimizer, schedule, and where training stops and resumes. `outcome(trial)` runs one: "equal" (every weight as plain
PyTorch has it), "refused" (a sentence of stratagem's on all ranks), or an AssertionError that says what differs.

    python tests/parity/hostile.py 400      # a line for each trial, and the counts
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from stratagem.errors import StratagemError
from stratagem_testing import ProcessesFailed, run_in_processes
from stratagem_testing.reference import window_size

EPOCHS, SAMPLES, BATCH_SIZE = 2, 42, 4
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Samples(Dataset[Any]):
    """Rows of six numbers, a target, and a kind that alternates every three samples (so ranks differ)."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(11)
        self.x = torch.randn(SAMPLES, 6, generator=generator).to(dtype)
        self.y = self.x[:, :1].sin() + self.x[:, 1:2] ** 2
        self.kind = torch.arange(SAMPLES) // 3 % 2

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[index], self.y[index], self.kind[index]


# --- Models ------------------------------------------------------------------------------------------------------


def squared(out: Tensor, y: Tensor) -> Tensor:
    """A loss whose gradient is large, in single precision at least."""
    wide = torch.promote_types(out.dtype, torch.float32)
    return 12 * F.mse_loss(out.to(wide), y.to(wide))


class Odd(sg.Module):
    """A module whose loss is a method of its own, so that a plain loop can train it, too."""

    #: Some step does not use all parameters: DDP has to be told.
    leaves_out = False

    def __init__(self, optimizer: str = "sgd", schedule: str = "none") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.optimizer_name, self.schedule = optimizer, schedule
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        x, y, _ = batch
        return squared(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": trained[::2]}, {"params": trained[1::2], "weight_decay": 0.01}]
        groups = [group for group in groups if group["params"]]
        make = {
            "sgd": lambda: torch.optim.SGD(groups, lr=1e-3, momentum=0.9, nesterov=True),
            "adamw": lambda: torch.optim.AdamW(groups, lr=2e-3, amsgrad=True),
            "adagrad": lambda: torch.optim.Adagrad(groups, lr=5e-3),
        }
        optimizer = make[self.optimizer_name]()
        if self.schedule == "none":
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 if self.schedule == "step" else 1, 0.6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


class Plain(Odd):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class TiedAndFrozen(Odd):
    """One weight under two names, a module used twice, a frozen layer, a scalar, an integer table."""

    def build(self) -> None:
        self.a, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.again = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.table = nn.Parameter(torch.arange(6).flip(0), requires_grad=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x[:, self.table]))
        h = self.again(torch.tanh(self.again(self.frozen(h)) * self.gain))
        return self.head(self.first(h) + self.second(torch.tanh(h)))


class WithoutElements(Odd):
    """A parameter without elements, and one that no loss reaches."""

    leaves_out = True

    def build(self) -> None:
        self.net, self.empty, self.never = nn.Linear(6, 1), nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.empty.sum()


class WeightNorm(Odd):
    def build(self) -> None:
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(6, 12))
        self.b = nn.utils.parametrizations.weight_norm(nn.Linear(12, 1), dim=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class FrozenBatchNorm(Odd):
    """Batch normalization that its constructor put into evaluation: its statistics stay."""

    def build(self) -> None:
        self.a, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.norm.running_mean.fill_(0.2)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.a(x))))


class Recurrent(Odd):
    def build(self) -> None:
        self.rnn, self.head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.view(-1, 3, 2))[0][:, -1])


class Attention(Odd):
    """Attention over tokens, recomputed in backward."""

    def build(self) -> None:
        self.up, self.norm, self.head = nn.Linear(2, 8), nn.LayerNorm(8), nn.Linear(8, 1)
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)  # a bias of keys has no gradient

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x.view(-1, 3, 2)))
        h = h + checkpoint(lambda t: self.attention(t, t, t, need_weights=False)[0], h, use_reentrant=False)
        return self.head(h.mean(1))


class Convolution(Odd):
    """Channels-last weights, group normalization."""

    def build(self) -> None:
        self.conv = nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x.view(-1, 1, 2, 3)))).flatten(1))


class Embedded(Odd):
    def build(self) -> None:
        self.table, self.head = nn.Embedding(32, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x * 4).long().clamp(-15, 15) + 16).mean(1))


class TwoDtypes(Odd):
    """One layer in double precision."""

    def build(self) -> None:
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)).double()
        with torch.autocast("cpu", enabled=False):
            return self.b(h)


class Complex(Odd):
    def build(self) -> None:
        dtype = torch.promote_types(torch.get_default_dtype(), torch.complex64)
        self.a, self.head = nn.Parameter(torch.randn(6, 4, dtype=dtype)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(self.a.dtype) @ self.a).abs().to(self.head.weight.dtype))


class Branching(Odd):
    """Another layer for each kind of sample; a batch has one kind or two, and ranks differ."""

    leaves_out = True

    def build(self) -> None:
        self.cat, self.dog, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 1)

    def loss(self, batch: Any) -> Tensor:
        x, y, kind = batch
        layer = self.cat if kind[0] == 0 else self.dog
        return squared(self.head(torch.tanh(layer(x))), y)


class DynamicDepth(Odd):
    """A layer is left out every other batch, on all ranks alike."""

    leaves_out = True

    def build(self) -> None:
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.index = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.index = batch_idx
        return {"loss": super().training_step(batch, batch_idx), "more": batch_idx}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.head(h if self.index % 2 else torch.tanh(self.b(h)))


class Twice(Odd):
    """Two forward passes in one step, and a gradient penalty on the input."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y, _ = batch
        x = x.detach().requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return squared(out, y) + squared(slope, torch.zeros_like(slope)) + squared(self(-x), y)


class Counting(Odd):
    """Buffers that every step changes, one of integers; not all of them are saved."""

    count: Tensor
    scale: Tensor

    def build(self) -> None:
        self.net = nn.Linear(6, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.net(x) * self.scale


MODELS: dict[str, type[Odd]] = {
    cls.__name__: cls
    for cls in (
        Plain, TiedAndFrozen, WithoutElements, WeightNorm, FrozenBatchNorm, Recurrent, Attention, Convolution, Embedded,
        TwoDtypes, Complex, Branching, DynamicDepth, Twice, Counting,
    )
}  # fmt: skip

# --- Trials ------------------------------------------------------------------------------------------------------

STRATEGIES: dict[str, Any] = {
    "single_device": "single_device",
    "ddp": "ddp",
    "ddp unused": "ddp_find_unused_parameters_true",
    "ddp static": {"name": "ddp", "static_graph": True},
    "ddp small buckets": {"name": "ddp", "bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
    "ddp_sharded": "ddp_sharded",
    "fsdp": "fsdp",
    "fsdp linear": {"name": "fsdp", "auto_wrap_policy": {nn.Linear}},
    "fsdp grad op": {"name": "fsdp", "sharding_strategy": "SHARD_GRAD_OP", "auto_wrap_policy": {nn.Linear}},
    "fsdp no shard": {"name": "fsdp", "sharding_strategy": "NO_SHARD"},
    "fsdp offload": "fsdp_cpu_offload",
    "local_sgd": {"name": "local_sgd", "period": 1},
}
ACCUMULATIONS: tuple[Any, ...] = (1, 1, 2, 3, {0: 1, 1: 2})
CLIPPINGS = ((None, "norm"), (0.5, "norm"), (0.05, "value"))
PRECISIONS = ("32", "32", "32", "64-true", "bf16-mixed", "16-mixed")
RESUMES = ("none", "none", "epoch", "within", "moved")
#: How far a weight may be from plain PyTorch's, relative to the tensor's norm.
TOLERANCES = {"32": 2e-5, "64-true": 1e-10, "bf16-mixed": 2e-2, "16-mixed": 1e-2}


@frozen(kw_only=True)
class Trial:
    model: str
    strategy: str
    world_size: int
    accumulate: Any
    clip: tuple[float | None, str]
    precision: str
    optimizer: str
    schedule: str
    resume: str

    def __str__(self) -> str:
        clip = "" if self.clip[0] is None else f" clip={self.clip[1]}:{self.clip[0]}"
        return (
            f"{self.model} {self.strategy.replace(' ', '-')} ranks={self.world_size} acc={self.accumulate}{clip} "
            f"{self.precision} {self.optimizer} schedule={self.schedule} resume={self.resume}"
        ).replace(" ", "_")


def trials(count: int, seed: int = 0) -> list[Trial]:
    """Return `count` different combinations, every model with every strategy first."""
    chance, found = random.Random(seed), []
    pairs = [
        (model, strategy)
        for model, strategy in itertools.product(MODELS, STRATEGIES)
        # Local SGD does not step what a rank did not use, and averages that with what others stepped.
        if not (strategy == "local_sgd" and MODELS[model].leaves_out)
    ]
    chance.shuffle(pairs)
    for model, strategy in itertools.islice(itertools.cycle(pairs), count):
        trial = Trial(
            model=model, strategy=strategy,
            world_size=1 if strategy == "single_device" else chance.choice((1, 2, 2, 2, 3)),
            accumulate=chance.choice(ACCUMULATIONS), clip=chance.choice(CLIPPINGS),
            precision=chance.choice(PRECISIONS), optimizer=chance.choice(("sgd", "adamw", "adagrad")),
            schedule=chance.choice(("none", "step", "epoch")), resume=chance.choice(RESUMES),
        )  # fmt: skip
        if trial.precision.endswith("mixed"):  # where a gradient is near zero, the others step by the noise's sign
            trial = evolve(trial, optimizer="sgd")
        if strategy == "local_sgd":  # averages weights: what is not linear in the gradients is another method
            trial = evolve(trial, optimizer="sgd", clip=CLIPPINGS[0])
        found.append(trial)
    return found


def outcome(trial: Trial, limit_s: float = 360) -> str:
    """Run `trial`; return "equal" or "refused: SENTENCE".

    Raises:
        AssertionError: a weight differs from plain PyTorch's, ranks differ, or some rank failed with something else
            than a sentence.
    """
    with tempfile.TemporaryDirectory() as folder:
        if trial.resume == "moved":  # begun in another layout, in another format
            begun = evolve(trial, strategy="fsdp linear" if "fsdp" not in trial.strategy else "ddp unused")
            begun = evolve(begun, world_size=trial.world_size)
            first = _told(run_in_processes(_train, begun.world_size, begun, folder, "begin", limit_s=limit_s))
            if isinstance(first, str):
                trial = evolve(trial, resume="epoch")
        if trial.resume in ("epoch", "within"):
            first = _told(run_in_processes(_train, trial.world_size, trial, folder, "begin", limit_s=limit_s))
            if isinstance(first, str):
                return first
        part = "all" if trial.resume == "none" else "go on"
        weights = _told(run_in_processes(_train, trial.world_size, trial, folder, part, limit_s=limit_s))
    if isinstance(weights, str):
        return weights
    expected = train_plainly(trial)
    assert weights.keys() == expected.keys(), f"names differ: {sorted(weights.keys() ^ expected.keys())}"
    size = torch.stack([_norm(tensor) for tensor in expected.values()]).norm()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype, f"{name} is {weights[name].dtype}, plain PyTorch's {tensor.dtype}"
        distance = float(_norm(weights[name] - tensor) / size)
        assert distance <= TOLERANCES[trial.precision], f"{name} is {distance:.1e} away from plain PyTorch's"
    return "equal"


def _norm(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128).norm()


def _told(ranks: list[Any]) -> Any:
    """Return rank 0's weights, or the sentence of a refusal; all ranks must agree which."""
    refused = [rank for rank in ranks if isinstance(rank, str)]
    assert len(refused) in (0, len(ranks)), f"some ranks refused and others trained: {ranks}"
    if not refused:
        return ranks[0]
    return refused[0]


def _module(trial: Trial) -> Odd:
    with _default_dtype(trial):
        return MODELS[trial.model](trial.optimizer, trial.schedule)


@contextlib.contextmanager
def _default_dtype(trial: Trial) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if trial.precision == "64-true" else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _dtype(trial: Trial) -> torch.dtype:
    return torch.float64 if trial.precision == "64-true" else torch.float32


def _train(rank: int, world_size: int, trial: Trial, folder: str, part: str) -> Any:
    warnings.simplefilter("ignore")
    saved = Path(folder) / "between.ckpt"
    stop = {} if part != "begin" else {"max_epochs": 1} if trial.resume != "within" else {"max_steps": 2}
    form = {"checkpoint": "sharded"} if trial.resume == "moved" and part == "begin" else {}
    try:
        module = _module(trial)
        trainer = sg.Trainer(
            strategy=STRATEGIES[trial.strategy], devices=world_size, precision=trial.precision,
            accumulate_grad_batches=trial.accumulate, gradient_clip_val=trial.clip[0],
            gradient_clip_algorithm=trial.clip[1], default_root_dir=folder,
            **QUIET, **form, **({"max_epochs": EPOCHS} | stop),
        )  # fmt: skip
        # Without shuffling, for the plain loop to see the same batches.
        loader = DataLoader(Samples(_dtype(trial)), BATCH_SIZE)
        trainer.fit(module, loader, ckpt_path=saved if part == "go on" else None)
        if part == "begin":
            trainer.save_checkpoint(saved)
            return {}
        with trainer.run.gathered_state():
            state = trainer.run.ask("model_state", module=module)
        return {name: value.detach().clone() for name, value in state.items() if not value.is_meta}
    except StratagemError as error:
        return f"refused: {error}"


# --- The reference: one process, plain PyTorch -------------------------------------------------------------------


def train_plainly(trial: Trial) -> dict[str, Tensor]:
    """Train on every rank's batches in one process: gradients averaged over ranks, summed over windows."""
    module = _module(trial)
    made = module.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    scheduler = made["lr_scheduler"]["scheduler"] if isinstance(made, dict) else None
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0) if trial.precision == "16-mixed" else None
    data, size, norms = Samples(_dtype(trial)), trial.world_size, []
    shares = [_share(rank, size) for rank in range(size)]
    for epoch in range(EPOCHS):
        window = trial.accumulate
        if isinstance(window, dict):
            window = next(factor for start, factor in reversed(window.items()) if start <= epoch)
        batches = [[share[i : i + BATCH_SIZE] for i in range(0, len(share), BATCH_SIZE)] for share in shares]
        gradients: list[list[Tensor | None]] = [[None for _ in module.parameters()] for _ in range(size)]
        for index in range(len(batches[0])):
            module.index = index  # type: ignore[assignment] # for DynamicDepth
            counted = {name: buffer.clone() for name, buffer in module.named_buffers()}
            for rank in range(size):
                with torch.no_grad():  # each rank has buffers of its own
                    for name, buffer in module.named_buffers():
                        buffer.copy_(counted[name])
                for parameter, gradient in zip(module.parameters(), gradients[rank], strict=True):
                    parameter.grad = gradient
                items = [data[i] for i in batches[rank][index]]
                batch = [torch.stack(column) for column in zip(*items, strict=True)]
                loss = _autocast_loss(module, batch, trial.precision) / window_size(index, len(batches[0]), window)
                (loss if scaler is None else scaler.scale(loss)).backward()
                gradients[rank] = [parameter.grad for parameter in module.parameters()]
            if (index + 1) % window and index + 1 < len(batches[0]):
                continue
            for parameter, *those in zip(module.parameters(), *gradients, strict=True):
                there = [gradient for gradient in those if gradient is not None]
                parameter.grad = sum(there[1:], there[0]) / size if there else None
            norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])))
            stepped = _step(trial, module, optimizer, scaler)
            gradients = [[None for _ in module.parameters()] for _ in range(size)]
            if scheduler is not None and trial.schedule == "step" and stepped:
                scheduler.step()
        if scheduler is not None and trial.schedule == "epoch":
            scheduler.step()
    finite = [norm for norm in norms if norm < float("inf")]
    assert not finite or max(finite) > 1, "a small gradient proves nothing"
    return copy.deepcopy(module.state_dict())


def _share(rank: int, size: int) -> list[int]:
    """The samples of one rank: every so many, the first ones again where they do not divide."""
    padded = list(range(SAMPLES)) + list(range(-SAMPLES % size))
    return padded[rank::size]


def _autocast_loss(module: Odd, batch: Any, precision: str) -> Tensor:
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    if dtype is None:
        return module.loss(batch)
    with torch.autocast("cpu", dtype=dtype):
        return module.loss(batch)


def _step(trial: Trial, module: Odd, optimizer: torch.optim.Optimizer, scaler: Any) -> bool:
    """Clip and step; return False where a gradient overflowed and the step was skipped."""
    before = None if scaler is None else scaler.get_scale()
    if scaler is not None:
        scaler.unscale_(optimizer)
    limit, algorithm = trial.clip
    trained = [p for p in module.parameters() if p.grad is not None]
    if limit is not None and algorithm == "norm":
        nn.utils.clip_grad_norm_(trained, limit)
    elif limit is not None:
        nn.utils.clip_grad_value_(trained, limit)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return scaler is None or scaler.get_scale() >= before


# --- As a program ------------------------------------------------------------------------------------------------


def _summary(text: str) -> str:
    """The first line of a failure and the last one of its first traceback."""
    first = text.partition("\n--- rank 1")[0].strip().splitlines()
    return first[0] if len(first) < 2 else f"{first[0]}: {first[-1]}"


def main(count: int, seed: int = 0) -> int:
    counts: dict[str, int] = {}
    for number, trial in enumerate(trials(count, seed)):
        began = time.monotonic()
        try:
            result = outcome(trial)
        except (AssertionError, ProcessesFailed) as error:
            kind = "FAILED" if isinstance(error, ProcessesFailed) else "DIFFERS"
            result = f"{kind}: {_summary(str(error))}"
        word = result.partition(":")[0]
        counts[word] = counts.get(word, 0) + 1
        print(f"{number} {trial} {time.monotonic() - began:.1f}s {result}", flush=True)
    print(", ".join(f"{number} {word}" for word, number in counts.items()))
    return sum(number for word, number in counts.items() if word not in ("equal", "refused"))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400, int(sys.argv[2]) if len(sys.argv) > 2 else 0))
