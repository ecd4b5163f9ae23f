"""OpenAI's own client talks to a real server process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from chat_model import ANSWERS, save
from helpers import CHAT
from serving_process import serving

import plaingpt
import sample
from model import GPT, GPTConfig

openai = pytest.importorskip('openai', reason='needs openai: pip install openai')


def client(server):
    return openai.OpenAI(base_url=server.url + '/v1', api_key='none', max_retries=0)


@pytest.fixture(scope='module')
def api(server):
    with client(server) as api:
        yield api


@pytest.fixture(scope='module')
def chat_api(chat_server):
    with client(chat_server) as api:
        yield api


def ask(api, *contents, **options):
    """A conversation of a user and the assistant, in turns."""
    messages = [{'role': ('user', 'assistant')[i % 2], 'content': content}
                for i, content in enumerate(contents)]
    return api.chat.completions.create(model='tuned', messages=messages,
                                       **{'temperature': 0, **options})


def test_the_model_is_listed(api):
    model, = api.models.list()
    assert (model.id, model.object, model.chat) == ('out', 'model', False)


def test_a_completion_is_that_of_sample_py(api, trained, capsys):
    found = api.completions.create(model='out', prompt='def ', temperature=0.7, top_p=0.9, seed=5,
                                   max_tokens=40, extra_body={'top_k': 20, 'min_p': 0.01})
    sample.main([f'--out_dir={trained}', '--checkpoint=latest', '--start=def ', '--num_samples=1',
                 '--temperature=0.7', '--top_p=0.9', '--top_k=20', '--min_p=0.01', '--seed=5',
                 '--device=cpu', '--max_new_tokens=40'])
    choice, = found.choices
    assert capsys.readouterr().out.endswith(f'---------------\ndef {choice.text}\n')
    assert choice.finish_reason == 'length'
    assert found.usage.to_dict() == {'prompt_tokens': 4, 'completion_tokens': 40,
                                     'total_tokens': 44}


def test_texts_without_a_seed_differ(api):
    texts = {api.completions.create(model='out', prompt='def ', max_tokens=40).choices[0].text
             for _ in range(3)}
    assert len(texts) == 3


def test_a_model_with_other_flags_writes_what_it_writes_without_a_server(tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(
        16, CHAT.vocab_size, 2, 2, 32, rotary=True, rmsnorm=True, mlp='swiglu', conv=4,
        value_embeddings=True, document_attention=True, document_start=CHAT.conversation))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    generator = plaingpt.load(save(model, CHAT, tmp_path / 'out'), checkpoint='latest')
    expected = generator.generate('many words', max_new_tokens=40, temperature=0)
    with serving(tmp_path, tmp_path / 'out') as server, client(server) as api:
        found = api.completions.create(model='out', prompt='many words', max_tokens=40,
                                       temperature=0)
    assert found.choices[0].text == expected
    assert len('many words' + expected) > 16  # past the context


def test_a_prompt_that_is_too_long_is_continued_at_its_end_and_the_response_says_so(api, trained):
    prompt = 'def ' * 9  # block_size is 16
    found = api.completions.with_raw_response.create(model='out', prompt=prompt, temperature=0)
    assert found.headers['x-unseen'] == '20'
    generator = plaingpt.load(trained, checkpoint='latest')
    text = generator.generate(prompt, max_new_tokens=16, temperature=0)
    assert found.parse().choices[0].text == text


def test_requests_that_come_together_are_answered_as_each_alone(api):
    def write(i):
        settings = dict(temperature=0) if i % 2 else dict(temperature=1.0, top_p=0.8, seed=i)
        return api.completions.create(model='out', prompt='def __init__'[:1 + i], max_tokens=40,
                                      **settings).choices[0].text

    alone = [write(i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, range(4))) == alone


def test_a_stream_is_the_text_in_pieces(api):
    options = dict(model='out', prompt='def ', temperature=0, max_tokens=12)
    whole = api.completions.create(**options)
    *chunks, last = api.completions.create(**options, stream=True,
                                           stream_options={'include_usage': True})
    assert ''.join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert len(chunks) > 12 and chunks[-1].choices[0].finish_reason == 'length'
    assert last.choices == [] and last.usage == whole.usage


def test_a_text_ends_before_a_stop_string(api):
    options = dict(model='out', prompt='def ', temperature=0, max_tokens=30)
    text = api.completions.create(**options).choices[0].text
    stop = text[10:13]
    found, = api.completions.create(**options, stop=['\x00\x01', stop]).choices
    assert found.text == text[:text.index(stop)] and found.finish_reason == 'stop'
    pieces = api.completions.create(**options, stop=stop, stream=True)
    assert ''.join(piece.choices[0].text for piece in pieces) == found.text


def test_a_chat_is_answered_to_the_end_of_the_turn(chat_api):
    for question, answer in ANSWERS.items():
        found = ask(chat_api, question)
        assert found.choices[0].message.content == answer
        assert found.choices[0].finish_reason == 'stop'
        assert found.usage.prompt_tokens == len(question.encode()) + 4  # and four special tokens
        assert found.usage.completion_tokens == len(answer.encode())


def test_a_chat_streams(chat_api):
    chunks = list(ask(chat_api, 'ä?', stream=True))
    assert chunks[0].choices[0].delta.role == 'assistant'
    assert ''.join(chunk.choices[0].delta.content or '' for chunk in chunks) == ANSWERS['ä?']
    assert chunks[-1].choices[0].finish_reason == 'stop'


def test_an_answer_may_be_sent_back_as_it_came(chat_api):
    first = ask(chat_api, 'hi').choices[0].message
    found = chat_api.chat.completions.create(model='tuned', max_tokens=3, messages=[
        {'role': 'user', 'content': [{'type': 'text', 'text': 'hi'}]}, first,
        {'role': 'user', 'content': 'hi'}])
    assert found.usage.completion_tokens <= 3
    assert found.usage.prompt_tokens == 1 + 4 + (len(ANSWERS['hi']) + 2) + 4 + 1


def test_the_oldest_turns_are_dropped_where_the_context_is_full(chat_api):
    def raw(*contents, **options):
        return chat_api.chat.completions.with_raw_response.create(
            model='tuned', temperature=0, **options, messages=[
                {'role': 'system', 'content': 'S'},
                *({'role': ('user', 'assistant')[i % 2], 'content': content}
                  for i, content in enumerate(contents))])

    long = 'x' * 20  # a turn has 22 + 3 tokens; 9 are around them
    kept, full = raw(*[long, 'y'] * 2, 'hi', max_tokens=5), raw(*[long, 'y'] * 6, 'hi')
    assert kept.headers['x-unseen'] == '0'
    assert full.headers['x-unseen'] == '8'
    assert full.parse().usage.prompt_tokens == 2 * 25 + 9
    with pytest.raises(openai.BadRequestError, match='at most 96'):
        raw('x' * 96)


def test_a_model_without_a_chat_template_says_so(api):
    with pytest.raises(openai.BadRequestError, match=r'not tuned.*/v1/completions'):
        api.chat.completions.create(model='out', messages=[{'role': 'user', 'content': 'Hi'}])


def test_a_completion_of_a_chat_model_ends_at_its_special_tokens(chat_api):
    text = chat_api.completions.create(model='tuned', prompt='hi', max_tokens=80).choices[0].text
    assert '<|' not in text


def test_mistakes_are_the_errors_of_openai(api):
    with pytest.raises(openai.NotFoundError, match="must be 'out'") as error:
        api.completions.create(model='gpt-9', prompt='a')
    assert (error.value.param, error.value.code) == ('model', 'model_not_found')
    with pytest.raises(openai.BadRequestError, match='temperature') as error:
        api.completions.create(model='out', prompt='a', temperature=-1)
    assert (error.value.param, error.value.type) == ('temperature', 'invalid_request_error')
    with pytest.raises(openai.BadRequestError, match='logprobs is not supported') as error:
        api.completions.create(model='out', prompt='a', logprobs=3)
    assert (error.value.param, error.value.code) == ('logprobs', 'unsupported_parameter')
