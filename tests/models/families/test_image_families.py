"""ViT, ResNet and MobileNetV2 against transformers: logits, statistics, and weights there and back."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from systolic.core.errors import OptionError
from systolic.job import Field
from systolic.models.families import family
from systolic.models.vision.config import MobileNetV2
from systolic.steps import jaxpr
from tests.models.foreign import converted, relative, returned, saved, structure
from tests.tiers import some

VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 7,
}
RESNET: dict[str, Any] = {"embedding_size": 8, "num_labels": 7}
MOBILE: dict[str, Any] = {"num_labels": 7, "image_size": 48}
CASES = {
    "vit": ("ViT", VIT),
    "vit-tanh": ("ViT", {**VIT, "hidden_act": "gelu_pytorch_tanh", "qkv_bias": False}),
    "resnet-basic": (
        "ResNet",
        {**RESNET, "layer_type": "basic", "hidden_sizes": [8, 16, 32, 64], "depths": [2] * 4},
    ),
    "resnet-bottleneck": (
        "ResNet",
        {**RESNET, "hidden_sizes": [32, 64, 128, 256], "depths": [1] * 4},
    ),
    "mobilenet-tf": ("MobileNetV2", {**MOBILE, "depth_multiplier": 0.35}),
    "mobilenet-torch": (
        "MobileNetV2",
        {
            **MOBILE,
            "depth_multiplier": 0.35,
            "tf_padding": False,
            "layer_norm_eps": 1e-5,
            "finegrained_output": False,
        },
    ),
}
EVERY = pytest.mark.parametrize(
    "case", some(list(CASES), ("vit", "resnet-bottleneck", "mobilenet-tf"))
)


def made(kind: str, fields: dict[str, Any], seed: int = 0) -> Any:
    """A model of transformers whose norms and statistics are random."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**fields)
    module = getattr(transformers, f"{kind}ForImageClassification")(config).eval()
    for name, tensor in module.state_dict().items():
        if name.endswith(("running_var", "normalization.weight")):
            tensor.uniform_(0.5, 1.5)
        elif name.endswith(("running_mean", "bias")):
            tensor.normal_(std=0.3)
    return module


def normalised(image: np.ndarray, pixels: Any) -> torch.Tensor:
    """What transformers' processor makes of uint8[batch, height, width, channels]."""
    scaled = (image / 255 - np.array(pixels.mean)) / np.array(pixels.std)
    return torch.tensor(np.moveaxis(scaled, -1, 1), dtype=torch.float32)


@EVERY
def test_logits_are_those_of_transformers_and_weights_go_there_and_back(
    case: str, tmp_path: Path
) -> None:
    kind, fields = CASES[case]
    theirs = made(kind, fields)
    config, tensors = saved(theirs, tmp_path / "theirs")
    known = family(config, "the model")
    ours, arrays = converted(known, config, tensors)
    model: Any = known.model(config)
    size = fields.get("image_size", 64)
    image = np.random.default_rng(0).integers(0, 256, (2, size, size, 3), np.uint8)
    with torch.no_grad():
        expected = theirs(normalised(image, model.pixels)).logits.numpy()
    assert relative(jax.jit(ours)(image), expected) <= 1e-4
    counted = sum(parameter.numel() for parameter in theirs.parameters())
    assert structure(model).num_parameters == counted

    back = returned(known, config, arrays)
    assert set(back) == {name for name in tensors if "num_batches" not in name}
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, tensors[name].array)

    home = tmp_path / "ours"
    home.mkdir()
    save_file(
        {name: np.ascontiguousarray(value) for name, value in back.items()},
        home / "model.safetensors",
    )
    written = transformers.PretrainedConfig(**known.config(model))
    written.save_pretrained(home)
    again, report = getattr(transformers, f"{kind}ForImageClassification").from_pretrained(
        home, output_loading_info=True
    )
    assert not [name for name in report["missing_keys"] if "num_batches" not in name]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        logits = again.eval()(normalised(image, model.pixels)).logits.numpy()
    np.testing.assert_array_equal(logits, expected)
    assert known.model(known.config(model)) == model


