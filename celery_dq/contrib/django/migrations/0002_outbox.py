"""The table of the outbox, which stays empty without ``dq_outbox``."""

from __future__ import annotations

from typing import Any, ClassVar

import django.utils.timezone
from django.db import migrations, models


def index_numbered(apps: Any, schema_editor: Any) -> None:
    """Index the rows that a relay has numbered, where a database can index a part of a table.

    The index is not a part of the model, because Django warns of it on MySQL, where a relay does without.
    """
    if schema_editor.connection.features.supports_partial_indexes:
        schema_editor.add_index(apps.get_model("celery_dq", "OutboxRow"), _numbered())


def _numbered() -> models.Index:
    return models.Index(fields=["id"], condition=models.Q(producer__gt=""), name="celery_dq_outbox_numbered")


class Migration(migrations.Migration):
    """Make the table."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("celery_dq", "0001_permissions")]
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="OutboxRow",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("lane", models.TextField()),
                ("task_id", models.CharField(max_length=200)),
                ("payload", models.BinaryField()),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("producer", models.CharField(default="", max_length=32)),
                ("sequence", models.BigIntegerField(default=0)),
                ("error", models.TextField(default="")),
            ],
            options={
                "verbose_name": "outbox row",
                "verbose_name_plural": "outbox rows",
                "default_permissions": (),
            },
        ),
        # The end of the table is the end of its index.
        # The hint is the one of the table, so a router excepts both or neither.
        migrations.RunPython(index_numbered, migrations.RunPython.noop, hints={"model_name": "outboxrow"}),
    ]
