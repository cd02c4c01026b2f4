"""HTTP as a plain client speaks it: one connection a request, nothing hidden."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)


def fetch(
    base: str,
    path: str,
    body: object = None,
    *,
    method: str = "",
    headers: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Reply:
    """body: sent as JSON, by POST unless another method is named."""
    where = urlsplit(base)
    if tls is None:
        connection = http.client.HTTPConnection(where.netloc, timeout=10)
    else:
        connection = http.client.HTTPSConnection(where.netloc, timeout=10, context=tls)
    try:
        raw = None if body is None else json.dumps(body).encode()
        given = {} if raw is None else {"content-type": "application/json"}
        connection.request(method or ("GET" if raw is None else "POST"), path, raw, given | (headers or {}))
        answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()
