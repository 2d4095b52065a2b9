from collections.abc import Iterator

import openai
import pytest

from tests.serving.http.running import Running, everything, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(everything()) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found
