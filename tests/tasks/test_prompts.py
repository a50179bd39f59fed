"""Prompts as token ids: the template's, one begin token, nothing cut. Tokenizers are transformers' own, made here."""

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jaxrl_llm.experience.prompts import next_prompts, tokenize
from jaxrl_llm.tasks.base import Example
from jaxrl_llm.tasks.prompts import encode

WORDS = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "what", "is", "one", "two", "?"]
TEMPLATE = (
    "{{ begin }}{% for m in messages %}<{{ m.role }}> {{ m.content }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(adds_begin: bool, template_begins: bool, chat: bool = True):
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_begin:
        inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    if chat:
        made.chat_template = TEMPLATE.replace("{{ begin }}", "{{ bos_token }}" if template_begins else "")
    return made


TEXT = Example("0", "what is one ?", "")
CHAT = Example("1", ({"role": "user", "content": "what is one ?"},), "")
BODY = [3, 5, 6, 7, 9, 2, 4]  # <user> what is one ? </s> <assistant>


@pytest.mark.parametrize("template_begins", [True, False])
@pytest.mark.parametrize("adds_begin", [True, False])
def test_a_conversation_begins_once(adds_begin, template_begins):
    ids = encode(tokenizer(adds_begin, template_begins), CHAT)
    assert ids == ([1, *BODY] if adds_begin or template_begins else BODY)


def test_text_begins_once_even_where_it_brings_its_own():
    assert encode(tokenizer(True, True), TEXT) == [1, 5, 6, 7, 9]
    assert encode(tokenizer(True, True), Example("0", "<s> what", "")) == [1, 5]
    assert encode(tokenizer(False, True), TEXT) == [5, 6, 7, 9]


def test_several_turns_go_through_the_template_in_order():
    turns = [("user", "one"), ("assistant", "two"), ("user", "what")]
    example = Example("0", tuple({"role": role, "content": text} for role, text in turns), "")
    assert encode(tokenizer(True, True), example) == [1, 3, 7, 2, 4, 8, 2, 3, 5, 2, 4]


def test_prompts_are_the_same_on_every_day():
    """The date as in Llama 3.x's template, which asks the clock where nobody tells it."""
    made = tokenizer(False, False)
    today = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    made.chat_template = today + "{{ 'one' if date_string == '26 Jul 2024' else 'two' }}"
    assert encode(made, CHAT) == [7]


def test_a_conversation_needs_a_template():
    with pytest.raises(
        ValueError, match="prompt '1' is a conversation and the tokenizer has no chat template; set the"
    ):
        encode(tokenizer(True, True, chat=False), CHAT)


def lengths(*counts):
    return [Example(str(i), " ".join(["one"] * count), "") for i, count in enumerate(counts)]


def test_prompts_over_the_limit_are_dropped_with_a_count_and_never_cut():
    fitting = tokenize(lengths(2, 5, 3, 4), tokenizer(True, True), limit=4)
    assert [e.id for e in fitting.examples] == ["0", "2"]
    assert fitting.tokens == [[1, 7, 7], [1, 7, 7, 7]]
    assert fitting.dropped == 2


def test_the_stream_passes_over_long_prompts_and_forgets_none():
    train, seen, dropped, position = lengths(2, 9, 3, 9, 4, 9, 1), [], 0, 0
    for _ in range(4):  # two epochs of the four short ones, two at a time
        prompts, position = next_prompts(train, tokenizer(True, True), 5, seed=3, position=position, count=2)
        assert len(prompts) == 2
        seen += [e.id for e in prompts.examples]
        dropped += prompts.dropped
    assert sorted(seen[:4]) == sorted(seen[4:]) == ["0", "2", "4", "6"]
    assert position == len(seen) + dropped <= 14
    with pytest.raises(ValueError, match="max_prompt_length is 1; not one training prompt is that short"):
        next_prompts(train, tokenizer(True, True), 1, seed=3, position=0, count=2)
