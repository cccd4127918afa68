import pytest

from async_rl.tasks.rendering import decode, render
from async_rl.tasks.task import Instance, TaskError

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet()
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(template=None):
    """A real tokenizer over bytes, with a start token that it adds when asked for special tokens."""
    model = tokenizers.models.BPE({c: n for n, c in enumerate(sorted(ALPHABET))}, [])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    start = backend.token_to_id("<s>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def test_a_prompt_is_rendered_without_special_tokens():
    tokenizer = byte_tokenizer()
    ids = render(Instance("4 8=", None, "48"), tokenizer)
    assert tokenizer.bos_token_id in tokenizer.encode("4 8=")
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.decode(ids) == "4 8="


def test_messages_are_rendered_up_to_where_the_answer_starts():
    tokenizer = byte_tokenizer(TEMPLATE)
    ids = render(Instance(None, ({"role": "user", "content": "hi?"},), ""), tokenizer)
    assert all(type(token) is int for token in ids)
    assert tokenizer.decode(ids) == "<user>hi?</s><assistant>"


def test_messages_without_a_chat_template_are_refused_with_advice():
    with pytest.raises(TaskError, match="no chat template"):
        render(Instance(None, ({"role": "user", "content": "hi"},), ""), byte_tokenizer())


@pytest.mark.parametrize("instance", [Instance(None, None, ""), Instance("a", ({"role": "user"},), "")])
def test_an_instance_with_both_or_neither_is_refused(instance):
    with pytest.raises(TaskError, match="and not both"):
        render(instance, byte_tokenizer(TEMPLATE))


def test_an_empty_prompt_is_refused():
    with pytest.raises(TaskError, match="no tokens"):
        render(Instance("", None, ""), byte_tokenizer())


def test_decoding_gives_back_the_text_without_stop_and_special_tokens():
    tokenizer = byte_tokenizer()
    text = " two  spaces, 1 , 2 ."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert decode([*ids, tokenizer.eos_token_id], tokenizer) == text
    assert decode([tokenizer.bos_token_id, *ids], tokenizer) == text
    assert decode([tokenizer.eos_token_id], tokenizer) == ""
    assert decode([], tokenizer) == ""


def test_a_stop_token_that_is_not_marked_special_is_dropped_too():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("ab;", add_special_tokens=False)
    tokenizer.eos_token = ";"
    assert decode(ids, tokenizer) == "ab"
