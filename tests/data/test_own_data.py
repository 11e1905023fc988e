"""Arrays of any type, labels of any kind, and what is refused about them."""

import logging

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from hardy.data.given import arrays, as_data
from hardy.data.own_data import Raw, Reading, own_dataset
from hardy.errors import HardyError

Y = np.array([0, 1, 0, 1])


def images(dtype=np.uint8, shape=(4, 3, 2), top=255):
    return (np.arange(np.prod(shape)).reshape(shape) % (top + 1)).astype(dtype)


def first(x, y=Y, **options):
    """The training inputs of one domain whose test rows are the same."""
    return arrays(x, y, x, y, **options).domains[0]


def test_bytes_stay_bytes_and_uint16_is_divided_by_its_greatest_value():
    assert first(images()).x_train.dtype == np.uint8
    deep = np.array([0, 1, 32768, 65535], np.uint16).repeat(6).reshape(4, 3, 2)
    data = first(deep)
    assert data.x_train.dtype == np.float32 and data.x_train.shape == (4, 3, 2, 1)
    np.testing.assert_allclose(data.x_train[:, 0, 0, 0], [0, 1 / 65535, 32768 / 65535, 1], rtol=1e-6)


def test_floats_in_the_unit_range_are_kept_and_others_need_a_range():
    x = np.linspace(0, 1, 24).reshape(4, 3, 2)
    np.testing.assert_allclose(first(x).x_train[..., 0], x, rtol=1e-6)
    with pytest.raises(HardyError, match=r"pixels run from -1\.0 to 1\.0; floats must be .*data\.range = \[-1"):
        first(2 * x - 1)
    with pytest.raises(HardyError, match=r"data\.range = \[0, 255\]"):
        first(x * 255)
    with pytest.raises(HardyError, match="int64 has no usual range"):
        first(images(np.int64))
    np.testing.assert_allclose(first(2 * x - 1, value_range=(-1.0, 1.0)).x_train[..., 0], x, atol=1e-6)
    with pytest.raises(HardyError, match=r"row 0 \(counted from 0\) holds -1\.0, outside data\.range = \[0, 1\]"):
        first(2 * x - 1, value_range=(0.0, 1.0))
    with pytest.raises(HardyError, match=r"data\.range is \[1\.0, 0\.0\]; the first number must be below"):
        first(x, value_range=(1.0, 0.0))


def test_twelve_bits_in_uint16():
    x = np.array([0, 4095, 2047, 1], np.uint16).repeat(4).reshape(4, 2, 2)
    np.testing.assert_allclose(
        first(x, value_range=(0, 4095)).x_train[:, 0, 0, 0], [0, 1, 2047 / 4095, 1 / 4095], rtol=1e-6
    )


def test_any_number_of_channels_and_both_layouts():
    x = images(shape=(4, 6, 5, 7))
    assert arrays(x, Y, x, Y).shape == (7, 6, 5)
    planes = images(shape=(4, 3, 6, 5))
    with pytest.raises(HardyError, match=r'\[4, 3, 6, 5\], which looks like channels first. Say channels = "first"'):
        arrays(planes, Y, planes, Y)
    data = arrays(planes, Y, planes, Y, channels="first")
    assert data.shape == (3, 6, 5)
    np.testing.assert_array_equal(data.domains[0].x_train, planes.transpose(0, 2, 3, 1))
    tensor = torch.from_numpy(planes)
    assert arrays(tensor, torch.from_numpy(Y), tensor, torch.from_numpy(Y)).shape == (3, 6, 5)


def test_vectors_have_a_box_only_with_a_range():
    x = np.array([[50.0, 3], [60, 1], [70, 2], [80, 0]])
    data = arrays(x, Y, x, Y)
    assert (data.shape, data.bounded) == ((2,), False)
    np.testing.assert_array_equal(data.domains[0].x_train, x.astype(np.float32))
    boxed = arrays(x, Y, x, Y, value_range=(0.0, 100.0))
    assert boxed.bounded
    np.testing.assert_allclose(boxed.domains[0].x_train, x / 100, rtol=1e-6)
    assert arrays(images(shape=(4, 9)), Y, holdout=0).domains[0].x_train.dtype == np.float32


