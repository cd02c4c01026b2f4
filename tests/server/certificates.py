"""Certificates made for a test by the system's openssl: an authority, and what it signs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Pair:
    cert: str
    key: str


def openssl(*arguments: str) -> None:
    binary = shutil.which("openssl")
    if binary is None:
        pytest.skip("no openssl binary here to make certificates with")
    subprocess.run([binary, *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Authority:
    folder: Path

    @staticmethod
    def make(folder: Path, name: str = "ca") -> Authority:
        folder.mkdir(exist_ok=True)
        authority = Authority(folder)
        openssl(
            "req", "-x509", *CURVE, "-days", "2", "-subj", f"/CN={name}", "-keyout", authority.pair.key,
            "-out", authority.pair.cert, "-addext", "basicConstraints=critical,CA:TRUE",
        )  # fmt: skip
        return authority

    @property
    def pair(self) -> Pair:
        return Pair(str(self.folder / "ca.pem"), str(self.folder / "ca.key"))

    def sign(self, name: str, *, usage: str = "serverAuth", days: int = 2) -> Pair:
        """A certificate for localhost; days: until it expires, negative = it has."""
        pair = Pair(str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key"))
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extensions.write_text(
            f"subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\nextendedKeyUsage={usage}\n"
        )
        openssl("req", *CURVE, "-subj", f"/CN={name}", "-keyout", pair.key, "-out", str(request))
        openssl(
            "x509", "-req", "-in", str(request), "-CA", self.pair.cert, "-CAkey", self.pair.key, "-days", str(days),
            "-extfile", str(extensions), "-out", pair.cert,
        )  # fmt: skip
        return pair
