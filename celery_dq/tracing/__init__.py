"""Spans for OpenTelemetry where its instrumentation of Celery sees nothing; off unless ``dq_otel`` is set.

``spans``        the spans and their attributes; a span for each batch that the buffer hands over
``worker_step``  spans from the delivery to the start of a task, and for dead letters

They need opentelemetry-api only, and are imported only when they are used.
"""
