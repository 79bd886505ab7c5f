"""Coverage-guided bytes for everything that decodes what a socket brings: `python -m
tests.atheris_target -runs=N`. Anything but `ProtocolError` is a finding, and ends the process."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["kvagent.wire"]):
    from kvagent.errors import ProtocolError
    from kvagent.wire.local import FrameReader
    from kvagent.wire.messages import decode_question, local_codec, peer_codec


def one(data: bytes) -> None:
    for decode in (decode_question, peer_codec.decode, local_codec.decode):
        try:
            decode(data)
        except ProtocolError:
            pass
    try:
        list(FrameReader().feed(data))
    except ProtocolError:
        pass


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
