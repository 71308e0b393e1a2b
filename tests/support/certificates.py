"""Certificates made by the openssl command: an authority, a server's, and clients' with given names."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

OPENSSL = shutil.which("openssl")


@dataclass(frozen=True)
class Certificate:
    cert_file: str
    key_file: str


class Authority:
    """Signs certificates into ``folder``."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = name
        self.ca_file = str(folder / f"{name}.pem")
        self._key = str(folder / f"{name}.key")
        openssl("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.ca_file, "-subj", f"/CN={name}")

    def sign(self, common_name: str, alternative_names: str = "") -> Certificate:
        """``alternative_names`` as openssl writes them: "DNS:a,IP:127.0.0.1,URI:spiffe://b"."""
        stem = self._folder / f"{self._name}-{len(list(self._folder.iterdir()))}"
        key, request, cert, extensions = (f"{stem}.{end}" for end in ("key", "csr", "pem", "ext"))
        openssl("req", "-new", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={common_name}")
        Path(extensions).write_text(f"subjectAltName={alternative_names}\n" if alternative_names else "")
        openssl(
            *("x509", "-req", "-in", request, "-CA", self.ca_file, "-CAkey", self._key, "-CAcreateserial"),
            *("-out", cert, "-days", "2", "-extfile", extensions),
        )
        return Certificate(cert, key)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def openssl(*arguments: str) -> None:
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *arguments], check=True, capture_output=True, timeout=20)
