"""Hypothesis profiles: `HYPOTHESIS_PROFILE=nightly` for many more examples."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("ci", deadline=None, max_examples=60, suppress_health_check=SLOW_IS_FINE)
settings.register_profile("nightly", settings.get_profile("ci"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a GPU is skipped without one."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU here"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
