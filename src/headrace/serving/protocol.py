"""HTTP by uvicorn, with limits on the number of connections, on the time that the header of a request takes to arrive,
and on the time that a client takes to read an answer."""

import asyncio
import logging
import math
import socket
import time

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

HEADER_SECONDS = 10
SEND_SECONDS = 60
SPARE = 16  # file descriptors that are left for other files than connections
LOG_SECONDS = 60.0  # between two lines about connections that are closed


def most_descriptors(connections: int) -> float:
    """The number of file descriptors that connections may have, at most `connections`. The limit of the system is
    raised as far as this needs, or as the system permits."""
    if resource is None:
        return math.inf
    soft, hard = (math.inf if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    if (limit := min(hard, connections + SPARE)) > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return min(max(soft, limit) - SPARE, connections)


class Listener(socket.socket):
    """Closes a new connection at once if its file descriptor, the lowest that is free, is not below `most`. asyncio
    would run out of them, and write thousands of tracebacks as long as clients try to connect."""

    most = math.inf
    _logged = -math.inf

    def accept(self) -> tuple[socket.socket, object]:
        connection, address = super().accept()
        if connection.fileno() < self.most:
            return connection, address
        connection.close()
        if (now := time.monotonic()) - self._logged >= LOG_SECONDS:
            self._logged = now
            logging.getLogger("uvicorn.error").warning("all %d connections are in use; more are closed", self.most)
        raise BlockingIOError  # as if nobody had connected


class Protocol(H11Protocol):
    """Closes a connection if a header is not complete in time, counted from the start of the connection or from the
    first byte of a later header; if the rest of a body that was answered already is late; or if the client does not
    read an answer. uvicorn waits without limit, so that clients who send or read nothing could take all connections."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing is paused while anything is unread
        self._set_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread = self.loop.call_later(SEND_SECONDS, self.transport.abort)  # `close` waits until all is read

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_deadline()

    def _set_deadline(self) -> None:
        answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if not answered and self.conn.their_state is not h11.IDLE:
            self._end_deadline()
        elif self.deadline is None:
            self.deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _end_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
