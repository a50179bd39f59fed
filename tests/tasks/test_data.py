"""Data sets in every schema and format: the right examples, and an account of every row."""

import dataclasses
import gzip
import json
import os
import pathlib

import datasets
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.config import RunConfig, default_config
from jaxrl_llm.tasks import dataset, mathematics
from jaxrl_llm.tasks.base import Example
from jaxrl_llm.tasks.sources import Source

DATA = pathlib.Path(__file__).parents[1] / "data"
REAL = os.environ.get("JAXRL_LLM_DATA", "")  # a folder with copies of the published files

datasets.disable_progress_bars()


def read(path, schema, malformed="refuse"):
    return dataset.read("set", Source(str(path), schema), malformed, "config.task.set")


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def math_task(**fields):
    names = ("dapo_math_17k", "aime24", "aime25", "math500", "gsm8k_train", "gsm8k_test")
    files = dict(zip(names, ("dapo", *names[1:]), strict=True))
    sources = {name: {"path": str(DATA / f"{file}.jsonl")} for name, file in files.items()}
    return tasks.create({"name": "mathematics", "mathematics": {"sources": sources, **fields}})


def test_dapo_rows_are_messages_with_a_truth_each_prompt_once():
    found = read(DATA / "dapo.jsonl", "dapo")
    assert [e.answer for e in found.examples] == ["15", "1", "3"]
    assert found.examples[1].prompt[0]["role"] == "user"
    assert "7^{100}" in found.examples[1].prompt[0]["content"]
    assert found.dropped == {"repeated": 2}
    assert str(found) == "3 of 5 rows; left out: 2 repeated"


def test_problems_under_their_usual_names():
    assert [e.answer for e in read(DATA / "aime24.jsonl", "problem").examples] == ["015", "7"]
    assert [e.answer for e in read(DATA / "aime25.jsonl", "problem").examples] == ["180", "100"]
    first, second = read(DATA / "math500.jsonl", "problem").examples
    assert (first.answer, second.answer) == (r"\sqrt{2}", "(-1,3)")
    assert first.metadata == {"subject": "Prealgebra", "level": 1}
    assert second.prompt == ({"role": "user", "content": "Solve $|x-1|<2$. Give the answer as an interval."},)


def test_gsm8k_answers_and_worked_solutions():
    first, second, third = read(DATA / "gsm8k_train.jsonl", "gsm8k").examples
    assert (first.answer, second.answer, third.answer) == ("39", "1250", "40")
    assert first.solution == "She picks 12*4=48 apples.\n48-9=39 are left.\n#### 39"


def test_dialogues_are_split_at_the_last_assistant():
    found = read(DATA / "hh_rlhf.jsonl", "hh_rlhf")
    one, several, quoted = found.examples
    assert one.prompt == ({"role": "user", "content": "Which tea keeps me awake?"},)
    assert one.metadata == {"chosen": "Black tea has the most caffeine.", "rejected": "Tea is a drink."}
    assert [(m["role"], m["content"]) for m in several.prompt] == [
        ("user", "My plant is yellow."),
        ("assistant", "Do you water it often?"),
        ("user", "Every day."),
    ]
    assert quoted.solution == "Then nothing."
    assert quoted.prompt[-1] == {"role": "user", "content": "and then what?"}
    assert found.dropped == {"empty final turn": 1, "dialogues part before the final turn": 1}


@pytest.mark.parametrize("name", ["dapo", "gsm8k_train", "hh_rlhf"])
def test_every_format_gives_the_same_examples(name, tmp_path):
    schema = name.removesuffix("_train")
    expected = read(DATA / f"{name}.jsonl", schema)
    table = datasets.Dataset.from_list(rows(DATA / f"{name}.jsonl"))
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "rows.json").write_text(json.dumps(rows(DATA / f"{name}.jsonl")))
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as f:
        f.write((DATA / f"{name}.jsonl").read_text(encoding="utf-8"))
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    for path in ("rows.parquet", "saved", "splits", "rows.json", "rows.jsonl.gz", arrow):
        found = read(tmp_path / path, schema)
        assert found.examples == expected.examples, path
        assert found.dropped == expected.dropped, path


def test_line_separators_inside_a_text_do_not_split_its_row(tmp_path):
    row = {"problem": "one\u2028two\x85three\x0bfour", "answer": "1"}
    path = write(tmp_path / "odd.jsonl", [json.dumps(row, ensure_ascii=False)] * 2)
    assert [e.prompt[0]["content"] for e in read(path, "problem").examples] == [row["problem"]] * 2


GOOD_PROBLEM = '{"problem": "1+1?", "answer": "2"}'


