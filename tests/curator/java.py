"""The real Curator, in a Java program that is compiled and started for the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

from celery_dq.testing.zookeeper import find_zookeeper

DEBIAN = Path("/usr/share/java")
#: Names of the jars in Debian's packages, which have no version in their names.
CURATOR = ("curator-recipes.jar", "curator-framework.jar", "curator-client.jar", "guava.jar")
#: A compiler that needs only a Java runtime.
COMPILER = DEBIAN / "eclipse-jdt-core.jar"
COMPILER_CLASS = "org.eclipse.jdt.internal.compiler.batch.Main"
SOURCE = Path(__file__).with_name("CuratorPeer.java")


def class_path() -> str:
    """Return the class path of Curator.

    The jars are in ``$CURATOR_HOME`` (Curator and guava), or in Debian's packages.
    """
    _java, zookeeper = find_zookeeper()
    home = os.environ.get("CURATOR_HOME")
    jars = [str(Path(home) / "*")] if home else [str(DEBIAN / name) for name in CURATOR]
    if not home and not all(Path(jar).exists() for jar in jars):
        raise FileNotFoundError(
            "no Curator found: apt-get install --no-install-recommends libcurator-recipes-java ecj, or put "
            "its jars and guava's into a folder and set CURATOR_HOME to it"
        )
    return os.pathsep.join([*jars, zookeeper, str(DEBIAN / "slf4j-api.jar")])


def compile_peer(folder: Path) -> None:
    """Compile the Java program into `folder`, with a JDK's javac or with Eclipse's compiler on a runtime."""
    java, _jars = find_zookeeper()
    javac = shutil.which("javac")
    if javac is not None:
        command = [javac, "-nowarn"]
    elif COMPILER.exists():
        command = [java, "-cp", str(COMPILER), COMPILER_CLASS, "-proc:none", "-nowarn"]
        command += ["-source", "11", "-target", "11"]
    else:
        raise FileNotFoundError("no Java compiler found: apt-get install --no-install-recommends ecj")
    command += ["-d", str(folder), "-cp", class_path(), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115, check=False)
    if done.returncode:
        raise RuntimeError(f"the peer does not compile: {' '.join(command)}\n{done.stdout}{done.stderr}")


class CuratorPeer:
    """A running Java program with Curator queues. A context manager."""

    def __init__(self, classes: Path, hosts: str) -> None:
        java, _jars = find_zookeeper()
        options = ["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        classpath = os.pathsep.join([str(classes), class_path()])
        self._process = subprocess.Popen(
            [java, *options, "-cp", classpath, "CuratorPeer", hosts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        self._answer()

    def put(self, kind: str, path: str, argument: object, *items: str) -> None:
        """Put items; `argument` is their id, priority, or due time in milliseconds."""
        assert self._ask("put", kind, path, str(argument), *items) == "ok"

    def take(self, kind: str, path: str, lock_path: str | None, count: int) -> list[str]:
        return self._ask("take", kind, path, lock_path or "-", str(count)).split("\t")

    def fail(self, kind: str, path: str, lock_path: str) -> None:
        """Take one item and raise: Curator requeues it."""
        assert self._ask("fail", kind, path, lock_path) == "ok"

    def remove(self, path: str, item_id: str) -> int:
        return int(self._ask("remove", path, item_id))

    def _ask(self, *words: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write("\t".join(words) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n") or line.startswith("error "):
            raise RuntimeError(f"the Java peer sent {line!r}")
        return line[:-1]

    def __enter__(self) -> CuratorPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The program ends at the end of its input.
        self._process.communicate(timeout=60)
