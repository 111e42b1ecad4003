"""Staged values are those at the time of the call, in the order of the plan, within the budget."""

import itertools
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import bits, mesh, on

from jaxshard import _plan, _saving, _snapshot
from jaxshard._options import SaveOptions
from jaxshard._snapshot import Budget, copied_bytes, free_host_bytes, stage
from jaxshard._store import open_store

numbers = itertools.count()


def job_of(tree, **options):
    store = open_store(f"memory://snapshot/{next(numbers)}")
    return _saving.prepare(
        store, tree, metadata=None, overwrite=False, options=SaveOptions(**options)
    )


def staged(job, **how):
    return list(stage(job.plan, job.tree.leaves, job.values, **how))


def tree():
    m = mesh((2, 4))
    values = jnp.arange(64 * 64.0).reshape(64, 64)
    return {
        "sharded": jax.device_put(values, on(m, "a", "b")),
        "half": jax.device_put(values, on(m, "b")),
        "copied": jax.device_put(values, on(m)),
        "numpy": np.arange(100.0).reshape(10, 10).T,
        "small": jnp.arange(7, dtype=jnp.int32),
        "int4": jnp.arange(-8, 7).astype(jnp.int4),
        "key": jax.random.key(1),
        "text": "x" * 5000,
        "scalar": 3,
        "empty": jnp.zeros((0, 4)),
    }


def assemble(job, items):
    """Put staged parts together again."""
    out = {}
    for item in items:
        leaf = job.tree.leaves[item.of.leaf]
        for stored, values in zip(boxes(job, item.of), item.values, strict=True):
            box = _plan.element_box(stored, leaf.layout, leaf.array_shape)
            whole = out.setdefault(leaf.name, np.zeros(leaf.array_shape, values.dtype))
            assert values.shape == box.shape
            whole[box.slices] = values
    return out


def boxes(job, task):
    """Boxes of stored elements of a piece, or of the entries of a stretch."""
    if isinstance(task, _plan.Piece):
        return [task.box]
    tiles = _plan.tile_lattice(job.tree.leaves[task.leaf].layout)
    return [tiles.box(int(t)) for t in job.plan.entries["tile"][task.first : task.stop]]


@pytest.mark.parametrize("how", ["sync", "async", "copy"])
@pytest.mark.parametrize("options", [{}, {"pack_below": 0, "piece_bytes_max": 1000}])
def test_staged_parts_are_the_values_in_the_order_of_the_plan(how, options):
    job = job_of(tree(), **options)
    budget = None if how == "sync" else Budget(1 << 20)
    items = staged(job, budget=budget, copy_all=how == "copy")
    stretches = itertools.chain.from_iterable(job.plan.stretches())
    assert [item.of for item in items] == [*job.plan.each_piece(job.tree.leaves), *stretches]
    found = assemble(job, items)
    wanted = {
        leaf.name: value
        for leaf, value in zip(job.tree.leaves, job.values, strict=True)
        if leaf.has_array and 0 not in leaf.array_shape
    }
    wanted["text"] = np.frombuffer(b"x" * 5000, np.uint8)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert bits(found[name]) == bits(value), name


def test_arrays_on_cpu_are_staged_as_views():
    array = jnp.arange(1000.0)
    (item,) = staged(job_of({"a": array}), budget=Budget(1))
    assert np.shares_memory(item.values[0], np.asarray(array))


def test_a_copy_is_asked_for_and_made():
    array = jnp.arange(1000.0)
    (item,) = staged(job_of({"a": array}), budget=Budget(8000), copy_all=True)
    assert not np.shares_memory(item.values[0], np.asarray(array))


def test_numpy_arrays_may_be_changed_after_an_asynchronous_snapshot():
    array = np.arange(10.0)
    (item,) = staged(job_of({"a": array}), budget=Budget(1 << 20))
    array[:] = -1
    assert item.values[0].tolist() == list(range(10))


def test_a_synchronous_save_copies_no_numpy_array():
    array = np.arange(10.0)
    (item,) = staged(job_of({"a": array}))
    assert np.shares_memory(item.values[0], array)


