"""One HTTP request and its answer, in a thread: so many bytes, nothing followed, and ended by whoever waits for it."""

from __future__ import annotations

import contextlib
import functools
import http.client
import socket
import ssl
import time
from typing import NamedTuple

from broker.origin import Origin

CHUNK = 64 * 1024


class Answer(NamedTuple):
    status: int
    kind: str  # its Content-Type
    body: bytes


class TooLong(Exception):
    """The answer is over the limit."""


class NoAnswer(Exception):
    """In words, without anything of the request."""


class Fetch:
    def __init__(
        self, origin: Origin, method: str, target: str, headers: dict[str, str], body: bytes, seconds: float, most: int
    ) -> None:
        self._origin = origin
        self._request = method, target, body, {**headers, "Host": origin.authority, "Connection": "close"}
        self._deadline = time.monotonic() + seconds
        self._most = most
        self._socket: socket.socket | None = None
        self._cancelled = False

    def run(self) -> Answer:
        """Blocks. What a library says of its trouble may quote the request, so it is not passed on."""
        who = self._origin.host
        try:
            return self._exchange()
        except ssl.SSLCertVerificationError as error:
            raise NoAnswer(f"{who} has no certificate that can be trusted: {error.verify_message}") from None
        except ssl.SSLError:
            raise NoAnswer(f"{who} cannot be talked to in TLS") from None
        except socket.gaierror:
            raise NoAnswer(f"{who} is not known to the resolver") from None
        except http.client.IncompleteRead:
            raise NoAnswer(f"{who} stopped in the middle of its answer") from None
        except http.client.HTTPException as error:
            raise NoAnswer(f"{who} does not answer in HTTP ({type(error).__name__})") from None
        except OSError as error:
            raise NoAnswer(f"{who} cannot be reached: {error.strerror or type(error).__name__}") from None
        finally:
            self._close()

    def cancel(self) -> None:
        """From any thread: what waits for bytes has waited for long enough."""
        self._cancelled = True
        if self._socket is not None:
            with contextlib.suppress(OSError, ValueError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _exchange(self) -> Answer:
        method, target, body, headers = self._request
        connection = http.client.HTTPConnection(self._origin.host, self._origin.port)
        connection.sock = self._connected()
        connection.request(method, target, body or None, headers)
        response = connection.getresponse()
        if response.getheader("Content-Encoding", "identity").lower() != "identity":
            raise NoAnswer(f"{self._origin.host} answers in an encoding that it was not asked for")
        parts, size = [], 0
        while part := response.read(min(CHUNK, self._most + 1)):
            parts.append(part)
            size += len(part)
            if size > self._most:
                raise TooLong
        if response.length:  # more has been promised
            raise http.client.IncompleteRead(b"")
        return Answer(response.status, response.getheader("Content-Type", ""), b"".join(parts))

    def _connected(self) -> socket.socket:
        host, port = self._origin.host, self._origin.port
        trouble: OSError | None = None
        for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            self._socket = socket.socket(family, kind, protocol)
            try:
                self._socket.settimeout(self._left())
                self._socket.connect(place)
                if self._origin.scheme == "https":
                    self._socket = trusting().wrap_socket(self._socket, server_hostname=host)
                return self._socket
            except ssl.SSLError:
                raise
            except OSError as error:
                self._close()
                trouble = error
        raise trouble or OSError("no address")

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0 or self._cancelled:
            raise TimeoutError
        return left

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()


@functools.cache
def trusting() -> ssl.SSLContext:
    """The system's certificates, as SSL_CERT_FILE and SSL_CERT_DIR have it."""
    return ssl.create_default_context()
