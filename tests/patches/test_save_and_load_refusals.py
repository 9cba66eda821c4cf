"""A variant never loads as a stock model: shown in processes of their own, with and without the plugin."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_posenc.errors import PosEncError, install_command
from hf_posenc.model_types import MODEL_TYPES
from tests.support import tiny_models as tiny

CLASSES = {
    "gpt2": ("AutoModelForCausalLM", "GPT2LMHeadModel", "GPT2Config"),
    "llama": ("AutoModelForCausalLM", "LlamaForCausalLM", "LlamaConfig"),
    "bert": ("AutoModelForMaskedLM", "BertForMaskedLM", "BertConfig"),
}
NOT_INSTALLED = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_posenc":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nowhere())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def assert_says_how_to_install(stderr: str) -> None:
    """The last line of a traceback is the one that people read."""
    last = stderr.splitlines()[-1]
    assert install_command() in last, stderr
    assert "import hf_posenc" in last, stderr


def variant_of(fast: str | None) -> pytest.MarkDecorator:
    """Parametrize `variant` with all architectures; `make test` runs at most one, since every test starts a process."""
    marks = {name: [] if name == fast else [pytest.mark.slow] for name in CLASSES}
    rows = [pytest.param(name, marks=marks[name]) for name in CLASSES]
    return pytest.mark.parametrize("variant", rows, indirect=True)


@pytest.fixture(scope="module")
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    model = tiny.model(request.param, ["alibi", "rope"], torch.float32)
    model.save_pretrained(directory)
    torch.save(model(tiny.tokens()).logits.detach(), directory / "expected.pt")
    return request.param, directory


@variant_of(fast=None)
def test_auto_classes_refuse_without_the_plugin(variant: tuple[str, Path]) -> None:
    architecture, directory = variant
    auto = CLASSES[architecture][0]
    done = run(f"import transformers; transformers.{auto}.from_pretrained({str(directory)!r})")
    assert done.returncode != 0
    # Transformers raises this before it reads anything else. It names the directory, whose code says how to install.
    assert "trust_remote_code" in done.stderr, done.stderr
    code = (directory / "modeling_hf_posenc.py").read_text(encoding="utf-8").splitlines()
    assert install_command() in code[0]
    assert "import hf_posenc" in code[1]


@pytest.mark.parametrize("which", [pytest.param(1, id="model"), pytest.param(2, id="config", marks=pytest.mark.slow)])
@variant_of(fast="llama")
def test_explicit_stock_classes_refuse_without_the_plugin(variant: tuple[str, Path], which: int) -> None:
    architecture, directory = variant
    done = run(f"import transformers; transformers.{CLASSES[architecture][which]}.from_pretrained({str(directory)!r})")
    assert done.returncode != 0
    assert_says_how_to_install(done.stderr)


LOAD_AND_COMPARE = """
import torch, transformers
model = transformers.{auto}.from_pretrained({directory!r}, {settings})
assert type(model).__name__ == "PosEnc{stock}", type(model)
ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    torch.testing.assert_close(model(ids).logits, torch.load({directory!r} + "/expected.pt"), rtol=0, atol=1e-6)
model.save_pretrained({directory!r} + "/again")
"""


def load_and_compare(variant: tuple[str, Path], settings: str = "") -> str:
    architecture, directory = variant
    auto, stock, _ = CLASSES[architecture]
    return LOAD_AND_COMPARE.format(auto=auto, stock=stock, directory=str(directory), settings=settings)


@variant_of(fast=None)
def test_remote_code_works_where_the_package_is_installed(variant: tuple[str, Path]) -> None:
    """Nothing imports hf_posenc here but the shim in the checkpoint."""
    done = run(load_and_compare(variant, "trust_remote_code=True"))
    assert done.returncode == 0, done.stderr
    again = sorted(path.name for path in (variant[1] / "again").glob("*.py"))
    assert again == ["modeling_hf_posenc.py"]  # no copies of the package's own files


@variant_of(fast=None)
def test_remote_code_names_the_package_where_it_is_not_installed(variant: tuple[str, Path]) -> None:
    done = run(NOT_INSTALLED + load_and_compare(variant, "trust_remote_code=True"))
    assert done.returncode != 0
    assert_says_how_to_install(done.stderr)
    assert done.stderr.splitlines()[-1].startswith("ImportError: This model needs hf_posenc"), "one line"


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("import hf_posenc", marks=pytest.mark.slow),
        pytest.param("import transformers, hf_posenc", marks=pytest.mark.slow),
        pytest.param("from transformers import GPT2LMHeadModel, LlamaConfig\nimport hf_posenc", marks=pytest.mark.slow),
    ],
)
@variant_of(fast="bert")
def test_with_the_plugin_all_classes_load_it(variant: tuple[str, Path], first: str) -> None:
    architecture, directory = variant
    stock = CLASSES[architecture][1]
    load = f"transformers.{stock}.from_pretrained({str(directory)!r})"
    explicit = f"import transformers; print(type({load}).__name__)"
    automatic = load_and_compare(variant)
    # Which of the two comes first may matter to imports: one order here, the other with another way to begin.
    both = [explicit, automatic] if "transformers" in first else [automatic, explicit]
    done = run("\n".join([first, *both]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count(f"PosEnc{stock}") == 1, done.stdout


INVISIBLE = """
import sys
before = set(sys.modules)
import hf_posenc
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} & {"torch", "transformers", "numpy", "peft"}))
"""


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    assert run(INVISIBLE).stdout.strip() == "[]"


STOCK_LOGITS = """
import torch, transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, BertConfig, BertModel
torch.manual_seed(0)
ids = torch.arange(3, 15)[None]
small = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=40)
models = [
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=40)),
    LlamaForCausalLM(LlamaConfig(**small)),
    BertModel(BertConfig(**small)),
]
for model in models:
    print(type(model), type(model.config), model.eval()(ids)[0].double().sum().item().hex(), sorted(model.state_dict()))
