"""Models of transformers, adapters of peft and data sets of datasets, as their users have them."""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import stratagem as sg
from programs import scripts
from selection import HEAVY
from stratagem.errors import CheckpointError, ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Frozen, Net, joined_batches, relative_difference

pytestmark = HEAVY

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu",
         "num_sanity_val_steps": 0}  # fmt: skip
FSDP = {"name": "fsdp", "auto_wrap_policy": {"LlamaDecoderLayer"}}
STRATEGIES = {
    "single": ("single_device", 1),
    "ddp": ("ddp", 2),
    "fsdp": (FSDP, 2),
    "deepspeed": ("deepspeed_stage_3", 2),
}


class Chat(sg.Module):
    """A small Llama with tied weights, and adapters."""

    def __init__(self, seed=0, adapters=True, rank=4, second=False, **lora_options):
        import peft
        import transformers

        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch.manual_seed(seed)
            self.model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                    max_position_embeddings=32, tie_word_embeddings=True,
                )
            )  # fmt: skip
            torch.manual_seed(1)
            if adapters:
                lora = {"r": rank, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | lora_options
                self.model = peft.get_peft_model(self.model, peft.LoraConfig(**lora))
            if second:
                self.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))
                self.model.set_adapter("second")

    def training_step(self, batch, batch_idx):
        return self.model(**batch)

    def validation_step(self, batch, batch_idx):
        prompt = {"input_ids": batch["input_ids"][:, :4], "attention_mask": batch["attention_mask"][:, :4]}
        made = self.model.generate(**prompt, max_new_tokens=3, do_sample=False)
        self.log("length", float(made.shape[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.5, momentum=0.9)


def batches(rank=0, world_size=1, kind=dict):
    draw = torch.Generator().manual_seed(3)
    every = [torch.randint(0, 64, (4, 8), generator=draw).chunk(world_size)[rank] for _ in range(4)]
    return [kind({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}) for ids in every]


def _fit(rank, world_size, strategy, options, kind, begin, folder):
    trainer = sg.Trainer(strategy=strategy, devices=world_size, max_epochs=2 if begin else 1, **QUIET)
    model, given = Chat(**options), batches(rank, world_size, kind)
    trainer.fit(model, given, given[:1], ckpt_path=begin)
    if folder:
        trainer.save_checkpoint(f"{folder}/full.ckpt")
        if options.get("adapters", True):
            trainer.save_checkpoint(f"{folder}/part.ckpt", trainable_only=True)
    with trainer.run.gathered_state():
        weights = trainer.run.ask("model_state", module=model)
    return {name: value.clone() for name, value in weights.items()}, trainer.callback_metrics["length"]


def fit(name, begin=None, folder=None, kind=dict, **options):
    strategy, world_size = STRATEGIES[name]
    results = run_in_processes(_fit, world_size, strategy, options, kind, begin, folder)
    assert {float(length) for _, length in results} == {7.0}  # generated in validation
    return results[0][0]


def plainly(model, given=None):
    optimizer = model.configure_optimizers()
    for batch in given or batches():
        model.model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


# --- Training ----------------------------------------------------------------------------------------------------


@pytest.mark.every_push("fsdp", "deepspeed")
@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_adapters_train_as_in_plain_pytorch(request, name):
    if name == "deepspeed":
        request.getfixturevalue("deepspeed_preloaded")
    trained = fit(name)

    assert relative_difference(trained, plainly(Chat())) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_tied_weights_train_whole_and_generate_in_validation(name):
    from transformers import BatchEncoding

    trained = fit(name, adapters=False, kind=BatchEncoding)

    assert relative_difference(trained, plainly(Chat(adapters=False))) < 1e-5


# --- Checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.when_changed("plugins/deepspeed/", "plugins/checkpoints/", cases=("deepspeed-fsdp-full",))
@pytest.mark.every_push("fsdp-single-full", "deepspeed-fsdp-full")
@pytest.mark.slow
@pytest.mark.parametrize("what", ["full", "part"])
@pytest.mark.parametrize(
    ("source", "target"),
    [("single", "fsdp"), ("fsdp", "single"), ("deepspeed", "fsdp"), ("fsdp", "deepspeed"), ("ddp", "deepspeed")],
)
def test_checkpoints_move_between_strategies(deepspeed_preloaded, tmp_path, source, target, what):
    fit(source, folder=tmp_path)
    resumed = fit(target, begin=str(tmp_path / f"{what}.ckpt"))

    assert relative_difference(resumed, plainly(Chat(), batches() * 2)) < 1e-4


@pytest.mark.every_push("trainable_token_indices")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"trainable_token_indices": [1, 2]}, {"second": True}],
    ids=lambda options: next(iter(options)),
)
def test_other_adapters_train_and_resume_elsewhere(tmp_path, options):
    fit("fsdp", folder=tmp_path, **options)
    resumed = fit("ddp", begin=str(tmp_path / "part.ckpt"), **options)

    assert relative_difference(resumed, plainly(Chat(**options), batches() * 2)) < 1e-4


