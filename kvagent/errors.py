"""Every error that kvagent raises, in one tree.

    KVAgentError
      ConfigError             a setting is wrong; the message names it and the fix
      GeometryError           a cache description contradicts itself or its memory
        UnsupportedGeometry   the description is sound, but no plan exists for the pair
        BlockRangeError       block ids outside the registered cache, or too few of them
      BlockInUseError         a block was given out before it was reported free
      TopologyError           ranks or sizes that do not fit together
        UnknownEngineError    (also KeyError) nothing is known of that engine
      AggregationError        reports of workers that cannot be combined
      ProtocolError           bytes on a socket that are not a message of this protocol
      HandshakeError          a peer answered, and refused or was refused
      FabricError             a read failed below us
        PeerGoneError         the remote process is gone
      AgentError              the local sidecar answered with an error
        AgentLostError        the local sidecar is gone
        CacheGoneError        there is no cache to re-attach to
        DrainingError         the sidecar is draining and takes no new work
      TicketError             a ticket is malformed

`assert` is kept for our own invariants; whatever a user or a socket can cause is one of these.
"""

from __future__ import annotations

__all__ = [
    "AgentError",
    "AgentLostError",
    "AggregationError",
    "BlockInUseError",
    "BlockRangeError",
    "CacheGoneError",
    "ConfigError",
    "DrainingError",
    "FabricError",
    "GeometryError",
    "HandshakeError",
    "KVAgentError",
    "PeerGoneError",
    "ProtocolError",
    "TicketError",
    "TopologyError",
    "UnknownEngineError",
    "UnsupportedGeometry",
]


class KVAgentError(Exception):
    """Base of all errors of this package."""


class ConfigError(KVAgentError):
    """A setting is wrong; the message names it and what to do."""


class GeometryError(KVAgentError):
    """A cache description contradicts itself or the memory it describes."""


class UnsupportedGeometry(GeometryError):
    """Both descriptions are sound, but no plan exists for this pair."""


class BlockRangeError(GeometryError):
    """Block ids outside the registered cache, or fewer blocks than the tokens need."""


class BlockInUseError(KVAgentError):
    """A block was given to a request while another one still lends or writes it."""


class TopologyError(KVAgentError):
    """Ranks or sizes that do not fit together."""


class UnknownEngineError(TopologyError, KeyError):
    """Nothing is known of the engine that was asked for."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else ""


class AggregationError(KVAgentError):
    """Reports of workers that cannot be combined."""


class ProtocolError(KVAgentError):
    """Bytes on a socket that are not a message of this protocol."""


class HandshakeError(KVAgentError):
    """A peer refused us, or we refuse it."""


class FabricError(KVAgentError):
    """A read failed below us."""


class PeerGoneError(FabricError):
    """The process that owns the remote memory is gone."""


class AgentError(KVAgentError):
    """The local sidecar answered with an error."""


class AgentLostError(AgentError):
    """The local sidecar is gone."""


class CacheGoneError(AgentError):
    """The sidecar keeps no cache of this worker: join afresh."""


class DrainingError(AgentError):
    """The sidecar is draining and takes no new work."""


class TicketError(KVAgentError):
    """A ticket is malformed: a key is missing or has the wrong type."""
