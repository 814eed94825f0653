"""The one comparison of tensors that tests use."""

import torch


def assert_close(found, want, atol=0.0, rtol=0.0, cosine=None):
    """found equals want: NaN in the same places, |difference| <= atol + rtol * |want| elsewhere, and, if asked, the
    cosine of the whole at least `cosine`. Names the worst element by its coordinates."""
    found, want = torch.as_tensor(found), torch.as_tensor(want)
    assert found.shape == want.shape, f"shape {list(found.shape)}, want {list(want.shape)}"
    found, want = found.double(), want.double()
    assert torch.equal(found.isnan(), want.isnan()), f"{int((found.isnan() != want.isnan()).sum())} NaN out of place"
    excess = (found - want).abs().where(found != want, 0.0).nan_to_num() - atol - rtol * want.abs().nan_to_num()
    if excess.numel() and excess.max() > 0:
        at = [int(i) for i in torch.unravel_index(excess.argmax(), excess.shape)]
        bad = float((excess > 0).double().mean())
        raise AssertionError(f"at {at}: {float(found[tuple(at)])!r}, want {float(want[tuple(at)])!r}; {bad:.1%} beyond")
    if cosine is not None:
        value = float(torch.cosine_similarity(found.flatten(), want.flatten(), dim=0))
        assert value >= cosine, f"cosine {value}"


def assert_same_bits(found, want):
    """found equals want to the last bit; NaN nowhere."""
    assert_close(found, want)
    assert not torch.as_tensor(want).isnan().any(), "NaN"
