"""What an engine imports: `WorkerClient`, `EngineClient`, `EmbeddedAgent`."""
