"""What speaks against going on from a saved position, and what can be done about it."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxshard.data._schedule import Schedule

_NUMBERS = ("batches", "rows", "seed")
_FRESH = (
    "begin another run with init_from= and a mapping= that leaves the loader out, and "
    "loader.seek(step) if it is to go on from there"
)


def what_differs(
    mine: Mapping[str, Any], saved: Any, schedule: Schedule, batches: int | None
) -> list[str]:
    """Sentences; none if a loader can go on from a saved state.

    Args:
      mine: the state that the loader has now.
      saved: the one to go on from.
      schedule: of the loader.
      batches: that the loader has in all, None for no end.
    """
    fits = isinstance(saved, Mapping) and all(type(saved.get(key)) is int for key in _NUMBERS)
    if not fits or set(mine) - set(saved):
        return _not_a_state(mine, saved)
    try:
        return _differences(mine, saved, schedule, batches)
    except (LookupError, TypeError, ValueError) as e:
        return [f"expected the state of an ElasticLoader, found one that does not fit: {e}"]


def _differences(
    mine: Mapping[str, Any], saved: Mapping[str, Any], schedule: Schedule, batches: int | None
) -> list[str]:
    step = saved["batches"]
    problems = []
    for name, way in (
        ("seed", f"seed={saved['seed']}"),
        ("shuffle", f"shuffle={saved['shuffle']}"),
    ):
        if mine[name] != saved[name]:
            problems.append(f"{name} was {saved[name]}, is {mine[name]}: {way} goes on as before")
    problems += _sizes(Schedule(saved["global_batch"]), schedule, step)
    if mine["weights"] != saved["weights"]:
        problems.append(
            f"the mixture had the weights {_ratio(saved['weights'])}, has "
            f"{_ratio(mine['weights'])}: the same sources with the same weights go on as before"
        )
    else:
        problems += _sources(mine["sources"], saved["sources"])
    if mine["pack"] != saved["pack"]:
        problems.append(
            f"rows were packed by {_pack(saved['pack'])}, are by {_pack(mine['pack'])}: "
            f"pack={_pack(saved['pack'])} goes on as before"
        )
    if not problems and batches is not None and step > batches:
        problems.append(
            f"{step:,} batches were consumed, and now there are {batches:,}: more epochs= go on"
        )
    if not problems and schedule.offset(step) < saved["rows"]:
        problems.append(f"{saved['rows']:,} rows do not belong to {step:,} batches")
    return problems


def _not_a_state(mine: Mapping[str, Any], saved: Any) -> list[str]:
    if not isinstance(saved, Mapping):
        return [f"expected the state of an ElasticLoader, found {type(saved).__name__}"]
    if ("document" in saved) != ("document" in mine) and "pack" in saved:
        return [
            (
                f"rows were packed by {_pack(saved['pack'])}, are by {_pack(mine['pack'])}: "
                f"pack={_pack(saved['pack'])} goes on as before"
            )
        ]
    lacks = sorted(set(mine) - set(saved))
    return [f"expected the state of an ElasticLoader, found one without {', '.join(lacks)}"]


def _sizes(then: Schedule, now: Schedule, step: int) -> list[str]:
    if then.before(step) == now.before(step):
        return []
    was, are = (_sizes_text(s.before(step)) for s in (then, now))
    kept = [tuple(pair) for pair in then.before(step)]
    keeps = [*kept, (step, now.size(step))]
    return [
        (
            f"the {step:,} batches so far had {was}, here they have {are}: "
            f"global_batch={keeps!r} goes on with {now.size(step)} from here"
        )
    ]


def _sizes_text(pairs: Sequence[Sequence[int]]) -> str:
    if len(pairs) == 1:
        return f"{pairs[0][1]} rows each"
    return ", ".join(f"{rows} rows from {step}" for step, rows in pairs)


def _sources(mine: Sequence[Mapping[str, Any]], saved: Any) -> list[str]:
    problems = []
    for number, (now, then) in enumerate(zip(mine, saved, strict=True)):
        where = "the source" if len(mine) == 1 else f"source {number}"
        if now["rows"] != then["rows"]:
            problems.append(
                f"{where} had {then['rows']:,} rows, has {now['rows']:,}: the order depends on how "
                f"many there are; give the same rows, or {_FRESH}"
            )
        elif None not in (now["digest"], then["digest"]) and now["digest"] != then["digest"]:
            problems.append(
                f"{where} has other rows (the first, the last or two between them differ): give "
                f"the same rows in the same order, or {_FRESH}; what is random about a row "
                "belongs into transform="
            )
    return problems


def _ratio(weights: Sequence[int]) -> str:
    return ":".join(map(str, weights))


def _pack(pack: Mapping[str, Any] | None) -> str:
    return "None" if pack is None else f"Pack({pack['seq_len']}, {pack['mode']!r})"
