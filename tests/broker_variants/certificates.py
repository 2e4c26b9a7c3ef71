"""A certificate authority for tests, made with the ``openssl`` command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_EXTENSIONS = """
[req]
distinguished_name = subject
[subject]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
subjectAltName = DNS:localhost, IP:127.0.0.1
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
[elsewhere]
basicConstraints = critical, CA:FALSE
subjectAltName = DNS:elsewhere.example
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
[client]
basicConstraints = critical, CA:FALSE
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates for servers on this machine and for clients, with its files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "openssl.cnf"
        self._config.write_text(_EXTENSIONS)
        self._own = Pair(folder / "authority.pem", folder / "authority.key")
        self._run(
            "req", "-x509", *_NEW_KEY, "-days", "2", "-subj", "/CN=celery-dq test authority",
            "-config", self._config, "-extensions", "authority",
            "-keyout", self._own.key, "-out", self._own.certificate,
        )  # fmt: skip

    @property
    def certificate(self) -> Path:
        """The certificate of the authority, for clients that trust it."""
        return self._own.certificate

    def sign(self, purpose: str) -> Pair:
        """Return a new certificate for ``server`` (on this machine), ``elsewhere`` or ``client``."""
        pair = Pair(self._folder / f"{purpose}.pem", self._folder / f"{purpose}.key")
        request = self._folder / f"{purpose}.csr"
        self._run(
            "req", *_NEW_KEY, "-subj", f"/CN=celery-dq test {purpose}",
            "-config", self._config, "-keyout", pair.key, "-out", request,
        )  # fmt: skip
        self._run(
            "x509", "-req", "-in", request, "-days", "2",
            "-CA", self._own.certificate, "-CAkey", self._own.key, "-CAcreateserial",
            "-extfile", self._config, "-extensions", purpose, "-out", pair.certificate,
        )  # fmt: skip
        return pair

    @staticmethod
    def _run(*arguments: str | Path) -> None:
        command = ["openssl", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
