"""What mkdocs calls while it builds the site of `docs/`: pages that are generated, links, the navigation.

The pages of the reference are written here from the code, at each build. Pages of `docs/` are used as they are.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pages import (
    arguments,
    changelog,
    classes,
    commands,
    decisions,
    errors,
    hook_reference,
    links,
    plugin_links,
    plugins,
    sources,
    start,
)
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
#: Pages that a search for one of their plugins should find before pages that mention it.
LISTS_OF_PLUGINS = ("reference/plugins/callbacks.md", "reference/plugins/comm-hooks.md")
#: Pages with so many words that a search for any of them would find them first.
LISTS = ("decisions/", "changelog.md", "matrix.md", "benchmarks.md", "reference/errors.md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List decisions and strategies, link to the repository, and name headings in links as GitHub does."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    config.nav = plugins.with_pages(decisions.with_pages(config.nav or [], ROOT), ROOT)
    config.repo_url = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    config.repo_name, config.edit_uri = "Repository", "edit/main/docs/"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated."""
    generated = {
        "index.md": start.page(ROOT, config.nav or []),
        "reference/trainer.md": arguments.trainer_page(ROOT),
        "reference/run.md": arguments.run_page(ROOT),
        "reference/commands.md": commands.page(),
        "reference/errors.md": errors.page(ROOT),
        "changelog.md": changelog.page(ROOT),
        **classes.pages(ROOT),
        **plugins.pages(ROOT),
    }
    for path, text in generated.items():
        file = File.generated(config, path, content=text)
        file.edit_uri = f"../{sources.of(path, ROOT)}"
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Complete pages, show files outside of `docs/` by their paths, and rank pages in the search."""
    if page.file.src_uri.startswith(LISTS):
        page.meta["search"] = {"boost": 0.2}
    if page.file.src_uri.startswith(LISTS_OF_PLUGINS):
        page.meta["search"] = {"boost": 2}
    if page.file.src_uri == "matrix.md":
        page.meta["hide"] = ["toc"]  # its table needs the width
        markdown = markdown.replace(" no (", " no&nbsp;(")
    if page.file.src_uri == "hooks.md":
        markdown = hook_reference.with_types(markdown, ROOT)
    if page.file.src_uri == "plugins.md":
        markdown = plugin_links.with_links(markdown, ROOT)
    return links.without_sources(markdown, page.file.src_uri, ROOT)
