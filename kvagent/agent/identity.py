"""Who this sidecar is, once an engine's worker has joined and its cache is registered."""

from __future__ import annotations

from dataclasses import dataclass

from kvagent.core.compare import EngineShape
from kvagent.core.layout import RankLayout
from kvagent.core.specs import CacheSpec, WorkerInfo
from kvagent.wire.messages import RankCard


@dataclass(frozen=True, slots=True)
class Identity:
    """`incarnation` is new whenever the process, its fabric or its memory is."""

    info: WorkerInfo
    incarnation: str
    specs: dict[str, CacheSpec]
    shape: EngineShape
    layout: RankLayout
    host: str
    port: int
    mirrored: bool = False
    """`layout` is of a mirror of the cache, in host memory."""

    @property
    def index(self) -> int:
        """Place among all ranks of the engine; 0 is the leader."""
        return self.info.pp_rank * self.info.tp_size + self.info.tp_rank

    @property
    def world_size(self) -> int:
        return self.info.tp_size * self.info.pp_size

    def card(self) -> RankCard:
        return RankCard(
            tp_rank=self.info.tp_rank,
            pp_rank=self.info.pp_rank,
            host=self.host,
            port=self.port,
            incarnation=self.incarnation,
            layout=self.layout,
            mirrored=self.mirrored,
        )
