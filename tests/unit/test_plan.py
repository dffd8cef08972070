"""`python -m fusedopt plan` says the numbers of the contract, and those of real wrapped models."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fusedopt
from fusedopt.__main__ import main
from tests.distributed.launcher import run

ROOT = Path(__file__).parents[2]
EVEN = str(8 * 2**20)  # needs no padding
KINDS = ("model", "main_grad", "main_param", "state")
SIDE = 1024


def plan(capsys, *flags):
    """Return what is printed, and its table: by shard, the cells by column."""
    assert main(["plan", *flags]) == 0
    text = capsys.readouterr().out
    first = text.partition("Without a shard")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in first.splitlines() if line[:1] == "|"]
    header, rule, *body = rows
    assert set("".join(rule)) <= set("-:")
    return text, {row[0]: dict(zip(header[1:], map(float, row[1:]), strict=True)) for row in body}


@pytest.mark.parametrize(
    ("flags", "sums"),
    [
        ((), {"none": 18.0, "optimizer": 18.0, "gradients": 18.0}),
        (("--ranks", "8"), {"none": 18.0, "optimizer": 7.5, "gradients": 4.0}),
        (("--model-dtype", "fp32"), {"none": 16.0, "optimizer": 16.0, "gradients": 16.0}),
        (("--ranks", "8", "--model-dtype", "fp32"), {"none": 16.0, "optimizer": 9.0, "gradients": 5.5}),
        (("--ranks", "8", "--shard", "gradients", "--optimizer-state-bytes", "0"), {"gradients": 3.0}),
        (("--main-param", "split"), {"none": 16.0, "optimizer": 16.0, "gradients": 16.0}),
        (("--ranks", "8", "--main-param", "split"), {"none": 16.0, "optimizer": 7.25, "gradients": 3.75}),
        (("--fsdp", "8", "--main-param", "split", "--model-dtype", "bfloat16"), {"FSDP2": 16 / 8}),
        (("--fsdp", "8"), {"FSDP2": 18 / 8}),
        (("--fsdp", "8", "--model-dtype", "float32"), {"FSDP2": 16 / 8}),
        (("--ranks", "4", "--tensor-parallel", "2"), {"none": 9.0, "optimizer": 4.5, "gradients": 3.0}),
        (("--ranks", "4", "--pipeline-parallel", "2"), {"none": 9.0, "optimizer": 4.5, "gradients": 3.0}),
        (("--tensor-parallel", "4", "--pipeline-parallel", "8", "--shard", "none"), {"none": 18 / 32}),
        (("--fsdp", "2", "--tensor-parallel", "2", "--pipeline-parallel", "2"), {"FSDP2": 18 / 8}),
    ],
)
def test_bytes_per_parameter_are_those_of_the_contract(capsys, flags, sums):
    _, table = plan(capsys, "--params", EVEN, *flags)
    assert {shard: row["sum"] for shard, row in table.items()} == sums
    for row in table.values():
        assert sum(row[kind] for kind in KINDS) == pytest.approx(row["sum"])
        assert row["GiB in all"] == round(row["sum"] * int(EVEN) / 2**30, 2)


def test_what_is_sent_are_the_lower_bounds(capsys):
    num_params, num_ranks, k = 8 * 2**30, 8, 4
    flags = ("--params", str(num_params), "--micro-batches", str(k))
    _, table = plan(capsys, *flags, "--ranks", str(num_ranks))
    part = (num_ranks - 1) / num_ranks * num_params / 2**30
    assert {shard: (row["gradients sent"], row["parameters sent"]) for shard, row in table.items()} == {
        "none": (8 * part, 0.0),
        "optimizer": (4 * part, 2 * part),
        "gradients": (4 * k * part, 2 * part),
    }
    _, table = plan(capsys, *flags, "--fsdp", str(num_ranks))
    assert (table["FSDP2"]["gradients sent"], table["FSDP2"]["parameters sent"]) == (4 * k * part, 2 * k * 2 * part)
    _, stage = plan(capsys, *flags, "--fsdp", str(num_ranks), "--pipeline-parallel", "2")
    for column in ("gradients sent", "parameters sent"):
        assert stage["FSDP2"][column] == table["FSDP2"][column] / 2


# -- beside what was allocated


def model_of(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, SIDE, bias=False)).to(dtype)


def allocated(rank, engine, dtype, shard):
    """Return the bytes of a real model that was trained one step, without the step counters of Adam."""
    model = model_of(dtype)
    mesh = None
    if engine == "fsdp":
        fully_shard(model)
    elif engine == "tensor":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    elif engine == "pipeline":  # what a stage holds: of two equal layers, one
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
        model = model[rank]
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.Adam(model.parameters()), shard=shard, device_mesh=None if mesh is None else mesh["dp"]
    )
    batch = torch.ones(1, SIDE, dtype=dtype, requires_grad=True)
    model(batch).sum().backward()
    optimizer.step()
    report = optimizer.memory_report()
    counters = 4 * sum("step" in state for state in optimizer.state.values())
    optimizer.unwrap()
    return {**{kind: report[kind] for kind in KINDS}, "state": report["state"] - counters}


def check(capsys, found, dtype, *flags):
    num_params = 2 * SIDE**2
    dtype_flag = str(dtype).removeprefix("torch.")
    _, table = plan(capsys, "--params", str(num_params), "--model-dtype", dtype_flag, *flags)
    (row,) = table.values()
    assert {kind: nbytes / num_params for kind, nbytes in found.items()} == {kind: row[kind] for kind in KINDS}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_rank_allocates_what_was_planned(capsys, dtype):
    check(capsys, allocated(0, "none", dtype, "none"), dtype, "--shard", "none")


@pytest.mark.parametrize(
    ("engine", "shard", "flags"),
    [
        ("none", "optimizer", ("--ranks", "2", "--shard", "optimizer")),
        ("none", "gradients", ("--ranks", "2", "--shard", "gradients")),
        ("fsdp", "none", ("--fsdp", "2")),
        ("tensor", "none", ("--tensor-parallel", "2", "--shard", "none")),
        ("pipeline", "none", ("--pipeline-parallel", "2", "--shard", "none")),
    ],
)
def test_two_ranks_allocate_what_was_planned(capsys, engine, shard, flags):
    for found in run(allocated, 2, engine, torch.bfloat16, shard):
        check(capsys, found, torch.bfloat16, *flags)


# -- reading and refusing


@pytest.mark.parametrize(
    ("text", "count"),
    [("8e9", 8 * 10**9), ("8B", 8 * 10**9), ("1.5m", 1_500_000), ("1_234_567", 1_234_567), ("8.03B", 8_030_000_000)],
)
def test_a_number_of_parameters_is_read_as_people_write_it(capsys, text, count):
    assert plan(capsys, "--params", text)[0].startswith(f"{count:,} parameters of 2 bytes")


def test_what_is_not_counted_is_said(capsys):
    assert "activations" in plan(capsys, "--params", "1M")[0]
    assert "norms" not in plan(capsys, "--params", "1M")[0]
    assert "norms" in plan(capsys, "--params", "1M", "--tensor-parallel", "2")[0]
    assert "layer that is gathered" in plan(capsys, "--params", "1M", "--fsdp", "2")[0]
    assert "stages differ" not in plan(capsys, "--params", "1M", "--fsdp", "2")[0]
    both, _ = plan(capsys, "--params", "1M", "--pipeline-parallel", "2", "--tensor-parallel", "4")
    assert "1 data-parallel rank x 4 tensor-parallel x 2 stages" in both
    assert "stages differ" in both
    assert "norms" in both


@pytest.mark.parametrize(
    ("flags", "found", "remedy"),
    [
        ((), "--params", "required"),
        (("--params", "eight"), "'eight' is no number of parameters", "give 8e9, 8B"),
        (("--params", "0.5"), "'0.5' is no number of parameters", "give 8e9, 8B"),
        (("--params", "8B", "--ranks", "0"), "'0' is out of range", "a whole number, 1 or more"),
        (("--params", "8B", "--bucket-mib", "8192"), "--bucket-mib 8192", "at most 4096 MiB"),
        (("--params", "8B", "--model-dtype", "int8"), "'int8'", "bf16"),
        (("--params", "8B", "--fsdp", "2", "--shard", "optimizer"), "--shard optimizer with --fsdp", "drop --shard"),
        (("--params", "8B", "--fsdp", "2", "--ranks", "2"), "--fsdp counts all data-parallel ranks", "drop --ranks"),
    ],
)
def test_wrong_input_is_refused_with_the_remedy(capsys, flags, found, remedy):
    with pytest.raises(SystemExit) as caught:
        main(["plan", *flags])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert found in said
    assert remedy in said


# -- the documentation


def test_the_numbers_of_the_page_are_those_of_the_command(capsys):
    page = (ROOT / "docs/parallel.md").read_text()
    shown = re.findall(r"^\$ python -m fusedopt (plan .*)\n((?:.*\n)*?)(?=\$ |```)", page, flags=re.M)
    assert len(shown) >= 3
    for command, output in shown:
        assert main(command.split()) == 0
        assert capsys.readouterr().out.strip() == output.strip(), command


def test_each_size_of_the_page_fits_as_it_says(capsys):
    page = (ROOT / "docs/parallel.md").read_text()
    rows = re.findall(r"^\| \d+B \| (.*) \| .* \| `(.*)` \| ([\d.]+) \|$", page, flags=re.M)
    assert len(rows) >= 6
    for ranks, flags, nbytes in rows:
        _, table = plan(capsys, *flags.split())
        assert [row["GiB in all"] for row in table.values()] == [float(nbytes)], flags
        found = [int(n) for n in re.findall(r"--(?:ranks|fsdp|tensor-parallel|pipeline-parallel) (\d+)", flags)]
        assert sorted(found or [1]) == sorted(map(int, ranks.split(" x "))), flags
