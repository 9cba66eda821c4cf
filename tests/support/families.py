"""Tiny models of every supported model type, their traits, and a sampler of test combinations.

Configs are derived from the config classes, so that a new record in `hf_posenc.patches.families` needs no row here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from packaging.version import Version
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.patches import ARCHITECTURES
from hf_posenc.patches.attention_modules import CACHE_ARGUMENTS
from tests.support import tiny_models as tiny

IS_OLD = Version(transformers.__version__) < Version("5.20")
ROTATED_OUTSIDE = ("qwen2_vl_text", "qwen2_5_vl_text") if IS_OLD else ()
"""Old releases rotate these outside the attention interface, so they are refused there."""
MODEL_TYPES = [name for name in ARCHITECTURES if name in CONFIG_MAPPING_NAMES and name not in ROTATED_OUTSIDE]
"""Those that this release of transformers has."""
WINDOW = 8
NAMES_OF_SIZES = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size n_embd dim word_embed_proj_dim": tiny.WIDTH,
    "embedding_size": 24,
    "num_hidden_layers n_layer n_layers": tiny.LAYERS,
    "num_attention_heads n_head n_heads": tiny.HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings n_positions": tiny.TRAINED_LENGTH,
    "intermediate_size n_inner ffn_dim hidden_dim": 40,
    "moe_intermediate_size shared_expert_intermediate_size": 16,
    "num_experts num_local_experts n_routed_experts": 4,
    "n_shared_experts n_group topk_group": 1,
    "num_experts_per_tok type_vocab_size eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": tiny.PAD,
    "sliding_window local_attention": WINDOW,
}
SIZES: dict[str, Any] = {name: size for names, size in NAMES_OF_SIZES.items() for name in names.split()}
"""By the names that config classes use; a config gets those that it has."""
DROPOUT = ("dropout", "pdrop", "dropout_prob")
ALL_HEADS_HAVE_KEYS = ("olmo", "phi", "persimmon", "gpt_neox")
"""Their configs have `num_key_value_heads`, but not all of their code reads it."""
ENCODERS_WITH_TABLE = ["bert", "electra", "ernie", "albert", "distilbert"]
ROBERTA_LIKE = ["roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text"]
NO_KEY_CACHE = ["modernbert", "nomic_bert", "jina_embeddings_v3", "gte"]
ROTARY_ENCODERS = ["eurobert", *NO_KEY_CACHE]
NOPE_EXPERTS = ["afmoe", "cohere2_moe", "exaone_moe", "kolibri1"]
MIXED_LAYERS = [
    *["gemma2", "gemma3_text", "olmo3", "cohere2", "exaone4", "gpt_oss", "modernbert", "modernbert-decoder"],
    *["cwm", "vaultgemma", *NOPE_EXPERTS],
]
"""They have layers with a sliding window and layers without."""
QWEN_VL = [
    name
    for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
    if name not in ROTATED_OUTSIDE
]
TRAITS: dict[str, list[str]] = {
    "encoder": [*ENCODERS_WITH_TABLE, *ROBERTA_LIKE, *ROTARY_ENCODERS],
    "no cache": ["albert", "distilbert", *NO_KEY_CACHE],
    "table": [*ENCODERS_WITH_TABLE, *ROBERTA_LIKE, "opt", "biogpt", "gpt_bigcode", "gpt2", "gpt-sw3"],
    "first row": [*ROBERTA_LIKE, "opt", "biogpt"],
    "shared layers": ["albert"],
    "window": ["mistral", "ministral", *MIXED_LAYERS],
    "caps or sinks": ["gemma2", "gpt_oss", "vaultgemma"],
    "narrow softmax": [
        *[*ENCODERS_WITH_TABLE, *ROBERTA_LIKE, "gte", "jina_embeddings_v3", "nomic_bert"],
        *["biogpt", "gpt2", "gpt-sw3", "gpt_oss"],
    ],
    "interleaved": ["cohere", "cohere2", "cohere2_moe", "glm", "glm4", "helium", "ernie4_5"],
    "partial rotation": ["phi", "persimmon", "glm", "glm4", "glm4_moe", "stablelm", "nemotron", "gpt_neox"],
    "NoPE layers": ["smollm3", "cohere2", "exaone4", *NOPE_EXPERTS],
    "drops kwargs": ["stablelm", "nemotron"],
    "position axes": QWEN_VL,
    "experts": [
        *["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "gpt_oss", "glm4_moe"],
        *["granitemoeshared", "hy_v3", "jetmoe", "mellum", "minimax_m2", "solar_open", "dots1", *NOPE_EXPERTS],
        "qwen3_vl_moe_text",
    ],
}
"""What sets model types apart from LLaMA. The fast tests sample every trait, and check this table."""
OWN = "own"
"""Stands for the scheme that the architecture has itself: `rope` or `learned`."""
SCHEMES: dict[str, Any] = {
    OWN: OWN,
    "alibi": "alibi",
    "t5": {"type": "t5", "num_buckets": 8, "max_distance": 20},
    "shaw": {"type": "shaw", "max_distance": 4},
    "deberta": {"type": "deberta", "max_distance": 24, "buckets": 6},
    "theta": {"type": "rope", "theta": 500.0},
    "none": "none",
    "tupe": {"type": "tupe", "num_buckets": 8, "max_distance": 20},
    "transformer_xl": "transformer_xl",
    "sinusoidal": "sinusoidal",
    "cope": {"type": "cope", "max_positions": 6},
    "fire": "fire",
    "ssmax": ["rope", {"type": "temperature", "form": "ssmax"}],
    "forget": "forget",
}


def _skip_in_old_releases(model_type: str, error: Exception) -> None:
    """Some stock models of old releases cannot be built, or do not use the attention interface."""
    if IS_OLD:
        pytest.skip(f"{model_type} does not work in transformers {transformers.__version__}: {error}")


@functools.cache
def _default_config(model_type: str) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(model_type)
    except StrictDataclassFieldValidationError as error:
        _skip_in_old_releases(model_type, error)
        raise


def config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model, without dropout, and with a short window if the type has one by default."""
    default = _default_config(model_type)
    sizes = {name: value for name, value in SIZES.items() if hasattr(default, name)}
    if model_type in ALL_HEADS_HAVE_KEYS:
        sizes.pop("num_key_value_heads", None)
    if getattr(default, "sliding_window", None) is None or "local_attention" in sizes:  # the window on both sides
        sizes.pop("sliding_window", None)
    if "sliding_attention" in (getattr(default, "layer_types", None) or ()):
        sizes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    if hasattr(default, "no_rope_layers"):
        sizes["no_rope_layers"] = [1, 0, 1]
    rotary = dict(getattr(default, "rope_parameters", None) or {})
    if rotary.get("partial_rotary_factor", 1) < 0.5:  # a single pair of features would turn the same under any theta
        sizes["rope_parameters"] = {**rotary, "partial_rotary_factor": 0.5}
        sizes["rotary_pct"] = 0.5  # what old releases of GPT-NeoX read
    if model_type in QWEN_VL:
        sizes["rope_parameters"] = {**rotary, "mrope_section": [2, 1, 1]}
    dropout = {name: 0.0 for name, value in vars(default).items() if name.endswith(DROPOUT) and value}
    try:
        return type(default)(**{**sizes, **dropout, **changes})
    except StrictDataclassFieldValidationError as error:
        _skip_in_old_releases(model_type, error)
        raise


