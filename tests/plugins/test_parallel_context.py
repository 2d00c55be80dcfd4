"""Context parallelism: attention over parts, what is cut, and what is refused."""

from __future__ import annotations

import math
import re
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import CausalBias

import stratagem as sg
from stratagem.api.seeding import seeded
from stratagem_parallel import context_mean, context_offset, context_sum, local_attention
from stratagem_parallel.context.attention import SequenceAttention
from stratagem_parallel.context.losses import MeanOverAllTargets
from stratagem_testing import run_in_processes
from stratagem_testing.training import outcome, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
LENGTH = 8


def connected(world_size, **options):
    trainer = sg.Trainer(strategy={"name": "parallel", "context": world_size, **options}, devices=world_size, **QUIET)
    trainer.run.connect()
    return trainer


# --- Attention -----------------------------------------------------------------------------------------------------

#: Heads of queries and of keys, the mask's shape in terms of T (and whether it is cut: rows, keys), other options.
MASKS = {
    "none": (None, ()),
    "keys": ((1, "T"), ()),
    "keys of a part": ((1, "T"), (-1,)),
    "whole": (("T", "T"), ()),
    "rows of a part": (("T", "T"), (-2,)),
    "heads": (("H", "T", "T"), ()),
    "samples and keys": (("B", 1, 1, "T"), ()),
}


def _attentions(rank, world_size):
    """Compare outputs and gradients with those of whole sequences."""
    over = connected(world_size).run.strategy._groups.over("context")
    failed, compared = [], 0
    for heads, key_heads in ((4, 4), (4, 2), (3, 3)):
        for method in ("auto", "ulysses", "all_gather"):
            if method == "ulysses" and (heads % world_size or key_heads % world_size):
                continue
            for mask, causal in [*((name, False) for name in MASKS), ("none", True)]:
                for value_size in (4, 6):
                    difference = _difference(over, heads, key_heads, method, mask, causal, value_size)
                    compared += 1
                    if not difference < 1e-12:
                        failed.append((heads, key_heads, method, mask, causal, value_size, difference))
    return failed, compared


def _difference(over, heads, key_heads, method, mask_name, causal, value_size):
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def part(tensor, dim=-2):
        return tensor.chunk(over.world_size, dim)[over.rank]

    whole = [draw(2, heads, LENGTH, 4), draw(2, key_heads, LENGTH, 4), draw(2, key_heads, LENGTH, value_size)]
    upstream = draw(2, heads, LENGTH, value_size)
    shape, cuts = MASKS[mask_name]
    mask = None
    if shape is not None:
        sizes = {"T": LENGTH, "H": heads, "B": 2, 1: 1}
        mask = draw(*(sizes[each] for each in shape)) > -0.8
        mask[..., 0] = True
    options = {"is_causal": causal, "enable_gqa": heads != key_heads, "scale": 0.7}
    expected_inputs = [tensor.clone().requires_grad_() for tensor in whole]
    expected = F.scaled_dot_product_attention(*expected_inputs, attn_mask=mask, **options)
    expected.backward(upstream)
    for dim in cuts:
        mask = part(mask, dim)
    inputs = [part(tensor).clone().requires_grad_() for tensor in whole]
    found = SequenceAttention(F.scaled_dot_product_attention, over, method)(*inputs, attn_mask=mask, **options)
    found.backward(part(upstream))
    pairs = [(found, part(expected)), *((a.grad, part(b.grad)) for a, b in zip(inputs, expected_inputs, strict=True))]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.every_push("2")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_over_parts_is_attention_over_the_whole(world_size):
    for failed, compared in run_in_processes(_attentions, world_size, limit_s=360):
        assert failed == []
        assert compared > 80


