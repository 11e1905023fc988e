"""Attacks on images. Importing the package registers them."""

from hardy.attacks import affine, autoattack, gradient, square

__all__ = ["affine", "autoattack", "gradient", "square"]
