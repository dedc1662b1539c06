"""What several chapters make of finished runs."""

import pytest

from gramlin.chapters import paired_interval


def test_paired_interval_is_students():
    # By hand: differences 1, 2, 3 have mean 2, standard error 1/√3, and t(0.975, 2) = 4.3026527.
    low, high = paired_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.3026527 / 3**0.5, 2 + 4.3026527 / 3**0.5))
    with pytest.raises(ValueError, match="two pairs"):
        paired_interval([1.0], [2.0])