def _counting_pairs():
    """Return a list to which each attention with a causal bias adds its number of pairs of positions."""
    pairs, plain = [], CausalBias.__torch_function__

    def counted(_, function, types, args=(), kwargs=None):
        if function is KEPT_IN[0]:
            queries, keys = (tensor.shape[-2] for tensor in args[:2])
            pairs.append(queries * keys - queries * (queries - 1) // 2)
        return plain(function, types, args, kwargs)

    CausalBias.__torch_function__ = classmethod(counted)
    return pairs


def _own_attention(query, key, value, attn_mask, **options):
    assert type(attn_mask) is torch.Tensor
    return KEPT_IN[0](query, key, value, attn_mask=attn_mask, **options)


def _causally(attend, length, over, lead=(2,), key_heads=2, dtypes=(torch.float64,) * 3):
    """Return the largest relative difference of outputs and gradients from those of whole sequences of parts of `length`."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((*lead, 4, length * over.world_size, 8), *[(*lead, key_heads, length * over.world_size, 8)] * 2)
    whole = [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    own = [tensor.detach().chunk(over.world_size, -2)[over.rank].clone().requires_grad_() for tensor in whole]
    options = {"is_causal": True, "enable_gqa": key_heads != 4, "scale": 0.7}
    expected, found = KEPT_IN[0](*whole, **options), attend(*own, **options)
    for out in (expected, found):
        (out.double() ** 2).sum().backward()
    pairs = [
        (expected.detach(), found.detach()),
        *((one.grad, other.grad) for one, other in zip(whole, own, strict=True)),
    ]
    return max(
        float((one.chunk(over.world_size, -2)[over.rank] - other).abs().max() / one.abs().max()) for one, other in pairs
    )


def _balance(rank, world_size):
    pairs, counts, differences = _counting_pairs(), {}, []
    axis = connected(world_size, context_method="all_gather").run.strategy._context
    with axis.computing():
        for length in (1, 4, 5):
            pairs.clear()
            differences.append(_causally(F.scaled_dot_product_attention, length, axis.over))
            counts[length] = sum(pairs)
        differences.append(_causally(F.scaled_dot_product_attention, 5, axis.over, lead=(), key_heads=4))
        differences.append(_causally(SequenceAttention(_own_attention, axis.over, "all_gather"), 5, axis.over))
        with torch.autocast("cpu", torch.bfloat16):
            dtypes = (torch.bfloat16, torch.float32, torch.float32)
            short = _causally(F.scaled_dot_product_attention, 5, axis.over, dtypes=dtypes)
    return max(differences), short, counts


@pytest.mark.every_push("3")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_that_gather_keys_share_causal_attention_equally(world_size):
    differences, short, counts = zip(*run_in_processes(_balance, world_size), strict=True)
    assert max(differences) < 1e-12
    assert max(short) < 0.03
    for length in (1, 4, 5):
        pairs, whole = [each[length] for each in counts], length * world_size
        assert sum(pairs) == whole * (whole + 1) // 2
        assert max(pairs) - min(pairs) <= length % 2 * (whole - 1)  # an odd part has no halves: less than one query


def _losses(rank, world_size):
    over = connected(world_size).run.strategy._groups.over("context")
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(6 * world_size, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (6 * world_size,), generator=generator)
    targets[:6] = -100  # rank 0 has none
    targets[7] = 3
    weight = torch.rand(5, generator=generator, dtype=torch.float64)
    found = []
    for loss, options in (
        (F.cross_entropy, {}),
        (F.cross_entropy, {"weight": weight, "ignore_index": 3}),
        (F.cross_entropy, {"label_smoothing": 0.1, "ignore_index": 3}),
        (F.cross_entropy, {"reduction": "sum"}),
        (F.nll_loss, {"weight": weight}),
        (F.cross_entropy, {"size_average": True}),
    ):
        usable = targets if options.get("ignore_index") is None else targets.clamp(min=0)
        inputs = scores if loss is F.cross_entropy else scores.log_softmax(1)
        mine = slice(6 * rank, 6 * rank + 6)
        own = MeanOverAllTargets(loss, over)(inputs[mine], usable[mine], **options)
        mean = over.all_reduce(own, "mean")
        expected = loss(inputs, usable, **options) / (world_size if "reduction" in options else 1)
        found.append(float(mean - expected))
    given = scores, torch.eye(5, dtype=torch.float64), targets
    mine = scores[6 * rank : 6 * rank + 6], given[1], targets[6 * rank : 6 * rank + 6]
    if hasattr(F, "linear_cross_entropy"):
        for options in ({}, {"options": torch.nn.LinearCrossEntropyOptions()}):
            mean = over.all_reduce(MeanOverAllTargets(F.linear_cross_entropy, over)(*mine, **options), "mean")
            found.append(float(mean - F.linear_cross_entropy(*given, **options)))
    for loss in (F.mse_loss, F.l1_loss):
        mean = over.all_reduce(MeanOverAllTargets(loss, over)(mine[0], 0 * mine[0], weight=mine[0].exp()), "mean")
        found.append(float(mean - loss(scores, 0 * scores, weight=scores.exp())))
    return found


@pytest.mark.slow
def test_means_count_the_targets_of_all_ranks():
    for found in run_in_processes(_losses, 2):
        assert len(found) >= 8
        assert max(map(abs, found)) < 1e-12


# --- Models ----------------------------------------------------------------------------------------------------------


class Encoder(sg.Module):
    """torch's own layers, with attention in both directions."""

    def __init__(self, dropout=0.0, seen=None):
        super().__init__()
        self.seen = seen
        with seeded(0):
            self.embedding = nn.Embedding(11, 16)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(16, 4, 32, dropout=dropout, batch_first=True) for _ in range(2)
            )
            self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        return 4 * F.cross_entropy(self(batch["tokens"]).transpose(1, 2), batch["targets"])

    def validation_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["tokens"]).transpose(1, 2), batch["targets"])
        self.log("loss", loss, sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return {"scores": self(batch["tokens"]), "weights": batch["weights"]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def batches(count=4):
    generator = torch.Generator().manual_seed(2)
    return [
        {
            "tokens": torch.randint(11, (4, LENGTH), generator=generator),
            "targets": torch.randint(11, (4, LENGTH), generator=generator),
            "weights": torch.rand(4, generator=generator),
        }
        for _ in range(count)
    ]


def _everything(rank, world_size, options):
    trainer = sg.Trainer(strategy=options, devices=world_size, **QUIET)
    module = Encoder()
    trainer.fit(module, batches())
    (metrics,) = trainer.validate(module, batches(2))
    predictions = trainer.predict(module, batches(2))
    return weights_of(trainer), metrics["loss"], predictions


@pytest.mark.slow
def test_torchs_layers_train_validate_and_predict_as_in_one_process():
    ((expected, loss, predictions),) = run_in_processes(_everything, 1, "auto")

    for weights, its_loss, own in run_in_processes(_everything, 2, {"name": "context_parallel"}):
        for name, tensor in expected.items():
            assert torch.allclose(weights[name], tensor, rtol=1e-5, atol=1e-6), name
        assert its_loss == pytest.approx(loss, rel=1e-6)
        for mine, theirs in zip(own, predictions, strict=True):
            assert mine["scores"].shape == theirs["scores"].shape == (4, LENGTH, 11)
            assert torch.allclose(mine["scores"], theirs["scores"], rtol=1e-4, atol=1e-5)
            assert torch.equal(mine["weights"], theirs["weights"])


class Predicting(Encoder):
    """Predicts what `how` makes of the scores of positions."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def predict_step(self, batch, batch_idx):
        return self.how(self(batch["tokens"]))


#: Predictions, and their shape in a run of two ranks; or what is said of them.
PREDICTED = {
    "scores": (lambda scores: scores, (4, LENGTH, 11)),
    "tokens": (lambda scores: scores.argmax(-1), (4, LENGTH)),
    "one number": (lambda scores: scores.amax(-1)[..., None], (4, LENGTH, 1)),
    "classes": (lambda scores: torch.ones(4, 1, LENGTH // 2), (4, 1, LENGTH // 2)),
    "samples": (lambda scores: torch.ones(4), (4,)),
    "either": (lambda scores: torch.ones(4, LENGTH // 2), "predict_step returned numbers of shape (4, 4)"),
}


def _predict(rank, world_size):
    found = {}
    for name, (how, _) in PREDICTED.items():
        trainer = sg.Trainer(strategy={"name": "parallel", "context": 2}, devices=world_size, **QUIET)
        predictions = []
        said = outcome(lambda: predictions.extend(trainer.predict(Predicting(how), batches(1))))  # noqa: B023
        found[name] = tuple(predictions[0].shape) if predictions else said
    return found


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    guard="tests/plugins/test_parallel_context.py::test_torchs_layers_train_validate_and_predict_as_in_one_process",
)
@pytest.mark.slow
def test_predictions_are_gathered_if_they_are_of_positions():
    first, second = run_in_processes(_predict, 2)
    assert first == second
    for name, (_, expected) in PREDICTED.items():
        assert first[name] == expected or (isinstance(expected, str) and expected in first[name]), (name, first[name])


class Noted(Encoder):
    """Records dropout masks."""

    def training_step(self, batch, batch_idx):
        self.seen.append(F.dropout(torch.ones(64), 0.5))
        return super().training_step(batch, batch_idx)


def _dropout(rank, world_size):
    sg.seed_everything(3)
    seen = []
    trainer = sg.Trainer(strategy={"name": "parallel", "context": 2}, devices=world_size, **QUIET)
    trainer.fit(Noted(dropout=0.2, seen=seen), batches(2))
    return seen, weights_of(trainer), torch.rand(3)


@pytest.mark.slow
def test_ranks_draw_different_dropout_and_hold_equal_weights():
    (first, weights, after), (second, others, its_after) = run_in_processes(_dropout, 2)
    assert all(not torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    assert torch.equal(after, its_after)


# --- Refused -------------------------------------------------------------------------------------------------------


class Attending(sg.Module):
    """Attention through torch's function, and one more operation."""

    def __init__(self, extra):
        super().__init__()
        self.extra = extra
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.positions = nn.Parameter(torch.zeros(1, 32, 6))

    def training_step(self, batch, batch_idx):
        x = self.embedding(batch[0])[:, None]
        x = F.scaled_dot_product_attention(x, x, x)[:, 0]
        x = x + self.extra(self, x) if self.extra is not None else x
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


KEPT = F.scaled_dot_product_attention
KEPT_LOSS = [F.cross_entropy]


def _by_hand(_, x):
    return (x @ x.mT).softmax(-1) @ x


def _zero(value):
    return 0 * value.sum()


TARGETS = torch.ones(4, LENGTH // 2, dtype=torch.long)


def _loss(module, x):
    return F.cross_entropy(module.head(x).mT, TARGETS, reduction="none")


REFUSED = {
    "numbers of positions": (lambda _, x: torch.arange(x.shape[1])[:, None], "torch.arange(4)"),
    "rows of a parameter": (lambda module, x: module.positions[:, : x.shape[1]], "first 4 rows of a parameter"),
    "shift": (lambda _, x: _zero(x[:, 1:]), "[1:]"),
    "last": (lambda _, x: _zero(x[:, -1]), "position -1"),
    "no sequence": (
        lambda _, x: nn.functional.linear(x.mT, torch.ones(8, 8)).mT,
        "training_step fails where strategy.parallel.context cuts dimension 1",
    ),
    "pooling": (lambda _, x: x.mean(1, keepdim=True), "mean over the positions"),
    "by hand": (_by_hand, "softmax"),
    "weights": (
        lambda _, x: nn.MultiheadAttention(6, 2, batch_first=True)(x, x, x)[0],
        "need_weights=False",
    ),
    "convolution": (lambda _, x: nn.Conv1d(6, 6, 3, padding=1)(x.mT).mT, "neighbouring positions"),
    "batch norm": (lambda _, x: nn.BatchNorm1d(6)(x.mT).mT, "statistics of batch_norm"),
    "flat batch norm": (lambda _, x: nn.BatchNorm1d(6)(x.flatten(0, 1)).view_as(x), "statistics of batch_norm"),
    "group norm": (lambda _, x: nn.GroupNorm(2, 6)(x.mT).mT, "statistics of group_norm"),
    "instance norm": (lambda _, x: nn.InstanceNorm1d(6)(x.mT).mT, "statistics of instance_norm"),
    "normalize": (lambda _, x: F.normalize(x), "computes normalize over the positions"),
    "average pool": (lambda _, x: nn.AvgPool1d(3, 1, 1)(x.mT).mT, "avg_pool1d over neighbouring positions"),
    "maximum pool": (lambda _, x: nn.MaxPool1d(3, 1, 1)(x.mT).mT, "max_pool1d over neighbouring positions"),
    "adaptive pool": (lambda _, x: nn.AdaptiveAvgPool1d(1)(x.mT).mT, "adaptive_avg_pool1d over positions"),
    "transposed": (lambda _, x: nn.ConvTranspose1d(6, 6, 3, padding=1)(x.mT).mT, "conv_transpose1d over neighbouring"),
    "interpolate": (lambda _, x: _zero(F.interpolate(x.mT, scale_factor=2, mode="linear")), "interpolate over"),
    "scores": (lambda _, x: x * x.sum(-1).softmax(-1)[..., None], "computes softmax over the positions"),
    "best": (lambda _, x: _zero(x.sum(-1).argmax(1) * 1.0), "computes argmax over the positions"),
    "einsum": (lambda _, x: torch.einsum("bt,btd->bd", x.sum(-1), x)[:, None], "in einsum('bt,btd->bd')"),
    "product": (lambda _, x: x.sum(-1)[:, None] @ x, "sums over positions of each part in a product"),
    "heads' product": (lambda _, x: torch.bmm(torch.ones(4, 4, 4), x), "sums over positions of each part in a product"),
    "narrow": (lambda _, x: x.narrow(1, 0, 1), "computes narrow over the positions"),
    "recurrent": (lambda _, x: nn.GRU(6, 6, batch_first=True)(x)[0], "gru"),
    "mask of a part": (
        lambda _, x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril()),
        "attn_mask of shape (4, 4)",
    ),
    "other keys": (lambda _, x: F.scaled_dot_product_attention(x, torch.ones(4, 3, 6), torch.ones(4, 3, 6)), "3 keys"),
    "kept loss": (lambda module, x: KEPT_LOSS[0](module.head(x).mT, TARGETS), "cross_entropy under a reference"),
    "sum": (lambda module, x: F.cross_entropy(module.head(x).mT, TARGETS, reduction="sum") / 9, 'reduction="sum"'),
    "sum of positions": (lambda module, x: _loss(module, x).sum(1).mean(), "a sum over the positions of a part"),
    "masked mean": (lambda module, x: (_loss(module, x) * TARGETS).sum() / TARGETS.sum(), "a sum over the positions"),
    "selected": (lambda module, x: _loss(module, x)[TARGETS > 0].mean(), "selects positions of a part with a mask"),
    "flat": (lambda module, x: (module.head(x).flatten(0, 1) ** 2).sum(), "a sum over the positions"),
    "kept reference": (lambda module, x: KEPT_IN[0](x, x, x), "a reference that it kept"),
}
KEPT_IN = [KEPT]
ALLOWED = {
    "offset": lambda _, x: (context_offset(x.shape[1]) + torch.arange(x.shape[1]))[:, None] / 8,
    "own name": lambda _, x: KEPT(x, x, x),
    "local": lambda _, x: _local(x),
    "whole sum": lambda module, x: context_sum(_loss(module, x).sum()),
    "features": lambda _, x: (x * x).sum(-1, keepdim=True) + 0 * x.flatten(0, 1).sum(1).mean(),
    "einsum of features": lambda module, x: torch.einsum("btd,ed->bte", x, module.head.weight[:6]),
    "batch norm in evaluation": lambda _, x: nn.BatchNorm1d(6).eval()(x.mT).mT,
    "other norms": lambda _, x: F.normalize(nn.LayerNorm(6)(x), dim=-1).softmax(-1),
    "patches": lambda _, x: 0 * nn.Conv1d(6, 6, 2, 2)(x.mT).mean() + 0 * nn.AvgPool1d(2)(x.mT).mean(),
    "parameters": lambda module, _: sum(each.pow(2).sum() for each in module.parameters()),
    "mean": lambda _, x: 0 * context_mean(x.sum(), torch.tensor(x.numel())),
}


def _local(x):
    with local_attention():
        return F.scaled_dot_product_attention(x, torch.ones(4, 3, 6), torch.ones(4, 3, 6))


def _fit(rank, world_size, cases):
    said = {}
    for name, (extra, options, data) in cases.items():
        trainer = sg.Trainer(
            strategy={"name": "parallel", "context": world_size, **options}, devices=world_size, **QUIET
        )
        said[name] = outcome(lambda: trainer.fit(Attending(extra), data))  # noqa: B023 - called at once
    return said


def tokens(length=LENGTH, **others):
    return [(torch.randint(11, (4, length)), torch.randint(11, (4, length)), *others.values())]


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    guard="tests/plugins/test_parallel_context.py::test_a_loss_of_parts_that_is_not_that_of_whole_sequences_is_refused",
)
@pytest.mark.slow
def test_what_a_part_cannot_compute_is_refused_on_all_ranks():
    cases = {name: (extra, {}, tokens()) for name, (extra, _) in REFUSED.items()}
    cases |= {name: (extra, {}, tokens()) for name, extra in ALLOWED.items()}
    first, second = run_in_processes(_fit, 2, cases, limit_s=360)
    assert first == second
    for name, (_, expected) in REFUSED.items():
        assert first[name].startswith("refused: "), (name, first[name])
        assert expected in first[name], (name, first[name])
    assert {name: first[name] for name in ALLOWED if first[name] != "nothing"} == {}


class PerPosition(Attending):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.embedding(batch[0])).flatten(0, 1), batch[1].flatten())


