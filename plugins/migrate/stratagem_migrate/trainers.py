"""Check attributes and methods of trainers, `load_from_checkpoint` and `seed_everything`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Final

from stratagem.errors import nearest
from stratagem_migrate import installed
from stratagem_migrate.findings import CHANGE, CHECK, Finding
from stratagem_migrate.source import Source, last_name, short

#: Attributes of Lightning's Trainer that ours does not have, and their replacements.
TRAINER: Final[dict[str, tuple[str, str]]] = {
    "tune": ('callbacks=["learning_rate_finder", "batch_size_finder"]', "they run when fit starts"),
    "tuner": ('callbacks=["learning_rate_finder", "batch_size_finder"]', "they run when fit starts"),
    "lr_find": ('callbacks=["learning_rate_finder"]', "it runs when fit starts"),
    "scale_batch_size": ('callbacks=["batch_size_finder"]', "it runs when fit starts"),
    "get_model": ("trainer.module", ""),
    "training_type_plugin": ("trainer.strategy", ""),
    "precision_plugin": ("trainer.precision", ""),
    "accelerator_connector": ("trainer.run.stack", ""),
    "lr_schedulers": ("trainer.lr_scheduler_configs", ""),
    "num_gpus": ("trainer.world_size", ""),
    "root_gpu": ("trainer.run.device", ""),
    "root_device": ("trainer.run.device", ""),
    "proc_rank": ("trainer.global_rank", ""),
    "running_sanity_check": ("trainer.sanity_checking", ""),
    "progress_bar_callback": ("trainer.callbacks", ""),
    "progress_bar_dict": ("trainer.progress_bar_metrics", ""),
    "fit_loop": ("trainer.current_epoch, trainer.global_step", ""),
    **dict.fromkeys(
        ("add_argparse_args", "from_argparse_args", "parse_argparser"),
        ("stratagem.Trainer.from_cli()", "it reads the command line itself"),
    ),
}
#: Attributes of Lightning's Trainer for its strategy.
STRATEGIES: Final = ("strategy", "training_type_plugin", "accelerator")
#: Replacements of methods and attributes of Lightning's strategies.
STRATEGY: Final = {
    "barrier": "trainer.run.collectives.barrier()",
    "broadcast": "trainer.run.collectives.broadcast_object(value)",
    "reduce": "trainer.run.collectives.all_reduce(tensor)",
    "all_gather": "trainer.run.collectives.all_gather(tensor)",
    "root_device": "trainer.run.device",
    "model": "trainer.run.model",
    "is_global_zero": "trainer.is_global_zero",
    "global_rank": "trainer.global_rank",
    "world_size": "trainer.world_size",
}
#: Renamed keywords of fit, validate, test, predict and save_checkpoint.
KEYWORDS: Final = {
    "train_dataloader": "train_dataloaders",
    "val_dataloaders": "dataloaders",
    "test_dataloaders": "dataloaders",
}
STAGES: Final = ("fit", "validate", "test", "predict", "save_checkpoint")


def on_trainer(source: Source) -> Iterator[Finding]:
    """Find attributes and methods of trainers that were renamed or removed."""
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _on_trainer(source, node):
            yield from _trainer_attribute(source, node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _on_trainer(source, node.func):
            yield from _trainer_call(source, node, node.func.attr)


def _on_trainer(source: Source, node: ast.Attribute) -> bool:
    is_new = (source.known(node.value) or "").rpartition(".")[2] == "Trainer"
    return is_new or source.is_trainer(node.value)


def _trainer_attribute(source: Source, node: ast.Attribute) -> Iterator[Finding]:
    name, parent = node.attr, source.parents.get(node)
    old = f"{short(node.value)}.{name}"
    if name in STRATEGIES and isinstance(parent, ast.Attribute):
        if parent.attr in STRATEGY:
            yield source.finding(node, CHANGE, f"{old}.{parent.attr}", STRATEGY[parent.attr])
    elif name in installed.trainer_attributes() | source.set_on_trainers or _is_special(name):
        return
    elif name == "from_argparse_args" and (own := _own_option(source)):
        yield source.finding(node, CHANGE, old, *_beside(own))
    elif name in TRAINER:
        yield source.finding(node, CHANGE, old, *TRAINER[name])
    elif name in installed.trainer_arguments():
        yield source.finding(node, CHANGE, old, f"{short(node.value)}.settings.{name}")
    else:
        hint = nearest(name, installed.trainer_attributes())
        yield source.finding(node, CHANGE, old, "", f"the Trainer has no such attribute; {hint}".removesuffix("; "))


def _own_option(source: Source) -> str:
    """Return the first option that the script adds to a parser of its own; empty if it adds none."""
    added = (node for node in source.nodes if isinstance(node, ast.Call) and last_name(node) == "add_argument")
    return next((str(source.literal(node.args[0])) for node in added if node.args), "")


def _beside(own: str) -> tuple[str, str]:
    new = "args, rest = parser.parse_known_args(), and stratagem.Trainer.from_cli(rest)"
    return new, f"from_cli() would read {own} as an argument of the Trainer"


def _is_special(name: str) -> bool:
    """Whether the name is Python's or hydra's, such as ``cfg.trainer._target_``."""
    return name.startswith("_") and name.endswith("_")


def _trainer_call(source: Source, node: ast.Call, method: str) -> Iterator[Finding]:
    own = _own_option(source) if method == "from_cli" and not node.args else ""
    if own:
        yield source.finding(node, CHANGE, short(node), *_beside(own))
    if method not in STAGES:
        return
    known, given = installed.parameters("Trainer", method), {keyword.arg for keyword in node.keywords}
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in known:
            new = f"{KEYWORDS[keyword.arg]}=" if keyword.arg in KEYWORDS else "leave it out"
            yield source.finding(keyword, CHANGE, f"{method}({short(keyword)})", new)
    if method in ("validate", "test") and len(node.args) > 2:
        yield source.finding(node, CHANGE, f"{method}({', '.join(map(short, node.args))})",
                             f"{method}({short(node.args[0])}, {short(node.args[1])}, name=value)",
                             f"the next arguments are {' and '.join(list(known)[2:])}")  # fmt: skip
    if method in ("validate", "test", "predict") and not node.args and given.isdisjoint({"model", "ckpt_path"}):
        yield source.finding(
            node, CHECK, f"trainer.{method}() without a model", f'trainer.{method}(ckpt_path="best")',
            "stratagem uses the weights at the end of training, Lightning those of the best checkpoint; the data "
            "module of fit is used again, and loaders that were passed to fit must be passed again",
        )  # fmt: skip


def unshuffled(source: Source) -> Iterator[Finding]:
    """Find training loaders that do not shuffle: Lightning shuffles them with several processes."""
    for node in source.nodes:
        if not (isinstance(node, ast.FunctionDef) and node.name == "train_dataloader"):
            continue
        for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
            if short(call.func).rpartition(".")[2] != "DataLoader" or any(each.arg is None for each in call.keywords):
                continue
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            off = "shuffle" in given and source.literal(given["shuffle"]) is False
            if off or (given.keys().isdisjoint({"shuffle", "sampler", "batch_sampler"}) and len(call.args) < 3):
                yield source.finding(
                    call, CHECK, "a training loader without shuffle=True", "DataLoader(..., shuffle=True)",
                    "Lightning shuffles it with several processes; stratagem always keeps the order of the loader",
                )  # fmt: skip


# --- Other functions -------------------------------------------------------------------------------------------


def loading(source: Source) -> Iterator[Finding]:
    """Find arguments of `load_from_checkpoint` that would be passed to ``__init__``."""
    replaced = {"hparams_file": "arguments of __init__ by name",
                "weights_only": "leave it out, a checkpoint never runs code"}  # fmt: skip
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="load_from_checkpoint")):
                for keyword in node.keywords:
                    if keyword.arg in replaced:
                        old = f"load_from_checkpoint({short(keyword)})"
                        yield source.finding(keyword, CHANGE, old, replaced[keyword.arg])


def seeds(source: Source) -> Iterator[Finding]:
    """Find arguments of `seed_everything` that are keywords now, or were removed."""
    for node in source.calls_of("seed_everything"):
        import stratagem

        known = inspect.signature(stratagem.seed_everything).parameters
        positional = [name for name, each in known.items() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        if len(node.args) > len(positional):
            yield source.finding(node, CHANGE, short(node), f"seed_everything({short(node.args[0])}, workers=...)")
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in known:
                yield source.finding(keyword, CHANGE, f"seed_everything({short(keyword)})", "leave it out")
