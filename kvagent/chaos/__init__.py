"""`kvagent chaos`: a drill that kills and stops processes of the user's own, by a seed.

It knows nothing of what they do; whether the service survives is for its operator to see. Control
messages that go wrong are another drill: the `[chaos]` section of a sidecar's settings.
"""