@pytest.mark.parametrize(
    "case", some(["resnet-bottleneck", "mobilenet-torch"], ["resnet-bottleneck"])
)
def test_a_training_pass_normalises_as_torch_does(case: str, tmp_path: Path) -> None:
    kind, fields = CASES[case]
    theirs = made(kind, fields)
    config, tensors = saved(theirs, tmp_path)
    known = family(config, "the model")
    _, arrays = converted(known, config, tensors)
    model: Any = known.model(config)
    shape = structure(model)
    params = {path: arrays[path] for path in shape.params}
    state = {path: arrays[path] for path in shape.model_state}

    @jax.jit
    def train(image: Any) -> Any:
        module: Any = shape.module(params, state, train=True)
        return module(image), shape.variables(module)

    image = np.random.default_rng(1).integers(0, 256, (4, 64, 64, 3), np.uint8)
    theirs.train()
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.1
    with torch.no_grad():
        expected = theirs(normalised(image, model.pixels)).logits.numpy()
    logits, after = train(image)
    assert relative(logits, expected) <= 1e-3
    theirs_after = theirs.state_dict()
    stem = "resnet.embedder.embedder" if kind == "ResNet" else "mobilenet_v2.conv_stem.first_conv"
    running = theirs_after[f"{stem}.normalization.running_mean"].numpy()
    np.testing.assert_allclose(after["stem/norm/mean"], running, rtol=1e-4, atol=1e-5)


@EVERY
def test_flops_of_the_configuration_are_those_of_the_program(case: str) -> None:
    kind, fields = CASES[case]
    config = {**getattr(transformers, f"{kind}Config")(**fields).to_dict()}
    model: Any = family(config, "the model").model(config)
    # On a CPU some convolutions are sums of shifted pictures, in which no matmul is counted.
    shape = structure(model, platform="tpu")
    size = model.pixels.size

    def forward(params: Any, state: Any, image: Any) -> Any:
        module: Any = shape.module(params, state, train=False)
        return module(image)

    image = np.zeros((1, size, size, 3), np.uint8)
    assert model.flops({}) == jaxpr.count(forward, shape.params, shape.model_state, image)


def test_sizes_of_mobilenet_are_the_published_ones() -> None:
    """3,504,872 parameters and 300 million multiply-adds at 224 x 224 (torchvision's table of weights: 0.30 GMACs)."""
    model = MobileNetV2()
    assert structure(model).num_parameters == 3_504_872
    field = {"image": Field(shape=(224, 224, 3), dtype="uint8")}
    assert model.flops(field) / 2e6 == pytest.approx(300.8, abs=0.1)
    # Sandler et al. 2018, table 4: 6.9 million parameters and 585 million multiply-adds at 1.4.
    wide = MobileNetV2(multiplier=1.4)
    assert structure(wide).num_parameters / 1e6 == pytest.approx(6.1, abs=0.05)
    assert wide.flops(field) / 2e6 == pytest.approx(585, rel=0.01)
    assert MobileNetV2(multiplier=0.35).features == 1280
    assert wide.features == 1792


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("resnet", {"downsample_in_bottleneck": True}, "downsample_in_bottleneck is True"),
        ("resnet", {"depths": [3, 4, 6, 4]}, r"depths is \[3, 4, 6, 4\]"),
        ("resnet", {"hidden_sizes": [64, 128, 256, 512]}, "hidden_sizes is"),
        ("mobilenet_v2", {"output_stride": 16}, "output_stride is 16 and only 32"),
        ("vit", {"hidden_act": "swish"}, "hidden_act is 'swish'"),
        ("vit", {"image_size": [224, 192]}, "only squares"),
    ],
)
def test_what_is_not_followed_is_one_line(kind: str, fields: dict[str, Any], says: str) -> None:
    config = {"model_type": kind, **fields}
    with pytest.raises(OptionError, match=says) as caught:
        family(config, "it").model(config)
    assert "\n" not in str(caught.value)
