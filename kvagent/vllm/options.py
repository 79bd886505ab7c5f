"""What stands in vLLM's `kv_connector_extra_config`, checked once."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec

from kvagent.errors import ConfigError


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of `KVAgentConnector`."""

    socket: str = ""
    """Path of the unix socket of each rank's sidecar. `{rank}` stands for the worker's rank in its
    engine, `{dp}` for the data-parallel rank, whose engines are each a kvagent engine."""
    embedded: bool = False
    """No sidecars: each worker runs the agent in a thread of its own."""
    settings: dict[str, Any] = {}
    """With `embedded`: the settings that `kvagent serve` would take (`bind`, `insecure`, ...)."""
    ready_timeout: float = 60.0
    """Seconds that start-up waits for the sidecars of all ranks."""

    def socket_of(self, engine_id: str, rank: int, dp: int) -> str:
        """The path for one worker. Embedded, it joins two processes of this engine only."""
        template = self.socket
        if self.embedded and not template:
            template = str(Path(tempfile.gettempdir()) / f"kvagent-{engine_id}-{{rank}}.sock")
        return template.format(rank=rank, dp=dp)


def read_options(vllm_config: Any) -> Options:
    """`ConfigError` names what is wrong and how it should read."""
    try:
        options = msgspec.convert(
            vllm_config.kv_transfer_config.kv_connector_extra_config, Options, strict=False
        )
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config: {error}; it takes {', '.join(Options.__struct_fields__)}"
        ) from error
    parallel = vllm_config.parallel_config
    if not options.embedded and not options.socket:
        raise ConfigError(
            'kv_connector_extra_config: give "socket", the path of the sidecar\'s unix socket, '
            'such as "/run/kvagent/{rank}.sock", or "embedded": true'
        )
    if options.settings and not options.embedded:
        raise ConfigError(
            'kv_connector_extra_config: "settings" is for "embedded": true; a sidecar gets its '
            "own from `kvagent serve`"
        )
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    for field, size in (("rank", ranks), ("dp", parallel.data_parallel_size)):
        if options.socket and size > 1 and f"{{{field}}}" not in options.socket:
            raise ConfigError(
                f"socket {options.socket!r}: there are {size} of them; put {{{field}}} in it"
            )
    try:
        options.socket_of("", 0, 0)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"socket {options.socket!r}: only {{rank}} and {{dp}} can stand in braces"
        ) from error
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} is {getattr(parallel, name)}: kvagent's connector needs 1")
    return options
