# What kombu has and its published types leave out; the reasons are in bases.py.
from collections.abc import Callable
from typing import Any

class KombuMessage:
    MessageStateError: type[Exception]
    channel: Any
    delivery_tag: str
    delivery_info: dict[str, Any]
    properties: dict[str, Any]
    headers: dict[str, Any]
    acknowledged: bool
    body: str | bytes
    content_type: str | None
    accept: set[str] | None
    _state: str

    def __init__(self, **kwargs: Any) -> None: ...
    def ack(self, multiple: bool = False) -> None: ...
    def _decode(self) -> Any: ...

class Delivered(dict[str, Any]):
    restored: bool

class VirtualQoS:
    channel: Any
    prefetch_count: int
    restore_at_shutdown: bool
    _delivered: Delivered
    _on_collect: Any

    def __init__(self, channel: Any, prefetch_count: int = 0) -> None: ...

class VirtualChannel:
    connection: Any
    closed: bool
    do_restore: bool
    auto_delete_queues: set[str]
    state: Any
    qos: Any
    _qos: Any
    _consumers: set[str]
    _active_queues: list[str]
    _tag_to_queue: dict[str, str]

    def __init__(self, connection: Any, **kwargs: Any) -> None: ...
    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None: ...
    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any: ...
    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **kwargs: Any
    ) -> None: ...
    def basic_cancel(self, consumer_tag: str) -> None: ...
    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any: ...
    def message_to_python(self, raw_message: Any) -> Any: ...
    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]: ...
    def close(self) -> None: ...
    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]: ...
    def _next_delivery_tag(self) -> str: ...

class RedisChannel(VirtualChannel):
    connection_errors: tuple[type[BaseException], ...]
    from_transport_options: tuple[str, ...]
    connection_class: Any
    connection_class_ssl: Any
    active_fanout_queues: set[str]
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
    def _put_fanout(
        self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any
    ) -> None: ...
    def _basic_cancel(self, consumer_tag: str) -> None: ...
    def _get_subscribe_topic(self, queue: str) -> str: ...
    def _get_subscribe_topics(self, queue: str) -> list[str]: ...
    def _receive(self) -> bool: ...

class RedisSentinelChannel(RedisChannel):
    def _sentinel_managed_pool(self, asynchronous: bool = False) -> Any: ...

class VirtualTransport:
    Channel: type[VirtualChannel]
    default_port: int
    implements: Any
    client: Any
    cycle: Any
    channels: list[Any]
    _avail_channels: list[Any]

    def __init__(self, client: Any, **kwargs: Any) -> None: ...
    def close_connection(self, connection: Any) -> None: ...

class RedisTransport(VirtualTransport):
    driver_type: str
    driver_name: str
    connection_errors: tuple[type[BaseException], ...]
    supports_batch_publish: bool
