"""ElasticLoader: the same rows in the same order on any mesh, from any position, however read."""

import gc
import os
import socket
import subprocess
import sys
import threading
import time
import weakref

import jax
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from support import REPOSITORY, P, mesh, on, run_python

import jaxshard
from jaxshard.data import ElasticLoader, Mixture, Pack
from jaxshard.data._compare import batch_bits, compare
from jaxshard.data._share import Share

ROWS = 103
IMAGES = np.random.default_rng(0).normal(size=(ROWS, 6)).astype(np.float32)
SOURCE = {"image": IMAGES, "label": np.arange(ROWS, dtype=np.int32)}
MESHES = [(8, 1), (4, 2), (2, 4), (2, 1), (1, 1)]


def make(shape=None, *spec, source=SOURCE, **kwargs):
    """A loader on a mesh of that shape; NumPy without one."""
    sharding = None if shape is None else on(mesh(shape), *(spec or ("a",)))
    return ElasticLoader(source, **{"global_batch": 8, "sharding": sharding, **kwargs})


def labels(loader, batches):
    return [np.asarray(next(loader)["label"]).tolist() for _ in range(batches)]


# Any mesh -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", MESHES)
def test_every_mesh_gets_the_same_batches(shape):
    loader, other = make(shape, epochs=3), make(epochs=3)
    batches, want = list(loader), list(other)
    assert len(batches) == len(want) == 3 * ROWS // 8 == len(loader)
    for step, (batch, numpy_batch) in enumerate(zip(batches, want, strict=True)):
        assert batch_bits(batch) == batch_bits(numpy_batch)
        assert batch["label"].tolist() == loader.rows(step).tolist()
        assert batch["image"].sharding == on(mesh(shape), "a")
        assert np.array_equal(batch["image"], IMAGES[loader.rows(step)])


@pytest.mark.parametrize("spec", [("a",), (("a", "b"),), ("b",), (None,), (("b", "a"),), ()])
def test_any_axes_may_cut_the_batch(spec):
    sharding = NamedSharding(mesh((2, 4)), P(*spec))
    loader = make(sharding=sharding)
    assert labels(loader, 5) == labels(make(), 5)
    assert next(loader)["image"].sharding == sharding


def test_a_sequence_axis_is_cut_too_and_labels_go_without_it():
    loader = make((4, 2), "a", "b")
    batch = next(loader)
    assert batch["image"].sharding == on(mesh((4, 2)), "a", "b")
    assert {s.data.shape for s in batch["image"].addressable_shards} == {(2, 3)}
    assert batch["label"].sharding == on(mesh((4, 2)), "a")
    assert np.array_equal(batch["image"], IMAGES[loader.rows(0)])


def test_each_leaf_may_have_its_own_sharding():
    m = mesh((4, 2))
    shardings = {"image": on(m, "a", "b"), "label": on(m)}
    batch = next(make(sharding=shardings))
    assert batch["image"].sharding == shardings["image"]
    assert batch["label"].sharding == shardings["label"]
    assert batch["label"].tolist() == labels(make(), 1)[0]
    with pytest.raises(ValueError, match=r"sharding has \['image'\], a batch has 'label'"):
        next(make(sharding={"image": on(m)}))


