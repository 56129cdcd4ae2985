"""What uvicorn can do at best: a bare ASGI app that answers each request with its own body. No access log, no lifespan,
no headers that nobody has asked for; uvloop and httptools.

python echo.py      prints the port of 127.0.0.1 where it listens
"""

from __future__ import annotations

import socket
from typing import Any

import uvicorn


async def app(_scope: dict[str, Any], receive: Any, send: Any) -> None:
    message = await receive()
    body = message["body"]
    while message.get("more_body"):
        message = await receive()
        body += message["body"]
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
