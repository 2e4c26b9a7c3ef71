"""The tables of the ledger."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models


def pk() -> models.BigAutoField[Any, Any]:
    """Return the primary key that Django would add."""
    return models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")


class Migration(migrations.Migration):
    """Create the ledger and its fence."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("shop", "0001_initial")]
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="Posting",
            fields=[
                ("id", pk()),
                ("number", models.PositiveIntegerField(unique=True)),
                ("kind", models.CharField(max_length=10)),
                ("amount", models.BigIntegerField()),
                ("balance", models.BigIntegerField()),
                ("token", models.BigIntegerField()),
                ("worker", models.CharField(max_length=80)),
                ("posted_at", models.FloatField()),
            ],
        ),
        migrations.CreateModel(
            name="Fence",
            fields=[
                ("id", pk()),
                ("token", models.BigIntegerField(default=0)),
                ("refused", models.PositiveIntegerField(default=0)),
            ],
        ),
    ]
