"""Python imports this as it starts, since its folder is on PYTHONPATH: it prepares the capture of a JAX program.

The folder runs in the user's environment: standard library and that environment's jax only, Python 3.10 syntax.
"""

import importlib.machinery
import os
import sys


def _run_next():
    """Runs the ``sitecustomize`` that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        spec.loader.exec_module(module_from_spec(spec))


if os.environ.get("SYSTOLIC_CAPTURE"):
    import systolic_capture

    systolic_capture.install()
_run_next()
