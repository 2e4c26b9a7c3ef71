"""Local ZooKeeper servers: a single one, or an ensemble of three; certificates for encrypted ones.

.. code-block:: python

    with ZooKeeperServer() as server:
        session = Session(server.hosts)

A server listens on free ports of 127.0.0.1, keeps its data in a temporary folder, boots in half a second, and
ends with the block or the process.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from celery_dq.testing.local_server import LocalServer, ServerGroup, free_ports
from celery_dq.testing.processes import ChildProcess
from celery_dq.testing.waiting import wait_until

__all__ = [
    "Certificate",
    "Member",
    "ZooKeeperEnsemble",
    "ZooKeeperServer",
    "find_zookeeper",
    "make_certificate",
]

#: Jars of Debian's package. The manifest of the first one names all other jars that it needs.
DEBIAN_JARS = ("/usr/share/java/zookeeper.jar", "/usr/share/java/slf4j-nop.jar")
#: A small heap, one compiler, no statistics file: half a second to boot, 56 MiB.
JAVA_FLAGS = (
    *("-Xmx256m", "-Xms32m"),
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xshare:auto",
    "-XX:-UsePerfData",
    "-Djava.net.preferIPv4Stack=true",
)
LOGIN_MODULE = "org.apache.zookeeper.server.auth.DigestLoginModule"
#: Further jars for TLS, which Debian's manifest does not name.
DEBIAN_TLS_JARS = tuple(
    f"/usr/share/java/netty-{part}.jar" for part in ("codec", "resolver", "transport-native-unix-common")
)


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


class Member(NamedTuple):
    """The ports of one server of an ensemble.

    Attributes:
        number: Number of the server.
        client: Port for clients.
        quorum: Port for the other servers.
        election: Port for elections.
    """

    number: int
    client: int
    quorum: int
    election: int


def find_zookeeper() -> tuple[str, str]:
    """Return the Java binary and the class path that run ZooKeeper.

    Java is ``$JAVA_HOME/bin/java`` or on the PATH. The jars are those of ``$ZOOKEEPER_HOME`` (an unpacked
    release) or of Debian's package.

    Raises:
        FileNotFoundError: Java or ZooKeeper is not installed. The text says how to install it.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        raise FileNotFoundError("no Java found: apt-get install default-jre-headless, or set JAVA_HOME")
    release = os.environ.get("ZOOKEEPER_HOME")
    if release:
        return java, str(Path(release) / "lib" / "*")
    if not Path(DEBIAN_JARS[0]).exists():
        raise FileNotFoundError(
            "no ZooKeeper found: apt-get install --no-install-recommends zookeeper, or unpack a release "
            "and set ZOOKEEPER_HOME to its folder"
        )
    return java, os.pathsep.join((*DEBIAN_JARS, *DEBIAN_TLS_JARS))


