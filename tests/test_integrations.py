"""Packages beside reft are found by their entry points."""

from __future__ import annotations

import pytest

from reft import integrations
from reft.errors import ConfigError


@pytest.mark.parametrize(
    ("table", "name", "module"),
    [("RENDEZVOUS", "etcd-v3", "reft_etcd.backend"), ("TRANSPORTS", "mpi", "reft_mpi.mpi")],
)
def test_what_the_wheel_brings_is_found(table: str, name: str, module: str) -> None:
    assert integrations.find(table, name).__module__ == module


def test_what_no_installed_package_brings_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no installed package brings 'pigeons' .*found: mpi"):
        integrations.find("TRANSPORTS", "pigeons")
