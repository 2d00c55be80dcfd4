"""The site in Chromium: search, colors, narrow screens, no message in the console, no request that leaves the site."""

from __future__ import annotations

import functools
import http.server
import re
import threading

import pytest
from browser import browser

import stratagem as sg
from stratagem_testing.reference import Net, joined_batches

pytestmark = pytest.mark.slow

#: Pages that are shown in all sizes and colors; the others only on a narrow screen.
SHOWN = ("index.html", "reference/trainer.html", "reference/plugins/strategies/index.html", "hooks.html", "matrix.html")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address(built):
    handler = functools.partial(Quiet, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the address of a page that the callback `report` wrote."""
    folder = tmp_path_factory.mktemp("run")
    trainer = sg.Trainer(
        max_epochs=2, callbacks=["report"], accelerator="cpu", devices=1, default_root_dir=folder, log_every_n_steps=1
    )
    trainer.fit(Net(), joined_batches(6, 8))
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def page(need, tmp_path_factory):
    need("chromium", package="chromium")
    with browser("chromium", tmp_path_factory.mktemp("browser")) as started:
        yield started


def wide_parts(page) -> list[str]:
    """Return what stands out of the screen to the right, if the page scrolls that way."""
    if page.value("document.documentElement.scrollWidth <= innerWidth"):
        return []
    return page.value(
        "[...document.querySelectorAll('article *')].filter(each => each.getBoundingClientRect().right > innerWidth)"
        ".map(each => each.tagName + ': ' + each.textContent.slice(0, 60))"
    ) or ["something"]


def cut_parts(page, selector: str) -> list[str]:
    """Return the beginnings of parts that have more to the right than they show."""
    return page.value(
        f"[...document.querySelectorAll('{selector}')].filter(each => each.scrollWidth > each.clientWidth)"
        ".map(each => each.textContent.slice(0, 60))"
    )


def brightness(page) -> float:
    """Return the mean of the background's colors, from 0 to 255."""
    color = page.value("getComputedStyle(document.body).backgroundColor")
    numbers = [float(number) for number in color.removeprefix("rgb(").rstrip(")").split(",")]
    return sum(numbers) / len(numbers)


@pytest.mark.sweep(reason="`make docs` builds the site, too")
def test_no_page_is_wider_than_a_phone(page, address, built):
    page.show(375, 760, "light")
    found = {}
    for path in sorted(built.rglob("*.html")):
        name = path.relative_to(built).as_posix()
        if name.startswith("decisions/0"):
            continue  # half of all pages, and all alike: prose
        page.open(f"{address}/{name}")
        if parts := wide_parts(page):
            found[name] = parts[:3]

    assert found == {}


@pytest.mark.every_push("390")
@pytest.mark.parametrize("width", [1400, 390])
def test_pages_fit_and_what_is_wider_scrolls_in_its_own_box(page, address, report, width):
    page.show(width, 900, "light")
    for name in (*SHOWN, "reference/plugins/strategies/ddp.html", "changelog.html", report):
        page.open(name if name == report else f"{address}/{name}")
        assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), name
        assert wide_parts(page) == [], name
        if name.startswith(("index", "reference/plugins/strategies")):
            assert cut_parts(page, "pre > code") == [], name
        if width == 1400:
            assert cut_parts(page, ".md-typeset__scrollwrap, .scroll") == [], name


@pytest.mark.every_push("375-dark-0-60")
@pytest.mark.parametrize(("scheme", "least", "most"), [("light", 200, 255), ("dark", 0, 60)])
@pytest.mark.parametrize("width", [375, 1280])
def test_pages_have_the_colors_that_the_reader_prefers(page, address, scheme, least, most, width):
    page.show(width, 800, scheme)
    page.open(f"{address}/index.html")
    page.value("localStorage.clear()")
    for name in SHOWN:
        page.open(f"{address}/{name}")
        assert least <= brightness(page) <= most, name
        assert wide_parts(page) == [], name


def test_colors_can_be_switched(page, address):
    page.show(1280, 800, "light")
    page.open(f"{address}/index.html")
    page.value("localStorage.clear()")
    page.open(f"{address}/index.html")
    before = brightness(page)
    page.value("[...document.querySelectorAll('.md-header__option label')].find(each => !each.hidden).click()")
    page.wait_for("document.body.getAttribute('data-md-color-scheme') === 'slate'")

    assert brightness(page) < 60 < before


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("powersgd", "reference/plugins/comm-hooks.html#powersgd"),
        ("power sgd", "reference/plugins/comm-hooks.html#powersgd"),
        ("early stopping", "reference/plugins/callbacks.html#early_stopping"),
        ("model checkpoint", "reference/plugins/callbacks.html#model_checkpoint"),
        ("find unused parameters", "reference/plugins/strategies/ddp.html#ddp-find_unused_parameters"),
        ("gradient_clip_val", "reference/trainer.html#trainer-gradient_clip_val"),
    ],
)
def test_search_finds_a_word(page, address, words, target):
    page.show(1280, 800, "light")
    page.open(f"{address}/index.html")
    page.value("document.querySelector('[data-md-toggle=search]').checked = true")
    page.value(
        f"const field = document.querySelector('.md-search__input'); field.focus(); field.value = '{words}';"
        "field.dispatchEvent(new Event('input', {bubbles: true})); field.dispatchEvent(new KeyboardEvent('keyup'))"
    )
    pages = page.wait_for(
        "(found => found.length && found)([...document.querySelectorAll('.md-search-result__item')].map("
        "item => [...item.querySelectorAll('.md-search-result__link')].filter(each => !each.closest('details'))"
        ".map(each => each.href.replace(/[?]h=[^#]*/, ''))))"
    )

    assert any(re.fullmatch(f"{address}/{target}", link) for links in pages[:3] for link in links), pages[:3]


def test_nothing_is_requested_elsewhere_and_the_console_is_empty(page, address):
    """After all pages that the tests before opened; alone, after one."""
    page.open(f"{address}/tutorial.html")

    assert [url for url in page.requested if not url.startswith((address, "data:", "blob:", "file:"))] == []
    assert page.complaints == []


def test_a_request_elsewhere_and_a_message_are_noticed(need, tmp_path, address):
    """What the test before relies on."""
    need("chromium", package="chromium")
    with browser("chromium", tmp_path) as other:
        other.open(f"{address}/tutorial.html")
        other.value("console.error('wrong'); fetch('http://127.0.0.1:9/x').catch(() => 0)")
        other.value("new Promise(done => setTimeout(done, 200))")

        assert "http://127.0.0.1:9/x" in other.requested
        assert any("wrong" in complaint for complaint in other.complaints)
