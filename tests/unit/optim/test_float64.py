"""Operations that torch has no float64 of: Mixtral of Hugging Face could not be proved for want of one."""

import pytest
import torch
import torch.nn.functional as F

from shoal.optim.precision import Precision

ENDS = torch.tensor([4, 4, 8], dtype=torch.int32)
"""Three groups, of which the second is empty, as an expert that no token chose."""
SHAPES = [((8, 4), (3, 4, 8)), ((4, 8), (8, 8)), ((3, 4, 8), (8, 8))]


@pytest.mark.parametrize(("first", "second"), SHAPES)
def test_grouped_products_are_there_in_float64_and_float32_keeps_its_bits(first, second):
    torch.manual_seed(1)
    one, two = torch.randn(first, requires_grad=True), torch.randn(second, requires_grad=True)
    before = F.grouped_mm(one, two, offs=ENDS)
    Precision.named("float64")
    assert torch.equal(F.grouped_mm(one, two, offs=ENDS), before)
    wide = [tensor.detach().double().requires_grad_() for tensor in (one, two)]
    product = F.grouped_mm(*wide, offs=ENDS)
    torch.testing.assert_close(product.float(), before)
    torch.autograd.gradcheck(lambda a, b: F.grouped_mm(a, b, offs=ENDS), wide)
