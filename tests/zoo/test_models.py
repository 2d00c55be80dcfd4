"""Models of transformers, unchanged, cut in stages and in slices: weights, losses and validation are those of one process.

The models are small and have random weights. `make test` trains five of them, in one start of two ranks.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from selection import HEAVY
from stratagem_sharding.shards import local
from stratagem_testing import run_in_processes
from stratagem_testing.training import QUIET, weights_of

pytestmark = [HEAVY, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
SAMPLES, BATCH, LENGTH, WORDS = 16, 8, 12, 64
SHAPE = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "sliding_window": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": WORDS,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
T5 = {
    "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 4,
    "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
MAMBA = SHAPE | {"head_dim": 8, "num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4, "expand": 2}
IMAGE = SHAPE | {"image_size": 16, "patch_size": 4, "num_labels": 5, "num_channels": 3}
EXPERTS = SHAPE | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: By the class of the model: the class of its configuration, its options, and what a batch has.
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", SHAPE, "text"),
    "GPT2LMHeadModel": ("GPT2Config", GPT2, "text"),
    "T5ForConditionalGeneration": ("T5Config", T5, "text"),
    "ViTForImageClassification": ("ViTConfig", IMAGE, "image"),
    "BertForMaskedLM": ("BertConfig", SHAPE, "text"),
    "MistralForCausalLM": ("MistralConfig", SHAPE, "text"),
    "Qwen3ForCausalLM": ("Qwen3Config", SHAPE, "text"),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", SHAPE, "text"),
    "MixtralForCausalLM": ("MixtralConfig", EXPERTS, "text"),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", EXPERTS, "text"),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SHAPE, "text"),
    "RobertaForMaskedLM": ("RobertaConfig", SHAPE, "text"),
    "ModernBertForMaskedLM": ("ModernBertConfig", SHAPE | {"cls_token_id": 1, "sep_token_id": 2}, "text"),
    "BartForConditionalGeneration": ("BartConfig", BART, "text"),
    "DeiTForImageClassification": ("DeiTConfig", IMAGE, "image"),
    "BloomForCausalLM": ("BloomConfig", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 4, "n_head": 4}, "text"),
    "OPTForCausalLM": ("OPTConfig", SHAPE | {"ffn_dim": 64, "word_embed_proj_dim": 32}, "text"),
    "FalconForCausalLM": (
        "FalconConfig",
        {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
        "text",
    ),
    "Mamba2ForCausalLM": ("Mamba2Config", MAMBA, "text"),
}
#: By name: what cuts a model, and how much of the parameters a rank may hold.
CUTS = {"stages": ({"pipeline": 2}, 0.85), "slices": ({"tensor": 2}, 0.75), "sequences": ({"context": 2}, 1.01)}
#: Those whose sequences cannot be cut: without sequences, with two lengths, a bias by distance, or a state.
WHOLE = {name for name in MODELS if name.startswith(("ViT", "DeiT", "Bart", "T5", "Bloom", "Mamba"))}
ALWAYS = tuple(MODELS)[:5]


class Rows(Dataset):
    """Words or images, and targets; of words that only pad, these are ignored."""

    def __init__(self, kind, pads):
        generator = torch.Generator().manual_seed(3)
        if kind == "image":
            images = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
            self.columns = {"pixel_values": images, "labels": torch.randint(5, (SAMPLES,), generator=generator)}
        else:
            words = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
            mask = torch.arange(LENGTH) < (torch.arange(SAMPLES)[:, None] % 6 + 7 if pads else LENGTH)
            mask = mask.expand(SAMPLES, LENGTH)
            labels = words.where(mask, -100)
            self.columns = {"input_ids": words, "attention_mask": mask.long(), "labels": labels}

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


class Public(sg.Module):
    def __init__(self, name):
        import transformers

        super().__init__()
        config, options, _ = MODELS[name]
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            made = getattr(transformers, config)(**options)
            for key in [key for key in vars(made) if "drop" in key]:
                setattr(made, key, 0.0)
            self.model = getattr(transformers, name)(made)

    def training_step(self, batch, batch_idx):
        return 20 * self.model(**batch).loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


def batches(name, shares=1, *, pads=True):
    return DataLoader(Rows(MODELS[name][2], pads), batch_size=BATCH // shares)


def shares_of(options):
    """Return into how many parts a batch is divided; each has a mean of its own, so that none may have padding."""
    return 2 if "shard" in options or "name" in options else 1


def difference(found, weights):
    """Return the norm of the difference of all weights, as a share of theirs."""
    pairs = [(found[name], each) for name, each in weights.items() if each.is_floating_point()]
    return float(sum((one - other).square().sum() for one, other in pairs) ** 0.5) / float(
        sum(each.square().sum() for _, each in pairs) ** 0.5
    )


def plainly(rank, size, name, pads, epochs=1, *, window=1, mixed=False):
    """Return the weights, the loss of validation and the largest norm of a gradient of a plain loop in one process."""
    module, norms = Public(name), []
    optimizer = module.configure_optimizers()
    for index, batch in enumerate([*batches(name, pads=pads)] * epochs):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = module.training_step(batch, index) / window
        loss.backward()
        if (index + 1) % window == 0:
            norms.append(float(clip_grad_norm_(module.parameters(), 5.0)))
            optimizer.step()
            optimizer.zero_grad()
    module.eval()
    with torch.no_grad():
        losses = [float(module.model(**batch).loss) for batch in batches(name, pads=pads)]
    return module.state_dict(), sum(losses) / len(losses), max(norms)


def cut(rank, size, name, options, habit=None):
    strategy = {"name": "parallel"} | options
    arguments = QUIET | {"accelerator": "cpu"} | (habit or {})
    trainer = sg.Trainer(strategy=strategy, devices=size, gradient_clip_val=5.0, **arguments)
    module, shares = Public(name), shares_of(options)
    with contextlib.redirect_stdout(None):
        loader = batches(name, shares, pads=shares == 1)
        trainer.fit(module, loader, loader)
    held = sum(local(each).numel() for each in module.parameters() if not each.is_meta)
    return weights_of(trainer), float(trainer.callback_metrics["val_loss"]), held


def both(rank, size, names, cases):
    """Return what a plain loop gives for each of `names`, and what each case gives."""
    plain = {name: plainly(rank, size, name, True) for name in names}
    return plain, [cut(rank, size, name, CUTS[way][0]) for name, way in cases]


@pytest.mark.parametrize(
    "names", [ALWAYS, pytest.param(tuple(MODELS)[len(ALWAYS) :], marks=pytest.mark.sweep)], ids=["five", "others"]
)
def test_models_of_others_train_as_in_one_process(names):
    cases = [(name, way) for way in CUTS for name in names if way != "sequences" or name not in WHOLE]

    for references, results in run_in_processes(both, 2, names, cases):
        for case, (found, validated, held) in zip(cases, results, strict=True):
            weights, loss, norm = references[case[0]]
            assert difference(found, weights) < 1e-6, case
            assert validated == pytest.approx(loss, rel=1e-4), case
            assert held < CUTS[case[1]][1] * sum(one.numel() for one in Public(case[0]).parameters()), case
            assert norm > 1, case


@pytest.mark.parametrize(("way", "heading"), zip(CUTS, ("Pipeline", "Tensor and sequence", "Context"), strict=True))
def test_the_page_names_the_models(way, heading):
    section = PAGE.read_text().partition(f"## {heading} parallelism")[2].partition("\n## ")[0]
    named = re.sub("[^a-z0-9]", "", section.lower())
    models = [re.sub("For[A-Z].*|LMHeadModel", "", name) for name in MODELS if way != "sequences" or name not in WHOLE]

    assert [name for name in models if name.lower() not in named] == []


GUARDED = pytest.mark.sweep(guard="tests/zoo/test_models.py::test_models_of_others_train_as_in_one_process")


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "interleaved_zero_bubble", "microbatches": 2},
        {"checkpoint": "always", "balance": [3, 1]},
    ],
    ids=["zero bubble", "checkpoint"],
)
@GUARDED
def test_a_llama_in_stages_takes_other_schedules(options):
    ((weights, _, _),) = run_in_processes(plainly, 1, "LlamaForCausalLM", True)

    for found, _, _ in run_in_processes(cut, 2, "LlamaForCausalLM", {"pipeline": 2} | options):
        assert difference(found, weights) < 1e-6


#: Two axes, on four processes.
TOGETHER = {
    "stages and slices": {"pipeline": 2, "tensor": 2},
    "stages and shards": {"pipeline": 2, "shard": 2, "microbatches": 2},
    "slices and shards": {"tensor": 2, "shard": 2},
}


@GUARDED
@pytest.mark.parametrize("axes", TOGETHER)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_others_train_over_two_axes_as_in_one_process(name, axes):
    options = TOGETHER[axes]
    ((weights, _, _),) = run_in_processes(plainly, 1, name, shares_of(options) == 1)

    for found, _, _ in run_in_processes(cut, 4, name, options):
        assert difference(found, weights) < 1e-6


HABITS = {
    "accumulated": ({"accumulate_grad_batches": 2}, {"window": 2}),
    "bf16": ({"precision": "bf16-mixed"}, {"mixed": True}),
    "recomputed": ({"activation_checkpointing": {"policy": "blocks"}}, {}),
    "compiled": ({"compile": True}, {}),
}
STRATEGIES = {way: options for way, (options, _) in CUTS.items()} | {
    "units": {"name": "fsdp", "auto_wrap_policy": "blocks"},
    "replicas": {"name": "ddp"},
}


@GUARDED
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_others_train_with_habits_as_in_one_process(name, habit):
    arguments, plain = HABITS[habit]
    references, limits = {}, dict.fromkeys((True, False), 1e-6)
    for pads in limits:
        ((references[pads], _, _),) = run_in_processes(partial(plainly, **plain), 1, name, pads)
        if "mixed" in plain:  # sums over parts are rounded in other places
            ((exact, _, _),) = run_in_processes(plainly, 1, name, pads)
            limits[pads] = 4 * difference(exact, references[pads])

    for options in (each for way, each in STRATEGIES.items() if way != "sequences" or name not in WHOLE):
        pads = shares_of(options) == 1
        for found, _, _ in run_in_processes(cut, 2, name, options, arguments):
            assert difference(found, references[pads]) < limits[pads], options


#: Each goes on where the one before stopped, and how many shares a batch has there.
CHAIN = [
    ("ddp_sharded", 2), ({"name": "fsdp", "auto_wrap_policy": "blocks"}, 2), ({"name": "parallel", "tensor": 2}, 1),
    ({"name": "parallel", "pipeline": 2}, 1), ("deepspeed_stage_3", 2), ({"name": "parallel", "context": 2}, 1),
]  # fmt: skip


def moved(rank, size, name, folder):
    """Return the weights after an epoch under each strategy of the chain, each of which resumes the one before."""
    path = None
    for number, (strategy, shares) in enumerate(CHAIN[: -1 if name in WHOLE else None]):
        trainer = sg.Trainer(
            strategy=strategy,
            devices=size,
            gradient_clip_val=5.0,
            **QUIET | {"accelerator": "cpu", "max_epochs": number + 1},
        )
        with contextlib.redirect_stdout(None):
            trainer.fit(Public(name), batches(name, shares, pads=False), ckpt_path=path)
        path = f"{folder}/{name}-{number}"
        trainer.save_checkpoint(path)
        weights = weights_of(trainer)
        trainer.close()
    return weights, number + 1


@GUARDED
@pytest.mark.parametrize("name", MODELS)
def test_a_run_of_a_model_of_others_goes_on_under_other_strategies(name, tmp_path):
    for found, epochs in run_in_processes(moved, 2, name, str(tmp_path)):
        ((weights, _, _),) = run_in_processes(plainly, 1, name, False, epochs)
        assert difference(found, weights) < 1e-6
