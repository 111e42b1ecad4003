"""Options are checked where they are made, by name and with a hint."""

import inspect

import pytest

from jaxshard._options import LoadOptions, SaveOptions


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (SaveOptions, "host_bytes_max", 0),
        (SaveOptions, "host_bytes_max", -1),
        (SaveOptions, "piece_bytes_max", 0),
        (SaveOptions, "pack_below", -1),
        (SaveOptions, "compression", "gzip"),
        (SaveOptions, "compression", ""),
        (SaveOptions, "snapshot", "none"),
        (SaveOptions, "snapshot", None),
        (SaveOptions, "timeout_s", 0),
        (SaveOptions, "timeout_s", -0.5),
        (LoadOptions, "host_bytes_max", 0),
        (LoadOptions, "io_mode", "mmap"),
        (LoadOptions, "io_mode", None),
        (LoadOptions, "timeout_s", 0),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(kind, field, value):
    says = (
        f"^{kind.__name__}: {field} cannot be {value!r}\nhint: help\\(jaxshard.{kind.__name__}\\)"
    )
    with pytest.raises(ValueError, match=says):
        kind(**{field: value})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (SaveOptions, {"host_bytes_max": 1, "piece_bytes_max": 1, "pack_below": 0}),
        (SaveOptions, {"compression": "zstd", "snapshot": "copy", "timeout_s": 0.1}),
        (SaveOptions, {"snapshot": "view", "compression": None}),
        (LoadOptions, {"host_bytes_max": 1, "io_mode": "pread", "timeout_s": 1}),
        (LoadOptions, {"io_mode": "memmap", "donatable": True, "release_like": True}),
    ],
)
def test_values_at_the_edge_are_taken(kind, fields):
    made = kind(**fields)
    assert {name: getattr(made, name) for name in fields} == fields


def test_defaults_are_those_of_the_documentation():
    assert SaveOptions() == SaveOptions(
        host_bytes_max=None,
        piece_bytes_max=64 << 20,
        pack_below=1 << 20,
        compression=None,
        snapshot="auto",
        timeout_s=None,
    )
    assert LoadOptions() == LoadOptions(
        host_bytes_max=256 << 20,
        io_mode="auto",
        donatable=False,
        release_like=False,
        timeout_s=None,
        on_report=None,
    )


@pytest.mark.parametrize("kind", [SaveOptions, LoadOptions])
def test_fields_are_given_by_name_and_never_change(kind):
    assert all(p.kind is p.KEYWORD_ONLY for p in inspect.signature(kind).parameters.values())
    with pytest.raises(AttributeError, match="cannot assign to field"):
        kind().timeout_s = 1


@pytest.mark.parametrize("kind", [SaveOptions, LoadOptions])
def test_a_misspelt_field_is_a_type_error(kind):
    with pytest.raises(TypeError, match="unexpected keyword argument 'timeout'"):
        kind(timeout=1)
