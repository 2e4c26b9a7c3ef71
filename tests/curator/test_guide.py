"""The programs in the guide run unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery_dq.testing.waiting import wait_until
from tests.architecture.test_docs import blocks

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "zookeeper-queues.rst"


def test_the_programs_of_the_guide_run(hosts: str) -> None:
    sent: list[Any] = []
    names: dict[str, Any] = {"print": lambda *words: sent.append(words)}
    for language, _caption, text in blocks(GUIDE.read_text()):
        if language == "python":
            exec(text.replace("localhost:2181/shop", hosts), names)
    names["producer"].put({"to": "zoe"})
    wait_until(lambda: ("sending", {"to": "zoe"}) in sent, what=lambda: repr(sent))
    wait_until(lambda: ("now",) in sent, what=lambda: repr(sent))
    assert names["urgent"].peek() == ["can wait"]
    for name in ("producer", "consumer", "jobs", "urgent", "reminders"):
        names[name].close()
    names["session"].close()
