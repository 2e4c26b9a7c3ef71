"""One page: how many deliveries are in which state."""

from __future__ import annotations

from django.db.models import Count
from django.http import HttpRequest, JsonResponse

from shop.models import Delivery


def overview(request: HttpRequest) -> JsonResponse:
    """Count the deliveries by state."""
    rows = Delivery.objects.values_list("state").annotate(Count("pk")).order_by("state")
    return JsonResponse(dict(rows))
