"""Rewrite the arguments of the Trainer that were renamed, moved or removed, where their values are certain."""

from __future__ import annotations

import ast
from typing import Any, Final

import libcst as cst

from stratagem_migrate import hydra_calls
from stratagem_migrate.arguments import accumulates
from stratagem_migrate.names import NAMES
from stratagem_migrate.rewriting import call_arguments
from stratagem_migrate.rewriting.edits import Edits, code
from stratagem_migrate.rewriting.references import Namespace
from stratagem_migrate.source import constant
from stratagem_migrate.translations import CALLBACKS, Given, New, arguments_in, translated


def rewrite_trainers(edits: Edits, names: Namespace) -> None:
    """Rewrite each call of the Trainer."""
    for node in edits.source.calls_of("Trainer"):
        _Trainer(edits, names, node).rewrite()


def rewrite_hydra(edits: Edits) -> None:
    """Rewrite ``instantiate(cfg.trainer, callbacks=callbacks)``: hydra builds a call, which gets the objects."""
    for node in hydra_calls.calls(edits.source):
        if hydra_calls.are_objects(edits.source, node):
            edits.at(node, _partial)


def _partial(call: Any) -> Any:
    first, *objects = call.args
    first = first.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=cst.SimpleWhitespace(""))
    none = cst.SimpleWhitespace("")
    made = call_arguments.append(call.with_changes(args=[first], whitespace_before_args=none), "_partial_", "True")
    return call.with_changes(func=made.with_changes(lpar=[], rpar=[]), args=objects)


#: Arguments in which a strategy was chosen by name.
_PLACES_OF_STRATEGIES: Final = frozenset({"strategy", "accelerator", "distributed_backend"})


