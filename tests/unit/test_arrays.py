"""Datasets of arrays: rows, dtypes, files that stay on the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fsdpc.data import ArrayDataset, DistributedSampler, Loader


def test_items_are_rows_of_each_array(tmp_path: Path) -> None:
    images = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
    labels = np.array([0, 255, 2, 3, 4, 5], np.uint8)
    np.save(tmp_path / "images.npy", images.astype(">f4"))
    data = ArrayDataset(tmp_path / "images.npy", labels)
    assert isinstance(data._arrays[0], np.memmap) and len(data) == 6
    x, y = data.batch([5, 1], np.int32)
    assert np.array_equal(x, images[[5, 1]]) and x.dtype == np.float32 and x.flags.c_contiguous
    assert type(x) is np.ndarray and x.dtype.isnative
    assert y.tolist() == [5, 255] and y.dtype == np.int32
    x, y = data[1]
    assert x.shape == (2, 2) and y == 255 and y.dtype == np.int64
    x[:] = 0
    assert np.array_equal(data[1][0], images[1])  # a copy
    assert ArrayDataset(np.array([True, False]))[0][0] == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_floats_stay_as_they_are(dtype: type) -> None:
    assert ArrayDataset(np.zeros((3, 2), dtype)).batch([0])[0].dtype == dtype


def test_a_loader_takes_them() -> None:
    data = ArrayDataset(np.arange(12, dtype=np.float32).reshape(12, 1), np.arange(12))
    samplers = [DistributedSampler(12, rank, 2) for rank in range(2)]
    seen = []
    for sampler in samplers:
        with Loader(data, 3, sampler, epochs=1, workers=2) as batches:
            for x, y in batches:
                assert x.shape == (3, 1) and np.array_equal(x[:, 0], y)
                seen += y.tolist()
    assert sorted(seen) == list(range(12))


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    (tmp_path / "broken.npy").write_bytes(b"no array")
    for arrays, text in [
        ((), "no arrays"),
        ((tmp_path / "words.npy",), r"data file .*words.npy holds <U1; needed are floats"),
        ((tmp_path / "broken.npy",), "data file .*broken.npy is not a valid .npy file"),
        ((np.zeros(3), np.zeros(3, complex)), "array 1 holds complex128"),
        ((np.zeros(3, np.longdouble),), "array 0 holds float128"),
        ((np.zeros((0, 3)),), r"array 0 of shape \(0, 3\) has no rows"),
        ((np.float32(1),), "has no rows"),
        ((np.zeros(3), np.zeros(4)), "array 1 has 4 rows, array 0 has 3"),
    ]:
        with pytest.raises(ValueError, match=text):
            ArrayDataset(*arrays)
    with pytest.raises(FileNotFoundError, match="data file .*none.npy: No such file") as found:
        ArrayDataset(tmp_path / "none.npy")
    assert str(found.value).count("cannot read") == 1
    data = ArrayDataset(np.array([1, 2**31, 3], np.uint32))
    assert data[1][0] == 2**31
    with pytest.raises(ValueError, match="array 0: row 1 has 2147483648, which is no int32"):
        data.batch([0, 1], np.int32)
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"array 0: no row {index}, there are 3"):
            data[index]
