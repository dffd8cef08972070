"""``python -m fusedopt``: ``info`` says what was found and what is chosen, ``plan`` what a model would cost.

Both print text to be pasted, ``info`` into a bug report, ``plan`` into a page: its table is Markdown. Planned numbers
come from `fusedopt.planner`, that is from the layout that would be allocated. Bytes; GiB are 2**30 of them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from fusedopt import backends
from fusedopt.config import MainGradConfig, valid_values
from fusedopt.planner import MAIN_PARAM_NBYTES, Cost, cost, full_buckets

MIB_NUMEL = 2**20 // 4
"""fp32 elements in a MiB."""

GIB = 2**30
MODEL_NBYTES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp32": 4, "float32": 4}
SHARDS, STATE_DTYPES, RELEASES = map(valid_values, ("shard", "state_dtype", "release"))
DEVICES = (24, 40, 48, 80, 96, 141, 192)
"""Memory of cards, in GB of 10**9 bytes."""
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
COLUMNS = ("model", "main_grad", "main_param", "state", "sum", "GiB in all", "gradients sent", "parameters sent")

NOT_COUNTED = (
    "Bytes per parameter of the whole model, on each rank; GiB in all on each rank; GiB sent by each rank in a step.",
    "Not counted: activations, one gradient on its way, at most two buckets under way and their receive buffers.",
)
OF_TENSOR_PARALLEL = (
    "Nor: parameters that are not split (norms, often embeddings), which every rank holds whole, and what tensor",
    "parallel layers send, which is torch's and stays as it is.",
)
OF_PIPELINE = (
    "Nor: that stages differ, as the first and the last with the embedding and the head; nor what stages send each",
    'other. "none" sends that much in every micro-batch, unless schedule.step() runs under no_sync().',
)
OF_FSDP = (
    "Nor: FSDP2's own layer that is gathered (two with prefetch), its gradient, its buffers. Sent is what FSDP2 sends,",
    "at most: for each micro-batch two gathers, in the dtype of the model (with param_dtype in that one), and one",
    "reduction, in fp32 (reduce_dtype); fusedopt sends nothing.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedopt", description="What fusedopt found, and what it costs.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="which libraries were found, and which of them does what")
    info.add_argument("--backend", default=MainGradConfig.from_env().backend, help="as MainGradConfig.backend")
    plan = commands.add_parser("plan", help="bytes per parameter on each rank, and bytes sent in a step")
    _add_plan_arguments(plan)
    args = parser.parse_args(argv)
    if args.command == "plan":
        _check_plan(plan, args)
        print("\n".join(_plan(args)))
        return 0
    try:
        print(backends.report(MainGradConfig.from_dict({"backend": args.backend}).backend))
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--params", type=_count, required=True, help="trainable parameters of the whole model: 8e9, 8B, 1_234_567")
    add("--model-dtype", choices=MODEL_NBYTES, default="bf16", help="default: bf16")
    add("--main-param", choices=MAIN_PARAM_NBYTES, default="float32", help="how main_params are held; default: whole")
    add("--state-dtype", choices=STATE_DTYPES, default="float32", help="of state between steps; default: float32")
    add("--release", choices=RELEASES, default="none", help="when gradients give their memory back; default: none")
    add("--optimizer-state-bytes", type=_whole(0), default=8, metavar="N", help="for each parameter: 8 (Adam), 4, 0")
    add("--ranks", type=_whole(1), default=1, metavar="W", help="data-parallel ranks; default 1")
    add("--shard", choices=SHARDS, help="what they share; default: a row for each")
    add("--micro-batches", type=_whole(1), default=1, metavar="K", help="backwards of a rank in a step; default 1")
    add("--bucket-mib", type=_whole(1), default=MainGradConfig.from_env().bucket_mib, metavar="MIB", help="of fp32")
    add("--tensor-parallel", type=_whole(1), default=1, metavar="T", help="ranks that split each data-parallel model")
    add("--pipeline-parallel", type=_whole(1), default=1, metavar="P", help="stages that each such model is cut in")
    add("--fsdp", type=_whole(1), default=0, metavar="W", help="ranks of fully_shard, in the place of --ranks")


def _count(text: str) -> int:
    """Read a number of parameters."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([kmbt]?)", text.lower().replace("_", "").replace(",", ""))
    number = Fraction(match[1]) * SUFFIXES[match[2]] if match else Fraction(0)
    if not 1 <= number <= 1e15 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters; give 8e9, 8B, 350M or 1_234_567")
    return int(number)


def _whole(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``least`` on."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is out of range; give a whole number, {least} or more")
        return int(text)

    return read


