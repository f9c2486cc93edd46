"""Choosing the next token: greedy, and draws whose shares are those of the warped distribution."""

import pytest
import torch

from remoe_cli.offload.sampling import chooser, Sampling

LOGITS_BV = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]))


def shares(sampling: Sampling, draws: int = 4000) -> torch.Tensor:
    """[B, V], how often each entry was drawn."""
    choose = chooser(sampling, "cpu")
    drawn_BN = torch.cat([choose(LOGITS_BV) for _ in range(draws)], 1)
    return torch.stack([torch.bincount(row, minlength=4) / draws for row in drawn_BN])


def test_without_sampling_the_likeliest():
    assert chooser(None, "cpu")(LOGITS_BV).tolist() == [[0], [3]]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.7), [0.625, 0.375, 0, 0]),  # .5 alone does not reach .7
        (Sampling(top_p=0.9), [0.5263, 0.3158, 0.1579, 0]),
        (Sampling(temperature=0.5), [0.6849, 0.2466, 0.0616, 0.0068]),  # squares, to one sum
        (Sampling(temperature=0.5, top_k=2), [0.7353, 0.2647, 0, 0]),
        (Sampling(temperature=1e-3), [1, 0, 0, 0]),
    ],
)
def test_draws_have_the_shares_of_the_warped_distribution(sampling, expected):
    """4000 draws: three standard deviations are at most .024."""
    found = shares(sampling)
    assert found[0].tolist() == pytest.approx(expected, abs=0.024)
    assert found[1].flip(0).tolist() == pytest.approx(expected, abs=0.024), "each row by itself"
    assert all((found[0][at] == 0) == (share == 0) for at, share in enumerate(expected))


def test_the_same_seed_draws_the_same_and_another_seed_another():
    def drawn(seed: int) -> list[int]:
        choose = chooser(Sampling(seed=seed), "cpu")
        return torch.cat([choose(LOGITS_BV) for _ in range(32)]).flatten().tolist()

    assert drawn(0) == drawn(0) != drawn(1)
    first, second = chooser(Sampling(), "cpu"), chooser(Sampling(), "cpu")
    torch.manual_seed(7)  # nobody else's random numbers matter
    assert [first(LOGITS_BV).tolist() for _ in range(8)] == [second(LOGITS_BV).tolist() for _ in range(8)]


def test_low_precision_logits_are_warped_in_float32():
    logits_BV = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    low, full = (chooser(Sampling(temperature=0.7, top_p=0.9), "cpu") for _ in range(2))
    assert [low(logits_BV).item() for _ in range(64)] == [full(logits_BV.float()).item() for _ in range(64)]
