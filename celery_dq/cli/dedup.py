"""Look at dedup claims, and take one away."""

from __future__ import annotations

import click

from celery_dq.app.face import DQ
from celery_dq.cli.output import command, show, show_table

_COLUMNS = ("tenant", "key", "running", "age_s", "head", "heir", "tail", "followers", "token")


@click.group()
def claims() -> None:
    """Dedup: who has which key, and is it worth it."""


@claims.command(name="list")
@click.argument("queue")
@click.option("--limit", default=50, show_default=True, help="Keys to show.")
@command
def list_(dq: DQ, as_json: bool, queue: str, limit: int) -> None:
    """The keys of QUEUE that somebody has."""
    show_table(as_json, dq.dedup[queue].list(limit), _COLUMNS, f"Nobody has a key in {queue!r}.")


@claims.command()
@click.argument("queue")
@click.argument("key")
@click.option("--tenant", default="", help="Whose key.")
@command
def release(dq: DQ, as_json: bool, queue: str, key: str, tenant: str) -> None:
    """Take KEY from the task that has it, so that who waits goes on. What runs, runs on without a claim."""
    head = dq.dedup[queue].release(key, tenant=tenant)
    said = f"Nobody has {key!r} in {queue!r}." if head is None else f"{head} has no claim any more."
    show(as_json, {"released": head}, said)


@claims.command()
@click.argument("queue")
@command
def verdicts(dq: DQ, as_json: bool, queue: str) -> None:
    """How often each verdict was given in QUEUE, and how many runs were evicted."""
    found = dq.dedup[queue].verdicts()
    said = "\n".join(f"{name:<8} {count:>12,}" for name, count in sorted(found.items()))
    show(as_json, found, said or f"No call to {queue!r} had a key.")


@claims.command()
@click.argument("queue")
@click.option("--consumers", required=True, type=click.IntRange(1), help="Tasks that run at a time.")
@click.option("--sample", default=1_000, show_default=True, help="Waiting messages to look at.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the distances, as PNG or SVG.")
@command
def repetition(dq: DQ, as_json: bool, queue: str, consumers: int, sample: int, plot: str | None) -> None:
    """How much the calls that wait in QUEUE repeat each other."""
    found = dq.dedup[queue].repetition(consumers, sample=sample)
    if plot is not None:
        found.plot(plot)
    show(as_json, found, f"{found.kind.value}: {found.advice}")
