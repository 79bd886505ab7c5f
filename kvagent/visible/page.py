"""The page at /: one HTML file, which asks /status once a second. It fetches nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from importlib.resources import files

__all__ = ["page", "page_headers"]


@lru_cache(maxsize=1)
def page() -> str:
    return (files("kvagent.visible") / "page.html").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def page_headers() -> dict[str, str]:
    """Names on the page come from peers: only the script and the style in the file may run."""
    sources = {
        tag: " ".join(f"'sha256-{_digest(text)}'" for text in _contents(tag))
        for tag in ("script", "style")
    }
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {sources['script']}; "
        f"style-src {sources['style']}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"content-security-policy": policy, "referrer-policy": "no-referrer"}


def _contents(tag: str) -> list[str]:
    return re.findall(rf"<{tag}>(.*?)</{tag}>", page(), re.DOTALL)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
