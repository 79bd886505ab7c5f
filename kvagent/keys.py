"""`kvagent keys new`: makes a pair, and says what to copy where."""

from __future__ import annotations

import shlex

from kvagent.wire.keys import make_keys

__all__ = ["new_keys"]

_WHAT_NEXT = """\
{own}: the secret, mode 0600
{allowed}: its public half

For sidecars:        kvagent serve --keys {folder} ...

Another host can have the same pair. Copy the folder, over a channel that is secret:
    scp -rp {folder} HOST:{folder}
Or a pair of its own, whose secret never travels. Make it there, then swap the public keys:
    scp {folder}/allowed/*.key HOST:{folder}/allowed/
    scp HOST:{folder}/allowed/*.key {folder}/allowed/
Sidecars that run notice changes of the folder within seconds.

To check it, here: kvagent doctor --keys {folder} --peer HOST:PORT"""


def new_keys(folder: str, name: str) -> None:
    """Raises `ConfigError` rather than replace a pair."""
    own, allowed = make_keys(folder, name)
    print(_WHAT_NEXT.format(own=own, allowed=allowed, folder=shlex.quote(folder.rstrip("/"))))
