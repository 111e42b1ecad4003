"""Whole training states: Optax, Flax Linen and NNX, Equinox, custom nodes, dicts of any keys.

What is loaded onto the state itself has its node types and its bits; without `like` it is made of
plain containers. What cannot be stored is refused in one error, before anything is written.
"""

import collections
import dataclasses
import decimal
import enum
import functools
import pathlib
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from support import P, assert_same_leaf, assert_same_tree, bits, mesh, on

import jaxshard
from jaxshard import LeafMismatchError, SaveOptions, UnsupportedLeafError


@pytest.fixture
def where(tmp_path) -> str:
    """A checkpoint's place in memory, of this test alone."""
    return f"memory://{tmp_path}"


def random_like(tree: Any) -> Any:
    """The same tree with other values; weak types and keys are kept as they are."""
    random = np.random.default_rng(0)

    def fill(leaf):
        if isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 and not leaf.weak_type:
            return jnp.asarray(random.normal(size=leaf.shape).astype(np.float32))
        if isinstance(leaf, jax.Array) and leaf.dtype == jnp.int32 and not leaf.weak_type:
            return jnp.asarray(random.integers(1, 9, leaf.shape, np.int32))
        return leaf

    return jax.tree.map(fill, tree)


def names(path: Any) -> list[str]:
    return list(jaxshard.open(path))


def assert_loads_onto_itself(path: Any, tree: Any) -> Any:
    jaxshard.save(path, tree)
    got = jaxshard.load(path, tree)
    assert_same_tree(got, tree)
    return got


# Optax --------------------------------------------------------------------------------------

PARAMS = {"dense": {"bias": jnp.zeros(3), "kernel": jnp.ones((4, 3))}, "scale": jnp.ones(())}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(1, 0, 9))
    ),
    "masked": optax.masked(optax.adam(1e-3), {"dense": True, "scale": False}),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), every_k_schedule=4),
    "inject": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1.0, 0.0, 9), b1=0.8),
    "partition": optax.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)}, {"dense": "a", "scale": "b"}
    ),
    "lbfgs": optax.lbfgs(),
    "if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.scale(-1)),
    "plateau": optax.contrib.reduce_on_plateau(),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    "ema": optax.ema(0.9),
    "adafactor": optax.adafactor(1e-3),
    "empty": optax.identity(),
}


@pytest.fixture(scope="module")
def optax_states() -> dict[str, Any]:
    return {name: random_like(tx.init(PARAMS)) for name, tx in OPTIMIZERS.items()}


def test_every_optax_state_loads_onto_itself(where, optax_states):
    got = assert_loads_onto_itself(where, optax_states)
    assert type(got["adamw"][0]) is optax.ScaleByAdamState
    assert type(got["empty"]) is optax.EmptyState


def test_optax_states_load_onto_fresh_ones(where, optax_states):
    jaxshard.save(where, optax_states)
    fresh = {name: tx.init(PARAMS) for name, tx in OPTIMIZERS.items()}
    assert_same_tree(jaxshard.load(where, fresh), optax_states)


def test_optax_states_load_onto_abstract_ones(where, optax_states):
    jaxshard.save(where, optax_states)
    abstract = jax.eval_shape(lambda: {n: tx.init(PARAMS) for n, tx in OPTIMIZERS.items()})
    assert_same_tree(jaxshard.load(where, abstract), optax_states)


def test_weak_leaves_of_lbfgs_stay_weak(where):
    state = optax.lbfgs().init(PARAMS)
    assert any(leaf.weak_type for leaf in jax.tree.leaves(state))
    assert_loads_onto_itself(where, state)


def test_without_like_named_tuples_are_fresh_ones_with_the_same_fields(where, optax_states):
    jaxshard.save(where, optax_states)
    adam, *empty = jaxshard.load(where)["adamw"]
    assert type(adam) is not optax.ScaleByAdamState
    assert type(adam).__name__ == "ScaleByAdamState"
    assert adam._fields == ("count", "mu", "nu")
    assert bits(adam.mu["dense"]["kernel"]) == bits(optax_states["adamw"][0].mu["dense"]["kernel"])
    assert [type(e).__name__ for e in empty] == ["EmptyState", "EmptyState"]
    masked = jaxshard.load(where)["masked"].inner_state[0].mu["scale"]
    assert (type(masked).__name__, masked) == ("MaskedNode", ())


def test_names_of_an_optax_state_are_fields_and_indices(where):
    jaxshard.save(where, OPTIMIZERS["adamw"].init({"w": jnp.ones(2)}))
    assert names(where) == ["0/count", "0/mu/w", "0/nu/w"]