def test_words_become_classes_in_the_order_of_the_alphabet_or_in_the_one_given():
    y = np.array(["cat", "ant", "bee", "ant"])
    data = arrays(images(), y, images()[:1], y[:1])
    assert data.classes == ("ant", "bee", "cat")
    assert data.domains[0].y_train.tolist() == [2, 0, 1, 0] and data.domains[0].y_test.tolist() == [2]
    data = arrays(images(), y, images(), y, classes=["cat", "bee", "ant", "dog"])
    assert data.domains[0].y_train.tolist() == [0, 2, 1, 2] and len(data.classes) == 4
    with pytest.raises(HardyError, match=r"row 2 \(counted from 0\) has the label 'bee'; classes are ant, cat"):
        arrays(images(), y, images(), y, classes=["ant", "cat"])
    with pytest.raises(HardyError, match="classes is 3, but labels are words"):
        arrays(images(), y, classes=3)
    with pytest.raises(HardyError, match=r"row 3 \(counted from 0\) has no label"):
        arrays(images(), ["a", "b", "a", " "])


def test_labels_from_one_are_noticed(caplog):
    with caplog.at_level(logging.WARNING, "hardy"):
        data = arrays(images(), [1, 2, 3, 1], images(), [1, 2, 3, 1])
    assert data.classes == ("1", "2", "3") and data.domains[0].y_train.tolist() == [0, 1, 2, 0]
    assert caplog.messages == ["arrays: labels run from 1 to 3; they are taken as classes 0 to 2."]
    named = arrays(images(), [1, 2, 3, 1], images(), [1, 2, 3, 1], classes=["a", "b", "c"])
    assert named.classes == ("a", "b", "c") and named.domains[0].y_train.tolist() == [0, 1, 2, 0]
    kept = arrays(images(), [1, 2, 3, 1], images(), [1, 2, 3, 1], classes=4)  # one class without a row
    assert kept.domains[0].y_train.tolist() == [1, 2, 3, 1]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([2, 5, 2, 5], "has the labels 2, 5: none is 0, and they are not 1, 2, 3"),
        ([-1, 1, -1, 1], "training labels run from -1 to 1; allowed are 0 to"),
        ([0, 1, 0.5, 1], r"row 2 \(counted from 0\) has the label 0\.5"),
        ([0, 1, np.nan, 1], r"row 2 \(counted from 0\) has the label nan"),
        (np.eye(4), r"labels are float64 \[4, 4\]; give one for each of the 4 rows\. One-hot rows become labels"),
        ([0, 1], r"labels are int64 \[2\]; give one for each of the 4 rows"),
    ],
)
def test_labels_that_mean_nothing(y, message):
    with pytest.raises(HardyError, match=message):
        arrays(images(), y)


def test_columns_of_labels_and_whole_floats_are_fine():
    assert arrays(images(), Y[:, None], holdout=0).domains[0].y_train.tolist() != []
    assert sorted(arrays(images(), Y.astype(float), holdout=0).domains[0].y_train.tolist()) == [0, 0, 1, 1]


def test_a_row_that_is_no_number_is_named():
    x = np.zeros((4, 3))
    x[2, 1] = np.nan
    with pytest.raises(HardyError, match=r"arrays: training row 2 \(counted from 0\) holds nan; fill in a number"):
        arrays(x, Y)
    x[2, 1], x[3, 0] = 1e300, np.inf
    with pytest.raises(HardyError, match=r"row 2 \(counted from 0\) holds 1e\+300, and 1 more rows"):
        arrays(x, Y)
    with pytest.raises(HardyError, match=r"test row 0 .* holds nan"):
        arrays(np.zeros((4, 2, 2)), Y, np.full((4, 2, 2), np.nan), Y)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(4), r"inputs are \[4\]; make them images \[N, H, W\]"),
        (np.array(["a"] * 4), "inputs are <U1 .*; make them numbers"),
        (np.zeros((0, 3, 2)), "which is empty; give at least one row"),
        ([[1, 2], [3]], "not of one shape"),
    ],
)
def test_inputs_that_mean_nothing(x, message):
    with pytest.raises(HardyError, match=message):
        arrays(x, Y)


