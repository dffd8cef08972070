"""Claims about saving: a wrapped model's files hold the bytes that they would hold without fusedopt, and no main_grad.

The yardstick is a twin with the same values that was never wrapped, written by the same call.
"""

import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from transformers import LlamaForCausalLM

from fusedopt import FusedMainGradOptimizer
from tests.accelerate_cases import forget_accelerators
from tests.models import tiny_llama

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Net(nn.Module):
    """All that a file may hold: layers, a parameter without dimensions, a buffer."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.embedding = nn.Embedding(11, 8, dtype=dtype)
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.hidden = nn.Linear(8, 32, dtype=dtype)
        self.head = nn.Linear(32, 3, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.register_buffer("steps", torch.arange(4))

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.norm(self.embedding(tokens))) * self.scale)).float()


def train(net, optimizer, loss_of=lambda net: net(torch.arange(11)).square().mean()):
    for _ in range(3):
        loss_of(net).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(net).backward()  # saved with gradients pending
    for param in net.parameters():
        assert torch.isfinite(param).all()
        assert param.grad is param.main_grad
        assert param.grad.count_nonzero()


def wrapped_and_twin(dtype, make=Net):
    net, twin = make(dtype), make(dtype)
    optimizer = FusedMainGradOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
    before = twin.head.weight.detach().clone() if make is Net else None
    train(net, optimizer)
    twin.load_state_dict(net.state_dict())
    assert before is None or not torch.equal(before, twin.head.weight)
    return net, twin, optimizer


def assert_stock(value, twin):
    """Assert that what was loaded holds the twin's values, and nothing of ours."""
    tensors, stock = (list(m.parameters()) if isinstance(m, nn.Module) else [m] for m in (value, twin))
    for tensor, expected in zip(tensors, stock, strict=True):
        assert set(vars(tensor)) <= {"_is_hf_initialized"}  # transformers' own
        assert tensor.grad is None
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert torch.isfinite(tensor).all()
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_wrapped_parameter_keeps_a_storage_of_its_own(dtype):
    net, twin, _ = wrapped_and_twin(dtype)
    storages = [p.untyped_storage() for p in net.parameters()]
    assert len({s.data_ptr() for s in storages}) == len(storages)
    assert [s.nbytes() for s in storages] == [p.untyped_storage().nbytes() for p in twin.parameters()]


# -- torch.save and pickle

PARTS = {
    "the state dict": lambda net: net.state_dict(),
    "one parameter": lambda net: net.norm.bias,
    "a 0-d parameter": lambda net: net.scale,
    "all parameters": lambda net: list(net.parameters()),
    "the module": lambda net: net,
    "a submodule": lambda net: net.hidden,
    "a tensor of the state dict": lambda net: net.state_dict()["norm.weight"],
}


def to_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def to_old_file(value):
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def load(content):
    return torch.load(io.BytesIO(content), weights_only=False)


def len_without_addresses(content):
    """The old format, which pickle uses, names storages by their address and orders them by it."""
    return len(re.sub(rb"\d{13,16}", b"", content))


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_torch_save_writes_the_twins_bytes(dtype, part):
    net, twin, _ = wrapped_and_twin(dtype)
    content = to_file(part(net))
    assert content == to_file(part(twin))
    loaded = load(content)
    if isinstance(loaded, (nn.Module, nn.Parameter)):
        assert_stock(loaded, part(twin))


@pytest.mark.parametrize("write", [to_old_file, pickle.dumps])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_pickle_and_the_old_torch_save_write_as_many_bytes_as_for_the_twin(dtype, part, write):
    net, twin, _ = wrapped_and_twin(dtype)
    content = write(part(net))
    assert len_without_addresses(content) == len_without_addresses(write(part(twin)))
    loaded = pickle.loads(content) if write is pickle.dumps else load(content)
    if isinstance(loaded, (nn.Module, nn.Parameter)):
        assert_stock(loaded, part(twin))


def test_the_yardstick_would_see_a_main_grad_that_is_written():
    net, twin, _ = wrapped_and_twin(torch.bfloat16)
    twin.hidden.weight.main_grad = net.hidden.weight.main_grad.clone()
    assert len(to_file(twin)) > len(to_file(net)) + net.hidden.weight.main_grad.nbytes
    assert len(pickle.dumps(twin)) > len(pickle.dumps(net)) + net.hidden.weight.main_grad.nbytes


