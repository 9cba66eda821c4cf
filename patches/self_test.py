"""The checks that an architecture must pass before `hf_posenc.support` enables it. They run on a tiny model."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.errors import PosEncError
from hf_posenc.spec import PositionScheme

from .architecture import Architecture
from .attach import with_scheme
from .compat import set_attn_implementation
from .live_models import restore, retrofit
from .probing import probe_tokens

SCHEMES: dict[str, PositionScheme] = {
    "alibi": "alibi",
    "rope": {"type": "rope", "theta": 5000.0},
    "shaw": "shaw",
    "deberta": "deberta",
}
PADDING = 4


class CheckFailed(Exception):
    """A check did not hold."""


class DoesNotApply(Exception):
    """A check is about something that the architecture does not have."""


@dataclasses.dataclass(frozen=True)
class TestBench:
    """A tiny model on which an architecture is checked."""

    architecture: Architecture
    base: PreTrainedModel
    """The stock base model. Copied, never changed."""
    model: PreTrainedModel
    """The stock model with a head, if the architecture has one."""
    backends: tuple[str, ...]

    def variant(self, scheme: PositionScheme, backend: str | None = None) -> Any:
        """A copy of the base model with a scheme, whose parameters are far from neutral."""
        base = copy.deepcopy(self.base)
        if backend is not None:
            set_attn_implementation(base.config, backend)
        retrofit(base, scheme)
        randomize(nn.ModuleList([module for name, module in base.named_modules() if name.endswith("position_scheme")]))
        return base.eval()


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Move weights away from their initialization: zeros would hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def outputs(model: PreTrainedModel, tokens: torch.Tensor | None = None, **inputs: Any) -> torch.Tensor:
    """The logits of a model, or the hidden states of one without a head."""
    return model(input_ids=probe_tokens() if tokens is None else tokens, **inputs)[0]


def run_self_test(bench: TestBench) -> tuple[str, ...]:
    """Run all checks.

    Args:
        bench: The tiny model.

    Returns:
        The names of the checks that passed.

    Raises:
        PosEncError: If a check fails. It names the check.
    """
    passed = []
    for name, check in CHECKS.items():
        try:
            check(bench)
            passed.append(name)
        except DoesNotApply:
            continue
        except CheckFailed as error:
            raise PosEncError(f"the check {name!r} failed: {error}") from None
        except Exception as error:
            raise PosEncError(f"the check {name!r} failed: {type(error).__name__}: {error}") from error
    return tuple(passed)


def check_own_encoding(bench: TestBench) -> None:
    """The own encoding, as a scheme, computes what the stock model does; and the stock model comes back."""
    for backend in bench.backends:
        stock = copy.deepcopy(bench.base)
        set_attn_implementation(stock.config, backend)
        expected = outputs(stock)
        variant = bench.variant(bench.architecture.stock_scheme, backend)
        _expect_equal(outputs(variant), expected, f"with {backend} attention")
        _expect_equal(outputs(restore(variant)), expected, "after restore")


def check_explicit_rotation(bench: TestBench) -> None:
    """The own rotation, computed by the `rope` scheme with the same settings, matches the stock code."""
    parameters = getattr(bench.base.config, "rope_parameters", None) or {}
    if not bench.architecture.rotary or parameters.get("rope_type") != "default":
        raise DoesNotApply
    variant = bench.variant([{"type": "rope", "theta": float(parameters["rope_theta"])}, "shaw"])
    _silence_shaw(variant)
    _expect_close(outputs(variant), outputs(bench.base))


def check_neutral(bench: TestBench) -> None:
    """A scheme with parameters of zero, added to the own encoding, changes nothing."""
    for backend in bench.backends:
        variant = bench.variant([bench.architecture.stock_scheme, "shaw"], backend)
        _silence_shaw(variant)
        _expect_close(outputs(variant), outputs(bench.base), f"with {backend} attention")


def check_schemes_act(bench: TestBench) -> None:
    """Every scheme changes the model, finitely."""
    stock = outputs(bench.base)
    for name, scheme in SCHEMES.items():
        states = outputs(bench.variant(scheme))
        if not states.isfinite().all():
            raise CheckFailed(f"{name} gives non-finite outputs")
        if torch.allclose(states, stock, atol=1e-4):
            raise CheckFailed(f"{name} changes nothing")


def check_layers_act(bench: TestBench) -> None:
    """A scheme acts in every layer."""
    without = outputs(bench.variant("none"))
    for layer in range(bench.base.config.num_hidden_layers):
        if torch.allclose(outputs(bench.variant({"type": "alibi", "layers": [layer]})), without, atol=1e-5):
            raise CheckFailed(f"alibi changes nothing in layer {layer}")


def check_cached(bench: TestBench) -> None:
    """Decoding with a cache gives the result of one forward pass."""
    if not bench.architecture.is_causal(bench.base.config):
        raise DoesNotApply
    tokens = probe_tokens()
    for name, scheme in SCHEMES.items():
        variant = bench.variant(scheme)
        cache, states = None, []
        with torch.no_grad():
            for piece in tokens.split([6, 7, 1], dim=1):
                step = variant(input_ids=piece, past_key_values=cache, use_cache=True)
                cache = step.past_key_values
                if cache is None:
                    raise CheckFailed("it returns no cache")
                states.append(step[0])
        _expect_close(torch.cat(states, dim=1), outputs(variant), f"under {name}")


def check_left_padded(bench: TestBench) -> None:
    """A row with padding before it gives the result of the row alone."""
    tokens = probe_tokens()
    padding = torch.full((len(tokens), PADDING), getattr(bench.base.config, "pad_token_id", None) or 0)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(tokens)], dim=1)
    for name, scheme in SCHEMES.items():
        variant = bench.variant(scheme)
        padded = outputs(variant, torch.cat([padding, tokens], dim=1), attention_mask=mask)
        _expect_close(padded[:, PADDING:], outputs(variant), f"under {name}")


def check_packed(bench: TestBench) -> None:
    """Two documents in one row give the result of each alone."""
    tokens = probe_tokens()[:1]
    positions = torch.cat([torch.arange(6), torch.arange(tokens.shape[1] - 6)])[None]
    inputs = {"use_cache": False} if bench.architecture.is_causal(bench.base.config) else {}
    for name, scheme in SCHEMES.items():
        variant = bench.variant(scheme)
        alone = [outputs(variant, document) for document in (tokens[:, :6], tokens[:, 6:])]
        packed = outputs(variant, tokens, position_ids=positions, **inputs)
        _expect_close(packed, torch.cat(alone, dim=1), f"under {name}")


def check_longer_inputs(bench: TestBench) -> None:
    """A scheme without a table has no longest input."""
    length = bench.base.config.max_position_embeddings + 8
    states = outputs(bench.variant("alibi"), probe_tokens(length))
    if states.shape[1] != length or not states.isfinite().all():
        raise CheckFailed(f"alibi does not run on {length} tokens, past the trained length")


def check_gradients(bench: TestBench) -> None:
    """Scheme parameters are trained."""
    variant = bench.variant("shaw").train()
    variant(input_ids=probe_tokens())[0].float().pow(2).mean().backward()
    lost = [
        name for name, parameter in variant.named_parameters() if "position_scheme" in name and parameter.grad is None
    ]
    if lost:
        raise CheckFailed(f"{lost[0]} gets no gradient")


def check_save_and_load(bench: TestBench) -> None:
    """Stock checkpoints load with a scheme, and variants load as they were saved."""
    model_class: Any = type(bench.model)
    stock_scheme = bench.architecture.stock_scheme
    with tempfile.TemporaryDirectory() as stock_path, tempfile.TemporaryDirectory() as variant_path:
        bench.model.save_pretrained(stock_path)
        config = bench.model.config  # passed along: remote code may have two config classes of one name
        stock, stock_info = model_class.from_pretrained(stock_path, config=config, output_loading_info=True)
        same, info = model_class.from_pretrained(
            stock_path, config=with_scheme(config, stock_scheme), output_loading_info=True
        )
        _expect_equal(outputs(same.eval()), outputs(stock.eval()), f"loaded with position_scheme={stock_scheme!r}")
        if any(set(info[kind]) - set(stock_info[kind]) for kind in ("missing_keys", "unexpected_keys")):
            raise CheckFailed(f"loading reports weights that do not fit: {info}")
        variant = model_class.from_pretrained(stock_path, config=with_scheme(config, "shaw"))
        randomize(
            nn.ModuleList([module for name, module in variant.named_modules() if name.endswith("position_scheme")])
        )
        variant.eval().save_pretrained(variant_path)
        loaded, info = type(variant).from_pretrained(variant_path, output_loading_info=True)
        _expect_equal(outputs(loaded.eval()), outputs(variant), "of a saved variant")
        if any(set(info[kind]) - set(stock_info[kind]) for kind in ("missing_keys", "unexpected_keys")):
            raise CheckFailed(f"loading a saved variant reports weights that do not fit: {info}")


CHECKS: dict[str, Callable[[TestBench], None]] = {
    "own encoding equals stock": check_own_encoding,
    "neutral scheme equals stock": check_neutral,
    "explicit rotation equals stock": check_explicit_rotation,
    "schemes act": check_schemes_act,
    "schemes act in every layer": check_layers_act,
    "cached equals full": check_cached,
    "left-padded equals alone": check_left_padded,
    "packed equals alone": check_packed,
    "longer inputs": check_longer_inputs,
    "gradients": check_gradients,
    "save and load": check_save_and_load,
}


@torch.no_grad()
def _silence_shaw(variant: nn.Module) -> None:
    for name, parameter in variant.named_parameters():
        if "position_scheme" in name:
            parameter.zero_()


def _expect_equal(states: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    if not torch.equal(states, expected):
        raise CheckFailed(f"outputs {where} are off by {_difference(states, expected)}")


def _expect_close(states: torch.Tensor, expected: torch.Tensor, where: str = "") -> None:
    # float32 sums in another order, through a few layers
    if not torch.allclose(states, expected, rtol=1e-4, atol=1e-4):
        raise CheckFailed(f"outputs {where} are off by {_difference(states, expected)}".replace("  ", " "))


def _difference(states: torch.Tensor, expected: torch.Tensor) -> str:
    return f"{(states - expected).abs().max().item():.1e}"
