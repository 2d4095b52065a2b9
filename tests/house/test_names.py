"""No dead public name, one class of each name, no attribute asked for by luck; and the checks would see one."""

from pathlib import Path

from tests.house.budget import ROOT
from tests.house.names import by_luck, dead, doubles, missing

PUBLIC: dict[str, str] = {
    "systolic/serving/http/process.py:Process.handle_exit": "uvicorn calls it",
    "systolic/recipes/folder/bytecode.py:Unwritten.set_data": "importlib calls it",
    "systolic/hlo/shape.py:VMEM": "one of the memory spaces that the parser tells apart",
}
"""Names for users of the package that nothing here uses, with the reason."""

FOREIGN: dict[str, str] = {
    "systolic/aot/child.py:places:slice_index": "devices of JAX's plugins, of which some have none",
    "systolic/aot/functions.py:_placed:shape": "leaves of anyone's arguments",
    "systolic/aot/traced.py:name_of:__name__": "anyone's callable",
}
"""``path:function:attribute`` of values of other projects."""


def test_no_public_name_is_dead() -> None:
    assert sorted(set(dead(ROOT)) - set(PUBLIC)) == []
    assert sorted(set(PUBLIC) - set(dead(ROOT))) == [], "an exception is left over"


def test_one_class_of_each_name() -> None:
    assert doubles(ROOT) == {}


def test_scripts_import_what_is_there(tmp_path: Path) -> None:
    assert missing(ROOT) == []
    (tmp_path / "src" / "systolic").mkdir(parents=True)
    (tmp_path / "src" / "systolic" / "here.py").write_text("def known(): ...")
    (tmp_path / "benchmarks").mkdir()
    script = "from systolic.here import known, gone\nfrom systolic.away import known"
    (tmp_path / "benchmarks" / "run.py").write_text(script)
    assert [line.split(" imports ")[1] for line in missing(tmp_path)] == [
        "systolic.here.gone",
        "systolic.away.known",
    ]


def test_attributes_are_known() -> None:
    assert by_luck(ROOT) == sorted(FOREIGN)


ONE = '''
"""Text that has the word unused, and `LIMIT`."""
LIMIT = 3
SHARE = 1.0
LEAST: int = 2
_PRIVATE = 1
def used(x): return LEAST
def unused(x): return unused(getattr(x, "size", 0))
class Part:
    def read(self): return hasattr(self, "size")
    def kept(self): return self.read()
    def never(self): pass
    def shown(self): pass
class Alone:
    pass
'''


def test_a_planted_name_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "src" / "systolic"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from systolic.one import Alone, unused\n__all__ = ['Alone']\n"
    )
    (package / "one.py").write_text(ONE)
    (package / "two.py").write_text("from systolic.one import Part, used\nclass Alone: ...\n")
    (tmp_path / "README.md").write_text("Nothing is unused: `LIMIT` is 3.\n")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "run.py").write_text("print(part.kept())\n")
    (package / "page.html").write_text("<p>SHARE {{ part.shown() }}</p>")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("from systolic.one import Alone, unused\n")
    assert dead(tmp_path) == [
        "systolic/one.py:Alone",
        "systolic/one.py:Part.never",
        "systolic/one.py:SHARE",
        "systolic/one.py:unused",
        "systolic/two.py:Alone",
    ]
    assert doubles(tmp_path) == {"Alone": ["systolic/one.py", "systolic/two.py"]}
    assert by_luck(tmp_path) == ["systolic/one.py:read:size", "systolic/one.py:unused:size"]
