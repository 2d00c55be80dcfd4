"""Packed sequences compute what sequences alone do, and neighbours of a grouped order have similar lengths."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

import stratagem as sg
from selection import HEAVY
from stratagem.api.world import Mesh
from stratagem.errors import ConfigError
from stratagem.runtime.data import shard_dataloader
from stratagem_sequences import (
    LengthGroupedSampler,
    PackingCollator,
    best_fit,
    block_mask,
    document_attention,
    document_mask,
)
from stratagem_testing import run_in_processes
from stratagem_testing.reference import relative_difference
from stratagem_testing.training import weights_of
from stratagem_trainer.loader_samplers import set_epoch

QUIET = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "num_sanity_val_steps": 0}
VOCABULARY, WIDTH = 31, 24
LENGTHS = (17, 9, 30, 8, 1, 22, 5)


def documents(lengths=LENGTHS):
    draw = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(VOCABULARY, (length,), generator=draw)} for length in lengths]


# --- Packing -------------------------------------------------------------------------------------------------------


def test_each_document_goes_where_it_leaves_least_space():
    assert best_fit([3, 7, 5, 4, 2], 10) == [[1, 0], [2, 3], [4]]
    assert best_fit([6, 3, 5, 4, 2], 10) == [[0, 3], [2, 1, 4]]


def test_every_document_is_packed_once_in_rows_that_hold_it():
    lengths = torch.randint(1, 100, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = best_fit(lengths, 128)

    assert sorted(index for row in rows for index in row) == list(range(500))
    assert max(sum(lengths[index] for index in row) for row in rows) <= 128
    assert len(rows) <= sum(lengths) / 128 * 1.05


def test_a_batch_tells_labels_positions_and_borders():
    own = {"input_ids": [5, 6, 7], "labels": [-100, -100, 7], "attention_mask": [1, 1, 1]}
    batch = PackingCollator(max_tokens=5, pad_token_id=9)([own, {"input_ids": torch.tensor([1, 2, 3, 4])}])

    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 2, 3, 4], [5, 6, 7, 9]],
        "labels": [[-100, 2, 3, 4], [-100, -100, 7, -100]],
        "position_ids": [[0, 1, 2, 3], [0, 1, 2, 0]],
        "document_ids": [[0, 0, 0, 0], [0, 0, 0, 1]],
        "cu_seqlens": [0, 4, 7, 8],
    }
    assert batch["cu_seqlens"].dtype is torch.int32


def test_samples_keep_their_labels():
    sample = {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, 2])}
    PackingCollator(max_tokens=2)([sample])

    assert sample["labels"].tolist() == [1, 2]


def test_a_number_of_rows_gives_batches_one_shape():
    collate = PackingCollator(max_tokens=32, rows=4)
    shapes = [tuple(collate(documents(lengths))["input_ids"].shape) for lengths in (LENGTHS, (4,), (32,) * 5)]

    assert shapes == [(4, 32), (4, 32), (5, 32)]


@pytest.mark.parametrize(
    "sample",
    [
        {"input_ids": [1, 2, 3], "labels": [1, 2]},
        {"input_ids": torch.ones(1, 4, dtype=torch.long)},
        {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]},
    ],
)
def test_what_is_not_one_sequence_is_refused(sample):
    with pytest.raises(ConfigError, match="expected one dimension, as many labels, and no padding"):
        PackingCollator(max_tokens=8)([sample])


def test_empty_groups_are_refused():
    with pytest.raises(ConfigError, match="got 3 lengths and group_size=0"):
        LengthGroupedSampler([1, 2, 3], 0)


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ConfigError, match="a sample has 30 tokens, and PackingCollator.max_tokens is 29"):
        PackingCollator(max_tokens=29)(documents())


# --- Attention -----------------------------------------------------------------------------------------------------


def alone(query, key, value, document_ids, **options):
    """Attention of each document alone."""
    rows = []
    for row, ids in enumerate(document_ids):
        parts = [(ids == number).nonzero().flatten() for number in ids.unique()]
        rows.append(torch.cat([F.scaled_dot_product_attention(*(tensor[row, :, part] for tensor in (query, key, value)),
                                                              **options) for part in parts], -2))  # fmt: skip
    return torch.stack(rows)


def computed(attend, inputs, **options):
    """Return the output and the gradients of `inputs`."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    out = attend(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def largest_difference(first, second):
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_of_a_row_is_that_of_its_documents(is_causal):
    ids = PackingCollator(max_tokens=32)(documents())["document_ids"]
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(len(ids), 4, ids.shape[1], 8, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, len(ids), 2, ids.shape[1], 8, generator=draw, dtype=torch.float64)
    options = {"scale": 0.7, "enable_gqa": True}
    expected = computed(lambda *given: alone(*given, ids, is_causal=is_causal, **options), (query, key, value))
    masked = {"attn_mask": document_mask(ids, is_causal=is_causal), **options}

    found = computed(document_attention(ids, is_causal=is_causal), (query, key, value), **options)
    assert largest_difference(found, expected) < 1e-12
    found = computed(F.scaled_dot_product_attention, (query, key, value), **masked)
    assert largest_difference(found, expected) < 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_block_mask_has_the_same_borders(is_causal):
    from torch.nn.attention.flex_attention import flex_attention

    ids = PackingCollator(max_tokens=160)(documents([3 * length for length in LENGTHS]))["document_ids"]
    inputs = torch.randn(3, len(ids), 2, ids.shape[1], 8, generator=torch.Generator().manual_seed(1))
    found = flex_attention(*inputs, block_mask=block_mask(ids, is_causal=is_causal))

    assert float((found - alone(*inputs, ids, is_causal=is_causal)).abs().max()) < 1e-5


