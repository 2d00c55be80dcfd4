"""A user's program with a few features: its module, data and Trainer, and the plain loop that must equal it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem_testing.training import weights_of

from .plain import EPOCHS, Batch, Loop, Net, batches, loss_of, part

LR = 0.05
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": EPOCHS,
}  # fmt: skip


def _sgd(net: nn.Module, lr: float) -> list[Any]:
    return [torch.optim.SGD(net.parameters(), lr, momentum=0.5)]


def _fit(program: Program) -> None:
    program.fit(program.arguments())


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What a feature adds to a program, and what it changes in a plain loop. All but the name is optional."""

    name: str
    #: Features of one kind replace each other, so that no program has two. There may be two kinds, with a space.
    kind: str = ""
    #: Others with which it means nothing.
    not_with: frozenset[str] = frozenset()
    #: Processes that train, and into how many parts they divide a batch (all of them if not given).
    ranks: int = 1
    shards: int | None = None
    #: How far the weights may be from those of the plain loop, in parts of the way that they have moved.
    tolerance: float = 1e-9
    #: The same where another feature computes in another order, which rounds otherwise.
    reordered: float = 0.0
    reorders: bool = False
    #: The kind of features that it replaces, so that they change nothing.
    hides: str = "-"

    # --- The user's code, of which none is stratagem's ---
    dtype: torch.dtype | None = None
    prepare: Callable[[nn.Module], Any] = lambda net: None
    batches: Callable[[list[Batch]], list[Batch]] = lambda batches: batches
    optimizers: Callable[[nn.Module, float], list[Any]] | None = None
    scheduler: Callable[[Any], Any] | None = None
    interval: str = "step"
    #: Does something to each optimizer.
    of_optimizer: Callable[[Any], Any] = lambda optimizer: None

    # --- What stratagem is given ---
    arguments: Callable[[], dict[str, Any]] = dict
    module: type = object
    loader: Callable[[list[Any]], Any] = lambda batches: batches
    fit: Callable[[Program], None] | None = None
    #: Whether it had an effect, for a feature that changes no weight.
    acted: Callable[[Program], bool] | None = None

    # --- What plain PyTorch does instead ---
    plain: Callable[[Loop, Program], None] = lambda loop, program: None

    def __str__(self) -> str:
        return self.name


class Module(sg.Module):
    """The user's module, without features."""

    def __init__(self, program: Program, seed: int = 0) -> None:
        super().__init__()
        self.program, self.lr, self.calls = program, LR, Counter[str]()
        self.net = Net(seed, program.dtype)
        program.prepare(self.net)

    def scores(self, batch: Batch) -> Tensor:
        return self.net(batch)

    def loss(self, batch: Batch) -> Any:
        return loss_of(self.scores(batch), batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls["training_step"] += 1
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizers = self.program.make_optimizers(self.net, self.lr)
        make = self.program.make_scheduler
        common = {"interval": self.program.interval, "monitor": "constant"}
        return optimizers, [common | {"scheduler": make(each)} for each in optimizers] if make else []


class Program:
    """One program: `features`, in one process or in each of several."""

    def __init__(self, features: Iterable[Feature]) -> None:
        self.features = list(features)
        self.ranks = max([each.ranks for each in self.features], default=1)
        self.shards = min([each.shards for each in self.features if each.shards], default=self.ranks)
        self.trainers: list[sg.Trainer] = []
        self.modules: list[Module] = []
        self.dtype = self._last("dtype") or torch.float64
        self.make_scheduler, self.interval = self._last("scheduler"), self._last("interval", "step")
        self.batches = batches()
        for feature in self.features:
            self.batches = feature.batches(self.batches)

    def _last(self, name: str, default: Any = None) -> Any:
        found = [getattr(each, name) for each in self.features if getattr(each, name) != default]
        return found[-1] if found else default

    @property
    def tolerance(self) -> float:
        tolerances = [each.tolerance for each in self.features]
        if any(each.reorders for each in self.features):
            tolerances += [each.reordered for each in self.features]
        return max(tolerances, default=1e-9)

    def make_optimizers(self, net: nn.Module, lr: float) -> list[Any]:
        optimizers = (self._last("optimizers") or _sgd)(net, lr)
        for feature in self.features:
            for optimizer in optimizers:
                feature.of_optimizer(optimizer)
        return optimizers

    def prepare(self, net: nn.Module) -> None:
        for feature in self.features:
            feature.prepare(net)

    # --- With stratagem ----------------------------------------------------------------------------------------------

    def arguments(self) -> dict[str, Any]:
        """Return new arguments of a Trainer."""
        all_arguments: dict[str, Any] = {"callbacks": []}
        for feature in self.features:
            given = feature.arguments()
            all_arguments["callbacks"] += given.pop("callbacks", [])
            assert not all_arguments.keys() & given.keys(), "features of one kind do not meet"
            all_arguments |= given
        several = {} if self.ranks == 1 else {"strategy": "ddp"}
        return QUIET | {"devices": self.ranks} | several | all_arguments

    def fit(self, arguments: dict[str, Any], seed: int = 0, **options: Any) -> None:
        """Train a new module with a new Trainer."""
        mixins = [each.module for each in self.features if each.module is not object]
        module = type("User", (*reversed(mixins), Module), {})(self, seed)
        trainer = sg.Trainer(**arguments)
        self.trainers.append(trainer)
        self.modules.append(module)
        mine = self.batches
        if self.ranks > 1:
            trainer.run.connect()
            mine = [part(batch, trainer.run.mesh.data_shard, self.shards) for batch in mine]
        loader: Any = mine
        for feature in self.features:
            loader = feature.loader(loader)
        validation = mine[:2] if type(module).validation_step is not sg.Module.validation_step else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, loader, validation, **options)

    def train(self) -> Program:
        """Train with stratagem."""
        (self._last("fit") or _fit)(self)
        return self

    @property
    def trainer(self) -> sg.Trainer:
        return self.trainers[-1]

    @property
    def module(self) -> Module:
        return self.modules[-1]

    @property
    def weights(self) -> Tensor:
        """Return the trained parameters. Collective."""
        state = weights_of(self.trainer)
        names = [name for name, _ in Net().named_parameters()]
        return torch.cat([state[f"net.{name}"].double().flatten() for name in names])

    def callback(self, kind: type, fit: int = -1) -> Any:
        return next(each for each in self.trainers[fit].callbacks if isinstance(each, kind))

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for optimizer in self.trainer.optimizers for group in optimizer.param_groups]

    # --- Without -----------------------------------------------------------------------------------------------------

    def plainly(self, without: Feature | None = None) -> Loop:
        """Train with plain PyTorch; on the same data `without` one of the features."""
        program = self
        if without is not None:
            program = Program([each for each in self.features if each is not without])
        loop = Loop(self.shards)
        loop.lr, loop.batches, loop.model = LR, self.batches, Net(0, self.dtype)
        program.prepare(loop.model)
        loop.make_optimizers, loop.make_scheduler = program.make_optimizers, program.make_scheduler
        loop.interval = program.interval
        for feature in program.features:
            feature.plain(loop, self)
        return loop.train()
