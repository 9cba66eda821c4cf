"""Forgetting by content: the Forgetting Transformer (Lin et al. 2025) and CABLE (Veisi et al. 2025).

Every token has a gate per head, computed from the hidden state that enters the layer. A logit is lowered by the gates
of all tokens after the key up to the query, which is a difference of running sums: one number per head and token, never
a matrix. The gates of earlier tokens are stored in the KV cache as further features of the keys.

Shape legend: B batch, H heads, Q queries, E hidden size.
"""

import functools
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from ..errors import PosEncError
from . import Content, Kind, LayerParameters, LayerParams, ModelShape, Options, RunningSum, Scheme, option
from .base import ParameterSpec

INIT_STD = 0.02
SIGNS = {"fox": 1, "cable": -1}


class ForgetOptions(Options):
    form: Literal["fox", "cable"] = option(
        "fox", "how a gate is written: log sigmoid(z), or -softplus(z), which is the same with the sign of z reversed"
    )
    init: Literal["neutral", "paper"] = option(
        "neutral", "no forgetting, by a factor s per head that starts at 0; or as in the papers, without s"
    )


class Forget(Scheme[ForgetOptions, None]):
    """Every token lowers the logits of all keys before it, in each head by an amount that its content decides.

    The Forgetting Transformer and CABLE do the same with opposite signs of the gates' weights, so that `form` matters
    only for weights that were trained elsewhere. CABLE is as in the first version of its paper, with biases alone.
    Other parts of the Forgetting Transformer (output gates, norms, shifted keys) are not position schemes, and not
    included. Padding, other documents of a packed row and `position_ids` do not change the sums.
    """

    name = "forget"
    paper = (
        "Lin et al. 2025, https://arxiv.org/abs/2503.02130 (fox); "
        "Veisi et al. 2025, https://arxiv.org/abs/2503.08067v1 (cable)"
    )
    kind = Kind.CONTENT
    formula = (
        "q_i.k_j / sqrt(d) + s_h sum over l = j+1..i of log f_l, f_l = sigmoid(z_l) (fox) or sigmoid(-z_l) (cable), "
        "z_l = w_h.x_l + b_h, x_l the layer's input"
    )
    cost = (
        "one vector and two scalars per head and layer; one number per head and token, which is kept in the KV cache "
        "(two in half precision)"
    )
    neutral = "`strength` (s, not in the papers) is 0"
    tested_against = "a loop over tokens"
    needs_distances = False
    reads_positions = False
    Options = ForgetOptions

    def __init__(self, options: ForgetOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        if not shape.causal:
            raise PosEncError(
                "forget sums over the tokens from the key to the query, so it is for causal models only (GPT-2, LLaMA, "
                "BERT with is_decoder=True); on an encoder use alibi, kerple or deberta"
            )

    def layer_module(self) -> LayerParameters:
        heads = (self.shape.num_heads,)
        is_paper = self.options.init == "paper"
        parameters: dict[str, ParameterSpec] = {
            "gate_weight": (
                (*heads, self.shape.hidden_size),
                functools.partial(init.normal_, std=INIT_STD) if is_paper else init.zeros_,
            ),
            "gate_bias": (heads, init.zeros_),
        }
        if not is_paper:
            parameters["strength"] = (heads, init.zeros_)
        return LayerParameters(**parameters)

    def gate(self, hidden_states_BQE: torch.Tensor, layer_params: LayerParams) -> torch.Tensor:
        """The logarithm of each token's forget gate, times the strength, (B, H, Q)."""
        params = {name: value.to(hidden_states_BQE.dtype) for name, value in layer_params().items()}
        logits_BQH = nn.functional.linear(hidden_states_BQE, params["gate_weight"], params["gate_bias"])
        log_gates_BQH = nn.functional.logsigmoid(SIGNS[self.options.form] * logits_BQH)
        if "strength" in params:
            log_gates_BQH = log_gates_BQH * params["strength"]
        return log_gates_BQH.transpose(1, 2)

    def score(self, prepared: None, layer_params: LayerParams, content: Content) -> RunningSum:
        assert content.running_sum is not None
        return content.running_sum

    def details(self, seam: str) -> str:
        return "keeps a gate per head and token in the KV cache" if seam == "score" else ""