@pytest.mark.parametrize(
    ("schema", "line", "message"),
    [
        ("problem", '{"problem": "1+1?"', "not JSON"),
        ("problem", '["1+1?", "2"]', "a JSON object is needed, this is list"),
        ("problem", '{"answer": "2"}', "field 'problem': missing"),
        ("problem", '{"problem": "1+1?"}', "field 'answer': missing"),
        ("problem", '{"problem": 7, "answer": "2"}', "field 'problem': str is needed, this is 7"),
        ("problem", '{"problem": " ", "answer": "2"}', "field 'problem': empty"),
        ("problem", '{"problem": "1+1?", "answer": true}', "field 'answer': an answer as text or integer is needed"),
        ("problem", '{"problem": "1+1?", "answer": null}', "field 'answer': missing"),
        ("gsm8k", '{"question": "1+1?", "answer": "2"}', "field 'answer': no number after \"####\""),
        ("dapo", '{"prompt": "1+1?"}', "field 'prompt': list is needed"),
        ("dapo", '{"prompt": []}', "field 'prompt': no messages"),
        ("dapo", '{"prompt": [{"role": "user"}]}', r"field 'prompt\[0\].content': missing"),
        ("dapo", '{"prompt": [{"role": "user", "content": "?"}]}', "field 'reward_model': missing"),
        (
            "dapo",
            '{"prompt": [{"role": "user", "content": "?"}], "reward_model": {}}',
            "field 'reward_model.ground_truth': missing",
        ),
        ("hh_rlhf", '{"chosen": "\\n\\nHuman: a\\n\\nAssistant: b"}', "field 'rejected': missing"),
        ("hh_rlhf", '{"chosen": "a", "rejected": "b"}', r"field 'chosen': it must begin with"),
        ("hh_rlhf", '{"chosen": "\\n\\nHuman: a", "rejected": "\\n\\nHuman: a"}', "field 'chosen': there is no"),
    ],
)
def test_a_malformed_row_is_named_by_file_number_and_field(schema, line, message, tmp_path):
    sample = {"problem": "math500", "gsm8k": "gsm8k_train", "dapo": "dapo", "hh_rlhf": "hh_rlhf"}[schema]
    good = (DATA / f"{sample}.jsonl").read_text(encoding="utf-8").splitlines()[:1]
    path = write(tmp_path / "rows.jsonl", [*good, line, line])
    with pytest.raises(ValueError, match=rf"rows.jsonl, row 2, {message}.*set malformed to 'skip'"):
        read(path, schema)
    found = read(path, schema, malformed="skip")
    assert (len(found.examples), found.dropped) == (1, {"malformed": 2})
    assert "rows.jsonl, row 2, " in str(found)


