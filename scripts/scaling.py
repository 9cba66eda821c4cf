"""Calculate what converting a large LLaMA needs: memory per GPU and tokens per second (docs/scaling.md).

Nothing is measured here. `python -m scripts.scaling` prints the tables; `python -m scripts.fill_pages` puts them into
the page. Every assumption is a constant of this file.
"""

from __future__ import annotations

import argparse
import dataclasses

GB, TERA = 1e9, 1e12
PEAK_FLOPS = 989 * TERA
"""An H100 SXM in bfloat16 without sparsity, by its data sheet."""
UTILIZATION = 0.4
"""The assumed share of the peak that training reaches."""
FLOAT32_TRAINING = 16
"""Bytes per trained parameter: weight, gradient and two moments of AdamW, all in float32."""
LENGTHS = (4096, 8192, 32768)
LORA_RANK = 16
LORA_TARGETS = 7
"""Linear layers in each layer of the model."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a LLaMA."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_size: int
    mlp_size: int
    vocabulary: int = 128256
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        heads = 2 * self.num_heads + 2 * self.num_key_heads  # query and output; key and value
        return self.hidden_size * (heads * self.head_size + 3 * self.mlp_size + 2)

    @property
    def parameters(self) -> int:
        tables = self.vocabulary * self.hidden_size * (1 if self.tied else 2)
        return tables + self.num_layers * self.layer_parameters + self.hidden_size

    def forward_flops(self, length: int) -> float:
        """Floating-point operations per token of a causal forward pass; a query sees half of the keys on average."""
        head = self.vocabulary * self.hidden_size
        attention = self.num_layers * 2 * self.num_heads * self.head_size * length
        return 2 * (self.num_layers * self.layer_parameters + head) + attention

    def activation_bytes(self, length: int) -> float:
        """Activations of one row under gradient checkpointing: every layer's input, and everything inside one layer."""
        kept = 2 * self.num_layers * self.hidden_size
        inside = 2 * (8 * self.hidden_size + 2 * self.num_key_heads * self.head_size + 4 * self.mlp_size)
        return length * (kept + inside)

    def bias_bytes(self, length: int) -> int:
        """A bias that is written out for one row in bfloat16."""
        return 2 * self.num_heads * length**2


SHAPES = (
    Shape("1B", 2048, 16, 32, 8, 64, 8192, tied=True),
    Shape("8B", 4096, 32, 32, 8, 128, 14336),
    Shape("70B", 8192, 80, 64, 8, 128, 28672),
)
"""Llama 3.2 1B, and Llama 3.1 8B and 70B."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to train: on how many GPUs, what is trained, and where the original model is."""

    shape: Shape
    num_gpus: int
    method: str
    weights: float
    """Bytes of weights, gradients and optimizer state per GPU, the original model included."""
    teacher: bool
    whole_logits: bool
    """Whether logits of a whole row exist at once: the chunked loss is for models that are not sharded."""

    def bytes_per_gpu(self, length: int) -> float:
        shape = self.shape
        copies = 3 + 2 * (self.teacher and self.whole_logits)  # of the student's logits, and of the teacher's
        logits = copies * 4 * (length * shape.vocabulary if self.whole_logits else 2**23)
        hidden = (
            4 * length * shape.num_layers * shape.hidden_size if self.teacher else 0
        )  # the teacher's, of all layers
        return self.weights + shape.activation_bytes(length) + logits + hidden

    def tokens_per_second(self, length: int) -> float:
        """Of all GPUs: forward, forward again for checkpointing, a backward pass of twice the cost, and the teacher."""
        passes = 4 + self.teacher
        return self.num_gpus * PEAK_FLOPS * UTILIZATION / (passes * self.shape.forward_flops(length))


def setups() -> list[Setup]:
    """The setups of the page."""
    small, medium, large = SHAPES
    adapters = LORA_TARGETS * 2 * LORA_RANK * medium.hidden_size * medium.num_layers * FLOAT32_TRAINING
    return [
        Setup(small, 1, "all weights, teacher", (FLOAT32_TRAINING + 4) * small.parameters, True, False),
        Setup(medium, 1, "LoRA, teacher", 2 * medium.parameters + adapters, True, False),
        Setup(medium, 8, "all weights, teacher, FSDP2", _sharded(medium, 8, teacher=True), True, True),
        Setup(large, 64, "all weights, FSDP2", _sharded(large, 64), False, True),
    ]


def _sharded(shape: Shape, num_gpus: int, teacher: bool = False) -> float:
    """The state of this process, and two gathered layers: the current one and the next one.

    A teacher in bfloat16 runs before the student, so that their gathered layers are not in memory together.
    """
    state = (FLOAT32_TRAINING + 2 * teacher) * shape.parameters / num_gpus
    return state + 2 * 4 * shape.layer_parameters


def bias_rows() -> list[list[str]]:
    """The bias of one layer and row: written out, and as one vector per head."""
    rows = []
    for shape in SHAPES:
        cells = [f"{shape.bias_bytes(length) / GB:.1f} GB" for length in LENGTHS]
        vector = 4 * shape.num_heads * (2 * LENGTHS[-1] - 1)
        rows.append([shape.name, str(shape.num_heads), *cells, f"{vector / 1e6:.0f} MB"])
    return rows


def memory_rows() -> list[list[str]]:
    """Memory per GPU with one row at a time."""
    rows = []
    for setup in setups():
        cells = [f"{setup.bytes_per_gpu(length) / GB:.0f} GB" for length in LENGTHS]
        rows.append([setup.shape.name, str(setup.num_gpus), setup.method, f"{setup.weights / GB:.0f} GB", *cells])
    return rows


def speed_rows() -> list[list[str]]:
    """Tokens per second of all GPUs together, and the time for 100 million tokens."""
    rows = []
    for setup in setups():
        speed = [setup.tokens_per_second(length) for length in LENGTHS]
        hours = 1e8 / speed[0] / 3600
        cells = [f"{tokens:,.0f}" for tokens in speed]
        rows.append([setup.shape.name, str(setup.num_gpus), setup.method, *cells, f"{hours:.1f} h"])
    return rows


LENGTH_TITLES = [f"{length:,} tokens" for length in LENGTHS]
TABLES = {
    "bias": (["model", "heads", *LENGTH_TITLES, f"one vector per head, {LENGTH_TITLES[-1]}"], bias_rows),
    "memory": (["model", "GPUs", "trained", "weights and optimizer", *LENGTH_TITLES], memory_rows),
    "speed": (["model", "GPUs", "trained", *LENGTH_TITLES, f"100 M tokens at {LENGTH_TITLES[0]}"], speed_rows),
}
"""The header and the rows of each table."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, (header, rows) in TABLES.items():
        print(name)
        for cells in (header, *rows()):
            print("  " + " | ".join(cells))


if __name__ == "__main__":
    main()
