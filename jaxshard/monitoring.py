"""What happens to a run as curves and metrics: hooks for `ResumeManager(on_event=)`.

`TensorBoard` writes curves beside those of the training (`pip install jaxshard[tensorboard]`);
`Prometheus` counts what an alert may be about (`pip install jaxshard[prometheus]`); `Scalars` hands
numbers to any other logger. Each is a function of one event, so that several are called one after
the other::

    board, metrics = TensorBoard("logs"), Prometheus(port=9400)

    def tell(event):
        board(event)
        metrics(event)

    run = jaxshard.ResumeManager("runs/lm", on_event=tell)

An event is a mapping with `at` (UTC, ISO 8601), `event` and what belongs to it, as the ledger of
the run keeps it (docs/format.md, "Runs"). A hook that fails is logged, and stops nobody.
"""

import datetime
import os
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
        self._run = run
        counters = {
            "saves": "steps that were committed",
            "failed_saves": "saves that failed",
            "skipped_saves": "saves that were due while the last one was running",
            "saved_bytes": "bytes of committed steps",
            "unchanged_bytes": "of these, bytes of files that the step before has too",
            "resumes": "starts that came back to a step",
            "damaged_steps": "steps that were skipped because they were damaged",
            "stops": "requests to stop",
        }
        self._counters = {n: self._made("Counter", n, text) for n, text in counters.items()}
        self._save_s = self._made("Histogram", "save_seconds", "from the call to the commit")
        self._blocked_s = self._made("Histogram", "save_blocked_seconds", "the loop was kept")
        self._resume_s = self._made("Histogram", "resume_seconds", "until the state was there")
        self._step = self._made("Gauge", "saved_step", "newest step that was committed")
        self._at = self._made("Gauge", "saved_timestamp_seconds", "when it was committed")
        self._server = None
        if port is not None:
            self._server, _ = prometheus_client.start_http_server(port, registry=self._registry)

    def _made(self, kind: str, name: str, text: str) -> Any:
        make = getattr(self._client, kind)
        return make(f"jaxshard_{name}", text, ["run"], registry=self._registry).labels(self._run)

    @property
    def port(self) -> int | None:
        """Where they are served; None if they are not."""
        return None if self._server is None else int(self._server.server_port)

    def __call__(self, event: Event) -> None:
        """Take an event."""
        counters = self._counters
        match event["event"]:
            case "save":
                counters["saves"].inc()
                counters["saved_bytes"].inc(event["nbytes"])
                counters["unchanged_bytes"].inc(event.get("reused") or 0)
                self._save_s.observe(event["seconds"])
                self._blocked_s.observe(event["blocked_s"])
                self._step.set(event["step"])
                self._at.set(datetime.datetime.fromisoformat(event["at"]).timestamp())
            case "save-failed":
                counters["failed_saves"].inc()
            case "skip":
                counters["skipped_saves"].inc()
            case "resume":
                counters["resumes"].inc()
                self._resume_s.observe(event["seconds"])
            case "fallback":
                counters["damaged_steps"].inc()
            case "stop":
                counters["stops"].inc()
        if self._textfile is not None:
            self._client.write_to_textfile(os.fspath(self._textfile), self._registry)

    def close(self) -> None:
        """Serve them no longer."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
