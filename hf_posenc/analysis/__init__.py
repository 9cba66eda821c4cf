"""What position encodings do, as numbers: for any scheme, and for any checkpoint. `hf_posenc.plots` draws them."""

from __future__ import annotations

from .attended import Attended, attention_by_distance
from .clouds import Clouds, clouds
from .decay import Decay, decay
from .encoding import Encoding, encoding
from .frequencies import Frequencies, frequencies
from .movement import Movement, movement
from .probes import Probe, linear_probe
from .relative import Bias, RelativeRows, bias_by_distance, relative_rows
from .separation import Separation, separation
from .sources import checkpoint_model, scheme_model
from .subspaces import effective_dimension, leading_directions, principal_angles
from .texts import token_rows, words_of
from .turning import NothingTurns

__all__ = [
    "Attended",
    "Bias",
    "Clouds",
    "Decay",
    "Encoding",
    "Frequencies",
    "Movement",
    "NothingTurns",
    "Probe",
    "RelativeRows",
    "Separation",
    "attention_by_distance",
    "bias_by_distance",
    "checkpoint_model",
    "clouds",
    "decay",
    "effective_dimension",
    "encoding",
    "frequencies",
    "leading_directions",
    "linear_probe",
    "movement",
    "principal_angles",
    "relative_rows",
    "scheme_model",
    "separation",
    "token_rows",
    "words_of",
]
