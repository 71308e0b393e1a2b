"""When a certificate ends, read without a library for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvgrpc.rpc.credentials.tls import certificate_end
from tests.support.certificates import OPENSSL, Authority, openssl

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command")


def said_by_openssl(path: str) -> float:
    command = ["openssl", "x509", "-in", path, "-noout", "-enddate"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    end = shown.strip().removeprefix("notAfter=")
    return float(subprocess.run(["date", "-u", "+%s", "-d", end], capture_output=True, check=True).stdout)


@pytest.mark.parametrize("days", ["1", "3650", "20000"])
def test_the_end_is_what_openssl_says(tmp_path: Path, days: str) -> None:
    """20,000 days lie behind 2049, from which on the year has four digits."""
    path = str(tmp_path / "cert.pem")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(tmp_path / "key"))
    openssl("req", "-x509", *key, "-subj", "/CN=a", "-days", days, "-out", path)
    assert certificate_end(path) == said_by_openssl(path)


def test_a_certificate_that_an_authority_signed(tmp_path: Path) -> None:
    signed = Authority(tmp_path).sign("server", "DNS:localhost,IP:127.0.0.1")
    assert certificate_end(signed.cert_file) == said_by_openssl(signed.cert_file)


@pytest.mark.parametrize(
    "text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate_has_no_end(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cert.pem"
    path.write_text(text)
    assert certificate_end(str(path)) is None
    assert certificate_end(str(tmp_path / "absent")) is None
