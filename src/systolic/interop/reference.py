"""``python -m systolic.interop.reference``: logits of transformers for :mod:`systolic.interop.parity`.

Reads one JSON object from stdin: ``path`` of the model, ``rows`` of tokens, and ``out``, the .npz to write.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.machine import end_with


def compute(path: Path, rows: list[list[int]]) -> np.ndarray:
    """Logits float32[rows, tokens, vocab]; the model's own code, if it has any, is not executed."""
    import torch
    import transformers

    place: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.is_file():
        place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.float32, trust_remote_code=False
    ).eval()
    with torch.no_grad():
        return model(torch.tensor(rows), use_cache=False).logits.float().numpy()


def main() -> None:
    """Computes what stdin asks for."""
    end_with(os.getppid())
    import transformers

    asked = json.load(sys.stdin)
    transformers.logging.set_verbosity_error()
    logits = compute(Path(asked["path"]), asked["rows"])
    framework = f"transformers {transformers.__version__}"
    np.savez(asked["out"], logits=logits, framework=framework)


if __name__ == "__main__":
    main()
