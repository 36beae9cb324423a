"""Messages between a launcher and a persistent rank: length-prefixed pickles.

Each end holds one descriptor of a socket pair, which no other process can open.
"""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

LENGTH = struct.Struct("<Q")
CHUNK = 1 << 20

Message = dict[str, Any]


class Channel:
    """One end of a socket pair."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._read = bytearray()

    def send(self, message: Message) -> None:
        """Write a message, waiting for space in the socket pair if necessary."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        view = memoryview(LENGTH.pack(len(data)) + data)
        while view:
            view = view[os.write(self.fd, view) :]

    def receive(self) -> Message | None:
        """Wait for a message; return None if the other end is closed."""
        while (message := self._next()) is None:
            if not self._fill():
                return None
        return message

    def available(self) -> tuple[list[Message], bool]:
        """Read once; return the complete messages, and whether the other end is still open."""
        try:
            is_open = self._fill()
        except ConnectionError:
            is_open = False
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found, is_open

    def _fill(self) -> bool:
        chunk = os.read(self.fd, CHUNK)
        self._read += chunk
        return bool(chunk)

    def _next(self) -> Message | None:
        if len(self._read) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._read)[0]
        if len(self._read) < end:
            return None
        message: Message = pickle.loads(self._read[LENGTH.size : end])
        del self._read[:end]
        return message
