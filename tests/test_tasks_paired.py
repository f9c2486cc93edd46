"""The paired tests by hand, and against every sign and every toss counted out."""

from itertools import product

import numpy as np
import pytest

from remoe_cli.report.paired import compare, Items, mcnemar, sign_flip


def right(*values: float) -> Items:
    return Items(values, [1] * len(values))


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(0, 0, 1), (1, 0, 1), (5, 0, 2 / 32), (0, 5, 2 / 32), (3, 3, 1), (6, 1, 2 * 8 / 128), (10, 0, 2 / 1024)],
)
def test_mcnemar_by_hand(gained, lost, p):
    assert mcnemar(gained, lost) == pytest.approx(p)


@pytest.mark.parametrize("gained", range(6))
@pytest.mark.parametrize("lost", range(6))
def test_mcnemar_is_what_all_tosses_say(gained, lost):
    """As far from even as found, or further, among all tosses of as many coins."""
    found = abs(gained - lost)
    tosses = [abs(2 * sum(one) - len(one)) >= found for one in product((0, 1), repeat=gained + lost)]
    assert mcnemar(gained, lost) == pytest.approx(sum(tosses) / len(tosses))


def test_many_items_do_not_overflow():
    assert mcnemar(5000, 5000) == 1 and 0 < mcnemar(4800, 5200) < 1e-4


@pytest.mark.parametrize("differences", [[1, 1, 1, 1, 1, 1], [2, -1, 3, 0, 1], [0.5, 0.25, -1, 2, 2, 2, -0.5]])
def test_flipped_signs_are_near_what_all_signs_say(differences):
    found = np.array(differences, dtype=float)
    every = [abs(np.dot(signs, found)) >= abs(found.sum()) - 1e-9 for signs in product((-1, 1), repeat=len(found))]
    assert sign_flip(found) == pytest.approx(np.mean(every), abs=0.02)


def test_flipped_signs_of_rights_and_wrongs_are_mcnemars_test():
    differences = np.array([1] * 9 + [-1] * 2 + [0] * 20)
    assert sign_flip(differences) == pytest.approx(mcnemar(9, 2), abs=0.01)
    assert sign_flip(np.zeros(4)) == 1 and sign_flip(differences) == sign_flip(differences)


def test_a_comparison_by_hand():
    found = compare(right(1, 0, 0, 0, 1, 0, 0, 0), right(0, 1, 1, 1, 1, 0, 0, 0))
    assert (found["change"], found["gained"], found["lost"]) == (0.25, 3, 1)
    assert found["test"] == "mcnemar" and found["p"] == pytest.approx(2 * 5 / 16)
    low, high = found["change_95"]
    assert low <= 0.25 <= high and low < 0 < high


def test_items_that_hold_several_things_are_pooled_over_the_things():
    before, after = Items([1, 0, 2], [1, 2, 3]), Items([1, 2, 2], [1, 2, 3])
    assert before.score == 3 / 6 and after.score == 5 / 6
    found = compare(before, after)
    assert found["change"] == pytest.approx(2 / 6)
    assert (found["test"], found["gained"], found["lost"]) == ("sign-flip", None, None)


def test_one_arm_on_its_own_items_only():
    with pytest.raises(ValueError, match="same items"):
        compare(right(1, 0), right(1, 0, 1))
