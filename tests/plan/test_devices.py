"""The catalogue of devices: what a file must have, and what happens where a figure is absent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from programs import scripts
from stratagem.cli import main
from stratagem.errors import ConfigError
from stratagem_plan import devices
from stratagem_plan.cost import predict
from stratagem_plan.plan_file import read_plan

#: What a prediction for one device needs.
COMPLETE = ("memory_bytes", "memory_bytes_per_s")


@pytest.mark.parametrize("name", devices.catalogue())
def test_every_device_has_sources_and_plausible_figures(name):
    device = devices.find(name)

    assert device.source
    assert 2025 <= device.read_on.year <= 2027
    assert all(1e12 < value < 1e16 for value in device.flops.values())
    assert all(key.endswith("_dense") for key in device.flops)
    assert device.memory_bytes is None or 8e9 < device.memory_bytes < 1e12
    assert device.memory_bytes_per_s is None or 1e11 < device.memory_bytes_per_s < 1e14
    for link in filter(None, (device.intra, device.inter)):
        assert 1e9 < link.bytes_per_s_per_direction < 2e12
        assert link.latency_s is None or 1e-7 < link.latency_s < 1e-4


def test_at_least_sixteen_devices_are_complete():
    found = [devices.find(name) for name in devices.catalogue()]
    complete = [each for each in found if each.flops and all(getattr(each, figure) for figure in COMPLETE)]

    assert len(complete) >= 16


def test_the_vendors_page_is_the_source_where_a_file_says_so():
    vendors = [each for each in map(devices.find, devices.catalogue()) if each.vendor]

    assert vendors
    assert all(each.source.startswith("docs.cloud.google.com/tpu") for each in vendors)


def test_curves_ascend_in_size_and_stay_below_the_peak():
    device = devices.find(devices.MEASURED)
    curve = device.need("curve")
    rates = [(key, each) for key, each in curve.matmul.items()]

    assert all(each.size == sorted(each.size) and len(each.size) == len(each.per_s) for _, each in rates)
    assert all(max(each.per_s) < device.need(f"flops.{key}") for key, each in rates)
    assert max(curve.vector.per_s) < device.need("memory_bytes_per_s")


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ConfigError, match=r"device 'h100-sxm' is unknown; expected .*; did you mean 'h100-sxm-80gb'"):
        devices.find("h100-sxm")


def test_an_absent_figure_is_an_error_when_it_is_needed():
    device = devices.find("h20")

    with pytest.raises(ConfigError, match=r"device 'h20' has no memory_bytes_per_s: no source was found for it; pass"):
        device.need("memory_bytes_per_s")
    with pytest.raises(ConfigError, match=r"has no flops\.fp8_dense"):
        device.need("flops.fp8_dense")


def test_a_users_folder_and_file_add_devices_and_replace_figures(tmp_path, monkeypatch):
    own = 'source = "me"\nread_on = 2026-11-27\nvendor = false\nmemory_bytes = 1e9\n'
    (tmp_path / "mine.toml").write_text(own)
    (tmp_path / "h20.toml").write_text("memory_bytes = 96e9\n")
    file = tmp_path / "file.txt"
    file.write_text("[flops]\nbf16_dense = 1e15\n")
    monkeypatch.setenv(devices.FOLDER_VARIABLE, str(tmp_path))

    assert devices.find("mine").memory_bytes == 1e9
    assert devices.find("h20").memory_bytes == 96e9
    assert devices.find("h20").flops == {"bf16_dense": 148e12}
    assert devices.find("h20", file).flops == {"bf16_dense": 1e15}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory = 3\n", "file of device 'mine' has a wrong value: extra fields found \\(memory\\)"),
        ("memory_bytes = 'x'\n", "file of device 'mine' has a wrong value"),
        ("memory_bytes =\n", "device file '.*mine.toml' cannot be read"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, message):
    (tmp_path / "mine.toml").write_text('source = "me"\nread_on = 2026-11-27\nvendor = false\n' + text)

    with pytest.raises(ConfigError, match=message):
        devices.find("mine", tmp_path / "mine.toml")


#: The command, with fewer and smaller things to measure; its ranks are spawned, and import this.
QUICKLY = """
import sys
from stratagem.cli import main
from stratagem_plan import measure
measure._SIZES[True] = (64, 128), (1 << 16, 1 << 20), (64,)
measure._MESSAGES, measure._LONG_ENOUGH = (64, 1 << 16, 1 << 20), 0.01
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.when_changed(
    "plugins/plan/", reason="it measures the machine for seconds, which only the code of devices can change"
)
@pytest.mark.slow
def test_this_machine_becomes_a_device_that_a_step_can_be_predicted_for(tmp_path):
    path, plan = tmp_path / "here.toml", tmp_path / "plan.json"
    (tmp_path / "quickly.py").write_text(QUICKLY)
    scripts.run([sys.executable, "quickly.py", "plan", "--devices", "2", "--measure", path], check=True)
    options = ["--devices", "2", "--device", "here", "--device-file", str(path)]
    words = [*options, "--json", str(plan), str(Path(__file__).with_name("train_mlp.py")), "{}"]
    scripts.run([sys.executable, "-m", "stratagem", "plan", *words], check=True, capture_output=True)
    device = devices.find("here", path)
    step, _ = predict(read_plan(plan), device)

    assert device.need("flops.fp32_dense") > 1e9
    assert set(device.intra.measured) == {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    # Messages of a CPU hide behind nothing: its cores send them.
    assert step.exposed == pytest.approx(step.communication)
    assert step.communication > 0
    assert step.host == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script was given"),
        (["--measure", "here.toml", "train.py"], "--measure and a script were given"),
        (["--measure", "nowhere/here.toml"], "the folder 'nowhere' does not exist"),
        (["--measure", "here.toml", "--devices", "0"], "--devices is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(words, said, capsys):
    assert main(["plan", *words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "advise", "simulate"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--json", "nowhere/out.json"], "the folder 'nowhere' does not exist"),
        (["--html", "."], "--html is '.', which is a folder; expected a file"),
        (["--svg", __file__], f"--svg is '{__file__}', which is a file; expected a folder"),
    ],
    ids=["json", "html", "svg"],
)
def test_outputs_that_cannot_be_written_are_refused_before_anything_is_read(command, words, said, capsys):
    assert main([command, *words, "none"]) == 1
    assert said in capsys.readouterr().err
