"""Iterators of other libraries, for real: stopped anywhere, restored in a process of its own."""

import ast
import importlib.util
import logging
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pipelines
import pytest
from support import REPOSITORY

import jaxshard
from jaxshard import _iterators
from jaxshard.data import Stateful

NEEDS = {"grain": "grain", "torchdata": "torchdata", "hugging": "datasets"}


def needed(name: str) -> None:
    """Skip where the library of a pipeline is not installed, or fail if it must be there."""
    for word, package in NEEDS.items():
        if word in name and importlib.util.find_spec(package) is None:
            reason = f"{package} is not installed"
            if os.environ.get("JAXSHARD_REQUIRE_TOOLS") == "1":
                pytest.fail(reason)
            pytest.skip(reason)


@pytest.mark.parametrize("name", pipelines.MAKERS)
def test_stopped_after_any_batch_it_goes_on_in_a_new_process(tmp_path, name):
    needed(name)
    make = pipelines.MAKERS[name]
    whole = pipelines.texts(make())
    assert len(whole) >= 5
    points = range(len(whole) + 1)
    if "workers" in name:
        points = [4]  # each starts processes
    for k in points:
        iterator = make()
        stream = iter(iterator)
        head = pipelines.texts(_Head(stream), k)
        assert head == whole[:k]
        jaxshard.save(tmp_path / str(k), {"data": iterator})
        del stream
    paths = [str(tmp_path / str(k)) for k in points]
    done = subprocess.run(
        [sys.executable, "tests/pipelines.py", name, *paths],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tails = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert tails == [whole[k:] for k in points]


class _Head:
    """Passes items on without ending the stream that they come from."""

    def __init__(self, stream):
        self._stream = stream

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._stream)


def saved(tmp_path, iterator, items=2):
    """A checkpoint of an iterator of which some items were consumed."""
    stream = iter(iterator)
    for _ in range(items):
        next(stream)
    jaxshard.save(tmp_path / "c", {"data": iterator}, overwrite=True)
    return tmp_path / "c", stream


# In the state ---------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["save", "save_async"])
def test_the_state_is_that_of_the_call(tmp_path, door):
    iterator = pipelines.Plain()
    next(iterator)
    pending = getattr(jaxshard, door)(tmp_path / "c", {"data": iterator, "w": jnp.ones(3)})
    next(iterator)
    if door == "save_async":
        pending.wait()
    assert jaxshard.load(tmp_path / "c")["data"]["at"] == 1


def test_without_like_it_is_the_plain_state(tmp_path):
    path, _ = saved(tmp_path, pipelines.Plain(), 3)
    want = {"at": np.int64(3), "bytes": b"\0\xff", "rng": (1, [2.5, None])}
    assert jaxshard.load(path) == {"data": want}
    assert type(jaxshard.load(path)["data"]["at"]) is np.int64
    assert jaxshard.open(path)["data"].read() == want
    assert "data  iterator" in str(jaxshard.open(path))


class Large(pipelines.Plain):
    """With a state that is too large for a manifest."""

    def get_state(self):
        return {"at": self.at, "buffer": np.arange(50_000)}

    def set_state(self, state):
        assert np.array_equal(state["buffer"], np.arange(50_000))
        self.at = state["at"]


def test_a_large_state_lies_where_arrays_do(tmp_path):
    path, stream = saved(tmp_path, Large(), 4)
    other = Large()
    assert jaxshard.load(path, {"data": other})["data"] is other
    assert next(other) == next(stream)
    assert jaxshard.load(path)["data"]["at"] == jaxshard.open(path)["data"].read()["at"] == 4
    assert (path / "manifest.json").stat().st_size < 10_000
    assert jaxshard.verify(path).ok
    (pack,) = path.glob("a-*/packs/00000/c/0")
    damaged = bytearray(pack.read_bytes())
    damaged[100] ^= 1
    pack.write_bytes(damaged)
    assert not jaxshard.verify(path).ok
    with pytest.raises(jaxshard.CorruptionError):
        jaxshard.load(path, {"data": Large()})