# --- Models --------------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """Two layers of plain torch; `attend` is made for each batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.projections = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.mlps = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, position_ids, document_ids):
        attend = document_attention(document_ids)
        x = self.tokens(input_ids) + self.positions(position_ids)
        for project, mlp in zip(self.projections, self.mlps, strict=True):
            y = project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            x = x + mlp(attend(*y).transpose(1, 2).flatten(2))
        return self.head(x)


def token_losses(scores, labels):
    """Return the loss of each token that has a label: the scores before it predict it."""
    losses = F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return losses[labels[:, 1:].flatten() != -100]


def _loss_and_gradients(model, losses):
    loss = torch.cat(losses).mean()
    return loss, torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])


def _compare(model, scores_of_packed, scores_of_alone):
    """Compare losses of tokens, their mean and its gradients with those of documents alone."""
    order = [index for row in best_fit(LENGTHS, 32) for index in row]
    apart = [documents()[index]["input_ids"][None] for index in order]
    expected = [token_losses(scores_of_alone(model, tokens), tokens) for tokens in apart]
    batch = PackingCollator(max_tokens=32, rows=4)(documents())  # a row of padding, too
    found = [token_losses(scores_of_packed(model, batch), batch["labels"])]

    assert float((torch.cat(found) - torch.cat(expected)).detach().abs().max()) < 1e-6
    (loss, gradient), (plain_loss, plain) = (_loss_and_gradients(model, each) for each in (found, expected))
    assert float(abs(loss - plain_loss).detach()) < 1e-6
    assert float((gradient - plain).abs().max() / plain.abs().max()) < 1e-6


def _gpt_alone(model, tokens):
    return model(tokens, torch.arange(tokens.shape[1])[None], torch.zeros_like(tokens))


def _gpt_packed(model, batch):
    return model(batch["input_ids"], batch["position_ids"], batch["document_ids"])


def test_a_packed_loss_is_that_of_documents_alone():
    _compare(GPT(), _gpt_packed, _gpt_alone)