@pytest.fixture
def adapters(tmp_path):
    trainer, model = sg.Trainer(max_epochs=1, **QUIET), Chat()
    trainer.fit(model, batches())
    trainer.save_checkpoint(tmp_path / "adapters.ckpt", weights_only=True, trainable_only=True)
    return model, tmp_path / "adapters.ckpt"


@pytest.mark.slow
def test_adapters_alone(adapters):
    model, path = adapters
    saved = torch.load(path, weights_only=True)
    again = Chat.load_from_checkpoint(path)

    assert len(saved["state_dict"]) == 8
    assert all("lora" in name for name in saved["state_dict"])
    assert relative_difference(again.state_dict(), model.state_dict()) == 0


@pytest.mark.slow
def test_adapters_on_another_base_are_refused(adapters):
    path = adapters[1]
    told = "holds only what was trained, and the frozen '.*' of this model has other values; expected the base model"
    with pytest.raises(CheckpointError, match=told):
        sg.Trainer(**QUIET).validate(Chat(seed=7), batches(), ckpt_path=path)
    with pytest.raises(CheckpointError, match=told):
        Chat.load_from_checkpoint(path, seed=7)


def test_adapters_of_another_shape_or_place_are_refused(adapters):
    path = adapters[1]
    with pytest.raises(CheckpointError, match="shape"):
        Chat.load_from_checkpoint(path, rank=2)
    with pytest.raises(
        CheckpointError, match="holds what was trained in another model: '.*' is a tensor that this model"
    ):
        Chat.load_from_checkpoint(path, adapters=False)


def test_the_same_base_in_another_precision_is_accepted(adapters):
    model = Chat().bfloat16()
    sg.Trainer(precision="bf16-true", **QUIET).validate(model, batches(), ckpt_path=adapters[1])


def test_model_checkpoint_saves_them(tmp_path):
    callback = {"name": "model_checkpoint", "dirpath": tmp_path, "save_trainable_only": True}
    quiet = {name: value for name, value in QUIET.items() if name != "enable_checkpointing"}
    trainer = sg.Trainer(max_epochs=1, callbacks=[callback], **quiet)
    trainer.fit(Chat(), batches())
    (path,) = tmp_path.glob("*.ckpt")
    trainer = sg.Trainer(max_epochs=2, **QUIET)
    trainer.fit(Chat(), batches(), ckpt_path=path)

    assert len(torch.load(path, weights_only=True)["state_dict"]) == 8
    assert trainer.global_step == 8


@pytest.mark.parametrize(("make", "told"), [(Net, "no frozen parameters"), (None, "frozen parameters only")])
def test_a_model_without_parameters_of_both_kinds(tmp_path, make, told):
    model = (make or Frozen)()
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(model, joined_batches(1, 8))
    if make is None:
        model.requires_grad_(False)
    with pytest.raises(ConfigError, match=f"trainable_only is True, and {type(model).__name__} has {told}"):
        trainer.save_checkpoint(tmp_path / "a.ckpt", trainable_only=True)


# --- datasets ----------------------------------------------------------------------------------------------------


