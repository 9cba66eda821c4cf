"""A process that talks to the Hub of tests/hub_server.py with the real client, and does what a test asks it to.

The client reads HF_ENDPOINT when it is imported, so that it cannot be the test's own process, which is offline.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
IDS = [[3, 14, 15, 9, 26, 53, 5, 8, 9, 7], [27, 18, 28, 18, 28, 45, 9, 4, 5, 23]]


def environment(endpoint: str, home: Path, token: str | None) -> dict[str, str]:
    """What a client needs; no offline mode, and no token but this one."""
    left_out = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    own = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    paths = {"PYTHONPATH": str(TESTS.parent)}
    return {
        **kept,
        **own,
        **paths,
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        **({"HF_TOKEN": token} if token else {}),
    }


class Failed(Exception):
    """What the other process raised."""

    def __init__(self, kind: str, is_value_error: bool, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.is_value_error = is_value_error


class Client:
    """`client.push(...)` calls the function of this file in the other process."""

    def __init__(self, endpoint: str, home: Path, token: str | None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment(endpoint, home, token),
            cwd=TESTS.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, name: str, *args: Any, **options: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, args, options], default=str) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        found = json.loads(self.process.stdout.readline())
        if "error" in found:
            raise Failed(*found["error"])
        return found["answer"]

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.ask(name, *args, **options)
            return self.answer()

        return call

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def push(directory: str, repo: str, **options: Any) -> dict[str, Any]:
    import hf_posenc

    return dataclasses.asdict(hf_posenc.push_directory(directory, repo, **options))


def seen(model: Any) -> dict[str, Any]:
    """Enough of a model to tell it from others: its weights, to the bit, and its logits."""
    import torch

    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(name.encode() + tensor.contiguous().numpy().tobytes())
    with torch.no_grad():
        logits = model(torch.tensor(IDS)).logits.double()
    return {"class": type(model).__name__, "weights": weights.hexdigest(), "logits": logits.tolist()}


def push_model(source: str, repo: str, scheme: Any = None, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Load, with a scheme if one is given, and `model.push_to_hub`."""
    from transformers import AutoModelForCausalLM

    from tests.support import tiny_models as tiny

    model = AutoModelForCausalLM.from_pretrained(source, **({"position_scheme": scheme} if scheme else {}))
    if seed:
        tiny.randomise(model, seed)
    model.push_to_hub(repo, **options)
    return seen(model)


def pull(repo: str, plugin: bool = True, **options: Any) -> dict[str, Any]:
    """Load; without the plugin in a process that has never imported it."""
    from transformers import AutoModelForCausalLM

    if plugin:
        import hf_posenc  # noqa: F401
    else:
        assert "hf_posenc" not in sys.modules
    model = AutoModelForCausalLM.from_pretrained(repo, **options)
    return {**seen(model), "base_model": getattr(model.config, "posenc_base_model", None)}


def base_models(repo: str, directory: str) -> list[str | None]:
    """What is known of where a variant came from: by from_pretrained, retrofit, from_config, a path, and restored."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import hf_posenc

    config = AutoConfig.from_pretrained(repo)
    loaded = AutoModelForCausalLM.from_pretrained(repo, position_scheme="alibi")
    live = hf_posenc.retrofit(AutoModelForCausalLM.from_pretrained(repo), "alibi")
    scratch = hf_posenc.retrofit(AutoModelForCausalLM.from_config(config), "alibi")
    config.position_scheme = "alibi"
    fresh = AutoModelForCausalLM.from_config(config)
    path = AutoModelForCausalLM.from_pretrained(directory, position_scheme="alibi")
    found = [model.config.base_model for model in (loaded, live, scratch, fresh, path)]
    return [*found, getattr(hf_posenc.restore(live).config, "posenc_base_model", None)]


def card(repo: str, **options: Any) -> dict[str, Any]:
    """As the client's own parser reads it."""
    from huggingface_hub import ModelCard, hf_hub_download

    found = ModelCard.load(hf_hub_download(repo, "README.md", **options))
    return {"metadata": found.data.to_dict(), "text": found.text}


def convert(source: str, scheme: Any, out: str, **options: Any) -> list[str]:
    import hf_posenc

    return sorted(hf_posenc.convert_checkpoint(source, scheme, out, **options).added)


def command(*arguments: str, token: str | None = None) -> dict[str, Any]:
    from typer.testing import CliRunner

    from hf_posenc.cli import app

    result = CliRunner().invoke(app, list(arguments), env={"HF_TOKEN": token})
    return {"code": result.exit_code, "out": result.stdout, "error": result.stderr}


def hurry() -> None:
    """Do not wait before a request is tried again."""
    import time

    time.sleep = lambda seconds: None


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, args, options = json.loads(line)
        told: dict[str, Any]
        try:
            told = {"answer": globals()[name](*args, **options)}
        except Exception as error:
            told = {"error": [type(error).__name__, isinstance(error, ValueError), str(error)]}
        print(json.dumps(told), file=real, flush=True)
