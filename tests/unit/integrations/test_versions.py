"""Versions of the training libraries outside the supported range are refused, with the command that mends it."""

import ast
import configparser
import importlib.metadata
import re
from pathlib import Path

import pytest
from torch import nn

from fusedopt.integrations import transformers as integration
from fusedopt.integrations import versions
from fusedopt.integrations.trainer import FusedOptMixin

ROOT = Path(__file__).parents[3]
NAMES = tuple(versions.SUPPORTED)


@pytest.fixture
def pretend(monkeypatch):
    """Return a function that gives libraries other versions; None: not installed."""

    def give(**found):
        real = importlib.metadata.version

        def version(name):
            if name not in found:
                return real(name)
            if found[name] is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return give


def numbers(version):
    return tuple(int(part) for part in version.split("."))


def test_what_is_installed_is_supported():
    assert len(NAMES) == 3
    versions.require(*NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_both_ends_of_the_range_are_told_with_the_command_that_mends_it(pretend, name):
    oldest, below, why = versions.SUPPORTED[name]
    major, minor, patch = numbers(oldest)
    just_below = f"{major}.{minor}.{patch - 1}" if patch else f"{major}.{minor - 1}.99"
    for good in (oldest, f"{oldest}.post1", f"{major}.{minor}.{patch + 1}", f"{major}.{minor + 1}.0.dev0"):
        pretend(**{name: good})
        versions.require(name)
    for bad, said in ((just_below, why), (f"{below}.0.0", "newer than"), (f"{below}.0.0rc1", "newer than")):
        pretend(**{name: bad})
        with pytest.raises(ImportError, match=re.escape(f"{name} {bad} is")) as caught:
            versions.require(name)
        assert said in str(caught.value)
        assert f"pip install '{name}>={oldest},<{below}'" in str(caught.value)


def test_a_short_version_and_a_two_digit_one_are_compared_as_numbers(pretend):
    pretend(accelerate="1.9")
    with pytest.raises(ImportError, match=r"accelerate 1\.9 is too old"):
        versions.require("accelerate")
    pretend(accelerate="1.100")
    versions.require("accelerate")


def test_a_library_that_is_not_installed_is_said(pretend):
    pretend(peft=None)
    with pytest.raises(ImportError, match="peft is not installed; pip install 'peft>="):
        versions.require("transformers", "peft")


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_the_trainer_is_refused_wherever_it_is_first_used(pretend, monkeypatch, name):
    from transformers import Trainer

    monkeypatch.delitem(vars(integration), "FusedOptTrainer", raising=False)
    pretend(**{name: "0.1.0"})
    with pytest.raises(ImportError, match=f"{name} 0.1.0 is too old"):
        from fusedopt.integrations.transformers import FusedOptTrainer  # noqa: F401
    with pytest.raises(ImportError, match=f"{name} 0.1.0 is too old"):
        integration.optimizer_factory(None)
    with pytest.raises(ImportError, match=f"{name} 0.1.0 is too old"):
        type("Mine", (FusedOptMixin, Trainer), {})()


def test_accelerate_is_refused_before_the_model_is_touched(pretend):
    from fusedopt.integrations.accelerate import prepare

    pretend(accelerate="0.1.0")
    with pytest.raises(ImportError, match=r"accelerate 0\.1\.0 is too old"):
        prepare(None, None, None)


def test_peft_is_looked_at_only_where_its_modules_are_in_the_model(pretend):
    from fusedopt.integrations.refusals import refuse_model

    plain = nn.Sequential(nn.Linear(2, 2))
    adapter = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})(2, 2)
    pretend(peft="0.1.0")
    refuse_model(plain)
    with pytest.raises(ImportError, match=r"peft 0\.1\.0 is too old"):
        refuse_model(nn.Sequential(plain, adapter))
    pretend(peft=versions.SUPPORTED["peft"].oldest)
    refuse_model(nn.Sequential(plain, adapter))


def test_the_methods_that_are_looked_for_are_those_that_the_mixin_calls_on():
    tree = ast.parse((ROOT / "fusedopt" / "integrations" / "trainer.py").read_text())
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
    }
    assert called - {"__init__"} == set(versions.TRAINER_METHODS)
    assert len(versions.TRAINER_METHODS) == len(set(versions.TRAINER_METHODS))


@pytest.mark.parametrize("name", versions.TRAINER_METHODS)
def test_a_trainer_without_a_method_that_is_overridden_is_refused(name):
    methods = {method: None for method in versions.TRAINER_METHODS if method != name}
    almost = type("OtherTrainer", (), methods)
    with pytest.raises(TypeError, match=f"Mine has no {name} behind FusedOptMixin"):
        type("Mine", (FusedOptMixin, almost), {})()


def test_a_mixin_after_its_trainer_is_refused():
    from transformers import Trainer

    class Mine(Trainer, FusedOptMixin):
        def __init__(self):
            FusedOptMixin.__init__(self)

    with pytest.raises(TypeError, match=r"class Mine\(FusedOptMixin, Trainer\)"):
        Mine()


def pins(file):
    found = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / file).read_text(), flags=re.M)
    return {name: version for name, version in found if name in NAMES}


def test_every_file_that_names_versions_says_the_same():
    floor, newest = pins("requirements-floor.txt"), pins("requirements-dev.txt")
    assert floor == {name: supported.oldest for name, supported in versions.SUPPORTED.items()}
    assert sorted(newest) == sorted(NAMES)
    for name, version in newest.items():
        assert numbers(versions.SUPPORTED[name].oldest) <= numbers(version)
        assert numbers(version)[:1] < numbers(versions.SUPPORTED[name].below)

    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    needs = "\n".join(config["options.extras_require"].values()).splitlines()
    page = (ROOT / "docs" / "huggingface.md").read_text()
    for name, supported in versions.SUPPORTED.items():
        of_name = {line for line in needs if re.match(rf"{name}\b", line)}
        assert of_name == {f"{name}{supported.spec}"}
        assert f"| {name} | {supported.oldest} | {newest[name]} | {supported.below} |" in page
