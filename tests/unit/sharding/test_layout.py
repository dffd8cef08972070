"""Properties of the layout: every parameter placed once, every element in one shard, for any number of ranks."""

import itertools
import re

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fusedopt.sharding.layout import ALIGNMENT, ROW_NUMEL, ParamSpec, Span, intersect, plan_buckets

exhaustive = settings(derandomize=True, deadline=None, database=None, max_examples=150)

GIANT = 2**31 + 12345  # what a 32-bit index cannot hold; an odd number
SIZES = st.one_of(
    st.just(0),
    st.integers(1, 200),
    st.sampled_from([ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, ROW_NUMEL - 1, ROW_NUMEL, ROW_NUMEL + 1]),
    st.integers(1, 12).map(lambda num_rows: num_rows * ROW_NUMEL),
    st.integers(1, 100_000),
    st.just(GIANT),
)
KEYS = st.sampled_from([(0, "bfloat16"), (0, "float32"), (1, "bfloat16")])
SPECS = st.lists(st.tuples(SIZES, KEYS), min_size=1, max_size=24).map(
    lambda members: [ParamSpec(f"p{i}", numel, key) for i, (numel, key) in enumerate(members)]
)
BUCKET_NUMELS = st.one_of(st.integers(1, 300), st.integers(1, 200_000), st.just(2**25), st.just(2**30))
WORLD_SIZES = st.integers(1, 8)
SHARD_BY = st.sampled_from(["element", "parameter"])

any_plan = given(specs=SPECS, bucket_numel=BUCKET_NUMELS, world_size=WORLD_SIZES, shard_by=SHARD_BY)


