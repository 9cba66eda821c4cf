"""A variant that is pushed to a Hub and loaded by another process is unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.hub_client import Client, Failed
from tests.support.hub_fixtures import OWNER
from tests.support.hub_server import File, Hub, Repo
from tests.support.hub_variants import VARIANT, same, saved, uploads
from tests.support.sampling import some


@pytest.mark.slow
def test_another_process_loads_what_was_pushed(hub: Hub, owner: Client, other: Client, tmp_path: Path) -> None:
    variant = saved(tmp_path / "one", shard="20KB")
    different = saved(tmp_path / "two", seed=5)
    done = owner.push(tmp_path / "one", "me/variant")
    shards = [name for name in done["files"] if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert uploads(hub) == len(shards)
    assert set(hub.files("me/variant")) == VARIANT - {"model.safetensors"} | {*shards, "model.safetensors.index.json"}
    for name in done["files"]:
        assert hub.files("me/variant")[name] == (tmp_path / "one" / name).read_bytes()
    pulled = other.pull("me/variant")
    assert pulled["class"] == "PosEncGPT2LMHeadModel"
    assert same(pulled, variant)
    assert not same(pulled, different)


@pytest.mark.slow
def test_remote_code_loads_without_importing_the_package(hub: Hub, third: Client, tmp_path: Path) -> None:
    variant = saved(tmp_path / "variant")
    hub.repos["me/variant"] = Repo.new(private=False)
    files = {path.name: File(path.read_bytes(), path.suffix == ".safetensors") for path in tmp_path.glob("variant/*")}
    hub.repos["me/variant"].add("main", files, "as it was saved")
    with pytest.raises(Failed, match="trust_remote_code"):
        third.pull("me/variant", plugin=False, trust_remote_code=False)
    assert same(third.pull("me/variant", plugin=False, trust_remote_code=True), variant)


def test_pushes_only_files_of_the_variant(hub: Hub, owner: Client, tmp_path: Path) -> None:
    saved(tmp_path)
    pushed = ["tokenizer.json", "vocab.json", "merges.txt", "chat_template.jinja", "additional_chat_templates/a.jinja"]
    left_out = [
        "optimizer.pt",
        "self_generated.safetensors",
        "training_args.json",
        "pytorch_model.bin",
        "tokenizer.pkl",
        ".env",
    ]
    left_out += ["checkpoint-10/model.safetensors", "notes.txt", "runs/events", "optimizer.safetensors"]
    for name in pushed + left_out:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "run.json").write_text('{"finished": true}')
    owner.push(tmp_path, "me/variant")
    assert set(hub.files("me/variant")) == VARIANT | set(pushed)
    assert b"import hf_posenc" in hub.files("me/variant")["modeling_hf_posenc.py"]


@some("first", ["5GB", "20KB"], fast=["5GB"])
def test_second_push_removes_stale_shards(first: str, hub: Hub, owner: Client, other: Client, tmp_path: Path) -> None:
    """A single file left over from the first push would be loaded instead of the new shards."""
    second = "20KB" if first == "5GB" else "5GB"
    saved(tmp_path / "one", shard=first)
    newer = saved(tmp_path / "two", seed=5, shard=second)
    files = set(owner.push(tmp_path / "one", "me/variant")["files"])
    done = owner.push(tmp_path / "two", "me/variant")
    assert set(done["removed"]) == {name for name in files - set(done["files"]) if name.startswith("model")}
    assert done["removed"]
    assert set(hub.files("me/variant")) == {*done["files"], ".gitattributes"}
    assert same(other.pull("me/variant"), newer)
    newest = owner.push_model(tmp_path / "one", "me/variant", max_shard_size=first, seed=9)
    assert set(hub.files("me/variant")) - {".gitattributes"} == files
    assert same(other.pull("me/variant"), newest)
    assert not same(newest, newer)


def test_unchanged_variant_is_not_sent_again(hub: Hub, owner: Client, tmp_path: Path) -> None:
    saved(tmp_path)
    first = owner.push(tmp_path, "me/variant")
    sent, commits = uploads(hub), len(hub.repos["me/variant"].commits)
    again = owner.push(tmp_path, "me/variant")
    assert again["commit"] == first["commit"]
    assert (uploads(hub), len(hub.repos["me/variant"].commits)) == (sent, commits)
    saved(tmp_path, seed=5)
    assert owner.push(tmp_path, "me/variant")["commit"] != first["commit"]


def test_model_push_to_hub(hub: Hub, owner: Client, other: Client, tmp_path: Path) -> None:
    saved(tmp_path, None)
    owner.push_model(tmp_path, "me/stock")
    variant = owner.push_model("me/stock", "me/variant", "alibi", tags=["mine"], commit_message="Mine")
    assert set(hub.files("me/variant")) == VARIANT
    assert hub.repos["me/variant"].messages[-1] == "Mine"
    pulled = other.pull("me/variant")
    assert same(pulled, variant)
    assert pulled["base_model"] == "me/stock"
    card = other.card("me/variant")
    assert card["metadata"]["base_model"] == "me/stock"
    assert {"mine", "hf_posenc", "alibi"} <= set(card["metadata"]["tags"])
    assert "More Information Needed" not in card["text"]
    assert "More Information Needed" in owner.card("me/stock")["text"]  # that of transformers, for a stock model
    owner.push_model("me/variant", "me/variant", revision="longer", seed=5)
    assert 'revision="longer"' in other.card("me/variant", revision="longer")["text"]
    assert same(other.pull("me/variant"), variant)
    assert not same(other.pull("me/variant", revision="longer"), variant)
    assert owner.base_models("me/stock", str(tmp_path)) == ["me/stock", "me/stock", None, None, None, None]


def test_revisions_and_pull_requests(hub: Hub, owner: Client, other: Client, tmp_path: Path) -> None:
    variant = saved(tmp_path / "one")
    longer = saved(tmp_path / "two", seed=5)
    owner.push(tmp_path / "one", "me/variant")
    before = hub.files("me/variant")
    done = owner.push(tmp_path / "two", "me/variant", revision="longer", message="A longer one")
    assert (done["revision"], hub.repos["me/variant"].messages[-1]) == ("longer", "A longer one")
    assert 'from_pretrained("me/variant", revision="longer")' in other.card("me/variant", revision="longer")["text"]
    proposed = owner.push(tmp_path / "two", "me/variant", create_pr=True)
    assert (proposed["revision"], proposed["pull_request"]) == ("refs/pr/1", f"{hub.url}/me/variant/discussions/1")
    assert hub.files("me/variant") == before
    assert same(other.pull("me/variant"), variant)
    for revision in ("longer", "refs/pr/1", done["commit"]):
        assert same(other.pull("me/variant", revision=revision), longer)
    with pytest.raises(Failed, match="nowhere"):
        other.pull("me/variant", revision="nowhere")


def test_private_repos(hub: Hub, owner: Client, other: Client, tmp_path: Path) -> None:
    variant = saved(tmp_path)
    owner.push(tmp_path, "me/secret", private=True)
    assert hub.repos["me/secret"].private
    with pytest.raises(Failed, match="me/secret"):
        other.pull("me/secret")
    assert same(other.pull("me/secret", token=OWNER), variant)
    owner.push(tmp_path, "me/open")
    assert same(other.pull("me/open"), variant)
    saved(tmp_path, seed=5)
    before = hub.files("me/open")
    with pytest.raises(Failed, match="already exists and is public") as failed:
        owner.push(tmp_path, "me/open", private=True)
    assert failed.value.is_value_error
    assert hub.files("me/open") == before


def test_converts_a_checkpoint_from_the_hub(hub: Hub, owner: Client, other: Client, tmp_path: Path) -> None:
    saved(tmp_path / "one", None, shard="20KB")
    owner.push_model(tmp_path / "one", "me/stock")
    owner.push_model(tmp_path / "one", "me/stock", revision="later", seed=7)
    assert other.convert("me/stock", "t5", tmp_path / "a") == ["transformer.position_scheme.0.table.weight"]
    other.convert("me/stock", "t5", tmp_path / "b", revision="later")
    assert same(other.pull(tmp_path / "a"), other.pull("me/stock", position_scheme="t5"))
    assert not same(other.pull(tmp_path / "a"), other.pull(tmp_path / "b"))
    assert other.pull(tmp_path / "b")["base_model"] == "me/stock"
    other.convert(tmp_path / "one", "t5", tmp_path / "local")
    assert other.pull(tmp_path / "local")["base_model"] is None
    for source, options in (("me/none", {}), ("me/stock", {"revision": "nowhere"})):
        with pytest.raises(Failed, match=f"Hub.*'{source}'") as failed:
            other.convert(source, "t5", tmp_path / "none", **options)
        assert failed.value.is_value_error
    assert not (tmp_path / "none").exists()
    with pytest.raises(Failed, match="me/none"):
        other.pull("me/none")


def test_trains_and_pushes_a_model_from_the_hub(hub: Hub, owner: Client, other: Client, tmp_path: Path) -> None:
    saved(tmp_path / "stock", None)
    owner.push_model(tmp_path / "stock", "me/stock")
    line = ["train", "--model", "me/stock", "--scheme", "alibi", "--data", "self", "--self-generated-rows", "8"]
    line += [
        "--use-cpu",
        "--train-length",
        "8",
        "--max-steps",
        "2",
        "--push-to-hub",
        "--hub-model-id",
        "me/trained",
        "--json",
    ]
    local = ["--model", str(tmp_path / "stock"), "--output-dir", str(tmp_path / "none")]
    refused = owner.command(*line, *local, token="hf_wrong")
    assert (refused["code"], refused["out"]) == (2, "")
    assert "hf auth login" in refused["error"]
    assert not (tmp_path / "none").exists(), "before anything is trained"
    done = owner.command(*line, "--output-dir", str(tmp_path / "out"), "--save-steps", "1", token=OWNER)
    assert done["code"] == 0, done
    assert json.loads(done["out"])["pushed"]["repo_id"] == "me/trained"
    assert set(hub.files("me/trained")) == VARIANT, "no checkpoints, nor anything of the run"
    assert same(other.pull("me/trained"), other.pull(tmp_path / "out"))
    assert other.card("me/trained")["metadata"]["base_model"] == "me/stock"
    refused = owner.command(*line, "--revision", "nowhere", "--output-dir", str(tmp_path / "none"), token=OWNER)
    assert (refused["code"], refused["out"]) == (2, ""), refused


def test_commands(hub: Hub, owner: Client, tmp_path: Path) -> None:
    saved(tmp_path / "stock", None)
    owner.push_model(tmp_path / "stock", "me/stock")
    out = tmp_path / "variant"
    done = owner.command("convert", "me/stock", "--scheme", "alibi", "--out", str(out), token=OWNER)
    assert done["code"] == 0, done
    done = owner.command("convert", "me/none", "--scheme", "alibi", "--out", str(tmp_path / "none"), token=OWNER)
    assert (done["code"], done["out"]) == (2, "")
    assert "'me/none'" in done["error"]
    done = owner.command("push", str(out), "me/variant", "--private", "--revision", "a", "--json", token=OWNER)
    assert done["code"] == 0, done
    assert json.loads(done["out"])["revision"] == "a"
    assert hub.repos["me/variant"].private
    assert owner.card("me/variant", revision="a")["metadata"]["base_model"] == "me/stock"
    done = owner.command("push", str(out), "me/variant", token="hf_wrong")
    assert (done["code"], done["out"]) == (2, "")
    assert "hf auth login" in done["error"]
    shutil.rmtree(out)
    assert owner.command("push", str(out), "me/variant", token=OWNER)["code"] == 2