def traits(model_type: str) -> frozenset[str]:
    """What sets a model type apart from LLaMA, as declared."""
    return frozenset(trait for trait, model_types in TRAITS.items() if model_type in model_types)


def detect_traits(base: Any) -> frozenset[str]:
    """The same, read from a stock base model and its record."""
    example, model_type = base.config, base.config.model_type
    record = ARCHITECTURES[model_type]
    arguments = inspect.signature(type(record.self_attentions(base)[0]).forward).parameters
    settings = {name for name, value in vars(example).items() if value}
    traits = {
        "encoder": not record.is_causal(example),
        "no cache": not {*CACHE_ARGUMENTS} & set(arguments),
        "table": record.table is not None,
        "first row": record.table is not None and record.first_row(example) > 0,
        "shared layers": record.num_layers != "num_hidden_layers",
        "window": record.window(example) is not None,
        "caps or sinks": "attn_logit_softcapping" in settings or record.has_sinks,
        "narrow softmax": _has_narrow_softmax(record),
        "interleaved": record.interleaved,
        "partial rotation": record.rotary and record.angle_size(example) * (1 + record.angle_per_pair) < 8,
        "NoPE layers": record.rotates is not None,
        "drops kwargs": record.layers_drop_kwargs,
        "position axes": record.position_axes > 1,
        "experts": "num_experts_per_tok" in settings,
    }
    return frozenset(trait for trait, holds in traits.items() if holds)


def _has_narrow_softmax(record: Any) -> bool:
    """Whether the eager softmax is computed in the model's dtype; most compute it in float32."""
    attend = vars(sys.modules[record.base.__module__]).get("eager_attention_forward")  # old releases lack some
    return attend is not None and "float32" not in inspect.getsource(attend)


