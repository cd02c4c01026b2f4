"""TLS files that could not serve end the start with one sentence that names the flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.tls import Tls
from tests.server.certificates import Authority, Pair, openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Pair:
    return authority.sign("server")


def test_a_pair_and_a_pair_with_an_authority_are_taken(authority: Authority, server: Pair) -> None:
    assert Tls.of(None, None, None) is None
    assert Tls.of(server.cert, server.key, None) == Tls(server.cert, server.key)
    assert Tls.of(server.cert, server.key, authority.pair.cert) == Tls(server.cert, server.key, authority.pair.cert)


def test_a_self_signed_certificate_is_taken(authority: Authority) -> None:
    assert Tls.of(authority.pair.cert, authority.pair.key, None) is not None


def test_half_of_the_flags_is_refused(authority: Authority, server: Pair) -> None:
    with pytest.raises(ValueError, match="tls_cert is given without tls_key"):
        Tls.of(server.cert, None, None)
    with pytest.raises(ValueError, match="tls_key is given without tls_cert"):
        Tls.of(None, server.key, None)
    with pytest.raises(ValueError, match="tls_client_ca is given without"):
        Tls.of(None, None, authority.pair.cert)


def test_files_that_are_not_there_are_refused(server: Pair, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.pem")
    with pytest.raises(ValueError, match=r"tls_cert='.*absent.pem' cannot be read: No such file"):
        Tls.of(absent, server.key, None)
    with pytest.raises(ValueError, match=r"tls_client_ca='.*absent.pem' cannot be read: No such file"):
        Tls.of(server.cert, server.key, absent)


def test_a_key_of_another_certificate_is_refused(authority: Authority, server: Pair) -> None:
    with pytest.raises(ValueError, match=r"tls_key='.*ca.key' is not the key of the certificate"):
        Tls.of(server.cert, authority.pair.key, None)


def test_an_expired_certificate_is_refused(authority: Authority) -> None:
    old = authority.sign("old", days=-1)
    with pytest.raises(ValueError, match=r"tls_cert='.*old.pem' cannot serve: certificate has expired"):
        Tls.of(old.cert, old.key, None)


def test_a_certificate_of_a_client_is_refused(authority: Authority) -> None:
    client = authority.sign("client", usage="clientAuth")
    with pytest.raises(ValueError, match=r"tls_cert='.*client.pem' cannot serve: unsuitable certificate purpose"):
        Tls.of(client.cert, client.key, None)


def test_files_of_another_kind_are_refused(server: Pair) -> None:
    with pytest.raises(ValueError, match="are not a certificate and its key in PEM form"):
        Tls.of(server.key, server.key, None)
    with pytest.raises(ValueError, match=r"tls_client_ca=.* holds no certificates in PEM form"):
        Tls.of(server.cert, server.key, server.key)


def test_an_authority_that_could_admit_nobody_is_refused(server: Pair) -> None:
    with pytest.raises(ValueError, match=r"tls_client_ca=.* holds no certificate of an authority"):
        Tls.of(server.cert, server.key, server.cert)


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_password(server: Pair, tmp_path: Path) -> None:
    locked = str(tmp_path / "locked.key")
    openssl("ec", "-in", server.key, "-aes128", "-passout", "pass:word", "-out", locked)
    with pytest.raises(ValueError, match="tls_key is encrypted"):
        Tls.of(server.cert, locked, None)
