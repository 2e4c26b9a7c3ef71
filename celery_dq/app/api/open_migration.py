"""Opens both brokers of a migration, and finds its direction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.api.migration import BrokerMigration
from celery_dq.app.api.migration_report import MigrationOptions
from celery_dq.app.api.return_migration import ReturnMigration
from celery_dq.compat.kombu_messages import library_errors
from celery_dq.errors import ConfigurationError
from celery_dq.migration.stock_broker import STOCK_SCHEMES, StockBroker
from celery_dq.shown import shown_url
from celery_dq.transport.aliases import TENANT_SCHEMES

__all__ = ["opened_migration"]


@contextmanager
def opened_migration(
    app: Any, broker: BrokerAccess, source: str, target: str | None, options: MigrationOptions
) -> Iterator[BrokerMigration | ReturnMigration]:
    """Connect to both brokers; see ``app.dq.migration``."""
    with app.connection_for_write(source) as given, app.connection_for_write(target) as other:
        schemes = (given.transport_cls, other.transport_cls)
        is_return = schemes[0] in TENANT_SCHEMES and schemes[1] in STOCK_SCHEMES
        if not is_return and not (schemes[0] in STOCK_SCHEMES and schemes[1] in TENANT_SCHEMES):
            raise ConfigurationError(
                "A migration leads from redis://…, rediss://… or sentinel://… to dq-redis://…, dq-rediss://… "
                f"or dq-sentinel://…, or back, not from {shown_url(given.as_uri())} to "
                f"{shown_url(other.as_uri())}"
            )
    stock_url, tenant_url = (target, source) if is_return else (source, target)
    with (
        app.connection_for_write(stock_url, transport_options=options.stock_options) as stock,
        app.connection_for_write(tenant_url) as tenant,
        broker.channel(tenant),
        library_errors(stock),
    ):
        stock.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
        if is_return:
            yield ReturnMigration(broker, StockBroker(stock), tenant, options)
        else:
            yield BrokerMigration(app, broker, StockBroker(stock), tenant, options)
