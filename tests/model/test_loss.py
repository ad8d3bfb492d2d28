import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from partita.model import loss as module
from partita.model.loss import IGNORE, vocabulary_loss


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of a few rows, so that small tensors have several and a last uneven one."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 3 * 11 * 4)


def case(shape=(2, 7), vocab=11, dtype=torch.float64, ignored=(1, 5)):
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(*shape, vocab, generator=g, dtype=torch.float64)
    targets = torch.randint(0, vocab, shape, generator=g)
    targets.view(-1)[list(ignored)] = IGNORE
    return logits.to(dtype), targets


def reference(logits, targets):
    x = logits.detach().double().requires_grad_()
    out = F.cross_entropy(x.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORE)
    return out, torch.autograd.grad(out, x)[0]


def test_gradcheck():
    logits, targets = case()
    assert torch.autograd.gradcheck(lambda x: vocabulary_loss(x, targets), logits.requires_grad_())


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("shape", [(13,), (2, 7), (2, 3, 5), (1,), (0,)])
def test_equals_cross_entropy(dtype, limit, shape):
    logits, targets = case(shape, dtype=dtype, ignored=(0,) if shape != (0,) else ())
    want, want_grad = reference(logits, targets)
    x = logits.requires_grad_()
    got = vocabulary_loss(x * 1, targets)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert got.double().item() == pytest.approx(want.item(), rel=1e-6)
    (got * 0.25).backward()
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad.double(), want_grad * 0.25, atol=limit, rtol=limit)


def test_one_position_without_leading_dims():
    logits, targets = case((1,), ignored=())
    assert vocabulary_loss(logits[0], targets[0]).item() == pytest.approx(reference(logits, targets)[0].item())


def test_gradient_lies_in_the_storage_of_the_logits():
    logits, targets = case()
    y = logits.requires_grad_() * 1
    seen = []
    y.register_hook(seen.append)
    vocabulary_loss(y, targets).backward()
    assert seen[0].data_ptr() == y.data_ptr()


@pytest.mark.parametrize("take", [lambda x: x, lambda x: x[:, :-1], lambda x: x.flatten(0, 1)])
def test_a_leaf_keeps_its_values(take):
    logits, targets = case()
    x = logits.clone().requires_grad_()
    t = take(targets) if take(x).dim() == 3 else targets.flatten()
    out = vocabulary_loss(take(x), t)
    out.backward(retain_graph=True)
    once = x.grad.clone()
    out.backward()
    assert torch.equal(x.detach(), logits)
    torch.testing.assert_close(x.grad, 2 * once)


@pytest.mark.parametrize(
    "shape, cut",
    [
        ((3, 8), lambda x: x[:, :-1]),
        ((3, 8), lambda x: x.transpose(0, 1)),
        ((4, 3, 8), lambda x: x[:, ::2, 1:]),
        ((3, 8), lambda x: x[:, :1].expand(3, 4, *x.shape[2:])),
    ],
)
def test_non_contiguous(shape, cut):
    logits, _ = case(shape)
    x = logits.requires_grad_()
    targets = torch.arange(cut(x)[..., 0].numel()).remainder(11).reshape(cut(x).shape[:-1])
    want, _ = reference(cut(x), targets)
    want_grad = torch.autograd.grad(
        F.cross_entropy(cut(x).reshape(-1, 11), targets.flatten(), reduction="sum"), x, retain_graph=True
    )[0]
    got = vocabulary_loss(cut(x * 1), targets)
    got.backward()
    assert got.item() == pytest.approx(want.item(), rel=1e-12)
    torch.testing.assert_close(x.grad, want_grad)


def test_all_ignored_is_zero_with_zero_gradient():
    logits, targets = case()
    logits[0, 0] = float("inf")  # an ignored position may hold anything
    x = logits.requires_grad_()
    out = vocabulary_loss(x * 1, torch.full_like(targets, IGNORE))
    out.backward()
    assert out.item() == 0 and torch.equal(x.grad, torch.zeros_like(x))


def test_a_second_backward_is_refused():
    logits, targets = case()
    out = vocabulary_loss(logits.requires_grad_() * 1, targets)
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cannot run backward again"):
        out.backward()


def test_another_reader_of_the_logits_is_told():
    logits, targets = case()
    y = logits.requires_grad_() * 1
    other = (y * y).sum()
    vocabulary_loss(y, targets).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_full_copy(monkeypatch, dtype):
    monkeypatch.setattr(module, "CHUNK_BYTES", 2**16)
    hidden = torch.randn(512, 4, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(4, 1024, bias=False, dtype=dtype)
    targets = torch.randint(0, 1024, (512,))
    full, chunk = 512 * 1024 * dtype.itemsize, 2**16

    def peak(loss):
        with MemTracker() as tracker:
            loss(head(hidden), targets).backward()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    # The logits, which become the gradient, a few chunks, and a few numbers per row.
    assert full <= peak(vocabulary_loss) < full + 4 * chunk
    assert peak(lambda x, t: F.cross_entropy(x.float(), t, reduction="sum")) > full + 2 * 512 * 1024 * 4


def test_fake_and_meta_tensors():
    logits, targets = case(dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        x = mode.from_tensor(logits).requires_grad_()
        out = vocabulary_loss(x * 1, mode.from_tensor(targets))
        out.backward()
        assert out.shape == () and x.grad.shape == x.shape
    x = logits.to("meta").requires_grad_()
    vocabulary_loss(x * 1, targets.to("meta")).backward()
    assert x.grad.dtype == torch.bfloat16


def test_bad_targets():
    logits, targets = case()
    with pytest.raises(ValueError, match=r"need targets of shape \(2, 7\), found \(7,\)"):
        vocabulary_loss(logits, targets[0])
    with pytest.raises(ValueError, match="int64"):
        vocabulary_loss(logits, targets.float())
