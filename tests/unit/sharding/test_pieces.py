"""A piece is a span of a parameter in memory order: cut out, put back, and named as blocks of the full shape."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedopt.sharding.checkpoint_parts import (
    CheckpointPart,
    assemble_,
    checkpoint_wants,
    extract,
    from_checkpoint,
    memory_order,
    rectangles,
    to_checkpoint,
    views,
)
from fusedopt.sharding.layout import Span


def numbered(shape, order):
    """Return a dense tensor whose dimensions lie in memory in ``order`` and whose values count its elements there."""
    flat = torch.arange(math.prod(shape), dtype=torch.float32)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([shape[dim] for dim in order]).permute(inverse)


@st.composite
def dense(draw, min_size=0):
    shape = draw(st.lists(st.integers(min_size, 5), max_size=4))
    return numbered(shape, draw(st.permutations(range(len(shape)))))


@st.composite
def dense_with_span(draw):
    param = draw(dense())
    start = draw(st.integers(0, param.numel()))
    return param, Span(start, draw(st.integers(start, param.numel())))


examples = settings(derandomize=True, deadline=None, database=None, max_examples=150)


@examples
@given(dense_with_span())
def test_a_piece_is_the_span_in_memory_order(drawn):
    param, span = drawn
    piece = extract(param, param.stride(), span)
    assert piece.tolist() == list(range(span.start, span.end))
    assert piece.untyped_storage().data_ptr() != param.untyped_storage().data_ptr() or not piece.numel()


@examples
@given(dense_with_span())
def test_strides_of_the_full_tensor_do_not_matter(drawn):
    param, span = drawn
    full = param.contiguous()  # what a checkpoint holds, whatever the parameter's strides
    piece = extract(full, param.stride(), span)
    assert torch.equal(piece, extract(param, param.stride(), span))
    back = torch.full_like(full, -1)
    assemble_(back, piece, param.stride(), span)
    is_inside = (full >= span.start) & (full < span.end)
    assert torch.equal(back, torch.where(is_inside, full, -1.0))


@examples
@given(dense(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_pieces_of_all_ranks_make_the_whole(param, world_size, random):
    cuts = sorted(random.randint(0, param.numel()) for _ in range(world_size - 1))
    spans = [Span(start, end) for start, end in zip([0, *cuts], [*cuts, param.numel()], strict=True)]
    back = torch.full_like(param, -1)
    count = torch.zeros(param.shape, dtype=torch.int64)
    for span in spans:
        assemble_(back, extract(param, param.stride(), span), param.stride(), span)
        for block in rectangles(param.shape, param.stride(), span):
            count[tuple(slice(o, o + s) for o, s in zip(block.offsets, block.sizes, strict=True))] += 1
    assert torch.equal(back, param)
    assert (count == 1).all()  # disjoint and covering, over all ranks


@examples
@given(dense_with_span())
def test_rectangles_are_few_and_consecutive_in_the_piece(drawn):
    param, span = drawn
    blocks = rectangles(param.shape, param.stride(), span)
    assert len(blocks) <= max(1, 2 * param.dim() - 1)
    ends = [0, *(block.span.end for block in blocks)]
    assert [block.span.start for block in blocks] == ends[:-1]
    assert ends[-1] == span.numel
    assert all(math.prod(block.sizes) == block.span.numel > 0 for block in blocks)
    if span.numel == param.numel() > 0:
        assert [block.sizes for block in blocks] == [tuple(param.shape)]


@examples
@given(dense_with_span())
def test_views_share_memory_and_hold_the_blocks(drawn):
    param, span = drawn
    piece = extract(param, param.stride(), span)
    for block, view in zip(
        rectangles(param.shape, param.stride(), span), views(piece, param.shape, param.stride(), span), strict=True
    ):
        index = tuple(slice(o, o + s) for o, s in zip(block.offsets, block.sizes, strict=True))
        assert torch.equal(view, param[index])
        assert view.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()


def test_channels_last_and_contiguous_pieces_differ():
    param = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
    span = Span(0, 7)
    assert memory_order(param.shape, param.stride()) == (0, 2, 3, 1)
    piece = extract(param, param.stride(), span)
    assert torch.equal(piece, param.permute(0, 2, 3, 1).reshape(-1)[:7])
    assert not torch.equal(piece, extract(param, param.contiguous().stride(), span))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "order"), [((7, 5), (0, 1)), ((7, 5), (1, 0)), ((4, 3, 5, 2), (0, 2, 3, 1))])
def test_wrapped_pieces_of_all_ranks_name_every_element_once(shape, order, world_size):
    param = numbered(shape, order)
    share = -(-param.numel() // world_size)
    count = torch.zeros(shape, dtype=torch.int64)
    for rank in range(world_size):
        span = Span(rank * share, min((rank + 1) * share, param.numel()))
        piece = extract(param, param.stride(), span)
        wrapped = to_checkpoint(piece, shape, param.stride(), span)
        assert wrapped.shape == param.shape
        for chunk, item in zip(
            wrapped.__create_chunk_list__(), wrapped.__create_write_items__("x", wrapped), strict=True
        ):
            index = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            assert torch.equal(wrapped.__get_tensor_shard__(item.index), param[index])
            assert item.tensor_data.size == param.shape
            count[index] += 1
    assert (count == 1).all()


@pytest.fixture
def wrapped():
    param = numbered((4, 3), (1, 0))
    return to_checkpoint(extract(param, param.stride(), Span(2, 9)), param.shape, param.stride(), Span(2, 9))


MIDDLE = Span(2, 9)


def unwrap(wrapped, span=MIDDLE):
    return from_checkpoint(wrapped, (4, 3), (1, 4), span)


@pytest.mark.parametrize(
    "copied",
    [
        lambda wrapped: wrapped.detach(),
        lambda wrapped: wrapped.clone(),
        lambda wrapped: wrapped.to(torch.float64).to(torch.float32),
        lambda wrapped: wrapped.to("cpu"),
        copy.copy,
        copy.deepcopy,
        lambda wrapped: pickle.loads(pickle.dumps(wrapped)),
    ],
    ids=["detach", "clone", "cast", "same device", "copy", "deepcopy", "pickle"],
)
def test_a_wrapped_piece_survives_what_checkpointing_does_to_tensors(wrapped, copied):
    again = copied(wrapped)
    assert isinstance(again, CheckpointPart)
    assert unwrap(again).tolist() == list(range(2, 9))


def test_a_move_to_another_device_moves_the_piece(wrapped):
    moved = wrapped.to("meta")
    assert moved.device.type == unwrap(moved).device.type == "meta"


def test_wrapping_shares_memory(wrapped):
    piece = torch.zeros(7)
    assert unwrap(to_checkpoint(piece, (4, 3), (1, 4), Span(2, 9))) is piece
    assert unwrap(wrapped.detach()).data_ptr() == unwrap(wrapped).data_ptr()


def test_a_wrapped_piece_has_no_values_to_calculate_with(wrapped):
    for operation in (lambda: wrapped + 1, lambda: torch.zeros(4, 3).copy_(wrapped), lambda: wrapped.sum().item()):
        with pytest.raises(RuntimeError, match=r"part of a sharded optimizer's state.*consolidate_state_dict"):
            operation()
    assert "elements [2, 9) of (4, 3)" in repr(wrapped)


def test_a_parameter_owned_whole_keeps_its_shape():
    param = numbered((4, 3), (1, 0))
    whole = Span(0, 12)
    wrapped = to_checkpoint(param, param.shape, param.stride(), whole)
    assert [chunk.sizes for chunk in wrapped.__create_chunk_list__()] == [(4, 3)]
    assert from_checkpoint(wrapped, param.shape, param.stride(), whole) is param


def test_a_rank_that_owns_nothing_writes_and_reads_nothing():
    wrapped = to_checkpoint(torch.empty(0), (4, 3), (3, 1), None)
    assert wrapped.shape == (4, 3)
    assert wrapped.__create_chunk_list__() == wrapped.__create_write_items__("x", wrapped) == []
    assert from_checkpoint(wrapped, (4, 3), (3, 1), None).shape == (0,)


def test_a_full_tensor_is_cut_to_the_piece():
    param = numbered((4, 3), (1, 0))
    piece = from_checkpoint(param.contiguous(), param.shape, param.stride(), Span(2, 9))
    assert piece.tolist() == list(range(2, 9))
    assert from_checkpoint(param, param.shape, param.stride(), None).shape == (0,)


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3), (1, 1)), ((2, 3), (6, 2)), ((3,), (0,)), ((2, 1, 3), (4, 1, 1))]
)
def test_parameters_that_are_not_dense_are_refused(shape, strides):
    with pytest.raises(ValueError, match=r"is not dense.*clone"):
        memory_order(shape, strides)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory_order((2, 3), (1,)), "2 sizes"),
        (lambda: rectangles((2, 3), (3, 1), Span(4, 7)), r"\[4, 7\) is not inside the 6 elements"),
        (lambda: views(torch.zeros(3), (2, 3), (3, 1), Span(0, 4)), "give a contiguous 1-D tensor of 4"),
        (lambda: views(torch.zeros(8)[::2], (2, 3), (3, 1), Span(0, 4)), "give a contiguous 1-D tensor of 4"),
        (lambda: to_checkpoint(torch.zeros(3), (2, 3), (3, 1), None), "give a contiguous 1-D tensor of 0"),
        (lambda: to_checkpoint(torch.zeros(2, 3), (2, 3), (3, 1), Span(0, 4)), "give a contiguous 1-D tensor of 4"),
        (lambda: from_checkpoint(torch.zeros(3, 2), (2, 3), (3, 1), None), r"shape \(3, 2\) was loaded for"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_another_ranks_piece_is_refused(wrapped):
    with pytest.raises(ValueError, match=r"needs elements \[0, 7\).*get_optimizer_state_dict"):
        unwrap(wrapped, Span(0, 7))
    with pytest.raises(ValueError, match="memory order"):
        from_checkpoint(wrapped, (4, 3), (3, 1), Span(2, 9))


class Asker:
    """Looks to torch's checkpointing like any object with a state."""

    def __init__(self):
        self.answers = []

    def state_dict(self):
        self.answers.append(checkpoint_wants())
        return {"value": torch.zeros(1)}

    def load_state_dict(self, state_dict):
        self.answers.append(checkpoint_wants())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpointing_is_recognised_among_the_callers(tmp_path):
    asker = Asker()
    asker.state_dict()
    dcp.save({"it": asker}, checkpoint_id=tmp_path)
    dcp.load({"it": asker}, checkpoint_id=tmp_path)
    assert asker.answers == [None, "parts", "parts", "parts"]


class AskingSGD(torch.optim.SGD):
    def state_dict(self):
        self.answer = checkpoint_wants()
        return super().state_dict()


@pytest.mark.parametrize(("is_full", "answer"), [(False, "parts"), (True, "whole")])
def test_checkpointing_of_optimizers_is_recognised(is_full, answer):
    model = torch.nn.Linear(2, 2)
    optimizer = AskingSGD(model.parameters(), lr=0.1)
    get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=is_full))
    assert optimizer.answer == answer
    optimizer.state_dict()
    assert optimizer.answer is None


def test_whole_tensors_that_are_loaded_on_every_rank_are_told_apart_from_parts():
    model = torch.nn.Linear(2, 2)
    optimizer = AskingSGD(model.parameters(), lr=0.1, momentum=0.9)
    state = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
    assert optimizer.answer == "whole"


def test_every_rank_writes_an_empty_parameter_so_that_its_key_is_there():
    for span in (None, Span(0, 0)):
        wrapped = to_checkpoint(torch.empty(0), (0, 3), (3, 1), span)
        assert [chunk.sizes for chunk in wrapped.__create_chunk_list__()] == [(0, 3)]
        assert from_checkpoint(wrapped, (0, 3), (3, 1), None).numel() == 0
