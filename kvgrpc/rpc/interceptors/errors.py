"""Every exception of a servicer becomes a status here, and nowhere else."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvgrpc.errors import Internal, InvalidRequest, KvGrpcError
from kvgrpc.observability import metrics
from kvgrpc.rpc.interceptors.call import Behaviour, Context, Method
from kvgrpc.rpc.status import trailing

_log = logging.getLogger(__name__)


def errors(method: Method, inner: Behaviour) -> Behaviour:
    """Domain exceptions keep their code and details; anything else is INTERNAL with an id and no text of its own."""

    async def call(request: Any, context: Context) -> Any:
        try:
            return await inner(request, context)
        except KvGrpcError as error:
            # Its frames have the request, and an abort while it is handled makes a cycle of it: MiB would stay until
            # the collector of cycles finds them.
            await _refuse(context, error.with_traceback(None))
        except DecodeError as error:
            error.__traceback__ = None
            await _refuse(context, InvalidRequest.of("request", "undecodable", "a message of this method's type"))
        except grpc.aio.InternalError as error:
            await _refuse_if_alive(method, context, error)
        except grpc.aio.BaseError:
            raise  # aborted already, or the server has stopped
        except asyncio.CancelledError as error:
            if _cancelled_from_outside():
                raise  # the caller went away, its deadline passed, or the server stops
            # Something that the servicer awaited was cancelled: the library would take it for its own and never answer.
            await _refuse(context, _internal(method, error))
        except Exception as error:
            await _refuse(context, _internal(method, error))

    return call


async def _refuse(context: Context, error: KvGrpcError) -> None:
    metrics.ERRORS.labels(error.reason.name).inc()
    try:
        await context.abort(*trailing(error))
    except grpc.aio.InternalError:
        # What the library logs as a bug where it does not know yet that the caller went away.
        raise asyncio.CancelledError from None


async def _refuse_if_alive(method: Method, context: Context, error: grpc.aio.InternalError) -> None:
    """A write failed: the call was over, or the servicer wrote twice at once. Only the second can still be answered."""
    request_id = uuid.uuid4().hex
    try:
        await _refuse(context, Internal.of(method.path, request_id))
    except grpc.aio.AbortError:
        _log.error("%s failed, request id %s", method.path, request_id, exc_info=error)
        raise


def _internal(method: Method, error: BaseException) -> Internal:
    request_id = uuid.uuid4().hex
    if not isinstance(error, asyncio.CancelledError) or _CAN_TELL:
        _log.error("%s failed, request id %s", method.path, request_id, exc_info=error)
    return Internal.of(method.path, request_id)


# Python 3.10 cannot say who cancelled a task: there the status is tried in any case, and is lost when the call is over.
_CAN_TELL = hasattr(asyncio.Task, "cancelling")


def _cancelled_from_outside() -> bool:
    task: Any = asyncio.current_task()
    return _CAN_TELL and task.cancelling() > 0
