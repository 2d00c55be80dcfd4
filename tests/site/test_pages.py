"""The site has every page of docs/ and the whole reference, its links lead somewhere, and it needs no other site."""

from __future__ import annotations

import ast
import html
import inspect
import re
import shutil
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import markdown
import pytest
import yaml
from markdown_it import MarkdownIt

import stratagem as sg
from stratagem.api.options import options
from stratagem.discovery import catalog, registry
from stratagem.stack.construction import make
from stratagem.stack.plugins import hook_specifications

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: Folders of pages that are not in the navigation one by one.
LISTS = ("changes", "decisions")


class Page(HTMLParser):
    """What a page refers to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link":
            self.loaded.append(given["href"])
        elif tag in ("script", "img", "iframe", "source", "video") and "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="session")
def pages(built) -> dict[str, Page]:
    return {path.relative_to(built).as_posix(): Page(path.read_text()) for path in built.rglob("*.html")}


def listed(item) -> list[str]:
    """Return the paths in a part of the navigation."""
    if isinstance(item, str):
        return [item]
    values = item.values() if isinstance(item, dict) else item
    return [path for value in values for path in listed(value)]


def navigation() -> list[dict]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]


# --- The navigation ----------------------------------------------------------------------------------------------


def test_the_navigation_has_four_parts():
    assert [title for part in navigation() for title in part] == ["Get started", "Guides", "Reference", "Extend"]


def test_every_page_of_the_docs_is_in_the_navigation_once():
    found = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    counted = Counter(listed(navigation()))

    assert {page for page in found if not page.startswith(LISTS)} <= set(counted)
    assert [path for path, count in counted.items() if count > 1] == []
    assert "decisions/" in counted


def test_every_page_tells_first_what_it_is_for():
    for path in DOCS.glob("*.md"):
        heading, _, rest = path.read_text().partition("\n\n")
        assert re.fullmatch("# .+", heading), path.name
        assert rest[0].isalpha(), f"{path.name} begins with {rest[:40]!r}; the start page shows its first sentence"


def test_code_of_the_start_page_fits_on_a_phone():
    start, end, _ = (ROOT / "README.md").read_text().partition("## Demo and tests")
    fenced = "".join(re.findall(r"^```python\n(.*?)^```", start, re.MULTILINE | re.DOTALL)).splitlines()
    indented = re.findall(r"^    .+", start, re.MULTILINE)  # 4 of its columns are not code; a tab is as much narrower

    assert end
    assert [line for line in fenced + indented if len(line) > 56] == []


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.relative_to(DOCS).as_posix())
def test_a_page_reads_the_same_on_github(path):
    """Lists, tables and code: GitHub's dialect begins a list without an empty line, and nests it by two spaces."""
    text = path.read_text()

    assert elements(of_the_site(text)) == elements(of_github(text))


def test_a_list_that_only_github_shows_is_found():
    text = "Two:\n* one\n  * two\n"

    assert elements(of_github(text)) == {"ul": 2, "li": 2}
    assert elements(of_the_site(text)) != elements(of_github(text))


def of_github(text: str) -> str:
    return MarkdownIt("commonmark").enable("table").render(text)


def of_the_site(text: str) -> str:
    return markdown.markdown(text, extensions=["tables", "pymdownx.superfences", "attr_list", "md_in_html"])


def elements(text: str) -> Counter:
    without_code = re.sub(r"<pre.*?</pre>", "<pre></pre>", text, flags=re.DOTALL)
    return Counter(re.findall(r"<(h\d|li|ul|ol|table|tr|td|pre|code|a|strong|em)\b", without_code))


# --- What is built -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_links_and_anchors_lead_somewhere(pages, built):
    broken = []
    for name, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or name == "404.html":
                continue
            target = (built / name).parent / unquote(parts.path) if parts.path else built / name
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target.resolve().relative_to(built).as_posix())
            is_broken = not target.exists() or (parts.fragment and unquote(parts.fragment) not in known.anchors)
            broken += [f"{name}: {link}"] if is_broken else []

    assert broken == []


