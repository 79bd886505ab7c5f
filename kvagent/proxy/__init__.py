"""The prefill/decode proxy: OpenAI's HTTP API in front, two kinds of engines behind.

    client --> proxy --1--> a prefill server   same request, one token, "do_remote_decode"
                     <-----  ticket (kv_transfer_params)
                     --2--> a decode server    the original request with the ticket
           <--------------  its answer, byte for byte

The proxy carries the ticket and never looks inside. It moves no KV cache and talks to no sidecar.

Modules: `servers` (whose turn it is, who is cooling down) and `request` (what the two bodies are)
are pure; `answer` is HTTP detail; `upstream` is the limits and how failures are told; `exchange` is
one request from its body to its last byte; `app` is the routes and the process.
"""

from __future__ import annotations

from kvagent.proxy.app import create_app, run_proxy
from kvagent.proxy.upstream import Limits

__all__ = ["Limits", "create_app", "run_proxy"]
