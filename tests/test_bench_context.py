"""The benchmark of split attention: every split is really run both ways, and the rival computes the same."""

import re

import pytest

from gpt2lab import cli

pytestmark = pytest.mark.live
SMALL = ["bench", "context", "--worlds=2", "--lengths=64", "--width=8", "--repeat=1"]


def test_all_splits_and_pytorchs_ring_run_and_agree(capsys):
    splits = "contiguous:kv-roots,contiguous:ring,interleaved:kv,zigzag:ring"
    assert cli.main([*SMALL, f"--splits={splits}"]) == 0
    said = capsys.readouterr().out
    for split in splits.split(","):
        ratios = r"[\d.]+ \([\d.]+ to [\d.]+\) of "
        row = (
            rf"{split}, 2 ranks, T=64 +[\d.]+ ms \(.*\), {ratios}serial, {ratios}PyTorch's ring\n +ranks wait"
        )
        assert re.search(row, said), said
    assert "contiguous:ring" in said and "busiest / mean 1.49" in said and "busiest / mean 1.00" in said
    differs = re.search(r"PyTorch's ring, 2 ranks, T=64 .*\n +results differ by (\S+)", said)
    assert differs and float(differs[1]) < 1e-5, said


def test_windowed_splits_run_with_a_window(capsys):
    assert cli.main([*SMALL, "--splits=contiguous:halo-kv", "--window=5"]) == 0
    assert "contiguous:halo-kv" in capsys.readouterr().out
