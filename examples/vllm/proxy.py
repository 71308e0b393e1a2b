"""A proxy for one prefill and one decode engine of vLLM: each request goes to both, with one transfer id.

The parameters are those of vLLM's own Mooncake connector, so a proxy or router that was made for it does as well.
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--port", type=int, default=8000)
options.add_argument("--prefill", default="http://127.0.0.1:8100", help="URL of the prefill engine")
options.add_argument("--bootstrap", default="http://127.0.0.1:8998", help="its bootstrap address, as decode reaches it")
options.add_argument("--decode", default="http://127.0.0.1:8200", help="URL of the decode engine")
arguments = options.parse_args()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # An answer may take any time, an engine that is there accepts at once.
    async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), trust_env=False) as client:
        app.state.client = client
        app.state.prefilling = set()
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/v1/completions")
@app.post("/v1/chat/completions")
async def complete(request: Request) -> Response:
    client: httpx.AsyncClient = app.state.client
    body: dict[str, Any] = await request.json()
    transfer_id = f"xfer-{uuid.uuid4()}"
    prefill = {**body, "stream": False, "max_tokens": 1}
    prefill.pop("stream_options", None)
    if "max_completion_tokens" in body:
        prefill["max_completion_tokens"] = 1
    prefill["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": transfer_id}
    decode = {
        **body,
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": arguments.bootstrap,
        },
    }
    # At once: decode's pages are waiting when prefill has computed the prompt.
    task = asyncio.ensure_future(client.post(arguments.prefill + request.url.path, json=prefill))
    app.state.prefilling.add(task)
    task.add_done_callback(app.state.prefilling.discard)
    question = client.build_request("POST", arguments.decode + request.url.path, json=decode)
    try:
        answer = await client.send(question, stream=True)
    except httpx.HTTPError as error:
        task.cancel()
        text = f"decode at {arguments.decode} cannot be reached: {type(error).__name__} {error}"
        return JSONResponse({"error": {"message": text, "type": "BadGatewayError", "code": 502}}, 502)
    if answer.is_error:
        task.cancel()  # prefill need not compute what nobody decodes

    async def pieces() -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:
            await answer.aclose()

    return StreamingResponse(pieces(), answer.status_code, media_type=answer.headers.get("content-type"))


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")
