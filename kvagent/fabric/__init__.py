"""Moving bytes: `base` says what a fabric does, `nixl` does it, `loopback` plays it in tests."""