@pytest.mark.slow
def test_pages_load_nothing_from_another_site(pages, built):
    elsewhere = [f"{name}: {address}" for name, page in pages.items() for address in page.loaded if "//" in address]
    styles = [
        f"{path.name}: {match}"
        for path in built.rglob("*.css")
        for match in re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//[^'\")]*", path.read_text())
    ]

    assert elsewhere == []
    assert styles == []


@pytest.mark.slow
def test_the_reference_has_every_argument_method_hook_and_command(pages):
    for owner, page in ((sg.Trainer, "trainer"), (sg.Run, "run")):
        arguments = {f"{page}-{name}" for name in inspect.signature(owner).parameters if name != "settings"}
        assert arguments - pages[f"reference/{page}.html"].anchors == set()
    methods = {f"stratagem_trainer.trainer.Trainer.{name}" for name in ("fit", "validate", "test", "predict")}
    assert methods - pages["reference/trainer.html"].anchors == set()
    assert "stratagem_trainer.module.Module.log" in pages["reference/module.html"].anchors
    assert set(hook_specifications()) - pages["hooks.html"].anchors == set()
    commands = {f"stratagem-{entry.name.replace('.', '-')}" for entry in registry.entries("command")}
    assert commands - pages["reference/commands.html"].anchors == set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", registry.kinds())
def test_the_reference_has_every_plugin_with_its_options(pages, kind):
    folder = f"reference/plugins/{registry.kinds()[kind].module.replace('_', '-')}"
    page = pages.get(f"{folder}.html") or pages[f"{folder}/index.html"]

    assert set(catalog.providers(kind)) - page.anchors == set()
    for entry in registry.entries(kind):
        target = entry.load()
        if isinstance(target, type) and entry.name in ("ddp", "fsdp", "deepspeed", "powersgd", "early_stopping", "csv"):
            found = pages.get(f"{folder}/{entry.name}.html", page)
            assert {f"{entry.name}-{name}" for name in options(target)} - found.anchors == set()


#: Options of strategies without an example: their values are objects, files or need two others.
WITHOUT_EXAMPLE = {
    "ddp": {"ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"},
    # The last two can be set to what they are alone.
    "fsdp": {
        "auto_wrap_policy",
        "activation_checkpointing_policy",
        "mixed_precision",
        "limit_all_gathers",
        "use_orig_params",
    },
    "parallel": {"plan", "auto_wrap_policy"},
    "deepspeed": {"config", "allgather_partitions", "contiguous_memory_optimization", "number_checkpoints"},
    "ddp2": {"process_group_backend"},
}


@pytest.mark.slow
def test_examples_of_strategies_are_valid_and_set_what_they_are_for(built):
    for entry in registry.entries("strategy"):
        cls = entry.load()
        if not isinstance(cls, type):
            continue
        _, *sections = (built / f"reference/plugins/strategies/{entry.name}.html").read_text().split('class="option"')
        assert len(sections) == len(options(cls))
        without = set()
        for name, section in zip(options(cls), sections, strict=True):
            text = html.unescape(re.sub("<[^>]+>", "", section))
            if not (call := re.search(r"^Trainer\(strategy=(\{.*?\})\)$", text, re.MULTILINE | re.DOTALL)):
                without.add(name)
                continue
            given = ast.literal_eval(call[1])
            made = make(registry.find("strategy", given.pop("name")), given)
            field = options(cls)[name]
            assert isinstance(made, cls)
            assert getattr(made, field.name) != field.default, f"{entry.name}.{name}"
        assert without == WITHOUT_EXAMPLE.get(entry.name, set()), entry.name


