"""The fixture of the tests of `reft plan`."""

from __future__ import annotations

import pytest

from reft import cli
from tests.commands import Answer
from tests.policy.planning import Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: str) -> Answer:
        code = cli.main(["plan", *arguments])
        captured = capsys.readouterr()
        return Answer(code, captured.out, " ".join(captured.err.split()))

    return command