@pytest.mark.slow
def test_batches_that_cannot_be_cut_are_refused_on_all_ranks():
    features = tokens(features=torch.ones(4, 3))
    cases = {
        "odd": (None, {}, tokens(7)),
        "two lengths": (None, {}, features),
        "named": (None, {"context_tensors": ["0", "1"]}, features),
        "misspelt": (None, {"context_tensors": ["0", "tokens"]}, features),
        "dimension": (None, {"context_dim": 2}, tokens()),
        "heads": (None, {"context_method": "ulysses"}, tokens()),
        "string": (None, {}, [(*tokens()[0], "text")]),
    }
    first, second = run_in_processes(_fit, 2, cases, limit_s=360)
    assert first == second
    assert "batch[0] has length 7 along dimension 1, and strategy.parallel.context is 2" in first["odd"]
    assert "batch[0] has length 8 along dimension 1, and batch[2] has 3" in first["two lengths"]
    assert "context_tensors has 'tokens'" in first["misspelt"]
    assert "no tensor of the batch has a dimension 2" in first["dimension"]
    assert "'ulysses' with context 2, and an attention has 1 heads" in first["heads"]
    assert first["named"] == first["string"] == "nothing"


def test_methods_have_names():
    said = outcome(lambda: sg.Trainer(strategy={"name": "parallel", "context_method": "ring"}))
    assert "'auto', 'ulysses' or 'all_gather'" in said
    said = outcome(lambda: sg.Trainer(strategy={"name": "parallel", "context_method": "ulises"}))
    assert "ulysses" in said


