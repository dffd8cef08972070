"""Claims about PyTorch Lightning, which calls ``configure_optimizers`` at each fit, and holds what it returned."""

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests.compare import assert_equal_parameters
from tests.models import Mlp

pl = pytest.importorskip("pytorch_lightning", reason="pip install -r requirements-dev.txt")
tuner = pytest.importorskip("pytorch_lightning.tuner")

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (".*isinstance.treespec, LeafSpec", ".*does not have many workers", ".*weights_only", ".*GPU available")
]


@pytest.fixture(autouse=True)
def _quiet(caplog):
    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Module(pl.LightningModule):
    """What docs/lightning.md shows."""

    def __init__(self, rewrap=True):
        super().__init__()
        self.net = Mlp(sizes=(4, 8, 4))
        self.lr = 1e-2
        self.rewrap = rewrap

    def training_step(self, batch, index):
        return loss_of(self.net, batch[0])

    def configure_optimizers(self):
        optimizer = FusedMainGradOptimizer(torch.optim.AdamW(self.parameters(), lr=self.lr), rewrap=self.rewrap)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loss_of(net, x):
    return net(x).square().mean()


def batches():
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)


def trainer(folder, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = False
    return pl.Trainer(**{"max_epochs": 1, "accelerator": "cpu", "default_root_dir": folder, **quiet, **settings})


def by_hand(num_fits, clip=None, num_accumulated=1):
    module = Module()
    for _ in range(num_fits):
        found = module.configure_optimizers()
        optimizer, scheduler = found["optimizer"], found["lr_scheduler"]["scheduler"]
        for number, (x,) in enumerate(batches(), 1):
            (loss_of(module.net, x) / num_accumulated).backward()
            if number % num_accumulated:
                continue
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return module


@pytest.mark.parametrize(
    ("settings", "same"),
    [({}, {}), ({"gradient_clip_val": 0.05}, {"clip": 0.05}), ({"accumulate_grad_batches": 2}, {"num_accumulated": 2})],
    ids=str,
)
def test_a_fit_and_a_second_one_end_as_the_loop_by_hand(tmp_path, settings, same):
    module = Module()
    runs = trainer(tmp_path, **settings)
    for number in (1, 2):
        runs.fit_loop.max_epochs = number
        runs.fit(module, batches())
        assert_equal_parameters(module, by_hand(number, **same))
    assert all(param.main_grad.dtype is torch.float32 for param in module.parameters())


def test_finding_a_learning_rate_and_then_fitting_ends_as_fitting_alone(tmp_path):
    module, alone = Module(), Module()
    runs = trainer(tmp_path)
    tuner.Tuner(runs).lr_find(module, batches(), num_training=12, min_lr=1e-3, max_lr=1e-2, update_attr=False)
    runs.fit(module, batches())
    trainer(tmp_path).fit(alone, batches())
    assert_equal_parameters(module, alone)


def test_a_fit_that_resumes_ends_as_one_that_was_not_interrupted(tmp_path):
    whole, module = Module(), Module()
    trainer(tmp_path, max_epochs=2).fit(whole, batches())
    runs = trainer(tmp_path)
    runs.fit(module, batches())
    runs.save_checkpoint(tmp_path / "half.ckpt")
    for resumed in (module, Module()):
        trainer(tmp_path, max_epochs=2).fit(resumed, batches(), ckpt_path=tmp_path / "half.ckpt")
        assert_equal_parameters(resumed, whole)


def test_the_block_of_the_page_runs_as_printed(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(compile(block, "docs/lightning.md", "exec"), namespace)
    (optimizer,) = namespace["trainer"].optimizers
    assert len(optimizer.state) == 4
    assert all(state["step"] == 4 for state in optimizer.state.values())


def test_without_rewrap_the_second_fit_raises_and_says_rewrap(tmp_path):
    module = Module(rewrap=False)
    runs = trainer(tmp_path)
    runs.fit(module, batches())
    with pytest.raises(RuntimeError, match=r"already has a main_grad.*still there holds it.*rewrap=True"):
        runs.fit(module, batches())
