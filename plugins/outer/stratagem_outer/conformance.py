"""What the conformance kit needs to know of this hook: ``stratagem plugins check NAME`` reads it."""

from __future__ import annotations

from typing import ClassVar

from stratagem_testing import CommHookConformance


class PostLocalSGDConformance(CommHookConformance):
    """While it averages all gradients."""

    plugin: ClassVar = {"name": "post_localsgd", "model_averaging_period": 2, "start_localSGD_iter": 100}
