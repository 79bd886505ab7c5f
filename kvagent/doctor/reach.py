"""Why a peer could not even be asked who it is, and what to do about it."""

from __future__ import annotations

from kvagent.doctor.keys import Ring
from kvagent.doctor.knock import Reach
from kvagent.doctor.peer import PeerRead

__all__ = ["why_closed"]

_ADDRESS = "It logs its control address when it starts, and /status says it (`endpoint`)"
_TODO = {
    Reach.NO_NAME: "look at the spelling and at DNS, or give its IP address",
    Reach.REFUSED: "is the sidecar of its rank 0 running, with --bind on an address that can be "
    f"reached from here and on that port? {_ADDRESS}. (With port 0 it is another one at every "
    "start.) A firewall that refuses looks the same",
    Reach.SILENT: "is the address right and its host up? Then a firewall between drops it: let TCP "
    "through to that port",
    Reach.NO_WAY: "look at the address, and at this host's interfaces and routes",
    Reach.MUTE: f"is its process stopped, or is that the port of something else? {_ADDRESS}",
    Reach.STRANGER: f"is that its --http port? {_ADDRESS}",
}


def why_closed(peer: PeerRead, ring: Ring | None) -> tuple[str, str]:
    """What was found, and what to do. `ring`: our keys, if we have any."""
    if peer.knock is None:
        return peer.error, "run it again; if it stays, please report it"
    reach, seen = peer.knock.reach, peer.knock.words
    if reach in _TODO:
        return seen, _TODO[reach]
    if reach is Reach.LOCKED and ring is None:
        return (
            f"{seen}; none are given here",
            "give the folder of keys that the sidecars here use, with --keys DIR. There is none? "
            "`kvagent keys new DIR` makes one; then put our public key into its allowed folder, "
            "and its public key into DIR/allowed",
        )
    if reach is Reach.OPEN and ring is not None:
        return (
            f"{seen}; ours are in {ring.folder}",
            "start it with --keys too, or ask without --keys if this deployment has none",
        )
    if peer.refused:
        return peer.error, "run the same kvagent on both sides"
    if ring is None:
        return f"{seen}; {peer.error}", "it may be stopped or overloaded: look at its log"
    if ring.error:
        return ring.error, "see the check keys"
    error = peer.error.removesuffix(", or uses no keys")  # it greeted with the wish for them
    return (
        f"{seen}; {error}; here: {ring}",
        f"run `kvagent doctor --keys DIR` there. Its own key has to be among the allowed here: "
        f"copy its public key into {ring.folder}/allowed. And {ring.own} has to be among the "
        f"allowed there: copy {ring.folder}/allowed/*-{ring.own}.key into its allowed folder. Both "
        "are noticed within seconds",
    )
