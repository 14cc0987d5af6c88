"""Products by oneDNN and the depthwise gradient, against torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clipcil.clip import layers
from clipcil.clip.trunk import Convolution

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def apart(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """The largest difference, as a share of the largest value of each tensor."""
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(ours, exact, strict=True))


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (1, 1)], ids=str)
def test_a_linear_layer_by_onednn_is_exact(shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "blas_is_slow", lambda: True)
    torch.manual_seed(0)
    hidden = torch.randn(11, *shape).movedim(0, -1)  # not contiguous
    given = [hidden, torch.randn(6, 11), *([torch.randn(6)] if bias else [])]
    direction = torch.randn(*shape, 6)

    def result(linear, tensors) -> tuple[Tensor, ...]:
        tensors = [each.detach().requires_grad_() for each in tensors]
        out = linear(*tensors)
        return out.detach(), *torch.autograd.grad((out.tanh() * direction.to(out)).sum(), tensors)

    assert apart(result(layers.linear, given), result(F.linear, [each.double() for each in given])) < 1e-5


@needs_onednn
def test_other_numbers_and_no_rows_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "blas_is_slow", lambda: True)
    monkeypatch.setattr(layers.OneDNNLinear, "apply", lambda *tensors: pytest.fail("not for these"))
    layer = layers.Linear(4, 3)
    assert layer(torch.ones(0, 4)).shape == (0, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 4)).dtype == torch.bfloat16
    assert layer.double()(torch.ones(2, 4).double()).dtype == torch.float64


@needs_onednn
def test_an_exported_layer_runs_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "blas_is_slow", lambda: True)
    rows = ({0: torch.export.Dim("rows", min=1, max=64)},)
    program = torch.export.export(layers.Linear(4, 3), (torch.ones(2, 4),), dynamic_shapes=rows)
    assert "mkldnn" not in str(program.graph) and "linear" in str(program.graph)


@pytest.mark.parametrize(("kernel", "side"), [(5, 4), (5, 8), (7, 3), (5, 1)])
def test_the_gradient_of_a_depthwise_convolution_is_exact(kernel: int, side: int) -> None:
    torch.manual_seed(0)
    layer = Convolution(6, 6, kernel, groups=6).requires_grad_(True)
    values = layer.weight.data.normal_(), layer.bias.data.normal_()
    x = torch.randn(3, 6, side, side).contiguous(memory_format=torch.channels_last).requires_grad_()
    ours = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight, layer.bias))
    dense = [each.detach().double().requires_grad_() for each in (x, *values)]
    out = F.hardtanh(F.conv2d(*dense, padding=kernel // 2, groups=6), 0.0, 6.0)
    assert apart(ours, torch.autograd.grad(out.square().sum(), dense)) < 1e-6
