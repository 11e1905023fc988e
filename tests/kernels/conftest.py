"""Without a GPU the kernels run on Triton's interpreter: see tests/conftest.py."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")
