"""A recipe for tests: a small decoder on the package's own source files."""

from pathlib import Path

from systolic.data.text.documents import StandardLibrary
from systolic.job import Batch, Evaluation, Job, Layout
from systolic.models.decoder.config import Decoder
from systolic.steps.tasks import LanguageModel, Unit

SOURCE = Path(__file__).parents[2] / "src"
MODEL = Decoder(layers=2, d_model=64, d_ff=128, heads=4, kv_heads=2, head_dim=16, vocab=264)


def job(
    model: Decoder = MODEL,
    steps: int = 5,
    batch: int = 16,
    sequence: int = 32,
    metric: str = "bits_per_byte",
    layout: Layout = Layout(),  # noqa: B008
) -> Job:
    """Reads its own source."""
    return Job(
        name="tiny",
        model=model,
        task=LanguageModel(unit=Unit.byte),
        data=StandardLibrary(sequence=sequence, root=SOURCE),
        steps=steps,
        batch=Batch(total=batch),
        evaluation=Evaluation(metric=metric, final_batches=4),
        layout=layout,
    )
