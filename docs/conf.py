"""Configuration of the documentation site: ``sphinx-build -W -b html docs site`` (CONTRIBUTING.md)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

from importlib.metadata import version as version_of

project = "Systolic"
copyright = "the Systolic authors, Apache-2.0"
release = version_of("systolic")
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "outside",
    "reference",
    "recipes",
    "extras",
    "truth",
    "llms",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_extensions/*"]
nitpicky = False
suppress_warnings = ["ref.python"]  # `bytes` is a type and an attribute of several results

# Recorded, so that a build needs no network: the names that this documentation refers to, in Sphinx's first format.
RECORDED = Path(__file__).parent / "inventories"
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", str(RECORDED / "python.inv")),
    "numpy": ("https://numpy.org/doc/stable", str(RECORDED / "numpy.inv")),
    "jax": ("https://docs.jax.dev/en/latest", str(RECORDED / "jax.inv")),
}

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

smartquotes = False  # a dash of typography in place of the two hyphens of an option

html_theme = "furo"
html_title = f"Systolic {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {"source_directory": "docs/"}
