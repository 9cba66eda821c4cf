"""A process that uses the real huggingface_hub client with the fake Hub, controlled by a test.

huggingface_hub reads HF_ENDPOINT on import, so this cannot be the process of the test, which is offline.
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

ROOT = Path(__file__).parents[2]
IDS = [[3, 14, 15, 9, 26, 53, 5, 8, 9, 7], [27, 18, 28, 18, 28, 45, 9, 4, 5, 23]]


def environment(endpoint: str, home: Path, token: str | None) -> dict[str, str]:
    """The environment of a client: online, with this token or none."""
    removed = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    settings |= {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    return {**kept, **settings, **({"HF_TOKEN": token} if token else {})}


class Failed(Exception):
    """An exception in the client process."""

    def __init__(self, kind: str, is_value_error: bool, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.is_value_error = is_value_error


class Client:
    """`client.push(...)` calls the function `push` of this module in the client process."""

    def __init__(self, endpoint: str, home: Path, token: str | None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hub_client"],
            env=environment(endpoint, home, token),
            cwd=ROOT,
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
        reply = json.loads(self.process.stdout.readline())
        if "error" in reply:
            raise Failed(*reply["error"])
        return reply["answer"]

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
    """A fingerprint of a model: its class, a hash of its weights, and its logits."""
    import torch

    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(name.encode() + tensor.contiguous().numpy().tobytes())
    with torch.no_grad():
        logits = model(torch.tensor(IDS)).logits.double()
    return {"class": type(model).__name__, "weights": weights.hexdigest(), "logits": logits.tolist()}


def push_model(source: str, repo: str, scheme: Any = None, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Load a model, with a scheme if given, and call `push_to_hub` on it."""
    from transformers import AutoModelForCausalLM

    from tests.support import tiny_models as tiny

    model = AutoModelForCausalLM.from_pretrained(source, **({"position_scheme": scheme} if scheme else {}))
    if seed:
        tiny.randomise(model, seed)
    model.push_to_hub(repo, **options)
    return seen(model)


def pull(repo: str, plugin: bool = True, auto_class: str = "AutoModelForCausalLM", **options: Any) -> dict[str, Any]:
    """Load a model and return its fingerprint; with `plugin=False`, without ever importing the plugin."""
    import transformers

    if plugin:
        import hf_posenc  # noqa: F401
    else:
        assert "hf_posenc" not in sys.modules
    model = getattr(transformers, auto_class).from_pretrained(repo, **options)
    return {**seen(model), "base_model": getattr(model.config, "posenc_base_model", None)}


def base_models(repo: str, directory: str) -> list[str | None]:
    """The recorded base model after from_pretrained, retrofit, from_config, loading a directory, and restore."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import hf_posenc

    config = AutoConfig.from_pretrained(repo)
    loaded = AutoModelForCausalLM.from_pretrained(repo, position_scheme="alibi")
    live = hf_posenc.retrofit(AutoModelForCausalLM.from_pretrained(repo), "alibi")
    scratch = hf_posenc.retrofit(AutoModelForCausalLM.from_config(config), "alibi")
    config.position_scheme = "alibi"
    fresh = AutoModelForCausalLM.from_config(config)
    path = AutoModelForCausalLM.from_pretrained(directory, position_scheme="alibi")
    recorded = [model.config.base_model for model in (loaded, live, scratch, fresh, path)]
    return [*recorded, getattr(hf_posenc.restore(live).config, "posenc_base_model", None)]


def card(repo: str, **options: Any) -> dict[str, Any]:
    """The model card as huggingface_hub parses it."""
    from huggingface_hub import ModelCard, hf_hub_download

    model_card = ModelCard.load(hf_hub_download(repo, "README.md", **options))
    return {"metadata": model_card.data.to_dict(), "text": model_card.text}


def convert(source: str, scheme: Any, out: str, **options: Any) -> list[str]:
    import hf_posenc

    return sorted(hf_posenc.convert_checkpoint(source, scheme, out, **options).added)


def command(*arguments: str, token: str | None = None) -> dict[str, Any]:
    from typer.testing import CliRunner

    from hf_posenc.cli import app

    result = CliRunner().invoke(app, list(arguments), env={"HF_TOKEN": token})
    return {"code": result.exit_code, "out": result.stdout, "error": result.stderr}


def hurry() -> None:
    """Do not wait before retries."""
    import time

    time.sleep = lambda seconds: None


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, args, options = json.loads(line)
        reply: dict[str, Any]
        try:
            reply = {"answer": globals()[name](*args, **options)}
        except Exception as error:
            reply = {"error": [type(error).__name__, isinstance(error, ValueError), str(error)]}
        print(json.dumps(reply), file=real, flush=True)
