"""What a release is made of: one version everywhere, forms that GitHub reads, and a typed package."""

import tomllib

import pytest
import yaml

import systolic
from tests.house.budget import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == systolic.__version__ == CITATION["version"]
    assert f"## {systolic.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_has_the_fields_that_its_format_requires() -> None:
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys()
    assert CITATION["license"] == PROJECT["license"]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_ones_that_github_accepts(form) -> None:
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= content.keys()
    labels = [field["attributes"]["label"] for field in content["body"]]
    assert len(set(labels)) == len(labels)
    assert len({f["id"] for f in content["body"]}) == len(labels)
    assert {field["type"] for field in content["body"]} <= {
        "textarea",
        "input",
        "dropdown",
        "checkboxes",
    }


def test_the_package_is_typed() -> None:
    assert (ROOT / "src" / "systolic" / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_every_python_of_the_classifiers_is_one_that_is_admitted() -> None:
    minors = [c.rsplit(".", 1)[1] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert PROJECT["requires-python"] == f">=3.{min(map(int, minors))}"
