"""An entry of the program store as a small record: ``python -m tests.recorded.hlo.record FOLDER NAME``.

Leaves NAME.hlo.gz and NAME.json here. The machine code of Pallas kernels is dropped, and folders of
this machine are cut from the names of source files; all else is as the compiler printed it.
"""

import gzip
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
_BODY = re.compile(r'("body":")[^"]*(")')
_FOLDER = re.compile(r'(\d+ ")/[^"]*?/(src/|tests/|site-packages/|lib/python)')


def clean(text: str) -> str:
    """The module without kernels' bodies and without this machine's folders."""
    return _FOLDER.sub(r"\1\2", _BODY.sub(r"\1\2", text))


def record(entry: Path, name: str) -> None:
    """Writes the two files."""
    text = clean(gzip.decompress((entry / "module.hlo.gz").read_bytes()).decode())
    (HERE / f"{name}.hlo.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    report = json.loads((entry / "report.json").read_text())
    (HERE / f"{name}.json").write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]), sys.argv[2])
