"""Data whose position does not depend on the mesh, and the iterators of others.

`ElasticLoader` gives the same rows in the same order on any mesh and any number of processes; a
`Mixture` of sources and a `Pack` of documents are seekable like a plain list. `Stateful` brings an
iterator of another library into the state that jaxshard saves.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxshard.data._loader import ElasticLoader
    from jaxshard.data._mixture import Mixture
    from jaxshard.data._pack import Pack
    from jaxshard.data._stateful import Stateful

__all__ = ["ElasticLoader", "Mixture", "Pack", "Stateful"]

# Nothing is imported before it is asked for: worker processes have no use for jax.
_ROOM_OF = {
    "ElasticLoader": "_loader",
    "Mixture": "_mixture",
    "Pack": "_pack",
    "Stateful": "_stateful",
}


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'jaxshard.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jaxshard.data.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
