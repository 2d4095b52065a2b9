from collections.abc import Iterator

import pytest

from tests import forked
from tests.capture import nursery


@pytest.fixture(scope="session")
def program_nursery(
    forked_children: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[forked.Nursery]:
    """One for all files of a worker."""
    own = nursery.programs(tmp_path_factory.mktemp("nursery"))
    yield own
    own.close()


@pytest.fixture(scope="module")
def forked_programs(program_nursery: forked.Nursery) -> Iterator[None]:
    """A file's programs under capture are forked."""
    with nursery.forking(program_nursery):
        yield


@pytest.fixture
def forked_program(program_nursery: forked.Nursery) -> Iterator[None]:
    """Those of one test are."""
    with nursery.forking(program_nursery):
        yield
