"""A plain HTTP client for the tests: what goes over the socket, without a library's opinion of it."""

from __future__ import annotations

import http.client
import json
import socket
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

    @property
    def error(self) -> dict:
        """OpenAI's shape of an error, and nothing beside it."""
        assert set(self.json) == {"error"} and set(self.json["error"]) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json" and len(self.body) < 2000
        return self.json["error"]

    @property
    def events(self) -> list[dict]:
        """The data of a whole stream, which must end well."""
        *events, last, rest = self.body.decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


def send(
    base: str,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    *,
    tls: ssl.SSLContext | None = None,
) -> Reply:
    """body: bytes as they are, anything else as JSON; base: the server's URL; tls: speak it."""
    where = urlsplit(base).netloc
    if tls is None:
        connection = http.client.HTTPConnection(where, timeout=20)
    else:
        connection = http.client.HTTPSConnection(where, timeout=20, context=tls)
    try:
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {} if raw is None else {"content-type": "application/json"}
        connection.request(method, path, raw, given | (headers or {}))
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, found, response.read())
    finally:
        connection.close()


def fetch(
    base: str,
    path: str,
    body: object = None,
    *,
    method: str = "",
    headers: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Reply:
    """GET, or POST when there is a body, unless another method is named."""
    return send(base, method or ("GET" if body is None else "POST"), path, body, headers, tls=tls)


def post(base: str, path: str, headers: dict[str, str] | None = None, **body: object) -> Reply:
    return send(base, "POST", path, body, headers)


def opened(base: str, path: str, body: object) -> socket.socket:
    """A connection on which a request has been sent, and nothing of its answer read."""
    address = urlsplit(base)
    connection = socket.create_connection((address.hostname, address.port), timeout=10)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection
