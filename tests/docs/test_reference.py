"""The reference of the site: options of recipes, guides of verbs, names of Python, and what the site's configuration promises."""

import re
import sys
import types
from pathlib import Path

import pytest

import systolic
from systolic.cli.main import VERBS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HELPS = ROOT / "tests" / "golden" / "train"


@pytest.fixture
def extensions(monkeypatch):
    """``reference`` and ``recipes`` as Sphinx imports them, without Sphinx."""
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    for name in ("docutils", "docutils.nodes", "sphinx", "sphinx.ext", "sphinx.ext.napoleon"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["docutils"].nodes = sys.modules["docutils.nodes"]
    sys.modules["sphinx.ext.napoleon"].GoogleDocstring = str
    import recipes
    import reference

    # It changes the classes themselves, which other tests of this process read.
    monkeypatch.setattr(reference, "_without_ranges", lambda kind: None)
    yield reference, recipes
    for name in ("reference", "recipes"):
        sys.modules.pop(name)


@pytest.mark.parametrize("path", sorted(HELPS.glob("*.txt")), ids=lambda path: path.stem)
def test_recipe_pages_have_every_option_of_the_help(extensions, path):
    page = extensions[1].page(path.stem, path.read_text())
    rows = {
        row[0]: row
        for row in re.findall(r"^\| `(--[\w.-]+)` \| (.+?) \| (.+?) \| .* \|$", page, re.M)
    }
    assert set(rows) == set(re.findall(r"^  (--[a-z][\w.-]*)", path.read_text(), re.M))
    assert "## --layout" in page
    _, values, default = rows["--layout.remat"]
    assert (values, default) == ("`{none, minimal, save-names, offload, full}`", "`none`")
    assert rows["--layout.accumulate"][2] == ("-" if path.stem in ("mlm", "sft") else "`1`")


def test_the_help_is_read_with_and_without_frames(extensions):
    framed = "\n".join(
        [
            "usage: systolic train lm [-h] [OPTIONS]",
            "",
            "Trains a decoder.",
            "",
            "╭─ options ─────────────╮",
            "│ -h, --help            │",
            "│       shows this      │",
            "│ --path {None}|PATH    │",
            "│       Text. (default: │",
            "│       None)           │",
            "╰───────────────────────╯",
            "╭─ guard options ───────╮",
            "│ A loss that jumps.    │",
            "│ ───────────────────── │",
            "│ --guard.jump FLOAT    │",
            "│       A|B (default:   │",
            "│       3.0)            │",
            "╰───────────────────────╯",
        ]
    )
    head, (options, guard) = extensions[1].groups(framed)
    assert head == "Trains a decoder."
    assert options.options == [("--path", "PATH", "", "Text.")]
    assert (guard.title, guard.text) == ("guard options", "A loss that jumps.")
    assert guard.options == [("--guard.jump", "FLOAT", "3.0", "A|B")]
    assert "| `--guard.jump` | `FLOAT` | `3.0` | A\\|B |" in extensions[1].page("lm", framed)


def test_every_verb_leads_to_a_guide_that_names_it(extensions):
    guides = extensions[0].GUIDES
    assert set(guides) == set(VERBS)
    second = {f"{verb}-{word}" for verb, words in extensions[0].SECOND.items() for word in words}
    assert second == {path.stem for path in (HELPS.parent / "help").glob("*-*.txt")}
    for verb, pages in guides.items():
        for page in pages:
            assert re.search(
                rf"`?systolic[. ]{verb}\b|`{verb}`", (DOCS / f"{page}.md").read_text()
            ), (verb, page)


def test_pages_of_python_have_every_public_name_and_no_internal_writing(extensions):
    pages = extensions[0].python_pages(systolic)
    whole = "".join(pages.values())
    for name in set(systolic.__all__) - {"__version__"}:
        assert f"\n### systolic.{name}\n" in whole, name
        assert f"| [`{name}`](" in pages["python.md"], name
    assert ".. py:function:: systolic.chips() -> tuple[systolic." in whole
    signature = extensions[0].signature
    for name in ("serve", "plan", "plan_serving", "forecast", "AnswerOptions", "Forecast"):
        value = getattr(systolic, name)
        shown, _ = signature(
            None, "class" if isinstance(value, type) else "function", name, value, None, "", ""
        )
        assert not re.search(r"<|Annotated|Range\(", shown), (name, shown)


def test_hyphens_of_options_stay_hyphens():
    assert re.search(r"^smartquotes = False", (DOCS / "conf.py").read_text(), re.M)
    pages = [page for page in DOCS.rglob("*.md") if re.search(r"[\s(|]–[a-z]", page.read_text())]
    assert pages == []


def test_measurements_and_the_log_are_not_searched():
    assert (DOCS / "log.md").read_text().startswith("---\nnosearch: true\n---\n")


def test_files_that_pages_offer_exist():
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\{download\}`[^`<]*<([^>]+)>`", page.read_text()):
            assert (page.parent / target).is_file(), (page.name, target)


def test_the_page_on_installing_has_every_extra(monkeypatch):
    import tomllib

    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    import extras

    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.FOR) == set(known["optional-dependencies"])
    assert (
        "| `cuda` | training and serving on NVIDIA GPUs, with CUDA 12 from pip | `jax[cuda12]"
        in extras.extras_table()
    )
    assert "| Python | >=3.11 |\n| `jax` | >=0.10.2,<0.13 |" in extras.versions_table()
    page = (DOCS / f"{extras.PAGE}.md").read_text()
    assert set(extras.MARK.findall(page)) == set(extras.TABLES)
    assert {*re.findall(r"\w+", " ".join(re.findall(r"systolic\[([\w,]+)\]", page)))} <= set(
        extras.FOR
    )


def test_the_page_on_variables_has_those_that_the_package_reads():
    text = (DOCS / "environment.md").read_text()
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.jinja")]
    names = set(
        re.findall(r"\b(?:SYSTOLIC|XDG)_[A-Z_]+\b", "".join(path.read_text() for path in files))
    )
    between_processes = {"SYSTOLIC_CAPTURE", "SYSTOLIC_CAPTURE_LENT", "SYSTOLIC_COMPILING"}
    assert names - between_processes == set(
        re.findall(r"^\| `((?:SYSTOLIC|XDG)_[A-Z_]+)`", text, re.M)
    )


def test_links_of_pages_to_the_reference_lead_to_its_pages(extensions):
    """Written before each build, these pages are in no checkout, so that links to them are roles."""
    reference = DOCS / "reference"
    known = {reference / name for name in ("command-line", "recipes")}
    known |= {reference / "command-line" / verb for verb in VERBS}
    known |= {reference / "recipes" / path.stem for path in HELPS.glob("*.txt")}
    known |= {reference / name.removesuffix(".md") for name in extensions[0].python_pages(systolic)}
    links = [
        (page.parent / target).resolve()
        for page in [*DOCS.glob("*.md"), *DOCS.glob("guides/*.md"), *DOCS.glob("start/*.md")]
        for target in re.findall(r"\{doc\}`[^`<]*<([^>]+)>`", page.read_text())
    ]
    assert len(links) > 15
    assert [link for link in links if link not in known] == []
