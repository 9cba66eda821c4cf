"""The schemes, one file each, and the register that `position_scheme` looks names up in.

Every scheme in a file of this package is registered: a new one takes a file, and no list of them is kept.
The package can be called: `hf_posenc.schemes()` lists what there is.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types

from ..catalogue import SchemeInfo, describe
from ..scheme import Scheme

REGISTER: dict[str, type[Scheme]] = {}
REQUIRED = ("name", "paper", "extends")


def register_scheme(scheme: type[Scheme]) -> type[Scheme]:
    """Make a scheme known by its `name`, also as a class decorator. A name that is taken is an error."""
    missing = [attribute for attribute in REQUIRED if not hasattr(scheme, attribute)]
    if missing:
        raise ValueError(f"{scheme.__name__} cannot be registered: it lacks {', '.join(missing)}")
    if REGISTER.get(scheme.name, scheme) is not scheme:
        raise ValueError(f"there is a scheme named {scheme.name!r} already: {REGISTER[scheme.name]!r}")
    REGISTER[scheme.name] = scheme
    return scheme


def _register_files() -> None:
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for found in vars(module).values():
            if isinstance(found, type) and issubclass(found, Scheme) and found.__module__ == module.__name__:
                register_scheme(found)


class _Listing(types.ModuleType):
    def __call__(self) -> dict[str, SchemeInfo]:
        """All schemes by name, with what each does and the options it takes."""
        return {name: describe(scheme) for name, scheme in REGISTER.items()}


_register_files()
sys.modules[__name__].__class__ = _Listing
