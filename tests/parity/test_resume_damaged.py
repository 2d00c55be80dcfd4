"""A checkpoint that was edited by hand resumes as the run did, or is refused in one sentence on all ranks."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping

import pytest
import torch
import xxhash

import stratagem as sg
from stratagem.checkpoint.background_save import SingleProcessRun
from stratagem.errors import CheckpointError, ConfigError, StratagemError
from stratagem.stack.formats import format_named, write_with
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference
from stratagem_testing.training import share
from stratagem_trainer.checkpoint_files import read_any

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
FORMATS = ["full", "safetensors", "sharded", "dcp"]
#: What stands where something else should.
OTHERS = {
    "missing": lambda _: None,
    "text": lambda _: "text",
    "tensor": lambda _: torch.zeros(3, 2),
    "integer tensor": lambda old: (
        torch.ones_like(old, dtype=torch.int64) if isinstance(old, torch.Tensor) else {"a": 1}
    ),
}


class Rich(Net):
    """Something of everything: Adam, a schedule, a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen += 1
        return self.net(torch.nn.functional.dropout(x, 0.1, self.training))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def trainer_of(**arguments):
    callbacks = [{"name": "early_stopping", "monitor": "train_loss", "patience": 99}]
    return sg.Trainer(**(QUIET | {"max_epochs": 2, "callbacks": callbacks, "precision": "16-mixed"} | arguments))


def resumed(path, told=None, **arguments):
    trainer = trainer_of(**arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Rich(), share(trainer, joined_batches(4, 8)), ckpt_path=path)
    if told is not None:
        told += [str(each.message) for each in caught]
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint within an epoch, as it was and as a dictionary, and the weights that resuming it leads to."""
    path = tmp_path_factory.mktemp("whole") / "whole.ckpt"
    trainer = trainer_of(max_steps=6)
    trainer.fit(Rich(), joined_batches(4, 8))
    trainer.save_checkpoint(path)
    trainer.close()
    return read_any(path), resumed(path)


def places(value, path=(), limit=3):
    """Yield the path of every key in `value`, and of the first items of each list."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value[:limit]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        if not isinstance(item, torch.Tensor):
            yield from places(item, (*path, key), limit)


def put(state, path, change, name):
    """Return a copy of `state` in which the value at `path` is another one."""
    state = copy.deepcopy(state)
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    if name == "missing":
        del holder[path[-1]]
    else:
        holder[path[-1]] = change(holder[path[-1]])
    return state


@pytest.mark.every_push("missing")
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_key_of_another_type_is_refused_or_has_no_effect(tmp_path, whole, name):
    """Nothing else than one sentence is raised, and nothing is trained otherwise without a message."""
    state, expected = whole
    unexplained = []
    for number, where in enumerate(where for where in places(state) if is_sampled(where)):
        path = tmp_path / f"{number}.ckpt"
        torch.save(put(state, where, OTHERS[name], name), path)
        told: list[str] = []
        try:
            weights = resumed(path, told)
        except StratagemError:
            continue
        except Exception as error:
            unexplained.append((where, f"{type(error).__name__}: {error}"))
            continue
        explained = any("the checkpoint" in message for message in told)
        if relative_difference(weights, expected) > 1e-6 and not explained and not is_legitimate(where):
            unexplained.append((where, "trained otherwise, without a message"))

    assert not unexplained, "\n".join(map(str, unexplained))


def is_sampled(where):
    """Leave out what repeats: the parameters beyond the first layer, and the numbers of a random state."""
    return (
        not any(str(key).startswith(("net.2", "net.4")) for key in where)
        and len(where) < 6
        and "python" not in where[:-1]
    )


def is_legitimate(where):
    """Other numbers of the right kind, and a parameter without state: one that never had a gradient has none."""
    return where[:1] == ("state_dict",) or where[:3] == ("optimizers", 0, "state") or where[-1] in (
        "epoch_done", "epoch_ended", "validated", "loader", "sampler_seeds", "numpy", "cuda", "marks", "feed", "epoch_start",
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("state_dict", "net.0.weight"), "text", r"state_dict\['net.0.weight'\] is a str; expected a tensor"),
        (("state_dict", "net.0.weight"), torch.ones(32, 16, dtype=torch.int64), "has dtype torch.int64; expected one"),
        (("state_dict", "net.0.weight"), torch.ones(32, 16, dtype=torch.complex64), "has dtype torch.complex64"),
        (("state_dict", "seen"), torch.tensor(2.5), "has dtype torch.float32; expected one that torch.int64"),
        (("state_dict", "net.0.weight"), torch.ones(3, 3), r"'net.0.weight' has shape \(3, 3\); expected \(32, 16\)"),
        (("state_dict",), [1], "state_dict is a list; expected a mapping of tensors by name"),
        (("optimizers",), {"state": {}}, "optimizers is a dict; expected a list of mappings"),
        (("optimizers", 0, "state", "net.0.bias", "exp_avg"), torch.ones(5), r"exp_avg has shape \(5,\); expected \(32,\)"),
        (("optimizers", 0, "state", "net.0.bias", "step"), "two", "step is a str; expected a number"),
        (("optimizers", 0, "param_groups", 0, "lr"), "fast", r"param_groups\[0\].lr is a str; expected a number"),
        (("lr_schedulers", 0, "last_epoch"), [1], "last_epoch is a list; expected a number"),
        (("loop", "global_step"), 2.5, "loop.global_step is 2.5; expected a whole number, 0 or more"),
        (("loop", "epoch"), -1, "loop.epoch is -1; expected a whole number, 0 or more"),
        (("ranks",), [], "ranks is empty"),
        (("ranks", 0, "random", "torch"), torch.zeros(3), r"ranks\[0\].random cannot be applied"),
        (("format",), {"version": 99}, "has version 99 and was written by stratagem of an unknown version"),
        (("callbacks",), ["mine"], "callbacks is a list; expected a mapping"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, whole, form, where, value, message):
    if where == ("state_dict",) and form != "sharded":
        return  # refused by the format already
    checkpoint_format = format_named(form)
    path = tmp_path / f"damaged{checkpoint_format.suffix}"
    write_with(checkpoint_format, put(whole[0], where, lambda _: value, "value"), path, SingleProcessRun())

    with pytest.raises(CheckpointError, match=message):
        resumed(path)


