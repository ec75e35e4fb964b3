"""The fixture of the tests of `reft plan`."""

from __future__ import annotations

import pytest

from reft import cli
from tests.policy.planning import Result, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: str) -> Result:
        code = cli.main(["plan", *arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, " ".join(captured.err.split()))

    return command
