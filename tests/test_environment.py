"""What the machine says when it has no more memory."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from remoe_cli.environment import out_of_memory


@pytest.mark.parametrize("ask", [lambda: torch.empty(2**55), lambda: np.empty(2**55), lambda: bytearray(2**60)])
def test_no_memory_is_told_from_other_errors(ask):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        ask()
    assert out_of_memory(caught.value)


@pytest.mark.gpu
def test_no_memory_of_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**45, device="cuda")
    assert out_of_memory(caught.value)


def test_other_errors_are_not_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert not out_of_memory(caught.value)
    assert not out_of_memory(ValueError("out of memory")) and not out_of_memory(KeyboardInterrupt())


def test_torch_is_not_imported_for_it():
    code = "import sys; from remoe_cli.environment import out_of_memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
