"""What happens to a run as curves and metrics: hooks for `ResumeManager(on_event=)`.

`TensorBoard` writes curves beside those of the training (`pip install jaxshard[tensorboard]`);
`Prometheus` counts what an alert may be about (`pip install jaxshard[prometheus]`); `Scalars` hands
numbers to any other logger; several at once are a list::

    hooks = [TensorBoard("logs"), Prometheus(port=9400, run="lm")]
    run = jaxshard.ResumeManager("runs/lm", on_event=hooks)

An event is a mapping with `at` (UTC, ISO 8601), `event` and what belongs to it, as the ledger of
the run keeps it (docs/format.md, "Runs"). A hook that fails is logged, and stops nobody.
"""

import datetime
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Prometheus", "Scalars", "TensorBoard"]

Event = Mapping[str, Any]
# By event: what of it is a number, and its name as a curve.
_CURVES = {
    "save": {
        "seconds": "save/seconds",
        "blocked_s": "save/blocked_seconds",
        "cost_s": "save/cost_seconds",
        "nbytes": "save/bytes",
        "reused": "save/unchanged_bytes",
    },
    "resume": {"seconds": "resume/seconds", "nbytes": "resume/bytes"},
}


# By event: the counter that goes up with it.
_COUNTED = {
    "save-failed": "failed_saves",
    "skip": "skipped_saves",
    "fallback": "damaged_steps",
    "stop": "stops",
}
# Kind and meaning of each metric.
_METRICS = {
    "saves": ("Counter", "steps that were committed"),
    "failed_saves": ("Counter", "saves that failed"),
    "skipped_saves": ("Counter", "times that a save was due while another one was running"),
    "saved_bytes": ("Counter", "bytes of committed steps"),
    "unchanged_bytes": ("Counter", "of these, bytes of files that the step before has too"),
    "resumes": ("Counter", "starts that came back to a step"),
    "damaged_steps": ("Counter", "steps that were skipped because they were damaged"),
    "stops": ("Counter", "requests to stop"),
    "save_seconds": ("Histogram", "from the call to the commit"),
    "save_blocked_seconds": ("Histogram", "for how long the loop was kept"),
    "resume_seconds": ("Histogram", "until the state was there"),
    "saved_step": ("Gauge", "newest step that was committed"),
    "saved_timestamp_seconds": ("Gauge", "when it was committed"),
}
_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_made: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _metrics_in(registry: Any) -> dict[str, Any]:
    """The metrics of a registry, made once: several runs differ by their label."""
    import prometheus_client  # noqa: PLC0415

    if registry not in _made:
        _made[registry] = {
            name: getattr(prometheus_client, kind)(
                f"jaxshard_{name}",
                text,
                ["run"],
                registry=registry,
                **({"buckets": _BUCKETS_S} if kind == "Histogram" else {}),
            )
            for name, (kind, text) in _METRICS.items()
        }
    return _made[registry]


class Scalars:
    """Hands the numbers of events to a function `(name, value, step)`.

    The names are `jaxshard/save/seconds`, `…/blocked_seconds` (how long the loop was kept),
    `…/cost_seconds` (that, and by how much steps beside it were slower), `…/bytes`,
    `…/unchanged_bytes` (of these: not written), `jaxshard/resume/seconds`, `…/bytes`.

    Args:
      write: such as `wandb_run.log` behind a lambda, or `add_scalar` of a TensorBoard writer.

    Example:
      >>> import jaxshard, numpy as np
      >>> from jaxshard.monitoring import Scalars
      >>> seen = []
      >>> tell = Scalars(lambda name, value, step: seen.append((name, step)))
      >>> with jaxshard.ResumeManager("memory://doc/scalars", on_event=tell) as run:
      ...     _ = run.save(3, {"w": np.ones(2)}, wait=True)
      >>> seen[0]
      ('jaxshard/save/seconds', 3)
    """

    def __init__(self, write: Callable[[str, float, int], object]) -> None:
        self._write = write

    def __call__(self, event: Event) -> None:
        """Take an event."""
        for field, name in _CURVES.get(event["event"], {}).items():
            if event.get(field) is not None:
                self._write(f"jaxshard/{name}", float(event[field]), int(event["step"]))


