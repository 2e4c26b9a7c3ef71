"""A credential provider whose password changes, as that of a cloud service does."""

from __future__ import annotations

import os
from pathlib import Path

import redis

#: The environment variable with the file that holds the present password.
PASSWORD_FILE = "DQ_TEST_PASSWORD_FILE"
USER = "rotating"


class FileCredentials(redis.CredentialProvider):
    """The user :data:`USER` with the password of the file."""

    def get_credentials(self) -> tuple[str, str]:
        return USER, Path(os.environ[PASSWORD_FILE]).read_text()
