"""Context parallelism trains as one process does: each rank has a part of every sequence."""

from __future__ import annotations

import contextlib
import io
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem.api.seeding import seeded
from stratagem_parallel import context_mean, context_offset
from stratagem_sequences import PackingCollator, document_attention
from stratagem_testing import run_in_processes
from stratagem_testing.reference import relative_difference, train_module_plainly
from stratagem_testing.training import outcome, share, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
VOCABULARY, WIDTH, LENGTH = 23, 24, 16
STEPS = 7  # the last window is short


TRANSFORMERS = pytest.mark.usefixtures("transformers_preloaded")


class Block(nn.Module):
    """Causal attention with fewer heads for keys than for queries, and an MLP."""

    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        size = WIDTH // heads
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * key_heads * size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        y = self.norms[0](x)
        query = self.query(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.keys(y).unflatten(-1, (2, self.key_heads, -1)).unbind(2)
        y = F.scaled_dot_product_attention(
            query, key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=self.heads != self.key_heads
        )
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(sg.Module):
    """Tied embeddings and learned positions."""

    def __init__(self, heads=4, key_heads=2, lr=2e-2):
        super().__init__()
        self.lr = lr
        with seeded(0):
            self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.Sequential(Block(heads, key_heads), Block(heads, key_heads))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        offset = context_offset(length)
        positions = torch.arange(length) + offset
        return self.head(self.blocks(self.tokens(tokens) + self.positions(positions)))

    def criterion(self, scores, targets):
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def training_step(self, batch, batch_idx):
        return self.criterion(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def sequences(ignores, steps=STEPS, samples=8):
    """Return batches of tokens and targets; with `ignores`, parts of a sequence have different numbers of targets."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (steps, samples, LENGTH + 1), generator=generator)
    targets = tokens[..., 1:].clone()
    if ignores:
        targets[..., : LENGTH // 2][torch.rand(steps, samples, LENGTH // 2, generator=generator) < 0.4] = -100
    return list(zip(tokens[..., :-1].contiguous(), targets, strict=True))


def _train(rank, world_size, options, heads, windows):
    """Return the largest difference from one plain process for each window; and the smallest norm."""
    found, norms = {}, []
    batches = sequences(ignores="replicate" not in options)  # the loss is a mean over replicas, whatever they ignore
    for accumulate, max_norm in windows:
        plain, its_norms = train_module_plainly(GPT(*heads), batches, accumulate, max_norm)
        norms += its_norms
        trainer = sg.Trainer(
            strategy={"name": "parallel", **options}, devices=world_size, accumulate_grad_batches=accumulate,
            gradient_clip_val=max_norm, **QUIET,
        )  # fmt: skip
        trainer.fit(GPT(*heads), share(trainer, batches))
        found[accumulate, max_norm] = relative_difference(weights_of(trainer), plain)
    return found, max(norms)


#: Clipping hides what accumulation multiplies: each has a window of its own.
WINDOWS = ((1, 0.5), (3, None))
CASES = {
    "ulysses 2": (2, {"context": 2, "context_method": "ulysses"}, (4, 2)),
    "all-gather 2": (2, {"context": 2, "context_method": "all_gather"}, (4, 2)),
    "heads that do not divide": (4, {"context": 4}, (6, 3)),
    "ulysses 4": (4, {"context": 4, "context_method": "ulysses"}, (4, 4)),
    "with replicas": (4, {"context": 2, "replicate": 2}, (4, 2)),
}


@pytest.mark.every_push("all-gather 2")
@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_trains_as_one_process(case):
    world_size, options, heads = CASES[case]
    for found, norm in run_in_processes(_train, world_size, options, heads, WINDOWS, limit_s=360):
        assert norm > 1
        assert {window: distance for window, distance in found.items() if not distance < 1e-6} == {}
        assert len(found) == len(WINDOWS)


class Llama(sg.Module):
    """A model of Hugging Face that computes its own loss, from labels that it shifts."""

    def __init__(self, lr=2e-2):
        super().__init__()
        self.lr = lr
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True, attn_implementation="sdpa",
        )  # fmt: skip
        with seeded(0):
            self.model = transformers.LlamaForCausalLM(config)

    def forward(self, tokens):
        return tokens

    def criterion(self, tokens, labels):
        mask = torch.ones_like(tokens)
        return 4 * self.model(input_ids=tokens, attention_mask=mask, labels=labels).loss

    def training_step(self, batch, batch_idx):
        return self.criterion(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def labelled(steps=STEPS):
    batches = []
    for tokens, _ in sequences(ignores=False, steps=steps):
        labels = tokens.clone()
        labels[:, :5] = -100  # as a prompt
        batches.append((tokens, labels))
    return batches


def _train_llama(rank, world_size):
    plain, norms = train_module_plainly(Llama(), labelled(), 1, None)
    trainer = sg.Trainer(strategy="context_parallel", devices=world_size, **QUIET)
    trainer.fit(Llama(), share(trainer, labelled()))
    return relative_difference(weights_of(trainer), plain), max(norms)


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    guard="tests/parity/test_parallel_context.py::test_trains_as_one_process",
)
@pytest.mark.slow
@TRANSFORMERS
def test_a_model_of_hugging_face_trains_as_in_one_process():
    for difference, norm in run_in_processes(_train_llama, 2, limit_s=360):
        assert norm > 1
        assert difference < 1e-6


class Measured(GPT):
    """Logs what is right if ranks log it together, and what is not."""

    def validation_step(self, batch, batch_idx):
        scores, targets = self(batch[0]), batch[1]
        loss, counted = self.criterion(scores, targets), targets != -100
        right = (scores.argmax(-1) == targets) & counted
        self.log_dict(
            {
                "loss": loss, "accuracy": context_mean(right.sum(), counted.sum()),
                "perplexity": loss.exp(), "masked": right.sum() / counted.sum(), "targets": counted.sum().float(),
            },
            sync_dist=True,
        )  # fmt: skip
        self.log("highest", scores.max(), sync_dist=True, reduce_fx="max")
        self.log("count", counted.sum().float(), sync_dist=True, reduce_fx="sum")

    test_step = validation_step


def _measure(rank, world_size, strategy, stage):
    trainer = sg.Trainer(strategy=strategy, devices=world_size, **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (found,) = getattr(trainer, stage)(Measured(), sequences(ignores=True, steps=1))
    return found, [str(each.message) for each in caught if "differs between parts" in str(each.message)]


@pytest.mark.slow
@pytest.mark.every_push("validate")
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_metrics_of_parts_are_those_of_the_whole_or_named(stage):
    (whole, said), *_ = run_in_processes(_measure, 1, "single_device", stage)
    assert not said
    (found, (text,)), (_, nothing) = run_in_processes(_measure, 2, {"name": "parallel", "context": 2}, stage)

    wrong = {name for name in whole if abs(found[name] - whole[name]) > 1e-4 * abs(whole[name])}
    assert wrong == {"perplexity", "masked", "targets"}
    assert {name for name in whole if f"{name} (" in text} == wrong
    assert text.startswith(f"what {'validation' if stage == 'validate' else 'test'}_step logs differs")
    assert not nothing, "rank 0 says it"


class Rare(GPT):
    """Logs an accuracy that is 0 in the first batch."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def validation_step(self, batch, batch_idx):
        scores, targets = self(batch[0]), batch[1]
        self.steps += 1  # undone where it is compared
        counted = targets != -100
        right = counted & (targets % 3 == 0) & (self.steps > 1) & torch.isfinite(scores).all(-1)
        self.log("rare", right.sum() / counted.sum(), sync_dist=True)
        self.log("right", context_mean(right.sum(), counted.sum()), sync_dist=True)


def _believe(rank, world_size):
    """Return the warnings: with different numbers of targets in the first batch, from the second on, and at the end."""
    found = []
    some, late = sequences(ignores=True, steps=2), [sequences(ignores=False)[0], *sequences(ignores=True, steps=1)]
    tokens, targets = (torch.cat([each] * 9, 1) for each in late[0])
    long = tokens, targets.where(torch.arange(9 * LENGTH) < 136, -100)
    for batches in (some[:1], late, [long, long]):
        trainer = sg.Trainer(strategy={"name": "parallel", "context": 2}, devices=world_size, **QUIET)
        module = Rare()
        module.positions = nn.Embedding(9 * LENGTH, WIDTH)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.validate(module, batches)
        found.append([str(each.message) for each in caught if "differs between parts" in str(each.message)])
    return found


@pytest.mark.slow
def test_a_metric_that_is_equal_by_chance_is_not_believed():
    (uneven, late, end), _ = run_in_processes(_believe, 2)
    (text,) = uneven
    assert "a quotient (divided by" in text  # both are 0
    (text,) = late
    assert "rare (" in text
    assert "right (" not in text
    (text,) = end  # the first positions have targets everywhere
    assert "rare (" in text


def _evaluate_by_hand(rank, world_size):
    run = sg.Run(strategy={"name": "parallel", "context": 2}, devices=world_size, accelerator="cpu")
    model = run.setup(nn.Sequential(GPT()))
    model.eval()
    said = io.StringIO()
    with torch.no_grad(), contextlib.redirect_stdout(said):
        shapes = [tuple(model(batch[0]).shape) for batch in run.dataloader(sequences(ignores=True, steps=2))]
    return shapes, said.getvalue()


@pytest.mark.slow
def test_a_loop_of_your_own_that_evaluates_is_not_compared():
    for shapes, said in run_in_processes(_evaluate_by_hand, 2):
        assert shapes == [(8, LENGTH // 2, VOCABULARY)] * 2
        assert "compared" not in said


# --- Packed documents ----------------------------------------------------------------------------------------------

#: Whether a border lies where sequences are cut, elsewhere, or at none of both in the last row.
ROWS = [[8, 8], [5, 11], [9, 4, 3], [16]]


def packed_batches(number=6):
    collate = PackingCollator(max_tokens=LENGTH)
    draw = torch.Generator().manual_seed(5)
    return [
        collate([{"input_ids": torch.randint(VOCABULARY, (n,), generator=draw)} for row in ROWS for n in row])
        for _ in range(number)
    ]


class PackedGPT(GPT):
    """Computes attention within documents, whose ids it has for whole sequences."""

    def training_step(self, batch, batch_idx):
        attend = document_attention(batch["document_ids"])
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        for block in self.blocks:
            y = block.norms[0](x)
            query = block.query(y).unflatten(-1, (block.heads, -1)).transpose(1, 2)
            key, value = block.keys(y).unflatten(-1, (2, block.key_heads, -1)).transpose(1, 3).unbind(2)
            x = x + block.out(attend(query, key, value, enable_gqa=True).transpose(1, 2).flatten(-2))
            x = x + block.mlp(block.norms[1](x))
        return self.criterion(self.head(x), batch["targets"])


class PackedLlama(Llama):
    def training_step(self, batch, batch_idx):
        return self.model(**{name: batch[name] for name in TOKENS}, use_cache=False).loss


TOKENS = ("input_ids", "position_ids", "labels")


def _with_targets(batch):
    """Return `batch` with labels that are shifted before sequences are cut."""
    following = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return {**batch, "targets": following}


def _plainly(module, batches):
    optimizer = module.configure_optimizers()
    for batch in batches:
        module.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def _train_packed(rank, world_size, model, method, cut):
    batches = [_with_targets(batch) for batch in packed_batches()]
    plain = _plainly(model(), batches)
    strategy = {"name": "parallel", "context": world_size, "context_method": method, "context_tensors": cut}
    trainer = sg.Trainer(strategy=strategy, devices=world_size, **QUIET)
    said = outcome(lambda: trainer.fit(model(), batches))
    return said if said != "nothing" else relative_difference(weights_of(trainer), plain)


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    cases=("PackedGPT-cut0-all_gather", "PackedLlama-cut1-ulysses", "PackedLlama-cut1-all_gather"),
)
@pytest.mark.slow
@TRANSFORMERS
@pytest.mark.parametrize("method", ["ulysses", "all_gather"])
@pytest.mark.parametrize(
    ("model", "cut"),
    [(PackedGPT, (*TOKENS, "targets")), (PackedLlama, TOKENS)],
)
def test_packed_documents_train_as_in_one_process(model, cut, method):
    for difference in run_in_processes(_train_packed, 2, model, method, cut):
        assert isinstance(difference, float), difference
        assert difference < 1e-6


@pytest.mark.slow
def test_cut_document_ids_are_refused_on_all_ranks():
    found = run_in_processes(_train_packed, 2, PackedGPT, "auto", None)

    assert found[0] == found[1]
    assert "refused: scaled_dot_product_attention got an attn_mask of shape (4, 1, 8, 8)" in found[0]
