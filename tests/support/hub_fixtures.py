"""Fixtures for tests that use the fake Hub of tests/support/hub_server.py: the Hub, and its client processes."""

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
    """The fake Hub, emptied, without injected errors."""
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
    """A second process without a token and with its own cache."""
    client = Client(server.url, tmp_path_factory.mktemp("other"), None)
    yield client
    client.close()


@pytest.fixture(scope="module")
def third(server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A process that has not imported anything yet; the last test that uses it kills it."""
    client = Client(server.url, tmp_path_factory.mktemp("third"), OWNER)
    yield client
    client.close()
