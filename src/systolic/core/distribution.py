"""This package as others install it: its requirements at the versions installed here, and a wheel of the running files."""

import base64
import hashlib
import importlib.metadata
import io
import platform
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from systolic.core.errors import RunError
from systolic.core.files import write_atomically

PACKAGE = "systolic"
IMAGE: Mapping[str, str] = {
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
"""Values of environment markers on the image's platform; the Python version is that of this process."""
TAG = "py3-none-any"
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Date of all files; makes the wheel reproducible."""
LEFT_OUT = ("__pycache__",)


@dataclass(frozen=True, kw_only=True)
class PackageLock:
    """Packages of an image."""

    pins: Mapping[str, str]
    """Versions by name, sorted by name."""
    loose: tuple[str, ...]
    """Requirements that are not installed here, unchanged."""

    def text(self) -> str:
        """Content of requirements.txt."""
        lines = [
            f"# Made by systolic export --to docker from the packages installed where it ran, for Python {python()} on Linux x86-64.",
            *(f"{name}=={version}" for name, version in self.pins.items()),
        ]
        return "\n".join(lines) + "\n"


def python() -> str:
    """Major and minor version of Python, ``3.11``."""
    return ".".join(platform.python_version_tuple()[:2])


def lock(extras: Iterable[str], packages: Iterable[str]) -> PackageLock:
    """Resolves this package's requirements, with those of its dependencies.

    Args:
        extras: Extras of this package.
        packages: Further packages, such as ``tokenizers``.

    Raises:
        RunError: this package is only on the path, not installed.
    """
    pins: dict[str, str] = {}
    loose: dict[str, None] = {}
    seen: dict[str, set[str]] = {}
    waiting = [Requirement(f"{PACKAGE}[{','.join(extras)}]"), *map(Requirement, packages)]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        new = requirement.extras - seen.get(name, set())
        if name in seen and not new:
            continue
        seen.setdefault(name, set()).update(requirement.extras)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name == PACKAGE:
                raise RunError(
                    f"{PACKAGE} is not installed in this environment, so its requirements are unknown; install it with pip"
                ) from None
            requirement.marker = None
            loose[str(requirement)] = None
            continue
        if name != PACKAGE:
            pins[name] = package.version
        waiting += _wanted(package, seen[name])
    return PackageLock(pins=dict(sorted(pins.items())), loose=tuple(sorted(loose)))


def _wanted(package: importlib.metadata.Distribution, extras: set[str]) -> list[Requirement]:
    """Requirements of a package that apply in the image."""
    requirements = [Requirement(text) for text in package.requires or ()]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None
        or any(requirement.marker.evaluate({**IMAGE, "extra": extra}) for extra in extras | {""})
    ]


def write_wheel(folder: Path) -> Path:
    """Writes the wheel into a folder.

    Format: https://packaging.python.org/en/latest/specifications/binary-distribution-format/

    Raises:
        RunError: the disk is full.
    """
    about = importlib.metadata.distribution(PACKAGE)
    stem = f"{PACKAGE}-{about.version}"
    root = Path(__file__).parents[1]
    contents = {
        f"{PACKAGE}/{file.relative_to(root).as_posix()}": file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file() and not set(LEFT_OUT) & set(file.parts)
    }
    info = f"{stem}.dist-info"
    for name in ("METADATA", "entry_points.txt"):
        contents[f"{info}/{name}"] = (about.read_text(name) or "").encode()
    contents[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: {PACKAGE}\nRoot-Is-Purelib: true\nTag: {TAG}\n".encode()
    )
    record = f"{info}/RECORD"
    rows = [f"{name},{_digest(raw)},{len(raw)}" for name, raw in contents.items()]
    contents[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    wheel = folder / f"{stem}-{TAG}.whl"
    raw_wheel = io.BytesIO()
    with zipfile.ZipFile(raw_wheel, "w", zipfile.ZIP_DEFLATED) as out:
        for name, raw in contents.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr = 0o644 << 16
            out.writestr(entry, raw, zipfile.ZIP_DEFLATED)
    write_atomically(wheel, raw_wheel.getvalue())
    return wheel


def _digest(raw: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
