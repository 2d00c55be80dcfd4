"""What is wrong with variables of NCCL and gloo that a user has set, for ``stratagem doctor``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from attrs import frozen

from stratagem.errors import nearest
from stratagem_process_group.libraries import LIBRARIES
from stratagem_process_group.nccl import NCCL, TORCH_NAMES, TORCH_OLD_NAMES
from stratagem_process_group.options import hint_for

#: How variables of NCCL's plugins, and of libraries related to it, begin after the prefix.
_NETWORK_PLUGINS: Final = ("fastrak_", "gpudirecttcpx_", "ibext_", "mscclpp_", "msccl_", "ofi_", "shimnet_", "tuner_")


@frozen(kw_only=True)
class Remark:
    """Why a variable that is set has no effect."""

    text: str
    #: Certainly a mistake; otherwise another program may read the variable.
    is_mistake: bool


def remarks(variables: Iterable[str]) -> dict[str, Remark]:
    """Return a remark for each of `variables` that looks like a communication library's and is none of its."""
    found = {name: _remark(name) for name in sorted(variables)}
    return {name: remark for name, remark in found.items() if remark is not None}


def _remark(name: str) -> Remark | None:
    for prefix, known in (("TORCH_NCCL_", TORCH_NAMES), ("TORCH_GLOO_", ("LAZY_INIT",))):
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return None if rest in known else _unread("torch", prefix, nearest(rest, known))
    for library in LIBRARIES:
        if name.startswith(library.prefix):
            option = name.removeprefix(library.prefix).lower()
            if (releases := library.too_old_for(option)) is not None:
                text = f"{library.title} {releases[0]} does not read it; {releases[1]} is the first that does"
                return Remark(text=text, is_mistake=True)
            if library.reads(option) or option.upper() in TORCH_OLD_NAMES:
                return None
            is_of_plugin = library is NCCL and option.startswith(_NETWORK_PLUGINS)
            certain = library is not NCCL or option in library.instead  # NCCL reads more than it documents
            return _unread(library.title, library.prefix, "" if is_of_plugin else hint_for(library, option), certain)
    return None


def _unread(reader: str, prefix: str, hint: str, certain: bool = True) -> Remark:
    """Return a remark about a name that `reader` does not document."""
    hint = re.sub(r"did you mean '(\w+)'", lambda match: f"did you mean {prefix}{match[1].upper()}", hint)
    text = f"{reader} documents no such variable; {hint or 'a network plugin may read it'}"
    return Remark(text=text, is_mistake=bool(hint) and certain)
