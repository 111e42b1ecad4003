"""Real iterators of other libraries, each over the same few rows, and all that comes out of one."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxshard.data import Stateful

ROWS = 23


def grain_source() -> Any:
    import grain

    return grain.MapDataset.source(list(range(ROWS)))


def grain_map(seed: int = 3, batch: int = 2, rows: int = ROWS) -> Any:
    import grain

    source = grain.MapDataset.source(list(range(rows))).seed(seed).shuffle()
    return iter(source.random_map(lambda x, rng: x + 100 * rng.integers(9)).batch(batch))


def grain_iter() -> Any:
    """Read ahead on threads, then batched."""
    dataset = grain_source().seed(1).shuffle().repeat(2).to_iter_dataset()
    return iter(dataset.map(lambda x: x * 2).batch(3))


def grain_window(window: int = 5) -> Any:
    from grain import experimental

    dataset = experimental.WindowShuffleIterDataset(
        grain_source().to_iter_dataset(), window_size=window, seed=1
    )
    return iter(dataset.batch(2))


def grain_mix() -> Any:
    import grain

    return iter(grain.MapDataset.mix([grain_source(), grain_source()], weights=[0.3, 0.7]).batch(2))


def grain_packed() -> Any:
    from grain import experimental

    dataset = grain_source().map(lambda n: {"t": np.arange(n % 5 + 1)}).to_iter_dataset()
    return iter(
        experimental.ConcatThenSplitIterDataset(dataset, length_struct={"t": 4}, meta_features=())
    )


def grain_loader(seed: int = 1, rows: int = ROWS, batch: int = 2) -> Any:
    import grain.python as grain

    sampler = grain.IndexSampler(
        rows, shard_options=grain.NoSharding(), shuffle=True, num_epochs=1, seed=seed
    )
    return iter(
        grain.DataLoader(
            data_source=list(range(rows)), sampler=sampler, operations=[grain.Batch(batch)]
        )
    )


def grain_elastic(batch: int = 4) -> Any:
    import grain
    from grain import experimental

    dataset = grain_source().seed(3).shuffle()
    return experimental.ElasticIterator(dataset, batch, grain.sharding.NoSharding())


def torch_loader(workers: int = 0, seed: int = 5, batch: int = 3, rows: int = ROWS) -> Any:
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator()
    generator.manual_seed(seed)
    return StatefulDataLoader(
        list(range(rows)),
        batch_size=batch, shuffle=True, num_workers=workers, generator=generator,
        multiprocessing_context="forkserver" if workers else None,
    )  # fmt: skip


def hugging_face(shards: int = 3, batch: int = 2) -> Any:
    from datasets import Dataset

    dataset = Dataset.from_dict({"x": list(range(ROWS))}).to_iterable_dataset(num_shards=shards)
    return dataset.map(lambda row: {"x": row["x"] + 1}).batch(batch)


def hugging_face_shuffled(seed: int = 3) -> Any:
    from datasets import Dataset

    dataset = Dataset.from_dict({"x": list(range(ROWS))}).to_iterable_dataset(num_shards=2)
    return dataset.shuffle(seed=seed, buffer_size=6)


class Plain:
    """A user's own iterator, with the protocol of Grain."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> "Plain":
        return self

    def __next__(self) -> int:
        if self.at == ROWS:
            raise StopIteration
        self.at += 1
        return self.at

    def get_state(self) -> dict[str, Any]:
        return {"at": np.int64(self.at), "bytes": b"\0\xff", "rng": (1, [2.5, None])}

    def set_state(self, state: dict[str, Any]) -> None:
        assert state["bytes"] == b"\0\xff"
        assert state["rng"] == (1, [2.5, None])
        self.at = int(state["at"])


MAKERS: dict[str, Callable[[], Any]] = {
    "grain-map": grain_map,
    "grain-iter": grain_iter,
    "grain-window-shuffle": grain_window,
    "grain-mix": grain_mix,
    "grain-pack": grain_packed,
    "grain-data-loader": grain_loader,
    "grain-elastic": grain_elastic,
    "torchdata": torch_loader,
    "torchdata-two-workers": lambda: torch_loader(workers=2),
    "hugging-face": hugging_face,
    "hugging-face-buffer": lambda: Stateful(hugging_face_shuffled, replay=True),
    "plain": Plain,
    "generator": lambda: Stateful(lambda: (n * n for n in range(ROWS))),
    "wrapped-grain": lambda: Stateful(grain_map),
    "wrapped-torchdata": lambda: Stateful(torch_loader()),
    "wrapped-hugging-face": lambda: Stateful(hugging_face()),
}


def texts(iterator: Any, limit: int | None = None) -> list[str]:
    """What comes out, as text that tells it from anything else."""
    found = []
    stream = iter(iterator)
    while limit is None or len(found) < limit:
        try:
            item = next(stream)
        except StopIteration:
            break
        found.append(repr(item))
    return found


if __name__ == "__main__":
    import jaxshard

    for path in sys.argv[2:]:
        iterator = MAKERS[sys.argv[1]]()
        jaxshard.load(path, {"data": iterator})
        print(texts(iterator), flush=True)
