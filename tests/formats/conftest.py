"""The other side of a parity check, without a process of its own."""

from collections.abc import Sequence

import pytest
import transformers

from systolic.formats.comparison import ParityInputs
from systolic.formats.hugging_face import reader
from systolic.formats.source import Source


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of transformers computed here: a process of its own takes seconds to import it, and other tests have one."""

    def compute(
        source: Source, probe: ParityInputs, rounded: str | None, texts: Sequence[str] = ()
    ) -> reader.Reference:
        model = reader.opened(source.path, getattr(transformers, probe.loader), rounded)
        found = reader.compute(model, dict(probe.theirs), list(probe.outputs))
        words = reader.words(source.path, list(texts))
        return reader.Reference(found, f"transformers {transformers.__version__}", words)

    monkeypatch.setattr(reader, "reference", compute)
