"""Whole profiles of chips, where they lie beside the repository; excerpts of them are in tests/recorded/chips."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXCERPTS = ROOT / "tests" / "recorded" / "chips"
FOLDERS = (ROOT.parent / "shared" / "profiles", ROOT.parents[1] / "shared" / "profiles")
HOST_OFFLOAD = "v6e-8-allreduce-host-offload.xplane.pb"
KERNEL = "v6e-1-pallas-matmul.xplane.pb"
BF16 = "tpu7x-1chip-tp2-qwen2.5-32b-bf16-1024tokens.trace.json.gz"
QUANTIZED = "tpu7x-1chip-tp2-qwen3-32b-quantized-a.trace.json.gz"


def whole(name: str) -> Path:
    """The file; the test is skipped where it is not there."""
    found = next((folder / name for folder in FOLDERS if (folder / name).is_file()), None)
    if found is None:
        pytest.skip(f"{name} does not lie in shared/profiles beside the repository")
    return found


def excerpt_or_whole(name: str, part: str) -> Path:
    """The excerpt of a file, or the file."""
    return EXCERPTS / name if part == "excerpt" else whole(name)
