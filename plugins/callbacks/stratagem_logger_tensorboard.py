"""Log metrics, hyper-parameters and the model graph to TensorBoard event files."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.paths import is_remote
from stratagem.api.seeding import random_state, restore_random_state
from stratagem.api.validators import at_least, more_than
from stratagem.errors import ConfigError, PluginError
from stratagem_log_folders import destination, make, why_not_writable
from stratagem_trainer.api import Logger

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView


class NoOpWriter:
    """Accepts any call and does nothing: the writer on ranks other than 0, so that modules need not check the rank."""

    def __getattr__(self, name: str) -> NoOpWriter:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> NoOpWriter:
        return self


@define(eq=False, kw_only=True)
class TensorBoardLogger(Logger):
    """Write event files to ``<save_dir>/<name>/version_N`` on rank 0; create no folder before the first entry.

    A run that is resumed with the same `version` hides what the interrupted run logged after the checkpoint.
    """

    positional: ClassVar[tuple[str, ...]] = ("save_dir", "name", "version")

    #: Root folder of all logs, or a URL that fsspec supports; ``default_root_dir`` if not given.
    save_dir: Path | None = None
    #: Folder of this experiment; "" leaves this level out. TensorBoard compares all runs below its ``--logdir``.
    name: str = "stratagem_logs"
    #: Folder of this run; the next free ``version_N`` if not given. An existing one is continued.
    version: int | str | None = field(default=None, validator=at_least(0))
    #: Seconds to buffer metrics in memory: fewer lose less if the process is killed, more write less often.
    flush_secs: float = field(default=120.0, validator=more_than(0))
    #: Also log the graph of the module's forward for its ``example_input_array``; costs one forward at the start.
    log_graph: bool = False
    #: Log ``hp_metric`` as -1 at the start, so that the HPARAMS tab lists the run before the module logs it; False
    #: leaves that point out of the charts.
    default_hp_metric: bool = True

    _root: Path | None = field(init=False, default=None)
    _rank: int = field(init=False, default=0)
    _folder: Path | None = field(init=False, default=None)
    _writer: Any = field(init=False, default=None)
    _pid: int = field(init=False, default=0)
    #: Hyper-parameters that are not written yet.
    _hparams: dict[str, Any] = field(init=False, factory=dict)
    #: True after hyper-parameters are written, until the end status is.
    _session: bool = field(init=False, default=False)
    #: Hide entries of the folder from this step on.
    _purge_step: int | None = field(init=False, default=None)

    @property
    def log_dir(self) -> Path | None:
        """The folder of the files; None before the first metric or hyper-parameter."""
        return self._folder

    def written_files(self) -> dict[str, str]:
        """Return the folder of the files."""
        return {} if self._folder is None else {"tensorboard": str(self._folder)}

    @property
    def experiment(self) -> SummaryWriter | NoOpWriter:
        """The `SummaryWriter`, for images, histograms and text; on ranks other than 0 an object that does nothing."""
        if self._root is None:
            raise ConfigError(
                "tensorboard.experiment was read outside a run", expected="a running trainer",
                do="use it in the module's methods or in a callback",
            )  # fmt: skip
        return self._open() if self._rank == 0 else NoOpWriter()

    # --- Hooks ---------------------------------------------------------------------------------------------------

    @hookimpl
    def prepare_module(self, run: RunContext) -> None:
        self._attach(run)

    @hookimpl
    def log_hyperparams(self, params: dict[str, Any], run: RunContext) -> None:
        self._attach(run)
        self._hparams = dict(params)
        if not run.owns_loop:  # else on_fit_start follows, where all ranks can fail together
            self._open()

    @hookimpl
    def on_fit_start(self, trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
        self._attach(run)
        error = None
        if self._rank == 0:
            try:
                self._begin(trainer, module)
            except Exception as caught:  # noqa: BLE001 - raised on all ranks
                error = caught
                self._hparams = {}
        run.collectives.fail_together(error)

    @hookimpl
    def log_metrics(self, metrics: dict[str, float], step: int, run: RunContext) -> None:
        self._attach(run)
        writer = self._open()
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    @hookimpl
    def on_validation_end(self) -> None:
        self.flush()

    @hookimpl
    def on_fit_end(self) -> None:
        self._end_session("STATUS_SUCCESS")
        self.flush()

    @hookimpl
    def on_exception(self) -> None:
        try:
            self.close("STATUS_FAILURE")
        except OSError as error:  # must not hide the exception that ends the run
            warnings.warn(f"{self._folder} may lack the last metrics ({error})", stacklevel=2)

    @hookimpl
    def teardown(self) -> None:
        self.close()

    # --- The writer ----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write buffered entries to the file."""
        if self._is_open:
            self._writer.flush()

    def close(self, status: str = "STATUS_SUCCESS") -> None:
        """Write buffered entries and close the file; safe to call twice. A later metric opens another file."""
        writer = self._writer if self._is_open else None
        try:
            self._end_session(status)
        finally:
            self._writer = None
            if writer is not None:
                writer.close()

    @property
    def _is_open(self) -> bool:
        """Whether this process has a writer. The thread of a writer from before a fork is in the parent."""
        return self._writer is not None and self._pid == os.getpid()

    def _attach(self, run: RunContext) -> None:
        self._root, self._rank = run.settings.default_root_dir, run.rank

    def _begin(self, trainer: TrainerView, module: Any) -> None:
        """Check on rank 0, before training, that everything can be logged."""
        _summary_writer()
        self.close()  # a fit that resumes from an earlier step hides later entries
        self._purge_step = trainer.global_step + 1 if trainer.global_step else None
        example = _example(module, trainer.run) if self.log_graph else None
        assert self._root is not None, "attached before"
        folder = destination(self, self._root)
        if not is_remote(folder) and (reason := why_not_writable(folder)):  # an object store says so when written to
            raise self._not_writable(folder, reason)
        if self._hparams or self.log_graph:
            self._open()
        if self.log_graph:
            _draw(self._writer, module, trainer.run.transfer(example))

    def _open(self) -> SummaryWriter:
        if not self._is_open:
            make = _summary_writer()
            self._folder = self._folder or self._make_folder()
            if not is_remote(self._folder):
                _wait_until_newest(Path(self._folder))
            try:
                self._writer = make(str(self._folder), purge_step=self._purge_step, flush_secs=self.flush_secs)
            except OSError as error:
                raise self._not_writable(self._folder, error.strerror or str(error)) from error
            self._pid, self._session = os.getpid(), False
        if self._hparams:
            self._begin_session()
        self._purge_step = None
        writer: SummaryWriter = self._writer
        return writer

    # --- The folder ----------------------------------------------------------------------------------------------

    def _make_folder(self) -> Path:
        assert self._root is not None, "attached before"
        try:
            return make(self, self._root)
        except OSError as error:
            raise self._not_writable(destination(self, self._root), error.strerror or str(error)) from error

    def _not_writable(self, folder: Path, reason: str) -> ConfigError:
        option = "default_root_dir" if self.save_dir is None else "tensorboard.save_dir"
        return ConfigError(
            f"{option} leads to {str(folder)!r}, which cannot be written ({reason})",
            expected="a folder that can be written", do=f"change {option}",
        )  # fmt: skip

    # --- Hyper-parameters ----------------------------------------------------------------------------------------

    def _begin_session(self) -> None:
        """Write the hyper-parameters; TensorBoard finds the metrics to show next to them automatically."""
        self._writer.file_writer.add_summary(_session_start(self._hparams))
        if self.default_hp_metric and self._purge_step is None:
            self._writer.add_scalar("hp_metric", -1, 0)
        self._hparams, self._session = {}, True

    def _end_session(self, status: str) -> None:
        if self._session and self._is_open:
            self._session = False
            self._writer.file_writer.add_summary(_session_end(status))

    # --- Pickling ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        names = [each.name for each in attrs.fields(type(self))]
        return {name: getattr(self, name) for name in names} | {"_writer": None, "_session": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _wait_until_newest(folder: Path) -> None:
    """Wait until a new file sorts after those in `folder`: readers take files in the order of their names.

    A name contains the second of its creation, then a number: within one second, file 10 sorts before file 9.
    """
    seconds = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(second) for second in seconds if second.isdecimal()), default=0)
    deadline = time.monotonic() + 1.5  # the clock of the machine that wrote them may be ahead
    while int(time.time()) <= newest and time.monotonic() < deadline:
        time.sleep(0.02)


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise PluginError(
            f"logger 'tensorboard' cannot be used ({error})", expected="the package tensorboard",
            do="pip install tensorboard",
        ) from error  # fmt: skip
    return SummaryWriter