class Reader(Net):
    def __init__(self):
        super().__init__()
        self.epochs = [[]]

    def training_step(self, batch, batch_idx):
        assert set(batch) == {"x", "index"}
        self.epochs[-1] += batch["index"].tolist()
        return self(batch["x"]).mean()

    def on_train_epoch_end(self):
        self.epochs.append([])


def _read(rank, world_size, streams):
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    rows = Dataset.from_dict({"x": torch.rand(12, 16).tolist(), "name": ["n"] * 12, "index": range(12)})
    if streams:
        rows = rows.remove_columns("name").to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=4)
        loader = DataLoader(split_dataset_by_node(rows, rank, world_size).with_format("torch"), batch_size=2)
    else:
        rows.set_format("torch", columns=["x", "index"])
        loader = DataLoader(rows, batch_size=2, shuffle=True)
    model = Reader()
    sg.Trainer(strategy="ddp", devices=world_size, max_epochs=2, **QUIET).fit(model, loader)
    return model.epochs[:2]


@pytest.mark.sweep(guard="tests/core/test_batches.py::test_each_epoch_has_another_order")
@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True], ids=["map-style", "stream"])
def test_each_rank_reads_its_share_in_another_order_in_each_epoch(streams):
    first, second = run_in_processes(_read, 2, streams)

    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(12))
    assert first[0] + second[0] != first[1] + second[1]


# --- Examples ----------------------------------------------------------------------------------------------------


#: Importing transformers takes five seconds in each of their processes.
WHERE_IT_CHANGED = pytest.mark.when_changed("examples/")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="one process"),
        pytest.param(["--strategy", "fsdp", "--devices", "2"], id="fsdp", marks=WHERE_IT_CHANGED),
    ],
)
@pytest.mark.parametrize(
    ("script", "printed", "most"),
    [
        pytest.param("transformers_finetune", r"accuracy ([\d.]+)", 1, marks=WHERE_IT_CHANGED),
        ("peft_lora", r"loss ([\d.]+), 8 tensors", 3.4),
        pytest.param("datasets_loader", r"val_loss ([\d.]+)", 0.01, marks=pytest.mark.sweep),
    ],
)
def test_examples(script, printed, most, arguments):
    (number,) = re.findall(printed, run_example(script, *arguments))

    assert float(number) <= most
    assert float(number) >= 0.9 or script != "transformers_finetune"
    assert len((EXAMPLES / f"{script}.py").read_text().splitlines()) < 40


@pytest.mark.when_changed(
    "examples/", guard="tests/plugins/test_huggingface.py::test_adapters_train_as_in_plain_pytorch"
)
@pytest.mark.every_push("32-true")
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_example_of_full_fine_tuning_writes_what_transformers_reads(precision):
    from transformers import LlamaForCausalLM

    said = run_example("full_finetune", "--devices", "2", "--precision", precision)
    trained, of_the_folder = map(float, re.search(r"val_loss ([\d.]+), of the folder ([\d.]+)", said).groups())
    tokens = torch.arange(32)[:, None].add(torch.arange(8)) % 32
    with torch.no_grad():
        loss = float(LlamaForCausalLM.from_pretrained("finetuned")(input_ids=tokens, labels=tokens).loss)

    assert trained < 0.5  # log(32) is 3.47
    assert abs(of_the_folder - trained) < 0.05
    assert abs(loss - trained) < 0.05


@pytest.mark.when_changed(
    "examples/", guard="tests/plugins/test_huggingface.py::test_adapters_train_as_in_plain_pytorch"
)
@pytest.mark.every_push("ddp")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_example_of_preference_tuning_learns_what_is_preferred(strategy):
    said = run_example("dpo", "--devices", "2", "--strategy", strategy)
    before, after = map(float, re.search(r"accuracy ([\d.]+), then ([\d.]+)", said).groups())

    assert before < 0.7
    assert after > 0.95


def run_example(script, *arguments):
    """Run an example in the current folder; return what it printed."""
    path = EXAMPLES / f"{script}.py"
    command = [sys.executable, str(path), "--accelerator", "cpu", "--enable_progress_bar", "false", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(Path.cwd()), "HF_HUB_OFFLINE": "1"}
    done = scripts.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