@pytest.mark.parametrize("cls", [pipelines.Plain, Large])
def test_diff_sees_other_positions(tmp_path, cls):
    one, two = cls(), cls()
    next(two)
    jaxshard.save(tmp_path / "a", {"data": one})
    jaxshard.save(tmp_path / "b", {"data": two})
    jaxshard.save(tmp_path / "c", {"data": two})
    assert jaxshard.diff(tmp_path / "b", tmp_path / "c").identical
    (difference,) = jaxshard.diff(tmp_path / "a", tmp_path / "b").differences
    assert difference.name == "data"


def test_resume_gives_the_same_object_back(tmp_path):
    seen = []
    for _ in range(3):
        iterator = pipelines.Plain()
        with jaxshard.ResumeManager(
            tmp_path / "run", when=jaxshard.Every(steps=2), when_busy="wait"
        ) as run:
            state, begun = run.resume({"w": jnp.zeros(2), "data": iterator})
            assert state["data"] is iterator
            for step in run.steps(12):
                seen.append(next(iterator))
                run.maybe_save(step, state)
                if step == begun + 4:
                    break
    assert seen == list(range(1, 13))


@pytest.mark.parametrize("cls", [pipelines.Plain, Large])
def test_a_thinned_step_may_keep_it(tmp_path, cls):
    keep = jaxshard.Keep(last=3, thin_to="data", full_last=1)
    iterator = cls()
    with jaxshard.ResumeManager(tmp_path / "run", keep=keep) as run:
        state, _ = run.resume({"w": jnp.zeros(200_000), "data": iterator})
        for step in run.steps(3):
            next(iterator)
            run.save(step, state, wait=True)
    thinned = tmp_path / "run" / "step_00000001"
    assert jaxshard.open(thinned).thinned_to == ("data",)
    assert jaxshard.load(thinned)["data"]["at"] == 1
    assert jaxshard.verify(thinned).ok


# What differs ---------------------------------------------------------------------------------

