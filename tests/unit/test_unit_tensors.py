"""What errors of files mean."""

import errno
import os

import pytest

from jaxshard._errors import CorruptionError, Kind, StorageError
from jaxshard._tensors import read_error, require_length, write_error

WHERE, FILE = "leaf 'w', piece 3", "a-1/data/w/c/3"


def failed(number):
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_is_told_from_other_failures(number):
    error = write_error(failed(number), "w", FILE)
    assert (type(error), error.kind) == (StorageError, Kind.NO_SPACE)
    assert "hint: free some space" in str(error)
    assert write_error(failed(errno.EIO), "w", FILE).kind == Kind.STORAGE
    assert (
        write_error(ValueError("x [OS error 28: ENOSPC No space left on device]"), None, FILE).kind
        == Kind.NO_SPACE
    )


def test_a_failed_read_is_no_damage_unless_the_file_is_missing():
    error = read_error(failed(errno.EIO), WHERE, FILE)
    assert (type(error), error.kind) == (StorageError, Kind.STORAGE)
    assert str(error) == f"{WHERE}, file {FILE!r}: cannot be read: Input/output error"
    for number in (errno.ENOENT, errno.ENOTDIR):
        error = read_error(failed(number), WHERE, FILE)
        assert (type(error), error.kind) == (CorruptionError, Kind.DATA_MISSING)


def test_too_little_memory_is_nobodys_damage():
    error = MemoryError("1,000 bytes")
    assert read_error(error, WHERE, FILE) is error
    assert write_error(error, "w", FILE) is error


def test_a_file_of_another_length_is_damaged():
    require_length(WHERE, FILE, 5, 5)
    with pytest.raises(CorruptionError, match="expected 5 bytes, found 4"):
        require_length(WHERE, FILE, 4, 5)
    with pytest.raises(CorruptionError, match="expected to exist, found nothing"):
        require_length(WHERE, FILE, None, 5)
