"""The inner pool of a prefork pool, whose children Celery's event loop serves."""

from __future__ import annotations

import sys
from typing import Any


def asynchronous_pool(pool: Any) -> Any:
    """Return Celery's ``AsynPool`` inside a worker's pool, which has started; None for any other pool."""
    children = getattr(pool, "_pool", None)
    module = sys.modules.get("celery.concurrency.asynpool")
    return children if module is not None and isinstance(children, module.AsynPool) else None
