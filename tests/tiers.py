"""Runs a tier of the suite (``make quick``, ``make test``, ``make integration``, ``make nightly``).

    python -m tests.tiers quick|test|integration|nightly [--seed N] [pytest's options]

What fails is run once more, alone. A test that passes then is written to ``build/unsteady`` with its seed and its
log, and fails the run all the same, unless ``tests/unsteady.txt`` names it with a date and a reason.
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIERS = {
    "quick": "not process and not nightly",
    "test": "not integration and not nightly",
    "integration": "integration and not nightly",
    "nightly": "",
}
UNSTEADY = ROOT / "tests" / "unsteady.txt"
LOGS = ROOT / "build" / "unsteady"
ENV_FAILURES = "REFT_TEST_FAILURES"
"""A file for the failed tests of a run, a line of JSON each (tests/conftest.py)."""
_MOST_ALONE = (
    30  # when more fail, the machine or the change is broken: no second run tells anything
)
_TESTS_FAILED, _NO_TESTS = 1, 5


def main(tier: str, *options: str) -> int:
    seed = int(options[1]) if options[:1] == ("--seed",) else random.SystemRandom().randrange(2**32)
    given = options[2:] if options[:1] == ("--seed",) else options
    selected = ["-m", TIERS[tier], *given] if TIERS[tier] else [*given]
    if tier == "quick":
        files = reached(changed_files())
        if not files:
            print("quick: no test reaches a changed file within two imports")
            return 0
        selected += files
    if tier == "nightly":
        print(
            f"seed {seed}: make nightly ARGS='--seed {seed}' draws the same examples again",
            flush=True,
        )
        selected += [f"--hypothesis-seed={seed}"]
    code, failures = run_pytest(
        "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *selected
    )
    if code == _NO_TESTS and tier == "quick":
        return 0
    if code != _TESTS_FAILED or not failures or len(failures) > _MOST_ALONE:
        return code
    print("once more, alone:", flush=True)
    _, again = run_pytest(*failures)
    steady = [test for test in failures if test in again]
    unsteady = [test for test in failures if test not in again]
    return int(_report(unsteady, failures, seed if tier == "nightly" else None) or bool(steady))


def run_pytest(*arguments: str) -> tuple[int, dict[str, str]]:
    """Run pytest; its exit code, and what the failed tests printed, by test."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as found:
        command = [sys.executable, "-m", "pytest", *arguments]
        code = subprocess.call(command, cwd=ROOT, env={**os.environ, ENV_FAILURES: found.name})
        failures: dict[str, str] = {}
        for line in found:
            test, text = json.loads(line)
            failures[test] = failures.get(test, "") + text
    return code, failures


def _report(unsteady: Iterable[str], failures: dict[str, str], seed: int | None) -> bool:
    """Write down the tests that failed and passed alone; whether one of them is not excused."""
    excused = {
        line.split()[0] for line in UNSTEADY.read_text().splitlines() if line and line[0] != "#"
    }
    not_excused = False
    for test in unsteady:
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / (test.replace("/", "_").replace("::", "-")[:150] + ".log")
        examples = "the same in every run" if seed is None else f"seed {seed}"
        log.write_text(f"{test}\nexamples: {examples}\n\n{failures[test]}")
        known = test.split("[")[0] in excused
        not_excused |= not known
        said = "tests/unsteady.txt names it" if known else "this fails the run"
        print(
            f"UNSTEADY {test} failed, and passed alone; {said}. Log: {log.relative_to(ROOT)}",
            flush=True,
        )
    return not_excused


# -- what a change reaches ---------------------------------------------------------------------------


def changed_files() -> list[Path]:
    """Python files that differ from the last commit; when none does, those of the last commit."""

    def git(*arguments: str) -> list[Path]:
        out = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        return [ROOT / name for name in out.split("\n") if name.endswith(".py")]

    changed = git("diff", "--name-only", "HEAD") + git("ls-files", "--others", "--exclude-standard")
    return changed or git("diff", "--name-only", "HEAD~1")


def reached(changed: Iterable[Path]) -> list[str]:
    """Test files that are changed, or import a changed file, or a file that imports one."""
    files = {
        module_of(path): path
        for folder in ("reft", "reft_etcd", "reft_mpi", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    imports = {name: imported(path, files) for name, path in files.items()}
    near = {module_of(path) for path in changed if path.is_relative_to(ROOT)}
    for _ in range(2):
        near |= {name for name, others in imports.items() if others & near}
    tests = (files[name] for name in near if name in files and files[name].name.startswith("test_"))
    return sorted(str(path.relative_to(ROOT)) for path in tests)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, files: Iterable[str]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module_of(path).split(".")[: -node.level] if node.level else []
            module = ".".join((*package, *filter(None, [node.module])))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names & set(files)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
