"""Small runs of each kind of model, and their Bundles."""

import shutil
from dataclasses import replace
from pathlib import Path

import systolic
from systolic import recipes
from systolic.job import Job
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.vision.config import CNN, Pixels, ViT

DECODER = Decoder(layers=1, d_model=16, d_ff=16, heads=2, kv_heads=2, head_dim=8)
DECODER_PARAMETERS = 384 * 16 + 4 * 16 * 16 + 3 * 16 * 16 + 3 * 16
"""Tokens of bytes, rounded up to whole lanes; queries, keys, values and their product; the MLP; norms."""
ENCODER = Encoder(layers=1, d_model=16, d_ff=16, heads=2, positions=32)
PIXELS = Pixels(size=8, channels=1, mean=(0.305,), std=(0.376,))
MODELS = {
    "cnn": CNN(channels=(4,), num_classes=10, pixels=PIXELS),
    "vit": ViT(layers=1, d_model=16, d_ff=16, heads=2, patch=4, num_classes=10, pixels=PIXELS),
}
KINDS = ("cnn", "vit", "lm", "mlm")


def text(folder: Path) -> Path:
    """A folder of small text files."""
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"def f{number}(): return {number}\n" * 5)
    return folder


def job(kind: str, folder: Path) -> Job:
    """A job of three steps; its text is written to a folder."""
    if kind in MODELS:
        made = recipes.find("digits")({"steps": 3})
        rule = replace(made.evaluation, every=3)
        return replace(made, model=MODELS[kind], evaluation=rule)
    model = DECODER if kind == "lm" else ENCODER
    options = {"path": text(folder / "text"), "model": model, "sequence": 32, "steps": 3}
    # A sample takes as long as the steps.
    return replace(recipes.find(kind)({**options, "batch": 4}), sample=None)


_RUNS: dict[str, Path] = {}
"""Runs of networks, which name no files beside them, by kind."""


def run(kind: str, folder: Path) -> Path:
    """A run of a kind; each network is trained once a process."""
    if kind in _RUNS:
        return Path(shutil.copytree(_RUNS[kind], folder / "run"))
    systolic.train(job(kind, folder), run=folder / "run")
    if kind in MODELS:
        _RUNS[kind] = Path(shutil.copytree(folder / "run", folder / "kept"))
    return folder / "run"
