"""How many files one gradient goes through where ranks share it: a bar for whoever adds one."""

from benchmarks.trace import trace
from tests.distributed.launcher import run


def files_visited(_, shard):
    return sorted(set(trace(shard).calls))


def test_one_gradient_goes_through_16_files_at_most_under_gradients():
    first, second = run(files_visited, 2, "gradients")
    assert "reduction/votes.py" in first
    assert len(first) <= 16, first
    assert len(second) <= 16, second
