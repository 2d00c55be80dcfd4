"""Import torch._dynamo, which the first optimizer and `DistributedDataParallel` need, in less time."""

from __future__ import annotations

import gc


def import_dynamo() -> None:
    """Import torch._dynamo without collecting garbage meanwhile.

    torch imports it in the first constructor that needs it. The 800 modules make objects that stay; visiting them and
    those of torch again and again takes 30 % of the import.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        import torch._dynamo  # noqa: F401
    finally:
        if collects:
            gc.enable()
