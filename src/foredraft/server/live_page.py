"""The files of the live page, and the headers they are sent with.

Owns: what a browser may do with the page.  Does not know: what is on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath

from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"
# The page shows what a model wrote: should that ever get into it as markup, it still runs nothing and reaches no other server.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# Named here because some systems map .js to text/plain, which browsers refuse to run.
TYPES: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class PageFiles(StaticFiles):
    """What the page consists of beside ``index.html``."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """One file, or 304 when the browser has it already."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        kind = TYPES.get(PurePath(path).suffix)
        if kind is not None:
            response.headers["Content-Type"] = kind
        return response


def index() -> Response:
    """The page itself."""
    return FileResponse(FOLDER / "index.html", headers=dict(HEADERS), media_type="text/html")