def test_sites_of_unlike_types_meet_in_the_unit_range():
    data = arrays({"a": (images(), Y), "b": (images(np.uint16) * np.uint16(257), Y)}, holdout=0)
    a, b = data.domains
    assert a.x_train.dtype == b.x_train.dtype == np.float32
    np.testing.assert_allclose(np.sort(a.x_train.ravel()), np.sort(b.x_train.ravel()), rtol=1e-6)
    with pytest.raises(HardyError, match=r"several shapes \(\[2, 2, 1\] in b, \[3, 2, 1\] in a\)"):
        arrays({"a": (images(), Y), "b": (images(shape=(4, 2, 2)), Y)})


def test_rows_nobody_split_give_a_fifth_of_each_class_to_testing():
    x, y = np.arange(30.0)[:, None], np.repeat([0, 1], [20, 10])
    data = arrays(x, y).domains[0]
    assert np.bincount(data.y_test).tolist() == [4, 2] and np.bincount(data.y_train).tolist() == [16, 8]
    assert sorted([*data.x_train[:, 0], *data.x_test[:, 0]]) == list(range(30))
    assert data.y_train.tolist() != sorted(data.y_train.tolist()), "rows are shuffled"
    np.testing.assert_array_equal((data.x_train[:, 0] >= 20).astype(int), data.y_train)
    assert len(arrays(x, y, holdout=0).domains[0].x_test) == 0
    with pytest.raises(HardyError, match=r"holdout is 1; it must be in \[0, 1\)"):
        arrays(x, y, holdout=1)
    single = arrays(x[:1], [0]).domains[0]
    assert (len(single.x_train), len(single.x_test)) == (1, 0)


class _Pairs(TorchDataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return self.rows[at]


def test_data_from_python():
    x, y = torch.rand(10, 3, 8, 8), torch.arange(10) % 2
    pool = as_data((x, y, x[:4], y[:4]))
    assert (pool.natural, pool.shape, len(pool.domains[0].x_test)) == (False, (3, 8, 8), 4)
    torch_sets = as_data((TensorDataset(x, y), TensorDataset(x[:4], y[:4])))
    np.testing.assert_array_equal(torch_sets.domains[0].x_train, pool.domains[0].x_train)
    assert len(as_data(TensorDataset(x, y)).domains[0].x_test) == 2
    clients = as_data([(x.numpy().transpose(0, 2, 3, 1), y), (x, y, x[:1], y[:1])])
    assert clients.natural and [domain.name for domain in clients.domains] == ["client 0", "client 1"]
    by_name = as_data({"north": TensorDataset(x, y), "south": (x, y)})
    assert [domain.name for domain in by_name.domains] == ["north", "south"]
    assert as_data(pool) is pool
    pictures = _Pairs([(np.zeros((4, 4, 3), np.uint8), "cat"), (np.zeros((4, 4, 3), np.uint8), "dog")])
    assert as_data(pictures, holdout=0).classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "data is int; it must be"),
        ("mnist", "data is str; it must be"),
        ((images(), None), "data has no labels; give x_train, y_train"),
        ((images(), Y, images()), "data has 3 arrays"),
        ((images(), Y, images(), None), "has one of x_test and y_test"),
        ([images()], "data: client 0 is ndarray; it must be"),
        ({}, "data has no domains"),
        (_Pairs([(1, 2, 3)]), r"row 0 of the torch data set is no pair"),
        (_Pairs([]), "the torch data set is empty"),
        (_Pairs([(np.zeros(2), 0), (np.zeros(3), 1)]), r"have the shapes \[\(2,\), \(3,\)\]"),
    ],
)
def test_data_from_python_that_cannot_be(data, message):
    with pytest.raises(HardyError, match=message):
        as_data(data)


def test_a_range_has_no_effect_on_built_data():
    with pytest.raises(HardyError, match="no effect on data that are built already"):
        as_data(arrays(images(), Y), value_range=(0, 1))


def test_clients_are_shuffled_so_that_their_last_rows_are_of_all_classes():
    x, y = np.arange(40.0)[:, None], np.repeat([0, 1], 20)
    data = own_dataset("d", {"a": Raw(x, y, x, y)}, Reading(), natural=True).domains[0]
    assert set(data.y_train[-10:].tolist()) == {0, 1}
    np.testing.assert_array_equal((data.x_train[:, 0] >= 20).astype(int), data.y_train)
    np.testing.assert_array_equal(data.x_test, x.astype(np.float32))
