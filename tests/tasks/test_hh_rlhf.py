"""Every dialogue of hh-rlhf against the text that it came from: nothing lost, cut at the last reply, the rest counted."""

import gzip
import json
import os
import pathlib
import re

import pytest

from jaxrl_llm.tasks import dataset
from jaxrl_llm.tasks.sources import Source

SAMPLE = pathlib.Path(__file__).parents[1] / "data" / "hh_rlhf.jsonl"
# The published file, in a folder of the user's.
REAL = pathlib.Path(os.environ.get("JAXRL_LLM_DATA", "nowhere")) / "hh-rlhf-harmless-base-test.jsonl.gz"


def words(text):
    """What was said, whoever said it: turns of one speaker in a row become one."""
    return "".join(re.sub(r"\n\n(Human|Assistant):", "", text).split())


def rows(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "path", [SAMPLE, pytest.param(REAL, marks=pytest.mark.skipif(not REAL.exists(), reason="JAXRL_LLM_DATA lacks it"))]
)
def test_prompt_and_reply_are_the_row_again(path):
    found = dataset.read("set", Source(str(path), "hh_rlhf"), "refuse", "config.task.set")
    originals = {words(row["chosen"]): row for row in rows(path)}
    for example in found.examples:
        prompt = "".join(turn["content"] for turn in example.prompt)
        row = originals[words(prompt + example.metadata["chosen"])]
        assert words(row["rejected"]) == words(prompt + example.metadata["rejected"])
        roles = [turn["role"] for turn in example.prompt]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert example.metadata["chosen"] == row["chosen"].rpartition("\n\nAssistant:")[2].strip()
    assert len(found.examples) + sum(found.dropped.values()) == len(rows(path))
