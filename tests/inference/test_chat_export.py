"""A model that was tuned on conversations, in transformers: the template gives our ids there, and
the answers are ours. test_llama_cpp.py has the same for llama.cpp."""

import pytest
from foreign_models import in_transformers, shaken
from sample_data import CHAT, ask, make_tokenizer
from test_gguf import QWEN3, learned

import plaingpt
from plaingpt.data.chat_tokenizer import ChatTokenizer
from plaingpt.inference.generation import generate
from plaingpt.inference.hf_export import write_hf

SYSTEM = {'role': 'system', 'content': 'Be  brief.\n'}
CONVERSATIONS = [
    ask('Hi!', 'Hello.')[:1], ask(' ', '\n', '  Hello\n\n', "it's\r\n "), [SYSTEM, *ask('a', 'b')],
    [SYSTEM, *ask('a<b> | <end> <|user |>', '{{ x }} {% if y %} {# z #}', "'\"\\'", '<|')],
    [*ask('a', 'b'), *ask('c', 'd')[1:]], [*ask('a', 'b')[:1], *ask('c', 'd')]]
FOREIGN = [ask('Grüße, 日本語 🎉', 'e\u0301\u200b\xa0x')]  # not in the vocabulary of 'char'
ANSWER = 'The quick brown fox jumps over the lazy dog, and then it went home.'
KNOWN_BY_HEART = [SYSTEM, *ask('Who?', ANSWER)]
KINDS = ['char', 'bpe:300', pytest.param('gpt2', marks=pytest.mark.slow)]


def chat_tokenizer(kind, text_file):
    texts = [text_file.read_text(encoding='utf-8'),
             *(message['content'] for messages in CONVERSATIONS for message in messages)]
    return ChatTokenizer(make_tokenizer(kind, texts))


@pytest.fixture(scope='module', params=[
    'learned positions', pytest.param('rotary', marks=pytest.mark.slow)])
def model(request):
    """It knows an answer by heart."""
    flags = {} if request.param == 'learned positions' else QWEN3
    model = shaken(CHAT.vocab_size, std=0.1, document_attention=True,
                   document_start=CHAT.bos_id, **flags)
    return learned(model, CHAT.encode_conversation(KNOWN_BY_HEART)[0].tolist(), steps=60)


@pytest.mark.parametrize('kind', KINDS)
def test_the_template_gives_our_ids_in_transformers(kind, tmp_path, text_file):
    ours = chat_tokenizer(kind, text_file)
    write_hf(tmp_path, shaken(ours.vocab_size, n_layer=1, n_head=1, n_embd=8), ours)
    from transformers import AutoTokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.convert_tokens_to_ids([theirs.bos_token, theirs.eos_token]) == [
        ours.bos_id, ours.end_of_turn]
    for messages in CONVERSATIONS + FOREIGN * (kind != 'char'):
        ids = theirs.apply_chat_template(messages, return_dict=True)['input_ids']
        assert ids == ours.encode_conversation(messages)[0].tolist()
        assert theirs.decode(ids) == ours.decode(ids)
        ids = theirs.apply_chat_template(messages, return_dict=True,
                                         add_generation_prompt=True)['input_ids']
        assert ids == ours.encode_prompt(messages).tolist()
    assert plaingpt.load(tmp_path).tokenizer.to_json() == ours.to_json()


def test_transformers_gives_our_answers(model, tmp_path):
    write_hf(tmp_path, model, CHAT)
    from transformers import AutoTokenizer
    theirs, tokenizer = in_transformers(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    prompt = CHAT.encode_prompt(KNOWN_BY_HEART[:-1]).tolist()
    inputs = tokenizer.apply_chat_template(KNOWN_BY_HEART[:-1], add_generation_prompt=True,
                                           return_dict=True, return_tensors='pt')
    for most in (20, 100):
        ours, = generate(model, [prompt], most, temperature=0,
                         on_token=lambda _, token: token == CHAT.end_of_turn)
        written = theirs.generate(**inputs, do_sample=False, max_new_tokens=most)[0].tolist()
        assert CHAT.decode(ours) == ANSWER[:most]
        assert written[len(prompt):] == ours + [CHAT.end_of_turn] * (most > len(ANSWER))
    assert set(theirs.generation_config.eos_token_id) == CHAT.stop_ids
