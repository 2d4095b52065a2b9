"""Three train steps of a tiny Whisper under several layouts on 8 virtual devices; prints their losses as JSON."""

import json

from systolic.job import Layout, Remat
from tests.models import speech

ONE = Layout(data=1, fsdp=1)
LAYOUTS = {
    "plain": ONE,
    "split": Layout(data=2, fsdp=2, tensor=2),
    "full": Layout(data=1, fsdp=1, remat=Remat.full),
    "named": Layout(data=1, fsdp=1, remat=Remat.save_names, remat_names=("query", "mlp")),
}

if __name__ == "__main__":
    losses = {name: speech.run(speech.steps(layout), 3)[0] for name, layout in LAYOUTS.items()}
    losses["bf16"] = speech.run(speech.steps(ONE, dtype="bfloat16"), 3)[0]
    print(json.dumps(losses))
