"""Rewrite a script for Lightning into one for stratagem, as far as the source alone makes each change certain."""

from __future__ import annotations

from stratagem_migrate.rewriting.attributes import rewrite_functions, rewrite_on_self, rewrite_on_trainers
from stratagem_migrate.rewriting.edits import Edits
from stratagem_migrate.rewriting.epoch_ends import rewrite_epoch_ends
from stratagem_migrate.rewriting.methods import rewrite_callbacks, rewrite_module_methods
from stratagem_migrate.rewriting.plugin_calls import rewrite_plugin_calls
from stratagem_migrate.rewriting.rank_zero import rewrite_rank_zero
from stratagem_migrate.rewriting.references import Namespace, rewrite_references
from stratagem_migrate.rewriting.trainer_calls import rewrite_hydra, rewrite_trainers
from stratagem_migrate.source import Source


def rewrite(source: Source) -> str:
    """Return the text of the script with every change that is certain.

    Raises:
        ConfigError: libcst cannot read it.
    """
    edits = Edits(source)
    names = Namespace(edits)
    rewrite_trainers(edits, names)
    rewrite_hydra(edits)
    rewrite_plugin_calls(edits, names)
    rewrite_module_methods(edits)
    rewrite_epoch_ends(edits)
    rewrite_rank_zero(edits)
    rewrite_callbacks(edits, names)
    rewrite_on_self(edits)
    rewrite_on_trainers(edits)
    rewrite_functions(edits)
    rewrite_references(edits, names)  # last: it keeps the imports of what is left
    return edits.apply()
