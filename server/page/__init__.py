"""The page at `/`: static files, read once, served under a policy that lets nothing else in.

No build step and no foreign resource: what stands in this folder is what the browser gets."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

HERE = Path(__file__).parent
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# Scripts and styles from this server's own files alone, never from markup; the page may be framed by nobody.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked again each time, answered with 304: a new server means a new page
}


def page_paths() -> dict[str, Path]:
    """URL path -> file.  They hold nothing secret, and a browser sends no key for them."""
    files = sorted(path for path in HERE.iterdir() if path.suffix in KINDS)
    return {"/" if path.name == "index.html" else f"/page/{path.name}": path for path in files}


def add_page(app: FastAPI) -> None:
    """One route per file."""
    for path, file in page_paths().items():
        app.add_route(path, _File(file).answer, methods=["GET", "HEAD"], include_in_schema=False)


class _File:
    """A file's whole answer, made once."""

    def __init__(self, file: Path):
        self._body = file.read_bytes()
        tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._headers = HEADERS | {"etag": tag, "content-type": f"{KINDS[file.suffix]}; charset=utf-8"}

    async def answer(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)
