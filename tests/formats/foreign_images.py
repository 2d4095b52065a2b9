"""A small image model as transformers saves it, and a real picture."""

from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from sklearn.datasets import load_sample_images


def picture(folder: Path) -> Path:
    """The photograph of a palace that scikit-learn brings, 640 x 427."""
    file = folder / "china.png"
    Image.fromarray(load_sample_images().images[0]).save(file)
    return file


def resnet(folder: Path, *, names: bool = True) -> Any:
    """A narrow ResNet of seven classes whose answers differ."""
    labels = {"id2label": {number: f"kind {number}" for number in range(7)}} if names else {}
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 32, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        num_labels=7,
        **labels,
    )
    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(config).eval()
    for key, tensor in model.state_dict().items():
        if key.endswith("normalization.bias"):
            tensor.normal_(std=0.5)
        elif key == "classifier.1.weight":
            tensor.normal_()
    model.save_pretrained(folder)
    transformers.ConvNextImageProcessorPil(size={"shortest_edge": 64}).save_pretrained(folder)
    return model