def test_a_training_step_gives_the_same_bits_from_a_loaded_state(where):
    """CASES 14 and 17: the optimizer state is part of what comes back."""
    tx = OPTIMIZERS["inject"]

    @jax.jit
    def update(params, state):
        updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
        return optax.apply_updates(params, updates), state

    now = update(*update(PARAMS, tx.init(PARAMS)))
    jaxshard.save(where, now)
    loaded = jaxshard.load(where, (PARAMS, tx.init(PARAMS)))
    assert_same_tree(update(*loaded), update(*now))


# Flax Linen ---------------------------------------------------------------------------------


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(linen.relu(linen.Dense(4)(x)))


@pytest.fixture(scope="module")
def train_states() -> tuple[TrainState, TrainState]:
    """A fresh state and one after two jitted updates."""
    net = Net()
    params = net.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    fresh = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-2))
    update = jax.jit(lambda state: state.apply_gradients(grads=state.params))
    return fresh, update(update(fresh))


def test_a_fresh_train_state_is_the_like_of_a_trained_one(where, train_states):
    """`step` is a Python int before the first update and a weak int32 array after it."""
    fresh, trained = train_states
    assert type(fresh.step) is int
    assert trained.step.weak_type
    jaxshard.save(where, trained)
    got = jaxshard.load(where, fresh)
    assert_same_tree(got, trained)
    assert got.step == 2
    assert got.tx is fresh.tx


def test_a_trained_train_state_loads_onto_itself_and_its_abstract_form(where, train_states):
    _, trained = train_states
    assert_loads_onto_itself(where, trained)
    abstract = jax.eval_shape(lambda: trained)
    assert_same_tree(jaxshard.load(where, abstract), trained, placement=False)


def test_a_fresh_train_state_keeps_its_python_step(where, train_states):
    got = assert_loads_onto_itself(where, train_states[0])
    assert type(got.step) is int


def test_names_of_a_train_state_are_attributes_and_static_fields_are_absent(where, train_states):
    jaxshard.save(where, train_states[1])
    assert {"step", "params/Dense_0/kernel", "opt_state/0/mu/Dense_1/bias"} <= set(names(where))
    assert not [n for n in names(where) if n.startswith(("tx", "apply_fn"))]
    assert set(jaxshard.load(where)) == {"opt_state", "params", "step"}


# Flax NNX -----------------------------------------------------------------------------------