def _different_data(rank, world_size):
    trainer = sg.Trainer(strategy={"name": "parallel", "context": 2}, devices=world_size, **QUIET)
    first = torch.full((4, LENGTH), 3), torch.ones(4, LENGTH, dtype=torch.long)
    data = [first, (first[0] + rank, first[1])]  # the first batch is the same by chance
    return outcome(lambda: trainer.fit(Attending(None), data))


@pytest.mark.slow
def test_ranks_that_read_different_batches_are_refused():
    first, second = run_in_processes(_different_data, 2)
    assert first == second
    assert "got different batches (batch 2 of stage 'train')" in first


class Importing(Encoder):
    """Imports a module in its first step, and keeps a loss."""

    def training_step(self, batch, batch_idx):
        if "imported_late" not in sys.modules:
            module = types.ModuleType("imported_late")
            exec("from torch.nn.functional import cross_entropy, scaled_dot_product_attention", vars(module))
            sys.modules["imported_late"] = module
        self.kept = F.cross_entropy
        self.seen.append(type(sys.modules["imported_late"].cross_entropy).__name__)
        return super().training_step(batch, batch_idx)


def _imported_in_a_step(rank, world_size):
    trainer = sg.Trainer(strategy="context_parallel", devices=world_size, **QUIET)
    module = Importing(seen=[])
    trainer.fit(module, batches(2))
    late = sys.modules["imported_late"]
    scores, targets = torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    own = module.kept(scores, targets) if rank == 0 else None  # no collective
    restored = late.cross_entropy is F.cross_entropy, late.scaled_dot_product_attention is KEPT_IN[0]
    return module.seen, restored, own is None or math.isclose(float(own), math.log(3), rel_tol=1e-6)


