"""Packages that an image needs, at the versions installed here."""

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from systolic.core.errors import RunError

PACKAGE = "systolic"
IMAGE: Mapping[str, str] = {
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
"""Values of environment markers on the image's platform; the Python version is that of this process."""


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
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        new = asked.extras - seen.get(name, set())
        if name in seen and not new:
            continue
        seen.setdefault(name, set()).update(asked.extras)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name == PACKAGE:
                raise RunError(
                    f"{PACKAGE} is not installed in this environment, so its requirements are unknown; install it with pip"
                ) from None
            asked.marker = None
            loose[str(asked)] = None
            continue
        if name != PACKAGE:
            pins[name] = found.version
        waiting += _wanted(found, seen[name])
    return PackageLock(pins=dict(sorted(pins.items())), loose=tuple(sorted(loose)))


def _wanted(found: importlib.metadata.Distribution, extras: set[str]) -> list[Requirement]:
    """Requirements of a package that apply in the image."""
    made = [Requirement(text) for text in found.requires or ()]
    return [
        one
        for one in made
        if one.marker is None
        or any(one.marker.evaluate({**IMAGE, "extra": extra}) for extra in extras | {""})
    ]
