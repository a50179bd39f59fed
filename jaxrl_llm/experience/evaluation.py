"""Held-out evaluation: avg@k and pass@k with 95 % intervals."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxrl_llm.config import RunConfig
from jaxrl_llm.experience.estimators import mean_interval, pass_at_k, wilson_interval
from jaxrl_llm.experience.policy import Policy
from jaxrl_llm.experience.prompts import Prompts, tokenize
from jaxrl_llm.experience.scored_rollout import ScoredRollout, sample_and_score
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.sampler import Sampler, SamplingConfig
from jaxrl_llm.tasks import Task
from jaxrl_llm.types import FinishReason


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
      accuracy: mean score over prompts and samples (avg@k).
      low, high: its 95 % interval (Wilson's for one right or wrong sample a prompt, over prompts otherwise).
      pass_at_k: share of prompts with a correct sample among all k.
      length: mean response length in tokens.
      truncated: share of responses cut at the limit.
      scored: the completions.
    """

    accuracy: float
    low: float
    high: float
    pass_at_k: float
    length: float
    truncated: float
    scored: ScoredRollout

    def metrics(self, name: str) -> dict[str, float]:
        """The numbers under `eval/<name>/`."""
        return {f"eval/{name}/{key}": value for key, value in self.numbers().items()}

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    def numbers(self) -> dict[str, float]:
        """Everything but the completions."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "scored"}


def evaluate(
    sampler: Sampler, params: Any, task: Task, tokenizer: Any, prompts: Prompts, key: jax.Array, samples: int
) -> Evaluation:
    """Samples every prompt `samples` times and grades the answers; a failed grader counts as not correct."""
    scored = sample_and_score(
        sampler, params, task, tokenizer, prompts.examples, prompts.tokens, key, samples, evaluation=True
    )
    scores = np.nan_to_num(scored.rewards).reshape(len(prompts), samples)
    per_prompt = scores.mean(axis=1)
    if samples == 1 and np.isin(scores, (0, 1)).all():
        low, high = wilson_interval(float(scores.sum()), len(prompts))
    else:
        low, high = mean_interval(per_prompt)
    correct = (scores >= 1).sum(axis=1)
    lengths = np.asarray(scored.rollout.response_mask).sum(axis=1)
    return Evaluation(
        accuracy=float(per_prompt.mean()),
        low=low,
        high=high,
        pass_at_k=float(np.mean([pass_at_k(samples, int(c), samples) for c in correct])),
        length=float(lengths.mean()),
        truncated=float((np.asarray(scored.rollout.finish_reason) == FinishReason.LENGTH).mean()),
        scored=scored,
    )


class Evaluator:
    """`evaluator(params, key) -> Evaluation` on a run's held-out prompts.

    Attributes:
      name: of the set of prompts.
      prompts: tokenised.
    """

    def __init__(self, run: RunConfig, task: Task, policy: Policy):
        self.name, examples = next(iter(task.evaluation.items()))
        chosen = examples[: run.evaluation.prompts or len(examples)]
        self.prompts = tokenize(chosen, policy.tokenizer, run.rollout.max_prompt_length)
        choice = Choice(temperature=run.evaluation.temperature, top_p=run.evaluation.top_p)
        config = SamplingConfig(run.rollout.max_response_length, policy.stop_ids, policy.pad_id, choice)
        self.sampler = Sampler(policy.graphdef, policy.config, config)
        self.task, self.tokenizer, self.samples = task, policy.tokenizer, run.evaluation.samples

    def __call__(self, params: Any, key: jax.Array) -> Evaluation:
        return evaluate(self.sampler, params, self.task, self.tokenizer, self.prompts, key, self.samples)


def pass_at(scored: ScoredRollout, samples: int) -> dict[int, tuple[float, float, float]]:
    """Unbiased pass@k for k = 1, 2, 4, ... and `samples`: k -> (mean over prompts, low, high), 95 % over prompts.

    Args:
      scored: group-major, `samples` completions of each prompt; a failed grader counts as not correct.
      samples: n.
    """
    correct = (np.nan_to_num(scored.rewards).reshape(-1, samples) >= 1).sum(axis=1)
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples})
    result = {}
    for k in ks:
        per_prompt = [pass_at_k(samples, int(c), k) for c in correct]
        result[k] = (float(np.mean(per_prompt)), *mean_interval(per_prompt))
    return result
