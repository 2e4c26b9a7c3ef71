# The names of kombu that its published types leave out; the reasons are in bases.py.
from typing import Any

from celery_dq.transport.bases import VirtualChannel, VirtualTransport

class RedisChannel(VirtualChannel):
    connection_errors: tuple[type[BaseException], ...]
    from_transport_options: tuple[str, ...]
    connection_class: Any
    connection_class_ssl: Any
    active_fanout_queues: set[str]
    @property
    def _refresh_binding(self) -> Any: ...
    fanout_prefix: bool | str
    keyprefix_queue: str
    keyprefix_binding_permanent: str
    keyprefix_binding_deadlines: str
    sep: str
    Client: Any
    client: Any
    subclient: Any
    pool: Any
    async_pool: Any
    _closing: bool
    _registered: bool
    _in_listen: Any
    _fanout_queues: dict[str, tuple[str, str]]

    def get_table(self, exchange: str) -> list[tuple[str, ...]]: ...
    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]: ...
    def _get_pool(self, asynchronous: bool = False) -> Any: ...
    def _new_queue(self, queue: str, auto_delete: bool = False, **kwargs: Any) -> None: ...
    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None: ...
    def _put_fanout(
        self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any
    ) -> None: ...
    def _basic_cancel(self, consumer_tag: str) -> None: ...
    def _get_subscribe_topic(self, queue: str) -> str: ...
    def _get_subscribe_topics(self, queue: str) -> list[str]: ...
    def _receive(self) -> bool: ...

class RedisSentinelChannel(RedisChannel):
    def _sentinel_managed_pool(self, asynchronous: bool = False) -> Any: ...

class RedisTransport(VirtualTransport):
    driver_type: str
    driver_name: str
    supports_batch_publish: bool
