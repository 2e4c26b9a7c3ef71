"""Reads a YAML file with names as they are written, for ``celery dq quotas import``."""

from __future__ import annotations

import json
from typing import Any

from celery_dq.errors import InvalidQuota, MissingLibrary


def yaml_as_json(text: bytes, where: str) -> str:
    """Return a YAML document as JSON.

    A name, that is a key of a mapping, stays the text in the file: tenants such as ``007`` and ``no`` become
    neither a number nor a boolean.

    Args:
        text: The document.
        where: Its name, for the error.

    Raises:
        MissingLibrary: PyYAML is not installed.
        InvalidQuota: The text is not YAML, or a name stands twice in one mapping. The error names the place.
    """
    try:
        import yaml
    except ImportError as exc:
        raise MissingLibrary(
            f"{where} needs PyYAML, which is not installed: pip install PyYAML, or write the file as JSON"
        ) from exc

    class Loader(yaml.SafeLoader):
        """Takes the keys of mappings as texts."""

    def mapping(loader: Loader, node: yaml.MappingNode) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise InvalidQuota(f"{where} is not YAML: a name in line {line} is not text")
            if key.value in found:
                raise InvalidQuota(f"{where}: {key.value!r} stands twice, again in line {line}; remove one")
            found[key.value] = loader.construct_object(value, deep=True)
        return found

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        return json.dumps(yaml.load(text, Loader), default=str)  # noqa: S506 - a safe loader
    except InvalidQuota:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise InvalidQuota(f"{where} is not YAML: {exc}; 'celery dq quotas export' writes the form") from None