def test_blank_lines_are_counted_and_a_source_without_rows_is_refused(tmp_path):
    found = read(write(tmp_path / "rows.jsonl", [GOOD_PROBLEM, "", GOOD_PROBLEM]), "problem")
    assert (len(found.examples), found.dropped) == (2, {"blank": 1})
    with pytest.raises(ValueError, match="has no usable rows: 0 of 1 rows; left out: 1 malformed"):
        read(write(tmp_path / "bad.jsonl", ["{}"]), "problem", malformed="skip")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/file.jsonl", "there is no such file or folder"),
        ("nothing.parquet", "there is no such file or folder"),
        ("", "give a hub id, a file or a folder"),
        (str(DATA / "../tiny.py"), "files that end in .py are not known; choose from: .jsonl, .json"),
        ("no-one/no-such-set", "without the network, give the path of a local copy"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(path, message):
    with pytest.raises(ValueError, match=rf"config.task.set.path = .* cannot be read: .*{message}"):
        read(path, "problem")


def test_a_broken_parquet_file_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 no parquet at all")
    with pytest.raises(ValueError, match=r"rows.parquet' cannot be read"):
        read(path, "problem")


def test_the_task_asks_as_configured_and_trains_on_nothing_that_it_evaluates():
    task = math_task(
        train="gsm8k_train", evaluation=("gsm8k_test", "aime24"), system="Be brief.", instruction="Box it."
    )
    # The third training problem is the second test problem but for a space.
    assert [e.answer for e in task.train] == ["39", "1250"]
    assert task.accounts["gsm8k_train"] == "3 of 3 rows; 1 contain an evaluation problem"
    assert task.train[0].prompt[0] == {"role": "system", "content": "Be brief."}
    assert task.train[0].prompt[1]["content"].endswith("How many are left?\n\nBox it.")
    assert {name: len(examples) for name, examples in task.evaluation.items()} == {"gsm8k_test": 2, "aime24": 2}


def test_prompts_that_bring_their_instruction_get_no_other():
    task = math_task(train="dapo_math_17k", evaluation=("math500",), instruction="Box it.", chat=False)
    assert "Box it." not in task.train[0].prompt
    assert task.evaluation["math500"][0].prompt.endswith("in simplest form.\n\nBox it.\n\n")


def test_own_data_in_any_schema():
    own = {"path": str(DATA / "gsm8k_test.jsonl"), "schema": "gsm8k"}
    sources = {"own_train": own, "own_test": {"path": str(DATA / "math500.jsonl")}}
    task = tasks.create(
        {"name": "mathematics", "mathematics": {"train": "own_train", "evaluation": ("own_test",), "sources": sources}}
    )
    assert [e.answer for e in task.train] == ["12", "40"]
    assert len(task.evaluation["own_test"]) == 2


def test_scoring_knows_lengths_and_truncation():
    task = math_task(
        train="gsm8k_train",
        evaluation=("aime24",),
        rewards={"grader": "gsm8k", "truncated": "mask", "weights": {"overlong": 1.0}}
        | {"overlong_max_length": 10, "overlong_buffer": 5},
    )
    examples = [task.train[0]] * 3
    completions = ["#### 39", "#### 39", "#### 38"]
    assert task.grade(examples, completions) == [1, 1, 0]
    assert task.score(examples, completions, lengths=[5, 6, 10], truncated=[False, False, True]) == [1.0, 0.8, -1.0]
    assert task.truncated == "mask"


def by_length(examples=(), replies=()):
    """A judge of replies for the test below: a function without arguments gives it."""
    return [float(len(reply)) for reply in replies]


def shortest():
    return by_length


def test_dialogues_are_scored_by_the_judge_that_is_named():
    source = {"path": str(DATA / "hh_rlhf.jsonl")}
    fields = {"train": source, "evaluation": source, "judge": f"{__name__}:shortest"}
    task = tasks.create({"name": "preferences", "preferences": fields})
    assert task.score(task.train[:2], ["abc", ""]) == [3.0, 0.0]
    assert task.accounts["train"].startswith("3 of 5 rows")
    for judge, message in (("no", 'it must be a "package.module:function"'), ("no.such:judge", "cannot be imported")):
        with pytest.raises(ValueError, match=f"config.task.preferences.judge is {judge!r}.*{message}"):
            tasks.create({"name": "preferences", "preferences": {**fields, "judge": judge}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train": "gsm9k"}, "unknown data set config.task.mathematics.train 'gsm9k'; choose from: aime24"),
        ({"evaluation": ()}, r"config.task.mathematics.evaluation is \(\); it must be at least one set"),
        ({"evaluation": ("aime26",)}, "unknown data set config.task.mathematics.evaluation 'aime26'"),
        ({"malformed": "drop"}, "config.task.mathematics.malformed is 'drop'; choose from: 'refuse', 'skip'"),
        ({"sources": {"aime24": {"file": "x"}}}, "unknown field config.task.mathematics.sources.aime24.file"),
        ({"sources": {"aime24": {"schema": "aime"}}}, "sources.aime24.schema is 'aime'; choose from: 'dapo'"),
    ],
)
def test_bad_configurations_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        tasks.create({"name": "mathematics", "mathematics": fields})


def test_a_run_chooses_its_task_by_name():
    config = default_config()
    config.task.name = "mathematics"
    config.task.mathematics.train = "gsm8k_train"
    config.task.mathematics.evaluation = ("gsm8k_test",)
    for name in ("gsm8k_train", "gsm8k_test"):
        config.task.mathematics.sources[name].path = str(DATA / f"{name}.jsonl")
    task = tasks.create(RunConfig.read(config).task)
    assert (task.name, len(task.train), task.tokenizer) == ("mathematics", 2, None)
    config.task.name = "mathematic"
    with pytest.raises(ValueError, match="unknown task config.task.name 'mathematic'; choose from: arithmetic, math"):
        tasks.create(RunConfig.read(config).task)


def test_without_compares_whole_problems_whatever_their_spaces_and_case():
    def example(text):
        return Example("0", ({"role": "user", "content": text},), "")

    train = [example(text) for text in ("Solve:  What is\n1+1?  Box it.", "What is 1+1", "Something else")]
    assert mathematics.without(train, [example("what is 1+1?")]) == train[1:]


@pytest.mark.skipif(not REAL, reason="JAXRL_LLM_DATA is not set")
@pytest.mark.parametrize(
    ("file", "schema", "examples", "dropped"),
    [
        ("gsm8k-train.jsonl", "gsm8k", 7473, {}),
        ("gsm8k-test.jsonl", "gsm8k", 1319, {}),
        ("aime24.jsonl", "problem", 30, {}),
        ("aime25.jsonl", "problem", 30, {}),
        (
            "hh-rlhf-harmless-base-test.jsonl.gz",
            "hh_rlhf",
            2303,
            {"empty final turn": 4, "dialogues part before the final turn": 5},
        ),
    ],
)
def test_published_files(file, schema, examples, dropped):
    found = read(pathlib.Path(REAL) / file, schema)
    assert (len(found.examples), found.dropped) == (examples, dropped)
    assert all(dataclasses.astuple(e)[1] for e in found.examples)
