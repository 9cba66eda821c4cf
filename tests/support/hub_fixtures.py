"""Fixtures of the tests that talk to the Hub of tests/hub_server.py: the Hub, and processes that are its clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hub_client import Client
from tests.support.hub_server import Hub

OWNER = "hf_owner"


@pytest.fixture(scope="session")
def server() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub) -> Hub:
    """Empty, and nothing goes wrong."""
    server.repos.clear()
    server.large.clear()
    server.requests.clear()
    server.fail, server.before_commit = lambda method, path: None, lambda repo: None
    return server


@pytest.fixture(scope="session")
def owner(server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = Client(server.url, tmp_path_factory.mktemp("owner"), OWNER)
    client.hurry()
    yield client
    client.close()


@pytest.fixture(scope="session")
def other(server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Another process, with no token and a cache of its own."""
    client = Client(server.url, tmp_path_factory.mktemp("other"), None)
    yield client
    client.close()


@pytest.fixture(scope="module")
def third(server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One that has imported nothing yet, and is killed by the last test that uses it."""
    client = Client(server.url, tmp_path_factory.mktemp("third"), OWNER)
    yield client
    client.close()