def _refused(rank, world_size, paths):
    found = []
    for path in paths:
        try:
            resumed(path, strategy="ddp", devices=world_size)
            found.append("nothing")
        except StratagemError as error:
            found.append(str(error))
    return found


def test_all_ranks_refuse(tmp_path, whole):
    """Also what only one of them would have applied."""
    both = whole[0] | {"ranks": [whole[0]["ranks"][0], copy.deepcopy(whole[0]["ranks"][0])]}
    cases = [
        (("ranks", 1, "random", "torch"), torch.zeros(3)), (("ranks", 1, "epoch_start", "python"), "text"),
        (("ranks", 1, "metrics"), {"train_loss": "text"}), (("loop", "epoch"), "one"),
        (("state_dict", "net.0.bias"), torch.ones(32, dtype=torch.int64)), (("ranks", 1, "feed", "marks"), 5),
    ]  # fmt: skip
    paths = []
    for number, (where, value) in enumerate(cases):
        paths.append(tmp_path / f"{number}.ckpt")
        torch.save(put(both, where, lambda _, value=value: value, "value"), paths[-1])

    results = run_in_processes(_refused, 2, paths)

    assert "nothing" not in results[0] + results[1]
    assert len(results[1]) == len(cases)


@pytest.mark.parametrize("form", ["safetensors", "sharded", "dcp"])
def test_deep_json_is_refused(tmp_path, form):
    checkpoint_format = format_named(form)
    path = tmp_path / f"deep{checkpoint_format.suffix}"
    write_with(
        checkpoint_format, {"state_dict": {"a": torch.zeros(2)}, "values": {"mine": "HERE"}}, path, SingleProcessRun()
    )
    bomb = "[" * 100_000 + "]" * 100_000
    if form == "safetensors":
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header["__metadata__"]["stratagem"] = header["__metadata__"]["stratagem"].replace('"HERE"', bomb)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
        path.with_name(path.name + ".sum").unlink()
    else:
        file = path / ("manifest.json" if form == "sharded" else "stratagem.json")
        text = file.read_bytes().partition(b"\n")[0].replace(b'"HERE"', bomb.encode())
        file.write_bytes(text + f"\n{xxhash.xxh3_128_hexdigest(text)}\n".encode())

    with pytest.raises(CheckpointError, match="cannot be read"):
        read_any(path)


def test_a_path_with_nul_is_refused():
    with pytest.raises(ConfigError, match=r"has a NUL character in it; expected a path; remove it"):
        resumed("a\0b.ckpt")


# --- What is readable, and cannot be meant -----------------------------------------------------------------------


class Tagged(Net):
    """Its group has an option that torch does not know, if `tag` is given."""

    def __init__(self, tag=None):
        super().__init__()
        self.tag = tag

    def configure_optimizers(self):
        group = {"params": list(self.parameters())} | ({} if self.tag is None else {"tag": self.tag})
        return torch.optim.SGD([group], lr=1e-2, momentum=0.9)


def go_on(state, path, module, batches=4):
    """Resume from `state`; return the trainer and what was warned of."""
    torch.save(state, path)
    trainer = sg.Trainer(**QUIET, max_epochs=2, devices=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, joined_batches(batches, 8), ckpt_path=path)
    return trainer, " ".join(str(each.message) for each in caught)


def test_numbers_that_cannot_be_meant_are_refused_and_other_epochs_are_told(tmp_path):
    trainer = sg.Trainer(**QUIET, max_epochs=1, devices=1)
    trainer.fit(Tagged(), joined_batches(4, 8))
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    whole, path = read_any(tmp_path / "whole.ckpt"), tmp_path / "edited.ckpt"
    for key, value in (("lr", None), ("lr", float("nan")), ("momentum", None), ("weight_decay", float("nan"))):
        state = copy.deepcopy(whole)
        state["optimizers"][0]["param_groups"][0][key] = value
        with pytest.raises(CheckpointError, match=rf"param_groups\[0\].{key} is {value}; expected a number"):
            go_on(state, path, Tagged())

    resumed, warned = go_on(copy.deepcopy(whole), path, Tagged(tag=3))
    assert (resumed.global_step, resumed.run.optimizers[0].param_groups[0]["tag"]) == (8, 3)
    assert "param_groups[0] has no 'tag': it stays 3" in warned

    state = copy.deepcopy(whole)
    state["loop"] |= {"batches_done": 10**9, "epoch_done": False, "epoch_ended": False}
    _, warned = go_on(state, path, Tagged())
    assert "saved after 1000000000 batches of epoch 1, and an epoch has 4 now: the rest of that epoch is left" in warned
