"""Help texts and resolved recipes are as committed; ``python -m tests.golden`` rewrites them."""

import pytest

from tests.golden import texts


@pytest.mark.parametrize("name", texts.names())
def test_text_is_as_committed(name: str) -> None:
    path = texts.FOLDER / name
    assert path.exists(), f"{name} is new; python -m tests.golden writes it"
    assert texts.text(name) == path.read_text(), "python -m tests.golden rewrites it"


def test_no_text_is_left_over() -> None:
    assert texts.kept() == sorted(texts.names())
