"""What a push never uploads: code of strangers, and files outside of the variant's directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.evidence import count_cases
from tests.support.hub_client import Client, Failed
from tests.support.hub_server import Hub
from tests.support.hub_variants import saved


def test_code_of_strangers_is_not_pushed(hub: Hub, owner: Client, tmp_path: Path) -> None:
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    auto_map = config["auto_map"]
    config["auto_map"] = {**auto_map, "AutoTokenizer": ["trap.Trap", None], "AutoModel": "somebody/trap--trap.Trap"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "custom_pipelines": {"x": {"impl": "trap.Trap"}}}))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "trap.Trap"}, "kept": 1}')
    for name in ("trap.py", "tokenizer_trap.py"):
        (tmp_path / name).write_text("raise SystemExit")
    before = (tmp_path / "config.json").read_text()
    done = owner.push(tmp_path, "me/variant")
    files = hub.files("me/variant")
    assert [name for name in files if name.endswith(".py")] == ["modeling_hf_posenc.py"]
    assert not [name for name, content in files.items() if b"trap" in content]
    del auto_map["AutoModel"]
    assert json.loads(files["config.json"])["auto_map"] == auto_map
    assert json.loads(files["tokenizer_config.json"]) == {"kept": 1}
    assert {"trap.py", "tokenizer_trap.py", "auto_map in config.json"} <= set(done["left_out"])
    assert (tmp_path / "config.json").read_text() == before
    count_cases("hostile checkpoints", 1)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "vocab.txt", "README.md", "recovery.json", "modeling_hf_posenc.py", ".README.md.new"]
)
def test_links_out_of_the_directory_are_refused(name: str, hub: Hub, owner: Client, tmp_path: Path) -> None:
    saved(tmp_path / "variant")
    secret = tmp_path / "secret"
    secret.write_text("private key")
    (tmp_path / "variant" / name).unlink(missing_ok=True)
    (tmp_path / "variant" / name).symlink_to(secret)
    with pytest.raises(Failed, match=f"{name} is a link to") as failed:
        owner.push(tmp_path / "variant", "me/variant")
    assert failed.value.is_value_error
    assert not hub.repos
    assert secret.read_text() == "private key"
    count_cases("hostile checkpoints", 1)


def test_sentence_transformers_weights_are_pushed(hub: Hub, owner: Client, tmp_path: Path) -> None:
    saved(tmp_path)
    for name in ("2_Dense/model.safetensors", "2_Dense/config.json", "10_Dense/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{}" if name.endswith("json") else (tmp_path / "model.safetensors").read_bytes())
    done = owner.push(tmp_path, "me/variant")
    assert {"2_Dense/model.safetensors", "2_Dense/config.json", "10_Dense/model.safetensors"} <= set(done["files"])
    assert hub.files("me/variant")["2_Dense/model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()
