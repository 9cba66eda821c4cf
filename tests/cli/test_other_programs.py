"""Programs that know nothing of the plugin load variants after `hf-posenc enable`: `trl sft`, `transformers serve`."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc.cli import autoload
from tests.support.word_level_tokenizer import saved

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
START = 240
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}w1"


def program(name: str, *packages: str) -> Path:
    """The script of an installed program, or a skip that names what is missing."""
    script = Path(sys.executable).with_name(name)
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing or not script.exists():
        pytest.skip(f"{name} needs {', '.join(missing) or name}, which is not installed")
    return script


@pytest.fixture
def variant(tmp_path: Path) -> Path:
    stock = saved("gpt2", tmp_path / "stock")
    tokenizer = AutoTokenizer.from_pretrained(stock)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(stock)
    hf_posenc.convert_checkpoint(stock, "alibi", tmp_path / "variant")
    return tmp_path / "variant"


def environment(directory: Path, enabled: bool) -> dict[str, str]:
    """An environment whose Pythons, children included, read the files of `hf-posenc enable` from a directory."""
    directory.mkdir()
    paths = [str(directory), *sys.path]
    if enabled:
        autoload.install_hook([directory])
        (directory / "sitecustomize.py").write_text(f"import site\n\nsite.addsitedir({str(directory)!r})\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "ACCELERATE_USE_CPU": "true"}


@pytest.mark.parametrize("enabled", [True, False])
def test_trl_sft(variant: Path, tmp_path: Path, enabled: bool) -> None:
    script = program("trl", "trl")
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": "w5 w6 w7 w8"}) for _ in range(4)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    command = [sys.executable, script, "sft", "--model_name_or_path", variant, "--dataset_name", tmp_path / "data"]
    command += ["--output_dir", tmp_path / "out", "--max_steps", "1", "--max_length", "8", "--report_to", "none"]
    command += ["--use_cpu", "true", "--bf16", "false"]
    done = subprocess.run(
        [str(word) for word in command],
        env=environment(tmp_path / "site", enabled),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if enabled:
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["PosEncGPT2LMHeadModel"]
    else:
        assert done.returncode != 0
        assert "contains custom code" in done.stderr
        assert not (tmp_path / "out" / "config.json").exists()


@pytest.fixture
def address(variant: Path, tmp_path: Path) -> Iterator[str]:
    script = program("transformers", "fastapi", "uvicorn", "openai")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(script), "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    log = (tmp_path / "serve.log").open("w+")
    server = subprocess.Popen(
        [*command, str(variant)], env=environment(tmp_path / "site", True), cwd=ROOT, stdout=log, stderr=log
    )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(START):
            if server.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
        assert server.poll() is None, (tmp_path / "serve.log").read_text()
        yield url
    finally:
        server.terminate()
        server.wait(timeout=60)
        log.close()


def post(url: str, **body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_transformers_serve(variant: Path, address: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(variant)
    tokenizer = AutoTokenizer.from_pretrained(variant)

    def greedy(prompt: str) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    options = {"model": str(variant), "max_tokens": 6, "temperature": 0}
    completion = post(f"{address}/v1/completions", prompt="w5 w6 w7", **options)
    assert completion["choices"][0]["text"] == greedy("w5 w6 w7")
    chat = post(f"{address}/v1/chat/completions", messages=[{"role": "user", "content": "w8 w9"}], **options)
    assert chat["choices"][0]["message"]["content"] == greedy("w8 w9 w1")
    assert greedy("w5 w6 w7") != greedy("w8 w9 w1")