def test_strategies_are_listed_in_the_order_in_which_they_are_needed(built):
    names = re.findall(r'href="(\w+)\.html"><code>', (built / "reference/plugins/strategies/index.html").read_text())

    assert names[:4] == ["ddp", "fsdp", "parallel", "deepspeed"]


@pytest.mark.slow
def test_pages_link_to_the_repository_and_to_what_is_edited(pages):
    (address,) = re.findall(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    edited = {
        name: [link.partition("/edit/main/")[2] for link in page.links if link.startswith(f"{address}/edit/main/")]
        for name, page in pages.items()
        if name != "404.html"
    }

    assert all(address in page.links for page in pages.values())
    assert [name for name, (path, *_) in edited.items() if not (ROOT / path).exists()] == []
    assert edited["reference/plugins/strategies/ddp.html"] == ["plugins/ddp/stratagem_ddp/strategy.py"]


@pytest.mark.slow
def test_the_list_of_plugins_links_to_the_reference(pages):
    links = {link for link in pages["plugins.html"].links if link.startswith("reference/plugins/")}

    for kind in registry.kinds():
        folder = f"reference/plugins/{registry.kinds()[kind].module.replace('_', '-')}"
        pages_of = {link.partition("#")[2]: link for link in links if link.startswith((f"{folder}.", f"{folder}/"))}
        assert {entry.name for entry in registry.entries(kind)} - set(pages_of) == set()


@pytest.mark.slow
def test_signatures_and_messages_are_shown(built):
    module = re.sub("<[^>]+>", "", (built / "reference" / "module.html").read_text())
    errors = (built / "reference" / "errors.html").read_text()

    assert "on_epoch: bool | None = None" in module
    assert re.search("has [^<]+ of its own</dt><dd>expected one of the two <code>ConfigError</code>", errors)


@pytest.mark.slow
def test_the_page_of_changes_has_every_item(built):
    page = html.unescape(re.sub("<[^>]+>", "", (built / "changelog.html").read_text()))
    written = [*(DOCS / "changes").glob("*.md"), *ROOT.glob("CHANGELOG.md")]
    parts = [part for path in written for part in re.split(r"^(?=\* |#)", path.read_text(), flags=re.MULTILINE)]
    items = [" ".join(part[2:].replace("`", "").split()) for part in parts if part.startswith("* ")]

    assert len(items) > 20
    assert [item for item in items if item not in " ".join(page.split())] == []


@pytest.mark.sweep(reason="`make docs` builds the site, too")
@pytest.mark.slow
def test_broken_links_anchors_and_pages_without_a_place_fail_the_build(build_site, tmp_path):
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "docs" / "tutorial.md").write_text("# Tutorial\n\nSee [a](nowhere.md) and [b](training.md#nowhere).\n")
    (tmp_path / "docs" / "lonely.md").write_text("# Lonely\n\nNobody finds it.\n")
    paths = {"docs": tmp_path / "docs", "hooks": ROOT / "scripts/site/hooks.py", "theme": ROOT / "scripts/site/theme"}
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {paths['docs']}\nhooks: [{paths['hooks']}]\n"
        f"theme: {{custom_dir: {paths['theme']}}}\n"
        "plugins: {search: {}, mkdocstrings: {handlers: {python: {options: {extensions: []}}}}}\n"
    )
    done = build_site(tmp_path / "built", tmp_path / "mkdocs.yml")

    assert done.returncode == 1
    assert "'nowhere.md'" in done.stderr
    assert "'#nowhere'" in done.stderr or "#nowhere" in done.stderr
    assert "lonely.md" in done.stderr


def test_a_text_that_is_missing_fails_the_build(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "site"))
    from pages.text import MissingTextError, option

    assert "default `1`" in option("size", "an integer", "1", "The size.", "mine")
    with pytest.raises(MissingTextError, match="option mine.size has no text"):
        option("size", "an integer", "1", "", "mine")
    sys.modules.pop("pages.text"), sys.modules.pop("pages")