@pytest.mark.slow
def test_modules_imported_in_a_step_have_torchs_functions_afterwards():
    for seen, restored, is_plain in run_in_processes(_imported_in_a_step, 2):
        assert seen == ["MeanOverAllTargets"] * 2
        assert restored == (True, True)
        assert is_plain


def _vocabulary(rank, world_size, strategy):
    """Return the weights, and how many losses were computed from parts of the vocabulary."""
    from stratagem_parallel_unchanged.tensor import rules

    calls, compute = [], rules.cross_entropy
    rules.cross_entropy = lambda *args: (calls.append(1), compute(*args))[1]
    trainer = sg.Trainer(strategy=strategy, devices=world_size, **QUIET)
    trainer.fit(Encoder(), batches())
    return weights_of(trainer), len(calls)


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    guard="tests/plugins/test_parallel_context.py::test_means_count_the_targets_of_all_ranks",
)
@pytest.mark.slow
def test_the_loss_of_a_cut_vocabulary_is_computed_from_its_parts():
    plan = {"embedding": "vocab", "head": "vocab"}
    strategy = {"name": "parallel", "tensor": 2, "context": 2, "plan": plan}
    ((expected, _),) = run_in_processes(_vocabulary, 1, "auto")
    for weights, calls in run_in_processes(_vocabulary, 4, strategy):
        assert calls == 4 + 6  # two before steps 1, 2 and 4, which compare parts with the whole
        for name, tensor in expected.items():
            assert torch.allclose(weights[name], tensor, rtol=1e-5, atol=1e-6), name


