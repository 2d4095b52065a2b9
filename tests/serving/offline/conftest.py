from tests.serving.http.conftest import server

__all__ = ["server"]
