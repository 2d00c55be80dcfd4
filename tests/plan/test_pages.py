"""Pages of `stratagem plan`, `simulate` and `advise`, in a browser: narrow and wide, light and dark, for hard plans."""

from __future__ import annotations

import copy
import json
import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import browser

from plan.test_simulate import GPT_3, WHOLE
from plan.transformer import megatron
from programs import scripts
from stratagem.cli import main
from stratagem_pictures.drawings import file_text
from stratagem_pictures.pages import document, figure
from stratagem_pictures.scales import Scale, si
from stratagem_plan import advice_page
from stratagem_plan.candidates import Candidate, layouts
from stratagem_plan.cost import Interval
from stratagem_plan.devices import find
from stratagem_plan.page import png_bytes
from stratagem_plan.pictures import pareto
from stratagem_plan.script import PlannedScript
from stratagem_plan.search import Explorer, Planned

#: One worker has the browser.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pages")]

EVIL = "<script>alert('you')</script> & \"both\" <!--"
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "messages", "temporary", "libraries")
DEVICE = """
source = "a test"
read_on = 2026-11-27
vendor = false
memory_bytes_per_s = 1e12
flops.bf16_dense = 1e14
intra.bytes_per_s_per_direction = 1e11
inter.bytes_per_s_per_direction = 1e10
"""


# --- Plans -----------------------------------------------------------------------------------------------------------


def ranks(like, rank, number, size):
    """Return a class of ranks like `like` that holds `size` bytes of each category, and more of the later ones."""
    held = {name: size * place for place, name in enumerate(CATEGORIES, 1)}
    told = {
        "peak": sum(held.values()),
        "needs": sum(held.values()),
        "returns": 1,
        "at_peak": held,
        "peak_phase": "backward",
        "end": held | {"temporary": 0},
    }
    return like | {"rank": rank, "ranks": number} | told