def backends(model_type: str) -> list[str]:
    """The attention backends of a model type; caps and sinks exist in eager attention only."""
    return ["eager"] if model_type in TRAITS["caps or sinks"] else ["sdpa", "eager"]


def is_causal(model_type: str) -> bool:
    return "encoder" not in traits(model_type)


def scheme_for(model_type: str, name: str) -> Any:
    """A scheme by its name in `SCHEMES`, in a form that the model type supports."""
    if name == OWN:
        return ARCHITECTURES[model_type].stock_scheme
    if name == "shaw" and "caps or sinks" in traits(model_type):
        return {**SCHEMES["shaw"], "values": False}
    return SCHEMES[name]


def supports(model_type: str, name: str) -> bool:
    """CoPE counts earlier tokens, and `forget` sums over them, so they are for decoders only."""
    return name not in ("cope", "forget") or is_causal(model_type)


def generates(model_type: str) -> bool:
    """Whether there is a causal language model; the text models of multimodal ones have none of their own."""
    return is_causal(model_type) and model_type not in QWEN_VL


def auto_class(model_type: str) -> Any:
    """The Auto class of a language model, or of the base model where there is none."""
    if generates(model_type):
        return AutoModelForCausalLM
    return AutoModelForMaskedLM if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES else AutoModel


def model(
    model_type: str,
    scheme: Any = None,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    auto: Any = AutoModel,
    **changes: Any,
) -> Any:
    """A tiny model in eval mode. Without a scheme it is the stock model with the same shared weights."""
    backend = backend or backends(model_type)[0]
    built = auto.from_config(config(model_type, **changes), attn_implementation=backend)
    tiny.randomise(built)
    if scheme is not None:
        try:
            hf_posenc.retrofit(built, scheme)
        except PosEncError as error:
            if "attention interface" in str(error):
                _skip_in_old_releases(model_type, error)
            raise
        tiny.randomise_scheme(built)
    return built.to(dtype).eval()


@torch.no_grad()
def output(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The logits, or the hidden states of a model without a head."""
    outputs = model(ids, **inputs)
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state


def assert_close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4) -> None:
    """Equal up to float32 sums in a different order, through three layers of outputs around 1."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=atol)


def differ(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (first - second).abs().max().item() > 1e-2


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model type with a scheme."""

    model_type: str
    name: str

    @property
    def scheme(self) -> Any:
        return scheme_for(self.model_type, self.name)

    def build(self, **options: Any) -> Any:
        return model(self.model_type, self.scheme, **options)


def one_per_trait(names: list[str], offset: int) -> list[str]:
    """Some model types that have all traits between them; which ones depends on the offset."""
    chosen: list[str] = []
    missing = set().union(*map(traits, names))
    rotated = names[offset % len(names) :] + names[: offset % len(names)]
    while missing:
        best = max(rotated, key=lambda name: min(len(traits(name) & missing), 2))  # at most 2, for variety
        chosen.append(best)
        missing -= traits(best)
    return chosen


def pairs(
    schemes: list[str], only: Callable[[str], bool] = lambda model_type: True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrize a test with a `pair` of model type and scheme.

    `make test` runs a few model types that cover all traits, each with one scheme; which ones depends on the name of
    the test. `make test-all` runs all pairs.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        offset = zlib.crc32(test.__name__.encode())
        names = [name for name in MODEL_TYPES if only(name)]
        fast = {}
        for index, name in enumerate(one_per_trait(names, offset)):
            defined = [scheme for scheme in schemes if supports(name, scheme)]
            fast[name] = defined[(offset + index) % len(defined)]
        rows = [
            pytest.param(
                Pair(name, scheme), id=f"{name}-{scheme}", marks=[] if fast.get(name) == scheme else [pytest.mark.slow]
            )
            for name, scheme in itertools.product(names, schemes)
            if supports(name, scheme)
        ]
        return pytest.mark.parametrize("pair", rows)(test)

    return decorate


def numeric_settings(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrize a test with `model_type`, `dtype` and `backend`; `make test` runs one combination per model type."""
    rows = []
    for index, model_type in enumerate(MODEL_TYPES):
        combinations = list(itertools.product([torch.float32, torch.bfloat16], backends(model_type)))
        for number, (dtype, backend) in enumerate(combinations):
            marks = [] if number == index % len(combinations) else [pytest.mark.slow]
            label = f"{model_type}-{str(dtype).removeprefix('torch.')}-{backend}"
            rows.append(pytest.param(model_type, dtype, backend, id=label, marks=marks))
    return pytest.mark.parametrize(("model_type", "dtype", "backend"), rows)(test)