class ZooKeeperServer(LocalServer):
    """One ZooKeeper server. A context manager; or call :meth:`start` and :meth:`stop`.

    Args:
        tick_ms: ZooKeeper's ``tickTime`` in milliseconds (a production server has 2,000). Sessions last at
            least two ticks.
        number: Number of this server among `members`; 0 is a single server.
        members: Ports of all servers of the ensemble, as this server reaches them.
        users: Names and passwords. With any, clients must authenticate by SASL (DIGEST-MD5).
        certificate: Certificate with which the server also serves TLS, at :attr:`tls_hosts`.
        trusts: Certificate that TLS clients must present.
    """

    name = "zookeeper"

    def __init__(
        self,
        *,
        tick_ms: int = 500,
        number: int = 0,
        members: Sequence[Member] = (),
        users: Mapping[str, str] | None = None,
        certificate: Certificate | None = None,
        trusts: Certificate | None = None,
    ) -> None:
        self._members = {member.number: member for member in members}
        extra = 0 if certificate is None else 1
        if members:
            super().__init__([self._members[number].client, *free_ports(extra)])
        else:
            super().__init__(1 + extra)
        self.tick_ms = tick_ms
        self.number = number
        #: A change takes effect at the next start.
        self.users = dict(users or {})
        self._certificate = certificate
        self._trusts = trusts

    # -- addresses and state

    @property
    def hosts(self) -> str:
        """The list of hosts for a client."""
        return f"127.0.0.1:{self.port}"

    @property
    def tls_hosts(self) -> str:
        """The list of hosts for a TLS client; see `certificate`."""
        if self._certificate is None:
            raise RuntimeError("the server has no TLS port: give a certificate")
        return f"127.0.0.1:{self.ports[1]}"

    def ask(self, word: str, timeout_s: float = 1.0) -> str:
        """Send one of ZooKeeper's four-letter words and return the answer; "" without an answer."""
        output = b""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout_s) as connection:
                connection.settimeout(timeout_s)
                connection.sendall(word.encode())
                while chunk := connection.recv(65536):
                    output += chunk
        except OSError:
            return ""
        return output.decode(errors="replace")

    @property
    def mode(self) -> str:
        """``standalone``, ``leader`` or ``follower``; "" while it does not serve."""
        for line in self.ask("srvr").splitlines():
            if line.startswith("Mode: "):
                return line.removeprefix("Mode: ")
        return ""

    # -- implementation

    def _run(self) -> ChildProcess:
        java, jars = find_zookeeper()
        (self.folder / "data").mkdir(exist_ok=True)
        if self._members:
            (self.folder / "data" / "myid").write_text(str(self.number))
        configuration = self.folder / "zoo.cfg"
        configuration.write_text("".join(f"{line}\n" for line in self._settings()))
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        command = [java, *JAVA_FLAGS, *self._login(), "-cp", jars, main, str(configuration)]
        return ChildProcess(command, log=self.log_file, folder=self.folder)

    def _serves(self) -> bool:
        return bool(self.mode)

    def _login(self) -> list[str]:
        if not self.users:
            return []
        users = " ".join(f'user_{name}="{password}"' for name, password in self.users.items())
        jaas = self.folder / "jaas.conf"
        jaas.write_text(f"Server {{ {LOGIN_MODULE} required {users}; }};\n")
        return [f"-Djava.security.auth.login.config={jaas}"]

    def _protection(self) -> list[str]:
        settings = []
        if self.users:
            settings += [
                "authProvider.1=org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
                *("enforce.auth.enabled=true", "enforce.auth.schemes=sasl"),
            ]
        if self._certificate is not None:
            settings += [
                "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
                *(f"secureClientPort={self.ports[1]}", "secureClientPortAddress=127.0.0.1"),
                *(f"ssl.keyStore.location={self._certificate.both}", "ssl.keyStore.type=PEM"),
                f"ssl.trustStore.location={(self._trusts or self._certificate).certificate}",
                "ssl.trustStore.type=PEM",
                f"ssl.clientAuth={'need' if self._trusts else 'none'}",
            ]
        return settings

    def _settings(self) -> list[str]:
        settings = [
            f"tickTime={self.tick_ms}",
            f"dataDir={self.folder / 'data'}",
            "maxClientCnxns=0",
            "maxSessionTimeout=60000",
            "admin.enableServer=false",
            "4lw.commands.whitelist=*",
            "extendedTypesEnabled=true",
            "preAllocSize=1024",
            *self._protection(),
        ]
        if not self._members:
            return [*settings, f"clientPort={self.port}", "clientPortAddress=127.0.0.1"]
        return [
            *settings,
            "initLimit=10",
            "syncLimit=5",
            *(
                f"server.{m.number}=127.0.0.1:{m.quorum}:{m.election};127.0.0.1:{m.client}"
                for m in self._members.values()
            ),
        ]


class ZooKeeperEnsemble(ServerGroup):
    """Several servers that elect a leader. A context manager.

    Args:
        tick_ms: See :class:`ZooKeeperServer`.
        size: Number of servers.
        route: Called with the number of a server and another member. Returns the ports at which the server
            reaches that member, for example those of a proxy that can cut the connection.
    """

    def __init__(
        self, *, tick_ms: int = 500, size: int = 3, route: Callable[[int, Member], Member] | None = None
    ) -> None:
        self._tick_ms = tick_ms
        self._size = size
        self._route = route or (lambda number, member: member)
        self.servers: list[ZooKeeperServer] = []

    def _start_all(self) -> None:
        ports = iter(free_ports(3 * self._size))
        members = [
            Member(number, next(ports), next(ports), next(ports)) for number in range(1, self._size + 1)
        ]
        self.servers = [
            ZooKeeperServer(
                tick_ms=self._tick_ms,
                number=member.number,
                members=[each if each is member else self._route(member.number, each) for each in members],
            )
            for member in members
        ]
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.await_service()

    @property
    def hosts(self) -> str:
        """The list of all hosts for a client."""
        return ",".join(server.hosts for server in self.servers)

    def leader(self) -> ZooKeeperServer:
        """Return the present leader, after waiting for an election if necessary."""

        def leading() -> ZooKeeperServer | None:
            return next((each for each in self.servers if each.alive() and each.mode == "leader"), None)

        found = wait_until(leading, 60.0, what="a leader of the ensemble")
        assert found is not None
        return found

    def followers(self) -> list[ZooKeeperServer]:
        """Return the present followers."""
        return [each for each in self.servers if each.alive() and each.mode == "follower"]
