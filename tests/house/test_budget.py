"""Sizes stay in their budgets, and the check would see it if they didn't."""

from pathlib import Path

from tests.house.budget import (
    LONGEST_FILE,
    LONGEST_FUNCTION,
    ROOT,
    Excess,
    excesses,
    layers,
    unused_exceptions,
)


def test_everything_is_within_its_budget() -> None:
    assert excesses(ROOT) == []


def test_no_exception_is_left_over() -> None:
    assert unused_exceptions(ROOT) == []


def test_every_layer_is_counted() -> None:
    folders = {path.name for path in (ROOT / "src" / "systolic").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} <= set(layers(ROOT))


def test_what_is_too_large_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "systolic" / "core"
    folder.mkdir(parents=True)
    body = "    x = 1\n" * LONGEST_FUNCTION
    many = ", ".join("abcdefghi")
    (folder / "long.py").write_text(f"class A:\n  def f(self):\n{body}\ndef g({many}): ...\n")
    (folder / "huge.py").write_text("\n" * (LONGEST_FILE + 1))
    assert excesses(tmp_path) == [
        Excess("src/systolic/core/huge.py", "lines", 801, 800),
        Excess("src/systolic/core/long.py:A.f", "lines", 61, 60),
        Excess("src/systolic/core/long.py:g", "parameters", 9, 8),
    ]
    assert layers(tmp_path) == {"core": (2, 801 + 64)}