def test_a_saved_and_loaded_module_trains_as_the_twin_does():
    net, twin, _ = wrapped_and_twin(torch.float32)
    loaded = load(to_file(net))
    for each in (loaded, twin):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for _ in range(3):
            each(torch.arange(11)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(loaded.parameters(), twin.parameters(), strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, theirs)


def test_an_attribute_of_the_users_own_is_saved_with_its_parameter():
    net, _, _ = wrapped_and_twin(torch.bfloat16)
    net.hidden.weight.note = "mine"
    for loaded in (load(to_file(net)), pickle.loads(pickle.dumps(net))):
        assert vars(loaded.hidden.weight) == {"note": "mine"}
        assert vars(loaded.hidden.bias) == {}


# -- safetensors, accelerate, transformers


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def tensor_file(net, folder):
    save_file(net.state_dict(), folder / "model.safetensors")


def model_file(net, folder):
    save_model(net, str(folder / "model.safetensors"))


def parameter_file(net, folder):
    save_file({"bias": net.norm.bias.detach(), "scale": net.scale.detach()}, folder / "part.safetensors")


def accelerate_model(net, folder):
    Accelerator(cpu=True).save_model(net, folder)


def accelerate_model_as_pickle(net, folder):
    Accelerator(cpu=True).save_model(net, folder, safe_serialization=False)


def accelerate_shards(net, folder):
    Accelerator(cpu=True).save_model(net, folder, max_shard_size="1KB")


def accelerate_object(net, folder):
    Accelerator(cpu=True).save(net.state_dict(), folder / "model.bin")


WRITERS = [
    tensor_file,
    model_file,
    parameter_file,
    accelerate_model,
    accelerate_model_as_pickle,
    accelerate_shards,
    accelerate_object,
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_files_equal_the_twins(dtype, write, tmp_path):
    net, twin, _ = wrapped_and_twin(dtype)
    written = []
    for number, each in enumerate((net, twin)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(each, folder)
        written.append(files_in(folder))
    assert written[0].keys() == written[1].keys() != set()
    assert written[0] == written[1]
    if write in (tensor_file, model_file, accelerate_model):
        loaded = load_file(tmp_path / "0" / "model.safetensors")
        assert loaded.keys() == twin.state_dict().keys()
        for name, tensor in twin.state_dict().items():
            assert torch.equal(loaded[name], tensor)
    if write is accelerate_shards:
        assert len(written[0]) > 2


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_accelerates_save_state_writes_the_twins_model_and_load_state_brings_it_all_back(dtype, tmp_path):
    net, twin = Net(dtype), Net(dtype)
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(net, FusedMainGradOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01)))
    train(prepared, optimizer)
    optimizer.zero_grad()
    accelerator.save_state(tmp_path / "wrapped", safe_serialization=True)
    twin.load_state_dict(net.state_dict())
    at_save = [p.detach().clone() for p in net.parameters()]
    train(prepared, optimizer)
    optimizer.zero_grad()
    later = [p.detach().clone() for p in net.parameters()]
    accelerator.load_state(tmp_path / "wrapped")
    for param, value in zip(net.parameters(), at_save, strict=True):
        assert torch.equal(param, value)
    train(prepared, optimizer)
    for param, value in zip(net.parameters(), later, strict=True):
        assert torch.equal(param, value)

    forget_accelerators()
    stock = Accelerator(cpu=True)
    stock.prepare(twin)
    stock.save_state(tmp_path / "twin", safe_serialization=True)
    assert (tmp_path / "wrapped" / "model.safetensors").read_bytes() == (
        tmp_path / "twin" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_save_pretrained_writes_the_twins_files(dtype, tied, tmp_path):
    def loss_of(net):
        tokens = torch.arange(12).view(2, 6)
        return net(input_ids=tokens, labels=tokens).loss

    net, twin = (tiny_llama(dtype, tie_word_embeddings=tied) for _ in range(2))
    assert (net.lm_head.weight is net.model.embed_tokens.weight) is tied
    optimizer = FusedMainGradOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
    train(net, optimizer, loss_of)
    assert not torch.equal(net.lm_head.weight, twin.lm_head.weight)
    twin.load_state_dict(net.state_dict())
    for each, name in ((net, "net"), (twin, "twin")):
        each.save_pretrained(tmp_path / name)
    written = files_in(tmp_path / "net")
    assert "model.safetensors" in written
    assert written == files_in(tmp_path / "twin")
    assert ("lm_head.weight" in load_file(tmp_path / "net" / "model.safetensors")) is not tied

    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "net", dtype=dtype)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert_stock(loaded, twin)
    train(loaded, FusedMainGradOptimizer(torch.optim.AdamW(loaded.parameters(), lr=0.01)), loss_of)
