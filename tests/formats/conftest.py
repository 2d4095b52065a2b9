"""The other side of a parity check, without a process of its own."""

from collections.abc import Sequence

import pytest
import transformers

from systolic.formats.hugging_face import reference
from systolic.formats.probe import ParityInputs
from systolic.formats.source import Source


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of transformers computed here: a process of its own takes seconds to import it, and other tests have one."""

    def compute(
        source: Source, probe: ParityInputs, rounded: str | None, texts: Sequence[str] = ()
    ) -> reference.Reference:
        model = reference.opened(source.path, getattr(transformers, probe.loader), rounded)
        found = reference.compute(model, dict(probe.theirs), list(probe.outputs))
        words = reference.words(source.path, list(texts))
        return reference.Reference(found, f"transformers {transformers.__version__}", words)

    monkeypatch.setattr(reference, "reference", compute)