# --- Hyper-parameters, in the format of TensorBoard's hparams plugin -------------------------------------------------
# Its own functions for this import TensorFlow.


def _session_start(hparams: dict[str, Any]) -> Any:
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in _flat(hparams):
        kinds: dict[type[Any], str] = {bool: "bool_value", float: "number_value"}
        kind = kinds.get(type(value), "string_value")
        setattr(start.hparams[name], kind, value)
    return _session_summary(metadata.SESSION_START_INFO_TAG, session_start_info=start)


def _session_end(status: str) -> Any:
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.Status.Value(status), end_time_secs=time.time())
    return _session_summary(metadata.SESSION_END_INFO_TAG, session_end_info=end)


def _session_summary(tag: str, **info: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **info)
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))])


def _flat(params: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Yield names and values; nested names are joined with "/", values other than numbers become text."""
    for name, value in params.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", _plain(value)


def _plain(value: Any) -> bool | float | str:
    """Return `value` as a type that TensorBoard stores."""
    return value if isinstance(value, bool) else float(value) if isinstance(value, int | float) else str(value)


# --- The graph -------------------------------------------------------------------------------------------------------


def _example(module: Any, run: RunContext) -> Any:
    """Return the module's example input.

    Raises:
        ConfigError: there is none, or this rank cannot run a forward pass alone.
    """
    example = getattr(module, "example_input_array", None)
    if example is None:
        raise ConfigError(
            f"tensorboard.log_graph is True and {type(module).__name__} has no example_input_array",
            expected="an input for its forward", do="set self.example_input_array in its __init__",
        )  # fmt: skip
    if run.shards_parameters:
        raise ConfigError(
            f"tensorboard.log_graph is True with {run.title_of(run.strategy)}, whose ranks run every forward together",
            expected="False", do="log the graph in a run on one device",
        )  # fmt: skip
    return example


def _draw(writer: Any, module: Any, example: Any) -> None:
    """Trace a forward pass without side effects on training: statistics, random state and gradients stay the same."""
    import torch

    training = [part for part in module.modules() if part.training]
    before = random_state()
    module.eval()
    try:
        with torch.no_grad():
            writer.add_graph(module, example, use_strict_trace=False)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"tensorboard.log_graph is True and {type(module).__name__}.forward cannot be traced ({reason})",
            expected="a forward that accepts example_input_array and that torch.jit.trace supports",
            do="set log_graph to False",
        ) from error
    finally:
        for part in training:
            part.training = True
        restore_random_state(before)
