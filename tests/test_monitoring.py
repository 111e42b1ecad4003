"""Hooks for `on_event`: real files of TensorBoard, a real endpoint of Prometheus."""

import struct
import sys
import urllib.request
from pathlib import Path

import numpy as np
import prometheus_client
import pytest
from tensorboardX.proto import event_pb2

import jaxshard
from jaxshard.monitoring import Prometheus, Scalars, TensorBoard


def train(root: Path, tell, *, total: int = 4) -> None:
    every = jaxshard.Every(steps=2)
    with jaxshard.ResumeManager(root, when=every, when_busy="wait", on_event=tell) as run:
        state, _ = run.resume({"w": np.zeros(300_000), "frozen": np.ones(300_000)})
        for step in run.steps(total):
            state = {**state, "w": state["w"] + 1}
            run.maybe_save(step, state)


def curves(logdir: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard would draw: records of a length, its checksum, an event, and its."""
    found: dict[str, dict[int, float]] = {}
    for file in logdir.iterdir():
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_tensorboard_gets_a_point_for_each_save_and_resume(tmp_path):
    train(tmp_path / "run", TensorBoard(tmp_path / "logs"))
    found = curves(tmp_path / "logs")
    assert set(found) == {
        f"jaxshard/save/{name}"
        for name in ("seconds", "blocked_seconds", "cost_seconds", "bytes", "unchanged_bytes")
    }
    assert all(sorted(points) == [2, 4] for points in found.values())
    assert found["jaxshard/save/bytes"] == {2: 4_800_000, 4: 4_800_000}
    assert found["jaxshard/save/unchanged_bytes"] == {2: 0, 4: 2_400_000}
    assert 0 < found["jaxshard/save/blocked_seconds"][2] <= found["jaxshard/save/seconds"][2]
    train(tmp_path / "run", TensorBoard(tmp_path / "more"), total=6)
    found = curves(tmp_path / "more")
    assert found["jaxshard/resume/bytes"][4] >= 4_800_000
    assert found["jaxshard/resume/seconds"][4] > 0


def served(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return samples(answer.read().decode())


def samples(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("jaxshard_"))
    return {name.replace('{run="lm"}', ""): float(value) for name, _, value in lines}


def test_prometheus_serves_what_happened(tmp_path):
    registry = prometheus_client.CollectorRegistry()
    metrics = Prometheus(registry=registry, port=0, textfile=tmp_path / "metrics.prom", run="lm")
    train(tmp_path / "run", metrics)
    for piece in (tmp_path / "run/step_00000004").glob("a-*/data/w/c/0"):
        piece.unlink()
    train(tmp_path / "run", metrics, total=6)
    found = served(metrics.port)
    assert found["jaxshard_saves_total"] == 4  # 2, 4, and after the fallback 4 and 6
    assert found["jaxshard_saved_bytes_total"] == 4 * 4_800_000
    assert found["jaxshard_unchanged_bytes_total"] == 3 * 2_400_000
    assert found["jaxshard_save_seconds_count"] == 4
    assert found["jaxshard_save_blocked_seconds_sum"] > 0
    assert found["jaxshard_saved_step"] == 6
    assert found["jaxshard_resumes_total"] == found["jaxshard_resume_seconds_count"] == 1
    assert found["jaxshard_damaged_steps_total"] == 1
    assert found["jaxshard_failed_saves_total"] == found["jaxshard_stops_total"] == 0
    newest = jaxshard.open(tmp_path / "run").open()
    import datetime

    committed = datetime.datetime.fromisoformat(newest.created).timestamp()
    assert 0 <= found["jaxshard_saved_timestamp_seconds"] - committed < 5
    assert samples((tmp_path / "metrics.prom").read_text()) == found
    metrics.close()
    assert metrics.port is None
    with pytest.raises(OSError):
        served(1)


def test_prometheus_counts_what_goes_wrong():
    registry = prometheus_client.CollectorRegistry()
    metrics = Prometheus(registry=registry, run="lm")
    at = "2026-01-01T00:00:00+00:00"
    for event in ("save-failed", "skip", "stop", "stop", "prune", "end"):
        metrics({"at": at, "event": event, "step": 3})
    found = samples(prometheus_client.generate_latest(registry).decode())
    assert found["jaxshard_failed_saves_total"] == found["jaxshard_skipped_saves_total"] == 1
    assert found["jaxshard_stops_total"] == 2
    assert metrics.port is None


def test_several_runs_differ_by_their_label():
    registry = prometheus_client.CollectorRegistry()
    for run in ("a", "b", "a"):
        metrics = Prometheus(registry=registry, run=run)
        metrics({"at": "", "event": "stop"})
    text = prometheus_client.generate_latest(registry).decode()
    assert 'jaxshard_stops_total{run="a"} 2.0' in text
    assert 'jaxshard_stops_total{run="b"} 1.0' in text


def test_scalars_leave_out_what_is_not_known():
    seen = []
    tell = Scalars(lambda *point: seen.append(point))
    tell({"at": "", "event": "save", "step": 3, "seconds": 2, "cost_s": None})
    tell({"at": "", "event": "start"})
    assert seen == [("jaxshard/save/seconds", 2.0, 3)]


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: TensorBoard("x"), "tensorboardX", "tensorboard"),
        (Prometheus, "prometheus_client", "prometheus"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(monkeypatch, make, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"not installed\nhint: pip install jaxshard\[{extra}\]"):
        make()


def test_several_hooks_are_called_one_after_the_other(tmp_path):
    seen = []
    train(tmp_path, [lambda e: seen.append(1), lambda e: seen.append(2)])
    assert seen[:4] == [1, 2, 1, 2]
    with pytest.raises(TypeError, match="expected on_event to be a function, found 'logs'\nhint"):
        jaxshard.ResumeManager(tmp_path, on_event=["logs"])