def test_a_spec_is_taken_on_the_mesh_that_is_set():
    with pytest.raises(ValueError, match=r"needs a mesh\nhint: jax.set_mesh\(mesh\)"):
        make(sharding=P("a"))
    m = jax.make_mesh((4,), ("a",), devices=jax.devices()[:4])
    with jax.set_mesh(m):
        loader = make(sharding=P("a"))
        assert labels(loader, 3) == labels(make(), 3)
    assert next(loader)["label"].sharding == NamedSharding(m, P("a"))  # also after it
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_it_works_under_guards_and_explicit_axes(prefetch):
    m = jax.make_mesh((4,), ("a",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(m), jax.transfer_guard("disallow"):
        batch = next(make(sharding=NamedSharding(m, P("a")), prefetch=prefetch))
    assert batch["label"].tolist() == labels(make(), 1)[0]


# Any number of processes --------------------------------------------------------------------


class Counted:
    """A source that knows which rows were asked for."""

    def __init__(self):
        self.asked = set()

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        self.asked.add(row)
        return {"label": row}


@pytest.mark.parametrize("processes", [1, 2, 4, 8, 3])
@pytest.mark.parametrize("spec", [("a",), ("b",), (("a", "b"),), ()])
def test_the_rows_of_all_processes_are_the_batch(processes, spec):
    """Pretended processes, each with some of the eight devices."""
    sharding = NamedSharding(mesh((4, 2)), P(*spec))
    groups = np.array_split(np.array(jax.devices()), processes)
    ways = {"a": 4, "b": 2, ("a", "b"): 8}.get(spec[0] if spec else None, 1)
    seen = []
    for devices in groups:
        source = Counted()
        loader = ElasticLoader(source, global_batch=16, sharding=sharding, prefetch=0)
        loader._share = Share(sharding, devices.tolist())
        wanted, count, _ = loader._wanted(2)
        assert count == 16
        loader._reading.read(wanted)
        mine = loader._share.rows(16)
        assert source.asked == set(loader.rows(2)[mine].tolist())  # and no other row
        assert len(mine) <= 16 // ways * len(devices)
        seen.append(set(mine.tolist()))
    assert set().union(*seen) == set(range(16))
    if processes == 8 and spec == (("a", "b"),):
        assert sum(map(len, seen)) == 16  # each row once


WORKER = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxshard.data import ElasticLoader, Mixture, Pack
port, number, processes = map(int, sys.argv[1:])
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=number)
mesh = jax.make_mesh((jax.device_count(),), ("a",))
asked = []
class Source:
    def __len__(self): return 50
    def __getitem__(self, row):
        asked.append(row)
        return {"x": row * 10, "y": np.full(3, row)}
loader = ElasticLoader(Source(), global_batch=12, sharding=NamedSharding(mesh, P("a")), epochs=1,
                       drop_remainder=False, prefetch=0)
total = jax.jit(lambda b: (b["x"] * np.arange(12)).sum() + b["mask"].sum(),
                out_shardings=NamedSharding(mesh, P()))
sums = [int(total(batch)) for batch in loader]
print(sums, loader.state, len(set(asked)), len(asked))
"""


@pytest.mark.parametrize("processes", [2, 3])
def test_real_processes_read_their_rows_and_make_the_same_batches(tmp_path, processes):
    def run(number_of: int) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": ""}
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(port), str(n), str(number_of)],
                cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for n in range(number_of)
        ]  # fmt: skip
        outs = [worker.communicate(timeout=120) for worker in workers]
        assert all(w.returncode == 0 for w in workers), outs
        return [out.splitlines()[-1].rpartition("} ") for out, _ in outs]

    (alone,) = run(1)
    several = run(processes)
    assert {where for where, *_ in several} == {alone[0]}  # the same numbers everywhere
    counts = [tuple(map(int, reads.split())) for *_, reads in several]
    assert sum(distinct for distinct, _ in counts) <= 50 + processes  # a padding row more each


# Any position -------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5, 11, 12, 13, 25, 37, 38])
def test_seeking_is_as_running_there(k):
    ran, sought = make(epochs=3), make((4, 2), epochs=3)
    for _ in range(k):
        next(ran)
    sought.seek(k)
    assert sought.state == ran.state
    assert [x["label"].tolist() for x in sought] == [x["label"].tolist() for x in ran]
    sought.seek(0)
    assert labels(sought, 1) == labels(make(), 1)


def test_the_end_is_the_end():
    loader = make(epochs=1)
    assert len(loader) == 12
    loader.seek(12)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(loader)
    with pytest.raises(ValueError, match=r"expected a step between 0 and 12, found 13\nhint: epoc"):
        loader.seek(13)
    with pytest.raises(ValueError, match="found -1"):
        loader.seek(-1)
    for beyond in (12, -1):
        with pytest.raises(IndexError, match=f"between 0 and 12, not included, found {beyond}"):
            loader.rows(beyond)
    assert loader.step == 12  # an error changes nothing
    with pytest.raises(TypeError, match=r"no end that is known\nhint: epochs=1"):
        len(make())


def test_each_epoch_has_each_row_once_and_another_order():
    loader = ElasticLoader(range(100), global_batch=10)
    first, second, third = (
        np.concatenate([next(loader) for _ in range(10)]).tolist() for _ in range(3)
    )
    assert sorted(first) == sorted(second) == sorted(third) == list(range(100))
    assert len({tuple(first), tuple(second), tuple(third), tuple(range(100))}) == 4
    again = ElasticLoader(range(100), global_batch=10, seed=1)
    assert np.concatenate([next(again) for _ in range(10)]).tolist() != first
    plain = ElasticLoader(range(100), global_batch=10, shuffle=False)
    assert np.concatenate([next(plain) for _ in range(20)]).tolist() == [*range(100)] * 2


def test_batches_go_on_over_the_edge_of_an_epoch():
    loader = ElasticLoader(range(10), global_batch=4, shuffle=False, epochs=2)
    assert [b.tolist() for b in loader] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9],
    ]  # fmt: skip
    assert loader.state == {"batches": 5, "rows": 20, "epoch": 2}
    larger_than_all = ElasticLoader(range(3), global_batch=7, shuffle=False)
    assert next(larger_than_all).tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("shape", [None, (4, 2), (8, 1)])
def test_the_last_batch_is_padded_and_says_so(shape):
    loader = make(shape, epochs=1, drop_remainder=False)
    batches = list(loader)
    assert len(batches) == len(loader) == 13
    masks = [np.asarray(b["mask"]).tolist() for b in batches]
    assert masks == [[True] * 8] * 12 + [[True] * 7 + [False]]
    seen = np.concatenate([np.asarray(b["label"])[np.asarray(b["mask"])] for b in batches])
    assert sorted(seen.tolist()) == list(range(ROWS))
    assert len(loader.rows(12)) == 7
    assert loader.state == {"batches": 13, "rows": ROWS, "epoch": 1}
    restored = make(shape, epochs=1, drop_remainder=False)
    restored.set_state(loader.get_state())
    assert list(restored) == []


def test_rows_that_are_no_dicts_come_with_their_mask():
    loader = ElasticLoader(list(range(5)), global_batch=4, epochs=1, drop_remainder=False)
    (_, full), (rows, mask) = loader
    assert full.all()
    assert mask.tolist() == [True, False, False, False]
    assert rows.shape == (4,)
    source = [{"mask": 1}]
    with pytest.raises(ValueError, match="adds the leaf 'mask', and the rows have one"):
        next(ElasticLoader(source, global_batch=1, drop_remainder=False))


def test_sizes_may_follow_a_schedule():
    sizes = [(0, 2), (3, 5), (5, 1)]
    loader = ElasticLoader(range(20), global_batch=sizes, shuffle=False, epochs=1)
    assert [len(b) for b in loader] == [2, 2, 2, 5, 5, 1, 1, 1, 1]
    loader.seek(4)
    assert next(loader).tolist() == [11, 12, 13, 14, 15]
    ragged = ElasticLoader(range(18), global_batch=7, epochs=1, drop_remainder=False)
    assert [int(m.sum()) for _, m in ragged] == [7, 7, 4]


def test_a_far_step_is_found_at_once_in_a_billion_rows():
    loader = ElasticLoader(range(10**9), global_batch=4096, prefetch=0)
    began = time.perf_counter()
    loader.seek(10**6)
    assert time.perf_counter() - began < 0.01
    assert len(np.unique(loader.rows(10**6))) == 4096
    assert loader.state["epoch"] == 4


def test_the_first_batches_never_change():
    """A run that comes back with a newer jaxshard must see the rows that it would have seen."""
    assert ElasticLoader(range(1000), global_batch=6).rows(0).tolist() == [
        915,
        838,
        54,
        736,
        168,
        995,
    ]
    mixture = Mixture([(range(50), 3), (range(9), 1)])
    rows = ElasticLoader(mixture, global_batch=5, seed=7).rows(3).tolist()
    assert rows == [[1, 8], [0, 35], [0, 47], [0, 5], [1, 1]]


# Saved and restored -------------------------------------------------------------------------


def test_it_is_a_leaf_and_is_restored_in_place(tmp_path):
    loader = make((8, 1))
    labels(loader, 5)
    jaxshard.save(tmp_path / "c", {"w": np.ones(3), "data": loader})
    want = labels(loader, 7)
    other = make((2, 4))
    loaded = jaxshard.load(tmp_path / "c", {"w": np.zeros(3), "data": other})
    assert loaded["data"] is other
    assert other.step == 5
    assert labels(other, 7) == want
    plain = jaxshard.load(tmp_path / "c")["data"]
    assert (plain["batches"], plain["rows"], plain["epoch"]) == (5, 40, 0)
    checkpoint = jaxshard.open(tmp_path / "c")
    assert checkpoint.leaves["data"].kind == "iterator"
    assert checkpoint["data"].read() == plain
    assert jaxshard.verify(tmp_path / "c").ok


def test_what_was_prefetched_does_not_count(tmp_path):
    for prefetch in (0, 1, 7):
        loader = make(prefetch=prefetch)
        labels(loader, 3)
        time.sleep(0.05)
        assert loader.state == {"batches": 3, "rows": 24, "epoch": 0}
        jaxshard.save(tmp_path / f"{prefetch}", {"data": loader})
    assert jaxshard.diff(tmp_path / "0", tmp_path / "7").identical


def test_a_resume_of_a_resume_of_a_resume(tmp_path):
    want = labels(make(), 40)
    seen = []
    for start, shape in enumerate([(8, 1), (2, 4), None, (4, 2)]):
        with jaxshard.ResumeManager(tmp_path / "run", when=jaxshard.Every(steps=3)) as run:
            state, step = run.resume({"data": make(shape)})
            assert step == state["data"].step
            del seen[step:]
            for step in run.steps(40):
                seen.append(np.asarray(next(state["data"])["label"]).tolist())
                run.maybe_save(step, state)
                if step == 10 * (start + 1) and step < 40:
                    break
    assert seen == want


def test_a_fallback_takes_the_position_of_the_step_it_falls_back_to(tmp_path):
    loader = make()
    with jaxshard.ResumeManager(tmp_path / "run", keep=jaxshard.Keep(last=5)) as run:
        state, _ = run.resume({"w": np.zeros(300_000), "data": loader})
        for step in run.steps(3):
            next(loader)
            run.save(step, state, wait=True)
    (piece,) = (tmp_path / "run").glob("step_00000003/a-*/data/w/c/0")
    piece.unlink()
    other = make()
    with jaxshard.ResumeManager(tmp_path / "run") as run:
        _, step = run.resume({"w": np.zeros(300_000), "data": other})
    assert (step, other.step) == (2, 2)


CHANGES = {
    "seed": ({"seed": 3}, "seed was 0, is 3: seed=0 goes on as before"),
    "shuffle": ({"shuffle": False}, "shuffle was True, is False: shuffle=True goes on"),
    "batch": ({"global_batch": 16}, "global_batch=[(0, 8), (5, 16)] goes on with 16 from here"),
    "fewer": ({"source": {k: v[:90] for k, v in SOURCE.items()}}, "had 103 rows, has 90"),
    "others": ({"source": {**SOURCE, "image": IMAGES + 1}}, "the source has other rows"),
    "mixture": ({"source": Mixture([(SOURCE, 3), (SOURCE, 1)])}, "had the weights 1, has 3:1"),
    "end": ({"epochs": 1, "global_batch": [(0, 8), (5, 64)]}, None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_said_with_what_can_be_done(tmp_path, change):
    loader = make()
    labels(loader, 5)
    jaxshard.save(tmp_path / "c", {"data": loader})
    arguments, message = CHANGES[change]
    other = make(**arguments)
    if message is None:
        jaxshard.load(tmp_path / "c", {"data": other})
        return
    with pytest.raises(jaxshard.LeafMismatchError) as error:
        jaxshard.load(tmp_path / "c", {"data": other})
    assert f"'data': {message}" in str(error.value) or message in str(error.value)
    assert "hint: make the iterator as it was when it was saved" in str(error.value)
    assert other.step == 0
    with pytest.raises(ValueError, match="it cannot go on from this state"):
        other.set_state(loader.get_state())


def test_packing_that_has_changed_is_said(tmp_path):
    documents = [list(range(n)) for n in range(1, 20)]

    def packed(pack):
        return ElasticLoader(documents, global_batch=1, pack=pack, prefetch=0)

    packs = [Pack(8), Pack(4), Pack(8, "stream"), None]
    for then in packs[:3]:
        state = packed(then).get_state()
        for now in packs[:3]:
            problems = packed(now).check_state(state)
            assert bool(problems) is (then is not now), (then, now, problems)
    (problem,) = packed(Pack(4)).check_state(packed(Pack(8)).get_state())
    assert problem.startswith("rows were packed by Pack(8, 'concat'), are by Pack(4, 'concat'): ")
    assert problem.endswith("pack=Pack(8, 'concat') goes on as before")
    for then in (Pack(8), Pack(8, "stream")):
        problems = packed(None).check_state(packed(then).get_state())
        assert problems[0].startswith(f"rows were packed by Pack(8, {then.mode!r}), are by None")


@pytest.mark.parametrize("state", [None, 3, {}, {"batches": "x"}, [1]])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="expected the state of an ElasticLoader, found"):
        make().set_state(state)


@pytest.mark.parametrize(
    ("field", "value"),
    [("global_batch", "x"), ("global_batch", [[1, 1]]), ("sources", 3), ("sources", [{}]),
     ("weights", None), ("pack", 3), ("rows", 10**9), ("batches", -1)],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused(field, value):
    with pytest.raises(ValueError, match=r"it cannot go on|expected a step"):
        make().set_state({**make().get_state(), field: value})


def test_what_lies_ahead_may_change():
    loader = make(epochs=2)
    labels(loader, 5)
    for changed in (  # nothing that is behind
        make(epochs=7), make(epochs=None), make((4, 2)), make(prefetch=0), make(workers=2),
        make(global_batch=[(0, 8), (5, 24)]), make(transform=lambda row, _: row, epochs=2),
        make(drop_remainder=False, epochs=2),
    ):  # fmt: skip
        changed.set_state(loader.get_state())
        assert changed.step == 5
    labels(loader, 9)
    with pytest.raises(ValueError, match=r"14 batches were consumed, and now there are 12: more"):
        make(epochs=1).set_state(loader.get_state())


def test_the_same_rows_in_another_container_are_the_same_source():
    state = make(source=IMAGES).get_state()
    assert make(source=list(IMAGES)).check_state(state) == []
    assert make(source=IMAGES.tolist()).check_state(state) != []  # other dtypes


def test_a_source_whose_rows_are_random_is_told_by_its_length_alone():
    class Noisy(Counted):
        def __getitem__(self, row):
            return np.random.default_rng().random()

    state = make(source=Noisy()).get_state()
    assert state["sources"] == [{"rows": ROWS, "digest": None}]
    assert make(source=Noisy()).check_state(state) == []


# Sources ------------------------------------------------------------------------------------


def sources(tmp_path):
    memory = np.lib.format.open_memmap(tmp_path / "m.npy", "w+", IMAGES.dtype, IMAGES.shape)
    memory[:] = IMAGES
    stored = zarr.create_array(tmp_path / "z", shape=IMAGES.shape, dtype="f4", chunks=(10, 6))
    stored[:] = IMAGES

    class Many:
        def __len__(self):
            return ROWS

        def __getitem__(self, row):
            raise AssertionError("one by one")

        def __getitems__(self, rows):
            return [IMAGES[row] for row in rows]

    yield from {
        "numpy": IMAGES,
        "memmap": np.load(tmp_path / "m.npy", mmap_mode="r"),
        "zarr": stored,
        "list": list(IMAGES),
        "tuple": tuple(IMAGES),
        "getitems": Many(),
        "jax": jax.numpy.asarray(IMAGES),
    }.items()


def test_every_kind_of_source_gives_the_same_rows(tmp_path):
    want = [b.tobytes() for b in make(source=IMAGES, epochs=2)]
    for name, source in sources(tmp_path):
        found = [b.tobytes() for b in make(source=source, epochs=2)]
        assert found == want, name


def test_rows_keep_their_structure():
    source = [{"a": (n, [float(n), 1.0]), "b": {"c": np.full(2, n)}} for n in range(9)]
    batch = next(ElasticLoader(source, global_batch=3, shuffle=False))
    assert batch["a"][0].tolist() == [0, 1, 2]
    assert batch["a"][1].tolist() == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
    assert batch["b"]["c"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_sources_of_a_mixture_may_be_of_several_kinds():
    mixture = Mixture([(IMAGES, 1), (list(IMAGES + 100), 1)])
    loader = ElasticLoader(mixture, global_batch=4, shuffle=False)
    batch = next(loader)
    assert np.array_equal(batch, [IMAGES[0], IMAGES[0] + 100, IMAGES[1], IMAGES[1] + 100])
    assert loader.rows(0).tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert loader.state == {"batches": 1, "rows": 4, "epoch": [0, 0]}


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (iter([1]), TypeError, r"found list_iterator\nhint: .*jaxshard.data.Stateful\(stream\)"),
        ((i for i in range(3)), TypeError, "found generator"),
        ("text", TypeError, "found str"),
        (7, TypeError, r"found int\nhint: list\(rows\)"),
        ([], ValueError, "list has no rows"),
        (np.zeros((0, 3)), ValueError, "the source has no rows"),
        ({"a": np.zeros(3), "b": np.zeros(4)}, ValueError, "arrays with as many rows each"),
        ({"a": np.zeros(3), "b": np.array(4)}, ValueError, "arrays with as many rows each"),
        ({}, ValueError, "arrays with as many rows each"),
        ({"a": [1, 2]}, TypeError, r"found list at 'a'\nhint: np.asarray"),
    ],
)
def test_what_has_no_random_access_is_refused(source, error, message):
    with pytest.raises(error, match=message):
        ElasticLoader(source, global_batch=1)


def test_a_source_that_filters_is_refused_when_it_does():
    source = [None if n % 3 == 0 else n for n in range(9)]
    loader = ElasticLoader(source, global_batch=3, shuffle=False)
    with pytest.raises(ValueError, match=r"row 0 of list is None: .*\nhint: filter first") as error:
        next(loader)
    assert error.value.__notes__ == ["in batch 0 of jaxshard.data.ElasticLoader"]
    filtering = ElasticLoader(
        range(9), global_batch=3, shuffle=False, transform=lambda n, _: n if n < 5 else None
    )
    next(filtering)
    with pytest.raises(
        ValueError, match=r"transform= gave None for row 5 of source 0, at position"
    ):
        next(filtering)
    assert filtering.step == 1


def test_rows_of_different_shapes_are_an_error_that_says_so():
    loader = ElasticLoader([[1], [1, 2]], global_batch=2)
    with pytest.raises(ValueError, match=r"rows have different shapes: \(1,\) and \(2,\)\nhint: "):
        next(loader)
    other_keys = ElasticLoader([{"a": 1}, {"b": 1}], global_batch=2)
    with pytest.raises(ValueError, match=r"expected keys \['.'\], found \['.'\]"):
        next(other_keys)


def test_numbers_that_jax_would_cut_are_an_error_and_others_are_converted():
    sharding = on(mesh((1,)), "a")
    good = next(ElasticLoader(np.arange(4), global_batch=4, sharding=sharding))
    assert good.dtype == np.int32
    big = ElasticLoader(np.arange(4) + 2**40, global_batch=4, sharding=sharding)
    with pytest.raises(
        OverflowError, match="int64 values do not fit into int32, and jax_enable_x64"
    ):
        next(big)
    words = ElasticLoader([{"t": "ab"}], global_batch=1, sharding=sharding)
    with pytest.raises(TypeError, match=r"'t': expected numbers, found <U2, which no jax\.Array"):
        next(words)
    assert next(ElasticLoader([{"t": "ab"}], global_batch=1))["t"].tolist() == ["ab"]


# Reading ------------------------------------------------------------------------------------


def noisy(row, key):
    """A transform that uses its key."""
    return row * 2, np.random.default_rng(key).random()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_workers_change_nothing(kind):
    want = ElasticLoader(list(range(50)), global_batch=7, transform=noisy, prefetch=0)
    with ElasticLoader(
        list(range(50)), global_batch=7, transform=noisy, workers=3, worker_kind=kind
    ) as loader:
        for _ in range(10):
            assert batch_bits(next(loader)) == batch_bits(next(want))


def test_keys_are_of_the_seed_and_the_position():
    def keys(**kwargs):
        loader = ElasticLoader(range(10), global_batch=5, transform=lambda _, key: key, **kwargs)
        return np.concatenate([next(loader) for _ in range(4)])

    found = keys()
    assert len(np.unique(found, axis=0)) == 20  # other ones in the second epoch
    want = jax.random.key_data(jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 13))
    assert np.array_equal(found[13], want)
    assert np.array_equal(found, keys(workers=2))
    assert not np.array_equal(found, keys(seed=1))


def test_batch_fn_gets_the_rows_of_this_process():
    loader = ElasticLoader(
        [[1] * n for n in range(1, 9)], global_batch=4, shuffle=False, sharding=on(mesh((4,)), "a"),
        batch_fn=lambda rows: {"x": np.array([r + [0] * (9 - len(r)) for r in rows])},
    )  # fmt: skip
    assert next(loader)["x"].sum(axis=1).tolist() == [1, 2, 3, 4]
    wrong = ElasticLoader(range(8), global_batch=4, batch_fn=lambda rows: np.array(rows[:2]))
    with pytest.raises(
        ValueError, match=r"batch_fn= gave an array with the shape \(2,\): expected"
    ):
        next(wrong)
    processes = ElasticLoader(
        list(range(8)), global_batch=4, shuffle=False, workers=2, worker_kind="process",
        batch_fn=lambda rows: np.array(rows) * 10,  # is called here, so it need not pickle
    )  # fmt: skip
    assert next(processes).tolist() == [0, 10, 20, 30]
    processes.close()


def test_what_cannot_be_sent_to_processes_is_said():
    with pytest.raises(
        TypeError, match=r'transform= cannot be sent.*\nhint: .*worker_kind="thread"'
    ):
        ElasticLoader(
            [1], global_batch=1, transform=lambda r, _: r, workers=1, worker_kind="process"
        )
    with pytest.raises(TypeError, match="the source cannot be sent to worker processes"):
        ElasticLoader(Local(), global_batch=1, workers=1, worker_kind="process")


class Local(Counted):
    def __reduce__(self):
        raise TypeError("a file that is open")


def fail_once(row, key):
    if row == 13:
        raise KeyError("a bad row")
    return row


@pytest.mark.parametrize(
    "workers", [{"workers": 0}, {"workers": 2}, {"workers": 2, "worker_kind": "process"}]
)
def test_an_error_names_row_and_batch_and_loses_nothing(workers):
    loader = ElasticLoader(
        list(range(20)), global_batch=5, shuffle=False, transform=fail_once, **workers
    )
    assert next(loader).tolist() == [0, 1, 2, 3, 4]
    assert next(loader).tolist() == [5, 6, 7, 8, 9]
    for _ in range(2):
        with pytest.raises(KeyError, match="a bad row") as error:
            next(loader)
        notes = "\n".join(error.value.__notes__)
        assert "in transform= of row 13 of source 0, at position 13" in notes
        assert "in batch 2 of jaxshard.data.ElasticLoader" in notes
        assert loader.step == 2
    loader.seek(3)
    assert next(loader).tolist() == [15, 16, 17, 18, 19]
    loader.close()


def end_the_process(row, key):
    os._exit(9)


def test_a_worker_process_that_dies_is_an_error_with_a_hint():
    loader = ElasticLoader(
        [1, 2], global_batch=2, transform=end_the_process, workers=1, worker_kind="process"
    )
    with pytest.raises(RuntimeError, match=r"a worker process ended.*\nhint: .*__main__"):
        next(loader)
    loader.close()


def test_worker_processes_load_no_jax_of_their_own(tmp_path):
    code = """
import sys
def has_jax(row, key):
    return "jax" in sys.modules
if __name__ == "__main__":
    from jaxshard.data import ElasticLoader
    loader = ElasticLoader([1, 2], global_batch=2, transform=has_jax, workers=1,
                           worker_kind="process")
    print(next(loader).tolist())
"""
    (tmp_path / "script.py").write_text(code)
    path = str(tmp_path / "script.py")
    found = run_python(f"import runpy; runpy.run_path({path!r}, run_name='__main__')")
    assert found.strip() == "[False, False]"


def test_batches_are_made_ahead_and_not_more_than_asked_for():
    asked = []

    class Slow(Counted):
        def __getitem__(self, row):
            asked.append(row)
            return row

    loader = ElasticLoader(Slow(), global_batch=1, shuffle=False, prefetch=3)
    next(loader)
    deadline = time.monotonic() + 10
    while len(asked) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert asked == [0, 1, 2, 3]
    loader.seek(50)
    assert next(loader).tolist() == [50]
    lazy = ElasticLoader(Slow(), global_batch=1, shuffle=False, prefetch=0)
    asked.clear()
    next(lazy)
    assert asked == [0]


def test_a_loader_that_is_let_go_leaves_no_thread():
    def data_threads():
        return [t for t in threading.enumerate() if t.name.startswith("jaxshard-")]

    before = len(data_threads())
    loader = make(workers=2)
    labels(loader, 2)
    gone = weakref.ref(loader)
    assert len(data_threads()) > before
    del loader
    deadline = time.monotonic() + 10
    while (gone() is not None or len(data_threads()) > before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None
    assert len(data_threads()) <= before
    closed = make()
    closed.close()
    assert labels(closed, 2) == labels(make(), 2)  # goes on, without threads


def test_a_script_ends_although_a_batch_is_being_read():
    code = """
import time, threading
from jaxshard.data import ElasticLoader
class Hangs:
    def __len__(self): return 9
    def __getitem__(self, row):
        if row:
            time.sleep(600)
        return row
loader = ElasticLoader(Hangs(), global_batch=1, shuffle=False)
print(next(loader))
"""
    assert run_python(code, timeout_s=60).strip() == "[0]"


# Arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"global_batch": 0}, ValueError, "expected sizes of 1 or more"),
        ({"global_batch": 6, "sharding": (8, 1)}, ValueError,
         r"multiple of 8, into which .* cuts it, found 6\nhint: global_batch=8"),
        ({"global_batch": [(0, 8), (9, 12)], "sharding": (8, 1)}, ValueError, "found 12"),
        ({"global_batch": 8, "sharding": "data"}, TypeError, r"expected a sharding, found str"),
        ({"global_batch": 8, "epochs": 0}, ValueError, "found epochs=0"),
        ({"global_batch": 8, "epochs": 1.5}, TypeError, "expected epochs to be an integer"),
        ({"global_batch": 8, "seed": "x"}, TypeError, "expected seed to be an integer"),
        ({"global_batch": 8, "prefetch": -1}, ValueError, "found prefetch=-1"),
        ({"global_batch": 8, "workers": True}, TypeError, "expected workers to be an integer"),
        ({"global_batch": 8, "worker_kind": "gpu"}, ValueError, '"thread" or "process"'),
        ({"global_batch": 8, "pack": 2048}, TypeError, r"expected pack to be a Pack, found 2048"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_said_at_once(arguments, error, message):
    if isinstance(arguments.get("sharding"), tuple):
        arguments = {**arguments, "sharding": on(mesh(arguments["sharding"]), "a")}
    with pytest.raises(error, match=message):
        ElasticLoader(range(100), **arguments)


def test_a_stream_of_packed_rows_says_what_it_does_not_know():
    loader = ElasticLoader(
        [[1] * 5] * 9, global_batch=2, epochs=1, pack=Pack(4, "stream"), prefetch=0
    )
    with pytest.raises(
        ValueError, match=r'Pack\(mode="stream"\) are not known before .*\nhint: mode'
    ):
        loader.rows(0)
    with pytest.raises(TypeError, match="no end that is known"):
        len(loader)
    assert loader.batches is None
    with pytest.raises(
        ValueError, match=r"expected a step between 0 and 6, found 99\nhint: the doc"
    ):
        loader.seek(99)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(0, 30),
    st.booleans(),
)
def test_any_mixture_seeks_to_where_running_leads(parts, batch, k, shuffle):
    def loader():
        mixture = Mixture([(np.arange(n) + 1000 * i, w) for i, (n, w) in enumerate(parts)])
        return ElasticLoader(mixture, global_batch=batch, shuffle=shuffle, seed=k, prefetch=0)

    ran, sought, restored = loader(), loader(), loader()
    for _ in range(k):
        next(ran)
    sought.seek(k)
    restored.set_state(ran.get_state())
    assert sought.state == ran.state == restored.state
    want = next(ran).tolist()
    assert next(sought).tolist() == next(restored).tolist() == want
    assert [1000 * s + r for s, r in loader().rows(k)] == want if len(parts) > 1 else True


# Comparing ----------------------------------------------------------------------------------


def test_two_loaders_are_compared_row_by_row_and_bit_by_bit():
    assert compare(make((8, 1)), make((2, 4)), step=3, count=9).difference is None
    assert compare(make(epochs=1), make(epochs=1), step=0, count=99).batches == 12
    batches, difference = compare(make(), make(seed=1), step=2, count=9)
    assert (batches, difference.step) == (0, 2)
    assert difference.rows[0][0] != difference.rows[1][0]
    other = make(source={**SOURCE, "image": np.where(np.arange(ROWS)[:, None] == 7, 0, IMAGES)})
    found = compare(make(), other, step=0, count=99)
    assert 7 in make().rows(found.difference.step)
    assert found.difference.what == "the same rows, and other elements in them"
    assert compare(make(), other, step=0, count=99, read=False).difference is None
    longer = compare(make(epochs=1), make(epochs=2), step=10, count=9)
    assert (longer.batches, longer.difference.what) == (2, "the first loader ends here")


def test_it_says_where_it_is():
    assert repr(make(epochs=1)) == "<ElasticLoader at batch 0 of 12, 8 of 103 rows each>"
    mixture = ElasticLoader(Mixture([(range(1000), 1), (range(9), 1)]), global_batch=4)
    assert repr(mixture) == "<ElasticLoader at batch 0, 4 of 1,000 + 9 rows each>"
