"""Push checkpoints with a model card to the Hugging Face Hub, from a run or from the command line, and pull them."""

from __future__ import annotations

import argparse
import contextlib
import functools
import tempfile
import warnings
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from stratagem.api import Command, hookimpl
from stratagem.api.paths import as_path, is_remote
from stratagem.api.readback import as_numbers
from stratagem.api.validators import not_empty
from stratagem.checkpoint.files import sidecar
from stratagem.errors import CheckpointError, ConfigError
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class PushToHub(Callback):
    """Push checkpoints and a model card to a repository of the Hub, on rank 0.

    An upload that fails is a warning: the checkpoint stays on disk, and ``stratagem hub push`` sends it later.
    """

    #: The repository, ``user/name``; created if it does not exist.
    hub_model_id: str = field(validator=not_empty)
    #: "end" pushes the best checkpoint (the newest, without a monitor) when training ends; "every_save" each one
    #: once it is written, for which training waits.
    hub_strategy: Literal["end", "every_save"] = "end"
    #: Create a private repository; by default what the user's or the organization's settings say.
    private: bool | None = None
    #: Branch to push to, which is created if it does not exist; ``main`` if not given.
    revision: str | None = None
    #: Tags of the model card, beside ``stratagem``.
    tags: list[str] = field(factory=list)

    _metrics: dict[str, float] = field(init=False, factory=dict)
    #: The callback whose checkpoints are pushed, while a fit runs.
    _saved: Any = field(init=False, default=None)

    @hookimpl
    def on_fit_start(self, trainer: TrainerView, run: RunContext) -> None:
        error = None
        if run.is_global_zero:
            try:
                if trainer.checkpoint_callback is None:
                    raise ConfigError(
                        "push_to_hub has no checkpoints, since no callback saves them",
                        expected="a callback that does",
                        do="add the callback model_checkpoint, or remove enable_checkpointing=False",
                    )
                create(self.hub_model_id, self.private, self.revision)
            except ConfigError as caught:
                error = caught
        run.collectives.fail_together(error)
        self._saved = trainer.checkpoint_callback

    @hookimpl
    def on_save_checkpoint(self, trainer: TrainerView) -> None:
        self._metrics = as_numbers(trainer.published.exact)

    @hookimpl(wrapper=True)
    def save_checkpoint(self, path: Path, run: RunContext) -> Generator[None, Any, Any]:
        answer = yield
        pushes = self.hub_strategy == "every_save" and self._saved is not None and run.is_global_zero
        # A search for a learning rate saves and removes checkpoints of its own.
        if pushes and str(path) in {*self._saved.best_k_models, self._saved.last_model_path}:
            run.saver.afterwards(functools.partial(self._push, path))
        return answer

    @hookimpl
    def on_fit_end(self, trainer: TrainerView, run: RunContext) -> None:
        self._saved = None
        if self.hub_strategy == "end" and run.is_global_zero:
            saved = trainer.checkpoint_callback
            path = saved.best_model_path or saved.last_model_path
            if path:
                self._metrics = as_numbers(trainer.published.exact)
                run.saver.afterwards(functools.partial(self._push, as_path(path)))

    @hookimpl
    def on_exception(self) -> None:
        self._saved = None

    def _push(self, path: Path) -> None:
        try:
            push(path, self.hub_model_id, self.revision, self.tags, self._metrics)
        except Exception as error:  # noqa: BLE001 - a network that fails must not end training
            warnings.warn(
                f"{path} was not pushed ({error}): run `stratagem hub push {path} {self.hub_model_id}`", stacklevel=2
            )


class Hub(Command):
    """The command ``stratagem hub``, with subcommands push and pull."""

    help = "push checkpoints to the Hugging Face Hub, and pull them"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the subcommands."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        to = actions.add_parser("push", help="upload a checkpoint, and a model card if the repository has none")
        to.add_argument("checkpoint", help="a file or a folder")
        to.add_argument("repo_id", help="user/name; created if it does not exist")
        to.add_argument("--private", action="store_true", default=None, help="create a private repository")
        to.add_argument(
            "--to",
            choices=["huggingface"],
            help="upload its weights as safetensors files, as `checkpoint convert` does",
        )
        to.add_argument("--tag", action="append", default=[], help="a tag of the model card; may be repeated")
        back = actions.add_parser("pull", help="download a repository into a folder")
        back.add_argument("repo_id", help="user/name")
        back.add_argument("folder", help="where to write; files that are the same stay")
        for action in (to, back):
            action.add_argument("--revision", help="a branch, for pull also a tag or a commit; main by default")

    def run(self, arguments: argparse.Namespace) -> int:
        """Push or pull; print where it is."""
        if arguments.action == "pull":
            print(pull(arguments.repo_id, as_path(arguments.folder), arguments.revision))
            return 0
        source = as_path(arguments.checkpoint)
        if not source.exists():
            raise CheckpointError(f"{source} does not exist", expected="a checkpoint")
        with tempfile.TemporaryDirectory() as scratch:
            if arguments.to:
                from stratagem.cli import main

                weights = Path(scratch) / "weights"
                code = main(["checkpoint", "convert", str(source), str(weights), "--to", arguments.to])
                if code:
                    return code
                source = weights
            create(arguments.repo_id, arguments.private, arguments.revision)
            print(push(source, arguments.repo_id, arguments.revision, arguments.tag, {}, at_root=bool(arguments.to)))
        return 0