class TensorBoard(Scalars):
    """Writes the curves of `Scalars` for TensorBoard.

    Args:
      logdir: that of the training, or one of its own.

    Raises:
      ImportError: tensorboardX is not installed.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX import SummaryWriter  # noqa: PLC0415
        except ImportError as e:
            raise ImportError(
                "jaxshard.monitoring.TensorBoard: expected tensorboardX, which is not installed\n"
                "hint: pip install jaxshard[tensorboard]"
            ) from e
        self._writer = SummaryWriter(os.fspath(logdir))
        super().__init__(self._writer.add_scalar)

    def __call__(self, event: Event) -> None:
        """Take an event; its curves are on the disk when this returns."""
        super().__call__(event)
        if event["event"] == "end":
            self._writer.close()
        elif event["event"] in _CURVES:
            self._writer.flush()


class Prometheus:
    """Counts saves, resumes, failures and stops for Prometheus.

    Counters: `jaxshard_saves_total`, `jaxshard_failed_saves_total`, `jaxshard_skipped_saves_total`,
    `jaxshard_saved_bytes_total`, `jaxshard_unchanged_bytes_total` (of these: not written),
    `jaxshard_resumes_total`, `jaxshard_damaged_steps_total`, `jaxshard_stops_total`. Histograms:
    `jaxshard_save_seconds`, `jaxshard_save_blocked_seconds`, `jaxshard_resume_seconds`. Gauges:
    `jaxshard_saved_step`, `jaxshard_saved_timestamp_seconds`; `time()` less that is what a crash
    would lose now.

    Args:
      registry: of prometheus_client; its default one if None.
      port: serve them from here by HTTP; None if somebody else does.
      textfile: write them to this file after each event, for the textfile collector of the node
        exporter: jobs that end are read too.
      run: value of the label `run` of them all.

    Raises:
      ImportError: prometheus_client is not installed.
      OSError: the port is taken.
    """

    def __init__(
        self,
        *,
        registry: Any = None,
        port: int | None = None,
        textfile: str | os.PathLike[str] | None = None,
        run: str = "",
    ) -> None:
        try:
            import prometheus_client  # noqa: PLC0415
        except ImportError as e:
            raise ImportError(
                "jaxshard.monitoring.Prometheus: expected prometheus_client, which is not "
                "installed\nhint: pip install jaxshard[prometheus]"
            ) from e
        self._client = prometheus_client
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._textfile = textfile
        metrics = _metrics_in(self._registry)
        self._of = {name: metric.labels(run) for name, metric in metrics.items()}
        self._server = None
        if port is not None:
            self._server, _ = prometheus_client.start_http_server(port, registry=self._registry)

    @property
    def port(self) -> int | None:
        """Where they are served; None if they are not."""
        return None if self._server is None else int(self._server.server_port)

    def __call__(self, event: Event) -> None:
        """Take an event."""
        of = self._of
        match event["event"]:
            case "save":
                of["saves"].inc()
                of["saved_bytes"].inc(event["nbytes"])
                of["unchanged_bytes"].inc(event.get("reused") or 0)
                of["save_seconds"].observe(event["seconds"])
                of["save_blocked_seconds"].observe(event["blocked_s"])
                of["saved_step"].set(event["step"])
                committed = datetime.datetime.fromisoformat(event["at"])
                of["saved_timestamp_seconds"].set(committed.timestamp())
            case "resume":
                of["resumes"].inc()
                of["resume_seconds"].observe(event["seconds"])
            case name if name in _COUNTED:
                of[_COUNTED[name]].inc()
        if self._textfile is not None:
            self._client.write_to_textfile(os.fspath(self._textfile), self._registry)

    def close(self) -> None:
        """Serve them no longer."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
