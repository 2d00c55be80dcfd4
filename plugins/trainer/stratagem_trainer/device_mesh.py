"""What `Module.device_mesh` returns."""

from __future__ import annotations

from typing import Any

from stratagem.errors import ConfigError


def device_mesh_of(module: Any) -> Any:
    """Torch's DeviceMesh, for a `configure_model` that cuts layers: ``self.device_mesh["tensor"]``.

    Raises:
        ConfigError: the strategy has none.
    """
    run = module.trainer.run
    mesh = run.strategy.torch_mesh()
    if mesh is None:
        raise ConfigError(
            f"{type(module).__name__}.device_mesh was read under {run.title_of(run.strategy)}, which has no mesh",
            expected="a strategy that cuts models over several processes",
            do='set strategy={"name": "parallel", "tensor": 2}, or test for the strategy before',
        )
    return mesh
