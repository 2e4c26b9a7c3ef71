"""Reference pages that are made from the code when the documentation is built.

``.. generated:: settings`` (or another name of :data:`PAGES`) stands for what the function of that name
returns: reStructuredText about what exists now, so that no table can be out of date.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click
from docutils import nodes
from docutils.statemachine import StringList
from log_events import EVENTS
from sphinx.util.docutils import SphinxDirective

from celery_dq.beat import schedule_store
from celery_dq.compat.guard import READ_VERSIONS, TABLE
from celery_dq.duration import format_duration
from celery_dq.keys import (
    MigrationKeys,
    PartitionKeys,
    audit_stream,
    history_stream,
    queue_registry,
)
from celery_dq.leadership import redis_election
from celery_dq.metrics.table import METRICS
from celery_dq.migration import stock_broker
from celery_dq.options.schema import Kind, Setting
from celery_dq.options.sections import QUEUE_SETTINGS, SETTINGS
from celery_dq.other_brokers import redis_coordinator
from celery_dq.scripts import ScriptSet
from celery_dq.transport.redis.store.script_calls import load_scripts
from celery_dq.transport.redis.store.transient import TransientQueues
from celery_dq.znodes import (
    JOURNALS,
    PRESENCES,
    AllocationNodes,
    AllocatorNodes,
    BeatNodes,
    BrokerNodes,
    LeadershipNodes,
)


def settings() -> str:
    """Every ``dq_*`` setting with kind, default and bounds."""
    rows = [_row(setting) for setting in SETTINGS]
    return _table(("setting", "takes", "default", "meaning"), rows, "20 25 10 45")


def queue_settings() -> str:
    """Keys of an entry of ``dq_queues`` besides the parts of a quota."""
    rows = [_row(setting, setting.name.removeprefix("dq_")) for setting in QUEUE_SETTINGS]
    return _table(("key", "takes", "default", "meaning"), rows, "20 25 10 45")


def _row(setting: Setting, name: str = "") -> tuple[str, ...]:
    def show(value: Any) -> str:
        if setting.kind is Kind.DURATION and value is not None:
            return f'``"{format_duration(value)}"``'
        return f"``{value!r}``"

    takes = " or ".join(f"``{choice!r}``" for choice in setting.choices) or setting.kind.value
    if setting.low is not None and setting.high is not None:
        takes += f", {show(setting.low)} to {show(setting.high)}"
    if setting.zero_is_off:
        takes += "; ``0`` is off"
    if setting.optional:
        takes += "; ``None``"
    return f"``{name or setting.name}``", takes, show(setting.default), setting.meaning


def keys() -> str:
    """Every key of a partition, and those of no partition."""
    example = PartitionKeys("online", "push")
    sample = {
        "tenant": "<tenant>",
        "rotation": "<tenant>",
        "held": "<consumer>",
        "reap_grace": "<consumer>",
        "producer": "<producer>",
        "followers": "<message>",
    }
    rows = []
    for name, member in vars(PartitionKeys).items():
        doc = inspect.getdoc(member) or ""
        found = re.match(r"(HASH|ZSET|LIST|STRING|SET|CHANNEL): (.+)", " ".join(doc.split()))
        if found is None:
            continue
        value = getattr(example, name)
        key = value(sample[name]) if callable(value) else value
        rows.append((f"``{key.removeprefix(example.prefix)}``", found[1], found[2]))
    transients = TransientQueues("dq:online:")
    others = [(queue_registry("online"), queue_registry), (audit_stream("online"), audit_stream)]
    others += [(history_stream("online"), history_stream)]
    others += [(transients.key("<queue>"), transients.key), (transients.mark("<queue>"), transients.mark)]
    for key, function in others:
        kind, _, meaning = " ".join((inspect.getdoc(function) or "").split()).partition(": ")
        rows.append((f"``{key}``", kind, meaning))
    migration = MigrationKeys()
    named = (
        ("state", migration.state),
        ("staged", migration.staged("<queue>")),
        ("arrived", migration.arrived),
    )
    for name, key in named:
        doc = inspect.getdoc(vars(MigrationKeys)[name]) or ""
        kind, _, meaning = " ".join(doc.split()).partition(": ")
        rows.append((f"``{key}`` (on the stock broker)", kind, meaning))
    return _table(("key", "type", "holds"), rows, "35 10 55")


def znodes() -> str:
    """Every folder and node of celery-dq in ZooKeeper."""
    leader, allocation, broker = (
        LeadershipNodes("online", "<name>"),
        AllocationNodes("online"),
        BrokerNodes("online"),
    )
    queue = broker.queue("<queue>")
    found = {
        JOURNALS: "Persistent children, one for each writer whose transactions must take effect once.",
        PRESENCES: "Ephemeral children, one for each consumer that holds items in a session.",
        leader.candidate_prefix("<guid>") + "<sequence>": "A candidate, an ephemeral node.",
        allocation.member("<worker>", 0).rpartition("|")[0]
        + "|<session>": "A running worker, an ephemeral node.",
        allocation.serverlist + "/<generation>/<worker>": "The partitions that a worker serves.",
        broker.bindings("<exchange>"): "The bindings of an exchange, in the names of its nodes.",
        broker.transient("<queue>"): "The users of a transient queue, ephemeral nodes.",
        queue.ready_prefix(9)
        + "<sequence>": "A waiting item; the digits before the sequence are the priority.",
        queue.delayed_prefix(1_800_000_000_000) + "<sequence>": "A delayed item with its due time.",
        BeatNodes("online", "<beat>").entry("<entry>"): "The last tick of an entry of an elected beat.",
    }
    for each in (leader, AllocatorNodes("online"), allocation, broker, queue):
        for kind in type(each).__mro__:
            for name, member in vars(kind).items():
                path = getattr(each, name) if isinstance(member, property) else None
                if isinstance(path, str):
                    found[path] = " ".join((inspect.getdoc(member) or "").split())
    rows = [(f"``{unquote(path)}``", meaning) for path, meaning in sorted(found.items())]
    return _table(("node", "holds"), rows, "45 55")


def cli() -> str:
    """Every command below ``celery dq``, as its ``--help`` says, and with its output in a small shop."""
    from celery_dq.cli import dq

    outputs = json.loads((Path(__file__).parents[1] / "reference" / "cli_outputs.json").read_text("utf-8"))
    blocks = []
    for path, command in _commands(dq, "celery dq"):
        text = command.get_help(click.Context(command, info_name=path, max_content_width=90))
        blocks.append(f"{_heading(path)}\n\n.. code-block:: none\n\n{_indented(text)}\n")
        found = outputs.get(path.removeprefix("celery dq "), ())
        shown = "\n".join(f"$ celery -A shop dq {line}\n{output}" for line, output in found)
        if shown:
            blocks.append(f".. code-block:: console\n\n{_indented(shown)}\n")
    return "\n".join(blocks)


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    for name in sorted(group.commands):
        command = group.commands[name]
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def rights() -> str:
    """Per role the purpose, and the rules of a Redis user that may do that and no more."""
    from celery_dq.transport.redis.store.rights import ROLES

    blocks = []
    for role in ROLES:
        command = f"ACL SETUSER {role.name} on >password {role.acl()}"
        rules = _indented(" \\\n    ".join(textwrap.wrap(command, 100, break_on_hyphens=False)))
        heading = f"``{role.name}``: {role.purpose}; {len(role.commands)} commands."
        blocks.append(f"{heading}\n\n.. code-block:: none\n\n{rules}\n")
    return "\n".join(blocks)


def log_events() -> str:
    """Every event of the log with its meaning."""
    rows = [(f"``{name}``", meaning) for name, meaning in EVENTS.items()]
    return _table(("event", "meaning"), rows, "30 70")


def metrics() -> str:
    """Every metric with its labels and the attribute that it shows."""
    rows = []
    for metric in METRICS:
        labels = ", ".join(f"``{label}``" for label in metric.labels)
        values = ", ".join(f"``{value}``" for value, _ in metric.sources if value not in ("", "*"))
        meaning = f"{metric.meaning} ``{metric.labels[-1]}`` is {values}." if values else metric.meaning
        sources = ", ".join(f"``{source}``" for _, source in metric.sources)
        rows.append((f"``{metric.name}``", metric.kind, labels, meaning, sources))
    return _table(("metric", "type", "labels", "meaning", "source"), rows, "32 8 10 30 20")


def private_names() -> str:
    """The private names of other libraries, with their purpose, by module of ``celery_dq.compat``."""
    found: dict[tuple[str, ...], list[str]] = {}
    for each in TABLE:
        user = f"``compat/{each.user}.py``" if each.user != "worker" else "``worker/``"
        found.setdefault((user, each.library, each.module, each.why, each.seam), []).append(each.name)
    rows = [
        (user, f"{library}, ``{module}``: {', '.join(f'``{name}``' for name in names)}", why, seam)
        for (user, library, module, why, seam), names in found.items()
    ]
    return _table(
        ("file", "private names", "purpose", "public interface that is missing"), rows, "16 36 24 24"
    )


def read_versions() -> str:
    """The releases of other libraries whose private names were read."""
    rows = [
        (library, f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}")
        for library, (oldest, newest) in READ_VERSIONS.items()
    ]
    return _table(("library", "releases"), rows, "50 50")


def scripts() -> str:
    """The contract of every Lua script of a queue, with the keys of its includes."""
    return _contracts(load_scripts(), "{}")


def other_scripts() -> str:
    """The contracts of the scripts of elections, beat, dedup locks on other brokers, and migration."""
    sets = {
        "election": redis_election.load_scripts(),
        "beat": schedule_store.load_scripts(),
        "dedup lock": redis_coordinator.load_scripts(),
        "migration": stock_broker.load_scripts(),
    }
    return "\n".join(_contracts(each, f"{area}: {{}}") for area, each in sets.items())


def _contracts(loaded: ScriptSet, title: str) -> str:
    blocks = []
    for name in loaded.names():
        header = []
        for line in (loaded.directory / f"{name}.lua").read_text(encoding="utf-8").splitlines():
            if not line.startswith("--") or line.startswith("--@"):
                break
            header.append(line[2:].removeprefix(" "))
        derives, behind = header.index("DERIVES") + 1, header.index("ARGV")
        header[derives:behind] = [f"  {entry}" for entry in loaded[name].contract.derives or ("none",)]
        contract = "\n".join(header[header.index("KEYS") :])
        summary = loaded[name].contract.summary
        heading = _heading(title.format(name))
        blocks.append(f"{heading}\n\n{summary}\n\n.. code-block:: none\n\n{_indented(contract)}\n")
    return "\n".join(blocks)


def _heading(text: str) -> str:
    return f"{text}\n{'-' * len(text)}"


def _indented(text: str) -> str:
    return "\n".join(f"   {line}".rstrip() for line in text.splitlines())


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]], widths: str) -> str:
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
    for row in (header, *rows):
        lines += [f"   {'* -' if place == 0 else '  -'} {cell}" for place, cell in enumerate(row)]
    return "\n".join(lines) + "\n"


PAGES: tuple[Callable[[], str], ...] = (
    settings,
    queue_settings,
    keys,
    znodes,
    cli,
    rights,
    log_events,
    metrics,
    private_names,
    read_versions,
    scripts,
    other_scripts,
)


class Generated(SphinxDirective):
    """``.. generated:: <name of one of PAGES>``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse what the function says, headings included."""
        pages = {page.__name__: page for page in PAGES}
        text = pages[self.arguments[0]]()
        lines = StringList(text.splitlines(), source=f"<generated {self.arguments[0]}>")
        section = nodes.section()
        section.document = self.state.document
        self.state.nested_parse(lines, self.content_offset, section, match_titles=1)
        return section.children


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.add_directive("generated", Generated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
