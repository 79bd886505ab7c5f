"""The page at /, in headless Chromium: real sidecars, a transfer under way, a hostile name.

Pictures are kept in the folder that KVAGENT_ARTEFACTS names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvagent.visible.page import page, page_headers
from tests.faults import BIG, SMALL, Landing, engine, offer, watched
from tests.harness import random_fill

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install -y chromium"
)


class Page(HTMLParser):
    """A page's elements, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._hidden = 0
        self.feed(html)
        self.text = " ".join(self.words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.words.append(data.strip())

    def attribute(self, name: str) -> Iterator[str]:
        return (value for _, found in self.tags if (value := found.get(name)) is not None)


def browse(folder: Path, url: str, *options: str) -> str:
    """What Chromium prints; its console must have nothing to say."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--window-size=1280,1500",
        "--virtual-time-budget=2500",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        *options,
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@needs_chromium
@pytest.mark.timeout(400)
def test_live(tmp_path: Path) -> None:
    artefacts = Path(os.environ.get("KVAGENT_ARTEFACTS") or tmp_path)
    artefacts.mkdir(parents=True, exist_ok=True)
    settings = {"fetch_timeout": 600.0, "lease_seconds": 600.0}
    with (
        watched(tmp_path, ["prefill", "decode"], "tcp", **settings) as (first, second),
        engine([first], EVIL, BIG + SMALL, random_fill(1)) as producer,
        engine([second], "decode", BIG + SMALL) as consumer,
    ):
        few, many = range(BIG, BIG + SMALL), range(BIG)
        consumer.client.fetch("good", offer(producer, "good", few), list(few))
        assert consumer.received("good") is None
        ticket = offer(producer, "cancelled", few)
        producer.client.cancel("cancelled")
        consumer.client.fetch("cancelled", ticket, list(few))
        assert str(consumer.received("cancelled")).startswith("cancelled")
        consumer.client.fetch("too big", offer(producer, "too big", few), list(few)[1:])
        assert str(consumer.received("too big")).startswith("block_range")
        landing = Landing(consumer, many)
        consumer.client.fetch("under way", offer(producer, "under way", many), list(many))
        landing.until(0.05)
        first.stop()
        url = f"http://{second.http}/"
        shown = Page(browse(tmp_path, url, "--dump-dom"))
        for theme in ("light", "dark"):
            picture = artefacts / f"page-{theme}.png"
            browse(tmp_path, f"{url}?theme={theme}", f"--screenshot={picture}")
            assert picture.stat().st_size > 30_000
        first.resume()
    assert ("body", {"data-shown": "yes"}) in shown.tags
    assert not {"img", "iframe", "object"} & {tag for tag, _ in shown.tags}
    assert sum(tag == "script" for tag, _ in shown.tags) == 1
    assert "owned" not in shown.words[0], "the title"
    assert EVIL in shown.text
    for words in (
        "decode",
        "leader · rank 0, the only one",
        "ready",
        "under way",
        "reading",
        "cancelled",
        "the producer cancelled the request",
        "while validating",
        "too big",
        "16 local blocks of 16 tokens are needed, 15 are given",
        "while reading, rank 0",
        "tcp",
        first_line(shown),
    ):
        assert words in shown.text
    (percent,) = shown.attribute("aria-valuenow")
    assert 0 < int(percent) < 100
    hidden = [found.get("id") for _, found in shown.tags if "hidden" in found]
    assert hidden == ["lost", "why"]


def first_line(shown: Page) -> str:
    """Bytes per second of the first transfer."""
    found = re.search(r"[\d.]+ [kMG]?B/s", shown.text)
    assert found is not None
    return found[0]


@needs_chromium
def test_a_sidecar_that_has_no_engine_yet(tmp_path: Path) -> None:
    with watched(tmp_path, ["alone"], "shm") as (alone,):
        shown = Page(browse(tmp_path, f"http://{alone.http}/", "--dump-dom"))
    assert "no engine yet" in shown.text
    assert "Takes no new work: no engine has registered a cache" in shown.text
    assert "Nothing is being fetched." in shown.text


def test_is_one_file() -> None:
    """Nothing is fetched from elsewhere, and the policy covers what stands in the file."""
    tags = Page(page()).tags
    for tag, found in tags:
        assert "src" not in found
        assert "style" not in found
        assert not [name for name in found if name.startswith("on")]
        assert found.get("href", "/") in ("/status", "/metrics", "/readyz", "/", "data:,"), tag
    assert "innerHTML" not in page()
    assert "http://" not in page().replace("http://www.w3.org/2000/svg", "")
    policy = page_headers()["content-security-policy"]
    assert policy.count("'sha256-") == 2
