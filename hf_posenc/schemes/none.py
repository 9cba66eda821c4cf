"""NoPE (Kazemnejad et al. 2023): no position encoding at all."""

from . import Kind, Scheme


class NoPositions(Scheme):
    """No position signal: a causal model still sees order through its mask, an encoder does not."""

    name = "none"
    paper = "Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466"
    kind = Kind.NOTHING
    formula = "q.k / sqrt(d)"
    cost = "none. With `layers`, only these have no positions, and the others keep the model's own rotary encoding"
    tested_against = "the stock model without its positions"
    reads_positions = False
