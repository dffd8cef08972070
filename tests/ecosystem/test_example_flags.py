"""The example's layer flags, all pairs of them: recomputation changes no bit, fused layers only rounding."""

import itertools
import math
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama"
GRANULARITIES = ("full", "full_attn", "core_attn")


@pytest.fixture(scope="module")
def curve_of(tmp_path_factory):
    """Return a function from flags to the evaluation curve of a three-step run on a tiny base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        # Also on machines with bf16 instructions: take the road of those without.
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        import cpu_bf16
        import finetune
        from layers import LayerArguments
        from transformers import LlamaConfig, LlamaForCausalLM

        output = tmp_path_factory.mktemp("flags")
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(output / "base")
        tokens = torch.randint(0, 256, (8, 2, 16), generator=torch.Generator().manual_seed(1))
        args = finetune.TrainArguments(
            output_dir=str(output), max_steps=3, warmup_steps=0, gradient_accumulation_steps=2, eval_steps=1,
            learning_rate=1e-3,
        )  # fmt: skip

        def curve(**flags):
            layers = LayerArguments(**flags)
            with cpu_bf16.fast_bf16_linears(torch.device("cpu")):  # as the script does
                run = finetune.finetune(finetune.FUSEDOPT_BF16, output / "base", iter(tokens), tokens[-1], args, layers)
            return run.curve

        yield curve


@pytest.mark.parametrize(
    ("fused_linear", "granularity", "use_reentrant"),
    list(itertools.product([False, True], GRANULARITIES, [False, True])),
)
def test_recomputation_with_any_other_flag_gives_the_same_losses(curve_of, fused_linear, granularity, use_reentrant):
    without = curve_of(fused_linear=fused_linear)
    flags = {"recompute": True, "recompute_granularity": granularity, "recompute_use_reentrant": use_reentrant}
    assert all(math.isfinite(loss) for _, loss in without)
    assert without[0][1] != without[-1][1]  # the weights moved
    assert curve_of(fused_linear=fused_linear, **flags) == without


def test_fused_layers_change_only_rounding(curve_of):
    plain, fused = curve_of(), curve_of(fused_linear=True)
    assert plain[0] == fused[0]  # the same forward
    for (_, want), (_, got) in zip(plain, fused, strict=True):
        assert abs(got - want) < 2**-8 * want  # one bf16 step, what the forward itself rounds by
    assert plain != fused  # and they did run: weight gradients are not rounded to bf16


def test_a_wrong_granularity_is_an_error(curve_of):
    with pytest.raises(ValueError, match="granularity='half' is unknown"):
        curve_of(recompute=True, recompute_granularity="half")
