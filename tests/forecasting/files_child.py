"""Calls a benchmark's ``main`` with lines that name missing and damaged files; prints code and stderr of each as JSON."""

import contextlib
import io
import json
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    folder, module, *cases = sys.argv[1:]
    sys.path.insert(0, folder)
    run = import_module(module)
    found = []
    for case in cases:
        sys.argv = [str(Path(folder) / f"{module}.py"), *json.loads(case)]
        told, shown = io.StringIO(), io.StringIO()
        code = 0
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(shown):
            try:
                run.main()
            except SystemExit as stop:
                code = stop.code
        found.append({"code": code, "err": told.getvalue(), "out": shown.getvalue()})
    print(json.dumps(found))


main()
