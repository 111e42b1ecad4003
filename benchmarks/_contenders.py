"""Those that save and load: jaxshard, its peers, and the raw disk.

One contender lives in one process (`_process`). `save` returns when the bytes are on the disk,
`load` when the arrays are usable; both are timed from outside. Peers are imported by their own
class only, so that one that is not installed costs one word in the table.
"""

import concurrent.futures
import functools
import mmap
import os
import pathlib
import warnings
from typing import Any

import numpy as np

from benchmarks import _states


class Jaxshard:
    """This package, with its defaults."""

    def __init__(self, state: str) -> None:
        import jaxshard

        self.jaxshard = jaxshard
        self.state = _states.device_state(state)
        self.options = jaxshard.LoadOptions(on_report=self._keep)
        self.background = jaxshard.SaveOptions()
        self.report: Any = None

    def _keep(self, report: Any) -> None:
        self.report = report

    def expected(self) -> dict[str, Any]:
        return _states.named_leaves(self.state)

    def save(self, path: str) -> None:
        self.jaxshard.save(path, self.state)

    def save_async(self, path: str) -> Any:
        return self.jaxshard.save_async(path, self.state, options=self.background).wait

    def load(self, path: str, mesh: tuple[int, ...]) -> Any:
        import jax

        like = _states.abstract_state(self.state, mesh)
        return jax.block_until_ready(self.jaxshard.load(path, like, options=self.options))

    def subset(self, path: str, prefix: str) -> Any:
        import jax

        like = {prefix: _states.abstract_state(self.state[prefix])}
        loaded = self.jaxshard.load(path, like, select=f"{prefix}/**", options=self.options)
        return jax.block_until_ready(loaded)

    def verify(self, path: str) -> None:
        if not self.jaxshard.verify(path).ok:
            raise ValueError(f"{path} is not sound")

    def version(self) -> str:
        return str(self.jaxshard.__version__)


class JaxshardCopy(Jaxshard):
    """The same, and its background saves copy first, instead of holding views."""

    def __init__(self, state: str) -> None:
        super().__init__(state)
        self.background = self.jaxshard.SaveOptions(snapshot="copy")


class BareLoop:
    """No save at all: only the views that any snapshot on CPU has to take."""

    def __init__(self, state: str) -> None:
        self.state = _states.device_state(state)

    def save_async(self, path: str) -> Any:  # noqa: ARG002  (nothing is written)
        import jax

        arrays = jax.tree.leaves(self.state)
        views = [np.asarray(s.data) for a in arrays for s in a.addressable_shards]
        return views.clear

    def version(self) -> str:
        return np.__version__


class _Orbax:
    """What the variants of Orbax share."""

    def __init__(self, state: str) -> None:
        import absl.logging
        import orbax.checkpoint

        absl.logging.set_verbosity(absl.logging.ERROR)
        self.ocp: Any = orbax.checkpoint
        self.state = _states.device_state(state)

    def expected(self) -> dict[str, Any]:
        return _states.named_leaves(self.state)

    def _handler(self) -> Any:
        return self.ocp.PyTreeCheckpointHandler()

    def _checkpointer(self) -> Any:
        return self.ocp.Checkpointer(self._handler())

    @functools.cached_property
    def _background(self) -> Any:
        return self.ocp.AsyncCheckpointer(self._handler())  # once, as in a training loop

    def save(self, path: str) -> None:
        with self._checkpointer() as checkpointer:
            checkpointer.save(path, self.state)

    def save_async(self, path: str) -> Any:
        self._background.save(path, args=self.ocp.args.PyTreeSave(self.state))
        return self._background.wait_until_finished

    def load(self, path: str, mesh: tuple[int, ...]) -> Any:
        import jax

        like = _states.abstract_state(self.state, mesh)
        return jax.block_until_ready(self._load(path, like))

    def _load(self, path: str, like: Any) -> Any:
        arguments = self.ocp.checkpoint_utils.construct_restore_args(like)
        with self._checkpointer() as checkpointer:
            return checkpointer.restore(path, item=like, restore_args=arguments)

    def subset(self, path: str, prefix: str) -> Any:
        import jax

        like = {prefix: _states.abstract_state(self.state[prefix])}
        arguments = self.ocp.checkpoint_utils.construct_restore_args(like)
        wanted = self.ocp.args.PyTreeRestore(like, restore_args=arguments, partial_restore=True)
        with self.ocp.Checkpointer(self._handler()) as checkpointer:
            return jax.block_until_ready(checkpointer.restore(path, args=wanted))

    def version(self) -> str:
        return str(self.ocp.__version__)


class OrbaxDefault(_Orbax):
    """`StandardCheckpointer`: OCDBT, zstd. A part is read with the handler that can read parts."""

    def _checkpointer(self) -> Any:
        return self.ocp.StandardCheckpointer()

    @functools.cached_property
    def _background(self) -> Any:
        return self._checkpointer()  # it saves behind the call as it is

    def save_async(self, path: str) -> Any:
        self._background.save(path, self.state)
        return self._background.wait_until_finished

    def _load(self, path: str, like: Any) -> Any:
        with self._checkpointer() as checkpointer:
            return checkpointer.restore(path, like)


class OrbaxTuned(_Orbax):
    """`PyTreeCheckpointHandler` without OCDBT and compression, zarr3, no limit of bytes in flight.

    The fastest of its settings for large arrays on a local disk.
    """

    def _handler(self) -> Any:
        return self.ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_zarr3=True, use_compression=False
        )


