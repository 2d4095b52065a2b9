"""The reference of Python's names: what a caller gets and gives is documented, and no sentence is taken for a type."""

import inspect
from pathlib import Path
from typing import Any

import pytest

import systolic

napoleon = pytest.importorskip("sphinx.ext.napoleon")
pycode = pytest.importorskip("sphinx.pycode")

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``docs/_extensions/reference.py`` as Sphinx imports it."""
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    import reference

    return reference


def public() -> list[Any]:
    values = [getattr(systolic, name) for name in systolic.__all__]
    return [value for value in values if inspect.isclass(value) or inspect.isfunction(value)]


def test_what_functions_return_and_take_is_documented(reference: Any) -> None:
    names = {name for name, _ in reference.field_types(public())}
    returned = {"Plan", "LaunchState", "BatchProgress", "Rehearsal", "WrittenLaunch", "Stopped"}
    explained = {"StepExplanation", "StepComparison", "RunExplanation", "ProfileExplanation"}
    assert returned | explained | {"ProgramExplanation"} <= names
    assert {"Layout", "Checkpoints", "Watcher"} <= names


def test_no_sentence_is_a_type(reference: Any) -> None:
    """Napoleon takes what stands before a colon, at the beginning of a field or of ``Returns:``, for a type."""
    settings = napoleon.Config(napoleon_numpy_docstring=False)
    kinds = [kind for _, kind in reference.field_types(public())]
    owners = {*kinds, *(value for value in public() if inspect.isclass(value))}
    count = 0
    for owner in owners:
        analyzer = pycode.ModuleAnalyzer.for_module(owner.__module__)
        analyzer.analyze()
        for (path, name), lines in analyzer.attr_docs.items():
            if path != owner.__name__:
                continue
            words = [*lines]
            reference.untyped(None, "attribute", name, None, None, words)
            shown = napoleon.GoogleDocstring(words, settings, what="attribute").lines()
            assert not any(":type:" in line for line in shown), (owner, name, lines)
            assert lines[0].replace(":", "") in "".join(shown).replace(":", "")
            count += 1
    for function in filter(inspect.isfunction, public()):
        words = (inspect.getdoc(function) or "").splitlines()
        reference.untyped(None, "function", function.__name__, function, None, words)
        shown = napoleon.GoogleDocstring(words, settings, what="function").lines()
        assert not any(":rtype:" in line for line in shown), function
    assert count > 300
