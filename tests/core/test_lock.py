"""A run writes what it was resolved to; a later one may be held to it, and ranks compare it before they wait."""

from __future__ import annotations

import json
import os
import sys
import textwrap

import pytest

import stratagem as sg
from ports import free_port
from programs import scripts
from stratagem.api.options import redact
from stratagem.errors import ConfigError
from stratagem.stack import description
from stratagem_testing import ProcessesFailed, run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import outcome, share

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def _described(**arguments):
    run = sg.Run(**arguments)
    return description.lock(run.stack, run.settings)


def trained(**arguments):
    trainer = sg.Trainer(**({"max_epochs": 1} | QUIET | arguments))
    trainer.fit(Net(), joined_batches(2, 8))
    return trainer


# --- The file ----------------------------------------------------------------------------------------------------


def test_a_fit_writes_plugins_options_versions_and_origins(tmp_path):
    trained(strategy={"name": "ddp", "bucket_cap_mb": 3.0}, devices=1)
    written = json.loads((tmp_path / "run.lock").read_text())
    strategy = written["plugins"][0]

    assert written["versions"]["stratagem"] == sg.__version__
    assert written["arguments"]["max_epochs"] == {"value": 1, "origin": "code"}
    assert (strategy["name"], strategy["distribution"], strategy["version"]) == ("ddp", "stratagem-ddp", "0.1.0")
    assert strategy["entry_point"] == "stratagem_ddp:DDPStrategy"
    assert strategy["options"]["bucket_cap_mb"] == {"value": 3.0, "origin": "code"}
    assert strategy["options"]["static_graph"] == {"value": False, "origin": "default"}


def test_a_loop_of_your_own_writes_one_too(tmp_path):
    with sg.Run(accelerator="cpu", default_root_dir=tmp_path / "new") as run:
        run.setup(Net())

    assert (tmp_path / "new" / "run.lock").exists()


@pytest.mark.parametrize("quiet", [{"barebones": True}, {"fast_dev_run": True}])
def test_runs_that_write_nothing_write_no_lock(quiet, tmp_path):
    arguments = {"barebones": True} if "barebones" in quiet else QUIET | quiet
    sg.Trainer(accelerator="cpu", max_epochs=1, **{k: v for k, v in arguments.items() if k != "accelerator"}).fit(
        Net(), joined_batches(2, 8)
    )

    assert not (tmp_path / "run.lock").exists()


def test_evaluation_leaves_the_lock_of_training_alone(tmp_path):
    trained()
    before = (tmp_path / "run.lock").read_text()
    sg.Trainer(precision="64-true", **QUIET).validate(Net(), joined_batches(2, 8))

    assert (tmp_path / "run.lock").read_text() == before


def test_a_folder_that_cannot_be_written_is_warned_about(tmp_path):
    (tmp_path / "run.lock").mkdir()

    with pytest.warns(UserWarning, match="run.lock could not be written"):
        trained(default_root_dir=tmp_path)


def test_secrets_are_redacted(tmp_path):
    from attrs import define

    @define(eq=False, kw_only=True)
    class Uploader(sg.Callback):
        #: Secret.
        api_token: str = "s3cret"
        #: With a password in it.
        url: str = "https://me:s3cret@host/path"

        @sg.hookimpl
        def on_fit_end(self):
            pass

    trainer = trained(callbacks=[Uploader()])
    text = (tmp_path / "run.lock").read_text()

    assert "s3cret" not in text
    assert "https://me:<redacted>@host/path" in text
    assert "s3cret" not in trainer.explain()


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("WANDB_API_KEY", "abc", "<redacted>"),
        ("api_token", "abc", "<redacted>"),
        ("password", "", ""),
        ("keyboard", "qwerty", "qwerty"),
        ("max_tokens", "5", "5"),
        ("token", 5, 5),
        ("url", "ftp://a:b@c", "ftp://a:<redacted>@c"),
        ("options", {"secret": "x", "plain": ["y"]}, {"secret": "<redacted>", "plain": ["y"]}),
    ],
)
def test_what_counts_as_a_secret(name, value, shown):
    assert redact(name, value) == shown


def test_values_without_a_plain_form_are_the_same_in_every_process(tmp_path):
    trained(callbacks=[{"name": "lambda", "on": {"on_fit_end": print}}, {"name": "lambda", "on": {}}])
    plugins = json.loads((tmp_path / "run.lock").read_text())["plugins"]
    options = [plugin["options"]["on"]["value"] for plugin in plugins if plugin["kind"] == "callback"]

    assert options == [{"on_fit_end": "<builtins:print>"}, {}]