class Model(nnx.Module):
    """Every kind of state that NNX code has: parameters, statistics, streams, shared modules."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(params=seed, dropout=seed + 1)
        self.embed = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])
        self.head = self.embed
        self.rngs = rngs
        self.calls = nnx.Variable(seed)
        self.note = nnx.Variable(None)

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.head(self.drop(self.norm(self.embed(x))))


def state_of(module: Any) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(module))


@pytest.fixture(scope="module")
def model() -> Model:
    """A model that was used: its streams, statistics and counters have moved."""
    model = Model(0)
    model(jnp.arange(8.0).reshape(2, 4))
    return model


def test_a_module_comes_back_as_a_new_one_with_every_variable(where, model):
    """CASE 12: dropout streams, batch statistics and custom Variables too."""
    jaxshard.save(where, model)
    fresh = Model(5)
    before = state_of(fresh)
    got = jaxshard.load(where, fresh)
    assert type(got) is Model
    assert got is not fresh
    assert_same_tree(state_of(got), state_of(model))
    assert_same_tree(state_of(fresh), before)  # like is not changed


def test_a_loaded_module_computes_the_same_bits(where, model):
    """The dropout mask too, so the streams are where they were."""
    jaxshard.save(where, model)
    got, x = jaxshard.load(where, Model(5)), jnp.arange(8.0).reshape(2, 4)
    assert bits(got(x)) == bits(nnx.clone(model)(x))


def test_a_shared_module_stays_shared(where, model):
    jaxshard.save(where, model)
    assert "embed/kernel" in names(where)
    assert "head/kernel" not in names(where)
    got = jaxshard.load(where, Model(5))
    assert got.embed is got.head


def test_modules_that_share_across_one_tree_stay_shared(where, model):
    tree = {"whole": model, "again": model, "part": model.embed}
    jaxshard.save(where, tree)
    got = jaxshard.load(where, tree)
    assert got["whole"] is got["again"]
    assert got["part"] is got["whole"].embed
    assert len(names(where)) == len(jax.tree.leaves(state_of(model), is_leaf=lambda x: x is None))


def test_a_variable_held_twice_stays_one_variable(where, model):
    tied = nnx.Param(jnp.arange(3.0))
    for tree in ({"a": tied, "b": tied}, {"model": model, "tied": model.embed.kernel}):
        jaxshard.save(where, tree, overwrite=True)
        got = jaxshard.load(where, tree)
        first = got["a"] if "a" in got else got["model"].embed.kernel
        assert first is (got["b"] if "b" in got else got["tied"])


def test_a_variable_outside_a_module_keeps_type_and_metadata(where):
    tree = {"p": nnx.Param(jnp.arange(3.0), note="mine"), "s": nnx.BatchStat(jnp.ones(2))}
    jaxshard.save(where, tree)
    assert names(where) == ["p", "s"]
    got = jaxshard.load(where, tree)
    assert (type(got["p"]), type(got["s"])) == (nnx.Param, nnx.BatchStat)
    assert got["p"].get_metadata()["note"] == "mine"
    assert bits(got["p"].get_value()) == bits(jnp.arange(3.0))


def test_eleven_layers_keep_their_order_and_int_keys(where, model):
    """CASE 2: `10` after `2`, and numbers stay numbers."""
    jaxshard.save(where, model)
    layers = [n.split("/")[1] for n in names(where) if n.startswith("blocks") and "kernel" in n]
    assert layers == [str(i) for i in range(11)]
    plain = jaxshard.load(where)["blocks"]
    assert list(plain) == list(range(11))
    for i in range(11):
        assert bits(plain[i]["kernel"]) == bits(model.blocks[i].kernel.get_value())


@pytest.mark.parametrize("saved", ["module", "state", "pure"])
@pytest.mark.parametrize("wanted", ["module", "state", "pure"])
def test_a_module_its_state_and_its_pure_dict_load_into_each_other(where, model, saved, wanted):
    forms = {
        "module": lambda m: m,
        "state": nnx.state,
        "pure": state_of,
    }
    jaxshard.save(where, forms[saved](model))
    jaxshard.save(f"{where}/reference", model)
    assert names(where) == names(f"{where}/reference")
    assert not [n for n in names(where) if "value" in n]
    got = jaxshard.load(where, forms[wanted](Model(5)))
    assert type(got) is {"module": Model, "state": nnx.State, "pure": dict}[wanted]
    pure = {"module": state_of, "state": nnx.to_pure_dict, "pure": lambda x: x}[wanted]
    assert_same_tree(pure(got), state_of(model))


def test_split_parts_load_and_merge(where, model):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    jaxshard.save(where, {"params": params, "rest": rest})
    _, params, rest = nnx.split(Model(5), nnx.Param, ...)
    got = jaxshard.load(where, {"params": params, "rest": rest})
    merged = nnx.merge(graphdef, got["params"], got["rest"])
    assert_same_tree(state_of(merged), state_of(model))


def test_a_graphdef_in_the_tree_is_a_node_without_leaves(where, model):
    """`nnx.split` gives a pair; both together are a pytree."""
    graphdef, state = nnx.split(model)
    jaxshard.save(where, (graphdef, state))
    got = jaxshard.load(where, (graphdef, state))
    assert_same_tree(state_of(nnx.merge(*got)), state_of(model))


def test_dropout_loads_onto_its_abstract_form(where):
    """CASE 1: keys of `nnx.eval_shape` are keys."""
    graphdef, state = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(3)))
    jaxshard.save(where, state)
    like = nnx.state(nnx.eval_shape(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0))))
    got = jaxshard.load(where, like)
    x = jnp.ones(64)
    assert bits(nnx.merge(graphdef, got)(x)) == bits(nnx.merge(graphdef, state)(x))


def test_an_optimizer_comes_back_with_its_moments(where, model):
    """CASE 12: the optimizer is not reset."""
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    nnx.update(optimizer, random_like(nnx.state(optimizer)))
    jaxshard.save(where, {"model": model, "opt": optimizer})
    assert "opt/opt_state/0/mu/embed/kernel" in names(where)
    fresh = Model(5)
    like = {"model": fresh, "opt": nnx.Optimizer(fresh, optax.adamw(1e-3), wrt=nnx.Param)}
    got = jaxshard.load(where, like)
    assert type(got["opt"]) is nnx.Optimizer
    assert got["opt"].tx is like["opt"].tx
    assert_same_tree(state_of(got["opt"]), state_of(optimizer))
    assert_same_tree(state_of(got["model"]), state_of(model))


def test_a_loaded_model_and_optimizer_train_on(where):
    def make(seed):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(seed))
        return {"model": model, "opt": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)}

    @nnx.jit
    def step(state):
        grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones((1, 3))) ** 2))(state["model"])
        state["opt"].update(state["model"], grads)

    state = make(0)
    step(state)
    jaxshard.save(where, state)
    loaded = jaxshard.load(where, make(1))
    step(loaded)
    step(state)
    for name in state:
        assert_same_tree(state_of(loaded[name]), state_of(state[name]))


class Sharded(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("a", "b"))
        bias = nnx.with_partitioning(nnx.initializers.zeros_init(), ("b",))
        self.linear = nnx.Linear(8, 16, kernel_init=kernel, bias_init=bias, rngs=rngs)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_an_abstract_module_goes_to_the_current_mesh(where, axis_type, shape):
    """Saved on one mesh, loaded with `nnx.eval_shape` under `jax.set_mesh` of another."""
    with jax.set_mesh(mesh((2, 4), axis_types=(AxisType.Auto,) * 2)):
        saved = Sharded(nnx.Rngs(0))
        jaxshard.save(where, saved)
    devices = mesh(shape, axis_types=(axis_type,) * 2)
    with jax.set_mesh(devices):
        like = nnx.eval_shape(lambda: Sharded(nnx.Rngs(1)))
        got = jaxshard.load(where, like)
    kernel, bias = got.linear.kernel.get_raw_value(), got.linear.bias.get_raw_value()
    assert kernel.sharding == NamedSharding(devices, P("a", "b"))
    assert bias.sharding == NamedSharding(devices, P("b"))
    assert bits(kernel) == bits(saved.linear.kernel.get_raw_value())
    assert got.linear.kernel.get_metadata()["out_sharding"] == ("a", "b")
    given = jaxshard.load(where, like, mesh=devices)  # outside of set_mesh
    assert given.linear.kernel.get_raw_value().sharding == kernel.sharding


def test_a_module_of_structs_cannot_be_saved(tmp_path):
    abstract = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(UnsupportedLeafError, match=r"'kernel': a jax.ShapeDtypeStruct"):
        jaxshard.save(tmp_path / "c", abstract)


# Equinox ------------------------------------------------------------------------------------


def test_an_equinox_module_takes_its_functions_from_like(where):
    saved = eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(0))
    like = eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(1))
    jaxshard.save(where, saved)
    got = jaxshard.load(where, like)
    assert type(got) is eqx.nn.MLP
    assert got.activation is like.activation
    assert_same_tree(eqx.filter(got, eqx.is_array), eqx.filter(saved, eqx.is_array))


def test_functions_are_recorded_and_absent_without_like(where):
    jaxshard.save(where, eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0)))
    assert jaxshard.open(where).leaves["activation"].kind == "function"
    plain = jaxshard.load(where)
    assert set(plain) == {"layers"}
    assert [set(layer) for layer in plain["layers"]] == [{"weight", "bias"}] * 2


def test_an_equinox_module_with_state_and_an_abstract_like(where):
    class Block(eqx.Module):
        norm: eqx.nn.BatchNorm
        none: eqx.nn.Linear
        rate: float
        width: int = eqx.field(static=True)

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
            self.none = eqx.nn.Linear(3, 2, use_bias=False, key=key)
            self.rate = 0.5
            self.width = 3

    made = eqx.nn.make_with_state(Block)(jax.random.key(0))
    jaxshard.save(where, made)
    for like in (made, eqx.filter_eval_shape(eqx.nn.make_with_state(Block), jax.random.key(1))):
        block, state = jaxshard.load(where, like)
        assert_same_tree(state, made[1], placement=False)
        assert bits(block.none.weight) == bits(made[0].none.weight)
        assert block.none.bias is None
        assert (block.rate, block.width) == (0.5, 3)


def test_modules_without_leaves_are_nodes(where):
    """`Identity` and `FrozenDict({})` hold nothing; they are neither functions nor unknown."""
    tree = {"model": eqx.nn.Sequential([eqx.nn.Identity(), eqx.nn.Identity()]), "w": jnp.ones(2)}
    jaxshard.save(where, tree)
    assert names(where) == ["w"]
    got = jaxshard.load(where, tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)


# Containers ---------------------------------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight", "inner"], meta_fields=["name"]
)
@dataclasses.dataclass
class Registered:
    weight: Any
    inner: Any
    name: str


@flax.struct.dataclass
class Struct:
    x: Any
    rate: float = flax.struct.field(pytree_node=False, default=0.5)


class Pair:
    """A custom node that names its children by index only."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


