"""``GET /``: a page for trying the models, without resources from elsewhere."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from systolic.serving.http.desk import Desk

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


async def page(request: Request, desk: Desk) -> Response:
    """The page."""
    del request, desk
    text = files("systolic.serving.http").joinpath("page.html").read_text()
    headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
    return Response(text, media_type="text/html", headers=headers)
