"""The permissions of the dashboard; no table is made."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    """Register the model that the permissions belong to."""

    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="Dashboard",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
            ],
            options={
                "verbose_name": "dashboard",
                "verbose_name_plural": "dashboard",
                "permissions": (
                    (
                        "view_queues",
                        "Can view queues, tenants, messages, dead letters, dedup locks and leaders",
                    ),
                    ("view_arguments", "Can view the arguments of tasks, if dq_web_show_arguments is set"),
                    ("change_quotas", "Can change the quotas of tenants"),
                    ("pause_tenants", "Can pause and resume tenants"),
                    ("pause_queues", "Can pause and resume whole queues"),
                    ("cancel_messages", "Can cancel tasks"),
                    ("edit_messages", "Can reschedule, reprioritise, edit and move tasks"),
                    ("replay_dead_letters", "Can send dead letters again"),
                    ("edit_dead_letters", "Can change dead letters and send them again"),
                    ("purge_dead_letters", "Can delete dead letters"),
                    ("release_dedup_locks", "Can release dedup locks"),
                ),
                "managed": False,
                "base_manager_name": "objects",
                "default_permissions": (),
            },
        ),
    ]