def _sums(rank, world_size, strategy):
    class Summed(Encoder):
        def training_step(self, batch, batch_idx):
            scores = self(batch["tokens"]).transpose(1, 2)
            return context_sum(F.cross_entropy(scores, batch["targets"], reduction="sum")) / 8

    trainer = sg.Trainer(strategy=strategy, devices=world_size, **QUIET)
    trainer.fit(Summed(), batches())
    return weights_of(trainer)


@pytest.mark.slow
def test_a_loss_that_is_a_sum_is_that_of_whole_sequences():
    (expected,) = run_in_processes(_sums, 1, "auto")
    for weights in run_in_processes(_sums, 2, "context_parallel"):
        for name, tensor in expected.items():
            assert torch.allclose(weights[name], tensor, rtol=1e-5, atol=1e-6), name


def test_without_the_axis_the_helpers_do_nothing():
    assert context_offset(4) == 0
    assert float(context_mean(torch.tensor(6.0), torch.tensor(3))) == 2
    assert float(context_sum(torch.tensor(6.0))) == 6
    with local_attention():
        assert math.isfinite(float(F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 2)).sum()))


# --- Models of Hugging Face ------------------------------------------------------------------------------------------


class Pretrained(sg.Module):
    def __init__(self, make, **inputs):
        super().__init__()
        self.model, self.inputs = make(), inputs

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch[0], labels=batch[1], **self.inputs).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _gemma(**options):
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    config = transformers.Gemma2Config(vocab_size=11, num_key_value_heads=2, attn_implementation="eager", **sizes)
    return transformers.Gemma2ForCausalLM(config)