DIFFERENCES = {
    "grain-seed": (pipelines.grain_map, {"seed": 4}, "WithSeed.seed_rng_seed was 3, is 4"),
    "grain-batch": (pipelines.grain_map, {"batch": 3}, "Batch.batch_size was 2, is 3"),
    "grain-rows": (pipelines.grain_map, {"rows": 22}, "Source.rows was 23, is 22"),
    "grain-window": (pipelines.grain_window, {"window": 4}, "window_size was 5, is 4"),
    "grain-elastic": (pipelines.grain_elastic, {"batch": 8}, "global_batch_size was 4, is 8"),
    "grain-loader-batch": (pipelines.grain_loader, {"batch": 3}, "Batch(batch_size=2"),
    "grain-loader-rows": (pipelines.grain_loader, {"rows": 22}, "rows of the source was 23, is 22"),
    "grain-loader-seed": (pipelines.grain_loader, {"seed": 2}, "it refuses its state: "),
    "torchdata-batch": (pipelines.torch_loader, {"batch": 4}, "batch_size was 3, is 4"),
    "torchdata-seed": (pipelines.torch_loader, {"seed": 4}, "seed of the generator was 5, is 4"),
    "torchdata-rows": (pipelines.torch_loader, {"rows": 9}, "rows of the dataset was 23, is 9"),
    "torchdata-workers": (pipelines.torch_loader, {"workers": 2}, "num_workers was 0, is 2"),
    "hugging-face-shards": (pipelines.hugging_face, {"shards": 2}, "shards was 3, is 2"),
    "hugging-face-batch": (pipelines.hugging_face, {"batch": 3}, "batch_size was 2, is 3"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_what_the_library_would_take_silently_is_an_error(tmp_path, case):
    needed(case)
    make, changed, message = DIFFERENCES[case]
    path, _ = saved(tmp_path, make())
    with pytest.raises(jaxshard.LeafMismatchError) as error:
        jaxshard.load(path, {"data": make(**changed)})
    assert message in str(error.value)
    assert "'data': " in str(error.value)
    assert "hint: make the iterator as it was when it was saved" in str(error.value)
    assert "on_mismatch='replay' or 'restart'" in str(error.value)
    jaxshard.load(path, {"data": make()})


def test_it_is_found_before_anything_is_read_or_released(tmp_path):
    needed("grain")
    w = jnp.ones(300_000)
    jaxshard.save(tmp_path / "run" / "step_00000001", {"w": w, "data": pipelines.grain_map()})
    live = pipelines.grain_map(seed=9)
    with pytest.raises(jaxshard.LeafMismatchError, match="seed_rng_seed was 3, is 9"):
        jaxshard.load(
            tmp_path / "run" / "step_00000001",
            {"w": w, "data": live},
            options=jaxshard.LoadOptions(release_like=True),
        )
    assert not w.is_deleted()
    assert live.get_state() == pipelines.grain_map().get_state()


def test_all_differences_are_said_at_once(tmp_path):
    needed("grain")
    jaxshard.save(tmp_path / "c", {"w": jnp.ones(3), "data": pipelines.grain_map()})
    with pytest.raises(jaxshard.LeafMismatchError) as error:
        jaxshard.load(tmp_path / "c", {"w": jnp.ones(4), "data": pipelines.grain_map(9, 3)})
    assert len(error.value.mismatches) == 4  # the seed of its shuffle follows from that seed
    assert "hint: change like, or ask for the difference" in str(error.value)


def test_resume_says_what_differs_too(tmp_path):
    with jaxshard.ResumeManager(tmp_path / "run") as run:
        run.resume({"data": Stateful(lambda: range(9))})
        run.save(1, {"data": Stateful(lambda: range(9))}, wait=True)
    with (
        jaxshard.ResumeManager(tmp_path / "run") as run,
        pytest.raises(jaxshard.LeafMismatchError, match="wanted an iterator Plain\nhint: make the"),
    ):
        run.resume({"data": pipelines.Plain()})


@pytest.mark.parametrize(
    ("saved_value", "like", "message"),
    [
        (pipelines.Plain(), Large(), "saved an iterator Plain, wanted an iterator Large"),
        (pipelines.Plain(), 3, "saved an iterator Plain, wanted Python int"),
        (np.ones(3), pipelines.Plain(), "saved float64[3], wanted an iterator Plain"),
    ],
)
def test_something_else_in_its_place_is_an_error(tmp_path, saved_value, like, message):
    jaxshard.save(tmp_path / "c", {"data": saved_value})
    with pytest.raises(jaxshard.LeafMismatchError) as error:
        jaxshard.load(tmp_path / "c", {"data": like})
    assert f"'data': {message}" in str(error.value)


class Checked(pipelines.Plain):
    """With the optional attributes of a good guest."""

    elastic = True

    def __init__(self, size=4):
        super().__init__()
        self.settings = {"size": size, "names": ("a", "b")}


class Checking(pipelines.Plain):
    def check_state(self, state):
        return [] if state["at"] < 3 else ["it is too far"]


def test_a_users_iterator_may_say_what_must_be_the_same(tmp_path):
    path, _ = saved(tmp_path, Checked())
    jaxshard.load(path, {"data": Checked()})
    with pytest.raises(jaxshard.LeafMismatchError, match="'data': size was 4, is 5"):
        jaxshard.load(path, {"data": Checked(5)})
    path, _ = saved(tmp_path, Checking(), 2)
    jaxshard.load(path, {"data": Checking()})
    path, _ = saved(tmp_path, Checking(), 3)
    with pytest.raises(jaxshard.LeafMismatchError, match="'data': it is too far"):
        jaxshard.load(path, {"data": Checking()})
    wrong = Checked()
    wrong.settings = {"function": len}
    with pytest.raises(jaxshard.UnsupportedLeafError, match="its settings are not JSON values"):
        jaxshard.save(tmp_path / "d", {"data": wrong})


class Refusing(pipelines.Plain):
    def set_state(self, state):
        raise RuntimeError("no, thanks")


def test_an_iterator_that_refuses_its_state_is_said(tmp_path):
    path, _ = saved(tmp_path, Refusing())
    with pytest.raises(
        jaxshard.LeafMismatchError, match="'data': it refuses its state: no, thanks"
    ):
        jaxshard.load(path, {"data": Refusing()})


def test_a_state_of_other_types_is_refused_by_name(tmp_path):
    class Holding(pipelines.Plain):
        def get_state(self):
            return {"ok": 1, "file": open, "nested": [{"lock": {1, 2}}]}

    with pytest.raises(jaxshard.UnsupportedLeafError) as error:
        jaxshard.save(tmp_path / "c", {"data": Holding()})
    assert "'data': " in str(error.value)
    assert "state['file']: builtins.builtin_function_or_method" in str(error.value)
    assert "state['nested'][0]['lock']: builtins.set" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_whose_state_would_lose_rows_is_refused(tmp_path):
    needed("hugging")
    with pytest.raises(jaxshard.UnsupportedLeafError) as error:
        jaxshard.save(tmp_path / "c", {"data": pipelines.hugging_face_shuffled()})
    assert "a Hugging Face stream with a shuffle buffer" in str(error.value)
    assert "jaxshard.data.Stateful(dataset, replay=True)" in str(error.value)
    with pytest.raises(jaxshard.UnsupportedLeafError, match="shuffle buffer"):
        jaxshard.save(tmp_path / "c", {"data": Stateful(pipelines.hugging_face_shuffled())})
    replayed = Stateful(pipelines.hugging_face_shuffled(), replay=True)
    jaxshard.save(tmp_path / "c", {"data": replayed})


def test_an_iterator_without_a_state_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(jaxshard.UnsupportedLeafError) as error:
        jaxshard.save(tmp_path / "c", {"data": iter([1, 2])})
    assert "without get_state and set_state; jaxshard.data.Stateful(make_iterator)" in str(
        error.value
    )


# Other numbers of processes -------------------------------------------------------------------


def of_processes(iterator, processes):
    """What a job of that many processes would have kept of an iterator."""
    return _iterators.info_of(iterator, processes)


def test_another_number_of_processes_is_refused_unless_it_is_elastic():
    plain = pipelines.Plain()
    message = "its states are of 4 processes, and here 1 are running"
    assert _iterators.problems(plain, of_processes(plain, 4), plain.get_state()) == [message]
    elastic = Checked()
    assert _iterators.problems(elastic, of_processes(elastic, 4), elastic.get_state()) == []


def test_grain_elastic_serves_any_number():
    needed("grain")
    iterator = pipelines.grain_elastic()
    info = of_processes(iterator, 4)
    assert info.elastic
    assert not [name for name in info.settings if "shard" in name]
    assert _iterators.problems(iterator, info, iterator.get_state()) == []
    assert not of_processes(pipelines.grain_map(), 1).elastic


def from_four(stateful, items):
    """The state of a Stateful in one of four processes."""
    for _ in range(items):
        next(stateful)
    return {**stateful.get_state(), "processes": 4}


@pytest.mark.parametrize("make", [pipelines.Plain, lambda: iter(range(1, 24))])
def test_on_mismatch_says_what_to_do(make, caplog):
    state = from_four(Stateful(make), 5)
    strict = Stateful(make)
    message = "its states are of 4 processes, and here 1 are running"
    assert strict.check_state(state) == [message]
    with pytest.raises(ValueError, match=message):
        strict.set_state(state)
    with caplog.at_level(logging.WARNING, "jaxshard"):
        replayed = Stateful(make, on_mismatch="replay")
        assert replayed.check_state(state) == []
        replayed.set_state(state)
        assert (next(replayed), replayed.consumed) == (6, 6)
        restarted = Stateful(make, on_mismatch="restart")
        restarted.set_state(state)
        assert (next(restarted), restarted.consumed) == (1, 1)
    read, began = (record.getMessage() for record in caplog.records)
    assert "reads forward to item 5 (on_mismatch='replay'): its states are of 4" in read
    assert "begins anew (on_mismatch='restart'): its states are of 4" in began


@pytest.mark.parametrize("on_mismatch", ["replay", "restart"])
def test_without_a_mismatch_its_own_state_is_used(caplog, on_mismatch):
    first = Stateful(pipelines.Plain, on_mismatch=on_mismatch)
    next(first)
    other = Stateful(pipelines.Plain, on_mismatch=on_mismatch)
    with caplog.at_level(logging.WARNING, "jaxshard"):
        other.set_state(first.get_state())
    assert next(other) == next(first)
    assert caplog.records == []


def test_other_settings_are_a_mismatch_too(tmp_path, caplog):
    needed("grain")
    path, _ = saved(tmp_path, Stateful(pipelines.grain_map), 3)
    changed = lambda: pipelines.grain_map(batch=1)  # noqa: E731
    with pytest.raises(jaxshard.LeafMismatchError, match=r"Batch\.batch_size was 2, is 1"):
        jaxshard.load(path, {"data": Stateful(changed)})
    with caplog.at_level(logging.WARNING, "jaxshard"):
        replayed = Stateful(changed, on_mismatch="replay")
        jaxshard.load(path, {"data": replayed})
    assert replayed.consumed == 3
    assert "Batch.batch_size was 2, is 1" in caplog.text


def test_the_state_of_an_iterator_alone_serves_the_one_that_is_wrapped_later(tmp_path, caplog):
    path, stream = saved(tmp_path, pipelines.Plain(), 4)
    wrapped = Stateful(pipelines.Plain)
    jaxshard.load(path, {"data": wrapped})
    assert next(wrapped) == next(stream)
    with pytest.raises(jaxshard.LeafMismatchError, match=r'on_mismatch="restart" begins anew'):
        jaxshard.load(path, {"data": Stateful(pipelines.Plain, on_mismatch="replay")})
    with pytest.raises(
        jaxshard.LeafMismatchError, match=r"saved an iterator Plain, wanted Stateful"
    ):
        jaxshard.load(path, {"data": Stateful(Large)})
    with caplog.at_level(logging.WARNING, "jaxshard"):
        restarted = Stateful(pipelines.Plain, on_mismatch="restart")
        restarted.why_not_from(of_processes(pipelines.Plain(), 4), {})
        assert restarted.why_not_from(of_processes(pipelines.Plain(), 4), {}) == []


# Stateful -------------------------------------------------------------------------------------


def test_a_source_that_has_become_shorter_is_an_error():
    state = Stateful(lambda: range(9))
    for _ in range(5):
        next(state)
    with pytest.raises(ValueError, match="expected 5 items to read forward, found 3"):
        Stateful(lambda: range(3)).set_state(state.get_state())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((n for n in range(3)),), TypeError, r"can be read only once.*\nhint: .*lambda"),
        ((iter([1]),), TypeError, "list_iterator can be read only once"),
        ((7,), TypeError, r"expected an iterable, or a function that makes one, found int"),
        ((lambda: 7,), TypeError, r"found int\nhint: Stateful\(lambda: iter\(dataset\)\)"),
    ],
)
def test_what_cannot_be_read_again_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Stateful(*arguments)


def test_an_unknown_wish_is_refused():
    with pytest.raises(ValueError, match='"error", "replay" or "restart"'):
        Stateful([1], on_mismatch="ignore")


@pytest.mark.parametrize("state", [None, {}, {"at": 3}, 7])
def test_what_is_no_state_of_it_is_refused(state):
    assert Stateful([1, 2]).check_state(state) == [
        f"expected the state of a Stateful, found {type(state).__name__}"
    ]


def test_it_says_what_it_is():
    stream = Stateful([1, 2, 3])
    next(stream)
    assert repr(stream) == "<Stateful list, 1 items consumed>"
    assert list(stream) == [2, 3]
