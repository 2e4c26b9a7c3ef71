"""Metrics for Prometheus, read from the state of the broker when they are asked for.

The numbers of messages are counted by the scripts in Redis, so no worker is asked, and no restart loses them.

``table``         the metrics: name, type, labels, source
``collector``     the collector of ``prometheus_client``, which reads the broker once for concurrent requests
``server``        the HTTP server of ``celery dq exporter`` and of a worker
``worker_step``   the boot step for ``dq_metrics_port``
``files/``        alert rules for Prometheus, and a dashboard for Grafana

Only ``collector`` and ``server`` need ``prometheus_client``, the extra ``metrics``.
"""
