"""Measures of a small tree, counted by hand."""

from pathlib import Path

from tests.house.measure import measures, text


def test_a_small_tree(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "systolic" / "core"
    folder.mkdir(parents=True)
    (folder / "long.py").write_text(
        "def f():\n" + "    x = 1\n" * 40 + "def g():\n" + "    x = 1\n" * 39
    )
    (folder / "huge.py").write_text("\n" * 301)
    (folder / "edge.py").write_text("\n" * 300)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("\n" * 7)
    found = measures(tmp_path)
    assert found["packages"] == {
        "core": {"files": 3, "lines": 81 + 301 + 300},
        "tests": {"files": 1, "lines": 7},
    }
    assert found["source"] == {"files": 3, "lines": 682}
    assert found["functions"] == {"core/long.py:f": 41}
    assert found["files"] == {"core/huge.py": 301}
    assert "1 functions of the package over 40 lines\n    41 core/long.py:f" in text(found)
