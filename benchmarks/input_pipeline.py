"""What the input pipeline can feed alone, against what the step consumes.

    python benchmarks/input_pipeline.py [--seconds 10] [--workers 0]

For each source: units per second of host batches alone, of batches placed on the device, and of the
recipe's train step on the same machine; above 1.0 the data never makes the step wait.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic import recipes
from systolic.job import Job, Read, Split
from systolic.setup import Setup, jit_train, set_up
from systolic.steps.programs import training


def rate(batches: Iterator[Any], units: int, seconds: float) -> float:
    """Units per second of an iterator, after its first three items."""
    for _ in range(3):
        next(batches)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        jax.block_until_ready(next(batches))
        count += 1
    return count * units / (time.perf_counter() - start)


def step_rate(setup: Setup, seconds: float) -> float:
    """Units per second of the train step on one batch again and again."""
    steps = setup.steps
    state = jax.jit(steps.init, out_shardings=steps.shardings)(jax.random.key(0))
    feed = training(setup.job, steps, 0)
    batch = next(feed)
    feed.close()
    program = jit_train(steps)
    state, metrics = program(state, batch)
    jax.block_until_ready(metrics)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        state, metrics = program(state, batch)
        jax.block_until_ready(metrics)
        count += 1
    return count * setup.units_per_step / (time.perf_counter() - start)


def measure(job: Job, seconds: float, workers: int, with_step: bool) -> dict[str, Any]:
    setup = set_up(job)
    units = setup.units_per_step
    host = job.data.open(Read(split=Split.train, batch=setup.steps.batch_size, workers=workers))
    found: dict[str, Any] = {"unit": setup.unit, "host_per_second": rate(host, units, seconds)}
    host.close()
    feed = training(setup.job, setup.steps, workers)
    found["placed_per_second"] = rate(feed, units, seconds)
    feed.close()
    if with_step:
        found["step_per_second"] = step_rate(setup, seconds)
        found["headroom"] = found["placed_per_second"] / found["step_per_second"]
    return found


def pictures(folder: Path, count: int = 200) -> Path:
    """Real photographs from scikit-learn cut and scaled into a folder of two classes of 256 x 256 JPEGs."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    for label, photo in enumerate(load_sample_images().images):
        into = folder / f"class{label}"
        into.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(photo)
        for index in range(count):
            left, top = rng.integers(0, photo.shape[1] - 300), rng.integers(0, photo.shape[0] - 300)
            image.crop((left, top, left + 300, top + 300)).resize((256, 256)).save(
                into / f"{index:04d}.jpg", quality=90
            )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/systolic-pictures"))
    asked = parser.parse_args()
    results = {}
    for name in ("bytes", "digits"):
        results[name] = measure(recipes.find(name)({}), asked.seconds, asked.workers, True)
        print(name, json.dumps(results[name]), flush=True)
    recipe = recipes.find("image")
    job = recipe({"path": pictures(asked.folder)})
    results["image"] = measure(job, asked.seconds, asked.workers, False)
    print("image", json.dumps(results["image"]), flush=True)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
