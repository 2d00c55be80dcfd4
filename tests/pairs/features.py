"""The features that meet. A new one is one declaration in `FEATURES`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import stratagem as sg
from stratagem.callbacks import (
    EMA,
    AutoMicrobatch,
    GradientAccumulationScheduler,
    LearningRateFinder,
    OptimizerInBackward,
    StochasticWeightAveraging,
)

from .plain import INFINITE, LARGE, POISONED, SKIPPED, Batch, Loop, Net, loss_of, mean, targets
from .program import Feature, Program

# --- Losses --------------------------------------------------------------------------------------------------------


def masked(batches: list[Batch]) -> list[Batch]:
    """Return batches of which some have few targets."""
    result = []
    for number, batch in enumerate(batches):
        labels, samples = batch["labels"], torch.arange(len(batch["labels"]))
        keeps = 2 + (samples * (1 + number % 2) + number) % 3
        is_target = torch.arange(labels.shape[1]) < keeps[:, None]
        result.append(batch | {"labels": labels.where(is_target, -100)})
    return result


class Sums:
    def loss(self, batch):
        return {"loss": loss_of(self.scores(batch), batch, reduction="sum"), "count": targets(batch)}


def sums(loop: Loop, program: Program) -> None:
    loop.counts = targets


def tokens(loop: Loop, program: Program) -> None:
    loop.counts, loop.counts_left_out = targets, True


def in_windows(plain: Any) -> Any:
    def of_two(loop: Loop, program: Program) -> None:
        loop.accumulate = lambda epoch: 2
        plain(loop, program)

    return of_two


#: A count beside a loss means nothing there; of methods that are not called there `hints` warns.
NOT_BY_HAND = frozenset({"sums with counts", "configure_gradient_clipping", "optimizer_step"})
#: What refuses windows whatever the loss is.
STEPS_EACH_BATCH = frozenset({"LBFGS", "optimizer_in_backward", "manual optimization"})


class LeavesOut:
    def training_step(self, batch, batch_idx):
        return None if batch_idx == SKIPPED else super().training_step(batch, batch_idx)


def leave_out(loop: Loop, program: Program) -> None:
    loop.leaves_out = {SKIPPED}


# --- Optimizers ----------------------------------------------------------------------------------------------------


def two_optimizers(net: Net, lr: float) -> list[Any]:
    some = [*net.first.parameters(), *net.direct.parameters()]
    return [torch.optim.SGD(some, lr, momentum=0.5), torch.optim.AdamW(net.last.parameters(), lr)]


def groups(net: Net, lr: float) -> list[Any]:
    weights = {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.3}
    biases = {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 2 * lr}
    return [torch.optim.AdamW([weights, biases], lr)]


def schedule_free(net: Net, lr: float) -> list[Any]:
    return [schedulefree.SGDScheduleFree(net.parameters(), lr=lr, momentum=0.7, warmup_steps=3)]


def switch_modes(loop: Loop, program: Program) -> None:
    loop.begin.append(lambda: [each.train() for each in loop.optimizers])
    loop.end.append(lambda: [each.eval() for each in loop.optimizers])


def lbfgs(net: Net, lr: float) -> list[Any]:
    return [torch.optim.LBFGS(net.parameters(), lr, max_iter=2, history_size=1)]


def freeze(net: Net) -> None:
    net.last.weight.requires_grad_(False)


def shrink(parameters: Any) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.97)


def triple_gradient(net: Net) -> None:
    net.first.bias.register_hook(lambda gradient: 3 * gradient)


def shrink_after_step(optimizer: Any) -> None:
    optimizer.register_step_post_hook(lambda each, *_: shrink(p for g in each.param_groups for p in g["params"]))


def reduce_on_plateau(optimizer: Any) -> Any:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    scheduler.best = 0.5  # better than the metric ever is
    return scheduler


def one_cycle(optimizer: Any) -> Any:
    rates = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, rates, total_steps=20, cycle_momentum=False)


# --- Methods of the module -----------------------------------------------------------------------------------------


class OwnStep:
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        shrink(self.parameters())


def own_step(loop: Loop, program: Program) -> None:
    loop.after_optimizers.append(lambda: shrink(loop.model.parameters()))


class OwnClipping:
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.7, gradient_clip_algorithm="norm")


def clip_norm(limit: float, each: bool = False) -> Any:
    def plain(loop: Loop, program: Program) -> None:
        loop.clip, loop.clips_each = lambda parameters: nn.utils.clip_grad_norm_(parameters, limit), each

    return plain


def clip_value(loop: Loop, program: Program) -> None:
    loop.clip = lambda parameters: parameters and nn.utils.clip_grad_value_(parameters, 0.05)


class BeforeStep:
    def on_before_optimizer_step(self, optimizer):
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if id(self.net.last.bias) in own and self.net.last.bias.grad is not None:
            self.net.last.bias.grad.mul_(-2.0)


def before_step(loop: Loop, program: Program) -> None:
    loop.factors["last.bias"] = -2.0


class OwnBackward:
    def backward(self, loss):
        (-0.5 * loss).backward()


def own_backward(loop: Loop, program: Program) -> None:
    loop.factors.update({name: -0.5 * loop.factors.get(name, 1.0) for name, _ in loop.model.named_parameters()})


class ByHand:
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]

        def closure():
            for each in optimizers:
                each.zero_grad()
            loss = super(ByHand, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        if isinstance(optimizers[0].optimizer, torch.optim.LBFGS):
            stepped = [optimizers[0].step(closure)]
        else:
            closure()
            stepped = [each.step() for each in optimizers]
        if any(stepped) and self.program.make_scheduler and self.program.interval == "step":
            self.step_schedulers(schedulers)

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        if not self.program.make_scheduler or self.program.interval == "epoch":
            self.step_schedulers(self.lr_schedulers())  # those of a callback, too

    def step_schedulers(self, found):
        for each in found if isinstance(found, list) else [found] if found else []:
            each.step(1.0) if isinstance(each, lr_scheduler.ReduceLROnPlateau) else each.step()


def by_hand(loop: Loop, program: Program) -> None:
    loop.steps_alone = True


class EndsEarly:
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.trainer.current_epoch == 1 and batch_idx == 4 else None


def ends_early(loop: Loop, program: Program) -> None:
    loop.ends_early = {1: 4}


class LogsConstant:
    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.log("constant", 1.0)


class Validates:
    def validation_step(self, batch):
        self.calls["validation_step"] += 1
        self.log("val_loss", loss_of(self.scores(batch), batch))


# --- Precisions ----------------------------------------------------------------------------------------------------


def autocast(dtype: torch.dtype, scale: float | None = None) -> Any:
    def plain(loop: Loop, program: Program) -> None:
        loop.compute, loop.scale = lambda: torch.autocast("cpu", dtype), scale

    return plain


def true(dtype: torch.dtype) -> Any:
    return lambda loop, program: loop.model.to(dtype)


def poisoned(token: int, batches: list[Batch]) -> list[Batch]:
    """Put `token` into two samples of a batch, in both halves."""
    ids = batches[POISONED]["input_ids"].clone()
    ids[1, 1] = ids[-1, 1] = token
    return [batch | {"input_ids": ids} if number == POISONED else batch for number, batch in enumerate(batches)]


# --- Averages ------------------------------------------------------------------------------------------------------


def average_exponentially(loop: Loop, program: Program) -> None:
    average: list[Tensor] = []

    def update() -> None:
        weights = [parameter.detach() for parameter in loop.model.parameters()]
        if not average:
            average.extend(weight.clone() for weight in weights)
        else:
            for old, weight in zip(average, weights, strict=True):
                old.add_(weight - old, alpha=0.2)

    loop.after_step.append(update)
    loop.end.append(lambda: put(average, loop.model))


def average_epochs(loop: Loop, program: Program) -> None:
    found: list[list[Tensor]] = []

    def begin(epoch: int) -> None:
        if epoch == 0:
            loop.interval, loop.schedulers = "epoch", [SWALR(loop.optimizers[0], 0.01, 1, "linear")]

    def keep(epoch: int) -> None:
        found.append([parameter.detach().clone() for parameter in loop.model.parameters()])

    loop.before_epoch.append(begin)
    loop.after_epoch.append(keep)
    loop.end.append(lambda: put([torch.stack(each).mean(0) for each in zip(*found, strict=True)], loop.model))


def put(values: list[Tensor], model: nn.Module) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


# --- Fits ----------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """The program ends within a window."""


class SavesAndStops(sg.Callback):
    @sg.hookimpl
    def on_train_batch_end(self, trainer, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 1):
            trainer.save_checkpoint("middle.ckpt")
            raise Stopped


def resumed(program: Program) -> None:
    first = program.arguments()
    with contextlib.suppress(Stopped):
        program.fit(first | {"callbacks": [*first["callbacks"], SavesAndStops()]})
    program.fit(program.arguments(), seed=4, ckpt_path=Path("middle.ckpt").resolve())


def second_model(program: Program) -> None:
    arguments = program.arguments()
    program.fit(arguments, seed=5)
    program.fit(arguments)


# --- Data ----------------------------------------------------------------------------------------------------------


class TwoLoaders:
    def training_step(self, batch, batch_idx):
        first, second = batch
        joined = {key: torch.cat([first[key], second[key]]) for key in first}
        return super().training_step(joined, batch_idx)


def two_loaders(batches: list[Batch]) -> Any:
    halves = [[{key: tensor.chunk(2)[half] for key, tensor in batch.items()} for batch in batches] for half in (0, 1)]
    return sg.CombinedLoader(halves)


def packed(batches: list[Batch]) -> list[Batch]:
    """Return batches with two documents in a row."""
    from stratagem_sequences import PackingCollator

    collate = PackingCollator(max_tokens=2 * batches[0]["labels"].shape[1])
    rows = []
    for batch in batches:
        documents = [
            {"input_ids": ids, "labels": labels}
            for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
        ]
        row = collate(documents)
        rows.append({key: row[key] for key in ("input_ids", "labels", "document_ids")})
    return rows


class Packed:
    def scores(self, batch):
        from stratagem_sequences import document_attention

        return self.net(batch, document_attention(batch["document_ids"]))


def unpacked(loop: Loop, program: Program) -> None:
    """Compute each document alone: rows hold two, and no loss counts the first token of each."""
    loop.loss = lambda model, batch: loss_of(model(halved(batch)), halved(batch))


def halved(batch: Batch) -> Batch:
    return {key: batch[key].unflatten(1, (2, -1)).flatten(0, 1) for key in ("input_ids", "labels")}


def divide_as_full(loop: Loop, program: Program) -> None:
    loop.accumulate, loop.divides_as_full = lambda epoch: 4, True


def first_batches(count: int) -> Any:
    def plain(loop: Loop, program: Program) -> None:
        loop.batches = loop.batches[:count]

    return plain


def found_rate(loop: Loop, program: Program) -> None:
    loop.lr = found_by(program) or loop.lr


def found_by(program: Program) -> float | None:
    if not program.trainers:
        return 0.2  # plain loops are compared with each other
    return program.callback(LearningRateFinder, fit=0 if len(program.trainers) > 1 else -1).suggestion


def argument(**given: Any) -> Any:
    return lambda: dict(given)


def callback(kind: type, **options: Any) -> Any:
    return lambda: {"callbacks": [kind(**options)]}


FEATURES = [
    Feature(name="sums with counts", kind="loss", batches=masked, module=Sums, plain=sums, reorders=True, acted=lambda _: True),
    Feature(
        name="loss per token", kind="loss", batches=masked, acted=lambda _: True,
        plain=tokens,
        arguments=argument(loss_normalization="tokens"),
    ),
    Feature(
        name="sums with counts in windows", kind="loss window", batches=masked, module=Sums, reorders=True,
        plain=in_windows(sums), arguments=argument(accumulate_grad_batches=2), not_with=STEPS_EACH_BATCH,
    ),
    Feature(
        name="loss per token in windows", kind="loss window", batches=masked, plain=in_windows(tokens), not_with=STEPS_EACH_BATCH,
        arguments=argument(loss_normalization="tokens", accumulate_grad_batches=2),
    ),
    Feature(name="two optimizers", kind="optimizer", optimizers=two_optimizers),
    Feature(name="parameter groups", kind="optimizer", optimizers=groups),
    Feature(name="schedule-free", kind="optimizer", optimizers=schedule_free, plain=switch_modes),
    Feature(name="LBFGS", kind="optimizer", optimizers=lbfgs, tolerance=1e-7),
    Feature(name="frozen parameters", prepare=freeze),
    Feature(name="gradient hook", prepare=triple_gradient),
    Feature(name="optimizer hook", of_optimizer=shrink_after_step),
    Feature(
        name="accumulation", kind="window", arguments=argument(accumulate_grad_batches=3),
        plain=lambda loop, program: setattr(loop, "accumulate", lambda epoch: 3),
    ),
    Feature(
        name="accumulation by epoch", kind="window", arguments=callback(GradientAccumulationScheduler, scheduling={0: 2, 1: 3}),
        plain=lambda loop, program: setattr(loop, "accumulate", lambda epoch: 2 + epoch),
    ),
    Feature(
        name="average_short_window=False", kind="window", plain=divide_as_full,
        arguments=argument(accumulate_grad_batches=4, average_short_window=False),
    ),
    Feature(
        name="clipping by norm", kind="clipping", arguments=argument(gradient_clip_val=0.7), plain=clip_norm(0.7)
    ),
    Feature(
        name="clipping by value", kind="clipping", plain=clip_value,
        arguments=argument(gradient_clip_val=0.05, gradient_clip_algorithm="value"),
    ),
    Feature(name="configure_gradient_clipping", kind="clipping", module=OwnClipping, plain=clip_norm(0.7, each=True)),
    Feature(name="on_before_optimizer_step", module=BeforeStep, plain=before_step),
    Feature(name="optimizer_step", module=OwnStep, plain=own_step),
    Feature(name="backward", module=OwnBackward, plain=own_backward),
    Feature(
        name="bf16-mixed", kind="precision", dtype=torch.float32, arguments=argument(precision="bf16-mixed"),
        plain=autocast(torch.bfloat16),
        tolerance=1e-5,
        reordered=5e-3,
    ),
    Feature(
        name="16-mixed", kind="precision", dtype=torch.float32, tolerance=1e-5, reordered=1e-3, plain=autocast(torch.float16, 64.0),
        arguments=lambda: {"precision": {"name": "16-mixed", "init_scale": 64.0}},
        batches=functools.partial(poisoned, LARGE),
    ),
    Feature(
        name="bf16-true", kind="precision", dtype=torch.float32, arguments=argument(precision="bf16-true"),
        plain=true(torch.bfloat16),
        tolerance=1e-3,
        reordered=0.03,
    ),
    Feature(
        name="64-true", kind="precision", dtype=torch.float32, arguments=argument(precision="64-true"),
        plain=true(torch.float64),
    ),
    Feature(
        name="schedule by steps", kind="schedule", scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.8)
    ),
    Feature(
        name="schedule by epochs", kind="schedule", interval="epoch",
        scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.1),
    ),
    Feature(
        name="ReduceLROnPlateau", kind="schedule", interval="epoch", scheduler=reduce_on_plateau, module=LogsConstant
    ),
    Feature(name="OneCycleLR", kind="schedule", scheduler=one_cycle),
    Feature(name="ema", kind="average", arguments=callback(EMA, decay=0.8), plain=average_exponentially),
    Feature(
        name="stochastic_weight_averaging",
        hides="schedule", kind="average", plain=average_epochs,
        arguments=callback(StochasticWeightAveraging, swa_lrs=0.01, swa_epoch_start=0, annealing_epochs=1, annealing_strategy="linear"),
    ),
    Feature(
        name="finite skips", arguments=lambda: {"checks": {"name": "finite", "action": "skip"}},
        batches=functools.partial(poisoned, INFINITE), plain=lambda loop, program: setattr(loop, "skips", True),
    ),
    Feature(
        name="learning_rate_finder", plain=found_rate,
        arguments=callback(LearningRateFinder, min_lr=1e-3, max_lr=1.0, num_training_steps=20),
    ),
    Feature(
        name="auto_microbatch", reorders=True, arguments=callback(AutoMicrobatch, microbatches=2),
        acted=lambda program: program.callback(AutoMicrobatch).count == 2,
    ),
    Feature(name="optimizer_in_backward", arguments=callback(OptimizerInBackward), acted=lambda _: True),
    Feature(
        name="activation_checkpointing", arguments=argument(activation_checkpointing={"Linear"}),
        acted=lambda _: True,
    ),
    Feature(
        name="validation", arguments=argument(val_check_interval=2), module=Validates,
        acted=lambda program: program.module.calls["validation_step"] > 0,
    ),
    Feature(
        name="manual optimization", module=ByHand, plain=by_hand, not_with=NOT_BY_HAND,
        acted=lambda program: program.trainer.run.manual,
    ),
    Feature(name="None for a batch", module=LeavesOut, plain=leave_out),
    Feature(name="epoch that ends early", kind="epoch", module=EndsEarly, plain=ends_early),
    Feature(name="overfit_batches", kind="epoch", arguments=argument(overfit_batches=3), plain=first_batches(3)),
    Feature(name="packed documents", batches=packed, module=Packed, plain=unpacked, reorders=True, acted=lambda _: True),
    Feature(name="two loaders", module=TwoLoaders, loader=two_loaders, acted=lambda _: True),
    Feature(
        name="resumed in a window", kind="fit", fit=resumed, acted=lambda program: len(program.trainers) == 2
    ),
    Feature(
        name="callbacks of an earlier fit", kind="fit", fit=second_model, acted=lambda program: len(program.trainers) == 2
    ),
]  # fmt: skip


# --- Several processes ---------------------------------------------------------------------------------------------


def strategy(name: str, chosen: Any = None, **options: Any) -> Feature:
    given = argument(strategy=chosen or name)
    return Feature(name=name, kind="strategy", ranks=2, reorders=True, arguments=given, acted=lambda _: True, **options)


def hook(name: str, tolerance: float, reduction: Any = None, **options: Any) -> Feature:
    """Return a comm hook; `reduction` makes what averages in the plain loop where that is not the mean."""

    def plain(loop: Loop, program: Program) -> None:
        if reduction is not None:
            reduction(loop)

    return Feature(
        name=name, kind="comm_hook", ranks=2, arguments=argument(comm_hook={"name": name, **options}), plain=plain,
        tolerance=tolerance, reorders=True, not_with=frozenset({"parallel, shard"} if name == "topk" else ()),
    )  # fmt: skip


def largest(loop: Loop, ratio: float) -> None:
    """Average the largest gradients of each rank, which keeps the others for its next step."""
    residuals: list[Any] = [0.0] * loop.ranks

    def reduce(of_ranks: list[list[Tensor | None]]) -> list[Tensor | None]:
        total: Any = 0.0
        like = next(iter(of_ranks))
        for rank, gradients in enumerate(of_ranks):
            left = torch.cat([each.flatten() for each in gradients if each is not None]) + residuals[rank]
            sent = left.abs().topk(math.ceil(ratio * left.numel())).indices
            total = total + torch.zeros_like(left).index_copy_(0, sent, left[sent]) / len(of_ranks)
            residuals[rank] = left.index_fill(0, sent, 0.0)
        parts = iter(total.split([each.numel() for each in like if each is not None]))
        return [None if each is None else next(parts).view_as(each) for each in like]

    loop.reduce = reduce
    loop.after_skip.append(lambda: residuals.__setitem__(slice(None), [0.0] * len(residuals)))


def rounded(loop: Loop, dtype: torch.dtype) -> None:
    loop.reduce = lambda of_ranks: mean(
        [[None if each is None else each.to(dtype).to(each.dtype) for each in rank] for rank in of_ranks]
    )


HOOKS = [
    hook("allreduce", 1e-9),
    hook("fp16_compress", 5e-3, lambda loop: rounded(loop, torch.float16)),
    hook("bf16_compress", 0.03, lambda loop: rounded(loop, torch.bfloat16)),
    hook("topk", 1e-9, lambda loop: largest(loop, 0.2), ratio=0.2),
    hook("int8", 0.03),
    hook("one_bit", 0.5, start_iter=2),
    hook("powersgd", 0.5, start_powerSGD_iter=2, matrix_approximation_rank=2, min_compression_rate=1.0),
]

STRATEGIES = [
    strategy("ddp"),
    strategy("ddp_sharded"),
    strategy("fsdp"),
    strategy("parallel, shard", {"name": "parallel", "shard": 2}),
    strategy("deepspeed_stage_1", dtype=torch.float32, tolerance=1e-4),
    strategy("deepspeed_stage_2", dtype=torch.float32, tolerance=1e-4),
    strategy("deepspeed_stage_3", dtype=torch.float32, tolerance=1e-4),
]


def of_name(name: str) -> Feature:
    return next(each for each in [*FEATURES, *HOOKS, *STRATEGIES] if each.name == name)


def meet(*features: Feature) -> bool:
    """Whether a program can have these `features`."""
    return all(
        not set(a.kind.split(" ")) & set(b.kind.split(" ")) - {""}
        and a.name not in b.not_with
        and b.name not in a.not_with
        for a, b in itertools.combinations(features, 2)
    )


#: In one process.
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if meet(*pair)]
#: In two.
HOOK_PAIRS = [(feature, each) for each in HOOKS for feature in FEATURES]
STRATEGY_PAIRS = [(feature, each) for each in STRATEGIES for feature in [*FEATURES, *HOOKS] if meet(feature, each)]
TRIPLES = [
    (*pair, each)
    for each in STRATEGIES
    for pair in [*PAIRS, *HOOK_PAIRS]
    # A rank's part of the last packed batch is one row, which two loaders cannot divide.
    if meet(*pair, each) and {"packed documents", "two loaders"} != {feature.name for feature in pair}
]


def title(features: Iterable[Feature]) -> str:
    return " + ".join(each.name for each in features)