jax.tree_util.register_pytree_node(
    Pair, lambda p: ((p.first, p.second), None), lambda _, children: Pair(*children)
)


class Keyed:
    """A custom node with keys."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


jax.tree_util.register_pytree_with_keys(
    Keyed,
    lambda k: (
        ((jax.tree_util.GetAttrKey("left"), k.left), (jax.tree_util.DictKey(7), k.right)),
        None,
    ),
    lambda _, children: Keyed(*children),
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    name: str


class Point(NamedTuple):
    x: Any
    y: Any


def test_registered_dataclasses_and_custom_nodes_load_onto_themselves(where):
    tree = {
        "dataclass": Registered(jnp.ones(2), {"k": 3}, "meta"),
        "struct": Struct(np.arange(3)),
        "pair": Pair(1, [jnp.zeros(2), None]),
        "keyed": Keyed(1.5, {"z": "text"}),
        "partial": jax.tree_util.Partial(jnp.add, jnp.ones(2)),
        "point": Point(1, Point(2, 3)),
        "frozen": FrozenDict({"a": {"b": 1}}),
    }
    got = assert_loads_onto_itself(where, tree)
    assert [type(v) for v in got.values()] == [type(v) for v in tree.values()]
    assert (got["dataclass"].name, got["struct"].rate) == ("meta", 0.5)
    assert names(where) == [
        "dataclass/weight", "dataclass/inner/k", "frozen/a/b", "keyed/left", "keyed/7/z",
        "pair/0", "pair/1/0", "pair/1/1", "partial/0/0", "point/x", "point/y/x", "point/y/y",
        "struct/x",
    ]  # fmt: skip


def test_without_like_custom_nodes_are_dicts_and_lists(where):
    jaxshard.save(
        where,
        {"keyed": Keyed(1, Pair(2, 3)), "data": Registered(4, 5, "n"), "frozen": FrozenDict(a=6)},
    )
    assert jaxshard.load(where) == {
        "keyed": {"left": 1, 7: [2, 3]},
        "data": {"weight": 4, "inner": 5},
        "frozen": {"a": 6},
    }


@pytest.mark.parametrize(
    "node", [Static("s"), FrozenDict({}), eqx.nn.Identity(), Struct(None), Pair({}, [])], ids=repr
)
def test_nodes_without_leaves(where, node):
    tree = {"node": node, "x": 1}
    jaxshard.save(where, tree)
    got = jaxshard.load(where, tree)
    assert type(got["node"]) is type(node)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert jaxshard.load(where)["x"] == 1


def test_a_node_that_makes_new_children_whenever_it_is_flattened(where):
    class Fresh:
        def __init__(self, x):
            self.x = x

    jax.tree_util.register_pytree_node(
        Fresh, lambda f: ((f.x + 0, f.x + 1, f.x + 2), None), lambda _, c: Fresh(c[0])
    )
    jaxshard.save(where, [Fresh(np.arange(3)), Fresh(np.arange(5))])
    plain = jaxshard.load(where)
    assert [[a.tolist() for a in fresh] for fresh in plain] == [
        [[0, 1, 2], [1, 2, 3], [2, 3, 4]],
        [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [2, 3, 4, 5, 6]],
    ]


def test_children_of_one_name_never_end_in_a_checkpoint_that_cannot_be_read(where):
    """A node may give two children the same key: both come back, or the save refuses."""

    class Twins:
        def __init__(self, *children):
            self.children = children

    key = jax.tree_util.GetAttrKey("same")
    jax.tree_util.register_pytree_with_keys(
        Twins, lambda t: (tuple((key, c) for c in t.children), None), lambda _, c: Twins(*c)
    )
    tree = Twins(1, 2)
    try:
        jaxshard.save(where, tree)
    except UnsupportedLeafError as error:
        assert "same" in str(error)  # noqa: PT017
        return
    assert jaxshard.load(where, tree).children == (1, 2)


def test_a_named_tuple_with_renamed_fields_loads_without_like(where):
    """`rename=True` gives fields that a fresh named tuple refuses."""
    kind = collections.namedtuple("Row", ["id", "class", "id"], rename=True)  # noqa: PYI024
    tree = {"row": kind(1, 2, 3), "x": 4}
    jaxshard.save(where, tree)
    assert jaxshard.load(where, tree) == tree
    plain = jaxshard.load(where)
    assert plain["x"] == 4
    assert list(plain["row"].values() if isinstance(plain["row"], dict) else plain["row"]) == [
        1, 2, 3,
    ]  # fmt: skip


def test_dict_keys_of_every_type_come_back_as_themselves(where):
    tree = {
        "int": {10: 1, 2: 2, -1: 3, 2**70: 4},
        "mixed": {1: 1, "1": 2, (1,): 3, "(1,)": 4, 1.5: 5, b"1": 6, None: 7, "None": 8},
        "bool": {True: 1, False: 2},
        "tuple": {("a", 1): 1, ("a", ("b", None)): 2, (): 3},
        "text": {"": 1, "%": 2, ".": 3, "..": 4, "a/b": 5, "a.b": 6, "*": 7, "{a,b}": 8, "ü\n": 9},
    }
    jaxshard.save(where, tree)
    for got in (jaxshard.load(where), jaxshard.load(where, tree)):
        assert got == tree
        for group, keys in tree.items():
            assert {(type(k), k) for k in got[group]} == {(type(k), k) for k in keys}
    assert len(set(names(where))) == sum(map(len, tree.values()))


def test_int_keys_are_in_the_order_of_numbers(where):
    """CASE 2: 2 before 10, without `like` too."""
    jaxshard.save(where, {10: "ten", 2: "two", 1: "one"})
    assert names(where) == ["1", "2", "10"]
    assert list(jaxshard.load(where)) == [1, 2, 10]


@pytest.mark.parametrize(
    "options", [SaveOptions(), SaveOptions(pack_below=0)], ids=["pack", "files"]
)
def test_dotted_and_slashed_keys_are_leaves_of_their_own(tmp_path, options):
    """CASE 35: equal shapes, so that nothing but the name tells them apart."""
    values = iter(np.arange(100.0).reshape(25, 4))
    tree = {
        "a": {"b": next(values), "b/c": next(values), "": next(values)},
        "a.b": next(values),
        "a/b": next(values),
        "x": [next(values)],
        "x.0": next(values),
        "x/0": next(values),
        "c": {"0": next(values)},
        "c/0": next(values),
        "zarr.json": next(values),
        "__init__": next(values),
        "..": {"..": next(values)},
        "A": {"b": next(values)},
        "long" * 100: next(values),
        "long" * 100 + "er": next(values),
        "café": next(values),
        "cafe\u0301": next(values),
        "\ud800": next(values),
    }
    jaxshard.save(tmp_path / "c", tree, options=options)
    assert_same_tree(jaxshard.load(tmp_path / "c"), tree)
    assert_same_tree(jaxshard.load(tmp_path / "c", tree), tree)
    paths = [info.zarr_path for info in jaxshard.open(tmp_path / "c").leaves.values()]
    if options.pack_below == 0:
        assert len({path.casefold() for path in paths}) == len(paths)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_names_have_the_escapes_that_the_format_gives_them(where):
    jaxshard.save(where, {"a": {"b": 1}, "a.b": 2, "a/b": 3, 1: 4, "1": 5, "": 6})
    assert set(names(where)) == {"a/b", "a.b", "a%2Fb", "%int~1", "1", "%"}


def test_dicts_keep_the_order_and_the_type_of_like(where):
    tree = {
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "default": collections.defaultdict(list, {"z": 1, "a": 2}),
        "plain": {"z": 1, "a": 2},
    }
    jaxshard.save(where, tree)
    got = jaxshard.load(where, tree)
    assert got == tree
    assert [list(v) for v in got.values()] == [["z", "a"]] * 3
    assert type(got["ordered"]) is collections.OrderedDict
    assert got["default"].default_factory is list
    assert got["default"]["new"] == []
    assert list(jaxshard.load(where)["ordered"]) == ["z", "a"]


def test_ordered_dicts_of_another_order_load_by_name(where):
    jaxshard.save(where, collections.OrderedDict([("z", 1), ("a", 2)]))
    like = collections.OrderedDict([("a", 0), ("z", 0)])
    assert jaxshard.load(where, like) == collections.OrderedDict([("a", 2), ("z", 1)])


def test_mappings_of_other_types_load_into_each_other(where):
    """A FrozenDict checkpoint onto a dict, and back; names and values are the same."""
    jaxshard.save(where, {"p": FrozenDict({"w": 1}), "q": {"w": 2}})
    like = {"p": {"w": 0}, "q": FrozenDict({"w": 0})}
    assert jaxshard.load(where, like) == {"p": {"w": 1}, "q": FrozenDict({"w": 2})}


def test_deep_nesting(where):
    tree: Any = 7
    for depth in range(200):
        tree = [tree] if depth % 2 else {"k": tree}
    jaxshard.save(where, tree)
    assert jaxshard.load(where) == tree
    assert jaxshard.load(where, tree) == tree


def test_a_tree_that_is_too_deep_or_endless_is_refused(tmp_path):
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 7
    for _ in range(300):
        deep = [deep]
    for tree in (endless, deep):
        with pytest.raises(UnsupportedLeafError, match="nested deeper than 256 levels"):
            jaxshard.save(tmp_path / "c", tree)
    assert list(tmp_path.iterdir()) == []


def test_thousands_of_leaves(where):
    tree = {f"layer{i}": {"w": np.full(3, i), "n": i} for i in range(1000)}
    jaxshard.save(where, tree)
    assert_same_tree(jaxshard.load(where), tree)


@pytest.mark.parametrize(
    "leaf",
    [7, True, None, "text", np.float32(1.5), np.arange(3), jnp.arange(3.0), jax.random.key(1)],
    ids=lambda leaf: type(leaf).__name__,
)
def test_a_bare_leaf_is_a_tree(tmp_path, leaf):
    for name, options in {"pack": SaveOptions(), "files": SaveOptions(pack_below=0)}.items():
        jaxshard.save(tmp_path / name, leaf, options=options)
        assert names(tmp_path / name) == [""]
        assert_same_leaf(jaxshard.load(tmp_path / name, leaf), leaf)
        assert bits_or_value(jaxshard.load(tmp_path / name)) == bits_or_value(leaf)


def bits_or_value(leaf: Any) -> Any:
    return bits(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf


def test_functions_of_every_kind_come_from_like(where):
    functions = [jnp.sin, jax.nn.relu, jax.jit(jnp.cos), len, lambda x: x, np.add, jnp.float32]
    tree = {"f": functions, "x": 1}
    jaxshard.save(where, tree)
    got = jaxshard.load(where, tree)
    assert all(a is b for a, b in zip(got["f"], functions, strict=True))
    assert {jaxshard.open(where).leaves[f"f/{i}"].kind for i in range(7)} == {"function"}
    assert jaxshard.load(where) == {"x": 1}


def test_what_loses_a_function_keeps_its_other_places(where):
    jaxshard.save(where, {"list": [jnp.sin, 1, 2], "point": Point(3, jnp.sin), "pair": (4, 5)})
    assert jaxshard.load(where) == {"list": {1: 1, 2: 2}, "point": {"x": 3}, "pair": (4, 5)}


def test_a_function_in_place_of_a_value_is_a_difference(where):
    jaxshard.save(where, {"f": 1, "x": 2})
    with pytest.raises(LeafMismatchError, match=r"'f': saved Python int, wanted a function"):
        jaxshard.load(where, {"f": jnp.sin, "x": 0})


# Refused ------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Unregistered:
    weight: Any


@dataclasses.dataclass
class Callable(Unregistered):
    def __call__(self, x: Any) -> Any:
        return x * self.weight


class Layer:
    """What somebody writes who does not know about pytrees."""

    def __init__(self) -> None:
        self.weight = jnp.ones(3)

    def __call__(self, x: Any) -> Any:
        return x * self.weight


class Unstorable:
    """An iterator whose state holds what nothing but pickle could store."""

    def get_state(self) -> dict[str, object]:
        return {"at": 1, "open": object()}

    def set_state(self, state: dict[str, object]) -> None: ...


class Text(str):
    __slots__ = ()


class Count(int):
    pass


def deleted() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


def unreduced() -> jax.Array:
    """Partial sums that no device has the total of."""
    devices = mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    out = P(None, None, unreduced={"x"})
    a = jax.device_put(np.ones((2, 4), np.float32), on(devices, None, "x"))
    b = jax.device_put(np.ones((4, 3), np.float32), on(devices, "x"))
    with jax.set_mesh(devices):
        return jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b, out_sharding=out))(a, b)


REFUSED = {
    "object": object,
    "set": lambda: {1, 2},
    "generator": lambda: (i for i in range(3)),
    "range": lambda: range(3),
    "path": lambda: pathlib.Path("x"),
    "decimal": lambda: decimal.Decimal("1.5"),
    "enum": lambda: Color.RED,
    "int-enum": lambda: Number.ONE,
    "str-subclass": lambda: Text("x"),
    "int-subclass": lambda: Count(1),
    "dataclass": lambda: Unregistered(1),
    "callable-dataclass": lambda: Callable(1),
    "callable-object": Layer,
    "unstorable-iterator": Unstorable,
    "struct": lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    "deleted": deleted,
    "unreduced": unreduced,
    "object-array": lambda: np.array([None, 1], object),
    "string-array": lambda: np.array(["a", "b"]),
    "bytes-array": lambda: np.array([b"a"]),
    "structured-array": lambda: np.zeros(2, [("x", np.float32)]),
    "datetime-array": lambda: np.zeros(2, "M8[s]"),
    "timedelta-array": lambda: np.zeros(2, "m8[s]"),
    "longdouble-array": lambda: np.zeros(2, np.longdouble),
    "void-array": lambda: np.zeros(2, "V3"),
    "masked-array": lambda: np.ma.masked_array([1, 2], [True, False]),
    "matrix-subclass": lambda: np.zeros(2).view(np.recarray),
    "string-scalar": lambda: np.str_("x"),
    "bytes-scalar": lambda: np.bytes_(b"x"),
    "datetime-scalar": lambda: np.datetime64("2026-01-01"),
    "longdouble-scalar": lambda: np.longdouble(1),
    "variable": lambda: nnx.Variable(object()),
}  # fmt: skip
BAD_KEYS = {
    "enum-key": {Color.RED: 1},
    "set-key": {frozenset(): 1},
    "nan-key": {float("nan"): 1},
    "tuple-key": {(1, Color.RED): 1},
    "numpy-key": {np.int64(3): 1},
    "subclass-key": {Number.ONE: 1},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_stored_is_refused_by_name(tmp_path, kind):
    tree = {"good": jnp.ones(2), "deep": [{kind: REFUSED[kind]()}]}
    with pytest.raises(UnsupportedLeafError, match=f"'deep/0/{kind}': .") as error:
        jaxshard.save(tmp_path / "c", tree)
    assert len(error.value.offenders) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_keys_that_would_not_come_back_are_refused(tmp_path, kind):
    with pytest.raises(UnsupportedLeafError, match=r"'deep': a dict key of a type"):
        jaxshard.save(tmp_path / "c", {"deep": BAD_KEYS[kind], "x": 1})
    assert list(tmp_path.iterdir()) == []


def test_one_error_names_everything_and_nothing_is_written(tmp_path):
    tree = {kind: make() for kind, make in REFUSED.items()} | BAD_KEYS | {"good": 1}
    for save in (jaxshard.save, jaxshard.save_async):
        with pytest.raises(UnsupportedLeafError, match="nothing was written") as error:
            save(tmp_path / "new" / "c", tree)
        text = str(error.value)
        assert [n for n in (*REFUSED, *BAD_KEYS) if f"'{n}': " not in text] == []
        assert len(error.value.offenders) == len(REFUSED) + len(BAD_KEYS)
        assert "'good'" not in text
        assert "hint: " in text
    assert list(tmp_path.iterdir()) == []


def test_a_refused_overwrite_leaves_the_earlier_checkpoint(tmp_path):
    jaxshard.save(tmp_path / "c", {"x": 1})
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(UnsupportedLeafError, match=r"'x': builtins\.object"):
        jaxshard.save(tmp_path / "c", {"x": object()}, overwrite=True)
    assert sorted(p for p in tmp_path.rglob("*")) == before
    assert jaxshard.load(tmp_path / "c") == {"x": 1}


def test_tracers_are_refused_inside_jit(tmp_path):
    @jax.jit
    def step(x):
        jaxshard.save(tmp_path / "c", {"in": {"x": x}, "key": jax.random.key(0)})
        return x

    with pytest.raises(UnsupportedLeafError, match=r"'in/x': a tracer; save outside of jit"):
        step(jnp.ones(2))
    assert list(tmp_path.iterdir()) == []


def test_a_concrete_state_can_be_saved_while_jit_traces(where):
    state = {"x": jnp.arange(3.0), "key": jax.random.key(0)}

    @jax.jit
    def step(x):
        jaxshard.save(where, state)
        return x

    step(jnp.ones(2))
    assert_same_tree(jaxshard.load(where, state), state)


def test_a_donated_array_still_serves_as_like(where):
    """In `like` only the description counts."""
    array = jax.device_put(np.arange(8.0, dtype=np.float32), on(mesh((8,)), "a"))
    jaxshard.save(where, {"x": array})
    want = bits(array)
    array.delete()
    got = jaxshard.load(where, {"x": array})["x"]
    assert got.sharding == array.sharding
    assert bits(got) == want


def test_an_unknown_leaf_in_like_is_named(where):
    jaxshard.save(where, {"x": 1})
    with pytest.raises(UnsupportedLeafError, match=r"'x': builtins\.object") as error:
        jaxshard.load(where, {"x": object()})
    assert "nothing was written" not in str(error.value)