def _bloom():
    import transformers

    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=11, hidden_size=8, n_layer=1, n_head=2))


def _bart():
    """Numbers positions where no argument reaches."""
    import transformers

    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 16}
    return transformers.BartForCausalLM(transformers.BartConfig(vocab_size=11, pad_token_id=0, **sizes))


PRETRAINED = {
    "softcapping": (lambda: Pretrained(_gemma), "'eager', .*expected a model that can compute it with 'sdpa', without"),
    "no sdpa": (lambda: Pretrained(_bloom), "BloomForCausalLM computes attention with 'eager'"),
    "positions": (lambda: Pretrained(_bart), r"calls torch.arange\(4\), which are not the positions of this part"),
}


def _fit_pretrained(rank, world_size):
    said = {}
    for name, (make, _) in PRETRAINED.items():
        trainer = sg.Trainer(strategy="context_parallel", devices=world_size, **QUIET)
        said[name] = outcome(lambda: trainer.fit(make(), tokens()))  # noqa: B023 - called at once
    return said


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    guard="tests/plugins/test_parallel_context.py::test_a_loss_of_parts_that_is_not_that_of_whole_sequences_is_refused",
)
@pytest.mark.slow
def test_models_of_hugging_face_that_need_whole_sequences_are_refused():
    pytest.importorskip("transformers")
    first, second = run_in_processes(_fit_pretrained, 2, limit_s=360)
    assert first == second
    for name, (_, expected) in PRETRAINED.items():
        assert first[name].startswith("refused: "), (name, first[name])
        assert re.search(expected, first[name]), (name, first[name])


