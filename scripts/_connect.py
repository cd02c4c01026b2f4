"""How the client scripts reach a server: address, TLS files, API key."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import grpc

from server.keys import KEY_VARIABLE, checked, read_keys


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connection")
    group.add_argument("--address", default="127.0.0.1:50051", help="of the server (default: %(default)s)")
    group.add_argument(
        "--tls", action="store_true", help="speak TLS; the server's certificate is of a public authority"
    )
    group.add_argument("--tls-ca", help="PEM file of the authority that signed the server's certificate; implies --tls")
    group.add_argument("--tls-cert", help="PEM file: this client's certificate, for a server that asks for one")
    group.add_argument("--tls-key", help="PEM file: its key")
    group.add_argument("--api-key-file", help=f"file with the API key; default: the environment's {KEY_VARIABLE}")


def channel_of(flags: argparse.Namespace, options: Sequence[tuple[str, int]]) -> grpc.Channel:
    """ValueError naming the flag whose file does not serve."""
    if (flags.tls_cert is None) != (flags.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together")
    if not (flags.tls or flags.tls_ca or flags.tls_cert):
        return grpc.insecure_channel(flags.address, options=options)
    credentials = grpc.ssl_channel_credentials(
        _read("--tls-ca", flags.tls_ca), _read("--tls-key", flags.tls_key), _read("--tls-cert", flags.tls_cert)
    )
    return grpc.secure_channel(flags.address, credentials, options=options)


def key_of(flags: argparse.Namespace) -> str | None:
    """The key to send, if there is one."""
    if flags.api_key_file is not None:
        return read_keys(flags.api_key_file, "api_key_file")[0]
    key = os.environ.get(KEY_VARIABLE)
    return None if key is None else checked(key.strip(), f"the environment variable {KEY_VARIABLE}")


def metadata_of(flags: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Of every call."""
    key = key_of(flags)
    return () if key is None else (("authorization", f"Bearer {key}"),)


def _read(flag: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from None