# --- Held against a later run ------------------------------------------------------------------------------------


def test_the_same_run_passes_and_drift_is_refused(tmp_path):
    trained(precision="bf16-mixed")
    path = tmp_path / "run.lock"

    trained(precision="bf16-mixed", lock=path)
    for drift, message in (
        ({"precision": "32-true"}, "precision is '32-true.* in this run and 'bf16-mixed"),
        ({"precision": "bf16-mixed", "max_epochs": 2}, "max_epochs is 2 in this run and 1 in the lock"),
        ({"precision": {"name": "bf16-mixed", "cache_enabled": False}}, "precision.bf16-mixed.cache_enabled is False"),
        (
            {"precision": "bf16-mixed", "callbacks": ["gradient_norms"]},
            r"callback is 'gradient_norms .* and '\(not set\)'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            sg.Trainer(**({"max_epochs": 1} | QUIET | drift), lock=path)


def test_another_version_of_a_package_is_drift(tmp_path):
    trained()
    written = json.loads((tmp_path / "run.lock").read_text())
    written["plugins"][0]["version"] = "0.0.9"
    (tmp_path / "old.lock").write_text(json.dumps(written))

    with pytest.raises(ConfigError, match=r"stratagem-basics 0.1.0 .* in this run and .* 0.0.9 .*in the lock"):
        sg.Trainer(max_epochs=1, lock=tmp_path / "old.lock", **QUIET)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "lock '.*x.lock' does not exist; expected a run.lock that an earlier run wrote"),
        ("{", "lock '.*x.lock' cannot be read"),
        ("[]", "lock '.*x.lock' cannot be read"),
        ('{"format": 9}', r"cannot be read \(format 9\)"),
    ],
)
def test_a_lock_that_is_none_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "x.lock").write_text(content)

    with pytest.raises(ConfigError, match=message):
        sg.Trainer(lock=tmp_path / "x.lock", **QUIET)


def test_another_launcher_does_not_count_as_drift():
    ours = description.flatten(_described(accelerator="cpu", launcher="subprocess"))
    theirs = description.flatten(_described(accelerator="cpu", launcher="fork"))

    assert description.differences(ours, theirs, "here", "there")
    assert not description.differences(ours, theirs, "here", "there", ignored=description._PLACES)


# --- Between ranks -----------------------------------------------------------------------------------------------


def _differing(rank, size, arguments, call):
    trainer = sg.Trainer(**({"max_epochs": 1, "devices": size} | QUIET | arguments[rank]))
    batches = joined_batches(4, 12)
    calls = {
        "fit": lambda: trainer.fit(Net(), share(trainer, batches)),
        "resume": lambda: trainer.fit(Net(), share(trainer, batches), ckpt_path=f"{rank}.ckpt" if rank else None),
        "validate": lambda: trainer.validate(Net(), share(trainer, batches)),
        "fit and validate": lambda: trainer.fit(Net(), share(trainer, batches), *([batches] if rank else [])),
    }
    act = calls[call if isinstance(call, str) else call[rank]]
    return outcome(act)


@pytest.mark.every_push("call")
@pytest.mark.parametrize(
    ("arguments", "call", "message"),
    [
        ([{}, {"precision": "bf16-mixed"}], "fit", "precision is 'bf16-mixed.* on rank 1 and '32-true.* on rank 0"),
        ([{}, {"strategy": {"name": "ddp", "bucket_cap_mb": 1.0}}], "fit", "bucket_cap_mb is 1.0 on rank 1 and 25.0"),
        ([{}, {"accumulate_grad_batches": 2}], "fit", "accumulate_grad_batches is 2 on rank 1 and '\\(not set\\)'"),
        ([{}, {"comm_hook": "fp16_compress"}], "fit", "comm_hook is 'fp16_compress.* on rank 1 and '\\(not set\\)'"),
        ([{"callbacks": ["gradient_norms"]}, {}], "fit", "callback is '\\(not set\\)' on rank 1 and 'gradient_norms"),
        ([{"max_epochs": 3}, {}], "fit", "max_epochs is 1 on rank 1 and 3 on rank 0"),
        ([{}, {}], "resume", "ckpt_path is '1.ckpt' on rank 1 and None on rank 0"),
        ([{}, {}], ["fit", "validate"], "the call is 'validate' on rank 1 and 'fit' on rank 0"),
        ([{}, {}], "fit and validate", "val_dataloaders is True on rank 1 and False on rank 0"),
    ],
    ids=[
        "precision", "option of the strategy", "accumulation", "communication hook", "callback", "max_epochs", "ckpt_path",
        "call", "val_dataloaders",
    ],
)  # fmt: skip
def test_ranks_that_were_started_differently_all_stop_and_say_so(arguments, call, message):
    import re

    said = run_in_processes(_differing, 2, arguments, call, limit_s=60)

    assert all(text.startswith("refused: ") for text in said), said
    assert all(re.search(message, text) for text in said), said


def test_the_rank_that_differs_is_named_among_three():
    said = run_in_processes(_differing, 3, [{}, {}, {"precision": "64-true"}], "fit", limit_s=60)

    assert all("on rank 2 and '32-true" in text for text in said)


def _differing_without_a_hosted_store(rank, size):
    os.environ["STRATAGEM_STORE_HOSTED"] = "0"
    os.environ["MASTER_PORT"] = os.environ["FREE_PORT"]
    return _differing(rank, size, [{}, {"gradient_clip_val": 1.0}], "fit")


def test_also_where_rank_0_hosts_the_store(monkeypatch):
    monkeypatch.setenv("FREE_PORT", str(free_port()))
    for said in run_in_processes(_differing_without_a_hosted_store, 2, limit_s=60):
        assert "gradient_clip_val is 1.0 on rank 1" in said


@pytest.mark.slow
def test_a_launched_program_that_differs_by_rank_stops(tmp_path):
    script = """
        import os
        import stratagem as sg
        from stratagem_testing.reference import Net, joined_batches

        precision = "bf16-mixed" if os.environ.get("RANK") == "1" else "32-true"
        trainer = sg.Trainer(strategy="ddp", devices=2, accelerator="cpu", precision=precision, max_epochs=1)
        trainer.fit(Net(), joined_batches(2, 8))
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    result = scripts.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=180
    )

    assert result.returncode == 1
    assert "precision is 'bf16-mixed" in result.stderr
    assert "on rank 1 and '32-true" in result.stderr


class RaisesOnOne(sg.Callback):
    def __init__(self, hook):
        self.hook = hook

    @sg.hookimpl
    def prepare_module(self, run):
        if self.hook == "prepare_module" and run.rank == 1:
            raise ValueError("out of order")

    @sg.hookimpl
    def on_train_start(self, run):
        if self.hook == "on_train_start" and run.rank == 1:
            raise ValueError("out of order")

    @sg.hookimpl
    def on_save_checkpoint(self, run):
        if self.hook == "on_save_checkpoint" and run.rank == 1:
            raise ValueError("out of order")


def _hook_raises(rank, size, hook):
    trainer = sg.Trainer(max_epochs=1, devices=size, callbacks=[RaisesOnOne(hook)], **QUIET)

    def act():
        trainer.fit(Net(), share(trainer, joined_batches(3, 12)))
        trainer.save_checkpoint("x.ckpt")

    return outcome(act)


@pytest.mark.every_push("on_train_start")
@pytest.mark.parametrize("hook", ["prepare_module", "on_train_start", "on_save_checkpoint"])
def test_a_hook_that_raises_on_one_rank_ends_all(hook):
    try:
        first, second = run_in_processes(_hook_raises, 2, hook, limit_s=60)
    except ProcessesFailed as error:
        assert "out of order" in str(error)
        return
    assert second == "ValueError: out of order"
    assert "out of order" in first or "onnection" in first


def test_callbacks_of_every_run_are_recorded_and_compared_between_ranks_alone(tmp_path, monkeypatch):
    trained()
    locked = json.loads((tmp_path / "run.lock").read_text())
    monkeypatch.setenv("STRATAGEM_DISABLE_PLUGINS", "peer_diagnosis")
    other = sg.Trainer(max_epochs=1, **QUIET, lock=tmp_path / "run.lock").run

    assert [plugin["name"] for plugin in locked["automatic"]] == [
        "ending", "hints", "interruption", "finite", "peer_diagnosis",
    ]  # fmt: skip
    assert [choice.name for choice in other.stack.automatic] == ["ending", "hints", "interruption", "finite"]
    here = description.facts(other.stack, other.settings)
    monkeypatch.delenv("STRATAGEM_DISABLE_PLUGINS")
    run = sg.Trainer(max_epochs=1, **QUIET).run
    assert "callback peer_diagnosis is 'peer_diagnosis of stratagem-callbacks" in description.differences(
        description.facts(run.stack, run.settings), here, "on rank 1", "on rank 0"
    )
