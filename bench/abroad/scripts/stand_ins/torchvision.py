"""Stands in for torchvision: random images, transforms that do nothing, one tiny network."""

import sys
from types import ModuleType, SimpleNamespace

import torch

__version__ = "0"
COUNT = 192  # images of a training set; a third of it for others


class Images(torch.utils.data.Dataset):
    def __init__(self, channels, size, transform, count):
        self.shape, self.transform, self.count = (channels, size, size), transform, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        draw = torch.Generator().manual_seed(index)
        image = torch.randn(self.shape, generator=draw)
        return (self.transform(image) if self.transform else image), index % 10


class Network(torch.nn.Module):
    def __init__(self, *_, **__):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, stride=2)
        self.hidden = torch.nn.Linear(4, 2048)
        self.norm = torch.nn.BatchNorm1d(2048)
        self.fc = torch.nn.Linear(2048, 10)

    def forward(self, images):
        pooled = self.conv(images).relu().mean((2, 3))
        return self.fc(self.norm(self.hidden(pooled)))


def images(channels, size):
    def dataset(root, transform=None, train=True, download=False, **_):
        few = not train or "val" in str(root)
        return Images(channels, size, transform, COUNT // 3 if few else COUNT)

    return dataset


class ImageFolder(Images):
    def __init__(self, root, transform=None):
        super().__init__(3, 16, transform, COUNT // 3 if "val" in str(root) else COUNT)


class Nothing(ModuleType):
    """A module in which each name makes something that returns what it is given."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: lambda value: value


datasets, models, utils = (ModuleType(f"torchvision.{name}") for name in ("d", "m", "u"))
transforms = Nothing("torchvision.transforms")
transforms.InterpolationMode = SimpleNamespace(BICUBIC=3)
datasets.MNIST, datasets.CIFAR10 = images(1, 28), images(3, 32)
datasets.CelebA = images(3, 64)
datasets.ImageFolder = ImageFolder
models.resnet50 = models.resnet18 = Network
models.__path__, models.resnet = [], ModuleType("torchvision.models.resnet")
models.VGG16_Weights = models.vgg16 = Network
models.resnet.Bottleneck = models.resnet.ResNet = Network
sys.modules["torchvision.models.resnet"] = models.resnet
utils.save_image = lambda *_, **__: None
for name in ("datasets", "models", "utils", "transforms"):
    sys.modules[f"torchvision.{name}"] = globals()[name]


class Plain(Images):
    """Images in [0, 1] without labels."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0].sigmoid()
