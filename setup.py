"""Makes the description for a package index, where relative links lead nowhere. All the rest is in setup.cfg.

With ``Source`` among the ``project_urls`` of setup.cfg, the links and pictures of the README become absolute.
Without it, links become plain text, and pictures are left out.
"""

from __future__ import annotations

import re
from configparser import RawConfigParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"`([^`<]+?)\s+<(?!https?:)([^<>\s]+)>`_")
PICTURE = re.compile(r"\.\. image:: (?!https?:)(\S+)\n((?:   .*\n)*\n?)")


def description(readme: str, source: str | None, version: str) -> str:
    """Return the README for an index.

    Args:
        readme: The README.
        source: Address of the repository on GitHub; None without one.
        version: The tag of the release.
    """
    if source is None:
        return PICTURE.sub("", LINK.sub(r"\1", readme))
    linked = LINK.sub(rf"`\1 <{source}/blob/{version}/\2>`_", readme)
    return PICTURE.sub(rf".. image:: {source}/raw/{version}/\1\n\2", linked)


def project_url(name: str) -> str | None:
    """Return one of the ``project_urls`` of setup.cfg."""
    config = RawConfigParser()
    config.read(ROOT / "setup.cfg")
    urls = config.get("metadata", "project_urls", fallback="")
    found = re.search(rf"^{name}\s*=\s*(\S+)$", urls, re.MULTILINE)
    return found[1] if found else None


if __name__ == "__main__":
    package = (ROOT / "celery_dq" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    text = (ROOT / "README.rst").read_text(encoding="utf-8")
    setup(long_description=description(text, project_url("Source"), f"v{version}"))
