"""The one-line digest is equal exactly when the tensors are, bit for bit."""

import pytest
import torch

from gpt2lab.machine.checksum import summ


def test_shape_first_value_and_checksum_are_shown():
    assert summ(torch.full((128, 4), 0.5)).startswith("128x4[0.5...] ")
    assert summ(torch.tensor(3.0)).startswith("scalar[3...] ") and summ(torch.zeros(2, 0)).startswith(
        "2x0[] "
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_any_changed_element_changes_the_checksum(dtype):
    x = torch.arange(24).reshape(4, 6).to(dtype)
    seen = {summ(x)}
    for i in range(x.numel()):
        y = x.clone()
        y.view(-1)[i] += 1
        seen.add(summ(y)[-6:])
    assert len(seen) == x.numel() + 1 and summ(x.clone()) == summ(x)


def test_the_last_bit_the_shape_and_the_type_count():
    x = torch.ones(6, dtype=torch.float64)
    near = x.clone()
    near[5] = torch.nextafter(near[5], torch.tensor(2.0, dtype=torch.float64))
    assert len({summ(t)[-6:] for t in (x, near, x.view(2, 3), x.float(), -x, x * 0, x * -0.0)}) == 7


def test_strides_and_gradients_do_not_count():
    x = torch.arange(6.0).reshape(2, 3)
    assert summ(x.t().contiguous().t()) == summ(x.requires_grad_()) == summ(x.detach())
