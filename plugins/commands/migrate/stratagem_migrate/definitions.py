"""Classes that the script defines: hooks that are called otherwise, optimizers, callbacks of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from stratagem_migrate import today
from stratagem_migrate.findings import CHANGE, CHECK, SAME, Finding
from stratagem_migrate.source import Source, methods, short

_OWN_LIST: Final = "keep what you need of each batch in a list of your own, and clear it here"
_AT_THE_END: Final = "nothing: do it at the end of the step"
_IN_THE_STEP: Final = "the first lines of the step, or the loader's collate_fn"
_EVAL: Final = "nothing: evaluation switches to eval() and back"

#: Hooks of a LightningModule that stratagem does not call, and what to define in their stead.
_METHODS: Final[dict[str, tuple[str, str]]] = {
    "training_epoch_end": ("def on_train_epoch_end(self)", _OWN_LIST),
    "validation_epoch_end": ("def on_validation_epoch_end(self)", _OWN_LIST),
    "test_epoch_end": ("def on_test_epoch_end(self)", _OWN_LIST),
    "training_end": (_AT_THE_END, ""),
    "validation_end": ("def on_validation_epoch_end(self)", _OWN_LIST),
    "test_end": ("def on_test_epoch_end(self)", _OWN_LIST),
    "on_epoch_start": ("def on_train_epoch_start(self)", ""),
    "on_epoch_end": ("def on_train_epoch_end(self)", ""),
    "on_batch_start": ("def on_train_batch_start(self, batch, batch_idx)", ""),
    "on_batch_end": ("def on_train_batch_end(self, outputs, batch, batch_idx)", ""),
    "on_pretrain_routine_start": ("def on_fit_start(self)", ""),
    "on_pretrain_routine_end": ("def on_fit_start(self)", ""),
    "on_before_backward": ("the end of training_step", ""),
    "optimizer_step": ("automatic_optimization = False", "and step in training_step; or a plugin's optimizer_step"),
    "optimizer_zero_grad": ("automatic_optimization = False", "and zero gradients in training_step"),
    "backward": ("automatic_optimization = False", "and manual_backward in training_step; or a plugin's hook backward"),
    "configure_gradient_clipping": ("Trainer(gradient_clip_val=)", "or a plugin's hook clip_gradients"),
    "lr_scheduler_step": ("a scheduler whose step() does it", ""),
    "configure_callbacks": ("Trainer(callbacks=)", ""),
    "configure_sharded_model": ("def configure_model(self)", "build only what does not exist yet"),
    "transfer_batch_to_device": ("a batch whose .to(device) does it", "or a plugin's hook transfer_batch"),
    "on_before_batch_transfer": (_IN_THE_STEP, ""),
    "on_after_batch_transfer": (_IN_THE_STEP, ""),
    "get_progress_bar_dict": ("self.log(name, value, prog_bar=True)", ""),
    "tbptt_split_batch": ("automatic_optimization = False", "and cut the sequence in training_step"),
    "on_hpc_save": ("def on_save_checkpoint(self, checkpoint)", ""),
    "on_hpc_load": ("def on_load_checkpoint(self, checkpoint)", ""),
    "configure_apex": ("nothing: mixed precision is torch's", ""),
    "configure_ddp": ("a strategy plugin", "docs/strategy-in-60-lines.md"),
    "init_ddp_connection": ("a strategy plugin", "docs/strategy-in-60-lines.md"),
    **dict.fromkeys(
        ("on_validation_model_eval", "on_validation_model_train", "on_test_model_eval", "on_test_model_train",
         "on_predict_model_eval", "on_predict_model_train", "on_validation_model_zero_grad"), (_EVAL, ""),
    ),
}  # fmt: skip

#: Hooks of a LightningDataModule that nobody calls here.
_DATA_METHODS: Final[dict[str, tuple[str, str]]] = {
    "teardown": ("the end of the script", ""),
    "transfer_batch_to_device": ("a batch whose .to(device) does it", "or a plugin's hook transfer_batch"),
    "on_before_batch_transfer": (_IN_THE_STEP, ""),
    "on_after_batch_transfer": (_IN_THE_STEP, ""),
    "on_exception": ("a callback's on_exception", ""),
    "state_dict": ("a loader with a state_dict of its own", "it resumes in the middle of an epoch"),
    "load_state_dict": ("a loader with a state_dict of its own", "it resumes in the middle of an epoch"),
}

#: Hooks of a Callback that are called otherwise.
_CALLBACK_METHODS: Final[dict[str, str]] = {
    "setup": "on_fit_start(self, trainer, module)",
    "on_init_start": "__init__(self)",
    "on_init_end": "on_fit_start(self, trainer, module)",
    "on_sanity_check_start": "on_validation_start(self, trainer), where trainer.sanity_checking is true",
    "on_sanity_check_end": "on_validation_end(self, trainer), where trainer.sanity_checking is true",
    "on_pretrain_routine_start": "on_fit_start(self, trainer, module)",
    "on_pretrain_routine_end": "on_fit_start(self, trainer, module)",
    "on_epoch_start": "on_train_epoch_start(self, trainer, module)",
    "on_epoch_end": "on_train_epoch_end(self, trainer, module)",
    "on_batch_start": "on_train_batch_start(self, trainer, module, batch, batch_idx)",
    "on_batch_end": "on_train_batch_end(self, trainer, module, outputs, batch, batch_idx)",
    "on_validation_epoch_start": "on_validation_start(self, trainer, module)",
    "on_test_epoch_start": "on_test_start(self, trainer, module)",
    "on_predict_epoch_start": "on_predict_start(self, trainer, module)",
    "on_predict_epoch_end": "on_predict_end(self, trainer, module)",
    "on_after_backward": "on_before_optimizer_step(self, trainer, module, optimizer)",
    "on_before_zero_grad": "on_before_optimizer_step(self, trainer, module, optimizer)",
    "on_keyboard_interrupt": "on_exception(self, trainer, module, exception)",
    **dict.fromkeys(
        ("on_validation_batch_start", "on_test_batch_start", "on_predict_batch_start", "on_before_backward"),
        "nothing yet",
    ),
}  # fmt: skip


# --- Modules and data modules ------------------------------------------------------------------------------------


def module_methods(source: Source) -> Iterator[Finding]:
    """Say which methods of a module or a data module nobody would call."""
    for cls in source.of_role("module"):
        for method in methods(cls):
            yield from _module_method(source, method)
    for cls in source.of_role("data"):
        for method in methods(cls):
            if method.name in _DATA_METHODS and method.name not in today.data_attributes():
                yield source.finding(method, CHANGE, f"def {method.name}", *_DATA_METHODS[method.name])


def _module_method(source: Source, method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    name, given = method.name, [argument.arg for argument in method.args.args[1:]]
    old = f"def {name}({', '.join(['self', *given])})"
    if name in _METHODS and name not in today.module_attributes():
        yield source.finding(method, CHANGE, old, *_METHODS[name])
    elif "optimizer_idx" in given or "hiddens" in given:
        new = "automatic_optimization = False" if name == "training_step" else old.replace(", optimizer_idx", "")
        note = "and step each of self.optimizers() in training_step" if name == "training_step" else ""
        yield source.finding(method, CHANGE, old, new, note)
    elif name in today.hooks() and name in today.module_attributes():
        yield from _event(source, method, old)


def _event(source: Source, method: ast.FunctionDef | ast.AsyncFunctionDef, old: str) -> Iterator[Finding]:
    """An event's arguments arrive by name; ones that are not known never do."""
    known = [name for name in today.hooks()[method.name] if name not in ("trainer", "module", "run")]
    required = method.args.args[1 : len(method.args.args) - len(method.args.defaults)]
    if any(argument.arg not in known for argument in required):
        new = f"def {method.name}({', '.join(['self', *known])})"
        yield source.finding(method, CHANGE, old, new, "arguments arrive by name")
    elif method.name == "on_before_optimizer_step":
        yield source.finding(method, CHECK, old, "", 'under "16-mixed" gradients still carry the loss scale here')
    else:
        yield source.finding(method, SAME, old, "")


