"""A push that is refused, fails, is killed or meets another one: the repository stays as it was."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub_client import Client, Failed
from tests.support.hub_fixtures import OWNER
from tests.support.hub_server import Hub, Refused
from tests.support.hub_variants import same, saved, uploads

READER = "hf_reader"


def test_stock_model_is_overwritten_only_with_force(hub: Hub, owner: Client, tmp_path: Path) -> None:
    saved(tmp_path / "stock", None)
    owner.push_model(tmp_path / "stock", "me/stock")
    saved(tmp_path / "variant")
    before = hub.files("me/stock")
    with pytest.raises(Failed, match="'gpt2' model that is not a variant.*--force"):
        owner.push(tmp_path / "variant", "me/stock")
    assert hub.files("me/stock") == before
    owner.push(tmp_path / "variant", "me/stock", force=True)
    assert owner.pull("me/stock")["class"] == "PosEncGPT2LMHeadModel"


@pytest.mark.parametrize(
    ("repo", "token", "match"),
    [
        ("me/variant", "hf_wrong", "me/variant.*hf auth login"),
        ("me/variant", False, "hf auth login"),
        ("me/theirs", READER, "me/theirs.*--create-pr"),
        ("someone-else/new", OWNER, "someone-else/new.*--create-pr"),
        ("a/b/c", OWNER, "a/b/c.*namespace/repo_name"),
    ],
)
def test_missing_permission(repo: str, token: Any, match: str, hub: Hub, owner: Client, tmp_path: Path) -> None:
    saved(tmp_path)
    owner.push(tmp_path, "me/theirs")
    before = hub.files("me/theirs")
    saved(tmp_path, seed=5)
    with pytest.raises(Failed, match=f"(?s){match}") as failed:
        owner.push(tmp_path, repo, token=token)
    assert failed.value.is_value_error
    assert (set(hub.repos), hub.files("me/theirs")) == ({"me/theirs"}, before)


def test_invalid_directories_never_reach_the_hub(hub: Hub, owner: Client, tmp_path: Path) -> None:
    def check(directory: Path, match: str, **options: Any) -> None:
        with pytest.raises(Failed, match=match) as failed:
            owner.push(directory, "me/variant", **options)
        assert failed.value.is_value_error
        assert not [request for request in hub.requests if "me/variant" in request or "create" in request]

    check(tmp_path / "nowhere", "is not a directory")
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty", "no config.json")
    saved(tmp_path / "stock", None)
    check(tmp_path / "stock", "'gpt2' model without a position scheme.*convert")
    saved(tmp_path / "cut", shard="20KB")
    shard = sorted((tmp_path / "cut").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    check(tmp_path / "cut", "model-00002.*incomplete")
    saved(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text('{"finished": false}')
    check(tmp_path / "run", "unfinished")
    saved(tmp_path / "whole")
    check(tmp_path / "whole", "base_model must be a Hub id", base_model=str(tmp_path))


def test_failed_upload_changes_nothing_and_can_be_resumed(
    hub: Hub, owner: Client, other: Client, tmp_path: Path
) -> None:
    variant = saved(tmp_path / "old")
    owner.push(tmp_path / "old", "me/variant")
    before, sent = hub.files("me/variant"), uploads(hub)
    newer = saved(tmp_path / "new", seed=5, shard="20KB")
    taken = threading.Semaphore(2)
    shards = len(list((tmp_path / "new").glob("*.safetensors")))
    assert shards > 3

    def gone(method: str, path: str) -> Exception | None:
        return ConnectionError() if method == "PUT" and not taken.acquire(blocking=False) else None

    for failure, match in ((gone, "Push again"), (lambda *_: Refused(400, "not today"), "not today")):
        hub.fail = failure
        with pytest.raises(Failed, match=match) as failed:
            owner.push(tmp_path / "new", "me/variant")
        assert failed.value.is_value_error
    hub.fail = lambda method, path: None
    assert hub.files("me/variant") == before
    assert same(other.pull("me/variant"), variant)
    kept = len(hub.large) - 1
    assert kept == 2
    hub.requests.clear()
    owner.push(tmp_path / "new", "me/variant")
    assert uploads(hub) == shards - kept
    assert same(other.pull("me/variant"), newer)
    assert sent == 1


@pytest.mark.slow
def test_killed_push_leaves_the_old_variant(
    hub: Hub, owner: Client, other: Client, third: Client, tmp_path: Path
) -> None:
    variant = saved(tmp_path / "old")
    owner.push(tmp_path / "old", "me/variant")
    newer = saved(tmp_path / "new", seed=5, shard="20KB")
    under_way, let_go = threading.Event(), threading.Event()

    def hang(method: str, path: str) -> Exception | None:
        if method == "PUT":
            under_way.set()
            let_go.wait(60)
        return None

    hub.fail = hang
    third.ask("push", tmp_path / "new", "me/variant")
    assert under_way.wait(60)
    third.close()
    let_go.set()
    hub.fail = lambda method, path: None
    assert same(other.pull("me/variant"), variant)
    owner.push(tmp_path / "new", "me/variant")
    assert same(other.pull("me/variant"), newer)


def test_concurrent_push_is_refused(hub: Hub, owner: Client, other: Client, tmp_path: Path) -> None:
    saved(tmp_path / "one")
    owner.push(tmp_path / "one", "me/variant")
    variant = saved(tmp_path / "two", seed=5, shard="20KB")
    hub.before_commit = lambda repo: repo.add("main", {}, "meanwhile") and None
    with pytest.raises(Failed, match="Someone else changed") as failed:
        owner.push(tmp_path / "two", "me/variant")
    assert failed.value.is_value_error
    hub.before_commit = lambda repo: None
    owner.push(tmp_path / "two", "me/variant")
    assert same(other.pull("me/variant"), variant)
