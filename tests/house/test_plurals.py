"""Counts in reports and plans are written by ``plural``: no ``1 chips``."""

import ast
import re
from pathlib import Path

import systolic

SOURCE = Path(systolic.__file__).parent
NOUNS = (
    "batches|candidates|chips|devices|engines|events|evaluations|hosts|layouts|lines|ops|programs"
    "|replicas|requests|rows|runs|slices|steps|texts|trials"
)
COUNTED = re.compile(rf" (?:more |other |short )?(?:{NOUNS})\b(?! of a)")
KNOWN = {
    "{demand.requests_per_second:g} requests": "a rate",
    "{state.requests_per_second:.3g} requests": "a rate",
    "{_texts(state.requests)} texts": "a mean",
    "{on.num_slices} slices": "of several, of which some are drawn",
    "{_headroom(fleet.headroom)} more requests": "a share",
    "{engines:,} engines": "of several",
    "}} slices": "of several",
    "{num_evals:,} evaluations": "of more than the most that are drawn",
}
"""Numbers that are no counts from one on, and why."""


def test_counts_of_one_are_singular() -> None:
    found = []
    for path in (file for name in ("report", "planning") for file in (SOURCE / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.JoinedStr):
                continue
            for number, text in zip(node.values, node.values[1:], strict=False):
                if not isinstance(number, ast.FormattedValue) or not isinstance(text, ast.Constant):
                    continue
                if words := COUNTED.match(str(text.value)):
                    one = ast.unparse(ast.JoinedStr([number]))[2:-1] + words[0]
                    found += [] if one in KNOWN else [f"{path.name}: {one}"]
    for path in (SOURCE / "report").rglob("*.html"):
        counted = re.findall(rf"\}}\}}{COUNTED.pattern}", path.read_text(encoding="utf-8"))
        found += [f"{path.name}: {one}" for one in counted if one not in KNOWN]
    assert not found, "write these with systolic.core.units.plural"
