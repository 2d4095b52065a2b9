"""What belongs to a model and is in none of its programs: names of classes, and what becomes of a text before it is tokens."""

import io
import json
import zipfile
from typing import Any

from systolic.data.text.sentences import Sentences
from systolic.job import Job
from systolic.steps.tasks.classification import Classification

LABELS = "labels.txt"
"""Names of classes, a line each in the order of the outputs."""


def class_names(job: Job) -> tuple[str, ...]:
    """Names of an image classifier's classes, in the order of its outputs; () where they have none."""
    return job.data.labels() if isinstance(job.task, Classification) else ()


def label_lines(job: Job) -> bytes:
    """Content of :data:`LABELS`; empty where classes have no names."""
    return "".join(f"{name}\n" for name in class_names(job)).encode()


def described(job: Job) -> dict[str, Any]:
    """Names of classes (``labels``), and of a model of embeddings what is written before a text (``before``) and whether it is in lower case (``lower``)."""
    found: dict[str, Any] = {"labels": list(class_names(job))}
    if isinstance(job.data, Sentences):
        found |= {"before": job.data.before, "lower": job.data.lower}
    return {name: one for name, one in found.items() if one}


def metadata(job: Job) -> dict[str, str]:
    """The same as texts: JSON but for what is written before a text."""
    return {
        name: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)
        for name, one in described(job).items()
    }


def with_labels(content: bytes, job: Job) -> bytes:
    """A .tflite file with :data:`LABELS` at its end, as an archive that ``unzip`` opens; unchanged where classes have no names."""
    lines = label_lines(job)
    if not lines:
        return content
    file = io.BytesIO(content)
    with zipfile.ZipFile(file, "a") as archive:
        # A date of its own, so that the same model gives the same file.
        archive.writestr(zipfile.ZipInfo(LABELS, (1980, 1, 1, 0, 0, 0)), lines)
    return file.getvalue()


def text_notes(job: Job) -> list[str]:
    """A line for what a program's user does to a text before it is tokens."""
    found = described(job)
    made = []
    if "before" in found:
        made.append(
            f"{found['before']!r} is written before each text here, which no program does: put it there before making tokens"
        )
    if "lower" in found:
        made.append(
            "texts are read in lower case here, which no program does: change them before making tokens"
        )
    return made