def aligned(numel):
    return -(-numel // ALIGNMENT) * ALIGNMENT


def fill(bucket, specs):
    """Return the elements that the bucket's parameters take, each rounded up to the alignment."""
    return sum(aligned(specs[placement.index].numel) for placement in bucket.placements)


def shards(bucket):
    return [bucket.shard_span(rank) for rank in range(bucket.world_size)]


@exhaustive
@any_plan
def test_every_parameter_is_placed_exactly_once_and_whole(specs, bucket_numel, world_size, shard_by):
    buckets = plan_buckets(specs, bucket_numel, world_size, shard_by)
    placed = [placement for bucket in buckets for placement in bucket.placements]
    assert sorted(placement.index for placement in placed) == list(range(len(specs)))
    assert all(placement.span.numel == specs[placement.index].numel for placement in placed)


@exhaustive
@any_plan
def test_spans_are_disjoint_ascending_aligned_and_inside_their_bucket(specs, bucket_numel, world_size, shard_by):
    for bucket in plan_buckets(specs, bucket_numel, world_size, shard_by):
        assert bucket.placements
        end = 0
        for placement in bucket.placements:
            assert placement.span.start >= end
            assert placement.span.start % ALIGNMENT == 0
            end = placement.span.end
        assert end <= bucket.numel


def test_padding_counts_towards_the_limit_of_a_bucket():
    specs = [ParamSpec("a", ALIGNMENT + 1, "key"), ParamSpec("b", ALIGNMENT + 1, "key")]
    assert len(plan_buckets(specs, 4 * ALIGNMENT)) == 1
    assert len(plan_buckets(specs, 4 * ALIGNMENT - 1)) == 2


@exhaustive
@any_plan
def test_a_bucket_is_over_its_limit_only_for_a_single_parameter(specs, bucket_numel, world_size, shard_by):
    for bucket in plan_buckets(specs, bucket_numel, world_size, shard_by):
        assert fill(bucket, specs) <= bucket_numel or len(bucket.placements) == 1


@exhaustive
@any_plan
def test_a_bucket_ends_only_where_the_next_parameter_would_not_fit(specs, bucket_numel, world_size, shard_by):
    by_key = {}
    for bucket in plan_buckets(specs, bucket_numel, world_size, shard_by):
        by_key.setdefault(bucket.key, []).append(bucket)
    for buckets in by_key.values():
        for bucket, following in itertools.pairwise(buckets):
            first = max(placement.index for placement in following.placements)  # laid out from the last parameter on
            assert fill(bucket, specs) + aligned(specs[first].numel) > bucket_numel


@exhaustive
@any_plan
def test_shards_are_equal_disjoint_and_cover_every_element_once(specs, bucket_numel, world_size, shard_by):
    for bucket in plan_buckets(specs, bucket_numel, world_size, shard_by):
        spans = shards(bucket)
        assert len(spans) == bucket.world_size == world_size
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == bucket.numel
        assert len({span.numel for span in spans}) == 1
        assert spans[0].numel % ROW_NUMEL == 0
        assert spans[0].numel > 0


@exhaustive
@any_plan
def test_every_element_of_a_parameter_is_in_exactly_one_shard(specs, bucket_numel, world_size, shard_by):
    for bucket in plan_buckets(specs, bucket_numel, world_size, shard_by):
        for placement in bucket.placements:
            parts = [part for span in shards(bucket) if (part := intersect(placement.span, span))]
            assert sum(part.numel for part in parts) == placement.span.numel
            assert all(a.end == b.start for a, b in itertools.pairwise(parts))


@exhaustive
@any_plan
def test_parameters_of_different_keys_do_not_share_a_bucket(specs, bucket_numel, world_size, shard_by):
    buckets = plan_buckets(specs, bucket_numel, world_size, shard_by)
    assert {bucket.key for bucket in buckets} == {spec.key for spec in specs}
    assert all(specs[placement.index].key == bucket.key for bucket in buckets for placement in bucket.placements)


@exhaustive
@any_plan
def test_a_plan_depends_on_nothing_but_its_arguments(specs, bucket_numel, world_size, shard_by):
    first = plan_buckets(specs, bucket_numel, world_size, shard_by)
    assert plan_buckets(list(specs), bucket_numel, world_size, shard_by) == first
    renamed = [ParamSpec("renamed", spec.numel, spec.key) for spec in specs]
    assert plan_buckets(renamed, bucket_numel, world_size, shard_by) == first


@exhaustive
@given(specs=SPECS, bucket_numel=BUCKET_NUMELS, world_size=WORLD_SIZES)
def test_by_element_lays_out_in_reverse_order_and_pads_less_than_a_row_a_rank(specs, bucket_numel, world_size):
    last = {}
    for bucket in plan_buckets(specs, bucket_numel, world_size, "element"):
        for placement in bucket.placements:
            assert placement.index < last.get(bucket.key, len(specs))
            last[bucket.key] = placement.index
        padding = bucket.numel - fill(bucket, specs)
        # Each shard is the quotient rounded up (less than one element more) and then up to a row.
        assert 0 <= padding <= world_size * ROW_NUMEL


def rows(*counts):
    return [ParamSpec(f"p{i}", num_rows * ROW_NUMEL, "key") for i, num_rows in enumerate(counts)]


@exhaustive
@example(specs=rows(4, 3, 3), bucket_numel=2**20, world_size=2)  # the last shard is the fullest
@given(specs=SPECS, bucket_numel=BUCKET_NUMELS, world_size=WORLD_SIZES)
def test_by_parameter_keeps_every_parameter_inside_one_shard(specs, bucket_numel, world_size):
    for bucket in plan_buckets(specs, bucket_numel, world_size, "parameter"):
        for placement in bucket.placements:
            homes = [
                span for span in shards(bucket) if span.start <= placement.span.start and placement.span.end <= span.end
            ]
            # An empty span may touch the end of one shard and the start of the next.
            assert len(homes) == 1 or (homes and placement.span.numel == 0)


@exhaustive
@given(specs=SPECS, bucket_numel=BUCKET_NUMELS, world_size=WORLD_SIZES)
def test_by_parameter_balances_the_shards(specs, bucket_numel, world_size):
    for bucket in plan_buckets(specs, bucket_numel, world_size, "parameter"):
        largest = max(aligned(specs[placement.index].numel) for placement in bucket.placements)
        # The shard that ends fullest was the emptiest, so at most average, when its last member came.
        bound = fill(bucket, specs) / world_size + largest
        assert bucket.shard_span(0).numel < bound + ROW_NUMEL + 1


def test_by_parameter_places_the_largest_first():
    (bucket,) = plan_buckets(rows(3, 1, 2, 3, 3), 2**20, world_size=2, shard_by="parameter")
    assert bucket.shard_span(0).numel == 6 * ROW_NUMEL  # 3 + 3 and 3 + 2 + 1; smallest first would end with 1 + 3 + 3


def test_equal_parameters_spread_evenly_over_the_ranks():
    specs = [ParamSpec(f"p{i}", 4096, "key") for i in range(8)]
    for shard_by in ("element", "parameter"):
        (bucket,) = plan_buckets(specs, 2**20, world_size=4, shard_by=shard_by)
        assert bucket.numel == 8 * 4096
        counts = [sum(intersect(p.span, span) is not None for p in bucket.placements) for span in shards(bucket)]
        assert counts == [2, 2, 2, 2]


def test_by_element_cuts_through_a_parameter_where_by_parameter_does_not():
    specs = [ParamSpec("large", 3 * ROW_NUMEL, "key"), ParamSpec("small", 10, "key")]

    def num_parts(shard_by):
        (bucket,) = plan_buckets(specs, 2**20, world_size=4, shard_by=shard_by)
        large = next(p.span for p in bucket.placements if p.index == 0)
        return sum(intersect(large, span) is not None for span in shards(bucket))

    assert num_parts("element") > 1
    assert num_parts("parameter") == 1


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("shard_by", ["element", "parameter"])
def test_a_giant_parameter_gets_a_bucket_of_its_own(world_size, shard_by):
    specs = [ParamSpec("a", 7, "key"), ParamSpec("giant", GIANT, "key"), ParamSpec("b", 0, "key")]
    buckets = plan_buckets(specs, 2**25, world_size, shard_by)
    assert [[p.index for p in bucket.placements] for bucket in buckets] == [[2], [1], [0]]
    giant = buckets[1]
    assert giant.placements[0].span == Span(0, GIANT)
    assert giant.numel >= GIANT > 2**31
    assert giant.numel % (world_size * ROW_NUMEL) == 0


def test_buckets_stay_below_what_a_32_bit_index_holds_at_the_largest_bucket_size():
    specs = [ParamSpec(f"p{i}", 2**28 + 1, "key") for i in range(9)]
    for world_size in range(1, 9):
        buckets = plan_buckets(specs, 2**30, world_size)  # the largest that MainGradConfig lets through
        assert len(buckets) == 3
        assert all(bucket.numel < 2**31 for bucket in buckets)


def test_no_parameters_make_no_buckets():
    assert plan_buckets([], 1024) == ()


def test_a_bucket_of_nothing_but_empty_parameters_still_has_a_row_for_every_rank():
    (bucket,) = plan_buckets([ParamSpec("a", 0, "key"), ParamSpec("b", 0, "key")], 1024, world_size=3)
    assert bucket.numel == 3 * ROW_NUMEL
    assert all(placement.span.numel == 0 for placement in bucket.placements)


@exhaustive
@example(a=(0, 4), b=(4, 8))
@example(a=(2, 2), b=(0, 8))
@given(a=st.tuples(st.integers(0, 30), st.integers(0, 30)), b=st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_intersect_is_the_intersection_of_the_elements(a, b):
    assume(a[0] <= a[1] and b[0] <= b[1])
    common = intersect(Span(*a), Span(*b))
    elements = set(range(*a)) & set(range(*b))
    assert (set() if common is None else set(range(common.start, common.end))) == elements
    assert common is None or common.numel == len(elements) > 0
    assert intersect(Span(*b), Span(*a)) == common


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_numel": 0}, "bucket_numel=0 and world_size=1 must both be at least 1"),
        ({"bucket_numel": -1}, "bucket_numel=-1"),
        ({"world_size": 0}, "world_size=0 must both be at least 1"),
        ({"world_size": -2}, "world_size=-2"),
        ({"shard_by": "row"}, 'shard_by=\'row\' is unknown; use "element" or "parameter"'),
        ({"shard_by": "auto"}, "shard_by='auto' is unknown"),
    ],
)
def test_an_impossible_plan_is_refused_with_what_was_found(arguments, message):
    good = {"specs": [ParamSpec("p", 3, "key")], "bucket_numel": 1024, "world_size": 1, "shard_by": "element"}
    assert len(plan_buckets(**good)) == 1
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_buckets(**{**good, **arguments})


def test_a_negative_size_is_refused_by_the_name_of_its_parameter():
    with pytest.raises(ValueError, match=re.escape("parameter 'w' has numel=-1; sizes cannot be negative")):
        plan_buckets([ParamSpec("ok", 1, "key"), ParamSpec("w", -1, "key")], 1024)


@pytest.mark.parametrize("rank", [-1, 3, 100])
def test_a_rank_that_the_bucket_was_not_cut_for_is_refused(rank):
    (bucket,) = plan_buckets([ParamSpec("p", 3, "key")], 1024, world_size=3)
    with pytest.raises(ValueError, match=re.escape(f"rank {rank} is outside [0, 3)")):
        bucket.shard_span(rank)