def test_bytes_to_copy_are_those_that_no_view_protects():
    job = job_of(
        {"jax": jnp.zeros(100), "numpy": np.zeros(100), "int4": jnp.zeros(64, jnp.int4), "n": 1}
    )
    leaves, values = job.tree.leaves, job.values
    assert copied_bytes(leaves, values, copy_all=False) == 800 + 64
    assert copied_bytes(leaves, values, copy_all=True) == 400 + 800 + 64


def test_the_whole_array_is_never_gathered_for_a_part():
    m = mesh((8,))
    array = jax.device_put(jnp.arange(8 * 16.0), on(m, "a"))
    items = staged(job_of({"a": array}, pack_below=0))
    shards = [np.asarray(s.data) for s in array.addressable_shards]
    assert [any(np.shares_memory(i.values[0], s) for s in shards) for i in items] == [True] * 8


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.bfloat16, np.complex64, np.bool_])
def test_values_keep_the_dtype_of_the_leaf(dtype):
    (item,) = staged(job_of({"a": jnp.zeros(8, dtype)}))
    assert item.values[0].dtype == np.dtype(dtype)


# Budget -------------------------------------------------------------------------------------


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_the_snapshot_waits_until_what_was_staged_is_released():
    job = job_of({f"a{i}": np.zeros(100) for i in range(5)}, pack_below=0)
    out = []
    thread = in_thread(lambda: out.extend(_collect(job, Budget(1600), out)))
    _until(lambda: len(out) == 2)
    time.sleep(0.05)
    assert len(out) == 2
    for number in range(5):
        _until(lambda n=number: len(out) > n)
        out[number].release()
    thread.join(10)
    assert not thread.is_alive()
    assert len(out) == 5


def _collect(job, budget, out):
    for item in stage(job.plan, job.tree.leaves, job.values, budget=budget):
        out.append(item)
    return ()


def _until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_part_larger_than_the_budget_passes_alone():
    job = job_of({"a": np.zeros(1000)})
    (item,) = staged(job, budget=Budget(1))
    assert item.values[0].nbytes == 8000


def test_a_closed_budget_ends_the_snapshot():
    job = job_of({f"a{i}": np.zeros(100) for i in range(5)}, pack_below=0)
    budget, out = Budget(800), []
    thread = in_thread(lambda: _collect(job, budget, out))
    _until(lambda: len(out) == 1)
    budget.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(out) == 1


def test_acquire_and_release_add_up():
    budget = Budget(10)
    for _ in range(100):
        assert budget.acquire(7)
        budget.release(7)
        assert budget.acquire(1000)
        budget.release(1000)
    assert budget.acquire(10)


def test_many_threads_share_a_budget_without_losing_bytes():
    budget, held, most = Budget(5), [0], [0]
    lock = threading.Lock()

    def work():
        for _ in range(50):
            budget.acquire(2)
            with lock:
                held[0] += 2
                most[0] = max(most[0], held[0])
            with lock:
                held[0] -= 2
            budget.release(2)

    threads = [in_thread(work) for _ in range(6)]
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] <= 5
    assert budget.acquire(5)


# Host memory --------------------------------------------------------------------------------


def test_free_memory_is_a_sensible_number():
    assert 1 << 20 < free_host_bytes() < 1 << 48


def test_free_memory_is_that_of_the_control_group_if_that_is_less(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    monkeypatch.setattr(_snapshot, "_CGROUP", str(tmp_path))
    assert free_host_bytes() == 3_000_000


@pytest.mark.parametrize(("limit", "used"), [("max", "5"), ("1000", "5000")])
def test_a_control_group_without_a_limit_or_beyond_it(tmp_path, monkeypatch, limit, used):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    monkeypatch.setattr(_snapshot, "_CGROUP", str(tmp_path))
    assert (free_host_bytes() == 0) == (limit != "max")


@pytest.mark.parametrize("budget", [4 << 10, 1 << 20, 64 << 20])
def test_the_files_of_a_pack_in_memory_are_within_the_half_that_is_in_flight(budget):
    job = job_of(
        {f"a{i:03d}": np.zeros(256, np.float32) for i in range(500)}, host_bytes_max=budget
    )
    assert _saving.PACK_BUFFERS * job.plan.segment_bytes <= max(budget // 2, 4 * 1024)