# --- What both do ------------------------------------------------------------------------------------------------


def create(repo_id: str, private: bool | None, revision: str | None) -> None:
    """Create the repository and the branch, unless they exist.

    Raises:
        ConfigError: the Hub refused, or cannot be reached.
    """
    from huggingface_hub import HfApi

    with _explaining(repo_id):
        HfApi().create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            HfApi().create_branch(repo_id, branch=revision, exist_ok=True)


def push(
    path: Path, repo_id: str, revision: str | None, tags: list[str], metrics: Mapping[str, float], at_root: bool = False
) -> str:
    """Upload the checkpoint `path` in one commit, and return its URL.

    A file goes to the root of the repository, with its checksum, and a folder to a folder of its name, or with
    `at_root` its files to the root. A model card is written if there is none.

    Raises:
        ConfigError: the Hub refused, or cannot be reached; or `path` is a URL.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    if is_remote(path):
        raise ConfigError(f"{str(path)!r} is a URL", expected="a local checkpoint", do="copy it first")
    base = path if at_root else path.parent
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path, sidecar(path)]
    added = [CommitOperationAdd(str(each.relative_to(base)), each) for each in files if each.exists()]
    api = HfApi()
    with _explaining(repo_id):
        if not api.file_exists(repo_id, "README.md", revision=revision):
            card = model_card(repo_id, "" if at_root else path.name, path.is_dir(), tags, metrics)
            added.append(CommitOperationAdd("README.md", card.encode()))
        commit = api.create_commit(repo_id, added, commit_message=f"Add {path.name}", revision=revision)
        return str(commit.commit_url)


def pull(repo_id: str, folder: Path, revision: str | None) -> str:
    """Download the repository into `folder`, and return its path.

    Raises:
        ConfigError: the Hub refused, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    with _explaining(repo_id):
        return str(snapshot_download(repo_id, revision=revision, local_dir=folder))


def model_card(repo_id: str, name: str, is_folder: bool, tags: list[str], metrics: Mapping[str, float]) -> str:
    """Return README.md: metadata, metrics, and how to load what is called `name`, "" for weights at the root."""
    from huggingface_hub import ModelCardData

    logged = {key: value for key, value in metrics.items() if key != "epoch"}
    about = ModelCardData(library_name="stratagem", tags=["stratagem", *tags], metrics=sorted(logged) or None)
    rows = "".join(f"| {key} | {value:.5g} |\n" for key, value in sorted(logged.items()))
    table = f"\n## Metrics\n\n| metric | value |\n|---|---|\n{rows}" if rows else ""
    return f"""---
{about.to_yaml()}
---

# {repo_id.rpartition("/")[2]}

Trained with stratagem.
{table}
## Load

```python
{_loading(repo_id, name, is_folder)}
```
"""


def _loading(repo_id: str, name: str, is_folder: bool) -> str:
    if not name:
        return (
            "from pathlib import Path\n\nfrom huggingface_hub import snapshot_download\n"
            "from safetensors.torch import load_file\n\n"
            f'files = Path(snapshot_download("{repo_id}")).glob("*.safetensors")\n'
            "weights = {name: tensor for file in files for name, tensor in load_file(file).items()}"
        )
    if is_folder:
        return (
            f'from huggingface_hub import snapshot_download\n\npath = snapshot_download("{repo_id}") + "/{name}"\n'
            "module = MyModule.load_from_checkpoint(path)"
        )
    return (
        f'from huggingface_hub import hf_hub_download\n\npath = hf_hub_download("{repo_id}", "{name}")\n'
        "module = MyModule.load_from_checkpoint(path)"
    )


@contextlib.contextmanager
def _explaining(repo_id: str) -> Iterator[None]:
    """Turn what the Hub answers into a ConfigError."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(
            f"the Hub refused {repo_id!r} ({reason})", expected="a repository to which the login may write",
            do="run `hf auth login`, or choose another repository",
        ) from error  # fmt: skip
