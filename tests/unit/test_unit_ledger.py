import json
import logging

import pytest

from jaxshard import _ledger
from jaxshard._ledger import Ledger
from jaxshard._store import open_store


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    return open_store(tmp_path if request.param == "disk" else f"memory://{tmp_path.name}-ledger")


def test_events_come_back_in_order_from_all_starts(store):
    for start in (1, 2):
        ledger = Ledger(store, [])
        ledger.add("start", epoch=start)
        ledger.add("save", step=start * 10)
    found = [{k: v for k, v in e.items() if k != "at"} for e in _ledger.read(store)]
    assert found == [
        {"event": "start", "epoch": 1},
        {"event": "save", "step": 10},
        {"event": "start", "epoch": 2},
        {"event": "save", "step": 20},
    ]


def test_a_torn_last_line_is_left_out(tmp_path):
    store = open_store(tmp_path)
    ledger = Ledger(store, [])
    ledger.add("start")
    ledger.add("save", step=1)
    (file,) = (tmp_path / "events").iterdir()
    whole = file.read_bytes()
    for cut in range(1, len(whole.splitlines()[1])):
        file.write_bytes(whole[:-cut])
        assert [e["event"] for e in _ledger.read(store)][:1] == ["start"]
        assert len(_ledger.read(store)) == (2 if cut == 1 else 1)


@pytest.mark.parametrize("line", [b"[]", b"3", b'{"no":"event"}', b"\xff\xfe"])
def test_lines_that_are_no_events_are_left_out(tmp_path, line):
    store = open_store(tmp_path)
    Ledger(store, []).add("start")
    (file,) = (tmp_path / "events").iterdir()
    file.write_bytes(line + b"\n" + file.read_bytes())
    assert [e["event"] for e in _ledger.read(store)] == ["start"]


def test_a_run_without_a_ledger_has_no_events(tmp_path):
    assert _ledger.read(open_store(tmp_path / "none")) == []


def test_a_hook_sees_each_event_and_its_failures_stop_nobody(tmp_path, caplog):
    seen = []

    def hook(event):
        seen.append(event["event"])
        if event["event"] == "save":
            raise ZeroDivisionError

    ledger = Ledger(open_store(tmp_path), [hook])
    ledger.add("save", step=1)
    ledger.add("end")
    assert seen == ["save", "end"]
    assert "on_event failed at 'save'" in caplog.text
    assert len(_ledger.read(open_store(tmp_path))) == 2


def test_a_store_that_fails_is_said_once_and_stops_nobody(tmp_path, caplog, monkeypatch):
    store = open_store(tmp_path)
    ledger = Ledger(store, [])

    def fail(key, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(store, "append", fail)
        ledger.add("save", step=1)
        ledger.add("save", step=2)
    ledger.add("save", step=3)
    said = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1
    assert "the ledger cannot be written: [Errno 28] No space" in said[0].getMessage()
    assert [e["step"] for e in _ledger.read(store)] == [3]


def test_metrics_that_were_recorded_later_add_up(tmp_path):
    store = open_store(tmp_path)
    ledger = Ledger(store, [])
    ledger.add("record", step=1, name="step_00000001", metrics={"loss": 2.0, "bad": "nan"})
    ledger.add("record", step=1, name="step_00000001", metrics={"loss": 1.0})
    ledger.add("record", step=2, name="step_00000002", metrics={"loss": 3.0})
    found = _ledger.metrics(_ledger.read(store))
    assert found["step_00000001"]["loss"] == 1.0
    assert found["step_00000001"]["bad"] != found["step_00000001"]["bad"]
    assert found["step_00000002"] == {"loss": 3.0}
    assert json.dumps(found)
