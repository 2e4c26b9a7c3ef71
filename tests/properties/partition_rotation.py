"""The sets of resources of the model of a partition, and the rotation of each resource."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from celery_dq.transport.resource_set import resources_of


class Rotations:
    def __init__(self) -> None:
        self.sets: list[str] = []
        self.of: dict[str, list[str]] = {}

    def enter(self, tenant: str) -> None:
        """A message waits for `tenant`, which may be a set."""
        resources = resources_of(tenant)
        if resources is None or tenant in self.sets:
            return
        self.sets.append(tenant)
        for each in resources:
            self.of.setdefault(each, [each]).append(tenant)

    def leave_empty(self, waiting: Mapping[str, Sequence[object]]) -> None:
        for tenant in [each for each in self.sets if not waiting.get(each)]:
            self.sets.remove(tenant)
            for each in resources_of(tenant) or ():
                self.of[each].remove(tenant)
                if self.of[each] == [each]:
                    del self.of[each]

    def next_of(
        self, resource: str, waiting: Mapping[str, Sequence[object]], passed: Collection[str] = ()
    ) -> str | None:
        """Return the backlog from which `resource` takes its next message; none of those passed over."""
        rotation = self.of.get(resource, [resource])
        return next((each for each in rotation if waiting.get(each) and each not in passed), None)

    def served(self, resource: str, backlog: str) -> None:
        rotation = self.of.get(resource)
        if rotation:
            rotation.remove(backlog)
            rotation.append(backlog)
