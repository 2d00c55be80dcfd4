"""`DataModule`: loaders, and the code that makes them."""

from __future__ import annotations

from typing import Any

from stratagem.errors import ConfigError
from stratagem.training.hyperparameters import HyperparametersMixin
from stratagem.training.module import Module


class DataModule(HyperparametersMixin):
    """The loaders of one data set. Override the ones you need; each returns a DataLoader or a list of them."""

    #: False: `prepare_data` is called once in the whole run, rather than once on each node.
    prepare_data_per_node = True
    #: The trainer that uses it.
    trainer: Any = None

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