class _Trainer:
    """One call of the Trainer."""

    def __init__(self, edits: Edits, names: Namespace, call: ast.Call) -> None:
        self.edits, self.names, self.call, self.source = edits, names, call, edits.source
        self.given = {each.arg: each.value for each in call.keywords if each.arg is not None}
        #: The names of the arguments after rewriting, with their texts where they are new.
        self.result: dict[str, str | None] = dict.fromkeys(self.given)

    def rewrite(self) -> None:
        if len(self.given) < len(self.call.keywords) or self.call.args:  # **options: unknown names
            return
        for name in sorted(self.given, key=_order):
            if name in self.result or name not in _PLACES_OF_STRATEGIES:
                self._rewrite_argument(name, self.given[name])
        if self.source.lightning(self.call.func) is not None and accumulates(self.call):
            self.edits.at(self.call, lambda call: call_arguments.append(call, "average_short_window", "False"))

    def _rewrite_argument(self, name: str, value: ast.expr) -> None:
        if self._by_other_means(name, value):
            return
        literal = constant(value)
        new = self._of_objects(name, value)
        if new is None:
            given = Given(name, literal, value, self.given)
            new = translated(given)
        if new is not None and name == "plugins" and "strategy" in dict(new):
            self._drop_ddp()
        if new is not None and self._fits(name, new):
            self._put(name, new)

    def _drop_ddp(self) -> None:
        """Drop ``accelerator="ddp"`` beside a strategy in ``plugins=``, which took its place."""
        for name in _PLACES_OF_STRATEGIES & self.given.keys():
            if constant(self.given[name]) == "ddp":
                self._put(name, [])

    def _fits(self, name: str, new: New) -> bool:
        """Whether the call does not have the new arguments already."""
        others = {each: text for each, text in self.result.items() if each != name}
        return not any(each in others and others[each] != text for each, text in new if each != CALLBACKS)

    def _put(self, name: str, new: New) -> None:
        here = [(each, text) for each, text in new if each != CALLBACKS and each not in self.result.keys() - {name}]
        added = [text for each, text in new if each == CALLBACKS and text is not None]
        if name != "callbacks":
            self.result.pop(name)
        self.result |= dict(here)
        if name == "max_time":
            self.edits.add_import("from datetime import timedelta")

        def change(call: Any) -> Any:
            for each in added:
                call = call_arguments.append_to_list(call, "callbacks", each)
            return call_arguments.put(call, name, here)

        self.edits.at(self.call, change)

    # --- Values that are objects ----------------------------------------------------------------------------------

    def _of_objects(self, name: str, value: ast.expr) -> New | None:
        """Return the arguments for ``profiler=SimpleProfiler()`` and ``plugins=[DDPPlugin(...)]``."""
        elements = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        if name not in ("plugins", "profiler", "accelerator", "strategy") or not elements:
            return None
        new: list[tuple[str, str | None]] = []
        for each in elements:
            if not isinstance(each, ast.Call) or (found := self.source.known(each.func)) is None:
                return None
            counterpart = NAMES.get(found.rpartition(".")[2])
            texts = arguments_in(counterpart.text) if counterpart is not None else []
            if texts and not each.args and not each.keywords:
                new += texts
                self.edits.replaced.add(each.func)
            elif name == "plugins" and len(elements) == 1 and isinstance(value, ast.Call) and counterpart is not None:
                kind = (counterpart.plugin or ("", ""))[0]
                if kind not in ("strategy", "environment"):
                    return None
                new.append((kind, None))
            else:
                return None
        return new

    # --- Arguments that move elsewhere ----------------------------------------------------------------------------

    def _by_other_means(self, name: str, value: ast.expr) -> bool:
        match name:
            case "resume_from_checkpoint":
                return self._resume(value)
            case "benchmark":
                return self._benchmark(value)
            case "auto_lr_find" | "auto_scale_batch_size":
                return self._tune(name, value)
            case "checkpoint_callback" | "early_stop_callback":
                return self._add_callback(name, value)
        return False

    def _resume(self, value: ast.expr) -> bool:
        literal, variable = constant(value), self._variable()
        fits = self._calls_of(variable, "fit")
        is_certain = isinstance(literal, str) or isinstance(value, ast.Name | ast.Attribute)
        if literal is None or literal is False or not is_certain or len(fits) != 1:
            return False
        (fit,) = fits
        if any(each.arg in (None, "ckpt_path") for each in fit.keywords) or len(fit.args) > 4:
            return False
        root = value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id not in self.source.constants:
            return False
        text = ast.unparse(value)
        self.edits.at(fit, lambda call: call_arguments.append(call, "ckpt_path", text))
        self._put("resume_from_checkpoint", [])
        return True

    def _benchmark(self, value: ast.expr) -> bool:
        statement = self._statement()
        if constant(value) is not True or statement is None:
            return False
        if self.source.aliases.get("torch") != "torch":
            self.edits.add_import("import torch")
        before = "torch.backends.cudnn.benchmark = True"

        def change(line: Any) -> Any:
            first = cst.parse_statement(before)
            assert isinstance(first, cst.SimpleStatementLine)
            return cst.FlattenSentinel(
                [first.with_changes(leading_lines=line.leading_lines), line.with_changes(leading_lines=[])]
            )

        self.edits.line(statement, change)
        self._put("benchmark", [])
        return True

    def _tune(self, name: str, value: ast.expr) -> bool:
        """Rewrite ``auto_lr_find=True`` with ``trainer.tune(model)``: a callback, which acts when fit starts."""
        literal, tunes = constant(value), self._calls_of(self._variable(), "tune")
        plugin = {"auto_lr_find": "learning_rate_finder", "auto_scale_batch_size": "batch_size_finder"}[name]
        if not literal or not isinstance(literal, str | bool) or len(tunes) != 1:
            return False
        statement = self.source.parents.get(tunes[0])
        if not isinstance(statement, ast.Expr):
            return False
        option = "attr_name" if name == "auto_lr_find" else "mode"
        new = f'"{plugin}"' if literal is True else f'{{"name": "{plugin}", "{option}": {literal!r}}}'
        self.edits.remove(statement)
        self._put(name, [(CALLBACKS, new)])
        return True

    def _add_callback(self, name: str, value: ast.expr) -> bool:
        """Rewrite ``checkpoint_callback=ModelCheckpoint(...)``, or a variable with one."""
        made = self.source.constants.get(value.id) if isinstance(value, ast.Name) else value
        if not isinstance(made, ast.Call):
            return False
        counterpart = NAMES.get((self.source.known(made.func) or "").rpartition(".")[2])
        if counterpart is None or (counterpart.plugin or ("",))[0] != "callback":
            return False
        here = "callbacks" in self.given
        if here and not isinstance(self.given["callbacks"], ast.List | ast.Call):
            return False
        self.result.pop(name)
        self.result["callbacks"] = None

        def change(call: Any) -> Any:
            argument = call_arguments.find(call, name)
            text = code(argument.value)
            if call_arguments.find(call, "callbacks") is None:
                return call_arguments.put(call, name, [("callbacks", f"[{text}]")])
            return call_arguments.remove(call_arguments.append_to_list(call, "callbacks", text), name)

        self.edits.at(self.call, change)
        return True

    def _statement(self) -> ast.stmt | None:
        """Return the simple statement with this call."""
        found = next((each for each in self.source.around(self.call) if isinstance(each, ast.stmt)), None)
        return found if isinstance(found, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return) else None

    def _variable(self) -> str:
        """Return the variable that this trainer is assigned to, if its function assigns nothing else to it; else ""."""
        match self.source.parents.get(self.call):
            case ast.Assign(targets=[ast.Name(id=name)]) as statement:
                scope = self.source.scope(statement)
                bound = [
                    node for node in self.source.nodes
                    if isinstance(node, ast.Name | ast.arg) and self.source.scope(node) is scope
                    and (node.arg == name if isinstance(node, ast.arg) else node.id == name and _binds(node))
                ]  # fmt: skip
                return name if len(bound) == 1 else ""
        return ""

    def _calls_of(self, variable: str, method: str) -> list[ast.Call]:
        scope = self.source.scope(self.call)
        return [
            node for node in self.source.nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
            and isinstance(node.func.value, ast.Name) and node.func.value.id == variable
            and self.source.scope(node) is scope
        ]  # fmt: skip


def _binds(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _order(name: str) -> tuple[bool, str]:
    """Rewrite what names a strategy before what only repeats it, and the batch size before the learning rate."""
    return name not in ("plugins", "auto_scale_batch_size"), name