def _check_plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with a message where settings do not go together."""
    if args.fsdp and args.shard not in (None, "none"):
        parser.error(f"--shard {args.shard} with --fsdp: FSDP2 shards by itself, and fusedopt refuses to; drop --shard")
    if args.fsdp and args.ranks > 1:
        parser.error("--fsdp counts all data-parallel ranks; drop --ranks, or plan without it")
    if args.main_param != "float32" and args.model_dtype not in ("bf16", "bfloat16"):
        parser.error(f"--main-param {args.main_param} with --model-dtype {args.model_dtype}: only bf16 can be split")
    if args.release != "none" and (args.fsdp or args.ranks > 1 or args.tensor_parallel > 1 or args.micro_batches > 1):
        parser.error("--release backward with several ranks or micro-batches: gradients are released on one process")
    if args.bucket_mib > 4096:
        parser.error(f"--bucket-mib {args.bucket_mib}: a bucket has at most 4096 MiB")


def _plan(args: argparse.Namespace) -> list[str]:
    """Return the lines to print."""
    nbytes = MODEL_NBYTES[args.model_dtype]
    state = args.optimizer_state_bytes
    numel = -(-args.params // (args.tensor_parallel * args.pipeline_parallel))
    if args.fsdp:
        rows = [("FSDP2", _fsdp_cost(args, numel))]
        ranks = _counted(args.fsdp, "rank") + " of fully_shard"
    else:
        shards = [args.shard] if args.shard else SHARDS
        rows = [(shard, _cost(args, numel, shard, args.ranks)) for shard in shards]
        ranks = _counted(args.ranks, "data-parallel rank")
    ranks += f" x {args.tensor_parallel} tensor-parallel" if args.tensor_parallel > 1 else ""
    ranks += f" x {_counted(args.pipeline_parallel, 'stage')}" if args.pipeline_parallel > 1 else ""
    digits = 2 if max(found.total for _, found in rows) >= args.params else 4
    notes = [
        *NOT_COUNTED,
        *(OF_TENSOR_PARALLEL if args.tensor_parallel > 1 else ()),
        *(OF_PIPELINE if args.pipeline_parallel > 1 else ()),
        *(OF_FSDP if args.fsdp else ()),
    ]
    return [
        f"{args.params:,} parameters of {nbytes} bytes, {state} bytes of optimizer state each; {ranks}; "
        f"{_counted(args.micro_batches, 'micro-batch')} a step",
        "",
        *_table([("shard", *COLUMNS), *((name, *_cells(found, args.params, digits)) for name, found in rows)]),
        "",
        *notes,
        *([] if args.fsdp or args.ranks > 1 or args.micro_batches > 1 else ["", *_combinations(args, numel)]),
    ]


def _combinations(args: argparse.Namespace, numel: int) -> list[str]:
    """Return the table of all ways to hold a model on one process, and what they leave of a card's memory."""
    main_params = list(MAIN_PARAM_NBYTES) if args.model_dtype in ("bf16", "bfloat16") else ["float32"]
    releases = RELEASES if args.tensor_parallel == 1 else RELEASES[:1]
    head = ("main_param", "state_dtype", "release", "bytes", "GB", *(f"of {size} GB" for size in DEVICES))
    rows: list[tuple[str, ...]] = [head]
    for release in releases:
        for state_dtype in STATE_DTYPES:
            for main_param in main_params:
                held = argparse.Namespace(
                    **{**vars(args), "main_param": main_param, "state_dtype": state_dtype, "release": release}
                )
                total = _cost(held, numel, "none", 1).total
                left = (size - total / 1e9 for size in DEVICES)
                cells = (
                    f"{total / args.params:.2f}",
                    f"{total / 1e9:.1f}",
                    *(f"{x:.0f}" if x > 0 else "-" for x in left),
                )
                rows.append((main_param, state_dtype, release, *cells))
    return [
        "Without a shard, for each way to hold it: bytes per parameter, GB (10**9 bytes) in all, and what is left of a",
        "card's memory for activations and the rest above.",
        "",
        *_table(rows),
    ]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "es" if what.endswith("ch") else "s")


def _cost(args: argparse.Namespace, numel: int, shard: str, num_ranks: int) -> Cost:
    """Return the cost of ``numel`` parameters that fill whole buckets."""
    bucket_numel = args.bucket_mib * MIB_NUMEL
    return cost(
        full_buckets(numel, bucket_numel),
        bucket_numel=bucket_numel,
        model_nbytes=MODEL_NBYTES[args.model_dtype],
        state_nbytes=args.optimizer_state_bytes,
        shard=shard,
        world_size=num_ranks,
        num_micro_batches=args.micro_batches,
        main_param=args.main_param,
        state_dtype=args.state_dtype,
        release=args.release,
    )


def _fsdp_cost(args: argparse.Namespace, numel: int) -> Cost:
    """Return the cost of what `fully_shard` leaves of ``numel`` on each of its ranks, and of what it sends."""
    local = _cost(args, -(-numel // args.fsdp), "none", 1)
    sends = _cost(args, numel, "gradients", args.fsdp)  # reduces for each micro-batch, gathers once in a step
    return replace(local, reduce_nbytes=sends.reduce_nbytes, gather_nbytes=2 * args.micro_batches * sends.gather_nbytes)


def _cells(found: Cost, num_params: int, digits: int) -> list[str]:
    held = (found.model, found.main_grad, found.main_param, found.state, found.total)
    sizes = (found.total, found.reduce_nbytes, found.gather_nbytes)
    return [*(f"{nbytes / num_params:.{digits}f}" for nbytes in held), *(f"{nbytes / GIB:.2f}" for nbytes in sizes)]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, padded so that it reads as text: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        " | ".join(cell.rjust(width) if number else cell.ljust(width) for number, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    rule = "|".join("-" * (width + 1) + (":" if number else "-") for number, width in enumerate(widths))
    return [f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])]


if __name__ == "__main__":
    sys.exit(main())
