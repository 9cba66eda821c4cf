"""Names that other packages or papers use for an encoding, and how to write the same thing here."""

from __future__ import annotations

_LINEAR = '{"type": "rope", "scaling": {"rope_type": "linear", "factor": 2.0}}'
_LONGROPE = '{"type": "rope", "scaling": {"rope_type": "longrope", ...}}'
_NTK = '{"type": "rope", "scaling": {"rope_type": "dynamic", "factor": 2.0}}'
_NOPE_LAYERS = '{"type": "none", "layers": "3::4"}'
_P_ROPE = '{"type": "rope", "frequency_fraction": 0.75}'
_SELF_EXTEND = '{"type": "rope", "extend": {"method": "self_extend"}}'
_DCA = '{"type": "rope", "extend": {"method": "dca"}}'
_SSMAX = '["rope", {"type": "temperature", "form": "ssmax"}]'
_LLAMA4 = '["rope", {"type": "temperature", "form": "llama4"}]'
_TRAINED = "any scheme that reads positions, and train it with hf-posenc train --positions"

OTHER_NAMES = {
    "absolute": '"learned"',
    "ape": '"learned"',
    "cable": '{"type": "forget", "form": "cable"}',
    "chunkllama": _DCA,
    "dca": _DCA,
    "disentangled": '"deberta"',
    "drope": '"none", recalibrated by hf-posenc train --recipe drope',
    "dual_chunk_attention": _DCA,
    "dynamic": _NTK,
    "dynamic_ntk": _NTK,
    "fope": '{"type": "rope", "fourier": 0.3}',
    "forgetting": '"forget"',
    "forgetting_transformer": '"forget"',
    "fox": '"forget"',
    "irope": _NOPE_LAYERS,
    "leaky_rerope": '{"type": "rope", "extend": {"method": "leaky_rerope"}}',
    "linear": _LINEAR,
    "llama3": '{"type": "rope", "scaling": {"rope_type": "llama3", ...}}',
    "llama4": _LLAMA4,
    "longlm": _SELF_EXTEND,
    "longrope": _LONGROPE,
    "longrope2": _LONGROPE,
    "no_positions": '"none"',
    "no_rope_layers": _NOPE_LAYERS,
    "nope": '"none"',
    "nope_layers": _NOPE_LAYERS,
    "ntk": f'{_NTK}, or a larger theta: {{"type": "rope", "theta": 80000.0}}',
    "ntk_aware": f'{_NTK}, or a larger theta: {{"type": "rope", "theta": 80000.0}}',
    "p_rope": _P_ROPE,
    "pi": _LINEAR,
    "pose": f"{_TRAINED} pose",
    "position_interpolation": _LINEAR,
    "proportional": _P_ROPE,
    "prope": _P_ROPE,
    "randomized": f"{_TRAINED} randomized",
    "randomized_positions": f"{_TRAINED} randomized",
    "relative": '"t5" or "shaw"',
    "relative_bias": '"t5"',
    "relative_key": '{"type": "shaw", "values": false}',
    "relative_key_query": '{"type": "shaw", "values": false, "query_term": true}',
    "rerope": '{"type": "rope", "extend": {"method": "rerope"}}',
    "resonance_rope": '{"type": "rope", "resonance": true}',
    "rotary": '"rope"',
    "rpe": '"t5" or "shaw"',
    "scalable_softmax": _SSMAX,
    "self_extend": _SELF_EXTEND,
    "selfextend": _SELF_EXTEND,
    "shape": f"{_TRAINED} shape",
    "sin": '"sinusoidal"',
    "ssmax": _SSMAX,
    "stock": '"learned" or "rope", whichever the architecture has, or no position_scheme',
    "t5_bias": '"t5"',
    "yarn": '{"type": "rope", "scaling": {"rope_type": "yarn", "factor": 4.0}}',
}
