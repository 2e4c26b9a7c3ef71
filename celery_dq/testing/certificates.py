"""Self-signed certificates for tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Certificate", "make_certificate"]


class Certificate(NamedTuple):
    """A self-signed certificate, which is also its own authority.

    Attributes:
        certificate: PEM file of the certificate.
        key: PEM file of the key.
        both: PEM file with the key and the certificate.
    """

    certificate: Path
    key: Path
    both: Path


def make_certificate(folder: Path, name: str, hosts: Sequence[str] = ("127.0.0.1",)) -> Certificate:
    """Make a certificate by the program ``openssl``. It is valid for two days.

    Args:
        folder: Folder for its files.
        name: Common name of the certificate, and prefix of the names of its files.
        hosts: Host names and addresses that it is valid for.

    Raises:
        FileNotFoundError: There is no ``openssl``.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise FileNotFoundError("no openssl found to make a certificate: apt-get install openssl")
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key", folder / f"{name}.pem")
    kinds = ",".join(f"{'IP' if host[0].isdigit() else 'DNS'}:{host}" for host in hosts)
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", f"subjectAltName={kinds}"),
            *("-keyout", str(made.key), "-out", str(made.certificate)),
        ],
        check=True,
        capture_output=True,
    )
    made.both.write_text(made.key.read_text() + made.certificate.read_text())
    made.both.chmod(0o600)
    return made
