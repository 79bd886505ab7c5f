"""Who reads which boxes from whom: one local rank against all ranks of the other engine.

For every region of the local rank, the remote regions of the same layer and part are cut along
the heads and the tokens until each piece lies inside one local and one remote region. Where
several remote ranks hold the same piece (MLA, more ranks than heads), the local ranks that want
it are spread over them. Every byte is read once, or the pair is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvagent.core.regions import CacheGroup, Family, RankLayout
from kvagent.core.shards import shards_meet
from kvagent.core.specs import TokenShard, rank_heads
from kvagent.errors import UnsupportedGeometry

__all__ = ["Assignment", "Box", "assign"]


@dataclass(frozen=True)
class Box:
    """Heads `[h0, h1)` (global numbers) of matching regions of two families.

    `local_regions[i]` and `remote_regions[i]` are places in the families' `layers` and name the
    same layer. The tokens are those that both sides' shards hold.
    """

    local_family: int
    remote_family: int
    heads: tuple[int, int]
    local_regions: tuple[int, ...]
    remote_regions: tuple[int, ...]


@dataclass(frozen=True)
class Assignment:
    """What to read from one remote rank; `remote` is its place in the list given to `assign`."""

    remote: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class _Holder:
    """A remote family that holds (some heads and tokens of) a part."""

    remote: int
    index: int
    family: Family
    group: CacheGroup

    @classmethod
    def of(cls, layout: RankLayout, remote: int, index: int) -> _Holder:
        family = layout.families[index]
        return cls(remote, index, family, layout.group(family.group))


def assign(local: RankLayout, remotes: Sequence[RankLayout]) -> list[Assignment]:
    """The share of `local`, by remote rank; ranks that it need not read from are left out.

    `remotes` are all ranks of the other engine, each exactly once, in any order. Layers that only
    one side has are left out. Raises `UnsupportedGeometry` naming the layer, part and field when
    two regions cannot correspond, or the heads or tokens that no remote rank holds.
    """
    _check_engine(remotes)
    holders = _holders(remotes)
    _check_parts(local, holders)
    boxes: dict[int, list[Box]] = {}
    for index, family in enumerate(local.families):
        # Layers held by the same remote families are decided together.
        alike: dict[tuple[tuple[int, int], ...], list[tuple[int, tuple[int, ...]]]] = {}
        for place, layer in enumerate(family.layers):
            found = holders.get((local.layers[layer], family.part), {})
            if found:
                alike.setdefault(tuple(found), []).append((place, tuple(found.values())))
        for sources, regions in alike.items():
            layer_name = local.layers[family.layers[regions[0][0]]]
            what = f"layer {layer_name!r}, part {family.part!r}"
            candidates = [
                _Holder(
                    r, f, remotes[r].families[f], remotes[r].group(remotes[r].families[f].group)
                )
                for r, f in sources
            ]
            group = local.group(family.group)
            for holder in candidates:
                _check_pair(what, family, group, holder)
            for number, heads in _choose(what, local, family, group, candidates):
                holder = candidates[number]
                boxes.setdefault(holder.remote, []).append(
                    Box(
                        index,
                        holder.index,
                        heads,
                        tuple(place for place, _ in regions),
                        tuple(places[number] for _, places in regions),
                    )
                )
    return [Assignment(remote, tuple(boxes[remote])) for remote in sorted(boxes)]


def _check_engine(remotes: Sequence[RankLayout]) -> None:
    if not remotes:
        raise UnsupportedGeometry("the remote engine has no ranks")
    sizes = {(layout.tp_size, layout.pp_size) for layout in remotes}
    if len(sizes) > 1:
        raise UnsupportedGeometry(
            f"the remote ranks disagree about (tp, pp) sizes: {sorted(sizes)}"
        )
    ((tp_size, pp_size),) = sizes
    ranks = {(layout.tp_rank, layout.pp_rank) for layout in remotes}
    if len(ranks) != len(remotes) or len(ranks) != tp_size * pp_size:
        raise UnsupportedGeometry(
            f"{len(remotes)} remote layouts of {len(ranks)} different ranks, but the engine has "
            f"tp {tp_size} x pp {pp_size}"
        )


def _holders(remotes: Sequence[RankLayout]) -> dict[tuple[str, str], dict[tuple[int, int], int]]:
    """For each (layer, part): the (remote, family) pairs that hold it, and the place in each."""
    found: dict[tuple[str, str], dict[tuple[int, int], int]] = {}
    for number, layout in enumerate(remotes):
        for index, family in enumerate(layout.families):
            for place, layer in enumerate(family.layers):
                key = (layout.layers[layer], family.part)
                found.setdefault(key, {})[number, index] = place
    return found


def _check_parts(local: RankLayout, holders: Iterable[tuple[str, str]]) -> None:
    theirs: dict[str, set[str]] = {}
    for layer, part in holders:
        theirs.setdefault(layer, set()).add(part)
    ours: dict[str, set[str]] = {}
    for family in local.families:
        for layer_index in family.layers:
            ours.setdefault(local.layers[layer_index], set()).add(family.part)
    for layer, parts in ours.items():
        if layer in theirs and theirs[layer] != parts:
            raise UnsupportedGeometry(
                f"layer {layer!r}: local parts {sorted(parts)}, remote parts "
                f"{sorted(theirs[layer])}"
            )


def _check_pair(what: str, family: Family, group: CacheGroup, holder: _Holder) -> None:
    other = holder.family
    pairs: list[tuple[str, object, object]] = [
        ("dtype", family.dtype, other.dtype),
        ("heads", family.heads[2], other.heads[2]),
        ("sliding window", family.window, other.window),
        ("axes beside block, token and head", _rest(family), _rest(other)),
        ("token axis", family.axis("token") is not None, other.axis("token") is not None),
        ("is a state", group.block_size == 0, holder.group.block_size == 0),
    ]
    if family.axis("token") is None and group.block_size:
        # One value for a whole block can only go to a block of the very same tokens.
        pairs += [
            ("block size of per-block values", family.block_tokens, other.block_tokens),
            ("token shard of per-block values", group.tokens, holder.group.tokens),
        ]
    for field, ours, theirs in pairs:
        if ours != theirs:
            raise UnsupportedGeometry(f"{what}: {field}: local {ours}, remote {theirs}")


def _rest(family: Family) -> dict[str, int]:
    return {
        axis.name: axis.extent
        for axis in family.axes
        if axis.name not in ("block", "token", "head")
    }


def _choose(
    what: str,
    local: RankLayout,
    family: Family,
    group: CacheGroup,
    candidates: Sequence[_Holder],
) -> list[tuple[int, tuple[int, int]]]:
    """Pairs (place in `candidates`, heads to read there) that cover the family exactly once."""
    h0, h1, _ = family.heads
    cuts = {h0, h1}
    for holder in candidates:
        cuts |= {head for head in holder.family.heads[:2] if h0 < head < h1}
    edges = sorted(cuts)
    chosen: dict[int, list[tuple[int, int]]] = {}
    for a, b in itertools.pairwise(edges):
        by_shard: dict[TokenShard, list[int]] = {}
        for number, holder in enumerate(candidates):
            if holder.family.heads[0] <= a and b <= holder.family.heads[1]:
                by_shard.setdefault(holder.group.tokens, []).append(number)
        if not by_shard:
            raise UnsupportedGeometry(f"{what}: no remote rank holds heads [{a}, {b})")
        place, wanting = _place(local, family, a)
        for shard in _covering(what, group.tokens, by_shard):
            replicas = by_shard[shard]
            number = replicas[place * len(replicas) // wanting]
            stretch = chosen.setdefault(number, [])
            if stretch and stretch[-1][1] == a:
                stretch[-1] = (stretch[-1][0], b)
            else:
                stretch.append((a, b))
    return [(number, heads) for number in sorted(chosen) for heads in chosen[number]]


def _covering(what: str, wanted: TokenShard, held: Iterable[TokenShard]) -> list[TokenShard]:
    """Shards of one split of the context that hold all tokens of `wanted`, fewest parts first."""
    available = set(held)
    for size, interleave in sorted({(shard.size, shard.interleave) for shard in available}):
        needed = [
            shard
            for rank in range(size)
            if shards_meet(wanted, shard := TokenShard(rank=rank, size=size, interleave=interleave))
        ]
        if available.issuperset(needed):
            return needed
    raise UnsupportedGeometry(
        f"{what}: the remote token shards {sorted(available, key=repr)} do not hold all tokens "
        f"of {wanted}"
    )


def _place(local: RankLayout, family: Family, head: int) -> tuple[int, int]:
    """(place, number) of this rank among the local ranks that want `head`, of all stages: the
    pipeline's stages want other layers of it, but from the same replicas."""
    total = family.heads[2]
    wanting = list(range(local.tp_size))
    if rank_heads(local.tp_rank, local.tp_size, total) == family.heads[:2]:
        shares = [rank_heads(rank, local.tp_size, total) for rank in wanting]
        wanting = [rank for rank, (h0, h1) in enumerate(shares) if h0 <= head < h1]
    place = wanting.index(local.tp_rank) * local.pp_size + local.pp_rank
    return place, len(wanting) * local.pp_size
