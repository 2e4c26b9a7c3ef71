# The names of kombu that its published types leave out; the reasons are in bases.py.
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
    errors: list[Any] | None
    body: str | bytes
    content_type: str | None
    accept: set[str] | None
    _state: str

    def __init__(self, **kwargs: Any) -> None: ...
    @property
    def payload(self) -> Any: ...
    def decode(self) -> Any: ...
    def ack(self, multiple: bool = False) -> None: ...
    def requeue(self) -> None: ...
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
    deadletter_queue: str | None
    state: Any
    qos: Any
    _qos: Any
    _consumers: set[str]
    _active_queues: list[str]
    _tag_to_queue: dict[str, str]

    def __init__(self, connection: Any, **kwargs: Any) -> None: ...
    def queue_declare(self, *args: Any, **kwargs: Any) -> Any: ...
    def queue_bind(self, *args: Any, **kwargs: Any) -> Any: ...
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
    def basic_qos(self, prefetch_size: int, prefetch_count: int, apply_global: bool) -> None: ...
    def typeof(self, exchange: str) -> Any: ...
    def close(self) -> None: ...
    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]: ...
    def _next_delivery_tag(self) -> str: ...

class VirtualTransport:
    Channel: type[VirtualChannel]
    default_port: int
    implements: Any
    client: Any
    cycle: Any
    channels: list[Any]
    _avail_channels: list[Any]
    connection_errors: tuple[type[BaseException], ...]
    channel_errors: tuple[type[BaseException], ...]

    def __init__(self, client: Any, **kwargs: Any) -> None: ...
    def establish_connection(self) -> Any: ...
    def close_connection(self, connection: Any) -> None: ...
    def close_channel(self, channel: Any) -> None: ...
