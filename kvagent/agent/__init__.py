"""The sidecar process: what `kvagent serve` runs, and what `EmbeddedAgent` runs in a thread."""
