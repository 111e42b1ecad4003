"""What iterators of other libraries should check about themselves at a restore, and do not.

Grain's Dataset iterators, torchdata's loader and Hugging Face's streams take any state: of another
seed, another batch size, other data. Their settings are looked up here, by the names that their
attributes have, so that a difference is an error; a library that has moved one loses that check.
Nothing is imported. Tried with grain 0.2.18, torchdata 0.11, datasets 5.2.
"""

from collections.abc import Iterator
from typing import Any

Settings = dict[str, Any]

# Attributes of a Grain transformation that say which elements come out of it.
_GRAIN = ("batch_size", "global_batch_size", "drop_remainder", "seed", "global_seed",
          "seed_rng_seed", "num_epochs", "window_size", "shuffle", "shard_index", "shard_count",
          "num_records")  # fmt: skip
_GRAIN_READS_AHEAD = "Prefetch"  # in the name of what changes no element
_NODES_MAX = 200


def settings_of(iterator: Any) -> Settings:
    """By name, what must be the same when the state of an iterator is restored."""
    package = type(iterator).__module__.partition(".")[0]
    look = {"grain": _grain, "torchdata": _torchdata, "datasets": _datasets}.get(package)
    return {} if look is None else look(iterator)


def why_not_saved(iterator: Any) -> str | None:
    """Why the state of an iterator would not bring it back; None if it would."""
    if type(iterator).__module__.partition(".")[0] != "datasets":
        return None
    for node in _examples_iterables(iterator):
        if "BufferShuffled" in type(node).__name__:
            return (
                "a Hugging Face stream with a shuffle buffer, whose state lacks the rows in the "
                "buffer: about buffer_size of them would be lost; "
                "jaxshard.data.Stateful(dataset, replay=True) reads forward to the position"
            )
    return None


def is_elastic(iterator: Any) -> bool:
    """Whether one state serves any number of processes."""
    if type(iterator).__module__.partition(".")[0] == "grain":
        return type(iterator).__name__ == "ElasticIterator"
    return getattr(iterator, "elastic", False) is True


def _grain(iterator: Any) -> Settings:
    loader = getattr(iterator, "_data_loader", None)
    if loader is not None:  # it compares its sampler and the type of its source itself
        operations = [repr(x) for x in getattr(loader, "_operations", ()) if "Batch" in repr(x)]
        found = {"batches": operations, "rows of the source": _length(loader, "_data_source")}
        return {key: value for key, value in found.items() if value not in (None, [])}
    found = {}
    names: list[str] = []
    for node in _grain_nodes(iterator):
        name = type(node).__name__.strip("_")
        if _GRAIN_READS_AHEAD in name:
            continue
        name = name.removesuffix("DatasetIterator").removesuffix("MapDataset")
        name = name.removesuffix("IterDataset")
        label = _label(name, names)
        for attribute in _GRAIN:
            for place in (node, getattr(node, "_shard_options", None)):
                value = getattr(place, f"_{attribute}", getattr(place, attribute, None))
                if type(value) in (int, bool) and not _is_share_of_elastic(node, attribute):
                    found[f"{label}.{attribute}"] = value
        rows = _length(node, "_source")
        if rows is not None:
            found[f"{label}.rows"] = rows
    return {"transformations": names, **found}


def _label(name: str, names: list[str]) -> str:
    """The name of one more transformation, numbered if there is one of that name already."""
    names.append(name)
    return name if names.count(name) == 1 else f"{name} {names.count(name)}"


def _is_share_of_elastic(node: Any, attribute: str) -> bool:
    return is_elastic(node) and attribute.startswith("shard_")


def _grain_nodes(start: Any) -> Iterator[Any]:
    """A Grain iterator and all that it takes its elements from, nearest first."""
    waiting: list[Any] = [start]
    seen: set[int] = set()
    while waiting and len(seen) < _NODES_MAX:
        node = waiting.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for name in ("_map_parent", "_ds", "_iter_parent", "_dataset", "_maybe_nonnative_parent"):
            below = getattr(node, name, None)
            if type(below).__module__.startswith("grain."):
                waiting.append(below)
        waiting += getattr(node, "_parents", ()) or ()


def _torchdata(loader: Any) -> Settings:
    generator = getattr(loader, "generator", None)
    sampler = getattr(loader, "sampler", None)
    found = {
        "batch_size": getattr(loader, "batch_size", None),
        "drop_last": getattr(loader, "drop_last", None),
        "num_workers": getattr(loader, "num_workers", None),
        "sampler": None if sampler is None else type(sampler).__name__,
        "seed of the generator": None if generator is None else generator.initial_seed(),
        "rows of the dataset": _length(loader, "dataset"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _datasets(stream: Any) -> Settings:
    found: Settings = {"shards": getattr(stream, "num_shards", None)}
    names: list[str] = []
    for node in _examples_iterables(stream):
        name = _label(type(node).__name__.removesuffix("ExamplesIterable"), names)
        for attribute in ("batch_size", "buffer_size", "n", "stopping_strategy"):
            value = getattr(node, attribute, None)
            if type(value) in (int, str):
                found[f"{name}.{attribute}"] = value
        generator = getattr(node, "generator", None)
        if generator is not None:
            found[f"{name}.seed"] = str(generator.bit_generator.state["state"])
    found["transformations"] = names
    return {key: value for key, value in found.items() if value is not None}


def _examples_iterables(stream: Any) -> Iterator[Any]:
    waiting = [getattr(stream, "_ex_iterable", None)]
    for _ in range(_NODES_MAX):
        if not waiting:
            return
        node = waiting.pop(0)
        if node is None:
            continue
        yield node
        waiting.append(getattr(node, "ex_iterable", None))
        waiting += list(getattr(node, "ex_iterables", ()) or ())


def _length(holder: Any, attribute: str) -> int | None:
    try:
        return len(getattr(holder, attribute))
    except (AttributeError, TypeError):
        return None