print(GPT2LMHeadModel is transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel, GPT2Config().to_json_string())
"""


@pytest.fixture(scope="module")
def without_the_plugin() -> str:
    plain = run(STOCK_LOGITS)
    assert plain.returncode == 0, plain.stderr
    return plain.stdout


USE = """
import hf_posenc, transformers
with hf_posenc.patched("rope"): pass
transformers.GPT2Config(position_scheme="rope")
"""


@pytest.mark.parametrize(
    "first", [pytest.param("import hf_posenc\n", id="imported", marks=pytest.mark.slow), pytest.param(USE, id="used")]
)
def test_stock_models_are_the_same_to_the_bit_with_the_plugin(first: str, without_the_plugin: str) -> None:
    assert run(first + STOCK_LOGITS).stdout == without_the_plugin


@pytest.mark.slow
def test_looking_for_a_module_does_not_switch_the_plugin_off() -> None:
    """Tools look modules up without importing them; the field must be there when the import comes."""
    code = """
import hf_posenc, importlib.util
importlib.util.find_spec("transformers.models.gpt2.configuration_gpt2")
from transformers import GPT2Config
print(type(GPT2Config(position_scheme="rope")).__name__)
"""
    assert run(code).stdout.strip() == "PosEncGPT2Config"


@pytest.mark.slow
def test_a_pickled_config_and_model_come_back_in_another_process(tmp_path: Path) -> None:
    model = tiny.model("gpt2", "rope", torch.float32)
    (tmp_path / "config.pkl").write_bytes(pickle.dumps(model.config))
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    code = f"""
import pickle
config = pickle.load(open({str(tmp_path / "config.pkl")!r}, "rb"))
config.save_pretrained({str(tmp_path / "saved")!r})
model = pickle.load(open({str(tmp_path / "model.pkl")!r}, "rb"))
print(type(config).__name__, type(model).__name__, model.config.position_scheme)
"""
    done = run(code)
    assert done.stdout.strip() == "PosEncGPT2Config PosEncGPT2LMHeadModel rope", done.stderr


@pytest.mark.slow
def test_the_mapping_of_configs_can_be_pickled_and_listed() -> None:
    code = """
import hf_posenc, pickle
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
again = pickle.loads(pickle.dumps(dict(CONFIG_MAPPING._extra_content)))  # what pickling the mapping does
print(again["posenc_gpt2"].__name__, CONFIG_MAPPING["posenc_llama"].__name__)
print(sum(cls.__name__.startswith("PosEnc") for cls in CONFIG_MAPPING._extra_content.values()))
"""
    done = run(code)
    assert done.stdout.split() == ["PosEncGPT2Config", "PosEncLlamaConfig", str(len(MODEL_TYPES))], done.stderr


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_unknown_backends_get_the_error_of_transformers(architecture: str) -> None:
    """Only a backend that exists, and would drop the scheme, is refused by hf_posenc."""
    model = tiny.model(architecture, "alibi", torch.float32)
    with pytest.raises(ValueError, match=r'Specified `attn_implementation="foo"` is not supported') as raised:
        model.set_attn_implementation("foo")
    assert not isinstance(raised.value, PosEncError)
    with pytest.raises(ValueError, match="foo"):
        type(model)._from_config(model.config, attn_implementation="foo")
    with pytest.raises(PosEncError, match="cannot add the score term"):
        model.set_attn_implementation("flash_attention_2")
    with pytest.raises(PosEncError, match="cannot add the score term"):
        model.set_attn_implementation("kernels-community/flash-attn")
