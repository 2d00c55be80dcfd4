"""Import Colossal-AI, and undo what its import does to the process."""

from __future__ import annotations

import importlib.util
import os
import warnings

from stratagem.errors import ConfigError

#: Colossal-AI sets it to 1 when it is imported, and CUDA reads it when it starts.
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def load(device_type: str) -> None:
    """Import Colossal-AI for devices of this type ("cpu", "cuda"); takes about 10 seconds the first time.

    Raises:
        ConfigError: it is not installed, or a package that it imports is missing or does not fit.
    """
    if importlib.util.find_spec("colossalai") is None:
        raise ConfigError(
            "strategy is 'colossalai', and Colossal-AI is not installed",
            expected="colossalai==0.5.0 and the versions of its packages that the README of stratagem-colossalai lists",
            do='install it, or choose strategy="ddp"',
        )
    connections = os.environ.get(_CONNECTIONS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about apex and other packages that are not used here
            from colossalai.accelerator import set_accelerator

            set_accelerator(device_type)  # else it takes CUDA wherever there is a GPU
            import colossalai.booster.plugin  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Colossal-AI cannot be imported ({error})",
            expected="the versions of its packages that the README of stratagem-colossalai lists",
            do='install them, or choose strategy="ddp"',
        ) from error
    finally:
        os.environ.pop(_CONNECTIONS, None)
        if connections is not None:
            os.environ[_CONNECTIONS] = connections
