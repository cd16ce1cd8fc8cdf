"""HTTP by uvicorn, with a limit on the time that a request's header takes to arrive."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10


class Protocol(H11Protocol):
    """Closes a connection on which no whole header arrives in time, from its start or from the first byte of a later
    header. uvicorn itself waits without limit, so that clients who send nothing could take all connections."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_deadline()

    def _set_deadline(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._end_deadline()
        elif self.deadline is None:
            self.deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _end_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
