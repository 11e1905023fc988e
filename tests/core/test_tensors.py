"""A matrix and the tensors that are views of it."""

import torch

from hardy.core import tensors


def test_flatten_gives_back_the_matrix_that_tensors_are_views_of():
    like = {"b": torch.zeros(3, 2, 2), "a": torch.zeros(3, 5), "n": torch.zeros(3, dtype=torch.int64)}
    matrix = torch.arange(27.0).view(3, 9)
    views = tensors.unflatten(matrix, like)
    assert {n: tuple(t.shape) for n, t in views.items()} == {"a": (3, 5), "b": (3, 2, 2)}
    assert tensors.flatten(views, matrix).data_ptr() == matrix.data_ptr()
    copied = tensors.flatten(tensors.copies(views), matrix)
    assert torch.equal(copied, matrix) and copied.data_ptr() != matrix.data_ptr()
    one = tensors.flatten({"a": views["a"]}, matrix)  # a part of the matrix is not the matrix
    assert torch.equal(one, matrix[:, :5])
    other = {"a": views["a"] + 1, "b": views["b"]}
    assert torch.equal(tensors.flatten(other, matrix)[:, :5], matrix[:, :5] + 1)
