"""The table of passes by their number of tokens."""

from __future__ import annotations

from cairn_bench.times.passes import rows_of


def test_each_number_of_tokens_is_a_row():
    """Its times beside mlx-lm's, and one pass over twice as many beside two."""
    ours = [(0.010, 0.012, 0.011), (0.016, 0.016, 0.016), (0.040, 0.040, 0.041)]
    theirs = [(0.010,) * 3, (0.020,) * 3, (0.020,) * 3]
    assert rows_of((8, 16, 64), ours, theirs) == [
        ("8", "11.0", "10.0", "1.10", "0.73"),
        ("16", "16.0", "20.0", "0.80", ""),
        ("64", "40.0", "20.0", "2.00", ""),
    ]
