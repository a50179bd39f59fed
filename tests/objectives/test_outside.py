"""An objective of one's own, by import path or decorator, from a file outside the package."""

import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.config import RunConfig
from jaxrl_llm.objectives import LossInputs

GOOD = '''
import jax.numpy as jnp
from jaxrl_llm.objectives import TokenLoss, objective

def huber(t, *, width: float = 0.5):
    """-A r, and beyond `width` a pull back in proportion to the log-ratio."""
    return TokenLoss(-t.advantages * t.ratio + jnp.maximum(jnp.abs(t.log_ratio) - width, 0.0))

@objective("marked", anchor="old")
def marked(t, *, scale: float = 2.0):
    return TokenLoss(-scale * t.advantages * t.ratio)

def reduced(t):
    return TokenLoss(jnp.mean(t.ratio))

def bare(t, *, width=0.5):
    return TokenLoss(t.ratio)

def plain(t):
    return t.ratio

def broken(t):
    return TokenLoss(t.ratio @ t.ratio)

value = 3
'''


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("lab") / "my_losses.py"
    path.write_text(GOOD)
    return path


def test_a_function_of_ones_own_trains_like_a_built_in(module):
    # log-ratios 0 and 1, A = 1 and -2, width .25: -1 + 0 and 2 e + .75, by hand.
    mu = np.full((1, 2), -2.0, np.float32)
    inputs = LossInputs(mu + np.array([[0, 1]], np.float32), mu, np.array([[1, -2]], np.float32), np.ones((1, 2), bool))
    loss = objectives.build({"name": f"{module}:huber", "huber": {"width": 0.25}})
    np.testing.assert_allclose(loss(inputs).numerator, -1 + 2 * np.e + 0.75, rtol=1e-6)
    run = RunConfig.read({"objective": {"name": f"{module}:huber", "huber": {"width": 0.25}}})
    assert run.estimator == "group"


def test_a_decorator_says_what_an_import_path_cannot(module):
    assert objectives.build({"name": f"{module}:marked"}).needs == {"old_logprobs"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}:reduced", r"shape \(\).*one value a token"),
        ("{}:bare", "argument 'width' without annotation"),
        ("{}:plain", "must be a TokenLoss"),
        ("{}:broken", "fails on a batch of 2 x 3"),
        ("{}:value", "not a function but int"),
        ("{}:hubber", "has no 'hubber'; it has:.*huber"),
        ("{}.py:huber", "not there"),
        ("no_such_lab.losses:huber", "module 'no_such_lab.losses', which is not found"),
        (":huber", "an import path is module:name"),
    ],
)
def test_what_cannot_be_an_objective_is_told_before_anything_compiles(module, name, message):
    with pytest.raises(ValueError, match=message):
        objectives.build({"name": name.format(module)})


def test_a_setting_of_ones_own_is_checked_as_any_other(module):
    with pytest.raises(ValueError, match=r"unknown field config\.objective\.huber\.widht"):
        objectives.build({"name": f"{module}:huber", "huber": {"widht": 1.0}})