# --- A training loop without a Trainer, and activation checkpointing ---------------------------------------------------


class Recomputed(Encoder):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Looped(Recomputed):
    def forward(self, batch):
        return 4 * F.cross_entropy(super().forward(batch["tokens"]).transpose(1, 2), batch["targets"])


def _own_loop(rank, world_size, strategy):
    run = sg.Run(strategy=strategy, devices=world_size, accelerator="cpu")

    def main(run):
        module = Looped()
        model, optimizer = run.setup(module, module.configure_optimizers())
        for batch in run.dataloader(batches()):
            run.backward(model(batch))
            run.optimizer_step(optimizer)
            optimizer.zero_grad()
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    return run.launch(main)


def _recomputed(rank, world_size, strategy):
    trainer = sg.Trainer(strategy=strategy, devices=world_size, **QUIET)
    trainer.fit(Recomputed(), batches())
    return weights_of(trainer)


@pytest.mark.every_push("_own_loop")
@pytest.mark.slow
@pytest.mark.parametrize("train", [_own_loop, _recomputed])
def test_layers_that_backward_computes_again_attend_to_whole_sequences(train):
    (expected,) = run_in_processes(train, 1, "auto")
    for weights in run_in_processes(train, 2, "context_parallel"):
        for name, tensor in expected.items():
            assert torch.allclose(weights[name], tensor, rtol=1e-5, atol=1e-6), name


# --- Losses of parts and of whole sequences ----------------------------------------------------------------------------


def _scan(x):
    out, state = [], torch.zeros(())
    for each in x.unbind(1):
        state = 0.5 * state + each
        out.append(state)
    return torch.stack(out, 1)


#: What depends on other positions or on their number, in ways that no check of operations knows.
ALONG_POSITIONS = {
    "numbers": lambda x: x + torch.linspace(0, 1, x.shape[1])[:, None],
    "a list of numbers": lambda x: x + 0.1 * torch.tensor([float(place) for place in range(x.shape[1])])[:, None],
    "a recurrence": _scan,
    "a shift": lambda x: x + torch.cat([x.split([x.shape[1] - 1, 1], 1)[each] for each in (1, 0)], 1),
    "a norm": lambda x: F.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2),
    "a transform": lambda x: x + torch.fft.fft(x, dim=1).real,
}


class Along(sg.Module):
    def __init__(self, function, dropout=0.0):
        super().__init__()
        with seeded(0):
            self.inner, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.function, self.dropout, self.calls, self.seen = function, dropout, 0, []
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.steps += 1
        self.seen.append(batch_idx)
        x = F.dropout(self.function(self.inner(batch[0])), self.dropout)
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        loss = F.mse_loss(self.out(x + attended), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Adaptive(Along):
    """Adds a term whose value is 1 in each part, and whose gradient differs from that of the whole."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + loss / loss.detach()


def _noise(x):
    return x + torch.randn(x.shape)


def _along(rank, world_size):
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(2, 4, LENGTH, 16, generator=generator)) for _ in range(2)]

    def fit(module, **options):
        strategy = {"name": "parallel", "context": world_size, **options}
        trainer = sg.Trainer(strategy=strategy, devices=world_size, **QUIET)
        trainer.fit(module, batches)
        return trainer

    refused = {name: outcome(lambda f=f: fit(Along(f))) for name, f in ALONG_POSITIONS.items()}
    refused["a gradient"] = outcome(lambda: fit(Adaptive(lambda x: x)))
    fit(Along(_scan), check_parts=False)
    plain, noisy = Along(lambda x: x, dropout=0.5), Along(_noise)
    trainer = fit(plain)
    fit(noisy)
    return refused, (plain.calls, plain.steps.item(), plain.seen), list(trainer.callback_metrics), noisy.calls


@pytest.mark.slow
def test_a_loss_of_parts_that_is_not_that_of_whole_sequences_is_refused(capfd):
    for refused, counts, logged, calls in run_in_processes(_along, 2):
        for name, message in refused.items():
            assert "on whole sequences and" in message, (name, message)
        assert counts == (2, 2.0, [0, 1])  # the calls that compare are undone
        assert "loss" in logged
        assert calls == 2
    assert capfd.readouterr().out.count("training_step was not compared: it draws random numbers") == 1