def llama(attention, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _llama_packed(model, batch):
    named = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    out = model(**named, use_cache=False)
    assert float(abs(out.loss - token_losses(out.logits, batch["labels"]).mean()).detach()) < 1e-6
    return out.logits


def _llama_alone(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits


@HEAVY
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers_finds_borders_in_positions(attention):
    _compare(llama(attention), _llama_packed, _llama_alone)


@pytest.mark.sweep(guard="tests/plugins/test_sequences.py::test_a_block_mask_has_the_same_borders")
@HEAVY
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_transformers_finds_borders_for_flex_attention():
    """Without gradients, which FlexAttention has not on a CPU."""
    batch = PackingCollator(max_tokens=32)(documents())
    with torch.no_grad():
        found, expected = (_llama_packed(llama(attention), batch) for attention in ("flex_attention", "sdpa"))

    assert float((found - expected).abs().max()) < 1e-5


@HEAVY
@pytest.mark.slow
@pytest.mark.parametrize("spoils", [{"use_cache": True}, {"attention_mask": torch.ones(3, 32)}])
def test_transformers_ignores_borders_with_a_cache_or_a_mask(spoils):
    """As docs/data.md warns."""
    model, batch = llama("sdpa"), PackingCollator(max_tokens=32)(documents())
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        right = model(**inputs, use_cache=False).logits
        wrong = model(**inputs, **{"use_cache": False} | spoils).logits

    assert float((right - wrong).abs().max()) > 1e-3


# --- Batches of similar length -------------------------------------------------------------------------------------


def draw_lengths(number):
    return torch.empty(number).log_normal_(5, 0.8, generator=torch.Generator().manual_seed(1)).long() + 1


def test_neighbours_have_similar_lengths():
    lengths = draw_lengths(1003)
    torch.manual_seed(1)
    sampler = LengthGroupedSampler(lengths, 100)
    order, again = list(sampler), list(sampler)

    assert sorted(order) == sorted(again) == list(range(1003)) != order
    assert order[:20] != again[:20]
    assert lengths[order[0]] == lengths.max()
    assert padding(lengths[order].split(8)) < 0.25 * padding(lengths.split(8))


def padding(batches):
    """Return how many tokens are added to those of `batches`, as a share."""
    return sum(len(each) * int(each.max()) for each in batches) / sum(int(each.sum()) for each in batches) - 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_a_step_have_similar_lengths(world_size):
    lengths = draw_lengths(1003)
    loader = DataLoader(lengths, 4, sampler=LengthGroupedSampler(lengths, 200))
    shares = []
    for rank in range(world_size):
        share = shard_dataloader(loader, "train", Mesh(axes={"data": world_size}, rank=rank))
        set_epoch(share, 3)
        shares.append(list(share))
    steps = [torch.cat(step) for step in zip(*shares, strict=True)]
    seen = torch.cat(steps)

    assert set(seen.tolist()) == set(lengths.tolist())
    assert len(seen) == -(-1003 // world_size) * world_size
    assert max(float(step.max() / step.min()) for step in steps) < 6  # also between groups, and at the end
    assert padding(steps) < 0.25 * padding(lengths.split(4 * world_size))


class Seeing(sg.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gpt, self.seen = GPT(), []

    def training_step(self, batch):
        self.seen.append(int(batch["cu_seqlens"][1]))
        return token_losses(_gpt_packed(self.gpt, batch), batch["labels"]).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _resume(rank, world_size, folder):
    lengths = torch.arange(60) % 30 + 3
    loader = DataLoader(
        documents(lengths.tolist()), 3, collate_fn=PackingCollator(max_tokens=32, rows=2), num_workers=1,
        sampler=LengthGroupedSampler(lengths, 30),
    )  # fmt: skip

    def fit(steps, seed, checkpoint=None):
        torch.manual_seed(seed + rank)
        trainer = sg.Trainer(strategy="ddp", devices=world_size, max_steps=steps, default_root_dir=folder, **QUIET)
        module = Seeing()
        trainer.fit(module, loader, ckpt_path=checkpoint)
        return trainer, module

    whole, one = fit(16, 1)  # epochs of 10 steps
    first, two = fit(6, 1)
    first.save_checkpoint(folder / "at_6.ckpt")
    second, three = fit(16, 7, folder / "at_6.ckpt")
    return relative_difference(weights_of(whole), weights_of(second)), one.seen, two.seen + three.seen


@pytest.mark.when_changed(
    "plugins/libraries/stratagem_sequences",
    guard="tests/plugins/test_sequences.py::test_ranks_of_a_step_have_similar_lengths",
)
@pytest.mark.slow
def test_two_ranks_resume_packed_batches_of_similar_length_bit_exactly(tmp_path):
    results = run_in_processes(_resume, 2, tmp_path)
    for difference, whole, resumed in results:
        assert difference == 0
        assert whole == resumed
        assert len(whole) == 16
    (_, first, _), (_, second, _) = results
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) <= 8
    assert max(first) - min(first) > 16
