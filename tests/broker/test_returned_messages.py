"""A message that a consumer returns comes before what is claimed after it."""

from __future__ import annotations

import pytest

from tests.broker.kombu_client import KombuClient, bodies


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_returned_message_comes_before_those_behind_it(kombu_client: KombuClient, prefetch: int) -> None:
    kombu_client.publish(*range(6))
    with kombu_client.connect() as connection, kombu_client.consuming(connection, prefetch) as got:
        kombu_client.drain(connection, got, prefetch)
        got[0].requeue()
        kombu_client.drain(connection, got, prefetch + 1)
        assert bodies(got) == [*range(prefetch), 0]
