"""Rewrite a script for Lightning into one for stratagem, as far as the source alone makes each change certain."""

from __future__ import annotations

import ast

from stratagem.errors import ConfigError
from stratagem_migrate.rewriting.attributes import rewrite_functions, rewrite_on_self, rewrite_on_trainers
from stratagem_migrate.rewriting.edits import Edits
from stratagem_migrate.rewriting.epoch_ends import rewrite_epoch_ends
from stratagem_migrate.rewriting.imported import check_that_it_imports
from stratagem_migrate.rewriting.methods import rewrite_callbacks, rewrite_module_methods, rewrite_outputs
from stratagem_migrate.rewriting.plugin_calls import rewrite_plugin_calls
from stratagem_migrate.rewriting.rank_zero import rewrite_rank_zero
from stratagem_migrate.rewriting.references import Namespace, rewrite_references
from stratagem_migrate.rewriting.trainer_calls import rewrite_hydra, rewrite_trainers
from stratagem_migrate.source import Source, within_lightning


def rewrite(source: Source) -> str:
    """Return the text of the script with every change that is certain.

    Raises:
        ConfigError: libcst cannot read it, a name of Lightning is one of another package elsewhere in it, or the
            result would not import.
    """
    _check_meanings(source)
    edits = Edits(source)
    names = Namespace(edits)
    rewrite_trainers(edits, names)
    rewrite_hydra(edits)
    rewrite_plugin_calls(edits, names)
    rewrite_module_methods(edits)
    rewrite_outputs(edits)
    rewrite_epoch_ends(edits)
    rewrite_rank_zero(edits)
    rewrite_callbacks(edits, names)
    rewrite_on_self(edits)
    rewrite_on_trainers(edits)
    rewrite_functions(edits)
    rewrite_references(edits, names)  # last: it keeps the imports of what is left
    text = edits.apply()
    if text != source.text:
        check_that_it_imports(source.with_text(text), source)
    return text


def _check_meanings(source: Source) -> None:
    """Refuse a script in which a name is one of Lightning in one place, and another one elsewhere."""
    meanings: dict[str, set[str]] = {}
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                meanings.setdefault(alias.asname or alias.name, set()).add(f"{node.module}.{alias.name}")
    for name, found in meanings.items():
        theirs = {each for each in found if within_lightning(each) is not None}
        if name != "*" and theirs and theirs != found:
            raise ConfigError(
                f"{source.path} cannot be rewritten: {name} is {' and '.join(sorted(found))}", expected="one of them",
                do="rename one with `as`",
            )  # fmt: skip
