"""A ResNet-50 on images of 224 x 224; docs/advise.md asks for advice about it."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg


def convolution(inputs, outputs, size, stride=1):
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.first, self.second = convolution(inputs, width, 1), convolution(width, width, 3, stride)
        self.third = convolution(width, 4 * width, 1)
        self.same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if self.same else convolution(inputs, 4 * width, 1, stride)

    def forward(self, x):
        return F.relu(self.third(F.relu(self.second(F.relu(self.first(x))))) + self.shortcut(x))


class ResNet(sg.Module):
    def __init__(self):
        super().__init__()
        layers, inputs = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
        for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for number in range(count):
                layers.append(Bottleneck(inputs, width, 2 if number == 0 and width > 64 else 1))
                inputs = 4 * width
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))

    def training_step(self, batch):
        images, labels = batch
        return F.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.zeros(3, 224, 224), index % 1000


sg.Trainer(max_epochs=90).fit(ResNet(), torch.utils.data.DataLoader(Images(), batch_size=256))
