"""Small images of two kinds."""

from typing import Any, Dict, Optional, Tuple

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class DigitsDataModule(LightningDataModule):
    """Images whose brighter half is their class."""

    def __init__(self, batch_size: int = 64, samples: int = 256, pin_memory: bool = False) -> None:
        super().__init__()

        # this line allows to access init params with 'self.hparams' attribute
        self.save_hyperparameters(logger=False)

        self.data_train: Optional[Dataset] = None
        self.data_val: Optional[Dataset] = None
        self.data_test: Optional[Dataset] = None
        self.batch_size_per_device = batch_size

    @property
    def num_classes(self) -> int:
        return 2

    def prepare_data(self) -> None:
        torch.manual_seed(0)

    def setup(self, stage: Optional[str] = None) -> None:
        if self.trainer is not None:
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.data_train and not self.data_val and not self.data_test:
            images = torch.rand(self.hparams.samples, 1, 4, 4)
            labels = (images[:, 0, :2].mean((1, 2)) > images[:, 0, 2:].mean((1, 2))).long()
            count = self.hparams.samples // 4
            self.data_train, self.data_val, self.data_test = random_split(
                dataset=TensorDataset(images, labels),
                lengths=[self.hparams.samples - 2 * count, count, count],
                generator=torch.Generator().manual_seed(42),
            )

    def _loader(self, data: Any, shuffle: bool) -> DataLoader:
        return DataLoader(data, self.batch_size_per_device, pin_memory=self.hparams.pin_memory, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[Tuple[torch.Tensor, torch.Tensor]]:
        return self._loader(self.data_train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.data_val, shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.data_test, shuffle=False)

    def teardown(self, stage: Optional[str] = None) -> None:
        pass

    def state_dict(self) -> Dict[Any, Any]:
        return {}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        pass
