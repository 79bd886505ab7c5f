"""The size of the pieces that UCX cuts a TCP stream into, on which two agents must agree.

UCX answers a read over TCP in segments of the size that the reader is set to receive. Its own are
small, and reads with them reach a third of what the wire carries (`kvagent bench --targets`). With
larger ones on one side only, the process that is read from aborts. So the agent that serves says
in its metadata which it has, and the reader makes an agent with the same. (Not when UCX's variables
are set: NIXL lets them count for more than what an agent asks for. Then it takes peers that have
the same, and no others.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvagent.errors import ConfigError

__all__ = ["LARGE", "UCX_DEFAULT", "Segments", "are_pinned", "own_segments"]

SEND, RECEIVE = "UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"
_SIZE = re.compile(r"(\d+)([kmg]?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_Bytes = Annotated[int, msgspec.Meta(ge=1 << 10, le=16 << 20)]


class Segments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In bytes: what is sent at once, and what can be received at once."""

    send: _Bytes
    receive: _Bytes

    @property
    def params(self) -> dict[str, str]:
        """Parameters of NIXL's UCX backend."""
        sizes = f"TCP_TX_SEG_SIZE={self.send},TCP_RX_SEG_SIZE={self.receive}"
        return {"engine_config": sizes}


UCX_DEFAULT = Segments(8 << 10, 64 << 10)
"""What UCX 1.23 has when nobody asks for anything else; of a peer that does not say."""
LARGE = Segments(256 << 10, 256 << 10)


def are_pinned(environ: Mapping[str, str]) -> bool:
    """Whether the user has chosen a size for this process."""
    return SEND in environ or RECEIVE in environ


def own_segments(environ: Mapping[str, str]) -> Segments:
    """`LARGE`, unless the user has set UCX's variables: then what these say.

    Raises `ConfigError` for values that are no sizes that both sides could use.
    """
    if not are_pinned(environ):
        return LARGE
    sizes = []
    for name, default in ((SEND, UCX_DEFAULT.send), (RECEIVE, UCX_DEFAULT.receive)):
        text = environ.get(name, str(default))
        found = _SIZE.fullmatch(text.strip())
        size = int(found[1]) * _UNITS[found[2].lower()] if found else 0
        if not 1 << 10 <= size <= 16 << 20:
            raise ConfigError(
                f"{name}={text}: kvagent needs a size from 1k to 16m there; unset it, and "
                "kvagent chooses one"
            )
        sizes.append(size)
    return Segments(*sizes)
