"""`DataModule`: loaders, and the code that makes them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from stratagem.errors import ConfigError
from stratagem_trainer.hyperparameters import HyperparametersMixin
from stratagem_trainer.module import Module


class DataModule(HyperparametersMixin):
    """The loaders of one data set. Override the ones you need; each returns a DataLoader or a list of them."""

    #: False: `prepare_data` is called once in the whole run, rather than once on each node.
    prepare_data_per_node = True
    #: The trainer that uses it.
    trainer: Any = None

    @classmethod
    def from_datasets(
        cls, train_dataset: Any = None, val_dataset: Any = None, test_dataset: Any = None, predict_dataset: Any = None,
        batch_size: int = 1, num_workers: int = 0, **arguments: Any
    ) -> DataModule:  # fmt: skip
        """Make one from data sets, of which each may be a list; training data are shuffled, unless they are iterables.

        Args:
            arguments: of ``__init__``, which gets `batch_size` and `num_workers`, too, if it takes them.
        """
        from torch.utils.data import DataLoader, IterableDataset

        def loaders(given: Any, shuffle: bool = False) -> Any:
            if isinstance(given, list | tuple):
                return [loaders(each, shuffle) for each in given]
            shuffle = shuffle and not isinstance(given, IterableDataset)
            return DataLoader(given, batch_size, shuffle=shuffle, num_workers=num_workers)

        parameters = inspect.signature(cls).parameters.values()
        taken = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        given = {"batch_size": batch_size, "num_workers": num_workers}
        module = cls(**arguments | {name: value for name, value in given.items() if takes_all or name in taken})
        stages = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for stage, given in stages.items():
            if given is not None:
                vars(module)[f"{stage}_dataloader"] = functools.partial(loaders, given, stage == "train")
        return module

    def prepare_data(self) -> None:
        """Download and preprocess; called once on each node, before `setup`."""

    def setup(self, stage: str) -> None:
        """Build data sets; called in every process. `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Release what `setup` built; called in every process."""

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints store: tensors, numbers, strings, containers of these. Rank 0's is stored."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; called on all ranks before a loader is made."""

    def on_exception(self, exception: BaseException) -> None:
        """Release resources when a call ends with `exception`."""

    #: Called instead of the module's, if it is defined here.
    on_before_batch_transfer = Module.on_before_batch_transfer
    #: Called instead of the module's, if it is defined here.
    transfer_batch_to_device = Module.transfer_batch_to_device
    #: Called instead of the module's, if it is defined here.
    on_after_batch_transfer = Module.on_after_batch_transfer

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "trainer"}

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        raise ConfigError(f"{type(self).__name__} has no train_dataloader", expected="one, to fit")

    def val_dataloader(self) -> Any:
        """Return the validation loader or loaders; None means no validation."""
        return None

    def test_dataloader(self) -> Any:
        """Return the test loader or loaders."""
        raise ConfigError(f"{type(self).__name__} has no test_dataloader", expected="one, to test")

    def predict_dataloader(self) -> Any:
        """Return the loader or loaders to predict on."""
        raise ConfigError(f"{type(self).__name__} has no predict_dataloader", expected="one, to predict")
