"""Whether every extra resolves on every Python, from nothing: ``python -m tests.house.extras`` (needs ``pip install uv`` and PyPI)."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator

from tests.house.budget import ROOT

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
WITHOUT = {("tf", "3.14")}
"""Extras that a Python has no wheels for: https://pypi.org/project/tensorflow/2.21.0/#files."""


def resolutions() -> Iterator[tuple[str, str, int, str]]:
    """Python, extra, number of packages (0 where there is no solution) and the resolver's last line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for python in PYTHONS:
        for extra in ("", *project["optional-dependencies"]):
            options = ["--extra", extra] if extra else []
            resolver = subprocess.run(
                [
                    "uv",
                    "pip",
                    "compile",
                    "-q",
                    "--python-version",
                    python,
                    *options,
                    "pyproject.toml",
                ],
                capture_output=True,
                text=True,
                cwd=ROOT,
            )
            words = (resolver.stderr.strip().splitlines() or [""])[-1].strip()
            count = resolver.stdout.count("==") if resolver.returncode == 0 else 0
            yield python, extra or "no extra", count, words


def main() -> int:
    """Prints a line each; 1 where one that has to resolve does not."""
    failed = 0
    for python, extra, packages, words in resolutions():
        expected = (extra, python) not in WITHOUT
        print(f"{python}  {extra:<10} {packages or 'no solution':>4}  {'' if packages else words}")
        failed += expected and not packages
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