def tree(mesh, per_node, nodes, held, like=WHOLE, **other):
    """Return a plan of classes whose ranks hold `held` bytes."""
    first = copy.deepcopy(like["classes"][0])
    size = per_node * nodes
    return like | {
        "world": {"devices_per_node": per_node, "nodes": nodes, "world_size": size}, "mesh": mesh, "data_ranks": size,
        "stack": {"strategy": "parallel", "precision": "bf16-mixed", "comm_hook": ""},
        "classes": [ranks(first, number, size // len(held), each) for number, each in enumerate(held)],
    } | other  # fmt: skip


def alone():
    found = tree({"data": 1}, 1, 1, [1e8])
    found["classes"][0]["collectives"] = []
    return found


PLANS = {
    "one device": alone(),
    "4096 ranks": tree(
        {"pipeline": 16, "data": 32, "tensor": 8}, 8, 512, [2e9], megatron(GPT_3), device="a100-sxm-80gb"
    ),
    "three classes": tree({"data": 2, "shard": 72}, 72, 2, [2e9, 2.5e9, 3.3e9]),
    "no limit": tree({"shard": 16}, 8, 2, [2e9], device="no-limit"),
    "long and evil": tree(
        {"shard": 32768}, 8, 4096, [1e6], script=f"{'a_long_name_' * 20}.py --note {EVIL} {'word ' * 80}"
    ),
    "vectors alone": tree({"shard": 16}, 8, 2, [1e6]),
    "no memory": megatron(GPT_3),
}
PLANS["vectors alone"]["classes"][0]["work"] = WHOLE["classes"][0]["work"][2:]
#: Pictures that not every plan has.
WITHOUT = {
    "one device": {"scaling", "mesh"}, "vectors alone": {"roofline"}, "no memory": {"memory", "mesh"},
}  # fmt: skip
ALL = {"memory", "timeline", "scaling", "roofline", "mesh"}


def explored(peaks):
    """Return a search among nodes of 8 in which candidates of every layout and precision need `peaks`, one after the other."""
    path = Path(f"{'a_long_name_' * 9}.py")
    script = PlannedScript(path, ["--note", EVIL], devices=8, nodes=4)
    found = Explorer(script=script, device=find("h100-sxm-80gb"), searched=frozenset())
    found.first = tree({"data": 32}, 8, 4, [1e6], model={"parameters": 7_000_000_000})
    for number, peak in enumerate(peaks):
        layout = [*layouts(8, 4)][number % 8]
        precision = ("bf16-true", "bf16-mixed", "32-true")[number // 3 % 3]
        candidate = Candidate(layout=layout, precision=precision, checkpointing="full", micro_batch=1 + number // 8)
        of = tree({"data": 32}, 8, 4, [peak / 28], trainer=True)
        of["stack"] = {"strategy": layout.name, "precision": precision}
        step_s = Interval(1, 1, 2).times(3.0 - number / 20)
        found.planned.append(Planned(candidate=candidate, tree=of, step_s=step_s))
    found.planned.append(Planned(candidate=Candidate(precision="64-true"), error=EVIL * 4))
    found.left_out.append(("ddp " * 30, EVIL))
    return found


ADVICE = {"many": explored([7e9 * (number + 1) for number in range(20)]), "none": explored([9e10, 2e12])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with a page and a folder of pictures for each of PLANS, and the page of a comparison."""
    path = tmp_path_factory.mktemp("pages")
    (path / "no-limit.toml").write_text(DEVICE)
    for name, plan in PLANS.items():
        (path / f"{name}.json").write_text(json.dumps(plan))
        words = ["--html", str(path / f"{name}.html"), "--svg", str(path / name), "--tokens", "3e11"]
        words += ["--device-file", str(path / "no-limit.toml")] if name == "no limit" else []
        assert main(["simulate", str(path / f"{name}.json"), *words]) == 0
    compared = [
        (f"choice {number}", 0.295 + number % 5 * 0.15, 9e10 - 4e9 * number, number > 3) for number in range(11)
    ]
    page = document("compared", figure("Choices", pareto([*compared, (EVIL * 3, 0.3, 9e10, True)], 8e10)))
    (path / "compared.html").write_text(page)
    for name, each in ADVICE.items():
        (path / f"advice {name}.html").write_text(advice_page.text(each, advice_page.drawn(each)))
    return path


@pytest.fixture(scope="module")
def page(need, tmp_path_factory):
    need("chromium", package="chromium")
    with browser("chromium", tmp_path_factory.mktemp("browser")) as started:
        yield started


# --- In a browser ----------------------------------------------------------------------------------------------------

#: Texts of one drawing that cover each other, and texts that are outside of it.
OVERLAPS = """
(() => {
  const found = [];
  for (const svg of document.querySelectorAll('svg')) {
    const whole = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll('text')].map(each => [each.textContent, each.getBoundingClientRect()]);
    boxes.forEach(([words, a], number) => {
      if (a.left < whole.left - 1 || a.right > whole.right + 1 || a.top < whole.top - 1 || a.bottom > whole.bottom + 1)
        found.push('outside: ' + words);
      for (const [other, b] of boxes.slice(number + 1))
        if (a.left < b.right + 2 && b.left < a.right + 2 && a.top < b.bottom - 4 && b.top < a.bottom - 4)
          found.push(words + ' | ' + other);
    });
  }
  return found;
})()
"""
SIZES = "[...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect()).map(box => [box.width, box.height])"
CONTRAST = """
(() => {
  const light = color => {
    const part = color.match(/[\\d.]+/g).slice(0, 3).map(each => each / 255)
      .map(each => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const paper = light(getComputedStyle(document.querySelector('figure')).backgroundColor);
  return [...document.querySelectorAll('svg text, svg .fill')].map(each => {
    const ink = light(getComputedStyle(each).fill);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }).reduce((a, b) => Math.min(a, b));
})()
"""


@pytest.mark.when_changed(
    "plugins/plan/",
    "plugins/basics/stratagem_pictures",
    cases=(
        "390-dark",
        "1280-light",
        "1280-dark",
    ),
)
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")])
def test_pages_fit_the_screen_and_labels_do_not_overlap(page, folder, width, scheme):
    page.show(width, 900, scheme)
    for path in sorted(folder.glob("*.html")):
        page.open(path.as_uri())

        assert page.value("document.documentElement.scrollWidth") == width, path.name
        sizes = page.value(SIZES)
        one = path.stem in ("compared", "advice none")
        if path.stem != "advice many":
            assert len(sizes) == (1 if one else len(ALL - WITHOUT.get(path.stem, set())))
        assert all(box[0] > 300 and box[1] > 60 for box in sizes), path.name
        assert page.value(OVERLAPS) == [], path.name
        assert page.value(CONTRAST) > 2.2, path.name
    assert page.complaints == []
    assert [url for url in page.requested if not url.startswith("file:")] == []


def test_a_page_says_what_the_plan_says(page, folder):
    def words(name):
        page.open((folder / f"{name}.html").as_uri())
        return page.value(
            "document.body.innerText + [...document.querySelectorAll('svg text')].map(each => each.textContent)"
        )

    assert EVIL in words("long and evil")
    assert page.value("document.querySelectorAll('script').length") == 0
    found = words("three classes")
    assert all(name in found for name in CATEGORIES)
    assert "does not fit: rank 2 needs 12,400,000,000 bytes more than the device has" in found
    assert "shard 72: ranks side by side, within a node" in found
    assert "data 2: ranks 72 apart, across nodes" in found
    assert "rank 1 and 47 like it" in found
    found = words("4096 ranks")
    assert "4,096 x a100-sxm-80gb" in found
    assert "70.0% of 80 GB" in found
    assert "fits, and torch gives back what it keeps" in found
    assert "bubble of the pipeline" in found
    assert "4095" in found
    assert "whether it fits is not said" in words("no limit")
    assert "Messages" not in words("one device")


def test_the_page_of_an_advice_has_its_code_and_why_others_lost(page, folder):
    page.open((folder / "advice many.html").as_uri())
    text = page.value("document.body.innerText")
    codes = page.value("[...document.querySelectorAll('pre')].map(each => each.innerText)")
    told = page.value("[...document.querySelectorAll('svg')].map(each => each.getAttribute('aria-label'))")

    assert len(codes) == 4
    assert all(code.startswith("Trainer(strategy=") for code in codes)
    assert [each.partition(",")[0] for each in told[1:]] == ["Memory of a device by category"] * len(codes)
    assert "1. the fastest, numerics: weights of 16 bits" in text
    assert "does not fit, by 46.0 GB" in text
    assert EVIL in text
    page.open((folder / "advice none.html").as_uri())
    assert "Nothing that was planned fits" in page.value("document.body.innerText")


def test_the_command_plan_writes_a_page_without_times(page, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, stratagem as sg\nclass Net(sg.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = torch.nn.Linear(512, 512)\n"
        "    def training_step(self, batch, batch_idx):\n        return self.layer(batch).square().mean()\n"
        "    def configure_optimizers(self):\n        return torch.optim.Adam(self.parameters())\n"
        "sg.Trainer(max_steps=2, strategy='ddp').fit(Net(), torch.utils.data.DataLoader(torch.ones(64, 512), batch_size=4))\n"
    )
    words = ["--devices", "2", "--html", "page.html", "--svg", "pictures", "train.py", EVIL]
    done = scripts.run([sys.executable, "-m", "stratagem", "plan", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page.open((tmp_path / "page.html").as_uri())

    assert {path.stem for path in (tmp_path / "pictures").iterdir()} == {"memory", "mesh"}
    assert f"train.py {EVIL}" in page.value("document.body.innerText")
    assert "all_reduce" in page.value("document.querySelector('table').innerText")


def test_what_is_wrong_with_a_page_is_noticed(page, tmp_path):
    """What the tests before rely on."""
    svg = pareto([("one", 0.3, 2e9, True)])
    svg.append(copy.deepcopy(next(svg.iter("text"))))
    (tmp_path / "page.html").write_text(document("broken", figure("x" * 200, svg)).replace("anywhere", "normal"))
    page.show(390, 900, "light")
    page.open((tmp_path / "page.html").as_uri())

    assert page.value("document.documentElement.scrollWidth") > 390
    assert len(page.value(OVERLAPS)) == 1


# --- Without a browser -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_pictures_are_files_of_their_own(folder, name):
    written = {path.stem: ElementTree.parse(path).getroot() for path in (folder / name).iterdir()}

    assert written.keys() == ALL - WITHOUT.get(name, set())
    for root in written.values():
        assert root[0].text == root.attrib["aria-label"]
        assert "prefers-color-scheme" in root[1].text


def test_a_picture_becomes_a_png_file(folder):
    pytest.importorskip("resvg_py", reason="`pip install stratagem-plan[png]`")
    import io

    from PIL import Image

    svg = pareto([("one", 0.3, 2e9, True)])
    image = Image.open(io.BytesIO(png_bytes(svg)))
    height = float(svg.attrib["viewBox"].split()[3])

    assert image.size == (1080, 3 * height)
    colors = {color for _, color in image.convert("RGB").getcolors(1 << 20)}
    assert {(0x25, 0x63, 0xB8), (0xFF, 0xFF, 0xFF), (0x1D, 0x21, 0x27)} <= colors


def test_png_files_say_what_they_need(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    code = main(["simulate", str(folder / "one device.json"), "--png", str(folder / "one device")])

    assert code == 1
    assert "--png is set, and resvg-py is not installed" in capsys.readouterr().err


def test_bars_are_as_long_as_what_they_show(folder):
    root = ElementTree.parse(folder / "three classes" / "memory.svg").getroot()
    bars = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if len(each)]
    told = [float(each[0].text.split(": ")[1].removesuffix(" bytes").replace(",", "")) for each in bars]
    starts, widths = ([float(each.attrib[name]) for each in bars] for name in ("x", "width"))

    assert len(bars) == 3 * (7 + 6)
    assert sum(told[:7]) == 28 * 2e9
    assert [width / widths[0] for width in widths] == pytest.approx([each / told[0] for each in told], rel=0.02)
    assert starts[1:7] == pytest.approx(
        [start + width for start, width in zip(starts[:6], widths[:6], strict=True)], abs=0.2
    )


@pytest.mark.sweep(guard="tests/plan/test_pages.py::test_the_command_plan_writes_a_page_without_times")
def test_the_pictures_of_the_docs_are_those_of_the_commands(tmp_path):
    """If this fails, run the two commands of docs/planner.md again."""
    docs = Path(__file__).parents[2] / "docs"
    section = (docs / "planner.md").read_text().split("## Pictures")[1].split("\n## ")[0]
    for command in re.findall(r"^    stratagem (.*)$", section, re.MULTILINE):
        words = shlex.split(command.replace("tests/plan", str(Path(__file__).parent)))
        scripts.run([sys.executable, "-m", "stratagem", *words], check=True, capture_output=True, cwd=tmp_path)

    assert sorted(re.findall(r"pictures/plan/(.*)\.svg", section)) == sorted(ALL)
    for name in ALL:
        shown, written = (
            ElementTree.parse(folder / f"pictures/plan/{name}.svg") for folder in (docs, tmp_path / "docs")
        )
        texts = [[each.text for each in tree.iter("{http://www.w3.org/2000/svg}text")] for tree in (shown, written)]
        assert texts[0] == texts[1], name


def test_the_line_of_a_comparison_connects_what_nothing_beats():
    compared = [
        ("a", 1.0, 4e9, True),
        ("b", 2.0, 2e9, True),
        ("c", 2.0, 3e9, True),
        ("d", 3.0, 1e9, False),
        ("e", 4.0, 1e9, True),
    ]
    root = ElementTree.fromstring(file_text(pareto(compared)))
    kinds = {each[0].text[0]: each.attrib["class"] for each in root.iter("{http://www.w3.org/2000/svg}circle")}

    assert kinds == {"a": "fill c1", "b": "fill c1", "c": "fill c7", "d": "ring c5", "e": "fill c1"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (8.068e9, "8.07 GB"),
        (0, "0 B"),
        (999.6e6, "1 GB"),
        (80e9, "80 GB"),
        (0.0121, "12.1 mB"),
        (1, "1 B"),
        (2e-12, "0.002 nB"),
    ],
)
def test_numbers_have_three_digits_and_a_prefix(value, words):
    assert si(value, "B") == words


@pytest.mark.parametrize(("low", "high"), [(1, 1e7), (0.3, 0.39), (2, 9), (0.09, 1.2e3)])
def test_an_axis_has_a_few_round_numbers(low, high):
    for logarithmic in (True, False):
        found = Scale(low, high, 0, 100, logarithmic).ticks()

        assert 2 <= len(found) <= 11
        assert all(low <= each <= high * 1.000001 for each in found)