class OrbaxV1(_Orbax):
    """`orbax.checkpoint.v1` with its defaults: OCDBT, zarr3, zstd."""

    def __init__(self, state: str) -> None:
        super().__init__(state)
        from orbax.checkpoint.experimental import v1

        self.v1: Any = v1

    def save(self, path: str) -> None:
        self.v1.save(path, self.state)

    def save_async(self, path: str) -> Any:
        return self.v1.save_async(path, self.state).result

    def _load(self, path: str, like: Any) -> Any:
        return self.v1.load(path, like)

    def subset(self, path: str, prefix: str) -> Any:
        import jax

        like = {prefix: _states.abstract_state(self.state[prefix])}
        partial = self.v1.options.PyTreeOptions(
            loading=self.v1.options.PyTreeOptions.Loading(partial_load=True)
        )
        with self.v1.Context(pytree_options=partial):
            return jax.block_until_ready(self.v1.load(path, like))


class TorchDcp:
    """PyTorch Distributed Checkpoint in one process: unsharded CPU tensors, files synced."""

    def __init__(self, state: str) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        self.torch: Any = torch
        self.dcp: Any = dcp
        self.state = {k: torch.from_numpy(v) for k, v in _states.host_state(state).items()}

    def expected(self) -> dict[str, Any]:
        return {k: v.numpy() for k, v in self.state.items()}

    def save(self, path: str) -> None:
        writer = self.dcp.FileSystemWriter(path, thread_count=2, sync_files=True)
        self.dcp.save(self.state, storage_writer=writer, no_dist=True)

    def load(self, path: str, mesh: tuple[int, ...]) -> Any:  # noqa: ARG002  (it has no mesh)
        target = {k: self.torch.empty_like(v) for k, v in self.state.items()}
        reader = self.dcp.FileSystemReader(path)
        self.dcp.load(target, storage_reader=reader, no_dist=True)
        return {k: v.numpy() for k, v in target.items()}

    def version(self) -> str:
        return str(self.torch.__version__)


class Safetensors:
    """One safetensors file, synced; loaded with `load_file` of its NumPy binding."""

    def __init__(self, state: str) -> None:
        import safetensors
        import safetensors.numpy

        self.safetensors: Any = safetensors
        self.state = _states.host_state(state)

    def expected(self) -> dict[str, Any]:
        return self.state

    def save(self, path: str) -> None:
        pathlib.Path(path).mkdir()
        file = f"{path}/model.safetensors"
        self.safetensors.numpy.save_file(self.state, file)
        _sync(file)
        _sync(path)

    def load(self, path: str, mesh: tuple[int, ...]) -> Any:  # noqa: ARG002  (it has no mesh)
        return self.safetensors.numpy.load_file(f"{path}/model.safetensors")

    def version(self) -> str:
        return str(self.safetensors.__version__)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


class Raw:
    """The limit: the same bytes in as many files, `write` and fsync, by a number of threads."""

    threads = 2

    def __init__(self, state: str) -> None:
        total = _states.nbytes(state)
        self.files = max(1, min(total >> 23, 1024))  # of 8 MiB, as jaxshard has them
        self.part = -(-total // self.files)
        values = np.random.default_rng(0).integers(0, 256, self.part, np.uint8)
        self.sources = [values.copy() for _ in range(self.files)]

    def expected(self) -> dict[str, Any]:
        return {str(i): source for i, source in enumerate(self.sources)}

    def save(self, path: str) -> None:
        pathlib.Path(path).mkdir()
        with concurrent.futures.ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(functools.partial(self._write, path), range(self.files)))
        _sync(path)

    def _write(self, path: str, i: int) -> None:
        fd = os.open(f"{path}/{i}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        rest = memoryview(self.sources[i])
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
        os.close(fd)

    def load(self, path: str, mesh: tuple[int, ...]) -> Any:  # noqa: ARG002  (it has no mesh)
        into = huge_pages(self.files * self.part)

        def read(i: int) -> None:
            part = memoryview(into[i * self.part : (i + 1) * self.part])
            with pathlib.Path(path, str(i)).open("rb", buffering=0) as file:
                while part:
                    part = part[file.readinto(part) or 0 :]

        with concurrent.futures.ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(read, range(self.files)))
        return {str(i): into[i * self.part : (i + 1) * self.part] for i in range(self.files)}

    def version(self) -> str:
        return os.uname().release


def huge_pages(nbytes: int) -> np.ndarray[Any, Any]:
    """Fresh memory in huge pages, as fast as memory gets."""
    area = mmap.mmap(-1, nbytes + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(area, np.uint8)
    start = -raw.ctypes.data % (2 << 20)
    return raw[start : start + nbytes]


class Raw4(Raw):
    threads = 4


class Raw16(Raw):
    threads = 16


class Read:
    """What `cat` does: every file of a checkpoint, whosever, into one buffer for each thread."""

    threads = 1

    def __init__(self, state: str) -> None:
        self.state = state

    def verify(self, path: str) -> None:
        files = [p for p in pathlib.Path(path).rglob("*") if p.is_file()]
        with concurrent.futures.ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(self._read, (files[i :: self.threads] for i in range(self.threads))))

    def _read(self, files: list[pathlib.Path]) -> None:
        into = bytearray(1 << 20)
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(into):
                    pass

    def version(self) -> str:
        return os.uname().release


class Read2(Read):
    threads = 2


CONTENDERS: dict[str, Any] = {
    "jaxshard": Jaxshard,
    "jaxshard-copy": JaxshardCopy,
    "orbax": OrbaxDefault,
    "orbax-tuned": OrbaxTuned,
    "orbax-v1": OrbaxV1,
    "torch-dcp": TorchDcp,
    "safetensors": Safetensors,
    "raw-2": Raw,
    "raw-4": Raw4,
    "raw-16": Raw16,
    "bare-loop": BareLoop,
    "read-1": Read,
    "read-2": Read2,
}
