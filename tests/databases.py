"""Local servers of PostgreSQL and MariaDB, for the tests of the outbox.

A server listens on a free port of 127.0.0.1, keeps its data in a temporary folder, and does not wait for the
disk. It starts within three seconds, and ends with its block or the process.
"""

from __future__ import annotations

import os
import socket
import subprocess
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery_dq.testing.local_server import LocalServer
from celery_dq.testing.processes import ChildProcess
from tests.provision import find_mariadb, find_postgresql

__all__ = ["DatabaseServer", "MariaDBServer", "PostgreSQLServer"]

#: A user without any right, on most systems.
UNPRIVILEGED = 65534


class DatabaseServer(LocalServer):
    """A server with any number of databases."""

    start_timeout_s = 60.0
    # Either server waits at its end for its clients.
    stop_timeout_s = 2.0

    @abstractmethod
    def _make_data(self, folder: Path) -> None:
        """Make the files of an empty server."""

    @abstractmethod
    def _command(self, folder: Path) -> list[str]:
        """Return the command of the server."""

    @abstractmethod
    def settings(self, name: str) -> dict[str, Any]:
        """Return Django's settings of a database of this server."""

    @abstractmethod
    def make_database(self, name: str) -> None:
        """Make an empty database."""

    def _run(self) -> ChildProcess:
        folder = self.folder / "data"
        if not folder.exists():
            folder.mkdir(mode=0o700)
            self._give(self.folder, folder)
            self._make_data(folder)
        return ChildProcess(self._command(folder), log=self.log_file, folder=self.folder)

    def _give(self, *paths: Path) -> None:
        """Give files to the user that runs the server."""

    def _serves(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True

    def _do(self, command: Sequence[str], **more: Any) -> None:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, **more
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stdout}{done.stderr}")


class PostgreSQLServer(DatabaseServer):
    """One server of PostgreSQL, whose only user is ``dq``."""

    name = "postgresql"

    def settings(self, name: str) -> dict[str, Any]:
        """Return Django's settings of a database of this server."""
        engine = "django.db.backends.postgresql"
        return {"ENGINE": engine, "NAME": name, "USER": "dq", "HOST": "127.0.0.1", "PORT": self.port}

    def make_database(self, name: str) -> None:
        """Make an empty database."""
        self._do([self._tool("createdb"), "-h", "127.0.0.1", "-p", str(self.port), "-U", "dq", name])

    def _serves(self) -> bool:
        # It listens before it accepts a session.
        command = [self._tool("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, timeout=10).returncode == 0

    def _make_data(self, folder: Path) -> None:
        self._do([*self._user(), self._tool("initdb"), "-N", "-U", "dq", "-A", "trust", "-D", str(folder)])

    def _command(self, folder: Path) -> list[str]:
        options = ["fsync=off", "unix_socket_directories=", "listen_addresses=127.0.0.1"]
        words = [word for option in options for word in ("-c", option)]
        return [*self._user(), self._tool("postgres"), "-D", str(folder), "-p", str(self.port), *words]

    def _give(self, *paths: Path) -> None:
        if os.geteuid() == 0:
            for path in paths:
                os.chown(path, UNPRIVILEGED, UNPRIVILEGED)

    def _user(self) -> list[str]:
        # The server refuses to run as root.
        if os.geteuid() != 0:
            return []
        return ["setpriv", f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups", "--"]

    def _tool(self, name: str) -> str:
        server = find_postgresql()
        if server is None:
            raise FileNotFoundError("no PostgreSQL found: apt-get install postgresql")
        return str(Path(server).with_name(name))


class MariaDBServer(DatabaseServer):
    """One server of MariaDB, whose user ``root`` needs no password."""

    name = "mariadb"

    def settings(self, name: str) -> dict[str, Any]:
        """Return Django's settings of a database of this server."""
        engine = "django.db.backends.mysql"
        return {"ENGINE": engine, "NAME": name, "USER": "root", "HOST": "127.0.0.1", "PORT": self.port}

    def make_database(self, name: str) -> None:
        """Make an empty database."""
        words = ["--no-defaults", "-h", "127.0.0.1", "-P", str(self.port), "-u", "root"]
        self._do(["mariadb", *words, "-e", f"CREATE DATABASE {name} CHARACTER SET utf8mb4"])

    def _make_data(self, folder: Path) -> None:
        words = ["--auth-root-authentication-method=normal", "--skip-test-db", *self._user()]
        self._do(["mariadb-install-db", "--no-defaults", f"--datadir={folder}", *words])

    def _command(self, folder: Path) -> list[str]:
        server = find_mariadb()
        if server is None:
            raise FileNotFoundError("no MariaDB found: apt-get install mariadb-server-core")
        return [
            *(server, "--no-defaults", f"--datadir={folder}", f"--socket={folder}/socket", *self._user()),
            *(f"--port={self.port}", "--bind-address=127.0.0.1", "--innodb-flush-log-at-trx-commit=2"),
        ]

    def _user(self) -> list[str]:
        return ["--user=root"] if os.geteuid() == 0 else []
