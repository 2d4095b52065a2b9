"""Converts a model of another framework, in a process of its own: ``python -m systolic.formats.program.child REQUEST``."""

import importlib
import importlib.util
import json
import logging
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from systolic.core.errors import NotFoundError, OptionError, SystolicError, nearest

OUTCOME = "outcome.json"
"""File of the result: the description, or an error's class and line."""
FUNCTION = "model"
"""Function of a file where none is named."""


def main() -> int:
    """Writes the program into the request's folder; a mistake is told in its outcome."""
    request = json.loads(sys.argv[1])
    folder = Path(request["folder"])
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    try:
        from systolic.formats.program.export import write_program

        description = write_program(_function(request), folder)
        outcome: dict[str, Any] = {"description": asdict(description)}
    except SystolicError as error:
        outcome = {"error": type(error).__name__, "told": str(error)}
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(str(error).split("\n\n")[0].split())[:300]
        outcome = {
            "error": "RunError",
            "told": f"{request['source']} can't be converted: {type(error).__name__}: {reason}",
        }
    (folder / OUTCOME).write_text(json.dumps(outcome))
    return 0


def _function(request: dict[str, Any]) -> Any:
    """The pure function of a request's source, by the function that reads its format."""
    module, _, name = request["read"].partition(":")
    read = vars(importlib.import_module(module))[name]
    return read(request["source"], request["signature"], _example(request["example"]))


def keras_file(source: str, signature: str | None, example: Any) -> Any:
    """The function of a .keras file.

    Args:
        source: The file.
        signature: Ignored: the file has none.
        example: Example inputs by name; ``None`` for random ones.
    """
    from systolic.models.program.keras_function import keras_function, load_file

    del signature
    model = load_file(source)
    return keras_function(model if example is None else (model, example), source)


def _example(path: str | None) -> Any:
    """Arrays of an ``.npz`` file by name.

    Raises:
        NotFoundError: there is no such file, or it is none of numpy's.
    """
    import numpy as np

    if path is None:
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError) as error:
        raise NotFoundError(
            f"{path} can't be read as an .npz file ({error}); write it with numpy.savez"
        ) from error


def function_in_file(target: str, signature: str | None, example: Any) -> Any:
    """The function of what ``file.py:function`` returns: a PyTorch module with inputs, or a Keras model.

    Args:
        target: The file and its function.
        signature: Ignored: code has none.
        example: Ignored: the function returns its own inputs.

    Raises:
        NotFoundError: no such file or function.
        OptionError: the file or the function fails.
        DataError: it returned something else.
    """
    from systolic.models.program.config import made_by
    from systolic.models.program.keras_function import keras_function
    from systolic.models.program.torch_function import torch_function

    del signature, example
    name, colon, named = target.rpartition(":")
    path, wanted = (Path(name), named) if colon else (Path(target), FUNCTION)
    if not path.is_file():
        raise NotFoundError(f"{path} is not a file; give a Python file as path/to/file.py:function")
    text = path.read_text(errors="replace")
    framework = "keras" if "keras" in text and "torch" not in text else "torch"
    function = _defined(path, wanted)
    result = made_by(function, framework, target)
    keras = sys.modules.get("keras")
    model = result[0] if isinstance(result, tuple) and result else result
    if keras is not None and isinstance(model, keras.Model):
        return keras_function(result, target)
    return torch_function(result, target)


def _defined(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise NotFoundError(f"{path} can't be imported as Python; give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise OptionError(f"{path} failed to import: {type(error).__name__}: {error}") from error
    functions = {key: value for key, value in vars(module).items() if callable(value)}
    if name not in functions:
        raise NotFoundError(
            f"{path} has no function {name}{nearest(name, functions)}; it must return a PyTorch module with example inputs, or a Keras model"
        )
    return functions[name]


if __name__ == "__main__":
    raise SystemExit(main())
