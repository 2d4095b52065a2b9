"""Rules and fields that the families of image models share."""

from typing import Any

from systolic.core.errors import OptionError
from systolic.models.families import Config
from systolic.models.mapping import Rule, kernel, matrix, plain

BUFFERS = (r".*num_batches_tracked",)
"""Counters of PyTorch's batch norms, which nothing reads."""


def conv_norm(ours: str, convolution: str, norm: str) -> list[Rule]:
    """Rules of a convolution without bias and its batch norm, statistics included.

    Args:
        ours: Path of the pair.
        convolution: Name of the convolution's module in the file.
        norm: Name of the batch norm's.
    """
    return [
        kernel(f"{ours}/kernel", f"{convolution}.weight"),
        plain(f"{ours}/norm/scale", f"{norm}.weight"),
        plain(f"{ours}/norm/bias", f"{norm}.bias"),
        plain(f"{ours}/norm/mean", f"{norm}.running_mean"),
        plain(f"{ours}/norm/var", f"{norm}.running_var"),
    ]


def head(theirs: str, features: int, num_classes: int) -> list[Rule]:
    """Rules of the linear layer from features to logits."""
    return [
        matrix("head/kernel", f"{theirs}.weight", (features, num_classes)),
        plain("head/bias", f"{theirs}.bias"),
    ]


def num_classes(config: Config) -> int:
    """Classes of an image model's config.json; transformers takes 2 where it says nothing."""
    return len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)


def labels(config: Config) -> tuple[str, ...]:
    """Names of the classes in their order; () where the file has only transformers' LABEL_0, LABEL_1, ...

    Of equal names, such as ImageNet's two cranes, the later have their number behind them.
    """
    by_number = config.get("id2label") or {}
    names = {int(number): str(name) for number, name in by_number.items()}
    if all(name == f"LABEL_{number}" for number, name in names.items()):
        return ()
    class_names: list[str] = []
    for number in range(len(names)):
        name = names.get(number, str(number))
        class_names.append(f"{name} ({number})" if name in class_names else name)
    return tuple(class_names)


def side(config: Config, name: str, default: int) -> int:
    """Pixels on a side of a square that a config.json gives as one number or two.

    Raises:
        OptionError: it is not square.
    """
    size: Any = config.get(name, default)
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) > 1:
        raise OptionError(f"{name} is {size} and only squares are known")
    return sides.pop()


def require(config: Config, **known: Any) -> None:
    """Refuses a config.json whose fields have other values than those known.

    Raises:
        OptionError: a field has another value.
    """
    for name, value in known.items():
        if config.get(name, value) != value:
            raise OptionError(f"{name} is {config[name]!r} and only {value!r} is known")
