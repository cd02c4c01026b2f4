"""TLS for both fronts: three files, proved at start.

What a client would find out later is found out here: a handshake runs in memory with these very files, so a key of
another certificate, a certificate that has expired or one that is no server's ends the start with one sentence."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True)
class Tls:
    """cert: the server's certificate and those that signed it, PEM; client_ca: who signs the clients that may come in;
    None = anybody may."""

    cert: str
    key: str
    client_ca: str | None = None

    @staticmethod
    def of(cert: str | None, key: str | None, client_ca: str | None) -> Tls | None:
        """None = plain text.  ValueError naming the flag when the files cannot serve."""
        if cert is None and key is None and client_ca is None:
            return None
        if cert is None or key is None:
            given, missing = ("tls_cert", "tls_key") if key is None else ("tls_key", "tls_cert")
            given = given if cert is not None or key is not None else "tls_client_ca"
            raise ValueError(f"{given} is given without {missing}: TLS needs the certificate and its key")
        tls = Tls(cert, key, client_ca)
        prove(tls)
        return tls

    def grpc_credentials(self) -> grpc.ServerCredentials:
        pair = (Path(self.key).read_bytes(), Path(self.cert).read_bytes())
        if self.client_ca is None:
            return grpc.ssl_server_credentials([pair])
        return grpc.ssl_server_credentials([pair], Path(self.client_ca).read_bytes(), require_client_auth=True)

    def context(self) -> ssl.SSLContext:
        """For the HTTP front: TLS 1.2 and above, as gRPC has it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.cert, self.key, password=_no_password)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def prove(tls: Tls) -> None:
    """ValueError in one sentence when no client could connect with these files."""
    for field, path in (("tls_cert", tls.cert), ("tls_key", tls.key), ("tls_client_ca", tls.client_ca)):
        if path is not None:
            _check_readable(field, path)
    if tls.client_ca is not None:
        _check_authority(tls.client_ca)
    try:
        server = Tls(tls.cert, tls.key).context()
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(
                f"tls_key={tls.key!r} is not the key of the certificate in tls_cert={tls.cert!r}"
            ) from None
        raise ValueError(
            f"tls_cert={tls.cert!r} and tls_key={tls.key!r} are not a certificate and its key in PEM form"
        ) from None
    _shake_hands(server, tls.cert)


def _check_readable(field: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise ValueError(f"{field}={path!r} cannot be read: {error.strerror}") from None


def _check_authority(path: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ValueError(f"tls_client_ca={path!r} holds no certificates in PEM form") from None
    authorities = context.get_ca_certs()
    if not authorities:
        raise ValueError(
            f"tls_client_ca={path!r} holds no certificate of an authority (CA:TRUE): it could admit nobody"
        )
    ends = [str(authority["notAfter"]) for authority in authorities]
    if all(ssl.cert_time_to_seconds(end) < time.time() for end in ends):
        raise ValueError(f"tls_client_ca={path!r} expired on {ends[-1]}: it could admit nobody")


def _shake_hands(server_context: ssl.SSLContext, cert: str) -> None:
    """A client that trusts this one certificate, and any name, meets the server in memory."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.load_verify_locations(cert)
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is the anchor
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    try:
        while waiting:
            for side in list(waiting):
                try:
                    side.do_handshake()
                    waiting.remove(side)
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"tls_cert={cert!r} cannot serve: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise ValueError(f"tls_cert={cert!r} cannot serve: the handshake fails ({error.reason or error})") from None


def _no_password() -> str:
    raise ValueError("tls_key is encrypted: write it without a password (and let nobody else read it)")
