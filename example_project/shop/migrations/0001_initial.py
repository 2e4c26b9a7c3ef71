"""The first tables."""

from __future__ import annotations

from typing import Any, ClassVar

import django.db.models.deletion
from django.db import migrations, models


def pk() -> models.BigAutoField[Any, Any]:
    """Return the primary key that Django would add."""
    return models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")


def belongs_to(model: str, name: str, **options: Any) -> models.ForeignKey[Any, Any]:
    """Return a foreign key whose rows are deleted with the row that it refers to."""
    return models.ForeignKey(
        on_delete=django.db.models.deletion.CASCADE, related_name=name, to=f"shop.{model}", **options
    )


class Migration(migrations.Migration):
    """Create merchants, orders and deliveries."""

    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="Merchant",
            fields=[
                ("id", pk()),
                ("name", models.CharField(max_length=80)),
                ("endpoint", models.URLField()),
            ],
        ),
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", pk()),
                ("number", models.CharField(max_length=20)),
                ("placed_at", models.DateTimeField(auto_now_add=True)),
                ("merchant", belongs_to("merchant", "orders")),
            ],
        ),
        migrations.CreateModel(
            name="Delivery",
            fields=[
                ("id", models.CharField(max_length=20, primary_key=True, serialize=False)),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("code", "verification code"),
                            ("order", "order notice"),
                            ("marketing", "marketing"),
                        ],
                        max_length=10,
                    ),
                ),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("waiting", "Waiting"),
                            ("retrying", "Retrying"),
                            ("delivered", "Delivered"),
                            ("given up", "Given Up"),
                        ],
                        default="waiting",
                        max_length=10,
                    ),
                ),
                ("attempts", models.PositiveSmallIntegerField(default=0)),
                ("merchant", belongs_to("merchant", "deliveries")),
                ("order", belongs_to("order", "deliveries", null=True)),
            ],
            options={"verbose_name_plural": "deliveries"},
        ),
    ]
