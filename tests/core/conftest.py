"""Packages that are not installed: metadata and a module on the path."""

from __future__ import annotations

import sys
import textwrap

import pytest

from stratagem.stack import registry


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package on the path, with metadata, as pip would."""

    modules = []

    def put(distribution, entry_points, source="", version="1.0", requires=()):
        module = distribution.replace("-", "_")
        folder = tmp_path / f"site-{distribution}"
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(textwrap.dedent(source))
        needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}")
        text = ""
        for group, points in entry_points.items():
            text += f"[{group}]\n" + "".join(f"{name} = {module}:{value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        modules.append(module)
        registry.refresh()

    yield put
    for module in modules:
        sys.modules.pop(module, None)
    registry.refresh()
