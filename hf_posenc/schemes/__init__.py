"""The schemes, one file each, and the register that `position_scheme` looks names up in.

The package can be called: `hf_posenc.schemes()` lists what there is.
"""

from __future__ import annotations

import sys
import types

from ..catalogue import SchemeInfo, describe
from ..scheme import Scheme
from .alibi import Alibi
from .cope import Cope
from .deberta import Deberta
from .exponential import Exponential
from .fire import Fire
from .kerple import Kerple
from .learned import Learned
from .none import NoPositions
from .polynomial import Polynomial
from .rope import Rope
from .sandwich import Sandwich
from .shaw import Shaw
from .sinusoidal import Sinusoidal
from .t5 import T5
from .transformer_xl import TransformerXL
from .tupe import Tupe
from .window import Window
from .xpos import Xpos

REGISTER: dict[str, type[Scheme]] = {}


def register_scheme(scheme: type[Scheme]) -> type[Scheme]:
    """Make a scheme known by its `name`, also as a class decorator. A name that is taken is an error."""
    if REGISTER.get(scheme.name, scheme) is not scheme:
        raise ValueError(f"there is a scheme named {scheme.name!r} already: {REGISTER[scheme.name]!r}")
    REGISTER[scheme.name] = scheme
    return scheme


for _scheme in (
    *(Learned, Window, Sinusoidal, Polynomial, Exponential),
    *(Rope, Xpos),
    *(Alibi, T5, Kerple, Fire, Sandwich),
    *(Shaw, TransformerXL, Tupe, Deberta, Cope),
    NoPositions,
):
    register_scheme(_scheme)


class _Listing(types.ModuleType):
    def __call__(self) -> dict[str, SchemeInfo]:
        """All schemes by name, with what each does and the options it takes."""
        return {name: describe(scheme) for name, scheme in REGISTER.items()}


sys.modules[__name__].__class__ = _Listing
