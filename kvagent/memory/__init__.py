"""Memory for KV caches that two processes share."""
