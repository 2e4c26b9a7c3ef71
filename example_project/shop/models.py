"""The tables of the shop."""

from __future__ import annotations

from django.db import models


class Merchant(models.Model):
    """A seller on the platform, which receives notices by HTTP about events in the shop."""

    name = models.CharField(max_length=80)
    endpoint = models.URLField()

    def __str__(self) -> str:
        return self.name


class Order(models.Model):
    """One purchase."""

    merchant = models.ForeignKey(Merchant, on_delete=models.CASCADE, related_name="orders")
    number = models.CharField(max_length=20)
    placed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.number


class Delivery(models.Model):
    """One notice to one merchant, with the state of its delivery."""

    class Kind(models.TextChoices):
        """The subject of the notice, most urgent first."""

        CODE = "code", "verification code"
        ORDER = "order", "order notice"
        MARKETING = "marketing", "marketing"

    class State(models.TextChoices):
        """The state of the delivery."""

        WAITING = "waiting"
        RETRYING = "retrying"
        DELIVERED = "delivered"
        GIVEN_UP = "given up"

    id = models.CharField(primary_key=True, max_length=20)
    merchant = models.ForeignKey(Merchant, on_delete=models.CASCADE, related_name="deliveries")
    order = models.ForeignKey(Order, on_delete=models.CASCADE, null=True, related_name="deliveries")
    kind = models.CharField(max_length=10, choices=Kind.choices)
    state = models.CharField(max_length=10, choices=State.choices, default=State.WAITING)
    attempts = models.PositiveSmallIntegerField(default=0)

    class Meta:
        verbose_name_plural = "deliveries"

    def __str__(self) -> str:
        return self.id


class Posting(models.Model):
    """One line of the ledger. Its id gives the real order of posting, its number the intended one."""

    number = models.PositiveIntegerField(unique=True)
    kind = models.CharField(max_length=10)
    amount = models.BigIntegerField()
    balance = models.BigIntegerField()
    token = models.BigIntegerField()
    worker = models.CharField(max_length=80)
    posted_at = models.FloatField()

    def __str__(self) -> str:
        return f"{self.number}: {self.balance}"


class Fence(models.Model):
    """A single row with the highest token so far, and the number of refused lower tokens."""

    token = models.BigIntegerField(default=0)
    refused = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return str(self.token)
