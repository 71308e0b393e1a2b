"""Decorators that leave what they decorate as it is; nothing here is hosted there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def bootstrap(app: Any) -> Any:
    return app


def register_ping_handler(handler: F) -> F:
    return handler


def register_invocation_handler(handler: F) -> F:
    return handler


def _unchanged(*_: Any, **__: Any) -> Callable[[F], F]:
    return lambda handler: handler


stateful_session_manager = inject_adapter_id = _unchanged
register_load_adapter_handler = register_unload_adapter_handler = _unchanged
