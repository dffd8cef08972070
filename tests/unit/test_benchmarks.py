"""The benchmarks run, write rows that can be read by themselves, and their peers compute what they claim to."""

import json
import math

import pytest
import torch

from benchmarks import backward, data_parallel, optimizer_phase, timing
from benchmarks.data_parallel_worker import SYSTEMS, Setup, System
from benchmarks.models import TINY, all_linears_as_fast_as_fp32, make_llama
from benchmarks.run import BENCHES, main
from benchmarks.trace import trace
from fusedopt.sharding.layout import ALIGNMENT

ENVIRONMENT = {
    "device",
    "cpu_capability",
    "threads",
    "load_1min",
    "torch",
    "malloc",
    "python",
    "fusedopt",
    "commit",
    "date",
}


@pytest.mark.parametrize("name", list(BENCHES))
def test_a_rehearsal_writes_rows_that_stand_by_themselves(name, tmp_path, capsys):
    claims = main(["--tiny", "--only", name, "--out", str(tmp_path), "--repeats", "1"])
    (path,) = tmp_path.glob(f"{name}_cpu_*.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows
    for row in rows:
        assert row["bench"] == name
        assert row.keys() >= ENVIRONMENT | {"model", "dtype"}
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        if "p50_ms" in row:
            assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
    printed = capsys.readouterr().out
    assert claims
    assert all(claim.what in printed for claim in claims)


@pytest.fixture
def stub(monkeypatch):
    """Put one benchmark in the place of all that only says how many threads it had."""

    def bench(shape, repeats):
        row = {"threads": torch.get_num_threads()}
        return timing.Result([row], [timing.Claim("stub", 1.0, 1.0, is_upper_bound=True)])

    monkeypatch.setattr("benchmarks.run.BENCHES", {"stub": bench})


def test_each_number_of_threads_gets_rows_and_claims_of_its_own(stub, tmp_path):
    claims = main(["--tiny", "--out", str(tmp_path), "--threads", "1", "2"])
    (path,) = tmp_path.iterdir()
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [
        {"threads": 1},
        {"threads": 2},
    ]
    assert [claim.what for claim in claims] == ["stub, 1 thread", "stub, 2 threads"]
    assert torch.get_num_threads() == 1  # what the tests run with


def test_a_rehearsal_leaves_the_committed_rows_alone(stub, monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.run.RESULTS", tmp_path)
    main(["--tiny"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv", [["--repeats", "8"], ["--only", "speed"], ["--threads", "0"]])
def test_settings_that_cannot_be_meant_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert argv[1] in capsys.readouterr().err


def test_every_contestant_of_the_optimizer_phase_is_counted_and_compared():
    rows = optimizer_phase.run(TINY, repeats=1).rows
    names = {row["contestant"] for row in rows}
    assert len(names) == 5
    assert {(row["contestant"], row["is_clipping"]) for row in rows} == {(n, c) for n in names for c in (True, False)}
    ours = [row for row in rows if row["contestant"].startswith("fusedopt")]
    assert all(
        {"time_over_stock_fused_median_of_ratios", "copy_bandwidth_fraction_ratio_of_medians"} <= row.keys()
        for row in ours
    )


def three_steps(loop, params):
    for step in range(3):
        loop.refill([grad * (step + 1) for grad in optimizer_phase.random_grads(params, norm=50.0)])
        loop.phase()
    return [param.detach() for param in params]


def test_the_plain_loop_computes_the_same_update_bit_for_bit():
    before = [param.detach().clone() for param in make_llama(TINY).parameters()]
    ours_model, peer_model = make_llama(TINY), make_llama(TINY)
    ours = three_steps(
        optimizer_phase.Wrapped(ours_model, max_grad_norm=None, foreach=True), list(ours_model.parameters())
    )
    peer = three_steps(optimizer_phase.PlainLoop(peer_model, max_grad_norm=None), list(peer_model.parameters()))
    assert all(bool(torch.isfinite(param).all()) for param in ours)
    assert all(torch.equal(a, b) for a, b in zip(ours, peer, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(ours, before, strict=True) if b.numel() > ALIGNMENT)


def test_the_hook_of_the_plain_loop_sums_micro_batches_in_float32():
    model = make_llama(TINY)
    loop = optimizer_phase.PlainLoop(model)
    weight, main = loop.params[0], loop.mains[0]
    for grad in (256.0, 1.0):
        (weight * torch.full_like(weight, grad)).sum().backward()
    assert weight.grad is None
    assert torch.equal(main.grad, torch.full_like(main, 257.0))


@pytest.mark.parametrize(("norm", "is_clipped"), [(50.0, True), (0.05, False)])
def test_gradients_are_clipped_where_the_row_says_so(norm, is_clipped):
    for loop in (
        optimizer_phase.Wrapped(make_llama(TINY), fused=True),
        optimizer_phase.Stock(make_llama(TINY)),
        optimizer_phase.PlainLoop(make_llama(TINY)),
    ):
        grads = optimizer_phase.random_grads(loop.params, norm)
        for _ in range(2):  # the first step of a fused inner optimizer is decided on the host
            loop.refill(grads)
            loop.phase()
        held = getattr(loop, "grads", None) or [param.main_grad for param in loop.params]
        found = torch.stack([grad.float().norm() for grad in held]).norm()
        assert abs(found - (1.0 if is_clipped else norm)) < 0.01 * norm


def test_both_sides_of_the_backward_benchmark_start_from_the_same_weights():
    rows = backward.run(TINY, repeats=1).rows
    assert [row["contestant"] for row in rows] == ["stock", "wrapped"]
    # First gradient 14 and further ones 18 against 0 and 6 bytes per parameter.
    assert [row["accumulated_bytes_per_param"] for row in rows] == [3 * 6, 14 + 3 * 18]


def test_contestants_take_turns_in_alternating_order():
    order = []
    contestants = [timing.Contestant(name, lambda: None, lambda name=name: order.append(name)) for name in "ab"]
    times = timing.interleaved_ms(contestants, 4, "test")
    assert [len(times[name].wall) for name in "ab"] == [4, 4]
    assert [len(times[name].cpu) for name in "ab"] == [4, 4]
    assert "".join(order) == "abba" * 3


def test_ratios_in_rounds_cancel_slow_rounds():
    slow, fast = [2.0, 200.0, 4.0], [1.0, 100.0, 2.0]
    assert timing.median_of_ratios(slow, fast) == 2.0
    assert timing.ratio_of_medians([2.0, 200.0, 6.0], [1.0, 100.0, 2.0]) == 3.0


def test_data_parallel_systems_take_the_same_steps_and_send_what_they_claim(tmp_path, capsys):
    names = ["fusedopt_none", "fusedopt_optimizer", "fusedopt_gradients", "ddp_autocast", "fsdp2"]
    data_parallel.main(["--tiny", "--repeats", "2", "--out", str(tmp_path), "--systems", *names])
    (path,) = tmp_path.glob("data_parallel_gloo_*.jsonl")
    rows = {row["contestant"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    assert list(rows) == names
    for name, row in rows.items():
        assert row.keys() >= ENVIRONMENT | {"bench", "model", "dtype", "arithmetic", "same_arithmetic_as", "repeats"}
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert 0 < row["held_bytes"] < row["window_peak_bytes"]
        assert row["last_loss"] < row["first_loss"]
        for key in ("first_loss", "last_loss"):  # bf16 has 8 bits, and few of the roundings differ
            assert abs(row[key] - rows["ddp_autocast"][key]) < 2**-8 * row[key], name
    assert rows["fusedopt_none"]["best_peer"] == "ddp_autocast"
    assert rows["fusedopt_gradients"]["best_peer_of_same_arithmetic"] == "fsdp2"
    assert rows["ddp_autocast"]["held_bytes_per_param"] == pytest.approx(16, rel=0.01)
    assert rows["ddp_autocast"]["sent_bytes_per_param"] >= 4  # others may send on loopback meanwhile
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_a_failed_rank_ends_the_run_with_its_traceback():
    with (
        pytest.raises(RuntimeError, match=r"fusedopt_none: rank . failed in 'no_such_command'"),
        data_parallel.running(["fusedopt_none"], Setup(TINY, 25, True)) as pairs,
    ):
        pairs["fusedopt_none"].ask("no_such_command")
    assert not any(process.is_alive() for process in pairs["fusedopt_none"].processes)


def test_every_system_says_what_it_computes_and_sends():
    assert set(data_parallel.PEERS) <= set(SYSTEMS)
    assert {peer for peers in data_parallel.PEERS.values() for peer in peers} <= set(SYSTEMS)
    for kind in SYSTEMS.values():
        assert issubclass(kind, System)
        assert kind.arithmetic
        assert kind.state_formula
        assert kind.traffic_formula


def test_bf16_linears_through_fp32_are_the_same_for_a_bf16_model_and_under_autocast(monkeypatch):
    monkeypatch.setattr("benchmarks.models.is_bf16_slow", lambda: True)
    torch.manual_seed(0)
    narrow = torch.nn.Linear(32, 16, bias=False).bfloat16()
    wide = torch.nn.Linear(32, 16, bias=False)
    wide.load_state_dict(narrow.state_dict())
    x = torch.randn(4, 5, 32).bfloat16()
    with all_linears_as_fast_as_fp32():
        out = narrow(x)
        with torch.autocast("cpu", torch.bfloat16):
            also = wide(x.float())
        out.float().square().sum().backward()
        also.float().square().sum().backward()
    assert out.dtype == also.dtype == torch.bfloat16
    assert torch.equal(out, also)
    assert torch.equal(narrow.weight.grad.float(), wide.weight.grad)
    assert torch.equal(out, (x.float() @ narrow.weight.float().T).bfloat16())
    assert bool(narrow.weight.grad.isfinite().all())
    assert bool(narrow.weight.grad.any())


def test_the_trace_of_one_gradient_names_the_parts_of_a_step_in_the_order_of_the_diagram():
    found = trace()
    parts = ["gradients/arrival.py", "reduction/reducer.py", "gradients/clip.py", "inner/hooks.py"]
    first = [found.calls.index(part) for part in parts]
    assert first == sorted(first)
    assert len(set(found.calls)) <= 12
    assert found.report()[-1].startswith(f"{len(set(found.calls))} files, {len(found.calls)} calls, ")
