"""The autopsy counted by hand on six tokens."""

import chex
import numpy as np

from jaxrl_llm.objectives import diagnostics


class Autopsy(chex.TestCase):
    @chex.all_variants(with_pmap=False)
    def test_six_tokens(self):
        #               agree  ratio keeps  ratio keeps  pred. keeps  inside  A = 0
        d = np.array([[0.9, 0.5, 0.5, 0.5, 0.1, 0.9]])
        rate = np.array([[1.0, 1.0, 1.0, -1.0, 1.0, 1.0]])
        ratio = np.array([[2.0, 0.5, 0.5, 2.0, 2.0, 2.0]])
        advantages = np.array([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
        after = np.array([[1.0, 0.6, 0.4, 0.4, 0.2, 1.0]])  # grew, grew, shrank, shrank, ...

        def run(d, rate, ratio, advantages, after):
            seen = diagnostics.verdicts(d, rate, ratio, advantages, advantages < 9, 0.2)
            return diagnostics.autopsy(seen, d, after)

        got = self.variant(run)(d, rate, ratio, advantages, after)
        counts = {name: (float(m.numerator), float(m.denominator)) for name, m in got.items()}
        assert counts == {
            "autopsy/disagree": (3, 4),  # of the four tokens outside
            "autopsy/outside_tokens": (4, 1),
            "autopsy/shrank_tokens": (2, 1),  # among the three disputed ones
            "autopsy/ratio/unsafe_keep": (1, 2),
            "autopsy/ratio/kept_tokens": (2, 1),
            "autopsy/ratio/contraction_keep": (1, 2),
            "autopsy/predictive/unsafe_keep": (0, 1),
            "autopsy/predictive/kept_tokens": (1, 1),
            "autopsy/predictive/contraction_keep": (1, 2),
        }


def test_the_boundary_is_kept():
    zero = np.zeros((1, 1))
    seen = diagnostics.verdicts(zero + 0.2, zero, zero + 1, zero + 1, zero == 0, 0.2)
    assert not seen.outside.any()
    assert seen.ratio.all()
    assert seen.predictive.all()