# --- Optimizers --------------------------------------------------------------------------------------------------


def optimizers(source: Source) -> Iterator[Finding]:
    """Say what of `configure_optimizers` is read otherwise."""
    for cls in source.of_role("module"):
        for method in methods(cls):
            if method.name == "configure_optimizers":
                yield from _configured(source, cls, method)


def _configured(source: Source, cls: ast.ClassDef, method: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(method):
        if isinstance(node, ast.Return) and node.value is not None and not _optimizes_by_hand(cls):
            count = _count(node.value)
            if count > 1:
                yield source.finding(
                    node, CHANGE, f"{count} optimizers", "automatic_optimization = False",
                    "and step each of self.optimizers() in training_step, after manual_backward",
                )  # fmt: skip
        elif isinstance(node, ast.Dict):
            yield from _configuration(source, node)


def _configuration(source: Source, node: ast.Dict) -> Iterator[Finding]:
    keys = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
    if "scheduler" in keys:
        known, place = today.scheduler_options(), "leave it out"
    elif "optimizer" in keys:
        known = frozenset({"optimizer", "lr_scheduler", "monitor"})
        place = "in the dict under lr_scheduler, beside scheduler"
    else:
        return
    for key in keys:
        if key not in known:
            new = "automatic_optimization = False" if key == "frequency" and "optimizer" in keys else place
            yield source.finding(node, CHANGE, f'"{key}" in configure_optimizers', new)


def _optimizes_by_hand(cls: ast.ClassDef) -> bool:
    for node in ast.walk(cls):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is False:
            names = [getattr(target, "attr", getattr(target, "id", "")) for target in node.targets]
            if "automatic_optimization" in names:
                return True
    return False


def _count(returned: ast.expr) -> int:
    """Return how many optimizers an expression that `configure_optimizers` returns holds, as far as it shows."""
    lists = (ast.List, ast.Tuple)
    if isinstance(returned, ast.Tuple) and returned.elts and isinstance(returned.elts[0], lists):
        returned = returned.elts[0]
    return len(returned.elts) if isinstance(returned, lists) else 1


# --- Callbacks ---------------------------------------------------------------------------------------------------


def callbacks(source: Source) -> Iterator[Finding]:
    """Say how the script's own callbacks are written here: marked methods that name the arguments they want."""
    for cls in source.of_role("callback"):
        for method in methods(cls):
            yield from _callback_method(source, method)


def _callback_method(source: Source, method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    given = [argument.arg for argument in method.args.args]
    if any(_last_name(decorator) == "hookimpl" for decorator in method.decorator_list):
        return
    old = f"def {method.name}({', '.join(given)})"
    known = today.hooks().get(method.name)
    if known is not None:
        names = ["module" if name == "pl_module" else name for name in given[1:]]
        kept = [name for name in names if name in known]
        yield source.finding(
            method, CHANGE, old, f"@hookimpl def {method.name}({', '.join(['self', *kept])})",
            "arguments arrive by name and have no defaults",
        )  # fmt: skip
    elif method.name in _CALLBACK_METHODS:
        new = _CALLBACK_METHODS[method.name]
        yield source.finding(method, CHANGE, old, f"@hookimpl def {new}" if "(" in new else new)


def _last_name(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return short(called).rpartition(".")[2]
