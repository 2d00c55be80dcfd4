"""Write a page with the stratagem plugins on a package index: `python scripts/plugin_index.py > docs/plugin-index.md`.

A package is listed if its name begins with `stratagem-` and its keywords have `stratagem-plugin`, which
`stratagem plugins new` writes. The index is asked over its JSON APIs: for all names once (PEP 691), and for each such
project.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

from stratagem_devtools.conformance_results import results

KEYWORD = "stratagem-plugin"
PAGE = """# Plugins on the package index

Packages with the keyword `stratagem-plugin`: `pip install NAME`, then choose the plugin by name. What a package states
of the conformance kit stands beside it; `stratagem plugins check NAME` repeats it.

| package | version | what it is | checks |
|---|---|---|---|
"""


def projects(index: str) -> Iterator[dict[str, Any]]:
    """Yield what the index knows of each project with the keyword: the `info` of its JSON API."""
    for project in get(f"{index}/simple/", "application/vnd.pypi.simple.v1+json")["projects"]:
        if project["name"].lower().replace("_", "-").startswith("stratagem-"):
            info = get(f"{index}/pypi/{project['name']}/json")["info"]
            if KEYWORD in (info["keywords"] or "").replace(",", " ").split():
                yield info


def get(url: str, accept: str = "application/json") -> Any:
    """Return the JSON at `url`."""
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=60) as response:  # noqa: S310
        return json.load(response)


def row(info: dict[str, Any]) -> str:
    """Return the line of one project."""
    stated = results(info["description"] or "")
    checks = (f"`{name}`: {text}" for (_, name, version), text in stated.items() if version == info["version"])
    link = f"[{info['name']}]({info['package_url']})"
    return f"| {link} | {info['version']} | {(info['summary'] or '').replace('|', '/')} | {'; '.join(checks)} |\n"


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--index", default="https://pypi.org", help="default: %(default)s")
    found = sorted(projects(parser.parse_args().index), key=lambda info: info["name"])
    sys.stdout.write(PAGE + "".join(map(row, found)))


if __name__ == "__main__":
    main()
